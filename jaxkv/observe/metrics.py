"""Metrics for Prometheus, under vLLM's names where it has them.

    metrics = OffloadMetrics(scheduler, worker, pool)
    metrics.serve(9400)  # or serve the registry as you already do

Nothing listens until `serve` is called, and the engine's steps do no extra work: a
scrape reads plain numbers. docs/metrics.md explains each metric.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIServer

from jaxkv._util import check_type, shown
from jaxkv._util.extras import pip_install
from jaxkv.observe.families import (
    ALL,
    OF_POOL,
    OF_SCHEDULER,
    OF_WORKER,
    Family,
    Readings,
    Value,
)
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import Histogram
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.tiers.device import DeviceBlockPool

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Metric, start_http_server
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError(
        "jaxkv.observe.metrics needs prometheus_client, which is not installed: "
        f"{pip_install('metrics')}"
    ) from error

Source = TypeVar("Source")

_MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def registry_to_serve() -> CollectorRegistry | None:
    """Return a registry that `OffloadMetrics.serve` can serve; None for the default."""
    return CollectorRegistry() if os.environ.get(_MULTIPROC) else None


class OffloadMetrics:
    """The metrics of one engine, in a registry of prometheus_client.

    Engines that share a registry need different labels. Any thread may read the
    metrics; a scrape during a step may mix numbers from before and after it.

    Args:
        scheduler: The scheduler; None if another process has it.
        worker: The worker; None if another process has it.
        pool: The device tier, for its usage; None to leave that metric out.
        registry: The registry to join; None for prometheus_client's default, which
            metrics servers in this process serve by default.
        labels: Labels of all its metrics, by default ``{"engine": "0"}`` as in vLLM.

    Raises:
        ValueError: If there is neither a scheduler nor a worker, a label is not
            allowed, another engine has the same labels, the registry already has a
            metric with one of the names, or it is the default one and
            PROMETHEUS_MULTIPROC_DIR is set.

    Example:
        >>> from prometheus_client import CollectorRegistry
        >>> from jaxkv import OffloadScheduler
        >>> registry = CollectorRegistry()
        >>> scheduler = OffloadScheduler(16, num_host_blocks=64)
        >>> metrics = OffloadMetrics(scheduler, registry=registry)
        >>> registry.get_sample_value("jaxkv:kv_offload_host_blocks", {"engine": "0"})
        64.0
        >>> metrics.close()
    """

    def __init__(
        self,
        scheduler: OffloadScheduler | None = None,
        worker: OffloadWorker | None = None,
        pool: DeviceBlockPool | None = None,
        registry: CollectorRegistry | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        if scheduler is None and worker is None:
            raise ValueError(
                "there is nothing to measure: pass the scheduler, the worker, or both."
            )
        check_type(Mapping | None, "a mapping of texts", labels=labels)
        self.labels = {"engine": "0"} if labels is None else dict(labels)
        reserved = {name for family in ALL for name in family.label.split()} | {"le"}
        for name, value in self.labels.items():
            is_name = isinstance(name, str) and _LABEL.fullmatch(name)
            if name in reserved or not is_name:
                raise ValueError(
                    f"label {name!r} must be of letters, digits and underscores, not "
                    f"begin with a digit or two underscores, and be none of the "
                    f"metrics' own, {sorted(reserved)}."
                )
            if not _is_text(value):
                # It would fail every scrape of the whole registry.
                raise ValueError(
                    f"label {name}={shown(value)} must be a text of valid Unicode, "
                    f'such as "{name}": "0".'
                )
        if registry is None and os.environ.get(_MULTIPROC):
            raise ValueError(
                f"{_MULTIPROC} is set: metrics servers then read its files instead of "
                "the default registry, so these metrics would be missing. Pass "
                "registry=CollectorRegistry() and call serve(), or unset it."
            )
        self._scheduler = scheduler
        self._worker = worker
        self._pool = pool
        self._registry = registry or REGISTRY
        self._is_closed = False
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        _Engines.add(self._registry, self)

    def collect(self) -> Iterator[Metric]:
        """Read all metrics that have a source."""
        if self._scheduler is not None:
            yield from self._read(OF_SCHEDULER, Readings(self._scheduler))
        if self._worker is not None:
            yield from self._read(OF_WORKER, self._worker)
        if self._pool is not None:
            yield from self._read(OF_POOL, self._pool)

    def serve(self, port: int, addr: str = "127.0.0.1") -> int:
        """Serve the registry's metrics over HTTP, in a thread, until `close`.

        The format is always Prometheus' plain text.

        Args:
            port: The port to listen on; 0 for any free port.
            addr: The address to listen on; by default loopback.

        Returns:
            The port.

        Raises:
            ValueError: If `port` is out of range.
            OSError: If the address cannot be bound.
            RuntimeError: If it is already serving, or was closed.
        """
        if self._is_closed:
            raise RuntimeError("The metrics are closed, and in no registry any more.")
        if self._server is not None:
            raise RuntimeError(
                f"already serving at port {self._server.server_port}; close() first."
            )
        if not 0 <= port < 1 << 16:
            raise ValueError(f"port={shown(port)} must be in [0, 65536).")
        try:
            self._server, self._thread = start_http_server(
                port, addr, registry=self._registry
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot serve metrics at {addr}:{port} ({error.strerror}); give "
                "another address or port, or port 0 for any that is free",
            ) from error
        self._server.set_app(_in_plain_text(self._server.get_app()))
        return self._server.server_port

    def close(self) -> None:
        """Stop serving, and remove the metrics from the registry."""
        self._is_closed = True
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
        _Engines.remove(self._registry, self)

    def format_line(self) -> str:
        """Summarise the numbers so far in one line, for a log."""
        phrases = []
        if self._worker is not None:
            phrases += [
                f"stored {self._worker.bytes_stored / 2**20:.1f} MiB",
                f"loaded {self._worker.bytes_loaded / 2**20:.1f} MiB",
            ]
        if self._scheduler is not None:
            readings = Readings(self._scheduler)
            stats = readings.stats
            for tier, hits, queries in (
                ("device", stats.num_device_hit_tokens, stats.num_device_query_tokens),
                ("host", stats.num_host_hit_tokens, stats.num_host_query_tokens),
            ):
                share = f" ({hits / queries:.1%})" if queries else ""
                phrases.append(f"{tier} hits {hits} of {queries} tokens{share}")
            held = self._scheduler.num_host_blocks_held
            phrases += [
                f"host blocks {held} of {self._scheduler.num_host_blocks}",
                f"evicted {stats.num_evicted}",
                f"dropped {sum(readings.dropped.values()):.0f}",
            ]
        return "KV offload: " + ", ".join(phrases)

    def _read(
        self, families: tuple[Family[Source], ...], source: Source
    ) -> Iterator[Metric]:
        for family in families:
            value = family.read(source)
            if value is not None:
                metric = Metric(family.name, family.text, family.kind)
                for suffix, labels, number in _samples(family, value):
                    name = family.name + suffix
                    metric.add_sample(name, {**self.labels, **labels}, float(number))
                yield metric


class _Engines(Collector):
    """The engines of a registry: each metric once, with the samples of every engine."""

    _of_registry: ClassVar[WeakKeyDictionary[CollectorRegistry, _Engines]] = (
        WeakKeyDictionary()
    )
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.metrics: tuple[OffloadMetrics, ...] = ()

    @classmethod
    def add(cls, registry: CollectorRegistry, metrics: OffloadMetrics) -> None:
        """Add an engine's metrics to a registry."""
        with cls._lock:
            engines = cls._of_registry.get(registry)
            if engines is None:
                engines = cls()
                try:
                    registry.register(engines)
                except ValueError as error:
                    raise ValueError(
                        f"the registry already has metrics with these names ({error}); "
                        "give another registry, such as CollectorRegistry()."
                    ) from error
                cls._of_registry[registry] = engines
            if any(engine.labels == metrics.labels for engine in engines.metrics):
                raise ValueError(
                    f"labels={metrics.labels} must differ from those of the other "
                    'engines in the registry: say, {"engine": "1"}.'
                )
            engines.metrics += (metrics,)

    @classmethod
    def remove(cls, registry: CollectorRegistry, metrics: OffloadMetrics) -> None:
        """Remove an engine's metrics, if they are there."""
        with cls._lock:
            engines = cls._of_registry.get(registry)
            if engines is None or metrics not in engines.metrics:
                return
            engines.metrics = tuple(m for m in engines.metrics if m is not metrics)
            if not engines.metrics:
                registry.unregister(engines)
                del cls._of_registry[registry]

    def describe(self) -> Iterator[Metric]:
        """Name all possible metrics, so that no other collector takes the names."""
        for family in ALL:
            yield Metric(family.name, family.text, family.kind)

    def collect(self) -> Iterator[Metric]:
        """Read the metrics of all engines."""
        by_name: dict[str, Metric] = {}
        for engine in self.metrics:
            for metric in engine.collect():
                first = by_name.setdefault(metric.name, metric)
                if first is not metric:
                    first.samples += metric.samples
        yield from by_name.values()


def _is_text(value: object) -> bool:
    """Whether a value is a text that can be encoded."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _in_plain_text(app: Any) -> Any:
    """Make prometheus_client's WSGI application answer in plain text.

    Since 0.23 it writes ":" as "_" in OpenMetrics, which Prometheus 2 prefers
    (github.com/prometheus/client_python/issues/1177).
    """

    def plain(environ: dict[str, Any], start_response: Any) -> Any:
        return app({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    return plain


def _samples(
    family: Family[Any], value: Value
) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the samples of a metric: suffix of its name, extra labels, value."""
    if isinstance(value, Histogram):
        total, counts = value.total, tuple(accumulate(value.counts))
        for bound, count in zip((*value.bounds, float("inf")), counts, strict=True):
            label: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
            yield "_bucket", {"le": label}, count
        yield "_count", {}, counts[-1]
        yield "_sum", {}, total
        return
    suffix = "_total" if family.kind == "counter" else ""
    if isinstance(value, Mapping):
        for name, number in value.items():
            labels = family.label.split()
            values = name.split() if len(labels) > 1 else [name]
            yield suffix, dict(zip(labels, values, strict=True)), number
    else:
        yield suffix, {}, value
