"""A diagnosis as lines for people, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxkv._util import rounded_size, size_text, three_digits
from jaxkv.config import KEYS
from jaxkv.tools.doctor.facts import HIDDEN, Facts
from jaxkv.tools.doctor.findings import Finding, Recommendation, room_text
from jaxkv.tools.doctor.store import BLOCK_BYTES, NUM_BLOCKS, SPEED_S
from jaxkv.tools.speed import Speed
from jaxkv.transfer.storage.store_url import shown_url
from jaxkv.transfer.tiling import LANES, lane_padding

# Head dimensions of models, and the latent of DeepSeek's attention, that tiles pad.
_PADDED_SIZES = (64, 80, 96, 192, 576)

_MARKS = {"wrong": "WRONG", "note": "note "}


def fact_lines(facts: Facts, best: Recommendation | None) -> list[str]:
    rows = [*_machine_rows(facts), *_device_rows(facts), *_speed_rows(facts)]
    rows.append(("Extras", _extras_text(facts)))
    if facts.variables:
        texts = (f"{name}={value}" for name, value in facts.variables.items())
        rows.append(("Settings", ", ".join(texts)))
    size = "no limit is known, and no size recommended"
    if best is not None and best.num_bytes:
        size = f"{size_text(best.num_bytes)} recommended: {best.why}"
    elif best is not None:
        size = f"no room for one: {best.why}"
    rows.append(("Host tier", size))
    rows += _store_rows(facts)
    return [f"{label:<12} {text}" for label, text in rows]


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the findings, then the advice, then the number of things wrong."""
    lines = [f"{_MARKS[finding.level]}  {finding.what}" for finding in findings]
    advice = list(
        dict.fromkeys(finding.advice for finding in findings if finding.advice)
    )
    if advice:
        lines += ["", "What to do"]
        lines += [f"  {number}. {text}" for number, text in enumerate(advice, start=1)]
    num_wrong = sum(finding.level == "wrong" for finding in findings)
    problems = "problem" if num_wrong == 1 else "problems"
    if lines:
        lines.append("")
    lines.append(f"{num_wrong or 'No'} {problems} found.")
    return lines


def to_json(
    facts: Facts, best: Recommendation | None, findings: Sequence[Finding]
) -> dict[str, Any]:
    return {
        "ok": all(finding.level != "wrong" for finding in findings),
        "recommended_host_bytes": None if best is None else best.num_bytes,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": _facts_json(facts),
    }


def _facts_json(facts: Facts) -> dict[str, Any]:
    figures = dataclasses.asdict(facts)
    config = figures["config"]
    if config is not None:
        for name, key in KEYS.items():
            if key.is_secret and config[name] is not None:
                config[name] = HIDDEN
        if config["storage"] is not None:
            config["storage"] = shown_url(config["storage"])
    return figures


def _machine_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    yield "Machine", facts.system
    memory = "unknown" if facts.total_bytes is None else room_text(facts.total_bytes)
    machine = facts.machine_limit
    yield (
        "Memory",
        memory + (f", {room_text(machine.num_bytes)} available" if machine else ""),
    )
    for limit in facts.cgroup_limits:
        source = limit.source.removeprefix("the cgroup ")
        yield "Cgroup", f"{source}: {room_text(limit.num_bytes)} left"
    if not facts.cgroup_limits:
        yield "Cgroup", "no limit"
    versions = dict(facts.versions)
    python = versions.pop("python")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield "Software", f"Python {python}, {packages}"


def _device_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    backend = facts.backend
    if backend is None:
        yield "Device", "none: jax does not start"
        return
    memory = (
        "" if backend.memory_bytes is None else f", {room_text(backend.memory_bytes)}"
    )
    # On CPU, the kind is the platform again.
    what = " ".join(dict.fromkeys((backend.platform, backend.kind)))
    yield "Device", f"{backend.num_devices} x {what}{memory}"
    yield "Memory kinds", ", ".join(backend.memory_kinds)
    pool = "none of its own on this platform"
    if facts.pool is not None:
        suffix = ", preallocated" if facts.pool.is_preallocated else ""
        pool = f"{facts.pool.source}: {room_text(facts.pool.num_bytes)}{suffix}"
    yield "Pinned pool", pool
    if facts.mode is not None:
        chosen = facts.config is not None and facts.config.transfer_mode is not None
        why = "as chosen" if chosen else f"the default on {backend.platform}"
        yield "Mode", f"{facts.mode}, {why}"
    if backend.platform == "tpu":
        factors = [f"{size}: {lane_padding(size):.2f}" for size in _PADDED_SIZES]
        text = f"rows of {LANES}; others are padded, by these factors"
        yield "Host layout", f"{text} ({', '.join(factors)}): pack them"


def _speed_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    bandwidth = facts.bandwidth
    if bandwidth is None:
        return
    yield "Store", _speed_text(bandwidth.save, bandwidth.limit, bandwidth.limit_save)
    yield "Load", _speed_text(bandwidth.load, bandwidth.limit, bandwidth.limit_load)
    note = (
        f"best / p50 of {size_text(bandwidth.size_bytes)} in blocks of "
        f"{size_text(bandwidth.block_bytes)}, all bytes checked"
    )
    if facts.backend is not None and facts.backend.platform == "cpu":
        note += "; on CPU both ends are the same memory"
    yield "", note


def _speed_text(speed: Speed, limit: str, limit_speed: Speed) -> str:
    return f"{speed.text} GB/s; {limit} {limit_speed.text} GB/s"


def _store_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    store = facts.store
    if store is None:
        return
    text = f"{store.url}, at most {rounded_size(store.num_bytes)} of blocks"
    if store.folder is not None:
        text += f"; {room_text(store.folder.free_bytes)} free"
    yield "Storage tier", text
    if store.speed is not None:
        speeds = [("written", store.speed.write_mb_per_s)]
        if store.speed.write_mb_per_s is not None:
            speeds.append(("read", store.speed.read_mb_per_s))
        num_bytes = NUM_BLOCKS * BLOCK_BYTES
        slowest = f"less than {three_digits(num_bytes / 1e6 / SPEED_S)}"
        texts = (
            f"{what} at {three_digits(value) if value else slowest} MB/s"
            for what, value in speeds
        )
        blocks = f"{NUM_BLOCKS} blocks of {size_text(BLOCK_BYTES)}"
        yield "", f"{blocks}: {', '.join(texts)}"


def _extras_text(facts: Facts) -> str:
    there = [name for name, missing in facts.missing.items() if not missing]
    incomplete = [
        f"{name} ({', '.join(missing)} missing)"
        for name, missing in facts.missing.items()
        if missing
    ]
    return ", ".join([*there, *incomplete])
