"""Reuse statistics: how soon blocks of each class are used again, and their value.

For each class, the table counts the blocks used, and the blocks used again by their age
at that time. The value of a block is the highest hit rate that can be gained by keeping
it until some age `stop`:

    max over stop of  (reuses up to stop) / (time that blocks are held up to stop)

This is the Gittins index (1979), which generalises the hit density of LHD (NSDI 2018).
The statistics of a class with few uses are shrunk towards the rates of all classes.

All processes of an engine must decide alike, whatever compiled their code. So counts
are integers, bins are half octaves whose widths are powers of two, and the index is
stored as the bits of a float32. The bits, as integers, sort like the float and are
nearly its logarithm; they are interpolated between bins.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.compiling import compiled, empty, filled, greater, highest_bit, inlined
from jaxkv.policies.xla import full

NUM_BINS = 28
"""Bins of the age at reuse: half octaves, the last unbounded."""

UNIT = 16
"""The weight of one use, so that decay does not round few uses to 0."""

SHRINK = 200 * UNIT
"""The weight of the statistics of all classes in each class."""

PRIOR = 1 * UNIT
"""The prior weight of reuses in each bin."""

PRIOR_TOUCHES = 2 * NUM_BINS * PRIOR
"""The prior weight of uses, so high that a block's value falls with its age."""

DECAY_BITS = 8
"""Each rebuild lowers all counts by 1/256."""

MAX_COUNT = 1 << 28
"""Counts are halved if their total exceeds this."""

