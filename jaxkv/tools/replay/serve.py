"""One request of a replay, served on a host: alone, or behind a device.

Alone, a request looks its blocks up (the prefix before the first missing block is the
hit), touches them, stores the missing ones, and touches them again while the store is
in flight; then the store completes. `jaxkv.tools.replay.device` says what happens
behind a device. A policy that listens is notified of the request's begin and, last, of
its end, both at the time of its arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies.facts import BEGIN, FINISH, begun, finished
from jaxkv.tiers.bare import BareTier, Course, select_keys
from jaxkv.tiers.executors import Executor, Step, Words
from jaxkv.types import NO_BLOCK

OnArrival: TypeAlias = Callable[[Words], None]
"""Called with the keys of blocks once they are stored."""


class Facts(NamedTuple):
    """Facts about a request for policies; lengths in tokens, -1 if unknown."""

    time_ms: int = 0
    input_tokens: int = 1
    output_tokens: int = -1
    stop: int = 0


class OnDevice(NamedTuple):
    """The device's part of a request, in blocks from the first on."""

    num_found: int
    num_findable: int  # on the device or the host
    num_running: int  # offered to the host before the request's end


class Request(NamedTuple):
    """A request as a host sees it."""

    keys: Words  # u32[n, 8]
    num_asked: int  # The output fills the blocks after these.
    facts: Facts | None  # None if the policy does not listen
    device: OnDevice | None = None
    passes: NDArray[np.bool_] | None = None  # bool[n]. None admits all.
    limit: int | None = None  # blocks that may be stored, from the first on

    @property
    def num_keys(self) -> int:
        """Blocks that may be stored."""
        return len(self.keys) if self.limit is None else min(len(self.keys), self.limit)


class Served(NamedTuple):
    """The blocks of a request that were found and stored."""

    num_hits: int
    num_stored: int
    is_refused: bool


def serve(
    executor: Executor, request: Request, on_arrival: OnArrival | None = None
) -> Served:
    """Serve a request."""
    if not len(request.keys):
        return Served(0, 0, False)
    serve_request = _serve_alone if request.device is None else _serve_behind
    return serve_request(executor, request, on_arrival)


def _begin(executor: Executor, request: Request) -> int:
    """Notify the policy of the begin; return its mark for the end."""
    facts, num = request.facts, request.num_asked
    if facts is None or not num:
        return 0
    positions = np.arange(num, dtype=np.int32)
    about = begun(facts.time_ms, facts.input_tokens)
    return executor.note(request.keys[:num], BEGIN, positions, about)


def _finish(executor: Executor, request: Request, mark: int) -> None:
    if request.facts is not None:
        time_ms, _, output_tokens, stop = request.facts
        positions = np.arange(len(request.keys), dtype=np.int32)
        about = finished(time_ms, output_tokens, stop, mark)
        executor.note(request.keys, FINISH, positions, about)


def _serve_alone(
    executor: Executor, request: Request, on_arrival: OnArrival | None
) -> Served:
    keys, passes = request.keys, request.passes
    mark = _begin(executor, request)
    offered = keys
    if passes is None:
        step = executor.request_step(keys)
    else:
        offered = select_keys(keys[: request.limit], passes[: request.limit])
        step = _request_step(executor, keys, offered)
    if step.evicted_keys is not None:
        # The second touch comes before the blocks are ready, which matters to ARC.
        executor.touch(keys, True)
    executor.complete_step(step.block_ids, step.num_hits)
    if on_arrival is not None and step.num_stored:
        placed = step.block_ids[-len(offered) :]
        if passes is None:
            placed = np.where(np.arange(len(keys)) < step.num_hits, NO_BLOCK, placed)
        on_arrival(offered[placed != NO_BLOCK])
    _finish(executor, request, mark)
    is_refused = step.evicted_keys is None
    num_stored = 0 if is_refused else step.num_stored
    return Served(min(step.num_hits, request.num_asked), num_stored, is_refused)


def _request_step(executor: Executor, keys: Words, admitted: Words) -> Step:
    """`Executor.request_step` that stores only admitted blocks."""
    num_hits = executor.lookup(keys)
    executor.touch(keys, True)
    block_ids = np.empty(0, np.int64)
    if num_hits:
        _, block_ids = executor.prepare_load(keys[:num_hits])
    if not len(admitted):
        return Step(num_hits, 0, block_ids, keys[:0])
    stored = executor.prepare_store(admitted)
    if stored is None:
        return Step(num_hits, 0, block_ids, None)
    block_ids = np.concatenate([block_ids, stored.block_ids])
    return Step(num_hits, stored.num_stored, block_ids, stored.evicted_keys)


def _serve_behind(
    executor: Executor, request: Request, on_arrival: OnArrival | None
) -> Served:
    keys, num_asked, device = request.keys, request.num_asked, request.device
    assert device is not None
    num_keys = request.num_keys
    tier, course = BareTier(executor), Course()
    if device.num_found < device.num_findable:
        course.num_found = executor.lookup(keys[device.num_found : device.num_findable])
    mark = _begin(executor, request)
    if num_asked:
        executor.touch(keys[:num_asked], True)
    # No other request is served meanwhile, so loaded blocks need no pin.
    course.num_known = device.num_found + course.num_found
    last = min(device.num_running, num_keys)
    for end in range(min(num_asked, num_keys), last + 1):
        if course.num_known < end:
            tier.offer(course, keys, end, request.passes)
            # Refused blocks are offered again at the end.
            course.num_known = end
    tier.end(course, keys, num_keys, request.passes)
    _finish(executor, request, mark)
    for offered, store in course.in_flight:
        executor.complete_step(store.block_ids, 0)
        if on_arrival is not None:
            on_arrival(offered[store.block_ids != NO_BLOCK])
    num_hits = device.num_found + course.num_found
    return Served(num_hits, tier.num_stored, course.is_refused)
