"""jaxkv's metrics as a vLLM connector reports them, for vLLM's log and ``/metrics``.

Names, units and buckets are as in `jaxkv.observe.metrics`, without the metrics that
vLLM serves itself. Each half of the connector reports its changes about once a second;
vLLM adds both up and sends the sum to the process that serves metrics.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jaxkv.integrations.vllm.installed import find_name
from jaxkv.observe.families import OF_SCHEDULER, OF_WORKER, Family, Readings
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import Histogram
from jaxkv.scheduling.worker.worker import OffloadWorker

_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

# vLLM counts what its scheduler sees of both caches, under these names.
_OF_VLLM = {"vllm:prefix_cache_queries", "vllm:prefix_cache_hits"}
_OF_VLLM |= {"vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits"}
_ALL: tuple[Family[Any], ...] = (*OF_SCHEDULER, *OF_WORKER)
FAMILIES = {family.name: family for family in _ALL if family.name not in _OF_VLLM}
"""The metrics that the connector adds to vLLM's, by name."""

REPORT_EVERY_S = 1.0
"""Seconds between two reports of a half, while the model runs.

vLLM asks in each step. Reading all metrics takes longer than the rest of a step without
transfers, and vLLM must send each report to another process. But vLLM logs every ten
seconds, and nothing scrapes metrics more often than once a second.
"""

# The figures of vLLM's log line.
_ALWAYS_LOGGED = {
    "stored MiB": "vllm:kv_offload_store_bytes",
    "loaded MiB": "vllm:kv_offload_load_bytes",
    "blocks stored": "jaxkv:kv_offload_blocks_stored",
    "blocks loaded": "jaxkv:kv_offload_blocks_loaded",
    "host blocks evicted": "jaxkv:kv_offload_host_blocks_evicted",
    "blocks dropped": "jaxkv:kv_offload_blocks_dropped",
    "failed loads": "jaxkv:kv_offload_load_failures",
}
_LOGGED = {
    **_ALWAYS_LOGGED,
    "blocks written to storage": "jaxkv:kv_offload_storage_blocks_written",
    "blocks from storage": "jaxkv:kv_offload_storage_blocks_fetched",
    "host blocks held": "jaxkv:kv_offload_host_blocks_held",
    "host blocks": "jaxkv:kv_offload_host_blocks",
}

_COUNTERS, _GAUGES, _SAMPLES = "counters", "gauges", "samples"


def _joined(name: str, values: Collection[float]) -> float:
    """Join the values that a gauge has on several hosts or ranks."""
    if name.endswith("_up"):
        return min(values)
    if name == "jaxkv:kv_offload_stores_paused" or name.endswith("_info"):
        return max(values)
    if name.endswith("_perc"):
        return statistics.fmean(values)
    return sum(values)


class OffloadConnectorStats(find_name(_METRICS, "KVConnectorStats") or object):  # type: ignore[misc]
    """The changes since the last report; vLLM's ``KVConnectorStats``.

    `data` has counters and gauges by name and label ("" without one), gauges also by
    host or rank ("" for a single scheduler), and the samples of histograms by name. It
    has plain types, as it is sent between processes.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        if not data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {_COUNTERS: {}, _GAUGES: {}, _SAMPLES: {}}

    def to_dict(self) -> dict[str, Any]:
        """Return the data, to be sent between processes."""
        return self.data

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: OffloadConnectorStats) -> OffloadConnectorStats:
        """Add a later report, one of the other half, or one of another host."""
        for name, values in other.data[_COUNTERS].items():
            sums = self.data[_COUNTERS].setdefault(name, {})
            for label, value in values.items():
                sums[label] = sums.get(label, 0) + value
        for name, by_label in other.data[_GAUGES].items():
            gauge = self.data[_GAUGES].setdefault(name, {})
            for label, by_part in by_label.items():
                gauge.setdefault(label, {}).update(by_part)
        for name, samples in other.data[_SAMPLES].items():
            self.data[_SAMPLES].setdefault(name, []).extend(samples)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for vLLM's log since its last line."""
        counters, gauges = self.data[_COUNTERS], self.data[_GAUGES]
        line: dict[str, int | float] = {}
        for title, name in _LOGGED.items():
            if name in gauges:
                line[title] = int(_joined(name, gauges[name][""].values()))
            elif name in counters or title in _ALWAYS_LOGGED:
                count = sum(counters.get(name, {}).values())
                is_bytes = title.endswith("MiB")
                line[title] = round(count / 2**20, 1) if is_bytes else int(count)
        return line


