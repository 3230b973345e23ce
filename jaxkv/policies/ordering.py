"""An order between reading an array and writing to it, that XLA can see.

A donated array is updated in place only if XLA can prove that whatever reads its old
value comes first; else it copies the whole of it, which for a large cache costs more
than all the rest of a call. A read that comes first in the program proves nothing: the
write has to depend on what was read.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def after(indices: Array, *reads: Array) -> Array:
    """Make what is done at `indices` wait for values that were read.

    Args:
        indices: i32[K]. Where a scatter will write; none is negative.
        reads: i32[K, ...] or u32[K, ...]. What was gathered from the same array.

    Returns:
        `indices`, depending on every one of `reads`.
    """
    # Always 0, as no index is negative, but XLA does not know that.
    zero = indices >> 31
    for read in reads:
        words = lax.bitcast_convert_type(read, jnp.int32)
        # One word of a row is enough: they are all read at once.
        indices += words.reshape(words.shape[0], -1)[:, 0] & zero
    return indices
