"""Every metric: a row with its name, its meaning and where its value is read.

Names that start with "vllm:" are vLLM 0.27's, with its meanings and buckets: the
offloading metrics of its `OffloadingConnector` and `CPUOffloadingSpec`, and the metrics
of its prefix caches. Metrics that vLLM does not have start with "jaxkv:". The samples
of a counter end in "_total", which Prometheus' clients add.

A row of a table is ``KIND NAME = PATH``, with the help text in the next lines. The kind
of a histogram names its buckets. Labels besides the engine's follow the name, as in
``NAME (reason)``; the value is then a mapping. The path leads from the table's source
to the value, by attributes and keys. A metric whose value is None is left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import (
    DELAY_BUCKETS,
    LOOKUP_BUCKETS,
    SIZE_BUCKETS,
    Histogram,
)
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.search.groups import FullAttention
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.transfer.storage.store import ERROR_KINDS

Value: TypeAlias = float | Mapping[str, float] | Histogram
"""A number, one for each value of the labels, or a histogram."""

Source = TypeVar("Source")


@dataclasses.dataclass(frozen=True)
class Family(Generic[Source]):
    """A metric."""

    name: str  # Without the "_total" of a counter.
    kind: Literal["counter", "gauge", "histogram"]
    text: str  # Its help text.
    read: Callable[[Source], Value | None]  # Returns None if there is no source.
    label: str = ""  # Labels besides the engine's; several are separated by spaces.
    buckets: tuple[float, ...] = ()  # The largest value of each bucket of a histogram.


class Readings:
    """The numbers of a scheduler, read once for all metrics."""

    def __init__(self, scheduler: OffloadScheduler) -> None:
        self.scheduler, rules = scheduler, scheduler.rules
        self.stats = stats = scheduler.stats
        self.now = now = scheduler.in_transit
        written, read = now.host_blocks_written, now.host_blocks_read
        self.share_written = written / scheduler.num_host_blocks
        self.share_read = read / scheduler.num_host_blocks
        self.share_held = (written + read) / scheduler.num_host_blocks
        self.in_flight = {"load": now.loads_in_flight, "store": now.stores_in_flight}
        self.policy = {scheduler.serving_policy or "unnamed": 1.0}
        # None for a rule that is off.
        self.waiting: dict[str, float] | None = None
        self.num_skipped: int | None = None
        if rules.max_blocks_in_flight is not None:
            self.waiting = {"load": now.loads_waiting, "store": now.stores_waiting}
        if rules.store_threshold > 1 or rules.max_unseen_blocks is not None:
            self.num_skipped = stats.num_skipped
        self.num_paused = stats.num_paused if rules.pause_unused_stores else None
        self.num_declined = stats.num_loads_declined if rules.skip_slow_loads else None

    @property
    def host_size(self) -> dict[str, float]:
        """The size of the host tier, by vLLM's labels; "None" for unknown values."""
        scheduler, rules = self.scheduler, self.scheduler.rules
        num_blocks, factor = scheduler.num_host_blocks, rules.blocks_per_host_block
        num_bytes = factor * rules.block_bytes or None
        num_tokens = None
        group = scheduler.groups[0]
        if scheduler.groups == (FullAttention(group.block_size),):
            num_tokens = num_blocks * factor * group.block_size
        return {f"{num_blocks} {factor} {num_bytes} {num_tokens}": 1.0}

    @property
    def dropped(self) -> dict[str, float]:
        """Blocks not stored on the host, by reason; lazy stores do not need room."""
        reasons = ["failed", "reset"]
        if self.scheduler.rules.mode == "eager":
            is_limited = self.scheduler.rules.max_blocks_in_flight is not None
            reasons = ["failed", "full", "reset", *["slow"] * is_limited]
        return {name: getattr(self.stats, f"num_dropped_{name}") for name in reasons}

    @property
    def dropped_writes(self) -> dict[str, float]:
        """Blocks not written to the store, by reason."""
        reasons, prefix = ("evicted", "failed", "reset", "slow"), "num_storage_dropped_"
        return {name: getattr(self.stats, prefix + name) for name in reasons}


def _store_errors(worker: OffloadWorker) -> dict[str, float] | None:
    """Return the failed calls of the store; usual errors are listed from the start."""
    if worker.storage is None:
        return None
    usual = itertools.product(("delete", "list", "read", "write"), ERROR_KINDS)
    counts = dict.fromkeys(map(" ".join, usual), 0.0)
    return counts | worker.storage.storage_io.stats.errors


_ROW = re.compile(r"(\w+) ([\w:]+)(?: \(([\w ]+)\))? = (\S+)\n(    .+)", re.DOTALL)
_BUCKETS = {"delays": DELAY_BUCKETS, "lookups": LOOKUP_BUCKETS, "sizes": SIZE_BUCKETS}


def _get(path: str, source: Any) -> Any:
    """Follow a path from a source; return None if there is no source."""
    for name in path.split("."):
        if source is None:
            return None
        source = source[name] if isinstance(source, dict) else getattr(source, name)
    return source


