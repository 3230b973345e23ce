"""The functions of `jaxkv.manager` as compiled programs, called from Python.

Keys are padded to a few sizes (`jaxkv.batches`). A program is given apart what it
changes, which is donated, and the rest, of which it takes only what it reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxkv import manager
from jaxkv.batches import Packed, bucket, buckets, pack, pad_keys
from jaxkv.manager import ManagerState
from jaxkv.ragged import in_order
from jaxkv.types import KEY_LANES, NO_BLOCK, BlockKey, Policy, PyTree

# A ragged batch is padded to a width and to a total; few totals keep the pairs few.
_SMALLEST_TOTAL = 1024
_MAX_TOTAL = 1 << 16
# To compute on so many rows of padding costs about as much as one call more.
_ROWS_PER_CALL = 1024

Parts = dict[str, PyTree]  # the fields of a ManagerState, or some of them


class Program(NamedTuple):
    """What to compile.

    Attributes:
        function: ``(policy, state, keys, count, *each) -> (state, answer)``.
        changes: The fields of the state that it changes.
        each: The types of the further arguments, scalars that each request has.
    """

    function: Callable[..., tuple[ManagerState, Any]]
    changes: tuple[str, ...]
    each: tuple[type[np.generic], ...] = ()


_FIELDS = ("policy", "ref_cnt", "pool")
CONTAINS = Program(
    lambda policy, state, *batch: (
        state,
        policy.find(state.policy, *batch) != NO_BLOCK,
    ),
    (),
)
LOOKUP = Program(lambda *batch: (batch[1], manager.lookup(*batch)), ())
TOUCH = Program(lambda *batch: (manager.touch(*batch), None), ("policy",))
REORDER = Program(lambda *batch: (manager.reorder(*batch), None), ("policy",))
PREPARE_LOAD = Program(manager.prepare_load, ("ref_cnt",))
COMPLETE_LOAD = Program(manager.complete_load, ("ref_cnt",))
PREPARE_STORE = Program(manager.prepare_store, _FIELDS)
COMPLETE_STORE = Program(manager.complete_store, _FIELDS, (np.bool_,))
DISCARD = Program(manager.discard, ("policy", "pool"))
REQUEST_STEP = Program(manager.request_step, _FIELDS)
_PROGRAMS = (
    CONTAINS,
    LOOKUP,
    TOUCH,
    REORDER,
    PREPARE_LOAD,
    COMPLETE_LOAD,
    PREPARE_STORE,
    COMPLETE_STORE,
    DISCARD,
    REQUEST_STEP,
)


def call(
    program: Program,
    policy: Policy,
    state: ManagerState,
    keys: Sequence[BlockKey],
    offsets: Sequence[int],
    *each: NDArray[Any],
) -> tuple[ManagerState, Any]:
    """Serve requests in their order, in one call where that is faster.

    Args:
        program: What to run.
        policy: The policy.
        state: The state before. What the program changes is donated.
        keys: The n keys of all requests, of 32 bytes, one request after the other.
        offsets: R + 1 of them; request i has the keys from ``offsets[i]`` up to
            ``offsets[i + 1]``.
        each: [R]. Further arguments of the program, an item for each request.

    Returns:
        The state after, and the answer with NumPy arrays: [n, ...] where a request's
        has a row for each key, [R] where it is a scalar.
    """
    answers = []
    for first, last in _runs(offsets):
        start, stop = offsets[first], offsets[last]
        num_keys, num_requests = stop - start, last - first
        width = None
        size = bucket(num_keys)
        extents: tuple[Any, ...] = (np.int32(num_keys),)
        own = [items[first] for items in each]
        if num_requests > 1:
            width = bucket(int(np.diff(offsets[first : last + 1]).max()))
            size = bucket(num_keys + width, _SMALLEST_TOTAL)
            bounds = np.full(_num_bounds(size), num_keys, np.int32)
            bounds[: num_requests + 1] = np.subtract(offsets[first : last + 1], start)
            extents = bounds, np.int32(num_requests)
            own = [_fill(items[first:last], len(bounds) - 1) for items in each]
        run_keys = keys if num_keys == len(keys) else keys[start:stop]
        lanes = pad_keys(run_keys, size)
        state, packed = _run(program, width, policy, state, lanes, *extents, *own)
        answers.append(_unpack(packed, size, num_keys, num_requests))
    if len(answers) == 1:
        return state, answers[0]
    return state, jax.tree.map(lambda *parts: np.concatenate(parts), *answers)


def complete_step(
    state: ManagerState, block_ids: NDArray[Any], num_hits: int
) -> tuple[ManagerState, bool]:
    """End request steps.

    Args:
        state: The state before. Its `ref_cnt` is donated.
        block_ids: int[n]. First the blocks that were loaded, then those stored.
        num_hits: How many were loaded.

    Returns:
        The state after, and whether it was done; see `manager.complete_step`.
    """
    return _call_by_ids(_complete_step, state, num_hits, block_ids)


def pin(state: ManagerState, block_ids: NDArray[Any]) -> tuple[ManagerState, bool]:
    """Pin blocks that a search has just found.

    Args:
        state: The state before. Its `ref_cnt` is donated.
        block_ids: int[n].

    Returns:
        The state after, and whether it was done; see `manager.pin`.
    """
    return _call_by_ids(_pin, state, 0, block_ids)


def _call_by_ids(
    program: Callable[..., Any],
    state: ManagerState,
    number: int,
    block_ids: NDArray[Any],
) -> tuple[ManagerState, bool]:
    batch = np.full(1 + bucket(len(block_ids)), NO_BLOCK, np.int32)
    batch[0] = number
    batch[1 : 1 + len(block_ids)] = block_ids
    ref_cnt, ok = program(state.ref_cnt, batch)
    return dataclasses.replace(state, ref_cnt=ref_cnt), bool(np.asarray(ok))


def warm_up(
    policy: Policy,
    state: ManagerState,
    max_keys: int,
    max_total_keys: int,
    which: Sequence[Program] | None = None,
) -> ManagerState:
    """Compile every program for the sizes that calls will have.

    Args:
        policy: The policy.
        state: A state; it is donated, and given back as it was.
        max_keys: Most keys of one request.
        max_total_keys: Most keys of the requests of one call; 0 for no such calls.
        which: The programs that will be called; None for all.

    Returns:
        The state.
    """
    none = np.int32(0)  # Of what follows nothing is meant, so nothing changes.
    for width in buckets(max_keys):
        keys = np.zeros((width, KEY_LANES), np.uint32)
        for program in which or _PROGRAMS:
            each = [np.zeros((), dtype) for dtype in program.each]
            state, _ = _run(program, None, policy, state, keys, none, *each)
        state, _ = complete_step(state, np.full(width, NO_BLOCK), 0)
        state, _ = pin(state, np.full(width, NO_BLOCK))
        for size in buckets(max_total_keys and max_total_keys + width, _SMALLEST_TOTAL):
            if size <= width:
                continue
            keys = np.zeros((size, KEY_LANES), np.uint32)
            bounds = np.zeros(_num_bounds(size), np.int32)
            for program in which or _PROGRAMS:
                each = [np.zeros(len(bounds) - 1, dtype) for dtype in program.each]
                state, _ = _run(
                    program, width, policy, state, keys, bounds, none, *each
                )
    return state


def _run(
    program: Program,
    width: int | None,
    policy: Policy,
    state: ManagerState,
    *batch: Any,
) -> tuple[ManagerState, Packed]:
    """Run a program, for one request or, if there is a width, for several."""
    fixed = {name: getattr(state, name) for name in _FIELDS}
    changing = {name: fixed.pop(name) for name in program.changes}
    changed, packed = _compiled(program, width, policy, fixed, changing, *batch)
    return ManagerState(**fixed, **changed), packed


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _compiled(
    program: Program,
    width: int | None,
    policy: Policy,
    fixed: Parts,
    changing: Parts,
    *batch: Array,
) -> tuple[Parts, Packed]:
    def serve(changing: Parts, *batch: Array) -> tuple[Parts, Any]:
        state = ManagerState(**fixed, **changing)
        state, answer = program.function(policy, state, *batch)
        return {name: getattr(state, name) for name in program.changes}, answer

    whole = serve if width is None else in_order(serve, width)
    changed, answer = whole(changing, *batch)
    return changed, pack(answer)


@functools.partial(jax.jit, donate_argnums=0)
def _pin(ref_cnt: Array, batch: Array) -> tuple[Array, Array]:
    state = ManagerState(policy=None, ref_cnt=ref_cnt, pool=None)  # type: ignore[arg-type]
    state, ok = manager.pin(state, batch[1:])
    return state.ref_cnt, ok


@functools.partial(jax.jit, donate_argnums=0)
def _complete_step(ref_cnt: Array, batch: Array) -> tuple[Array, Array]:
    # To hand in the rest would cost more than the work.
    state = ManagerState(policy=None, ref_cnt=ref_cnt, pool=None)  # type: ignore[arg-type]
    state, ok = manager.complete_step(state, batch[1:], batch[0])
    return state.ref_cnt, ok


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Part requests into runs, each of which is to be one call.

    In a call every request costs as much as the longest. A run goes on as long as the
    padding that this brings costs less than another call.

    Yields:
        The first request of a run and the one after its last.
    """
    first, width = 0, 0
    for request in range(len(offsets) - 1):
        own = bucket(offsets[request + 1] - offsets[request])
        wider = max(width, own)
        waste = (wider - own) + (wider - width) * (request - first)
        total = offsets[request + 1] - offsets[first] + wider
        if request > first and (waste > _ROWS_PER_CALL or total > _MAX_TOTAL):
            yield first, request
            first, wider = request, own
        width = wider
    yield first, len(offsets) - 1


def _num_bounds(size: int) -> int:
    """Choose how many offsets go with `size` keys.

    There is room for one request more than for keys, so that the length of an answer
    says what it has a row for.
    """
    return size + 2


def _fill(items: NDArray[Any], size: int) -> NDArray[Any]:
    """Lengthen an array to `size`."""
    filled = np.zeros(size, items.dtype)
    filled[: len(items)] = items
    return filled


def _unpack(packed: Packed, size: int, num_keys: int, num_requests: int) -> Any:
    """Bring to the host what belongs to keys and requests, of `size` rows of keys."""
    structure, shapes = packed.layout
    words = np.asarray(packed.words)
    leaves, at = [], 0
    for shape, dtype in shapes:
        length, *width = shape or (1,)
        num = num_keys if length == size else num_requests
        own = words[at : at + num * math.prod(width)]
        own = own.astype(dtype) if dtype.kind == "b" else own.view(dtype)
        leaves.append(own.reshape(num, *width) if width else own)
        at += length * math.prod(width)
    return structure.unflatten(leaves)
