"""The blocks of the host tier: pure functions over one pytree.

`HostState` has the policy's state, the reference counts and the pool of block ids. The
functions take `(policy, state, keys, count)` and return the new state and an answer.
Keys are u32[K, 8]; the first `count` (i32[]) are valid, the others are padding. The
functions can be traced, scanned and vmapped, and never raise: on bad input they return
the state unchanged, bit for bit. They are the reference for the in-place forms in
`host_native`. Pad a batch to at least two rows: XLA:CPU turns a scatter of one row into
an update that copies the whole array.

A block's reference count is NOT_READY while its store is in flight, 0 when the block
can be read or evicted, and above 0 while loads read it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.policies.base import Policy
from jaxkv.policies.directory import first_occurrence
from jaxkv.policies.xla import full, running_count
from jaxkv.types import NO_BLOCK, NOT_READY, PyTree

_PROTECTION = 1 << 30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdPool:
    """The free block ids. Never-used ids are allocated first, then the latest freed."""

    num_allocated: Array  # i32[]. Ids from this one on were never allocated.
    freed: Array  # i32[B]. A stack of ids that were allocated and freed.
    num_freed: Array  # i32[]. Height of the stack.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostState:
    """The state of the host tier."""

    policy: PyTree  # The state of the policy.
    ref_cnt: Array
    """i32[B]. NOT_READY, or the number of loads that read the block; 0 if free."""
    pool: IdPool


class LoadAnswer(NamedTuple):
    """The blocks of the keys to load."""

    bad_row: Array
    """i32[]. The first key that cannot be loaded, -1 for none. If any, no change."""
    block_ids: Array
    """i32[K]. The block of each key, NO_BLOCK where it is absent or padding."""


class StoreAnswer(NamedTuple):
    """The blocks allocated to store keys."""

    num_stored: Array
    """i32[]. Keys to store."""
    num_evicted: Array
    """i32[]. Evicted keys; -1 if there was no room, and nothing changed."""
    num_declined: Array
    """i32[]. Keys that the policy does not want to store."""
    block_ids: Array
    """i32[K]. The block for each key, NO_BLOCK where the key is already known, repeats
    an earlier one, or is padding."""
    evicted_keys: Array
    """u32[K, 8]. In the order of eviction."""


class StepAnswer(NamedTuple):
    """The blocks to load, and the blocks allocated to store, for a request."""

    num_hits: Array
    """i32[]. Length of the prefix to load."""
    num_stored: Array
    """i32[]. Keys to store after the prefix."""
    num_evicted: Array
    """i32[]. Evicted keys; -1 if there was no room, and no key is stored."""
    num_declined: Array
    """i32[]. Keys that the policy does not want to store."""
    block_ids: Array
    """i32[K]. Blocks to load for the first `num_hits` keys, blocks to store for the
    others; NO_BLOCK where a later key is already known, repeats an earlier one, or is
    padding."""
    evicted_keys: Array
    """u32[K, 8]. In the order of eviction."""


def init(policy: Policy) -> HostState:
    """Make the state of an empty host tier with `policy.num_blocks` blocks."""
    return HostState(
        policy=policy.init(),
        ref_cnt=full((policy.num_blocks,), 0, jnp.int32),
        pool=_init_pool(policy.num_blocks),
    )


def find(policy: Policy, state: HostState, keys: Array, count: Array) -> Array:
    """Return the block of each key, including stores in progress: i32[K]."""
    block_ids: Array = policy.find(state.policy, keys, count)
    return block_ids


def find_readable(policy: Policy, state: HostState, keys: Array, count: Array) -> Array:
    """Return the readable block of each key: i32[K], NO_BLOCK if it has none."""
    block_ids = policy.find(state.policy, keys, count)
    return jnp.where(_ref_cnt(state, block_ids) >= 0, block_ids, NO_BLOCK)


def lookup(policy: Policy, state: HostState, keys: Array, count: Array) -> Array:
    """Return the length of the prefix whose blocks are readable: i32[]."""
    return _prefix_length(find_readable(policy, state, keys, count) != NO_BLOCK)


def touch(
    policy: Policy,
    state: HostState,
    keys: Array,
    count: Array,
    counts_as_use: Array | bool = True,
) -> HostState:
    """Record a use of each key, or only reorder; the first key becomes most recent."""
    ready = find_readable(policy, state, keys, count) != NO_BLOCK
    touched = policy.touch(state.policy, keys, count, ready & counts_as_use)
    return dataclasses.replace(state, policy=touched)


def note(
    policy: Policy,
    state: HostState,
    keys: Array,
    count: Array,
    kind: int,
    positions: Array,
    facts: Array,
) -> tuple[HostState, Array]:
    """Pass an event of a request to a policy that uses events; see `Policy.note`."""
    if policy.note is None:
        return state, jnp.zeros((), jnp.int32)
    new_policy, mark = policy.note(state.policy, kind, keys, count, positions, facts)
    return dataclasses.replace(state, policy=new_policy), mark


def prepare_load(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, LoadAnswer]:
    """Pin blocks before they are read. All keys must have readable blocks."""
    block_ids = policy.find(state.policy, keys, count)
    bad_row = _first(_valid(keys, count) & (_ref_cnt(state, block_ids) < 0))
    pinned = jnp.where(bad_row >= 0, NO_BLOCK, block_ids)
    ref_cnt = state.ref_cnt.at[_index(state, pinned)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), LoadAnswer(bad_row, block_ids)


def pin(state: HostState, block_ids: Array) -> tuple[HostState, Array]:
    """Pin blocks (i32[K], NO_BLOCK for padding) that `find` has just returned.

    The answer, bool[], is False, with nothing changed, if a block is being stored.
    """
    ok = jnp.all((block_ids == NO_BLOCK) | (_ref_cnt(state, block_ids) >= 0))
    pinned = jnp.where(ok, block_ids, NO_BLOCK)
    ref_cnt = state.ref_cnt.at[_index(state, pinned)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), ok


def complete_load(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, LoadAnswer]:
    """Unpin blocks that were read. Each key must have a load in progress."""
    block_ids = policy.find(state.policy, keys, count)
    ref_cnt = state.ref_cnt.at[_index(state, block_ids)].add(-1, mode="drop")
    unpinned = dataclasses.replace(state, ref_cnt=ref_cnt)
    # The count is negative if a key is listed more often than it was pinned.
    bad_row = _first(_valid(keys, count) & (_ref_cnt(unpinned, block_ids) < 0))
    repinned = jnp.where(bad_row >= 0, block_ids, NO_BLOCK)
    ref_cnt = ref_cnt.at[_index(state, repinned)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), LoadAnswer(bad_row, block_ids)


def prepare_store(
    policy: Policy,
    state: HostState,
    keys: Array,
    count: Array,
    may_decline: Array | bool = True,
) -> tuple[HostState, StoreAnswer]:
    """Allocate a block for each absent key, evicting other blocks if necessary.

    No key of the batch is evicted for another one. A repeated key gets one block. The
    policy declines none unless `may_decline` (bool[]).
    """
    present = policy.find(state.policy, keys, count)
    missing = _valid(keys, count) & (present == NO_BLOCK)
    is_hit = jnp.bool_(False)
    return _store(policy, state, keys, present, missing, may_decline, is_hit=is_hit)


def complete_store(
    policy: Policy, state: HostState, keys: Array, count: Array, success: Array
) -> tuple[HostState, Array]:
    """End stores in progress: the blocks become readable, or free if not `success`.

    `success` is bool[]. Keys that are absent or ready are ignored. The answer, bool[K],
    marks the keys whose store has ended.
    """
    block_ids = policy.find(state.policy, keys, count)
    ended = (block_ids != NO_BLOCK) & (_ref_cnt(state, block_ids) == NOT_READY)
    # Of rows with the same block, the first has the lowest mark and ends the store.
    marks = NOT_READY - keys.shape[0] + jnp.arange(keys.shape[0], dtype=jnp.int32)
    marked_at = _index(state, jnp.where(ended, block_ids, NO_BLOCK))
    marked = state.ref_cnt.at[marked_at].min(marks, mode="drop")
    ended &= _ref_cnt(dataclasses.replace(state, ref_cnt=marked), block_ids) == marks
    ended_ids = jnp.where(ended, block_ids, NO_BLOCK)
    ref_cnt = marked.at[_index(state, ended_ids)].set(0, mode="drop")
    failed = jnp.where(success, NO_BLOCK, ended_ids)
    removed = policy.remove(state.policy, keys, failed)
    return HostState(removed, ref_cnt, _free(state.pool, failed)), ended


def discard(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, Array]:
    """Evict idle blocks: those with no load or store in progress.

    The answer, bool[K], marks the evicted keys.
    """
    block_ids = policy.find(state.policy, keys, count)
    idle = (block_ids != NO_BLOCK) & (_ref_cnt(state, block_ids) == 0)
    idle &= first_occurrence(keys, idle)
    block_ids = jnp.where(idle, block_ids, NO_BLOCK)
    removed = policy.remove(state.policy, keys, block_ids)
    return HostState(removed, state.ref_cnt, _free(state.pool, block_ids)), idle


def request_step(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, StepAnswer]:
    """Serve a prefix: pin readable blocks and allocate blocks for the other keys.

    Equals `lookup`, `touch`, `prepare_load` of the hits and `prepare_store` of all
    keys, with one search for the keys instead of four. `complete_step` ends it.
    """
    block_ids = policy.find(state.policy, keys, count)
    ready = _ref_cnt(state, block_ids) >= 0
    num_hits = _prefix_length(ready)
    is_hit = jnp.arange(keys.shape[0], dtype=jnp.int32) < num_hits
    touched = policy.touch(state.policy, keys, count, ready)
    missing = _valid(keys, count) & (block_ids == NO_BLOCK)
    state = dataclasses.replace(state, policy=touched)
    state, stored = _store(policy, state, keys, block_ids, missing, True, is_hit=is_hit)
    block_ids = jnp.where(is_hit, block_ids, stored.block_ids)
    return state, StepAnswer(num_hits, *stored._replace(block_ids=block_ids))


def complete_step(
    state: HostState, block_ids: Array, num_hits: Array
) -> tuple[HostState, Array]:
    """End the loads and stores of a `request_step` after all of them have succeeded.

    It takes the step's `block_ids` and `num_hits`, so it needs no search. If a transfer
    failed, call `complete_load` and `complete_store` instead. The answer, bool[], is
    False, with nothing changed, if one of the loads or stores is not in progress.
    """
    is_hit = jnp.arange(block_ids.shape[0], dtype=jnp.int32) < num_hits
    # A load ends with one reader less, a store goes from NOT_READY to 0.
    change = jnp.where(is_hit, -1, -NOT_READY)
    ref_cnt = state.ref_cnt.at[_index(state, block_ids)].add(change, mode="drop")
    # The count is negative if a block is listed more often than it was pinned.
    counts = _ref_cnt(dataclasses.replace(state, ref_cnt=ref_cnt), block_ids)
    was_in_flight = jnp.where(is_hit, counts >= 0, counts == 0)
    ok = jnp.all(was_in_flight | (block_ids == NO_BLOCK))
    restored = _index(state, jnp.where(ok, NO_BLOCK, block_ids))
    ref_cnt = ref_cnt.at[restored].add(-change, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), ok


def _valid(keys: Array, count: Array) -> Array:
    """Mark the keys that are not padding: bool[K]."""
    return jnp.arange(keys.shape[0], dtype=jnp.int32) < count


def _first(flags: Array) -> Array:
    """Return the first true row, -1 for none: i32[]."""
    row = _prefix_length(~flags)
    return jnp.where(row < flags.shape[0], row, -1)


def _prefix_length(flags: Array) -> Array:
    """Count the true values before the first false one: i32[]."""
    rows = jnp.arange(flags.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(flags, flags.shape[0], rows))


def _store(
    policy: Policy,
    state: HostState,
    keys: Array,
    present: Array,
    missing: Array,
    may_decline: Array | bool,
    *,
    is_hit: Array,
) -> tuple[HostState, StoreAnswer]:
    """Allocate blocks for the keys marked in `missing` (bool[K]).

    The keys' blocks in `present` (i32[K]) are not evicted, and pinned where `is_hit`
    (bool[K] or bool[]).
    """
    missing &= first_occurrence(keys, missing)
    num_free = _num_free(state.pool)
    # During the eviction, `protection` makes blocks in `present` look like being read,
    # even at NOT_READY. Counts fit 32 bits even if all rows have the same block.
    protection = _PROTECTION // keys.shape[0]
    batch = _index(state, present)
    readers = jnp.broadcast_to(is_hit, present.shape).astype(jnp.int32)
    ref_cnt = state.ref_cnt.at[batch].add(readers + protection, mode="drop")
    wanted = missing
    if policy.admit is not None:
        admitted = policy.admit(state.policy, keys, missing, num_free, ref_cnt)
        wanted &= admitted | jnp.logical_not(may_decline)
    num_declined = jnp.sum(missing & ~wanted, dtype=jnp.int32)
    rank = running_count(wanted) - 1
    num_missing = rank[-1] + 1
    num_short = jnp.maximum(num_missing - num_free, 0)
    evicted = policy.evict(state.policy, num_short, ref_cnt, keys.shape[0])

    rank = jnp.where(wanted & evicted.ok, rank, NO_BLOCK)
    num_new = jnp.where(evicted.ok, num_missing, 0)
    num_evicted = jnp.where(evicted.ok, num_short, 0)
    pool, block_ids = _allocate(
        state.pool, rank, num_new, evicted.block_ids, num_evicted
    )
    inserted = policy.insert(evicted.state, keys, block_ids)
    stored = jnp.where(inserted.inserted, block_ids, NO_BLOCK)
    pool = _free(pool, jnp.where(inserted.inserted, NO_BLOCK, block_ids))
    # A newly stored block was free or has been evicted, so its count is 0.
    ref_cnt = ref_cnt.at[jnp.concatenate([batch, _index(state, stored)])].add(
        jnp.repeat(jnp.array([-protection, NOT_READY], jnp.int32), keys.shape[0]),
        mode="drop",
    )
    num_stored = jnp.sum(inserted.inserted, dtype=jnp.int32)
    num_evicted = jnp.where(evicted.ok, num_short, -1)
    num_declined = jnp.where(evicted.ok, num_declined, 0)
    answer = StoreAnswer(num_stored, num_evicted, num_declined, stored, evicted.keys)
    return HostState(inserted.state, ref_cnt, pool), answer


def _index(state: HostState, block_ids: Array) -> Array:
    """Replace NO_BLOCK by B, which a scatter drops; its -1 would wrap around."""
    return jnp.where(block_ids == NO_BLOCK, state.ref_cnt.shape[0], block_ids)


def _ref_cnt(state: HostState, block_ids: Array) -> Array:
    """Return reference counts, NOT_READY for NO_BLOCK."""
    return state.ref_cnt.at[_index(state, block_ids)].get(
        mode="fill", fill_value=NOT_READY
    )


def _init_pool(num_blocks: int) -> IdPool:
    return IdPool(
        num_allocated=full((), 0, jnp.int32),
        freed=full((num_blocks,), NO_BLOCK, jnp.int32),
        num_freed=full((), 0, jnp.int32),
    )


def _num_free(pool: IdPool) -> Array:
    return pool.num_freed + pool.freed.shape[0] - pool.num_allocated


def _allocate(
    pool: IdPool, rank: Array, num: Array, evicted: Array, num_evicted: Array
) -> tuple[IdPool, Array]:
    """Allocate an id for each row with a `rank` (i32[K], NO_BLOCK for no id): i32[K].

    First, the `num_evicted` ids of `evicted` (i32[K]) are pushed on the stack, the last
    on top. Then `num` ids are popped; the pool must have as many.
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


def _free(pool: IdPool, block_ids: Array) -> IdPool:
    """Push ids (i32[K], NO_BLOCK ignored) on the stack, the last on top."""
    is_freed = block_ids != NO_BLOCK
    rank = running_count(is_freed) - 1
    at = jnp.where(is_freed, pool.num_freed + rank, pool.freed.shape[0])
    return dataclasses.replace(
        pool,
        freed=pool.freed.at[at].set(block_ids, mode="drop"),
        num_freed=pool.num_freed + rank[-1] + 1,
    )
