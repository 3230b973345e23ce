"""Findings and a recommended size, computed from the facts."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from jaxkv._util import gib, rounded_size, size_text
from jaxkv._util.extras import pip_install
from jaxkv.config import variable_of
from jaxkv.tools.doctor.facts import Facts
from jaxkv.tools.doctor.store import Folder, Store
from jaxkv.transfer.limits import HostLimit
from jaxkv.transfer.storage.local import folder_mode

# Left for the rest of a server, which grows while it runs: compiled programs, requests,
# file pages, transfer buffers.
_RESERVE_SHARE = 8
_MIN_RESERVE_BYTES = 2 << 30
# A smaller tier is useless.
_MIN_TIER_BYTES = 64 << 20

Level: TypeAlias = Literal["wrong", "note"]


@dataclasses.dataclass(frozen=True)
class Question:
    """The user's question: what to check."""

    host_bytes: int | None = None  # A size of the host tier to judge; None for none
    source: str = "--host-bytes"  # Where that size was set, for messages
    device_pool_bytes: int | None = None  # Bytes of the device pool; None if unknown
    needed: Sequence[str] = ()  # The extras that must be installed


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that the user should know."""

    level: Level  # Whether it is wrong or a note
    what: str  # The finding, in a sentence
    advice: str = ""  # What to do; may be empty


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """A size for the host tier."""

    num_bytes: int  # The size; 0 if there is no room for one
    why: str  # The reasoning
    is_by_pool: bool  # Whether the runtime's pool of pinned memory limits it


def recommend(facts: Facts, question: Question) -> Recommendation | None:
    """Recommend a size for the host tier; None if no limit is known.

    It is the memory left by the tightest limit of the machine and its cgroups, minus
    an eighth, at least 2 GiB (or half, if that is less), for the rest of the server; at
    most the runtime's pool of pinned memory, minus an eighth for its other uses. On the
    CPU backend the device pool is in the same memory and is subtracted first. If the
    runtime has preallocated its pool, only the pool counts.
    """
    sizes = []
    rooms = _rooms(facts, question)
    if rooms:
        room = min(rooms, key=lambda room: room.num_bytes)
        min_reserve = min(_MIN_RESERVE_BYTES, room.num_bytes // 2)
        reserve = max(room.num_bytes // _RESERVE_SHARE, min_reserve)
        size = _round_down(room.num_bytes - reserve)
        rest = "the rest of the server"
        sizes.append(Recommendation(size, _why(room, size, rest), False))
    if facts.pool is not None:
        pool = HostLimit(facts.pool.num_bytes, facts.pool.source, "")
        size = _round_down(pool.num_bytes - pool.num_bytes // _RESERVE_SHARE)
        rest = "its other uses"
        sizes.append(Recommendation(size, _why(pool, size, rest), True))
    return min(sizes, key=lambda size: size.num_bytes, default=None)


def _why(limit: HostLimit, size: int, rest: str) -> str:
    kept = room_text(limit.num_bytes - size)
    return f"{limit.source} has {room_text(limit.num_bytes)}; {kept} is kept for {rest}"


def judge(facts: Facts, question: Question) -> list[Finding]:
    findings = [
        *_backend_findings(facts),
        *(Finding("wrong", fault) for fault in facts.config_faults),
        *_extra_findings(facts, question),
        *_size_findings(facts, question),
        *_limit_findings(facts, question),
        *_store_findings(facts),
    ]
    if facts.probe_fault:
        findings.append(Finding("wrong", f"blocks do not move: {facts.probe_fault}"))
    if facts.probe_left_out:
        what = f"transfers were not measured: {facts.probe_left_out}"
        findings.append(Finding("note", what))
    return sorted(findings, key=lambda finding: finding.level == "note")


def _backend_findings(facts: Facts) -> Iterator[Finding]:
    for refusal in facts.refusals:
        advice = ""
        if facts.backend is None:
            advice = (
                f"install what jax needs to run here ({pip_install('cuda12')}, or "
                f"{pip_install('tpu')}), or set JAX_PLATFORMS=cpu"
            )
        yield Finding("wrong", refusal, advice)
    backend = facts.backend
    if backend is not None and "cpu" not in (backend.platform, backend.decides_on):
        yield Finding(
            "note",
            f"JAX_PLATFORMS={facts.chosen_platforms} leaves out the CPU backend, so "
            f"the scheduler's decisions run on the {backend.platform} and wait for "
            "the model",
            f"set JAX_PLATFORMS={facts.chosen_platforms},cpu",
        )
    if _is_on_cpu(facts) and facts.has_nvidia_driver:
        if facts.chosen_platforms:
            what = f"as JAX_PLATFORMS={facts.chosen_platforms} says"
            yield Finding("note", f"jax runs on the CPU, not on the NVIDIA GPU, {what}")
        else:
            yield Finding(
                "wrong",
                "jax runs on the CPU, though this machine has an NVIDIA driver",
                f"{pip_install('cuda12')}, or set JAX_PLATFORMS=cpu if the CPU is "
                "intended",
            )


def _extra_findings(facts: Facts, question: Question) -> Iterator[Finding]:
    needed = list(question.needed)
    if facts.config is not None:
        needed += ["events"] * (facts.config.events_endpoint is not None)
        needed += ["metrics"] * (facts.config.metrics_port is not None)
    if facts.store is not None and facts.store.lacks_extra is not None:
        needed.append(facts.store.lacks_extra)
    for extra in dict.fromkeys(needed):
        if facts.missing[extra]:
            packages = ", ".join(facts.missing[extra])
            yield Finding(
                "wrong",
                f"the extra {extra} is needed, but {packages} is not installed",
                pip_install(extra),
            )


def _size_findings(facts: Facts, question: Question) -> Iterator[Finding]:
    best = recommend(facts, question)
    pool_bytes = question.device_pool_bytes or 0
    size = question.host_bytes
    if size is None:
        if best is None:
            return
        if best.num_bytes < _MIN_TIER_BYTES:
            yield Finding(
                "wrong",
                f"there is no room for a host tier: {best.why}",
                _how_to_raise(facts, question, 2 * _MIN_TIER_BYTES),
            )
        elif best.num_bytes <= pool_bytes:
            yield Finding(
                "wrong",
                f"the recommended {_text(best.num_bytes)} of host memory "
                f"{_too_small(pool_bytes)}",
                _how_to_raise(facts, question, 2 * pool_bytes),
            )
        return
    asked_size = f"{_text(size)} of host memory ({question.source})"
    exceeded = [
        limit for limit in _limits(facts, question, size) if size > limit.num_bytes
    ]
    for limit in sorted(exceeded, key=lambda limit: limit.num_bytes):
        yield Finding(
            "wrong",
            f"{asked_size} does not fit: {limit.source} has only "
            f"{room_text(limit.num_bytes)} left",
            limit.remedy + _or_ask_for(best, question.source),
        )
    if not exceeded and best is not None and size > best.num_bytes:
        yield Finding(
            "note",
            f"{asked_size} fits, but {_text(best.num_bytes)} would be safer: "
            f"{best.why}",
        )
    if size <= pool_bytes:
        yield Finding(
            "wrong",
            f"{asked_size} {_too_small(pool_bytes)}",
            f"ask for more than {room_text(pool_bytes)}",
        )


def _too_small(pool_bytes: int) -> str:
    return (
        f"is no more than the {room_text(pool_bytes)} of the device pool: the host "
        "tier would hold little that the device does not"
    )


def _limit_findings(facts: Facts, question: Question) -> Iterator[Finding]:
    machine = facts.machine_limit
    tightest = min(facts.limits, key=lambda limit: limit.num_bytes, default=None)
    if machine is not None and tightest is not None and tightest is not machine:
        yield Finding(
            "note",
            f"{tightest.source} is the limit, with {room_text(tightest.num_bytes)} "
            f"left: the machine has {room_text(machine.num_bytes)}",
        )
    best = recommend(facts, question)
    pool = facts.pool
    if pool is None or best is None or not best.is_by_pool:
        return
    # The recommendation without the limit of the pool.
    larger = recommend(dataclasses.replace(facts, pool=None), question)
    room = 0 if larger is None else larger.num_bytes
    if pool.is_preallocated:
        room += pool.num_bytes
    if room > pool.num_bytes:
        yield Finding(
            "note",
            f"{pool.source} limits the host tier: the machine has room for "
            f"{_text(_round_down(room))}",
            f"for a larger host tier, {pool.remedy(room)}",
        )


def _store_findings(facts: Facts) -> Iterator[Finding]:
    store = facts.store
    if store is None or store.lacks_extra is not None:
        return
    name = f"the store {store.url} ({store.source})"
    if store.fault:
        yield Finding("wrong", f"{name} cannot be used: {store.fault}", store.advice)
        return
    if store.folder is None:
        return
    yield from _mode_findings(name, store, store.folder)
    room = store.folder.free_bytes + store.folder.held_bytes
    if store.num_bytes > room:
        best = _round_down(room - room // _RESERVE_SHARE)
        yield Finding(
            "wrong",
            f"{_text(store.num_bytes)} of blocks ({store.num_bytes_source}) does not "
            f"fit into {name}, which has {room_text(store.folder.free_bytes)} free and "
            f"{room_text(store.folder.held_bytes)} of blocks",
            "make room there, or ask for less: "
            + _setting(store.num_bytes_source, best),
        )


def _mode_findings(name: str, store: Store, folder: Folder) -> Iterator[Finding]:
    if folder.mode is None or store.is_sealed:
        return
    writers = folder.mode & ~folder.file_mode & 0o022
    what = f"{name} has the mode {folder.mode:04o}: "
    advice = f"chmod {folder_mode(folder.file_mode):o} {folder.path}"
    if folder.mode & stat.S_ISVTX:  # A folder for all users, such as /tmp
        advice = f"name a folder in {folder.path}"
    advice += f", or set {variable_of('storage_secret')}"
    if writers & 0o002:
        yield Finding("wrong", f"{what}any user here can plant blocks", advice)
    elif writers:
        meant = f", or share the store by ?mode={folder.file_mode | 0o060:o}"
        yield Finding("note", f"{what}its group can plant blocks", advice + meant)


def _rooms(facts: Facts, question: Question) -> list[HostLimit]:
    if facts.pool is not None and facts.pool.is_preallocated:
        return []
    pool_bytes = question.device_pool_bytes or 0
    if not (pool_bytes and _is_on_cpu(facts)):
        return list(facts.limits)
    return [
        HostLimit(
            max(0, limit.num_bytes - pool_bytes),
            f"{limit.source} (minus the device pool, which is in the same memory)",
            limit.remedy,
        )
        for limit in facts.limits
    ]


def _limits(facts: Facts, question: Question, num_bytes: int) -> list[HostLimit]:
    """Return all limits on an allocation, as `limits.check_host_bytes` has them."""
    rooms = _rooms(facts, question)
    pool = facts.pool
    if pool is None:
        return rooms
    return [HostLimit(pool.num_bytes, pool.source, pool.remedy(num_bytes)), *rooms]


def _how_to_raise(facts: Facts, question: Question, num_bytes: int) -> str:
    limits = _limits(facts, question, num_bytes)
    return min(limits, key=lambda limit: limit.num_bytes).remedy


def _or_ask_for(best: Recommendation | None, source: str) -> str:
    if best is None or best.num_bytes < _MIN_TIER_BYTES:
        return ""
    return f", or ask for {_text(best.num_bytes)}: {_setting(source, best.num_bytes)}"


def _setting(source: str, num_bytes: int) -> str:
    """Write a size as the option or the variable that the user has set."""
    separator = " " if source.startswith("--") else "="
    return f"{source}{separator}{_text(num_bytes, '')}"


def _is_on_cpu(facts: Facts) -> bool:
    return facts.backend is not None and facts.backend.platform == "cpu"


def _round_down(num_bytes: int) -> int:
    """Round a size down to a multiple that people would write."""
    for unit in (1 << 30, 64 << 20):
        if num_bytes >= 4 * unit:
            return num_bytes // unit * unit
    return num_bytes >> 20 << 20


def _text(num_bytes: int, space: str = " ") -> str:
    text = size_text(num_bytes, space)
    return room_text(num_bytes) if text.endswith("bytes") else text


def room_text(num_bytes: int) -> str:
    """Format free memory: in GiB, or smaller units below 1 GiB.

    >>> room_text(3 << 29), room_text(300 << 20)
    ('1.50 GiB', '300 MiB')
    """
    return gib(num_bytes) if num_bytes >= 1 << 30 else rounded_size(num_bytes)
