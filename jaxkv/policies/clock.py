"""The time that a policy was told last.

It is what others say, in milliseconds modulo 2**32, and does not go back.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.compiling import inlined

TIME_MASK = (1 << 32) - 1
_HALF_TIME = np.uint32(1 << 31)


def later(before_ms: Array, is_told: Array, now_ms: Array) -> Array:
    """Give the time after it was told.

    Args:
        before_ms: u32[]. The time before.
        is_told: bool[]. Whether it is known.
        now_ms: u32[]. What is told.

    Returns:
        u32[].
    """
    now_ms = jnp.asarray(now_ms, jnp.uint32)
    is_ahead = now_ms - before_ms < _HALF_TIME
    return jnp.where(~is_told | is_ahead, now_ms, before_ms)


@inlined
def tell(state: Any, now_ms: int) -> None:
    """Note the time, which does not go back."""
    ahead = (now_ms - np.int64(state.now_ms[()])) & TIME_MASK
    if not state.is_told[()] or ahead < _HALF_TIME:
        state.now_ms[()] = now_ms & TIME_MASK
    state.is_told[()] = True


@inlined
def age_of(now_ms: int, last_ms: Any) -> Any:
    """Tell how long ago a time was; both are modulo 2**32."""
    return (now_ms - np.int64(last_ms)) & TIME_MASK
