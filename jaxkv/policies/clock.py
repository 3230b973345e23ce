"""The time that a policy was told last.

It is what others say, in milliseconds modulo 2**32, and does not go back.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

_HALF_TIME = np.uint32(1 << 31)


def later(before_ms: Array, is_told: Array, now_ms: Array) -> Array:
    """Give the time after it was told.

    Args:
        before_ms: u32[]. The time before.
        is_told: bool[]. Whether anybody told it.
        now_ms: u32[]. What is told.

    Returns:
        u32[].
    """
    now_ms = jnp.asarray(now_ms, jnp.uint32)
    is_ahead = now_ms - before_ms < _HALF_TIME
    return jnp.where(~is_told | is_ahead, now_ms, before_ms)
