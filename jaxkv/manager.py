"""Which block of the host tier holds what: pure functions over one pytree.

`ManagerState` joins a policy's state, the reference counts and the pool of block ids.
The functions here take `(policy, state, keys, count)` and return the state afterwards
and an answer; they may be traced, scanned and vmapped, never raise, and leave the
state bit for bit as it was when they refuse. `jaxkv.offloading_manager` puts vLLM's
face on them.

The life of a block is its reference count: NOT_READY while its bytes are on the way
to the host, 0 when it can be read or evicted, and above 0 while loads read it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.policies.directory import first_occurrence
from jaxkv.types import NO_BLOCK, Policy, PyTree

NOT_READY = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """The ids that no key holds: fresh ones first, then the last freed.

    Attributes:
        num_allocated: i32[]. Ids from here on are fresh, never handed out.
        freed: i32[B]. A stack of ids that were handed out and came back.
        num_freed: i32[]. Height of the stack.
    """

    num_allocated: Array
    freed: Array
    num_freed: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ManagerState:
    """Everything known about the host tier.

    Attributes:
        policy: The policy's own state.
        ref_cnt: i32[B]. NOT_READY, or the number of loads that read the block. 0 for
            ids in the pool.
        pool: The ids that no key holds.
    """

    policy: PyTree
    ref_cnt: Array
    pool: BlockPool


class LoadAnswer(NamedTuple):
    """What became of a batch of blocks to be read.

    Attributes:
        block_ids: i32[K]. Block of each key, NO_BLOCK where it is absent or padding.
        bad: bool[K]. The keys that are in the way. If any, nothing was done.
    """

    block_ids: Array
    bad: Array


class StoreAnswer(NamedTuple):
    """What became of a batch of blocks to be stored.

    Attributes:
        ok: bool[]. False if there was no room; then nothing was done.
        block_ids: i32[K]. Block that each key is to be stored in, NO_BLOCK where the
            key is already known, repeats an earlier one, or is padding.
        evicted_keys: u32[K, 8]. Keys that had to leave, in the order of eviction.
        num_evicted: i32[]. How many.
    """

    ok: Array
    block_ids: Array
    evicted_keys: Array
    num_evicted: Array


def init(policy: Policy, num_blocks: int) -> ManagerState:
    """Make the state of an empty host tier of `num_blocks` under `policy`."""
    return ManagerState(
        policy=policy.init(),
        ref_cnt=jnp.zeros((num_blocks,), jnp.int32),
        pool=BlockPool(
            num_allocated=jnp.zeros((), jnp.int32),
            freed=jnp.full((num_blocks,), NO_BLOCK, jnp.int32),
            num_freed=jnp.zeros((), jnp.int32),
        ),
    )


def lookup(policy: Policy, state: ManagerState, keys: Array, count: Array) -> Array:
    """Count the keys, from the first on, whose blocks can be read: i32[]."""
    block_ids = policy.find(state.policy, keys, count)
    hit = (block_ids != NO_BLOCK) & (_ref_cnt(state, block_ids) >= 0)
    return jnp.sum(jnp.cumprod(hit, dtype=jnp.int32), dtype=jnp.int32)


def touch(
    policy: Policy, state: ManagerState, keys: Array, count: Array
) -> ManagerState:
    """Record a use of each key, the first key as the most recent."""
    touched = policy.touch(state.policy, keys, count, state.ref_cnt)
    return dataclasses.replace(state, policy=touched)


def prepare_load(
    policy: Policy, state: ManagerState, keys: Array, count: Array
) -> tuple[ManagerState, LoadAnswer]:
    """Pin blocks that are about to be read. All keys must be known and ready."""
    block_ids = policy.find(state.policy, keys, count)
    known = block_ids != NO_BLOCK
    bad = _valid(keys, count) & ~(known & (_ref_cnt(state, block_ids) >= 0))
    pinned = jnp.where(jnp.any(bad), NO_BLOCK, block_ids)
    ref_cnt = state.ref_cnt.at[_index(state, pinned)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), LoadAnswer(block_ids, bad)


def complete_load(
    policy: Policy, state: ManagerState, keys: Array, count: Array
) -> tuple[ManagerState, LoadAnswer]:
    """Unpin blocks that were read. Each key must have a load in progress."""
    block_ids = policy.find(state.policy, keys, count)
    ref_cnt = state.ref_cnt.at[_index(state, block_ids)].add(-1, mode="drop")
    after = dataclasses.replace(state, ref_cnt=ref_cnt)
    # A key may be given as often as it was pinned; one time more makes it negative.
    known = block_ids != NO_BLOCK
    bad = _valid(keys, count) & ~(known & (_ref_cnt(after, block_ids) >= 0))
    undone = jnp.where(jnp.any(bad), block_ids, NO_BLOCK)
    ref_cnt = ref_cnt.at[_index(state, undone)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), LoadAnswer(block_ids, bad)


def prepare_store(
    policy: Policy, state: ManagerState, keys: Array, count: Array
) -> tuple[ManagerState, StoreAnswer]:
    """Give every unknown key a block, evicting others where there is no free one.

    None of the keys given is evicted to make room for another. A key that repeats an
    earlier one of the batch counts once.
    """
    num_blocks = state.ref_cnt.shape[0]
    present = policy.find(state.policy, keys, count)
    missing = _valid(keys, count) & (present == NO_BLOCK)
    missing &= first_occurrence(keys, missing)

    num_missing = jnp.sum(missing, dtype=jnp.int32)
    num_free = state.pool.num_freed + num_blocks - state.pool.num_allocated
    # For the length of the eviction the batch counts as being read. `max` rather than
    # `add`: one more than NOT_READY would be 0, which is evictable.
    protected = state.ref_cnt.at[_index(state, present)].max(1, mode="drop")
    num_short = jnp.maximum(num_missing - num_free, 0)
    evicted = policy.evict(state.policy, num_short, protected, keys.shape[0])
    pool = _release(state.pool, evicted.block_ids)

    pool, block_ids = _allocate(pool, missing & evicted.ok, num_blocks)
    inserted = policy.insert(evicted.state, keys, block_ids)
    stored = jnp.where(inserted.inserted, block_ids, NO_BLOCK)
    pool = _release(pool, jnp.where(inserted.inserted, NO_BLOCK, block_ids))

    ref_cnt = state.ref_cnt.at[_index(state, stored)].set(NOT_READY, mode="drop")
    num_evicted = jnp.sum(evicted.block_ids != NO_BLOCK, dtype=jnp.int32)
    return (
        ManagerState(inserted.state, ref_cnt, pool),
        StoreAnswer(evicted.ok, stored, evicted.keys, num_evicted),
    )


def complete_store(
    policy: Policy, state: ManagerState, keys: Array, count: Array, success: Array
) -> tuple[ManagerState, Array]:
    """End stores in progress: the blocks become readable, or are given back.

    Args:
        policy: The policy.
        state: The state before.
        keys: u32[K, 8]. Keys that are absent or ready are ignored.
        count: i32[]. How many of them are meant.
        success: bool[]. Whether the bytes arrived.

    Returns:
        The state after, and bool[K]: the keys whose store ended here.
    """
    block_ids = policy.find(state.policy, keys, count)
    ended = (block_ids != NO_BLOCK) & (_ref_cnt(state, block_ids) == NOT_READY)
    ended &= first_occurrence(keys, ended)
    ended_ids = jnp.where(ended, block_ids, NO_BLOCK)
    ref_cnt = state.ref_cnt.at[_index(state, ended_ids)].set(0, mode="drop")
    lost = jnp.where(success, NO_BLOCK, ended_ids)
    return (
        ManagerState(
            policy=policy.remove(state.policy, keys, lost),
            ref_cnt=ref_cnt,
            pool=_release(state.pool, lost),
        ),
        ended,
    )


def _valid(keys: Array, count: Array) -> Array:
    """Tell keys from padding: bool[K]."""
    return jnp.arange(keys.shape[0], dtype=jnp.int32) < count


def _index(state: ManagerState, block_ids: Array) -> Array:
    """Map NO_BLOCK out of range, where a scatter drops it (-1 would wrap around)."""
    return jnp.where(block_ids == NO_BLOCK, state.ref_cnt.shape[0], block_ids)


def _ref_cnt(state: ManagerState, block_ids: Array) -> Array:
    """Read reference counts, NOT_READY for NO_BLOCK."""
    return state.ref_cnt.at[_index(state, block_ids)].get(
        mode="fill", fill_value=NOT_READY
    )


def _allocate(
    pool: BlockPool, wanted: Array, num_blocks: int
) -> tuple[BlockPool, Array]:
    """Take an id for each row of `wanted` (bool[K]); there are enough."""
    rank = jnp.cumsum(wanted, dtype=jnp.int32) - 1
    num_fresh = jnp.minimum(rank[-1] + 1, num_blocks - pool.num_allocated)
    num_reused = rank[-1] + 1 - num_fresh
    from_top = jnp.clip(pool.num_freed - 1 - (rank - num_fresh), 0, num_blocks - 1)
    block_ids = jnp.where(
        rank < num_fresh, pool.num_allocated + rank, pool.freed[from_top]
    )
    return (
        dataclasses.replace(
            pool,
            num_allocated=pool.num_allocated + num_fresh,
            num_freed=pool.num_freed - num_reused,
        ),
        jnp.where(wanted, block_ids, NO_BLOCK),
    )


def _release(pool: BlockPool, block_ids: Array) -> BlockPool:
    """Push ids (i32[K], NO_BLOCK ignored) on the stack, the last on top."""
    given = block_ids != NO_BLOCK
    rank = jnp.cumsum(given, dtype=jnp.int32) - 1
    at = jnp.where(given, pool.num_freed + rank, pool.freed.shape[0])
    return dataclasses.replace(
        pool,
        freed=pool.freed.at[at].set(block_ids, mode="drop"),
        num_freed=pool.num_freed + rank[-1] + 1,
    )
