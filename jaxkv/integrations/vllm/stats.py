"""jaxkv's metrics as a vLLM connector reports them, for vLLM's log and ``/metrics``.

Names, units and buckets are as in `jaxkv.observe.metrics`, without the metrics that
vLLM serves itself. Each half of the connector reports its changes about once a second;
vLLM adds both up and sends the sum to the process that serves metrics.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from jaxkv.observe.families import OF_SCHEDULER, OF_WORKER, Family, Readings
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import Histogram
from jaxkv.scheduling.worker.worker import OffloadWorker


def _base(name: str) -> Any:
    """Return a class of vLLM; object without vLLM, or if this version has none."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found]
            metrics,
        )
    except ImportError:
        return object
    return getattr(metrics, name, object)


# vLLM counts what its scheduler sees of both caches, under these names.
_OF_VLLM = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
)
_ALL: tuple[Family[Any], ...] = (*OF_SCHEDULER, *OF_WORKER)
FAMILIES = {family.name: family for family in _ALL if family.name not in _OF_VLLM}
"""The metrics that the connector adds to vLLM's, by name."""

REPORT_EVERY_S = 1.0
"""Seconds between two reports of a half, while the model runs.

vLLM asks in each step. Reading all metrics takes longer than the rest of a step without
transfers, and vLLM must send each report to another process. But vLLM logs every ten
seconds, and nothing scrapes metrics more often than once a second.
"""

_COUNTERS, _GAUGES, _SAMPLES = "counters", "gauges", "samples"
# The gauges of workers, also by host: /metrics has the sum of all hosts.
_HOST_GAUGES = "host_gauges"
# Except these, where one failing host matters: /metrics has the lowest value.
_LOWEST = {"jaxkv:kv_offload_storage_up"}


class OffloadConnectorStats(_base("KVConnectorStats")):  # type: ignore[misc]
    """The changes since the last report; vLLM's ``KVConnectorStats``.

    `data` has counters, gauges and the samples of histograms, each by name and by the
    value of the metric's label, "" for none; gauges of workers also by host. It has
    plain types, as it is sent between processes.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data or {}
        if not data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {_COUNTERS: {}, _GAUGES: {}, _HOST_GAUGES: {}, _SAMPLES: {}}

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
        for name, values in other.data[_GAUGES].items():
            self.data[_GAUGES].setdefault(name, {}).update(values)
        of_hosts = self.data.setdefault(_HOST_GAUGES, {})
        for name, by_label in other.data.get(_HOST_GAUGES, {}).items():
            for label, values in by_label.items():
                of_hosts.setdefault(name, {}).setdefault(label, {}).update(values)
        for name, samples in other.data[_SAMPLES].items():
            self.data[_SAMPLES].setdefault(name, []).extend(samples)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for vLLM's log since its last line."""
        counters, gauges = self.data[_COUNTERS], self.data[_GAUGES]

        def count(name: str) -> float:
            return float(sum(counters.get(name, {}).values()))

        line: dict[str, int | float] = {}
        for title, name in (
            ("stored MiB", "vllm:kv_offload_store_bytes"),
            ("loaded MiB", "vllm:kv_offload_load_bytes"),
        ):
            line[title] = round(count(name) / 2**20, 1)
        for title, name in (
            ("blocks stored", "jaxkv:kv_offload_blocks_stored"),
            ("blocks loaded", "jaxkv:kv_offload_blocks_loaded"),
            ("host blocks evicted", "jaxkv:kv_offload_host_blocks_evicted"),
            ("blocks dropped", "jaxkv:kv_offload_blocks_dropped"),
            ("failed loads", "jaxkv:kv_offload_load_failures"),
            ("blocks written to storage", "jaxkv:kv_offload_storage_blocks_written"),
            ("blocks from storage", "jaxkv:kv_offload_storage_blocks_fetched"),
        ):
            if name in counters or "storage" not in name:
                line[title] = int(count(name))
        for title, name in (
            ("host blocks held", "jaxkv:kv_offload_host_blocks_held"),
            ("host blocks", "jaxkv:kv_offload_host_blocks"),
        ):
            if name in gauges:
                line[title] = int(gauges[name][""])
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
        self._host = host
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
                kind, reported = _GAUGES, number
                if family.kind == "counter":
                    kind, reported = _COUNTERS, number - (last or 0)
                elif self._host is not None:
                    kind, reported = _HOST_GAUGES, {str(self._host): number}
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


class OffloadPromMetrics(_base("KVConnectorPromMetrics")):  # type: ignore[misc]
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
        # The last values of workers' gauges, by engine, name, label and host.
        self._host_values: defaultdict[tuple[int, str, str], dict[str, float]]
        self._host_values = defaultdict(dict)
        classes = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        for name, family in FAMILIES.items():
            options: dict[str, Any] = {}
            if family.kind == "gauge":
                options["multiprocess_mode"] = "mostrecent"
            elif family.kind == "histogram":
                options["buckets"] = family.buckets
            self._metrics[name] = classes[family.kind](
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
        for name, values in data.get(_COUNTERS, {}).items():
            for label, value in values.items():
                self._of(name, label, engine_idx).inc(value)
        for name, values in data.get(_GAUGES, {}).items():
            for label, value in values.items():
                self._of(name, label, engine_idx).set(value)
        for name, by_label in data.get(_HOST_GAUGES, {}).items():
            for label, values in by_label.items():
                by_host = self._host_values[engine_idx, name, label]
                by_host.update(values)
                join = min if name in _LOWEST else sum
                self._of(name, label, engine_idx).set(join(by_host.values()))
        for name, samples in data.get(_SAMPLES, {}).items():
            metric = self._of(name, "", engine_idx)
            for sample in samples:
                metric.observe(sample)

    def _of(self, name: str, label: str, engine_idx: int) -> Any:
        values = [*self.per_engine_labelvalues[engine_idx], *label.split()]
        return self._metrics[name].labels(*values)
