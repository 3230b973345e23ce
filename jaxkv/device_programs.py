"""The functions of `jaxkv.device_tier` as compiled programs, called from Python.

A program is given apart what it changes, which is donated, and the rest, of which it
takes only what it reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxkv import device_tier
from jaxkv.batches import Packed, bucket, buckets, pack, pad_keys, unpack
from jaxkv.device_tier import DeviceTier
from jaxkv.types import KEY_LANES, NO_BLOCK, BlockKey, PyTree

Parts: TypeAlias = dict[str, PyTree]  # the fields of a DeviceTier, or some of them


class Program(NamedTuple):
    """What to compile.

    Attributes:
        function: ``(state, *batch, [width]) -> (state, answer)``.
        changes: The fields of the state that it changes.
    """

    function: Callable[..., tuple[DeviceTier, Any]]
    changes: tuple[str, ...] = ()


def _reader(function: Callable[..., Any]) -> Program:
    return Program(lambda tier, *batch: (tier, function(tier, *batch)))


def _holder(function: Callable[..., DeviceTier], *changes: str) -> Program:
    def call(tier: DeviceTier, block_ids: Array) -> tuple[DeviceTier, Any]:
        tier = function(tier, block_ids)
        return tier, tier.num_free

    return Program(call, ("num_free", *changes))


def _releaser(
    function: Callable[..., tuple[DeviceTier, Array]], *changes: str
) -> Program:
    def call(tier: DeviceTier, block_ids: Array) -> tuple[DeviceTier, Any]:
        tier, bad = function(tier, block_ids)
        rows = jnp.arange(bad.shape[0], dtype=jnp.int32)
        return tier, (tier.num_free, jnp.min(jnp.where(bad, rows, bad.shape[0])))

    return Program(call, ("num_free", *changes))


def _allocate(
    tier: DeviceTier, num: Array, width: int, with_keys: bool
) -> tuple[DeviceTier, Any]:
    tier, _, given = device_tier.allocate(tier, num, width)
    return tier, (given.block_ids, given if with_keys else None)


_FIELDS = tuple(field.name for field in dataclasses.fields(DeviceTier))
FIND = _reader(device_tier.find)
HOLDS = _reader(device_tier.holds)
COUNTS = _reader(device_tier.counts)
NEXT_FREE = _reader(device_tier.next_free)
ALLOCATE, ALLOCATE_WITH_KEYS = (
    Program(
        functools.partial(_allocate, with_keys=with_keys),
        ("cache", "ref_cnt", "queue", "num_free"),
    )
    for with_keys in (False, True)
)
TOUCH = _holder(device_tier.touch, "ref_cnt", "queue")
FREE = _releaser(device_tier.free, "ref_cnt", "queue")
PIN = _holder(device_tier.pin, "pins")
UNPIN = _releaser(device_tier.unpin, "pins")
CACHE = Program(device_tier.cache, ("cache", "ref_cnt"))
EVICT = Program(device_tier.evict, ("cache",))
RESET = Program(device_tier.reset, ("cache",))


def call(
    program: Program, state: DeviceTier, *batch: Any, width: int | None = None
) -> tuple[DeviceTier, Any]:
    """Run a program.

    Args:
        program: What to run.
        state: The state before. What the program changes is donated.
        batch: Its further arguments, arrays.
        width: The last of them, if it has a static one.

    Returns:
        The state after, and the answer with NumPy arrays.
    """
    fixed = {name: getattr(state, name) for name in _FIELDS}
    changing = {name: fixed.pop(name) for name in program.changes}
    changed, packed = _compiled(program, width, fixed, changing, *batch)
    return DeviceTier(**fixed, **changed), unpack(packed)


def checked_ids(
    block_ids: Sequence[int] | NDArray[np.integer[Any]], num_blocks: int
) -> NDArray[Any]:
    """Make an array of ids; refuse what a pool of `num_blocks` has not."""
    ids = np.asarray(block_ids)
    if not ids.size:
        return np.empty(0, np.int32)
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise TypeError(f"{block_ids=} must be a flat list of ints.")
    if ids.min() < 0 or ids.max() >= num_blocks:
        wrong = ids[(ids < 0) | (ids >= num_blocks)][0]
        raise ValueError(f"block_id={wrong} must be in [0, {num_blocks}).")
    return ids


def cut(total: int, max_batch: int) -> Iterator[int]:
    """Cut a batch into parts that one call may have; none if it is empty."""
    while total > 0:
        yield min(total, max_batch)
        total -= max_batch


def padded_size(size: int, max_batch: int) -> int:
    """Round the size of a part up to one that programs are compiled for."""
    return min(bucket(size), max_batch)


def parts(
    ids: NDArray[Any] | None, keys: Sequence[BlockKey] | None, max_batch: int
) -> Iterator[tuple[int, list[Any]]]:
    """Make arguments of programs from blocks, keys, or a key for each block.

    Args:
        ids: int[n].
        keys: n keys, of 32 bytes.
        max_batch: Most of them in one call.

    Yields:
        The length of a part, and the arguments for it.
    """
    start = 0
    for num in cut(len((keys or ()) if ids is None else ids), max_batch):
        size = padded_size(num, max_batch)
        batch: list[Any] = []
        if ids is not None:
            padded = np.full(size, NO_BLOCK, np.int32)
            padded[:num] = ids[start : start + num]
            batch.append(padded)
        if keys is not None:
            batch.append(pad_keys(keys[start : start + num], size))
        if ids is None:
            batch.append(np.int32(num))
        yield num, batch
        start += num


def warm_up(
    state: DeviceTier, max_blocks: int, max_batch: int, allocate: Program
) -> DeviceTier:
    """Compile the programs of every step for the sizes that batches will have.

    Args:
        state: A state; it is donated, and given back as it was.
        max_blocks: Most blocks or keys of a batch.
        max_batch: Most of them in one call.
        allocate: `ALLOCATE` or `ALLOCATE_WITH_KEYS`.

    Returns:
        The state.
    """
    none = np.int32(0)  # Of what follows nothing is meant, so nothing changes.
    sizes = (padded_size(size, max_batch) for size in buckets(max_blocks))
    for size in dict.fromkeys(sizes):
        ids = np.full(size, NO_BLOCK, np.int32)
        keys = np.zeros((size, KEY_LANES), np.uint32)
        state, _ = call(FIND, state, keys, none)
        for program in (HOLDS, CACHE):
            state, _ = call(program, state, ids, keys)
        for program in (TOUCH, FREE, PIN, UNPIN):
            state, _ = call(program, state, ids)
        state, _ = call(allocate, state, none, width=size)
    return state


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _compiled(
    program: Program, width: int | None, fixed: Parts, changing: Parts, *batch: Array
) -> tuple[Parts, Packed]:
    state = DeviceTier(**fixed, **changing)
    more = () if width is None else (width,)
    state, answer = program.function(state, *batch, *more)
    return {name: getattr(state, name) for name in program.changes}, pack(answer)
