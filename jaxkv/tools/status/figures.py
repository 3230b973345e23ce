"""The figures of an engine between two pages of its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jaxkv.tools.status.scrape import Page

_KV = "jaxkv:kv_offload_"
_VLLM_KV = "vllm:kv_offload_"
_QUANTILE = 0.95


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of new requests; shares are from 0 to 1, None without tokens."""

    num: float
    device_share: float | None  # Found on the device.
    host_share: float | None  # Loaded from the host, or copied on the device.
    computed_share: float | None


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Transfers in one direction; a value without a source is None."""

    bytes_per_s: float | None
    blocks_per_s: float | None
    num_in_flight: float | None
    num_blocks_waiting: float | None  # None without `max_blocks_in_flight`.


@dataclasses.dataclass(frozen=True)
class Times:
    """Durations of one kind."""

    num: float
    total_s: float
    mean_s: float | None  # None if there were none.
    # The least bound of a bucket that 95% do not exceed; None if they exceed all.
    p95_s: float | None


@dataclasses.dataclass(frozen=True)
class Failures:
    """Failures of one kind."""

    since_start: float
    new: float  # In the interval.


@dataclasses.dataclass(frozen=True)
class Store:
    """The store behind the host."""

    is_up: bool | None
    num_blocks: float | None
    num_blocks_held: float | None
    blocks_written_per_s: float | None
    blocks_fetched_per_s: float | None
    reads: Times


@dataclasses.dataclass(frozen=True)
class Status:
    """The figures of all engines of a page; a value without a source is None."""

    engines: tuple[str, ...]
    policies: tuple[str, ...]
    interval_s: float
    has_restarted: bool  # Then the interval's figures are since the start.
    tokens: Tokens
    tokens_since_start: Tokens
    stores: Transfers
    loads: Transfers
    host_blocks: float | None
    host_blocks_held: float | None
    host_blocks_evicted_per_s: float | None
    host_bytes: float | None
    load_waits: Times
    deferrals: Times
    lookups: Times
    failures: Mapping[str, Failures]
    store: Store | None


class _Change:
    """The change from one page to the next."""

    def __init__(self, before: Page | None, after: Page) -> None:
        self._before, self._after = before, after
        self.interval_s = after.time_s - before.time_s if before else math.inf

    def now(self, name: str, **labels: str) -> float | None:
        """Return the sum of a metric over all engines; None without a source."""
        return _total(self._after, name, labels)

    def grown(self, name: str, **labels: str) -> float | None:
        """Return how much a counter has grown; None without a source."""
        now = self.now(name, **labels)
        if now is None or self._before is None:
            return now
        return now - (_total(self._before, name, labels) or 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return how much a counter has grown per second."""
        grown = self.grown(name, **labels)
        return None if grown is None else grown / self.interval_s

    def times(self, name: str) -> Times:
        num = self.grown(f"{name}_count") or 0.0
        total_s = self.grown(f"{name}_sum") or 0.0
        if num <= 0:
            return Times(0.0, 0.0, None, None)
        samples = self._after.samples.get(f"{name}_bucket", ())
        bounds = [
            float(le)
            for le in {labels["le"] for labels, _ in samples}
            if (self.grown(f"{name}_bucket", le=le) or 0.0) >= _QUANTILE * num
        ]
        p95_s = min(bounds, default=math.inf)
        finite = p95_s if math.isfinite(p95_s) else None
        return Times(num, total_s, total_s / num, finite)


def _total(page: Page, name: str, labels: Mapping[str, str]) -> float | None:
    values = [
        value
        for sample_labels, value in page.samples.get(name, ())
        if labels.items() <= sample_labels.items()
    ]
    return sum(values) if values else None


def _values_of(page: Page, label: str) -> tuple[str, ...]:
    """Return the values of a label of jaxkv's metrics."""
    values = {
        labels[label]
        for name, samples in page.samples.items()
        for labels, _ in samples
        if name.startswith("jaxkv:") and label in labels
    }
    return tuple(sorted(values))


def has_restarted(before: Page, after: Page) -> bool:
    """Whether a counter has fallen, as only a new process lets it."""
    return any(
        (_total(after, name, {}) or 0.0) < (_total(before, name, {}) or 0.0)
        for name in before.samples
        if name.startswith(("jaxkv:", "vllm:")) and name.endswith("_total")
    )


def measure(before: Page, after: Page) -> Status:
    """Return what engines did between two pages."""
    is_new = has_restarted(before, after)
    interval_s = after.time_s - before.time_s
    first = Page(before.time_s, {}) if is_new else before
    change, start = _Change(first, after), _Change(None, after)
    return Status(
        engines=_values_of(after, "engine"),
        policies=_policies(after),
        interval_s=interval_s,
        has_restarted=is_new,
        tokens=_tokens(change),
        tokens_since_start=_tokens(start),
        stores=_transfers(change, "store", "stored"),
        loads=_transfers(change, "load", "loaded"),
        host_blocks=change.now(f"{_KV}host_blocks"),
        host_blocks_held=change.now(f"{_KV}host_blocks_held"),
        host_blocks_evicted_per_s=change.rate(f"{_KV}host_blocks_evicted_total"),
        host_bytes=change.now(f"{_KV}host_bytes"),
        load_waits=change.times(f"{_KV}load_delay_seconds"),
        deferrals=change.times(f"{_VLLM_KV}lookup_async_delay_seconds"),
        lookups=change.times(f"{_VLLM_KV}lookup_sync_delay_seconds"),
        failures=_failures(change),
        store=_store(change, after),
    )


def _policies(page: Page) -> tuple[str, ...]:
    samples = page.samples.get(f"{_KV}policy_info", ())
    return tuple(sorted({labels["policy"] for labels, value in samples if value}))


def _tokens(change: _Change) -> Tokens:
    num = change.grown("vllm:prefix_cache_queries_total") or 0.0
    device = change.grown("vllm:prefix_cache_hits_total") or 0.0
    host = change.grown("vllm:external_prefix_cache_hits_total") or 0.0
    if num <= 0:
        return Tokens(0.0, None, None, None)
    return Tokens(num, device / num, host / num, max(0.0, 1 - (device + host) / num))


def _transfers(change: _Change, direction: str, past: str) -> Transfers:
    return Transfers(
        change.rate(f"{_VLLM_KV}{direction}_bytes_total"),
        change.rate(f"{_KV}blocks_{past}_total"),
        change.now(f"{_KV}transfers_in_flight", direction=direction),
        change.now(f"{_KV}blocks_waiting", direction=direction),
    )


def _failures(change: _Change) -> Mapping[str, Failures]:
    failures = {}
    for what, name in (
        ("loads", "load_failures"),
        ("blocks not stored", "blocks_dropped"),
        ("blocks not read", "storage_blocks_missed"),
        ("blocks not written", "storage_blocks_dropped"),
        ("store calls", "storage_errors"),
    ):
        num = change.now(f"{_KV}{name}_total")
        if num is not None:
            new = change.grown(f"{_KV}{name}_total") or 0.0
            failures[what] = Failures(num, new)
    return failures


def _store(change: _Change, page: Page) -> Store | None:
    up = [value for _, value in page.samples.get(f"{_KV}storage_up", ())]
    num_blocks = change.now(f"{_KV}storage_blocks")
    if num_blocks is None and not up:
        return None
    return Store(
        min(up) > 0 if up else None,
        num_blocks,
        change.now(f"{_KV}storage_blocks_held"),
        change.rate(f"{_KV}storage_blocks_written_total"),
        change.rate(f"{_KV}storage_blocks_fetched_total"),
        change.times(f"{_KV}storage_read_seconds"),
    )
