"""The ids of a tier's blocks that no key holds: fresh ones, then the last freed."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.policies.counting import running_count
from jaxkv.types import NO_BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdPool:
    """The ids that no key holds: fresh ones first, then the last freed.

    Attributes:
        num_allocated: i32[]. Ids from here on are fresh, never handed out.
        freed: i32[B]. A stack of ids that were handed out and came back.
        num_freed: i32[]. Height of the stack.
    """

    num_allocated: Array
    freed: Array
    num_freed: Array


def init(num_blocks: int) -> IdPool:
    """Make a pool in which all of `num_blocks` ids are fresh."""
    return IdPool(
        num_allocated=jnp.zeros((), jnp.int32),
        freed=jnp.full((num_blocks,), NO_BLOCK, jnp.int32),
        num_freed=jnp.zeros((), jnp.int32),
    )


def num_free(pool: IdPool) -> Array:
    """Count the ids in the pool: i32[]."""
    return pool.num_freed + pool.freed.shape[0] - pool.num_allocated


def take(
    pool: IdPool, rank: Array, num: Array, evicted: Array, num_evicted: Array
) -> tuple[IdPool, Array]:
    """Take an id for some rows; there are enough, and none of `evicted` is left over.

    Args:
        pool: The ids that no key held before the eviction.
        rank: i32[K]. Number of the row among those that want an id; NO_BLOCK if not.
        num: i32[]. How many rows want one.
        evicted: i32[K]. Ids that go on top of the stack, the last uppermost.
        num_evicted: i32[]. How many.

    Returns:
        The pool after, and i32[K], NO_BLOCK where none was wanted.
    """
    num_blocks = pool.freed.shape[0]
    num_fresh = jnp.minimum(num, num_blocks - pool.num_allocated)
    depth = rank - num_fresh
    from_evicted = evicted[jnp.clip(num_evicted - 1 - depth, 0, evicted.size - 1)]
    height = pool.num_freed + num_evicted
    from_freed = pool.freed[jnp.clip(height - 1 - depth, 0, num_blocks - 1)]
    reused = jnp.where(depth < num_evicted, from_evicted, from_freed)
    block_ids = jnp.where(depth < 0, pool.num_allocated + rank, reused)
    return (
        dataclasses.replace(
            pool,
            num_allocated=pool.num_allocated + num_fresh,
            num_freed=height - (num - num_fresh),
        ),
        jnp.where(rank == NO_BLOCK, NO_BLOCK, block_ids),
    )


def give_back(pool: IdPool, block_ids: Array) -> IdPool:
    """Push ids (i32[K], NO_BLOCK ignored) on the stack, the last on top."""
    given = block_ids != NO_BLOCK
    rank = running_count(given) - 1
    at = jnp.where(given, pool.num_freed + rank, pool.freed.shape[0])
    return dataclasses.replace(
        pool,
        freed=pool.freed.at[at].set(block_ids, mode="drop"),
        num_freed=pool.num_freed + rank[-1] + 1,
    )
