"""The blocks of the host tier: pure functions over one pytree.

`HostState` joins a policy's state, the reference counts and the pool of block ids. The
functions take `(policy, state, keys, count)` and return the state afterwards and an
answer. Keys are u32[K, 8]; the first `count` (i32[]) are meant, the others are padding.
The functions may be traced, scanned and vmapped, never raise, and leave the state bit
for bit as it was when they refuse. They define what the tier does; `host_native` does
the same in place, for `jaxkv.tiers.index`. Give a batch at least two rows, the second
as padding: XLA:CPU turns a scatter of one row into an update that copies the whole
array.

The life of a block is its reference count: NOT_READY while its bytes are on the way to
the host, 0 when it can be read or evicted, and above 0 while loads read it.
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
    """The ids that no key holds: fresh ones first, then the last freed."""

    num_allocated: Array  # i32[]. Ids from here on are fresh, never handed out.
    freed: Array  # i32[B]. A stack of ids that were handed out and came back.
    num_freed: Array  # i32[]. Height of the stack.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostState:
    """Everything known about the host tier."""

    policy: PyTree  # The policy's own state.
    ref_cnt: Array
    """i32[B]. NOT_READY, or the number of loads that read the block; 0 for ids in the
    pool."""
    pool: IdPool  # The ids that no key holds.


class LoadAnswer(NamedTuple):
    """The blocks of a batch to read."""

    bad_row: Array
    """i32[]. The first key in the way: then nothing changed; -1 for none."""
    block_ids: Array
    """i32[K]. The block of each key, NO_BLOCK where it is absent or padding."""


class StoreAnswer(NamedTuple):
    """Where to store a batch of blocks."""

    num_stored: Array
    """i32[]. How many keys to store."""
    num_evicted: Array
    """i32[]. How many keys were evicted; -1 if there was no room: nothing changed."""
    block_ids: Array
    """i32[K]. The block for each key, NO_BLOCK where the key is already known, repeats
    an earlier one, or is padding."""
    evicted_keys: Array
    """u32[K, 8]. In the order of eviction."""


class StepAnswer(NamedTuple):
    """What to load and to store for a request that is served by one call."""

    num_hits: Array
    """i32[]. Keys, from the first on, whose blocks to load."""
    num_stored: Array
    """i32[]. How many of the others to store."""
    num_evicted: Array
    """i32[]. How many keys were evicted; -1 if there was no room: none is stored."""
    block_ids: Array
    """i32[K]. The block to load from for the first `num_hits` keys, the block to store
    in for the others; NO_BLOCK where the key is known but no hit, repeats an earlier
    one, or is padding."""
    evicted_keys: Array
    """u32[K, 8]. In the order of eviction."""


def init(policy: Policy) -> HostState:
    """Make the state of an empty host tier, with the blocks of `policy`."""
    return HostState(
        policy=policy.init(),
        ref_cnt=full((policy.num_blocks,), 0, jnp.int32),
        pool=_init_pool(policy.num_blocks),
    )


def find(policy: Policy, state: HostState, keys: Array, count: Array) -> Array:
    """Find the block of each key, stores in progress included: i32[K]."""
    block_ids: Array = policy.find(state.policy, keys, count)
    return block_ids


def find_readable(policy: Policy, state: HostState, keys: Array, count: Array) -> Array:
    """Find the block of each key: i32[K], NO_BLOCK where there is none to read."""
    block_ids = policy.find(state.policy, keys, count)
    return jnp.where(_ref_cnt(state, block_ids) >= 0, block_ids, NO_BLOCK)


def lookup(policy: Policy, state: HostState, keys: Array, count: Array) -> Array:
    """Count the keys, from the first on, whose blocks can be read: i32[]."""
    return _leading(find_readable(policy, state, keys, count) != NO_BLOCK)


def touch(
    policy: Policy,
    state: HostState,
    keys: Array,
    count: Array,
    counts_as_use: Array | bool = True,
) -> HostState:
    """Record a use of each key, the first as the most recent; or only reorder them."""
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
    """Show the policy facts about a request, if it uses any; see `Policy.note`."""
    if policy.note is None:
        return state, jnp.zeros((), jnp.int32)
    after, mark = policy.note(state.policy, kind, keys, count, positions, facts)
    return dataclasses.replace(state, policy=after), mark


def prepare_load(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, LoadAnswer]:
    """Pin blocks that are about to be read. All keys must be known and ready."""
    block_ids = policy.find(state.policy, keys, count)
    bad_row = _first(_valid(keys, count) & (_ref_cnt(state, block_ids) < 0))
    pinned = jnp.where(bad_row >= 0, NO_BLOCK, block_ids)
    ref_cnt = state.ref_cnt.at[_index(state, pinned)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), LoadAnswer(bad_row, block_ids)


def pin(state: HostState, block_ids: Array) -> tuple[HostState, Array]:
    """Pin blocks (i32[K], NO_BLOCK for padding) that a search has just found.

    It answers bool[], whether it was done: not if a block is being stored.
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
    # A key may be given as often as it was pinned; one time more makes it negative.
    bad_row = _first(_valid(keys, count) & (_ref_cnt(unpinned, block_ids) < 0))
    undone = jnp.where(bad_row >= 0, block_ids, NO_BLOCK)
    ref_cnt = ref_cnt.at[_index(state, undone)].add(1, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), LoadAnswer(bad_row, block_ids)