def _get_with_store(path: str, readings: Readings) -> Any:
    return _get(path, readings) if readings.scheduler.num_storage_blocks else None


def _get_of_shadows(path: str, readings: Readings) -> Any:
    """Return a number of each shadow tier; None without shadows."""
    return {
        f"{shadow.policy} {shadow.num_blocks}": _get(path, shadow)
        for shadow in readings.scheduler.shadow_counts
    } or None


def _families(
    table: str, get: Callable[[str, Source], Value | None] = _get
) -> Iterator[Family[Source]]:
    for row in re.split(r"\n(?! )", table.strip()):
        [(kind, name, labels, path, text)] = _ROW.findall(row)
        yield Family(
            name,
            "histogram" if kind in _BUCKETS else kind,
            " ".join(text.split()),
            partial(get, path),
            labels,
            _BUCKETS.get(kind, ()),
        )


OF_SCHEDULER: tuple[Family[Readings], ...] = (
    Family(
        "vllm:kv_offload_config_info",
        "gauge",
        "1, with the size of the host tier as labels.",
        lambda readings: readings.host_size,
        "cpu_num_chunks cpu_blocks_per_chunk cpu_kv_bytes_per_chunk "
        "cpu_capacity_tokens_at_max_len",
    ),
    *_families("""
counter vllm:prefix_cache_queries = stats.num_device_query_tokens
    Tokens of new requests that were looked up on the device.
counter vllm:prefix_cache_hits = stats.num_device_hit_tokens
    Tokens of new requests that were found on the device.
counter vllm:external_prefix_cache_queries = stats.num_host_query_tokens
    Tokens of new requests that were not in a prefix on the device.
counter vllm:external_prefix_cache_hits = stats.num_host_hit_tokens
    Of these, tokens loaded from the host.
lookups vllm:kv_offload_lookup_sync_delay_seconds = scheduler.delays.lookups
    Duration of a single lookup.
delays vllm:kv_offload_lookup_async_delay_seconds = scheduler.delays.deferrals
    From a deferred lookup until the next one with an answer, or the end of the request.
counter vllm:kv_offload_allocation_failure = stats.num_store_refusals
    Offers for whose blocks the host had no room.
counter vllm:kv_offload_stores_skipped = num_skipped
    Host blocks that were not stored because too few requests had asked for them.
counter jaxkv:kv_offload_blocks_declined = stats.num_declined
    Host blocks that the cache policy did not store, as the evicted ones are worth more.
counter jaxkv:kv_offload_blocks_without_head = stats.num_headless
    Host blocks of new requests that were useless, as an earlier block was evicted.
gauge jaxkv:kv_offload_stores_paused = scheduler.is_storing_paused
    1 while stores are paused because no stored block is used, else 0.
counter jaxkv:kv_offload_blocks_paused = num_paused
    Blocks that were not stored because no stored block was used.
gauge vllm:kv_offload_cpu_cache_usage_perc = share_held
    Share of the host blocks that transfers hold, from 0 to 1.
gauge vllm:kv_offload_cpu_cache_write_usage_perc = share_written
    Share of the host blocks that stores hold, from 0 to 1.
gauge vllm:kv_offload_cpu_cache_read_usage_perc = share_read
    Share of the host blocks that loads hold, from 0 to 1.
gauge jaxkv:kv_offload_host_blocks = scheduler.num_host_blocks
    Blocks of the host tier.
gauge jaxkv:kv_offload_host_blocks_held = scheduler.num_host_blocks_held
    Host blocks that hold a block, or will once their store arrives.
counter jaxkv:kv_offload_host_blocks_evicted = stats.num_evicted
    Host blocks that were evicted to make room for others.
counter jaxkv:kv_offload_blocks_offered = stats.num_offered
    Device blocks that were offered for storing.
counter jaxkv:kv_offload_blocks_stored = stats.num_stored
    Device blocks that were stored on the host.
counter jaxkv:kv_offload_blocks_dropped (reason) = dropped
    Device blocks that were offered and not stored on the host, by reason.
counter jaxkv:kv_offload_blocks_loaded = stats.num_loaded
    Device blocks that were loaded from the host.
gauge jaxkv:kv_offload_blocks_waiting (direction) = waiting
    Device blocks whose transfer waits because of max_blocks_in_flight.
gauge jaxkv:kv_offload_blocks_in_flight (direction) = in_flight
    Device blocks that transfers read or write now.
counter jaxkv:kv_offload_loads = stats.num_loads
    Loads that arrived, one per request.
counter jaxkv:kv_offload_load_failures = stats.num_loads_failed
    Loads that failed; the model computed the tokens instead.
counter jaxkv:kv_offload_loads_declined = num_declined
    Lookups whose load was declined because recomputing was estimated to be faster.
delays jaxkv:kv_offload_load_delay_seconds = scheduler.delays.loads
    From the lookup that offered a load until its arrival was reported.
gauge jaxkv:kv_offload_policy_info (policy) = policy
    Always 1; the label is the cache policy that serves.
counter jaxkv:kv_offload_requests_recorded = scheduler.recorder.stats.num_written
    Requests that were written to the trace.
counter jaxkv:kv_offload_requests_not_recorded = scheduler.recorder.stats.num_dropped
    Requests that the trace lacks because the disk was full or too slow.
"""),
    *_families(
        """
gauge jaxkv:kv_offload_storage_blocks = scheduler.num_storage_blocks
    Host blocks that the store behind the host may hold.
gauge jaxkv:kv_offload_storage_blocks_held = scheduler.num_storage_blocks_held
    Host blocks that the store is known to hold, writes in flight included.
gauge jaxkv:kv_offload_storage_blocks_left_out = scheduler.num_storage_blocks_left_out
    Host blocks in the store that this engine's index has no room for.
counter jaxkv:kv_offload_storage_blocks_evicted = stats.num_storage_evicted
    Host blocks deleted in the store to make room for others.
counter jaxkv:kv_offload_storage_blocks_written = stats.num_storage_stored
    Device blocks that were written to the store.
counter jaxkv:kv_offload_storage_blocks_dropped (reason) = dropped_writes
    Device blocks that were not written to the store, by reason.
counter jaxkv:kv_offload_storage_blocks_fetched = stats.num_storage_loaded
    Device blocks that were fetched from the store to the host.
counter jaxkv:kv_offload_storage_blocks_found = stats.num_storage_found
    Device blocks that the store had when it was probed.
counter jaxkv:kv_offload_storage_blocks_missed = stats.num_storage_failed
    Device blocks requested from the store that were missing, damaged or late.
counter jaxkv:kv_offload_storage_fetches_declined = stats.num_fetches_declined
    Lookups whose fetch was declined because recomputing was estimated to be faster.
""",
        _get_with_store,
    ),
    *_families(
        """
counter jaxkv:kv_offload_shadow_asked_tokens (policy host_blocks) = num_asked_tokens
    Tokens that requests looked up in each shadow tier, after the device's prefix.
counter jaxkv:kv_offload_shadow_found_tokens (policy host_blocks) = num_found_tokens
    Of these, tokens that a host tier of this policy and size would have found.
gauge jaxkv:kv_offload_shadow_error_tokens (policy host_blocks) = error_tokens
    Standard error of the tokens found so far, which are estimated from a sample.
counter jaxkv:kv_offload_shadow_blocks_stored (policy host_blocks) = num_stored
    Host blocks that this tier would have stored.
counter jaxkv:kv_offload_shadow_blocks_evicted (policy host_blocks) = num_evicted
    Host blocks that this tier would have evicted.
""",
        _get_of_shadows,
    ),
)

