"""Checks of the engine's arguments, before any state changes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, TypeGuard

import jax
import numpy as np

from jaxkv._util import check_type, check_whole, shown, whole
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    ConnectorOutput,
    OffloadMetadata,
    SchedulerOutput,
    TierMoves,
    TierReport,
)
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.pools import DevicePool


def check_arguments(
    num_storage_blocks: object, num_device_blocks: object, policy_state: object
) -> None:
    """Raise TypeError or ValueError for an argument of a scheduler."""
    check_whole(0, num_storage_blocks=num_storage_blocks)
    if num_device_blocks is not None:
        check_whole(1, num_device_blocks=num_device_blocks)
    check_type(str | None, "the path of a file or None", policy_state=policy_state)


def check_count(
    name: str, value: object, request_id: str, max_value: float = math.inf
) -> int:
    """Return a request's count as an int; raise unless it is in [0, max_value]."""
    number = whole(value)
    if number is not None and 0 <= number <= max_value:
        return number
    subject = f"{name}={shown(value)} of request {shown(request_id)} must be"
    if number is None:
        raise TypeError(f"{subject} a whole number from 0 on.")
    limit = "at least 0" if number < 0 else f"at most {max_value}"
    raise ValueError(f"{subject} {limit}.")


def check_engine(engine: object, attribute: str) -> None:
    """Raise TypeError for an object that is no transfer engine."""
    if not hasattr(engine, attribute):
        raise TypeError(
            f"engine={shown(engine)} must be a TransferEngine or a MultiPoolEngine."
        )


def checked_step(output: SchedulerOutput) -> tuple[Mapping[str, int], int]:
    """Check a step except its tables; return each request's tokens > 0, and the sum."""
    if not isinstance(output, SchedulerOutput):
        raise TypeError(f"output={shown(output)} must be a SchedulerOutput.")
    scheduled, preempted = output.num_scheduled_tokens, output.preempted_req_ids
    for name in "num_scheduled_tokens", "new_block_ids":
        value = getattr(output, name)
        # The exact type first: `isinstance` with an ABC is slow.
        if type(value) is not dict and not isinstance(value, Mapping):
            raise _field_error(name, value, "a mapping from request ids", "step")
    if not are_strings(preempted):
        wanted = "a list of request ids"
        raise _field_error("preempted_req_ids", preempted, wanted, "step")
    try:
        total, lowest = sum(scheduled.values()), min(scheduled.values(), default=1)
    except (TypeError, ValueError):  # `min` of arrays raises ValueError.
        total = lowest = -1
    if type(total) is not int or lowest < 0:
        checked = {
            name: check_count("num_scheduled_tokens", num, name)
            for name, num in scheduled.items()
        }
        scheduled, total, lowest = checked, sum(checked.values()), 0
    if lowest == 0:
        scheduled = {name: num for name, num in scheduled.items() if num}
    return scheduled, total


def are_strings(values: object) -> bool:
    """Whether a value is a list, tuple or set of strings, not a single string."""
    if not is_collection(values):
        return False
    return not values or all(isinstance(value, str) for value in values)


def is_collection(value: object) -> TypeGuard[Collection[Any]]:
    """Whether a value is a sequence or a set, and neither a str nor bytes."""
    if type(value) is tuple:
        return True
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


