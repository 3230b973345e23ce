"""Metrics for Prometheus, under vLLM's names where it has them.

    metrics = OffloadMetrics(scheduler, worker, pool)
    metrics.serve(9400)  # or serve the registry as you do already

Nothing listens until `serve` is called, and nothing is done in the engine's steps that
would not be done without: plain numbers are read when somebody asks. What they mean is
in docs/metrics.md.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIServer

from jaxkv.blocks import DeviceBlockPool
from jaxkv.observe.families import (
    ALL,
    OF_POOL,
    OF_SCHEDULER,
    OF_WORKER,
    Books,
    Family,
    Value,
)
from jaxkv.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import Histogram
from jaxkv.worker import OffloadWorker

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Metric, start_http_server
    from prometheus_client.registry import Collector
    from prometheus_client.utils import floatToGoString
except ImportError as error:
    raise ImportError(
        "jaxkv.observe.metrics needs prometheus_client, which is not installed: "
        'pip install "jaxkv[metrics]"'
    ) from error

Source = TypeVar("Source")

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class OffloadMetrics:
    """The metrics of one engine, in a registry of prometheus_client.

    Engines that share a registry need different labels. Any thread may read the
    metrics: the numbers of a scrape during a step may be of before or after it.

    Args:
        scheduler: Decides what moves; None where another process has it.
        worker: Carries it out; None where another process has it.
        pool: The device's blocks, for their usage; None to leave that to others.
        registry: Where the metrics are to be found; None for prometheus_client's own,
            which whatever serves metrics in this process serves by default.
        labels: Labels of all its metrics, by default ``{"engine": "0"}`` as in vLLM.

    Raises:
        ValueError: If there is neither a scheduler nor a worker, a label is not
            allowed, another engine has the same labels, or somebody else has
            registered a metric of one of the names.

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
                "there is nothing to measure: give the scheduler, the worker, or both."
            )
        self.labels = {"engine": "0"} if labels is None else dict(labels)
        own = {family.label for family in ALL if family.label} | {"le"}
        for name in self.labels:
            if name in own or not _LABEL.fullmatch(name):
                raise ValueError(
                    f"label {name!r} must be of letters, digits and underscores, not "
                    f"begin with a digit or two underscores, and be none of the "
                    f"metrics' own, {sorted(own)}."
                )
        self._scheduler = scheduler
        self._worker = worker
        self._pool = pool
        self._registry = registry or REGISTRY
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        _Engines.add(self._registry, self)

    def collect(self) -> Iterator[Metric]:
        """Read all metrics that something feeds."""
        if self._scheduler is not None:
            yield from self._read(OF_SCHEDULER, Books.of(self._scheduler))
        if self._worker is not None:
            yield from self._read(OF_WORKER, self._worker)
        if self._pool is not None:
            yield from self._read(OF_POOL, self._pool)

    def serve(self, port: int, addr: str = "127.0.0.1") -> int:
        """Serve the registry's metrics over HTTP, in a thread, until `close`.

        Always in Prometheus' plain text.

        Args:
            port: Where to listen; 0 for any free port.
            addr: The address to listen at; by default only this machine's own.

        Returns:
            The port.

        Raises:
            ValueError: If the port is no port.
            OSError: If it cannot listen there.
            RuntimeError: If it is serving already.
        """
        if self._server is not None:
            raise RuntimeError(
                f"already serving at port {self._server.server_port}; close() first."
            )
        if not 0 <= port < 1 << 16:
            raise ValueError(f"{port=} must be in [0, 65536).")
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
        """Stop serving, and take the metrics out of the registry."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = self._thread = None
        _Engines.remove(self._registry, self)

    def format_line(self) -> str:
        """Say in one line what has come of it so far, for a log."""
        parts = []
        if self._worker is not None:
            for what, num_bytes in (
                ("stored", self._worker.bytes_stored),
                ("loaded", self._worker.bytes_loaded),
            ):
                parts.append(f"{what} {num_bytes / 2**20:.1f} MiB")
        if self._scheduler is not None:
            books = Books.of(self._scheduler)
            stats = books.stats
            for tier, hits, queries in (
                ("device", stats.num_device_hit_tokens, stats.num_device_query_tokens),
                ("host", stats.num_host_hit_tokens, stats.num_host_query_tokens),
            ):
                share = f" ({hits / queries:.1%})" if queries else ""
                parts.append(f"{tier} hits {hits} of {queries} tokens{share}")
            held = self._scheduler.num_host_blocks_held
            parts += [
                f"host blocks {held} of {self._scheduler.num_host_blocks}",
                f"evicted {stats.num_evicted}",
                f"dropped {sum(books.dropped().values()):.0f}",
            ]
        return "KV offload: " + ", ".join(parts)

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
    """The engines of a registry: each metric once, with the samples of all of them."""

    _of_registry: ClassVar[WeakKeyDictionary[CollectorRegistry, _Engines]] = (
        WeakKeyDictionary()
    )
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.engines: tuple[OffloadMetrics, ...] = ()

    @classmethod
    def add(cls, registry: CollectorRegistry, metrics: OffloadMetrics) -> None:
        """Put an engine's metrics into a registry."""
        with cls._lock:
            known = cls._of_registry.get(registry)
            if known is None:
                known = cls()
                try:
                    registry.register(known)
                except ValueError as error:
                    raise ValueError(
                        f"the registry has metrics of these names already ({error}); "
                        "give another registry, such as CollectorRegistry()."
                    ) from error
                cls._of_registry[registry] = known
            if any(engine.labels == metrics.labels for engine in known.engines):
                raise ValueError(
                    f"labels={metrics.labels} must differ from those of the other "
                    'engines in the registry: say, {"engine": "1"}.'
                )
            known.engines += (metrics,)

    @classmethod
    def remove(cls, registry: CollectorRegistry, metrics: OffloadMetrics) -> None:
        """Take an engine's metrics out, if they are there."""
        with cls._lock:
            known = cls._of_registry.get(registry)
            if known is None or metrics not in known.engines:
                return
            known.engines = tuple(each for each in known.engines if each is not metrics)
            if not known.engines:
                registry.unregister(known)
                del cls._of_registry[registry]

    def describe(self) -> Iterator[Metric]:
        """Name all metrics that there may be, so that nobody else takes the names."""
        for family in ALL:
            yield Metric(family.name, family.text, family.kind)

    def collect(self) -> Iterator[Metric]:
        """Read the metrics of all engines."""
        metrics: dict[str, Metric] = {}
        for engine in self.engines:
            for metric in engine.collect():
                known = metrics.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        yield from metrics.values()


def _in_plain_text(app: Any) -> Any:
    """Have prometheus_client's WSGI application answer in plain text.

    From 0.23 on it writes ":" as "_" in OpenMetrics, which Prometheus 2 would rather
    have (github.com/prometheus/client_python/issues/1177).
    """

    def plain(environ: dict[str, Any], start_response: Any) -> Any:
        return app({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    return plain


def _samples(
    family: Family[Any], value: Value
) -> Iterator[tuple[str, dict[str, str], float]]:
    """List a metric's samples: what to add to its name and to its labels, the value."""
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
            yield suffix, {family.label: name}, number
    else:
        yield suffix, {}, value
