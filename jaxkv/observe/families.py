"""Every metric: its name, what it means, and where its value is read.

Names that start with "vllm:" are those of vLLM 0.27, and mean what they mean there:
the offloading metrics of its `OffloadingConnector` and `CPUOffloadingSpec` with their
buckets, and those of its prefix caches. What vLLM has no name for starts with "jaxkv:".
A counter's samples end in "_total", which Prometheus' clients add.

A metric is there only if something feeds it: `Family.read` gives None otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from jaxkv.blocks import DeviceBlockPool
from jaxkv.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import Histogram, InTransit, OffloadStats
from jaxkv.worker import OffloadWorker

Value: TypeAlias = float | Mapping[str, float] | Histogram
"""A number, one for each value of a label, or a histogram."""

Source = TypeVar("Source")


@dataclasses.dataclass(frozen=True)
class Family(Generic[Source]):
    """A metric.

    Attributes:
        name: Its name, a counter's without "_total".
        kind: What Prometheus calls its type.
        text: What it means.
        read: Takes its value from where it is kept; None if nothing feeds it there.
        label: The label that it has besides the engine's; empty for none.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    read: Callable[[Source], Value | None]
    label: str = ""


class Books(NamedTuple):
    """What a scheduler knows, read once for all metrics."""

    scheduler: OffloadScheduler
    stats: OffloadStats
    now: InTransit

    @staticmethod
    def of(scheduler: OffloadScheduler) -> Books:
        """Read a scheduler's numbers."""
        return Books(scheduler, scheduler.stats, scheduler.in_transit)

    def share(self, num_host_blocks: int) -> float:
        """Give host blocks as a share of all."""
        return num_host_blocks / self.scheduler.num_host_blocks

    def dropped(self) -> dict[str, float]:
        """Count the blocks that did not get to the host, by the reasons there can be.

        In lazy mode nobody waits for room, so that nothing is dropped for want of it.
        """
        rules, stats = self.scheduler.rules, self.stats
        reasons = {"failed": stats.num_dropped_failed, "reset": stats.num_dropped_reset}
        if rules.mode == "eager":
            reasons["full"] = stats.num_dropped_full
            if rules.max_blocks_in_flight is not None:
                reasons["slow"] = stats.num_dropped_slow
        return {reason: float(num) for reason, num in sorted(reasons.items())}

    def waiting(self) -> dict[str, float] | None:
        """Count the blocks that wait for room to leave, if there is a bound."""
        if self.scheduler.rules.max_blocks_in_flight is None:
            return None
        return {"load": self.now.loads_waiting, "store": self.now.stores_waiting}


