"""The time of the last note to a policy: milliseconds modulo 2**32.

It comes from callers and never goes back.
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
    """Return the later of the last time, if `is_told`, and a new one: u32[]."""
    now_ms = jnp.asarray(now_ms, jnp.uint32)
    is_ahead = now_ms - before_ms < _HALF_TIME
    return jnp.where(~is_told | is_ahead, now_ms, before_ms)


@inlined
def tell(state: Any, now_ms: int) -> None:
    """Record a time, unless it goes back."""
    ahead = (now_ms - np.int64(state.now_ms[()])) & TIME_MASK
    if not state.is_told[()] or ahead < _HALF_TIME:
        state.now_ms[()] = now_ms & TIME_MASK
    state.is_told[()] = True


@inlined
def age_of(now_ms: int, last_ms: Any) -> Any:
    """Return the time since another; both are modulo 2**32."""
    return (now_ms - np.int64(last_ms)) & TIME_MASK
