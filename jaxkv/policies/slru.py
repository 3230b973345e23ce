"""SLRU (segmented LRU): evicts blocks used once before blocks used again.

SLRU keeps two LRU lists. A new block is on probation; its next use makes it protected,
unless its store is still in flight. At most half of the blocks are protected: if there
are more, the least recently used of them become the most recent ones on probation.
Blocks on probation are evicted first (Karedla, Love and Wherry, 1994).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._util import check_whole, kept
from jaxkv.compiling import compiled, copy_row, empty, greater
from jaxkv.keys import words_to_keys
from jaxkv.policies import directory as directory_lib
from jaxkv.policies import recency
from jaxkv.policies.base import EvictResult, Held, Learned, Policy
from jaxkv.policies.directory import Directory
from jaxkv.policies.lru import find, hand_over, insert, native_find, native_insert
from jaxkv.policies.native import NativePolicy, register_native
from jaxkv.policies.recency import Oldest, RecencyLog
from jaxkv.policies.xla import after, full
from jaxkv.types import NO_BLOCK

# Only a demotion moves an entry to a lower number, which `recency.put` cannot do.
PROBATION, PROTECTED = range(2)

_IDENTITY = np.empty(0, np.int32)  # As `block_ids`: an entry is its block id.
_NO_REF_CNT = np.empty(0, np.int32)  # As `ref_cnt`: every entry is eligible.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SLRUState:
    """The resident blocks, in two lists. An entry is a block id.

    `find` and `insert` are LRU's, which puts new blocks in list 0, on probation.
    """

    directory: Directory  # Maps each key to its block.
    order: RecencyLog  # The lists `PROBATION` and `PROTECTED`.
    num_protected: Array  # i32[]. The length of list `PROTECTED`.


def init(num_blocks: int, max_batch: int) -> SLRUState:
    """Make an empty cache of `num_blocks`."""
    return SLRUState(
        directory=directory_lib.init(num_blocks),
        order=recency.init(num_blocks, max_batch, num_lists=2),
        num_protected=full((), 0, jnp.int32),
    )


def touch(state: SLRUState, keys: Array, count: Array, ready: Array) -> SLRUState:
    """Record a use of each key, the last first; see `Policy.touch`."""
    entries = directory_lib.find_first(state.directory, keys, count)
    order = recency.make_room(state.order, count)
    lists = recency.list_of(order, entries)
    is_promoted = (lists == PROBATION) & ready
    new_lists = jnp.where(is_promoted, PROTECTED, lists)
    ranks = count - 1 - jnp.arange(keys.shape[0], dtype=jnp.int32)
    order = recency.put(order, after(entries, lists), new_lists, ranks, count)
    # One row per entry: a key that occurs twice in the batch moves only once.
    is_promoted &= recency.is_newest(order, entries, ranks, count)
    num_protected = state.num_protected + jnp.sum(is_promoted, dtype=jnp.int32)

    excess = jnp.maximum(num_protected - _num_blocks(state) // 2, 0)
    oldest = recency.find_oldest(
        order,
        excess,
        lambda entries: jnp.ones_like(entries, jnp.bool_),
        keys.shape[0],
        PROTECTED,
    )
    order = recency.remove(order, oldest.entries)
    order = recency.set_heads(order, [_unchanged(order), oldest], excess > 0)
    order = recency.make_room(order, excess)
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
    order = recency.put(order, oldest.entries, PROBATION, rows, excess)
    return dataclasses.replace(state, order=order, num_protected=num_protected - excess)


@compiled
def native_touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """In-place form of `touch`."""
    order, count = state.order, entries.shape[0]
    recency.native_make_room(order, count)
    for row in range(count - 1, -1, -1):
        entry = entries[row]
        if entry < 0:
            continue
        list_id = recency.native_list_of(order, entry)
        if list_id == PROBATION and is_use[row]:
            list_id = PROTECTED
            state.num_protected[()] += 1
        recency.native_put(order, entry, list_id, count - 1 - row)
    recency.advance(order, count)

    excess = greater(state.num_protected[()] - order.places.shape[0] // 2, 0)
    if excess:
        demoted = empty(excess, np.int32)
        _, head = recency.native_find_oldest(
            order, excess, PROTECTED, _IDENTITY, _NO_REF_CNT, demoted
        )
        order.heads[PROTECTED] = head
        for entry in demoted:
            recency.native_remove(order, entry)
        recency.native_make_room(order, excess)
        for rank in range(excess):
            recency.native_put(order, demoted[rank], PROBATION, rank)
        recency.advance(order, excess)
        state.num_protected[()] -= excess


def remove(state: SLRUState, keys: Array, block_ids: Array) -> SLRUState:
    """Forget keys; see `Policy.remove`."""
    del keys  # An entry is its block id.
    entries = jnp.where(block_ids != NO_BLOCK, block_ids, _num_blocks(state))
    return _remove(state, entries)


@compiled
def native_remove(state: Any, entries: Any) -> None:
    """In-place form of `remove`."""
    for entry in entries:
        if entry >= 0:
            if recency.native_list_of(state.order, entry) == PROTECTED:
                state.num_protected[()] -= 1
            directory_lib.native_remove(state.directory, entry)
            recency.native_remove(state.order, entry)


def evict(state: SLRUState, num: Array, ref_cnt: Array, width: int) -> EvictResult:
    """Evict the oldest blocks on probation, then protected; see `Policy.evict`."""
    no_entry = _num_blocks(state)

    def oldest(num: Array, list_id: int) -> Oldest:
        return recency.find_oldest(
            state.order, num, lambda entries: ref_cnt[entries] == 0, width, list_id
        )

    first = oldest(num, PROBATION)
    second = oldest(num - first.num, PROTECTED)
    ok = first.num + second.num >= num
    row = jnp.arange(width, dtype=jnp.int32)
    of_second = second.entries[jnp.maximum(row - first.num, 0)]
    victims = jnp.where(row < first.num, first.entries, of_second)
    victims = jnp.where(ok & (row < num), victims, no_entry)
    keys = state.directory.keys.at[victims].get(mode="fill", fill_value=0)
    victims = after(victims, keys)  # Read their rows before overwriting them.
    evicted = _remove(state, victims)
    order = recency.set_heads(evicted.order, [first, second], ok)
    return EvictResult(
        state=dataclasses.replace(evicted, order=order),
        block_ids=jnp.where(victims < no_entry, victims, NO_BLOCK),
        keys=keys,
        ok=ok,
    )


@compiled
def native_evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """In-place form of `evict`."""
    victims = block_ids[:num]
    num_first, head_first = recency.native_find_oldest(
        state.order, num, PROBATION, _IDENTITY, ref_cnt, victims
    )
    num_second, head_second = recency.native_find_oldest(
        state.order, num - num_first, PROTECTED, _IDENTITY, ref_cnt, victims[num_first:]
    )
    if num_first + num_second < num:
        return False
    state.order.heads[PROBATION] = head_first
    state.order.heads[PROTECTED] = head_second
    for row in range(num):
        copy_row(keys, row, state.directory.keys, victims[row])
    native_remove(state, victims)
    return True


def snapshot(state: SLRUState) -> dict[str, Any]:
    """Return the keys in "probation" and "protected", the oldest first. Not for jit."""
    keys = np.asarray(state.directory.keys)
    lists = {"probation": PROBATION, "protected": PROTECTED}
    return {
        name: words_to_keys(keys[recency.in_order(state.order, list_id)])
        for name, list_id in lists.items()
    }


def take_over(
    num_blocks: int, max_batch: int, held: Held, learned: Learned | None
) -> SLRUState:
    """Make a state of the blocks in `held`, in their order of use.

    Blocks that the shadow protects are protected, the most recent up to the limit.
    """
    order = recency.init(num_blocks, max_batch, num_lists=2)
    lists = np.full(held.blocks.size, PROBATION, np.int32)
    num_protected: Any = np.array(0, np.int32)
    if learned is not None:
        places = np.asarray(learned.state.order.places)[learned.blocks]
        rows = np.flatnonzero(places >> recency.POSITION_BITS == PROTECTED)
        rows = rows[max(rows.size - num_blocks // 2, 0) :]
        lists[rows] = PROTECTED
        num_protected[()] = rows.size
    order = recency.filled(order, held.blocks, lists)
    return SLRUState(held.directory, order, num_protected)


@kept
def make_slru(num_blocks: int, max_batch: int = 4096) -> Policy:
    """Make the segmented LRU policy, which protects up to half of the blocks.

    Args:
        num_blocks: Blocks of the tier.
        max_batch: Maximum keys in one call.

    Returns:
        The policy. Equal arguments give the same object, so that functions traced
        with it are shared.

    Raises:
        ValueError: If an argument is less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> slru = make_slru(num_blocks=4)
        >>> keys = jnp.arange(16, dtype=jnp.uint32).reshape(2, 8)
        >>> state, _ = slru.insert(slru.init(), keys, jnp.array([3, 1]))
        >>> ready = jnp.ones(2, bool)
        >>> state = slru.touch(state, keys, jnp.int32(1), ready)  # 3 is used again
        >>> evicted = slru.evict(state, jnp.int32(1), jnp.zeros(4, jnp.int32), 2)
        >>> evicted.block_ids.tolist()
        [1, -1]
    """
    check_whole(1, num_blocks=num_blocks, max_batch=max_batch)
    return Policy(
        num_blocks=num_blocks,
        max_batch=max_batch,
        init=functools.partial(init, num_blocks, max_batch),
        find=find,
        touch=touch,
        insert=insert,
        remove=remove,
        evict=evict,
        snapshot=snapshot,
        native=NATIVE,
        always_evicts=True,
        hand_over=hand_over,
        take_over=functools.partial(take_over, num_blocks, max_batch),
    )


def _remove(state: SLRUState, entries: Array) -> SLRUState:
    """Forget unique entries (i32[K]; B is skipped)."""
    lists = recency.list_of(state.order, entries)
    num_protected = jnp.sum(lists == PROTECTED, dtype=jnp.int32)
    return SLRUState(
        directory=directory_lib.remove(state.directory, entries),
        order=recency.remove(state.order, after(entries, lists)),
        num_protected=state.num_protected - num_protected,
    )


def _unchanged(order: RecencyLog) -> Oldest:
    """Return an `Oldest` that removes nothing from list `PROBATION`."""
    no_entries = jnp.zeros((0,), jnp.int32)
    return Oldest(no_entries, jnp.int32(0), order.heads[PROBATION])


def _num_blocks(state: SLRUState) -> int:
    return state.directory.keys.shape[0]


NATIVE = NativePolicy(
    native_find, native_touch, native_insert, native_remove, native_evict
)


register_native(SLRUState, NATIVE)