OF_WORKER: tuple[Family[OffloadWorker], ...] = (
    *_families("""
counter vllm:kv_offload_store_bytes = bytes_stored
    Bytes that were stored to the host.
counter vllm:kv_offload_load_bytes = bytes_loaded
    Bytes that were loaded from the host.
counter vllm:kv_offload_store_time = store_s
    Seconds that stores took, from start to report.
counter vllm:kv_offload_load_time = load_s
    Seconds that loads took, from start to report.
sizes vllm:kv_offload_store_size = store_sizes
    Bytes of all stores of a step.
sizes vllm:kv_offload_load_size = load_sizes
    Bytes of all loads of a step.
gauge jaxkv:kv_offload_transfers_in_flight (direction) = num_in_flight_by_direction
    Transfers that were started and are not reported yet.
gauge jaxkv:kv_offload_bytes_in_flight = bytes_in_flight
    Bytes that were issued and are not known to have arrived, in whole extents.
gauge jaxkv:kv_offload_host_bytes = host_bytes
    Bytes of host memory allocated for the tier.
counter jaxkv:kv_offload_storage_probes (outcome) = storage.num_probes
    Probes of the store for blocks of a prefix, by outcome.
counter jaxkv:kv_offload_storage_probe_requests = storage.storage_io.stats.num_probed
    Objects that these probes asked the store about.
gauge jaxkv:kv_offload_storage_up = storage.storage_io.is_up
    0 while any kind of call to the store fails or is late, else 1.
gauge jaxkv:kv_offload_storage_node_up (node) = storage.storage_io.node_states
    0 while a node of the store (or the store, if it has none) is down, else 1.
delays jaxkv:kv_offload_storage_read_seconds = storage.latencies.read
    How long the store took to answer each read of a block.
delays jaxkv:kv_offload_storage_write_seconds = storage.latencies.write
    How long the store took to answer each write of a block.
delays jaxkv:kv_offload_storage_probe_seconds = storage.latencies.probe
    How long the store took to answer each probe.
"""),
    Family(
        "jaxkv:kv_offload_storage_errors",
        "counter",
        "Failed calls to the store, by operation and reason.",
        _store_errors,
        "operation reason",
    ),
)

OF_POOL: tuple[Family[DeviceBlockPool], ...] = (
    Family(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the device blocks that requests or transfers hold, from 0 to 1.",
        lambda pool: 1 - pool.num_free / (pool.num_blocks - 1),
    ),
)

ALL: tuple[Family[Any], ...] = (*OF_SCHEDULER, *OF_WORKER, *OF_POOL)