def check_report(output: ConnectorOutput) -> None:
    """Raise TypeError for a report with a field of the wrong type."""
    if not isinstance(output, ConnectorOutput):
        raise TypeError(
            f"output={shown(output)} must be a ConnectorOutput, such as "
            "OffloadWorker.poll() returns."
        )
    for field in ("finished_recving", "failed_recving"):
        if not are_strings(ids := getattr(output, field)):
            raise _field_error(field, ids, "a tuple of request ids")
    for field in ("completed_store_events", "failed_store_events"):
        if not _are_whole(events := getattr(output, field)):
            raise _field_error(field, events, "a tuple of ints, event numbers")
    if not is_collection(output.below):
        raise _field_error("below", output.below, "a tuple of TierReports")
    for report in output.below:
        is_report = isinstance(report, TierReport) and whole(report.tier) is not None
        _check(is_report, "below", report, "TierReports whose tier is an int")
        for field in ("fetched", "written", "probed"):
            results = getattr(report, field)
            ok = is_collection(results) and all(map(_is_result, results))
            _check(ok, field, results, "pairs of an event number and a bool per block")
        for field in ("found", "gone"):
            keys = getattr(report, field)
            are_keys = is_collection(keys) and set(map(type, keys)) <= {bytes}
            _check(are_keys, field, keys, "a tuple of block keys, which are bytes")
        is_flag = report.listed is None or isinstance(report.listed, bool)
        _check(is_flag, "listed", report.listed, "True, False or None")
        bound = report.bound
        is_bound = bound is None or (_are_whole(bound) and len(bound) == 2)
        _check(is_bound, "bound", bound, "(max_blocks, num_listed_blocks), or None")


def _is_result(pair: Any) -> bool:
    """Whether a value is an event number with a bool, or with a bool per block."""
    if not is_collection(pair) or len(pair) != 2:
        return False
    event, ok = pair
    are_flags = is_collection(ok) or isinstance(ok, np.ndarray)
    are_flags = are_flags and all(isinstance(flag, bool | np.bool_) for flag in ok)
    return whole(event) is not None and (isinstance(ok, bool) or are_flags)


def _are_whole(values: object) -> TypeGuard[Collection[int]]:
    if not is_collection(values):
        return False
    return not values or all(
        type(value) is int or whole(value) is not None for value in values
    )


def _check(
    ok: bool, field: str, value: object, expected: str, owner: str = "report"
) -> None:
    if not ok:
        raise _field_error(field, value, expected, owner)


def _field_error(
    field: str, value: object, expected: str, owner: str = "report"
) -> TypeError:
    return TypeError(f"{field}={shown(value)} of a {owner} must be {expected}.")


def check_plan(meta: OffloadMetadata) -> None:
    """Raise TypeError for a plan with a wrong field; the engine checks block ids."""
    for field in ("load_event", "store_event"):
        event = getattr(meta, field)
        _check(type(event) is int, field, event, "an int", "plan")
    if meta.load_event != NO_EVENT:
        requests, sizes = meta.load_event_to_reqs, meta.load_sizes
        is_mapping = isinstance(requests, Mapping)
        _check(is_mapping, "load_event_to_reqs", requests, "a mapping", "plan")
        ids = requests.get(meta.load_event)
        field = f"load_event_to_reqs[{meta.load_event}]"
        _check(are_strings(ids), field, ids, "a tuple of request ids", "plan")
        _check(_are_whole(sizes), "load_sizes", sizes, "a tuple of ints", "plan")
    below = meta.below
    is_below = is_collection(below) and all(isinstance(m, TierMoves) for m in below)
    _check(is_below, "below", below, "a tuple of TierMoves", "plan")


def check_bound(pool: DevicePool, mode: str, expected: int | None) -> None:
    """Raise ValueError for a pool that does not fit the mode, or the arrays' blocks."""
    if mode == "lazy" and not isinstance(pool, DeviceBlockPool):
        raise ValueError(
            "mode='lazy' needs a DeviceBlockPool, which returns its next victims, "
            f"not a {type(pool).__name__}: choose mode='eager'."
        )
    num_blocks = pool.num_blocks
    if expected is not None and num_blocks != expected:
        raise ValueError(
            f"{num_blocks=} of the DeviceBlockPool must be {expected}, the length of "
            "the arrays' block axis: otherwise the wrong blocks would move. Pass "
            f"num_blocks={expected}, or correct block_axis."
        )


def check_has_shared_clock(setting: str) -> None:
    """Raise ValueError if a policy would use the local clocks of several processes."""
    if is_multi_process():
        raise ValueError(
            f"{setting} evicts by time, which differs between processes: they would "
            "evict different blocks. Pass a policy_clock that returns the same time in "
            "all processes, or choose a policy that does not use the time."
        )


def is_multi_process() -> bool:
    """Whether several JAX processes run one program; starts no JAX backend."""
    return jax.distributed.is_initialized() and jax.process_count() > 1
