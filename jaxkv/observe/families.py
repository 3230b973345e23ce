"""Every metric: its name, its meaning, and how its value is read.

Names that start with "vllm:" are those of vLLM 0.27, with their meaning and buckets:
the offloading metrics of its `OffloadingConnector` and `CPUOffloadingSpec`, and those
of its prefix caches. Metrics that vLLM does not have start with "jaxkv:". The samples
of a counter end in "_total", which Prometheus' clients add.

A metric without a source is left out: `Family.read` returns None for it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import (
    DELAY_BUCKETS,
    LOOKUP_BUCKETS,
    SIZE_BUCKETS,
    Histogram,
    InTransit,
    OffloadStats,
)
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import FullAttention
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.transfer.storage.store import ERROR_KINDS

Value: TypeAlias = float | Mapping[str, float] | Histogram
"""A number, one for each value of a label, or a histogram."""

Source = TypeVar("Source")

Read: TypeAlias = Callable[[Source], Value | None]
"""Reads a value; gives None if it has no source."""


@dataclasses.dataclass(frozen=True)
class Family(Generic[Source]):
    """A metric.

    Attributes:
        name: Its name, without the "_total" of a counter.
        kind: Its Prometheus type.
        text: Its meaning.
        read: Reads its value; None if it has no source.
        label: Its label besides the engine's; empty for none. Several are separated by
            spaces, and so are their values.
        buckets: The largest value of each bucket of a histogram.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    read: Read[Source]
    label: str = ""
    buckets: tuple[float, ...] = ()


def counter(
    name: str, text: str, read: Read[Source], label: str = ""
) -> Family[Source]:
    """Declare what only grows."""
    return Family(name, "counter", text, read, label)


def gauge(name: str, text: str, read: Read[Source], label: str = "") -> Family[Source]:
    """Declare what rises and falls."""
    return Family(name, "gauge", text, read, label)


def histogram(
    name: str, text: str, read: Read[Source], buckets: tuple[float, ...]
) -> Family[Source]:
    """Declare how often a number was in each range."""
    return Family(name, "histogram", text, read, buckets=buckets)


class Readings(NamedTuple):
    """The numbers of a scheduler, read once for all metrics."""

    scheduler: OffloadScheduler
    stats: OffloadStats
    now: InTransit

    @staticmethod
    def of(scheduler: OffloadScheduler) -> Readings:
        """Read a scheduler's numbers."""
        return Readings(scheduler, scheduler.stats, scheduler.in_transit)

    def of_storage(self, number: int) -> int | None:
        """Give a number that there is only with a store."""
        return number if self.scheduler.num_storage_blocks else None

    def share(self, num_host_blocks: int) -> float:
        """Return host blocks as a share of all."""
        return num_host_blocks / self.scheduler.num_host_blocks

    def config_info(self) -> dict[str, float]:
        """Describe the host tier by vLLM's labels; "None" for what is not known."""
        scheduler, rules = self.scheduler, self.scheduler.rules
        factor = rules.blocks_per_host_block
        num_bytes = factor * rules.block_bytes or None
        num_tokens = None
        group, *others = scheduler.groups
        if isinstance(group, FullAttention) and not others:
            num_tokens = scheduler.num_host_blocks * factor * group.block_size
        facts = scheduler.num_host_blocks, factor, num_bytes, num_tokens
        return {" ".join(map(str, facts)): 1.0}

    def dropped(self) -> dict[str, float]:
        """Count the blocks that were not stored on the host, by drop reason.

        In lazy mode no store waits for room, so none is dropped for lack of it.
        """
        rules, stats = self.scheduler.rules, self.stats
        reasons = {"failed": stats.num_dropped_failed, "reset": stats.num_dropped_reset}
        if rules.mode == "eager":
            reasons["full"] = stats.num_dropped_full
            if rules.max_blocks_in_flight is not None:
                reasons["slow"] = stats.num_dropped_slow
        return {reason: float(num) for reason, num in sorted(reasons.items())}

    def dropped_writes(self) -> dict[str, float] | None:
        """Count the blocks that were not written to the store, by reason."""
        if not self.scheduler.num_storage_blocks:
            return None
        prefix = "num_storage_dropped_"
        return {
            reason: float(getattr(self.stats, prefix + reason))
            for reason in ("evicted", "failed", "reset", "slow")
        }

    def of_shadows(self, number: str) -> dict[str, float] | None:
        """Give a number of each shadow; None without shadows."""
        return {
            f"{own.policy} {own.num_blocks}": float(getattr(own, number))
            for own in self.scheduler.shadow_counts
        } or None

    def waiting(self) -> dict[str, float] | None:
        """Count the blocks that wait for less to be in flight."""
        if self.scheduler.rules.max_blocks_in_flight is None:
            return None
        return {"load": self.now.loads_waiting, "store": self.now.stores_waiting}