WIDTHS = np.array([2] + [1 << (b - 1) // 2 for b in range(1, NUM_BINS)], np.float32)
"""f32[28]. The width of each bin in 512 ms: powers of two, so that products are exact
and no compiler can round sums of them differently."""

_FRACTION_BITS = 8  # Of an age's position in its bin.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReuseTable:
    """Counts of C classes, and the values computed from them."""

    touches: Array  # i32[C]. Blocks that were used, `UNIT` for each.
    reuses: Array  # i32[C, 28]. Blocks used again by age at that time, `UNIT` for each.
    index: Array
    """i32[C, 29]. The value of a block at the start of each bin, in uses per 512 ms, as
    the bits of a float32; the last column repeats the one before."""


def init(num_classes: int) -> ReuseTable:
    """Make a table without counts."""
    return ReuseTable(
        touches=full((num_classes,), 0, jnp.int32),
        reuses=full((num_classes, NUM_BINS), 0, jnp.int32),
        index=jax.device_put(np.tile(_first_row(), (num_classes, 1))),
    )


@inlined
def native_bin_of(age_ms: int) -> Any:
    """Return the bin of an age, and its position there in 1/256."""
    bits, age_bin, fraction = np.int64(age_ms), np.int64(0), np.int64(0)
    if bits < 1024:
        fraction = bits >> 2
    else:
        top = np.int64(highest_bit(np.uint64(bits)))
        age_bin = 2 * (top - 10) + ((bits >> (top - 1)) & 1) + 1
        fraction = (bits & ((1 << (top - 1)) - 1)) >> (top - 1 - _FRACTION_BITS)
        if age_bin >= NUM_BINS - 1:
            age_bin = np.int64(NUM_BINS - 1)
            fraction = np.int64(0)
    return age_bin, fraction


@inlined
def native_count(table: Any, class_id: int, age_ms: int) -> None:
    """Count a reuse of a block of a class, at its age."""
    age_bin, _ = native_bin_of(age_ms)
    table.reuses[class_id, age_bin] += UNIT


@inlined
def native_value_of(table: Any, class_id: int, age_ms: int) -> Any:
    """Return the value of a block by its class and age."""
    age_bin, fraction = native_bin_of(age_ms)
    start = np.int64(table.index[class_id, age_bin])
    end = np.int64(table.index[class_id, age_bin + 1])
    return start + ((end - start) >> _FRACTION_BITS) * fraction


@compiled
def native_rebuild(table: Any) -> None:
    """Decay the counts, and compute the values of blocks from them."""
    num_classes = table.touches.shape[0]
    total_touches, total_reuses = np.int64(0), np.int64(0)
    for class_id in range(num_classes):
        total_touches += table.touches[class_id] >> 1
        for age_bin in range(NUM_BINS):
            total_reuses += table.reuses[class_id, age_bin] >> 1
    halving = 1 if greater(total_touches, total_reuses) > MAX_COUNT >> 1 else 0
    shares = filled(NUM_BINS, 0, np.int64)
    touches = np.int64(PRIOR_TOUCHES)
    for class_id in range(num_classes):
        num = table.touches[class_id] >> halving
        table.touches[class_id] = num - (num >> DECAY_BITS)
        touches += table.touches[class_id]
        for age_bin in range(NUM_BINS):
            num = table.reuses[class_id, age_bin] >> halving
            table.reuses[class_id, age_bin] = num - (num >> DECAY_BITS)
            shares[age_bin] += table.reuses[class_id, age_bin]
    for age_bin in range(NUM_BINS):
        share = np.float32(shares[age_bin] + PRIOR) / np.float32(touches)
        shares[age_bin] = np.int64(share * np.float32(SHRINK))
    empty: Any = np.int64(-1)  # First class without counts, whose row others copy.
    for class_id in range(num_classes):
        is_empty = table.touches[class_id] == 0
        for age_bin in range(NUM_BINS):
            is_empty &= table.reuses[class_id, age_bin] == 0
        if is_empty and empty >= 0:
            for age_bin in range(NUM_BINS + 1):
                table.index[class_id, age_bin] = table.index[empty, age_bin]
        else:
            _fill_row(table, class_id, shares)
            if is_empty:
                empty = class_id


@compiled
def _fill_row(table: Any, class_id: int, shares: Any) -> None:
    """Compute a class's row of the index. `shares` (i64[28]) are its prior reuses."""
    reuses = empty(NUM_BINS, np.int64)
    held_time = empty(NUM_BINS, np.float32)
    survivors: Any = np.int64(table.touches[class_id] + SHRINK)
    for age_bin in range(NUM_BINS):
        num = table.reuses[class_id, age_bin] + shares[age_bin]
        reuses[age_bin] = num
        num_held = greater(survivors - (num >> 1), (num >> 1) + 1)
        held_time[age_bin] = np.float32(num_held) * WIDTHS[age_bin]
        survivors -= num
    best = filled(NUM_BINS + 1, 0, np.float32)
    for age_bin in range(NUM_BINS):
        num, time = np.int64(0), np.float32(0)
        for stop in range(age_bin, NUM_BINS):
            num += reuses[stop]
            time += held_time[stop]
            best[age_bin] = greater(best[age_bin], np.float32(num) / time)
    best[NUM_BINS] = best[NUM_BINS - 1]
    bits = best.view(np.int32)
    for age_bin in range(NUM_BINS + 1):
        table.index[class_id, age_bin] = bits[age_bin]


def scaled(table: ReuseTable, scale: int) -> ReuseTable:
    """Scale counts by at most `scale`, within MAX_COUNT. For the host, not for jit."""
    touches: Any = np.asarray(table.touches)
    reuses: Any = np.asarray(table.reuses)
    total = int(max(touches.sum(dtype=np.int64), reuses.sum(dtype=np.int64), 1))
    factor = np.int32(max(min(scale, MAX_COUNT // total), 1))
    return from_counts(touches * factor, reuses * factor)


def from_counts(touches: Any, reuses: Any) -> ReuseTable:
    """Make a table from counts (i32[C] and i32[C, 28]). For the host, not for jit."""
    return ReuseTable(touches, reuses, _index(touches, reuses))


def _index(touches: Any, reuses: Any) -> Any:
    """Compute the index in the order of `_fill_row`."""
    all_touches = np.sum(touches) + PRIOR_TOUCHES
    all_reuses = np.sum(reuses, axis=0) + PRIOR
    share = all_reuses.astype(np.float32) / all_touches.astype(np.float32)
    shares = (share * np.float32(SHRINK)).astype(np.int32)
    num = reuses + shares[None]
    survivors = (touches + SHRINK)[:, None] - (np.cumsum(num, axis=1) - num)
    num_held = np.maximum(survivors - (num >> 1), (num >> 1) + 1)
    held_time = num_held.astype(np.float32) * WIDTHS[None]
    best = np.zeros(num.shape, np.float32)
    sum_num, sum_time = np.zeros_like(num), np.zeros_like(held_time)
    for ahead in range(NUM_BINS):
        pad = ((0, 0), (0, ahead))
        sum_num = sum_num + np.pad(num[:, ahead:], pad)
        sum_time = sum_time + np.pad(held_time[:, ahead:], pad)
        best = np.maximum(best, sum_num.astype(np.float32) / sum_time)
    best = np.concatenate([best, best[:, -1:]], axis=1)
    return best.view(np.int32)


@functools.cache
def _first_row() -> Any:
    touches, reuses = np.zeros(1, np.int32), np.zeros((1, NUM_BINS), np.int32)
    return _index(touches, reuses)
