"""Checks of the arguments of an engine, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, TypeGuard

import jax
import numpy as np

from jaxkv._util import shown, whole
from jaxkv._util.state import Entry
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    ConnectorOutput,
    OffloadMetadata,
    SchedulerOutput,
    TierMoves,
    TierReport,
)
from jaxkv.tiers.device import DeviceBlockPool


def check_count(
    name: str, value: object, request_id: str, max_value: int | None = None
) -> int:
    """Return a number of a request as an int; it must be a whole number from 0 on.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is negative, or more than `max_value`.
    """
    number = whole(value)
    what = f"{name}={shown(value)} of request {shown(request_id)} must be"
    if number is None:
        raise TypeError(f"{what} a whole number from 0 on.")
    if number < 0:
        raise ValueError(f"{what} at least 0.")
    if max_value is not None and number > max_value:
        raise ValueError(f"{what} at most {max_value}.")
    return number


def checked_step(output: SchedulerOutput) -> tuple[Mapping[str, int], int]:
    """Check what an engine is about to compute, except its block tables.

    Returns the tokens of each request that has any, and of all.

    Raises:
        TypeError: A field is missing or of another type, or a number is not whole.
        ValueError: A number is negative.
    """
    if not isinstance(output, SchedulerOutput):
        raise TypeError(f"output={shown(output)} must be a SchedulerOutput.")
    scheduled, preempted = output.num_scheduled_tokens, output.preempted_req_ids
    for name in "num_scheduled_tokens", "new_block_ids":
        value = getattr(output, name)
        # Its exact type first: to look for subclasses of an abstract one takes longer.
        if type(value) is not dict and not isinstance(value, Mapping):
            raise _wrong_field(name, value, "a mapping, by request id", "step")
    if preempted != () and not is_names(preempted):
        raise _wrong_field("preempted_req_ids", preempted, "a list of ids", "step")
    try:
        total, lowest = sum(scheduled.values()), min(scheduled.values(), default=1)
    except (TypeError, ValueError):  # The latter of an array of several.
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


def is_names(value: object) -> bool:
    """Whether a value is a list or a set of strings, and not a string itself."""
    return is_collection(value) and all(isinstance(name, str) for name in value)


def is_collection(value: object) -> TypeGuard[Collection[Any]]:
    """Whether a value is a list, a tuple or a set of any kind."""
    if type(value) is tuple:
        return True
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


def check_report(output: ConnectorOutput) -> None:
    """Raise TypeError for a report with a field of another type."""
    if not isinstance(output, ConnectorOutput):
        raise TypeError(
            f"output={shown(output)} must be a ConnectorOutput, such as "
            "OffloadWorker.poll() returns."
        )
    for field in ("finished_recving", "failed_recving"):
        if not is_names(names := getattr(output, field)):
            raise _wrong_field(field, names, "a tuple of request ids")
    for field in ("completed_store_events", "failed_store_events"):
        if not _are_whole(events := getattr(output, field)):
            raise _wrong_field(field, events, "a tuple of event numbers, ints")
    if not is_collection(output.below):
        raise _wrong_field("below", output.below, "a tuple of TierReports")
    for report in output.below:
        _check_tier_report(report)


def _check_tier_report(report: TierReport) -> None:
    if not isinstance(report, TierReport) or whole(report.tier) is None:
        raise _wrong_field("below", report, "TierReports of tiers by their number")
    for field in ("fetched", "written", "probed"):
        ends = getattr(report, field)
        if not is_collection(ends) or not all(map(_is_end, ends)):
            raise _wrong_field(
                field, ends, "pairs of an event and which blocks are there"
            )
    for field in ("found", "gone"):
        keys = getattr(report, field)
        if not is_collection(keys) or not set(map(type, keys)) <= {bytes}:
            raise _wrong_field(field, keys, "a tuple of keys, which are bytes")
    if report.listed is not None and not isinstance(report.listed, bool):
        raise _wrong_field("listed", report.listed, "True, False or None")
    bound = report.bound
    if bound is not None and not (_are_whole(bound) and len(bound) == 2):
        raise _wrong_field("bound", bound, "two numbers of blocks, or None")


def _is_end(end: Any) -> bool:
    """Whether it is a pair of an event and a flag, or flags of its blocks."""
    if not is_collection(end) or len(end) != 2:
        return False
    event, ok = end
    if isinstance(ok, bool):
        return whole(event) is not None
    is_listed = is_collection(ok) or isinstance(ok, np.ndarray)
    is_flags = is_listed and all(isinstance(flag, bool | np.bool_) for flag in ok)
    return whole(event) is not None and is_flags


def _are_whole(values: object) -> TypeGuard[Collection[int]]:
    if not is_collection(values):
        return False
    return all(type(value) is int or whole(value) is not None for value in values)


def _wrong_field(
    field: str, value: object, wanted: str, owner: str = "report"
) -> TypeError:
    return TypeError(f"{field}={shown(value)} of a {owner} must be {wanted}.")


def check_plan(meta: OffloadMetadata) -> None:
    """Raise TypeError for a plan with a field of another type, except block ids."""
    for field in ("load_event", "store_event"):
        if type(event := getattr(meta, field)) is not int:
            raise _wrong_field(field, event, "an int", "plan")
    if meta.load_event != NO_EVENT:
        if not isinstance(meta.load_event_to_reqs, Mapping):
            reqs = meta.load_event_to_reqs
            raise _wrong_field("load_event_to_reqs", reqs, "a mapping", "plan")
        names = meta.load_event_to_reqs.get(meta.load_event)
        if not is_names(names):
            field = f"load_event_to_reqs[{meta.load_event}]"
            raise _wrong_field(field, names, "a tuple of request ids", "plan")
        if not _are_whole(meta.load_sizes):
            sizes = meta.load_sizes
            raise _wrong_field("load_sizes", sizes, "numbers of blocks", "plan")
    below = meta.below
    if not is_collection(below) or not all(
        isinstance(moves, TierMoves) for moves in below
    ):
        raise _wrong_field("below", below, "a tuple of TierMoves", "plan")


def check_bound(num_blocks: int, expected: int | None) -> None:
    """Raise ValueError for a pool of other size than the arrays, if that is known."""
    if expected is not None and num_blocks != expected:
        raise ValueError(
            f"{num_blocks=} of the DeviceBlockPool must be {expected}, as the arrays "
            "have along their block axis: other blocks than those meant would move. "
            "Make it for as many, or name by block_axis the axis that counts them."
        )


def check_alike(scheduler: Any, entries: Mapping[str, Entry], pool: object) -> None:
    """Raise ValueError for the state of a scheduler of another configuration."""
    fields = entries["scheduler"].fields
    names = "groups", "rules", "num_host_blocks", "num_storage_blocks"
    facts = {name: (fields[name], getattr(scheduler, name)) for name in names}
    if isinstance(pool, DeviceBlockPool):
        num = entries[fields["_pool"].name].fields.get("num_blocks")
        facts["num_blocks of the bound DeviceBlockPool"] = num, pool.num_blocks
    else:
        facts["class of the bound pool"] = type(pool), DeviceBlockPool
    for name, (saved, value) in facts.items():
        if saved != value:
            raise ValueError(
                f"the {name} must be as in the state, {shown(saved)}, to restore it, "
                f"and is {shown(value)}."
            )


def check_times_are_alike(setting: str) -> None:
    """Raise ValueError for a policy by the time if several processes serve a model."""
    if serves_with_others():
        raise ValueError(
            f"{setting} decides by the time, and each process has its own: their "
            "tiers would evict other blocks. Pass a policy_clock that says the same "
            "in all of them, or choose what asks for no time."
        )


def serves_with_others() -> bool:
    """Whether several processes run one program; starts no backend to find out."""
    return jax.distributed.is_initialized() and jax.process_count() > 1