def prepare_store(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, StoreAnswer]:
    """Give every unknown key a block, evicting others where there is no free one.

    None of the keys given is evicted to make room for another. A key that repeats an
    earlier one of the batch counts once.
    """
    present = policy.find(state.policy, keys, count)
    missing = _valid(keys, count) & (present == NO_BLOCK)
    return _store(policy, state, keys, present, missing, is_hit=jnp.bool_(False))


def complete_store(
    policy: Policy, state: HostState, keys: Array, count: Array, success: Array
) -> tuple[HostState, Array]:
    """End stores in progress: the blocks become readable, or are given back.

    `success` (bool[]) is whether the bytes arrived. Keys that are absent or ready are
    ignored. The answer is bool[K]: the keys whose store ended here.
    """
    block_ids = policy.find(state.policy, keys, count)
    ended = (block_ids != NO_BLOCK) & (_ref_cnt(state, block_ids) == NOT_READY)
    # Among rows with one block, the first has the lowest mark, and ends the store.
    marks = NOT_READY - keys.shape[0] + jnp.arange(keys.shape[0], dtype=jnp.int32)
    marked_at = _index(state, jnp.where(ended, block_ids, NO_BLOCK))
    marked = state.ref_cnt.at[marked_at].min(marks, mode="drop")
    ended &= _ref_cnt(dataclasses.replace(state, ref_cnt=marked), block_ids) == marks
    ended_ids = jnp.where(ended, block_ids, NO_BLOCK)
    ref_cnt = marked.at[_index(state, ended_ids)].set(0, mode="drop")
    failed = jnp.where(success, NO_BLOCK, ended_ids)
    removed = policy.remove(state.policy, keys, failed)
    return HostState(removed, ref_cnt, _give_back(state.pool, failed)), ended


def discard(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, Array]:
    """Forget blocks that are not being read or written, as if they had been evicted.

    The answer is bool[K]: the keys that were forgotten here.
    """
    block_ids = policy.find(state.policy, keys, count)
    idle = (block_ids != NO_BLOCK) & (_ref_cnt(state, block_ids) == 0)
    idle &= first_occurrence(keys, idle)
    block_ids = jnp.where(idle, block_ids, NO_BLOCK)
    removed = policy.remove(state.policy, keys, block_ids)
    return HostState(removed, state.ref_cnt, _give_back(state.pool, block_ids)), idle


def request_step(
    policy: Policy, state: HostState, keys: Array, count: Array
) -> tuple[HostState, StepAnswer]:
    """Serve a prefix: pin readable blocks and find room for the others.

    The same as `lookup`, `touch`, `prepare_load` of the hits and `prepare_store` of all
    keys, with one search for the keys instead of four. `complete_step` ends it.
    """
    block_ids = policy.find(state.policy, keys, count)
    ready = _ref_cnt(state, block_ids) >= 0
    num_hits = _leading(ready)
    is_hit = jnp.arange(keys.shape[0], dtype=jnp.int32) < num_hits
    touched = policy.touch(state.policy, keys, count, ready)
    missing = _valid(keys, count) & (block_ids == NO_BLOCK)
    state = dataclasses.replace(state, policy=touched)
    state, stored = _store(policy, state, keys, block_ids, missing, is_hit=is_hit)
    both = jnp.where(is_hit, block_ids, stored.block_ids)
    return state, StepAnswer(num_hits, *stored._replace(block_ids=both))


def complete_step(
    state: HostState, block_ids: Array, num_hits: Array
) -> tuple[HostState, Array]:
    """End the loads and stores of a `request_step`, all of them arrived.

    It needs no search, but the step's `block_ids` and `num_hits`. Where something
    failed, end each with `complete_load` and `complete_store` instead. It answers
    bool[], whether it was done: not if a block is not being loaded, or not being
    stored, as the step had it.
    """
    is_hit = jnp.arange(block_ids.shape[0], dtype=jnp.int32) < num_hits
    # A load ends with one reader less, a store goes from NOT_READY to 0.
    change = jnp.where(is_hit, -1, -NOT_READY)
    ref_cnt = state.ref_cnt.at[_index(state, block_ids)].add(change, mode="drop")
    # A block may be given as often as it was pinned; one time more makes it negative.
    left = _ref_cnt(dataclasses.replace(state, ref_cnt=ref_cnt), block_ids)
    fits = jnp.where(is_hit, left >= 0, left == 0)
    ok = jnp.all(fits | (block_ids == NO_BLOCK))
    undone = _index(state, jnp.where(ok, NO_BLOCK, block_ids))
    ref_cnt = ref_cnt.at[undone].add(-change, mode="drop")
    return dataclasses.replace(state, ref_cnt=ref_cnt), ok


