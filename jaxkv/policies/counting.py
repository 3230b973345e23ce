"""Running counts over a batch of flags."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_WORD = 32
_BITS = np.uint32(1) << np.arange(_WORD, dtype=np.uint32)
_UP_TO = np.uint32(0xFFFFFFFF) >> np.arange(_WORD - 1, -1, -1, dtype=np.uint32)


def running_count(flags: Array) -> Array:
    """Count the true values up to and including each position.

    The same as a cumulative sum, with a sum over words of 32 flags and population
    counts inside them in place of one over every flag, which XLA:CPU does slowly.

    Args:
        flags: bool[K].

    Returns:
        i32[K].
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
