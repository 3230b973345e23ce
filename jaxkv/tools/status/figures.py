"""The figures of an engine between two pages of its metrics, and their lines."""

from __future__ import annotations

import contextlib
import math
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from jaxkv._util import rounded_size, three_digits, time_text
from jaxkv.tools.status.scrape import Page

Figures: TypeAlias = Mapping[str, Any]
"""Figures by name; None for one without a source."""

_KV, _VLLM_KV = "jaxkv:kv_offload_", "vllm:kv_offload_"
_QUANTILE = 0.95
_MAX_NAMES, _MAX_LETTERS = 8, 40
_SHARES = ("on_device", "from_host", "computed")
_COUNTS = {
    "tokens": "vllm:prefix_cache_queries",
    "on_device": "vllm:prefix_cache_hits",
    "from_host": "vllm:external_prefix_cache_hits",
    "bytes_stored": f"{_VLLM_KV}store_bytes",
    "bytes_loaded": f"{_VLLM_KV}load_bytes",
    "blocks_stored": f"{_KV}blocks_stored",
    "blocks_loaded": f"{_KV}blocks_loaded",
    "host_blocks_evicted": f"{_KV}host_blocks_evicted",
    "blocks_written_to_store": f"{_KV}storage_blocks_written",
    "blocks_read_from_store": f"{_KV}storage_blocks_fetched",
}
_FAILURES = {
    "failed_loads": f"{_KV}load_failures",
    "blocks_not_stored": f"{_KV}blocks_dropped",
    "blocks_not_written": f"{_KV}storage_blocks_dropped",
    "blocks_not_read": f"{_KV}storage_blocks_missed",
    "failed_store_calls": f"{_KV}storage_errors",
}
_TIMES = {
    "load_wait": f"{_KV}load_delay_seconds",
    "deferred_lookup": f"{_VLLM_KV}lookup_async_delay_seconds",
    "lookup": f"{_VLLM_KV}lookup_sync_delay_seconds",
}
_GAUGES = {
    "host_blocks": ("host_blocks", ""),
    "host_blocks_held": ("host_blocks_held", ""),
    "host_bytes": ("host_bytes", ""),
    "stores_in_flight": ("transfers_in_flight", "store"),
    "loads_in_flight": ("transfers_in_flight", "load"),
    "blocks_waiting_to_store": ("blocks_waiting", "store"),
    "blocks_waiting_to_load": ("blocks_waiting", "load"),
    "store_blocks": ("storage_blocks", ""),
    "store_blocks_held": ("storage_blocks_held", ""),
}


def measure(before: Page, after: Page) -> Figures:
    # A counter falls only with a new process, whose counts began at 0.
    has_restarted = any(
        (_total(after, name) or 0.0) < (_total(before, name) or 0.0)
        for name in before.samples
        if name.endswith("_total")
    )
    nothing = Page(before.time_s, {})
    now = {
        key: _total(after, f"{_KV}{name}", direction)
        for key, (name, direction) in _GAUGES.items()
    }
    up = after.samples.get(f"{_KV}storage_up", {}).values()
    return {
        "engines": _values_of(after, "engine"),
        "policies": _values_of(after, "policy"),
        "interval_s": after.time_s - before.time_s,
        "has_restarted": has_restarted,  # Then `last` is since the start.
        "last": _grown(nothing if has_restarted else before, after),
        "since_start": _grown(nothing, after),
        "now": {**now, "store_is_up": min(up) > 0 if up else None},
    }


def _grown(before: Page, after: Page) -> Figures:
    counts = {
        key: None if _total(after, name) is None else _growth(before, after, name)
        for key, name in ((k, f"{n}_total") for k, n in (_COUNTS | _FAILURES).items())
    }
    tokens = counts.pop("tokens")
    device, host = counts.pop("on_device") or 0.0, counts.pop("from_host") or 0.0
    parts = device, host, max(0.0, (tokens or 0.0) - device - host)
    shares = [min(1.0, num / tokens) if tokens else None for num in parts]
    by_tier = dict(zip(_SHARES, shares, strict=True))
    times = {key: _times(before, after, name) for key, name in _TIMES.items()}
    failures = {key: counts.pop(key) for key in _FAILURES}
    return {"tokens": tokens, **by_tier, **counts, **times, **failures}


def _times(before: Page, after: Page, name: str) -> Figures:
    num, total_s = (_growth(before, after, f"{name}_{of}") for of in ("count", "sum"))
    then = _buckets(before, name)
    bounds = [
        bound
        for bound, count in _buckets(after, name).items()
        if count - then.get(bound, 0.0) >= _QUANTILE * num
    ]
    # The least bound that 95% do not exceed; None if they exceed all.
    p95_s = min(bounds, default=math.inf) if num else math.inf
    return {
        "num": num,
        "mean_s": total_s / num if num else None,
        "p95_s": p95_s if math.isfinite(p95_s) else None,
    }