def _recorded(readings: Readings, name: str) -> float | None:
    """Return a number of the scheduler's recorder; None if it has none."""
    recorder = readings.scheduler.recorder
    return None if recorder is None else float(getattr(recorder.stats, name))


def _of_store(
    read: Callable[[StorageWorker], Value],
) -> Read[OffloadWorker]:
    """Read a number of the worker's store, if it has one."""
    return lambda worker: None if worker.storage is None else read(worker.storage)


def _errors_of(storage: StorageWorker) -> dict[str, float]:
    """Count what went wrong in a store; the usual errors are there from the start."""
    usual = itertools.product(("delete", "list", "read", "write"), ERROR_KINDS)
    counts = dict.fromkeys(map(" ".join, usual), 0.0)
    return counts | storage.storage_io.stats.errors


OF_SCHEDULER: tuple[Family[Readings], ...] = (
    counter(
        "vllm:prefix_cache_queries",
        "Tokens of new requests that were looked up on the device.",
        lambda readings: readings.stats.num_device_query_tokens,
    ),
    counter(
        "vllm:prefix_cache_hits",
        "Tokens of new requests that were found on the device.",
        lambda readings: readings.stats.num_device_hit_tokens,
    ),
    counter(
        "vllm:external_prefix_cache_queries",
        "Tokens of new requests that were not in a prefix on the device.",
        lambda readings: readings.stats.num_host_query_tokens,
    ),
    counter(
        "vllm:external_prefix_cache_hits",
        "Tokens of these that were loaded from the host, or copied on the device.",
        lambda readings: readings.stats.num_host_hit_tokens,
    ),
    histogram(
        "vllm:kv_offload_lookup_sync_delay_seconds",
        "Duration of a single lookup.",
        lambda readings: readings.scheduler.delays.lookups,
        LOOKUP_BUCKETS,
    ),
    histogram(
        "vllm:kv_offload_lookup_async_delay_seconds",
        "From a lookup that was deferred until one that gave an answer, or the end of "
        "the request.",
        lambda readings: readings.scheduler.delays.deferrals,
        DELAY_BUCKETS,
    ),
    counter(
        "vllm:kv_offload_allocation_failure",
        "Times that the host had no room for the blocks of an offer.",
        lambda readings: readings.stats.num_store_refusals,
    ),
    counter(
        "vllm:kv_offload_stores_skipped",
        "Times that a host block was not stored because too few had asked for it, or "
        "none for the tail of its prompt.",
        lambda readings: (
            readings.stats.num_skipped
            if readings.scheduler.rules.store_threshold > 1
            or readings.scheduler.rules.max_unseen_blocks is not None
            else None
        ),
    ),
    gauge(
        "jaxkv:kv_offload_stores_paused",
        "1 while stores are paused because nothing stored is asked for, else 0.",
        lambda readings: readings.scheduler.is_storing_paused,
    ),
    counter(
        "jaxkv:kv_offload_blocks_paused",
        "Blocks that were not stored because nothing stored was asked for.",
        lambda readings: (
            readings.stats.num_paused
            if readings.scheduler.rules.pause_unused_stores
            else None
        ),
    ),
    gauge(
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Share of the host blocks that transfers hold, from 0 to 1.",
        lambda readings: readings.share(
            readings.now.host_blocks_written + readings.now.host_blocks_read
        ),
    ),
    gauge(
        "vllm:kv_offload_cpu_cache_write_usage_perc",
        "Share of the host blocks that stores hold, from 0 to 1.",
        lambda readings: readings.share(readings.now.host_blocks_written),
    ),
    gauge(
        "vllm:kv_offload_cpu_cache_read_usage_perc",
        "Share of the host blocks that loads hold, from 0 to 1.",
        lambda readings: readings.share(readings.now.host_blocks_read),
    ),
    gauge(
        "vllm:kv_offload_config_info",
        "1, with the size of the host tier as labels.",
        Readings.config_info,
        label="cpu_num_chunks cpu_blocks_per_chunk cpu_kv_bytes_per_chunk "
        "cpu_capacity_tokens_at_max_len",
    ),
    gauge(
        "jaxkv:kv_offload_host_blocks",
        "Blocks of the host tier.",
        lambda readings: readings.scheduler.num_host_blocks,
    ),
    gauge(
        "jaxkv:kv_offload_host_blocks_held",
        "Host blocks that hold a block, or will once their store arrives.",
        lambda readings: readings.scheduler.num_host_blocks_held,
    ),
    counter(
        "jaxkv:kv_offload_host_blocks_evicted",
        "Host blocks that were evicted to make room for others.",
        lambda readings: readings.stats.num_evicted,
    ),
    counter(
        "jaxkv:kv_offload_blocks_offered",
        "Device blocks that were offered for storing.",
        lambda readings: readings.stats.num_offered,
    ),
    counter(
        "jaxkv:kv_offload_blocks_stored",
        "Device blocks that were stored on the host.",
        lambda readings: readings.stats.num_stored,
    ),
    counter(
        "jaxkv:kv_offload_blocks_dropped",
        "Device blocks that were offered and not stored on the host, by reason.",
        Readings.dropped,
        "reason",
    ),
    counter(
        "jaxkv:kv_offload_blocks_loaded",
        "Device blocks that were loaded from the host.",
        lambda readings: readings.stats.num_loaded,
    ),
    counter(
        "jaxkv:kv_offload_blocks_copied",
        "Device blocks that were copied on the device instead of loaded.",
        lambda readings: readings.stats.num_copied,
    ),
    gauge(
        "jaxkv:kv_offload_blocks_waiting",
        "Device blocks whose transfer waits for the bound in flight, or for others.",
        Readings.waiting,
        "direction",
    ),
    gauge(
        "jaxkv:kv_offload_blocks_in_flight",
        "Device blocks that stores read and loads write at present.",
        lambda readings: {
            "load": readings.now.loads_in_flight,
            "store": readings.now.stores_in_flight,
        },
        "direction",
    ),
    counter(
        "jaxkv:kv_offload_loads",
        "Loads that arrived, one per request.",
        lambda readings: readings.stats.num_loads,
    ),
    counter(
        "jaxkv:kv_offload_load_failures",
        "Loads that failed; the model computed the tokens instead.",
        lambda readings: readings.stats.num_loads_failed,
    ),
    counter(
        "jaxkv:kv_offload_loads_declined",
        "Lookups whose load was skipped, as computing was estimated to be faster.",
        lambda readings: (
            readings.stats.num_loads_declined
            if readings.scheduler.rules.skip_slow_loads
            else None
        ),
    ),
    gauge(
        "jaxkv:kv_offload_storage_blocks",
        "Host blocks that the store behind the host may hold.",
        lambda readings: readings.of_storage(readings.scheduler.num_storage_blocks),
    ),
    gauge(
        "jaxkv:kv_offload_storage_blocks_held",
        "Host blocks that the store holds as far as known, or will when written.",
        lambda readings: readings.of_storage(
            readings.scheduler.num_storage_blocks_held
        ),
    ),
    gauge(
        "jaxkv:kv_offload_storage_blocks_left_out",
        "Host blocks in the store that this engine's index has no room for.",
        lambda readings: readings.of_storage(
            readings.scheduler.num_storage_blocks_left_out
        ),
    ),
    counter(
        "jaxkv:kv_offload_storage_blocks_evicted",
        "Host blocks deleted in the store to make room for others.",
        lambda readings: readings.of_storage(readings.stats.num_storage_evicted),
    ),
    counter(
        "jaxkv:kv_offload_storage_blocks_written",
        "Device blocks that were written to the store.",
        lambda readings: readings.of_storage(readings.stats.num_storage_stored),
    ),
    counter(
        "jaxkv:kv_offload_storage_blocks_dropped",
        "Device blocks that should have gone to the store and did not, by reason.",
        Readings.dropped_writes,
        "reason",
    ),
    counter(
        "jaxkv:kv_offload_storage_blocks_fetched",
        "Device blocks that came from the store to the host.",
        lambda readings: readings.of_storage(readings.stats.num_storage_loaded),
    ),
    counter(
        "jaxkv:kv_offload_storage_blocks_found",
        "Device blocks that the store turned out to have when it was asked.",
        lambda readings: readings.of_storage(readings.stats.num_storage_found),
    ),
    counter(
        "jaxkv:kv_offload_storage_blocks_missed",
        "Device blocks asked of the store that were gone, damaged or late.",
        lambda readings: readings.of_storage(readings.stats.num_storage_failed),
    ),
    counter(
        "jaxkv:kv_offload_storage_fetches_declined",
        "Lookups whose fetch was skipped, as computing was estimated to be faster.",
        lambda readings: readings.of_storage(readings.stats.num_fetches_declined),
    ),
    histogram(
        "jaxkv:kv_offload_load_delay_seconds",
        "From the lookup that offered a load until its arrival was reported.",
        lambda readings: readings.scheduler.delays.loads,
        DELAY_BUCKETS,
    ),
    gauge(
        "jaxkv:kv_offload_policy_info",
        "Always 1; the label is the cache policy that serves.",
        lambda readings: {readings.scheduler.serving_policy or "unnamed": 1.0},
        "policy",
    ),
    counter(
        "jaxkv:kv_offload_policy_changes",
        "Times that the policy auto has put another policy in place.",
        lambda readings: readings.scheduler.num_policy_changes or 0,
    ),
    counter(
        "jaxkv:kv_offload_shadow_asked_tokens",
        "Tokens that each shadow of the host was asked for beyond the device's prefix.",
        lambda readings: readings.of_shadows("num_asked_tokens"),
        "policy host_blocks",
    ),
    counter(
        "jaxkv:kv_offload_shadow_found_tokens",
        "Tokens of these that a host tier of this policy and size would have found.",
        lambda readings: readings.of_shadows("num_found_tokens"),
        "policy host_blocks",
    ),
    gauge(
        "jaxkv:kv_offload_shadow_error_tokens",
        "Standard error of the tokens found so far, as they are those of a sample.",
        lambda readings: readings.of_shadows("error_tokens"),
        "policy host_blocks",
    ),
    counter(
        "jaxkv:kv_offload_shadow_blocks_stored",
        "Host blocks that such a tier would have stored.",
        lambda readings: readings.of_shadows("num_stored"),
        "policy host_blocks",
    ),
    counter(
        "jaxkv:kv_offload_shadow_blocks_evicted",
        "Host blocks that such a tier would have evicted.",
        lambda readings: readings.of_shadows("num_evicted"),
        "policy host_blocks",
    ),
    counter(
        "jaxkv:kv_offload_requests_recorded",
        "Requests that were written to the trace.",
        lambda readings: _recorded(readings, "num_written"),
    ),
    counter(
        "jaxkv:kv_offload_requests_not_recorded",
        "Requests that the trace lacks, as the disk was full or too slow.",
        lambda readings: _recorded(readings, "num_dropped"),
    ),
)

