"""How soon blocks of each class are used again, and what that makes them worth.

The table counts, for each class, how many blocks were used, and at which ages they were
used again. What a block is worth is the most uses for the time that it is kept which
keeping it can bring: over all ages `stop` at which one may give it up,

    max over stop of  (uses again until then) / (time that blocks are held until then)

(the index of Gittins, 1979, which generalises the hit density of LHD, NSDI 2018). A
class of which little is known is taken to be like all of them together.

Both sets of functions have to agree to the bit, and compilers round sums of products as
they like. So counts are integers, bins are half octaves of which every width is a power
of two, and the index is kept as the bits of a float32, which order as the number does
and are about its logarithm; between two bins they are interpolated as integers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.native.reuse import (
    DECAY_BITS,
    MOST,
    NUM_BINS,
    PRIOR,
    PRIOR_TOUCHES,
    SHRINK,
    UNIT,
    WIDTHS,
)

_FINE = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReuseTable:
    """What was seen of C classes, and what follows.

    Attributes:
        touches: i32[C]. Blocks that were used, `UNIT` for each.
        reuses: i32[C, 28]. Of those, the ones that were used again, by their age then.
        index: i32[C, 29]. What a block is worth at the beginning of each bin, as the
            bits of a float32, in uses a 512 ms; the last column repeats the one before.
    """

    touches: Array
    reuses: Array
    index: Array


def init(num_classes: int) -> ReuseTable:
    """Make a table that has seen nothing."""
    return ReuseTable(
        touches=jnp.zeros((num_classes,), jnp.int32),
        reuses=jnp.zeros((num_classes, NUM_BINS), jnp.int32),
        index=jnp.tile(jnp.asarray(_first_row()), (num_classes, 1)),
    )


def bin_of(age_ms: Array) -> tuple[Array, Array]:
    """Tell the bin of ages (u32[K]) and the part that has gone by: i32[K], in 1/256."""
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


def count(
    table: ReuseTable, classes: Array, ages_ms: Array, counts: Array
) -> ReuseTable:
    """Record the blocks that were used again, where `counts` (bool[K])."""
    age_bin, _ = bin_of(ages_ms)
    cells = jnp.where(counts, classes * NUM_BINS + age_bin, table.reuses.size)
    reuses = table.reuses.reshape(-1).at[cells].add(UNIT, mode="drop")
    return dataclasses.replace(table, reuses=reuses.reshape(table.reuses.shape))


def value_of(table: ReuseTable, classes: Array, ages_ms: Array) -> Array:
    """Tell what blocks are worth: i32[K], the more the higher."""
    age_bin, part = bin_of(ages_ms)
    cells = classes * (NUM_BINS + 1) + age_bin
    index = table.index.reshape(-1)
    here = index.at[cells].get(mode="promise_in_bounds")
    there = index.at[cells + 1].get(mode="promise_in_bounds")
    return here + ((there - here) >> _FINE) * part


def rebuild(table: ReuseTable) -> ReuseTable:
    """Let the counts decay, and compute what blocks are worth by them."""
    # In halves, as the sum of what is there may be too much for 32 bits.
    total = jnp.maximum(jnp.sum(table.touches >> 1), jnp.sum(table.reuses >> 1))
    halving = (total > MOST >> 1).astype(jnp.int32)
    touches, reuses = table.touches >> halving, table.reuses >> halving
    touches -= touches >> DECAY_BITS
    reuses -= reuses >> DECAY_BITS
    return ReuseTable(touches, reuses, _index(touches, reuses, jnp))


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