def _growth(before: Page, after: Page, name: str) -> float:
    return max(0.0, (_total(after, name) or 0.0) - (_total(before, name) or 0.0))


def _total(page: Page, name: str, direction: str = "") -> float | None:
    values = [
        value
        for labels, value in page.samples.get(name, {}).items()
        if not direction or ("direction", direction) in labels
    ]
    return sum(values) if values else None


def _buckets(page: Page, name: str) -> Mapping[float, float]:
    counts: dict[float, float] = defaultdict(float)
    for labels, value in page.samples.get(f"{name}_bucket", {}).items():
        with contextlib.suppress(ValueError):
            counts[float(dict(labels).get("le", "nan"))] += value
    return {bound: count for bound, count in counts.items() if bound >= 0}


def _values_of(page: Page, label: str) -> list[str]:
    """Return the values of a label of jaxkv's metrics, at most a few."""
    values = {
        value[:_MAX_LETTERS]
        for name, samples in page.samples.items()
        if name.startswith("jaxkv:") and (label != "policy" or "shadow" not in name)
        for labels, is_set in samples.items()
        for key, value in labels
        if key == label and (is_set or label != "policy")
    }
    rest = len(values) - _MAX_NAMES
    names = sorted(values)[:_MAX_NAMES]
    return [*names, f"{rest} more"] if rest > 0 else names


def status_lines(figures: Figures) -> Iterator[str]:
    """Write figures, at most 80 characters a line; an alarm begins with !."""
    last, total, now = figures["last"], figures["since_start"], figures["now"]
    interval_s = figures["interval_s"]
    recent = f"last {interval_s:.1f} s"
    yield _row(
        "", "since restart" if figures["has_restarted"] else recent, "since start"
    )
    for key in last:
        num, new, label = total[key], last[key], key.replace("_", " ")
        if num is None and key not in _SHARES:
            continue
        if key in _SHARES:
            yield _row(f"  {label}", _percent(new), _percent(num))
        elif key in _TIMES:
            yield _row(label, _times_text(new), _times_text(num))
        elif key not in _FAILURES:
            text_of = rounded_size if "bytes" in key else _number
            yield _row(label, f"{text_of(new / interval_s)}/s", text_of(num))
    held, num_blocks = now["host_blocks_held"], now["host_blocks"]
    text = "in another process"
    if held is not None and num_blocks:
        text = f"{_percent(held / num_blocks)} of {_size(now['host_bytes'])}, "
        text += f"{_number(held)} of {_number(num_blocks)} blocks"
    yield _fact("host tier", text)
    stores, loads = now["stores_in_flight"], now["loads_in_flight"]
    text = f"stores {_number(stores)}, loads {_number(loads)}"
    stores, loads = now["blocks_waiting_to_store"], now["blocks_waiting_to_load"]
    if stores or loads:
        text += f"; blocks waiting: {_number(stores)}, {_number(loads)}"
    yield _fact("in flight", text)
    if now["store_is_up"] is not None or now["store_blocks"]:
        text = {True: "up", False: "DOWN", None: "unknown"}[now["store_is_up"]]
        if now["store_blocks"] and now["store_blocks_held"] is not None:
            share = now["store_blocks_held"] / now["store_blocks"]
            text += f", {_percent(share)} full"
        yield _fact("! store" if now["store_is_up"] is False else "store", text)
    phrases = [
        f"{key.replace('_', ' ')} {_number(total[key])} (+{_number(last[key])})"
        for key in _FAILURES
        if total[key]
    ]
    mark = "! " if any(last[key] for key in _FAILURES) else ""
    texts = textwrap.wrap(", ".join(phrases) or "none", 80 - 24, max_lines=3)
    for text in texts:
        yield _fact(f"{mark}failures", text)


def _row(label: str, last: str, total: str) -> str:
    return f"{label:<24}{last:>28}{total:>28}"


def _fact(label: str, text: str) -> str:
    return f"{label:<24}{text}"


def _percent(share: float | None) -> str:
    return "-" if share is None else _number(round(100 * share, 1)) + "%"


def _number(value: float | None) -> str:
    if value is None or value >= 1e12:
        return "-" if value is None else f"{value:.3g}"
    return f"{value:,.0f}" if value == int(value) else three_digits(value)


def _size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else rounded_size(num_bytes)


def _times_text(times: Figures) -> str:
    if times["mean_s"] is None:
        return "none"
    p95_s = times["p95_s"]
    p95 = "5% off scale" if p95_s is None else f"95% in {_time(p95_s)}"
    return f"{_time(times['mean_s'])}, {p95}"


def _time(seconds: float) -> str:
    return time_text(seconds) if 1e-9 < seconds < 1e6 else f"{seconds:.2g} s"
