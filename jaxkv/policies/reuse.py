"""Statistics of reuse: how soon each class of blocks is used again, and its value.

The table counts, for each class, how many blocks were used, and their ages when they
were used again. The value of a block is the highest rate of uses that keeping it can
bring: over all ages `stop` to give it up at,

    max over stop of  (uses again until then) / (time that blocks are held until then)

(the index of Gittins, 1979, which generalises the hit density of LHD, NSDI 2018). A
class with few uses is taken to be like all of them together.

Both sets of functions have to agree to the bit, and compilers round sums of products as
they like. So counts are integers, bins are half octaves whose widths are powers of two,
and the index is kept as the bits of a float32, which order as the number does and are
about its logarithm; between two bins they are interpolated as integers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.compiling import compiled, empty, filled, greater, highest_bit, inlined
from jaxkv.policies.xla import full

NUM_BINS = 28
"""Half octaves of the age; the last has no end."""

UNIT = 16
"""The weight of one use, so that a decay leaves something of few uses."""

SHRINK = 200 * UNIT
"""How much the uses of all classes count in each."""

PRIOR = 1 * UNIT
"""The assumed uses again in each bin before any was seen, ..."""

PRIOR_TOUCHES = 2 * NUM_BINS * PRIOR
"""... and the assumed uses: the older a block, the lower its value."""

DECAY_BITS = 8
"""At every rebuild all counts lose one in 256."""

MAX_COUNT = 1 << 28
"""Counts are halved when they come to more than this in all."""

WIDTHS = np.array([2] + [1 << (b - 1) // 2 for b in range(1, NUM_BINS)], np.float32)
"""f32[28]. How long each bin is, in 512 ms; powers of two, so that products are exact
and no compiler can round a sum of them otherwise."""

_FINE = 8  # Bits of the part of a bin that has gone by.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReuseTable:
    """Counts of C classes, and the values that follow from them."""

    touches: Array  # i32[C]. Blocks that were used, `UNIT` for each.
    reuses: Array
    """i32[C, 28]. Of those, the ones that were used again, by their age then."""
    index: Array
    """i32[C, 29]. The value of a block at the beginning of each bin, as the bits of a
    float32, in uses per 512 ms; the last column repeats the one before."""


def init(num_classes: int) -> ReuseTable:
    """Make a table that has seen nothing."""
    return ReuseTable(
        touches=full((num_classes,), 0, jnp.int32),
        reuses=full((num_classes, NUM_BINS), 0, jnp.int32),
        index=jax.device_put(np.tile(_first_row(), (num_classes, 1))),
    )


def bin_of(age_ms: Array) -> tuple[Array, Array]:
    """Return the bin of ages (u32[K]), i32[K], and the elapsed part of it, in 1/256."""
    top = jnp.maximum(31 - lax.clz(age_ms | 1).astype(jnp.int32), 10)
    shift = (top - 1).astype(jnp.uint32)
    half = ((age_ms >> shift) & 1).astype(jnp.int32)
    age_bin = 2 * (top - 10) + half + 1
    rest = age_ms & ((jnp.uint32(1) << shift) - 1)
    part = (rest >> (shift - _FINE)).astype(jnp.int32)
    is_first, is_last = age_ms < 1024, age_bin >= NUM_BINS - 1
    age_bin = jnp.where(is_first, 0, jnp.minimum(age_bin, NUM_BINS - 1))
    first_part = (age_ms >> 2).astype(jnp.int32)
    return age_bin, jnp.where(is_first, first_part, jnp.where(is_last, 0, part))


@inlined
def native_bin_of(age_ms: int) -> Any:
    """In-place form of `bin_of`, for one age."""
    bits, age_bin, part = np.int64(age_ms), np.int64(0), np.int64(0)
    if bits < 1024:
        part = bits >> 2
    else:
        top = np.int64(highest_bit(np.uint64(bits)))
        age_bin = 2 * (top - 10) + ((bits >> (top - 1)) & 1) + 1
        part = (bits & ((1 << (top - 1)) - 1)) >> (top - 1 - _FINE)
        if age_bin >= NUM_BINS - 1:
            age_bin = np.int64(NUM_BINS - 1)
            part = np.int64(0)
    return age_bin, part


def count(
    table: ReuseTable, classes: Array, ages_ms: Array, counts: Array
) -> ReuseTable:
    """Record the blocks that were used again, where `counts` (bool[K])."""
    age_bin, _ = bin_of(ages_ms)
    cells = jnp.where(counts, classes * NUM_BINS + age_bin, table.reuses.size)
    reuses = table.reuses.reshape(-1).at[cells].add(UNIT, mode="drop")
    return dataclasses.replace(table, reuses=reuses.reshape(table.reuses.shape))


@inlined
def native_count(table: Any, of_class: int, age_ms: int) -> None:
    """In-place form of `count`, for one block."""
    age_bin, _ = native_bin_of(age_ms)
    table.reuses[of_class, age_bin] += UNIT


def value_of(table: ReuseTable, classes: Array, ages_ms: Array) -> Array:
    """Return the values of blocks: i32[K]."""
    age_bin, part = bin_of(ages_ms)
    cells = classes * (NUM_BINS + 1) + age_bin
    index = table.index.reshape(-1)
    start = index.at[cells].get(mode="promise_in_bounds")
    end = index.at[cells + 1].get(mode="promise_in_bounds")
    return start + ((end - start) >> _FINE) * part


@inlined
def native_value_of(table: Any, of_class: int, age_ms: int) -> Any:
    """In-place form of `value_of`, for one block."""
    age_bin, part = native_bin_of(age_ms)
    start = np.int64(table.index[of_class, age_bin])
    end = np.int64(table.index[of_class, age_bin + 1])
    return start + ((end - start) >> _FINE) * part


def rebuild(table: ReuseTable) -> ReuseTable:
    """Decay the counts, and compute the values of blocks by them."""
    # In halves, as the sum of what is there may be too much for 32 bits.
    total = jnp.maximum(jnp.sum(table.touches >> 1), jnp.sum(table.reuses >> 1))
    halving = (total > MAX_COUNT >> 1).astype(jnp.int32)
    touches, reuses = table.touches >> halving, table.reuses >> halving
    touches -= touches >> DECAY_BITS
    reuses -= reuses >> DECAY_BITS
    return ReuseTable(touches, reuses, _index(touches, reuses, jnp))


@compiled
def native_rebuild(table: Any) -> None:
    """In-place form of `rebuild`."""
    num_classes = table.touches.shape[0]
    total_touches, total_reuses = np.int64(0), np.int64(0)
    for of_class in range(num_classes):
        total_touches += table.touches[of_class] >> 1
        for age_bin in range(NUM_BINS):
            total_reuses += table.reuses[of_class, age_bin] >> 1
    halving = 1 if greater(total_touches, total_reuses) > MAX_COUNT >> 1 else 0
    shares = filled(NUM_BINS, 0, np.int64)
    touches = np.int64(PRIOR_TOUCHES)
    for of_class in range(num_classes):
        num = table.touches[of_class] >> halving
        table.touches[of_class] = num - (num >> DECAY_BITS)
        touches += table.touches[of_class]
        for age_bin in range(NUM_BINS):
            num = table.reuses[of_class, age_bin] >> halving
            table.reuses[of_class, age_bin] = num - (num >> DECAY_BITS)
            shares[age_bin] += table.reuses[of_class, age_bin]
    for age_bin in range(NUM_BINS):
        share = np.float32(shares[age_bin] + PRIOR) / np.float32(touches)
        shares[age_bin] = np.int64(share * np.float32(SHRINK))
    empty: Any = np.int64(-1)  # A class that nothing is known of; all such are alike.
    for of_class in range(num_classes):
        is_empty = table.touches[of_class] == 0
        for age_bin in range(NUM_BINS):
            is_empty &= table.reuses[of_class, age_bin] == 0
        if is_empty and empty >= 0:
            for age_bin in range(NUM_BINS + 1):
                table.index[of_class, age_bin] = table.index[empty, age_bin]
        else:
            _fill_row(table, of_class, shares)
            if is_empty:
                empty = of_class


@compiled
def _fill_row(table: Any, of_class: int, shares: Any) -> None:
    """Compute the value of a class's blocks at each bin's beginning."""
    reuses = empty(NUM_BINS, np.int64)
    held = empty(NUM_BINS, np.float32)
    left: Any = np.int64(table.touches[of_class] + SHRINK)
    for age_bin in range(NUM_BINS):
        num = table.reuses[of_class, age_bin] + shares[age_bin]
        reuses[age_bin] = num
        held[age_bin] = (
            np.float32(greater(left - (num >> 1), (num >> 1) + 1)) * WIDTHS[age_bin]
        )
        left -= num
    best = filled(NUM_BINS + 1, 0, np.float32)
    for age_bin in range(NUM_BINS):
        num, time = np.int64(0), np.float32(0)
        for stop in range(age_bin, NUM_BINS):
            num += reuses[stop]
            time += held[stop]
            best[age_bin] = greater(best[age_bin], np.float32(num) / time)
    best[NUM_BINS] = best[NUM_BINS - 1]
    bits = best.view(np.int32)
    for age_bin in range(NUM_BINS + 1):
        table.index[of_class, age_bin] = bits[age_bin]


def scaled(table: ReuseTable, scale: int) -> ReuseTable:
    """Count each block as more of them, as far as there is room. For the host."""
    touches: Any = np.asarray(table.touches)
    reuses: Any = np.asarray(table.reuses)
    total = int(max(touches.sum(dtype=np.int64), reuses.sum(dtype=np.int64), 1))
    factor = np.int32(max(min(scale, MAX_COUNT // total), 1))
    return from_counts(touches * factor, reuses * factor)


def from_counts(touches: Any, reuses: Any) -> ReuseTable:
    """Make a table of counts (i32[C] and i32[C, 28]). For the host, not for jit."""
    return ReuseTable(touches, reuses, _index(touches, reuses, np))


def _index(touches: Any, reuses: Any, np_: Any) -> Any:
    """Compute the index, by NumPy or by JAX, in the same order of operations."""
    all_touches = np_.sum(touches) + PRIOR_TOUCHES
    all_reuses = np_.sum(reuses, axis=0) + PRIOR
    share = all_reuses.astype(np.float32) / all_touches.astype(np.float32)
    shares = (share * np.float32(SHRINK)).astype(np.int32)
    num = reuses + shares[None]
    left = (touches + SHRINK)[:, None] - (np_.cumsum(num, axis=1) - num)
    counts = np_.maximum(left - (num >> 1), (num >> 1) + 1)
    held = counts.astype(np.float32) * WIDTHS[None]
    best = np_.zeros(num.shape, np.float32)
    sum_num, sum_held = np_.zeros_like(num), np_.zeros_like(held)
    for ahead in range(NUM_BINS):
        pad = ((0, 0), (0, ahead))
        sum_num = sum_num + np_.pad(num[:, ahead:], pad)
        sum_held = sum_held + np_.pad(held[:, ahead:], pad)
        best = np_.maximum(best, sum_num.astype(np.float32) / sum_held)
    best = np_.concatenate([best, best[:, -1:]], axis=1)
    if np_ is np:
        return best.view(np.int32)
    return lax.bitcast_convert_type(best, jnp.int32)


@functools.cache
def _first_row() -> Any:
    touches, reuses = np.zeros(1, np.int32), np.zeros((1, NUM_BINS), np.int32)
    return _index(touches, reuses, np)