def _valid(keys: Array, count: Array) -> Array:
    """Mark the keys that are not padding: bool[K]."""
    return jnp.arange(keys.shape[0], dtype=jnp.int32) < count


def _first(flags: Array) -> Array:
    """Number the first row that is true, -1 for none: i32[]."""
    num_before = _leading(~flags)
    return jnp.where(num_before < flags.shape[0], num_before, -1)


def _leading(flags: Array) -> Array:
    """Count the true values before the first false one: i32[]."""
    rows = jnp.arange(flags.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(flags, flags.shape[0], rows))


def _store(
    policy: Policy,
    state: HostState,
    keys: Array,
    present: Array,
    missing: Array,
    *,
    is_hit: Array,
) -> tuple[HostState, StoreAnswer]:
    """Give the `missing` keys blocks; none of `present` (i32[K]) is evicted for it.

    The hits in `present` (`is_hit`, bool[K] or bool[]) are pinned.
    """
    missing &= first_occurrence(keys, missing)
    rank = running_count(missing) - 1
    num_missing = rank[-1] + 1
    num_short = jnp.maximum(num_missing - _num_free(state.pool), 0)
    # During the eviction the batch counts as being read, so often that even a block
    # in flight, whose count is NOT_READY, is not evictable; and so seldom that the
    # count fits 32 bits if all rows have the same block.
    protection = _PROTECTION // keys.shape[0]
    batch = _index(state, present)
    readers = jnp.broadcast_to(is_hit, present.shape).astype(jnp.int32)
    ref_cnt = state.ref_cnt.at[batch].add(readers + protection, mode="drop")
    evicted = policy.evict(state.policy, num_short, ref_cnt, keys.shape[0])

    rank = jnp.where(missing & evicted.ok, rank, NO_BLOCK)
    num_taken = jnp.where(evicted.ok, num_missing, 0)
    num_evicted = jnp.where(evicted.ok, num_short, 0)
    pool, block_ids = _take(state.pool, rank, num_taken, evicted.block_ids, num_evicted)
    inserted = policy.insert(evicted.state, keys, block_ids)
    stored = jnp.where(inserted.inserted, block_ids, NO_BLOCK)
    pool = _give_back(pool, jnp.where(inserted.inserted, NO_BLOCK, block_ids))
    # A block that is stored now had a count of 0: it was free, or could be evicted.
    ref_cnt = ref_cnt.at[jnp.concatenate([batch, _index(state, stored)])].add(
        jnp.repeat(jnp.array([-protection, NOT_READY], jnp.int32), keys.shape[0]),
        mode="drop",
    )
    num_stored = jnp.sum(inserted.inserted, dtype=jnp.int32)
    num_evicted = jnp.where(evicted.ok, num_short, -1)
    answer = StoreAnswer(num_stored, num_evicted, stored, evicted.keys)
    return HostState(inserted.state, ref_cnt, pool), answer


def _index(state: HostState, block_ids: Array) -> Array:
    """Map NO_BLOCK out of range, where a scatter drops it (-1 would wrap around)."""
    return jnp.where(block_ids == NO_BLOCK, state.ref_cnt.shape[0], block_ids)


def _ref_cnt(state: HostState, block_ids: Array) -> Array:
    """Read reference counts, NOT_READY for NO_BLOCK."""
    return state.ref_cnt.at[_index(state, block_ids)].get(
        mode="fill", fill_value=NOT_READY
    )


def _init_pool(num_blocks: int) -> IdPool:
    """Make a pool of `num_blocks` fresh ids."""
    return IdPool(
        num_allocated=full((), 0, jnp.int32),
        freed=full((num_blocks,), NO_BLOCK, jnp.int32),
        num_freed=full((), 0, jnp.int32),
    )


def _num_free(pool: IdPool) -> Array:
    """Count the ids in the pool: i32[]."""
    return pool.num_freed + pool.freed.shape[0] - pool.num_allocated


def _take(
    pool: IdPool, rank: Array, num: Array, evicted: Array, num_evicted: Array
) -> tuple[IdPool, Array]:
    """Take an id for each row with a `rank` (i32[K], NO_BLOCK for no id): i32[K].

    `evicted` (i32[K]) are `num_evicted` ids that go on top of the stack, the last
    uppermost. The pool has enough ids for the `num` rows, and none of `evicted` is left
    over.
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


def _give_back(pool: IdPool, block_ids: Array) -> IdPool:
    """Push ids (i32[K], NO_BLOCK ignored) on the stack, the last on top."""
    is_freed = block_ids != NO_BLOCK
    rank = running_count(is_freed) - 1
    at = jnp.where(is_freed, pool.num_freed + rank, pool.freed.shape[0])
    return dataclasses.replace(
        pool,
        freed=pool.freed.at[at].set(block_ids, mode="drop"),
        num_freed=pool.num_freed + rank[-1] + 1,
    )