OF_WORKER: tuple[Family[OffloadWorker], ...] = (
    counter(
        "vllm:kv_offload_store_bytes",
        "Bytes that were stored to the host.",
        lambda worker: worker.bytes_stored,
    ),
    counter(
        "vllm:kv_offload_load_bytes",
        "Bytes that were loaded from the host.",
        lambda worker: worker.bytes_loaded,
    ),
    counter(
        "vllm:kv_offload_store_time",
        "Seconds that stores took, from start to report.",
        lambda worker: worker.store_s,
    ),
    counter(
        "vllm:kv_offload_load_time",
        "Seconds that loads took, from start to report.",
        lambda worker: worker.load_s,
    ),
    histogram(
        "vllm:kv_offload_store_size",
        "Bytes of the stores of a step.",
        lambda worker: worker.store_sizes,
        SIZE_BUCKETS,
    ),
    histogram(
        "vllm:kv_offload_load_size",
        "Bytes of the loads of a step.",
        lambda worker: worker.load_sizes,
        SIZE_BUCKETS,
    ),
    gauge(
        "jaxkv:kv_offload_transfers_in_flight",
        "Transfers that were started and not reported yet.",
        lambda worker: {
            direction: float(num)
            for direction, num in worker.num_in_flight_by_direction.items()
        },
        "direction",
    ),
    gauge(
        "jaxkv:kv_offload_bytes_in_flight",
        "Bytes that were issued and are not known to have arrived, in whole extents.",
        lambda worker: worker.bytes_in_flight,
    ),
    gauge(
        "jaxkv:kv_offload_host_bytes",
        "Bytes of host memory allocated for the tier.",
        lambda worker: worker.host_bytes,
    ),
    counter(
        "jaxkv:kv_offload_storage_probes",
        "Times that the store was asked for blocks of a prefix, by what it answered.",
        _of_store(lambda storage: dict(storage.num_probes)),
        "outcome",
    ),
    counter(
        "jaxkv:kv_offload_storage_probe_requests",
        "Requests to the store for that: objects that it was asked about.",
        _of_store(lambda storage: storage.storage_io.stats.num_probed),
    ),
    gauge(
        "jaxkv:kv_offload_storage_up",
        "1 if the store answered when it was last asked for anything, else 0.",
        _of_store(lambda storage: float(storage.storage_io.is_up)),
    ),
    counter(
        "jaxkv:kv_offload_storage_errors",
        "Calls of the store that failed, by what was asked for and why.",
        _of_store(_errors_of),
        "operation reason",
    ),
    histogram(
        "jaxkv:kv_offload_storage_read_seconds",
        "How long the store took to answer each read of a block.",
        _of_store(lambda storage: storage.latencies["read"]),
        DELAY_BUCKETS,
    ),
    histogram(
        "jaxkv:kv_offload_storage_write_seconds",
        "How long the store took to answer each write of a block.",
        _of_store(lambda storage: storage.latencies["write"]),
        DELAY_BUCKETS,
    ),
    histogram(
        "jaxkv:kv_offload_storage_probe_seconds",
        "How long the store took to say what it has of each run of blocks.",
        _of_store(lambda storage: storage.latencies["probe"]),
        DELAY_BUCKETS,
    ),
)

OF_POOL: tuple[Family[DeviceBlockPool], ...] = (
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the device blocks that requests or transfers hold, from 0 to 1.",
        lambda pool: 1 - pool.num_free / (pool.num_blocks - 1),
    ),
)

ALL: tuple[Family[Any], ...] = (*OF_SCHEDULER, *OF_WORKER, *OF_POOL)