OF_SCHEDULER: tuple[Family[Books], ...] = (
    Family(
        "vllm:prefix_cache_queries",
        "counter",
        "Tokens of new requests that were looked for on the device.",
        lambda books: books.stats.num_device_query_tokens,
    ),
    Family(
        "vllm:prefix_cache_hits",
        "counter",
        "Tokens of new requests that were found on the device.",
        lambda books: books.stats.num_device_hit_tokens,
    ),
    Family(
        "vllm:external_prefix_cache_queries",
        "counter",
        "Tokens of new requests that the device's own prefix did not have.",
        lambda books: books.stats.num_host_query_tokens,
    ),
    Family(
        "vllm:external_prefix_cache_hits",
        "counter",
        "Tokens of these that were loaded from the host, or copied on the device.",
        lambda books: books.stats.num_host_hit_tokens,
    ),
    Family(
        "vllm:kv_offload_lookup_sync_delay_seconds",
        "histogram",
        "How long a single look-up took.",
        lambda books: books.scheduler.delays.lookups,
    ),
    Family(
        "vllm:kv_offload_lookup_async_delay_seconds",
        "histogram",
        "From a look-up that was put off until one that gave an answer.",
        lambda books: books.scheduler.delays.deferrals,
    ),
    Family(
        "vllm:kv_offload_allocation_failure",
        "counter",
        "Times that the host had no room for the blocks of an offer.",
        lambda books: books.stats.num_store_refusals,
    ),
    Family(
        "vllm:kv_offload_stores_skipped",
        "counter",
        "Times that a host block was not stored as too few had asked for it.",
        lambda books: (
            books.stats.num_skipped
            if books.scheduler.rules.store_threshold > 1
            else None
        ),
    ),
    Family(
        "vllm:kv_offload_cpu_cache_usage_perc",
        "gauge",
        "Share of the host blocks that transfers hold, from 0 to 1.",
        lambda books: books.share(
            books.now.host_blocks_written + books.now.host_blocks_read
        ),
    ),
    Family(
        "vllm:kv_offload_cpu_cache_write_usage_perc",
        "gauge",
        "Share of the host blocks that stores hold, from 0 to 1.",
        lambda books: books.share(books.now.host_blocks_written),
    ),
    Family(
        "vllm:kv_offload_cpu_cache_read_usage_perc",
        "gauge",
        "Share of the host blocks that loads hold, from 0 to 1.",
        lambda books: books.share(books.now.host_blocks_read),
    ),
    Family(
        "jaxkv:kv_offload_host_blocks",
        "gauge",
        "Blocks of the host tier.",
        lambda books: books.scheduler.num_host_blocks,
    ),
    Family(
        "jaxkv:kv_offload_host_blocks_held",
        "gauge",
        "Host blocks that hold something, or will once a store arrives.",
        lambda books: books.scheduler.num_host_blocks_held,
    ),
    Family(
        "jaxkv:kv_offload_host_blocks_evicted",
        "counter",
        "Host blocks that were given up to make room for others.",
        lambda books: books.stats.num_evicted,
    ),
    Family(
        "jaxkv:kv_offload_blocks_offered",
        "counter",
        "Device blocks that were to be stored, whatever became of them.",
        lambda books: books.stats.num_offered,
    ),
    Family(
        "jaxkv:kv_offload_blocks_stored",
        "counter",
        "Device blocks that got to the host.",
        lambda books: books.stats.num_stored,
    ),
    Family(
        "jaxkv:kv_offload_blocks_dropped",
        "counter",
        "Device blocks that were to be stored and did not get to the host, by reason.",
        Books.dropped,
        "reason",
    ),
    Family(
        "jaxkv:kv_offload_blocks_loaded",
        "counter",
        "Device blocks that were filled from the host.",
        lambda books: books.stats.num_loaded,
    ),
    Family(
        "jaxkv:kv_offload_blocks_copied",
        "counter",
        "Device blocks that were copied from others on the device, in place of a load.",
        lambda books: books.stats.num_copied,
    ),
    Family(
        "jaxkv:kv_offload_blocks_waiting",
        "gauge",
        "Device blocks whose transfer waits until less is in flight.",
        Books.waiting,
        "direction",
    ),
    Family(
        "jaxkv:kv_offload_blocks_in_flight",
        "gauge",
        "Device blocks that stores read and loads write now.",
        lambda books: {
            "load": books.now.loads_in_flight,
            "store": books.now.stores_in_flight,
        },
        "direction",
    ),
    Family(
        "jaxkv:kv_offload_loads",
        "counter",
        "Loads that arrived, each for a request.",
        lambda books: books.stats.num_loads,
    ),
    Family(
        "jaxkv:kv_offload_load_failures",
        "counter",
        "Loads that failed; the model computed the tokens instead.",
        lambda books: books.stats.num_loads_failed,
    ),
    Family(
        "jaxkv:kv_offload_loads_declined",
        "counter",
        "Loads that would have taken longer than to compute the tokens.",
        lambda books: (
            books.stats.num_loads_declined if books.scheduler.rules.gate else None
        ),
    ),
    Family(
        "jaxkv:kv_offload_load_delay_seconds",
        "histogram",
        "From the look-up that offered a load until it was reported to have arrived.",
        lambda books: books.scheduler.delays.loads,
    ),
)

OF_WORKER: tuple[Family[OffloadWorker], ...] = (
    Family(
        "vllm:kv_offload_store_bytes",
        "counter",
        "Bytes that were stored to the host.",
        lambda worker: worker.bytes_stored,
    ),
    Family(
        "vllm:kv_offload_load_bytes",
        "counter",
        "Bytes that were loaded from the host.",
        lambda worker: worker.bytes_loaded,
    ),
    Family(
        "vllm:kv_offload_store_time",
        "counter",
        "Seconds that stores took, from the start to the report.",
        lambda worker: worker.store_s,
    ),
    Family(
        "vllm:kv_offload_load_time",
        "counter",
        "Seconds that loads took, from the start to the report.",
        lambda worker: worker.load_s,
    ),
    Family(
        "vllm:kv_offload_store_size",
        "histogram",
        "Bytes of a step's stores.",
        lambda worker: worker.store_sizes,
    ),
    Family(
        "vllm:kv_offload_load_size",
        "histogram",
        "Bytes of a step's loads.",
        lambda worker: worker.load_sizes,
    ),
    Family(
        "jaxkv:kv_offload_transfers_in_flight",
        "gauge",
        "Transfers that were started and not reported yet.",
        lambda worker: {
            str(direction): float(num)
            for direction, num in worker.num_in_flight_by_direction.items()
        },
        "direction",
    ),
    Family(
        "jaxkv:kv_offload_bytes_in_flight",
        "gauge",
        "Bytes that were issued and are not known to have arrived, in whole extents.",
        lambda worker: worker.bytes_in_flight,
    ),
    Family(
        "jaxkv:kv_offload_host_bytes",
        "gauge",
        "Bytes of host memory that were set aside.",
        lambda worker: worker.host_bytes,
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