class StatsReader:
    """Reads which metrics of a half changed since the last report."""

    def __init__(
        self,
        source: OffloadScheduler | OffloadWorker,
        host: int | None = None,  # Number of a worker's host.
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._part = "" if host is None else str(host)
        self._clock = clock
        self._due_s = -math.inf
        families = OF_WORKER if isinstance(source, OffloadWorker) else OF_SCHEDULER
        self._families: list[Family[Any]] = [
            family for family in families if family.name in FAMILIES
        ]
        # Metrics without a source never get one.
        self._families = [family for family, _ in self._read()]
        self._last: dict[tuple[str, str], float] = {}
        for _, value in self._read():
            if isinstance(value, Histogram):
                value.keep_samples()

    def take(self, *, is_last: bool = False) -> OffloadConnectorStats | None:
        """Return the changes since the last report; None without changes.

        Also None if the last report was less than `REPORT_EVERY_S` ago, unless the
        engine may stop stepping (`is_last`).
        """
        now_s = self._clock()
        if now_s < self._due_s and not is_last:
            return None
        self._due_s = now_s + REPORT_EVERY_S
        stats = OffloadConnectorStats()
        for family, value in self._read():
            if isinstance(value, Histogram):
                samples = value.take_samples()
                if samples:
                    stats.data[_SAMPLES][family.name] = samples
                continue
            values = value if isinstance(value, dict) else {"": value}
            for label, number in values.items():
                key = family.name, label
                last = self._last.get(key)
                if number == last:
                    continue
                self._last[key] = number
                kind, reported = _GAUGES, {self._part: number}
                if family.kind == "counter":
                    kind, reported = _COUNTERS, number - (last or 0)
                stats.data[kind].setdefault(family.name, {})[label] = reported
        return None if stats.is_empty() else stats

    def _read(self) -> Iterable[tuple[Family[Any], Any]]:
        source: Any = self._source
        if isinstance(source, OffloadScheduler):
            source = Readings(source)
        for family in self._families:
            value = family.read(source)
            if value is not None:
                yield family, value


class OffloadPromMetrics(find_name(_METRICS, "KVConnectorPromMetrics") or object):  # type: ignore[misc]
    """The metrics in vLLM's registry; vLLM's ``KVConnectorPromMetrics``."""

    # vLLM unregisters only its own metrics of an earlier engine in the process.
    _registered: list[Any] = []  # noqa: RUF012

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        from prometheus_client import REGISTRY

        for metric in self._registered:
            with contextlib.suppress(KeyError):
                REGISTRY.unregister(metric)
        self._registered.clear()
        self._metrics: dict[str, Any] = {}
        # The last values of gauges on all hosts or ranks, by engine, name and label.
        self._parts: defaultdict[tuple[int, str, str], dict[str, float]]
        self._parts = defaultdict(dict)
        for name, family in FAMILIES.items():
            options: dict[str, Any] = {}
            if family.kind == "gauge":
                options["multiprocess_mode"] = "mostrecent"
            elif family.kind == "histogram":
                options["buckets"] = family.buckets
            # vLLM's base class has `_counter_cls` and the like.
            self._metrics[name] = getattr(self, f"_{family.kind}_cls")(
                name=name,
                documentation=family.text,
                labelnames=labelnames + family.label.split(),
                **options,
            )
            self._registered.append(self._metrics[name])
            # Counters begin with 0. A gauge of 0 would have a meaning, such as that a
            # store is down.
            if not family.label and family.kind != "gauge":
                for values in per_engine_labelvalues.values():
                    self._metrics[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report, from `OffloadConnectorStats.to_dict`."""
        data = transfer_stats_data
        for name, values in data[_COUNTERS].items():
            for label, value in values.items():
                self._of(name, label, engine_idx).inc(value)
        for name, by_label in data[_GAUGES].items():
            for label, by_part in by_label.items():
                last_values = self._parts[engine_idx, name, label]
                last_values.update(by_part)
                joined = _joined(name, last_values.values())
                self._of(name, label, engine_idx).set(joined)
        for name, samples in data[_SAMPLES].items():
            metric = self._of(name, "", engine_idx)
            for sample in samples:
                metric.observe(sample)

    def _of(self, name: str, label: str, engine_idx: int) -> Any:
        values = [*self.per_engine_labelvalues[engine_idx], *label.split()]
        return self._metrics[name].labels(*values)
