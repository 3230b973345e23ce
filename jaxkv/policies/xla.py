"""Workarounds for XLA:CPU: update in place, count flags fast.

`running_count` is a fast cumulative sum of flags. `after` orders a read of an array
before a write to it. XLA updates a donated array in place only if it can prove that
order; otherwise it copies the whole array, which for a large cache costs more than the
rest of a call. Program order proves nothing: the write must depend on what was read.
`full` makes an array without a program, which XLA would compile for each shape.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_WORD = 32
_BITS = np.uint32(1) << np.arange(_WORD, dtype=np.uint32)
# u32[32]. Mask of the bits 0 to i.
_UP_TO = np.uint32(0xFFFFFFFF) >> np.arange(_WORD - 1, -1, -1, dtype=np.uint32)


def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Array:
    """Make an array of one value: dtype[shape]."""
    made: Array = jax.device_put(np.full(shape, value, dtype))
    return made


def running_count(flags: Array) -> Array:
    """Count the true values of bool[K] up to and including each position: i32[K].

    Equals `jnp.cumsum`, which is slow on XLA:CPU, but packs 32 flags into a word.
    """
    num_flags = flags.size
    if num_flags < _WORD:
        flags = jnp.pad(flags, (0, _WORD - num_flags))
    if flags.size % _WORD:
        return jnp.cumsum(flags, dtype=jnp.int32)
    bits = jnp.where(flags.reshape(-1, _WORD), _BITS[None], jnp.uint32(0))
    words = jnp.sum(bits, axis=1, dtype=jnp.uint32)
    counts = lax.population_count(words)
    if counts.size <= _WORD:
        is_before = np.tri(counts.size, k=-1, dtype=np.bool_)
        before = jnp.sum(jnp.where(is_before, counts[None], 0), axis=1)
    else:
        before = jnp.cumsum(counts) - counts
    within = lax.population_count(words[:, None] & _UP_TO[None])
    running = (before.astype(jnp.uint32)[:, None] + within).reshape(-1)
    return running[:num_flags].astype(jnp.int32)


def after(indices: Array, *reads: Array) -> Array:
    """Make a scatter at `indices` (i32[K], none negative) wait for earlier reads.

    `reads` (i32[K, ...] or u32[K, ...]) were gathered from the same array. Returns
    equal `indices` that depend on each of them.
    """
    # Always 0, as no index is negative, but XLA does not know that.
    zero = indices >> 31
    for read in reads:
        words = lax.bitcast_convert_type(read, jnp.int32)
        # One word per row suffices, as each gather reads whole rows.
        indices += words.reshape(words.shape[0], -1)[:, 0] & zero
    return indices
