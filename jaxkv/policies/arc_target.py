"""The target of adaptive replacement: a float64 that is kept as its bits.

vLLM's target is a Python float, and its decisions cannot be had exactly with less. JAX
has no float64 unless it is asked for, so the state carries u32[2], and only what
computes with it asks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.policies.counting import running_count

# The lists of ghosts, among those of `jaxkv.policies.arc`.
B1, B2 = range(2)


def zero() -> Array:
    """Make the bits of 0.0: u32[2]."""
    return jnp.zeros((2,), jnp.uint32)


def adapt(target: Array, lists: Array, sizes: Array, num_blocks: int) -> Array:
    """Move the target once for each ghost that was used.

    Args:
        target: u32[2]. Bits of the target before.
        lists: i32[K]. What lists the used entries were in, in the order of use.
        sizes: i32[4]. Entries in each list, the same throughout.
        num_blocks: The highest target.

    Returns:
        u32[2]. Bits of the target after.
    """
    is_ghost = (lists == B1) | (lists == B2)
    rank = running_count(is_ghost) - 1
    at = jnp.where(is_ghost, rank, lists.shape[0])
    ghosts = jnp.zeros_like(lists).at[at].set(lists, mode="drop")
    # The sum is clamped at every step, so the steps cannot be added up beforehand.
    with jax.enable_x64(True):
        # A list of ghosts that was hit is not empty, so this `max` changes no result.
        b1, b2 = jnp.maximum(sizes[:2], 1).astype(jnp.float64)
        up, down = jnp.maximum(b2 / b1, 1.0), jnp.maximum(b1 / b2, 1.0)

        def move(i: Array, value: Array) -> Array:
            raised = jnp.minimum(value + up, float(num_blocks))
            lowered = jnp.maximum(value - down, 0.0)
            return jnp.where(ghosts[i] == B1, raised, lowered)

        value = lax.bitcast_convert_type(target, jnp.float64)
        value = lax.fori_loop(jnp.int32(0), rank[-1] + 1, move, value)
        return lax.bitcast_convert_type(value, jnp.uint32)


def as_int(target: Array) -> Array:
    """Cut the target (u32[2], bits) down to a whole number: i32[]."""
    with jax.enable_x64(True):
        return lax.bitcast_convert_type(target, jnp.float64).astype(jnp.int32)


def as_float(target: Array) -> float:
    """Show the target to a reader. For the host, not for jit."""
    return float(np.asarray(target).view(np.float64)[0])
