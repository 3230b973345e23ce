"""Adaptive replacement, in place; `jaxkv.policies.arc` says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native import directory as directory_lib
from jaxkv.native import recency
from jaxkv.native.compiling import compiled, copy_items
from jaxkv.native.policy import NativePolicy
from jaxkv.types import NO_BLOCK

# In this order because every move but eviction is upwards (`recency.put`).
B1, B2, T1, T2 = range(4)
NO_LIST = -1

EXACT, FIXED = 0, 1
"""Variants: that of vLLM 0.19.1, and the one that mends what this costs."""

_ALL_ENTRIES = np.empty(0, np.int32)  # Any ghost may be forgotten.


@compiled
def find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Find the entry and the block of each key; see `NativePolicy.find`."""
    directory_lib.find(state.directory, keys, entries)
    for row in range(entries.shape[0]):
        entry = entries[row]
        block_ids[row] = state.block_ids[entry] if entry >= 0 else NO_BLOCK


@compiled
def touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """Record a use of each key, the last first; see `NativePolicy.touch`."""
    count = entries.shape[0]
    recency.make_room(state.order, count)
    hit_b1, hit_b2 = False, False
    for row in range(count - 1, -1, -1):
        entry = entries[row]
        if entry < 0:
            continue
        of_list = recency.list_of(state.order, entry)
        if of_list == T1 and is_use[row]:
            state.sizes[T1] -= 1
            state.sizes[T2] += 1
            of_list = T2
        elif of_list in (B1, B2):
            if variant == EXACT:
                _move_target(state, of_list)
            hit_b1 |= of_list == B1
            hit_b2 |= of_list == B2
        recency.put(state.order, entry, of_list, count - 1 - row)
    recency.advance(state.order, count)
    if variant == FIXED:
        if hit_b1:
            _move_target(state, B1)
        if hit_b2:
            _move_target(state, B2)


@compiled
def insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """Add new keys to T1, in their order; see `NativePolicy.insert`."""
    num_rows = block_ids.shape[0]
    entries = np.full(num_rows, directory_lib.NO_ENTRY, np.int32)
    fresh = np.full(num_rows, directory_lib.NO_ENTRY, np.int32)
    height = state.unused.shape[0] - state.sizes.sum()
    num_fresh = 0
    for row in range(num_rows):
        if block_ids[row] == NO_BLOCK:
            continue
        entries[row] = directory_lib.find_one(state.directory, keys, row)
        if entries[row] < 0:
            fresh[row] = state.unused[height - 1 - num_fresh]
            num_fresh += 1
    added = fresh.copy()
    directory_lib.insert(state.directory, keys, added)

    count = 0
    for row in range(num_rows):
        if added[row] >= 0:
            entries[row] = added[row]
            fresh[row] = directory_lib.NO_ENTRY
        if entries[row] < 0:
            block_ids[row] = NO_BLOCK
        else:
            count += 1
    recency.make_room(state.order, count)
    rank = 0
    for row in range(num_rows):
        entry = entries[row]
        if entry < 0:
            continue
        of_list = recency.list_of(state.order, entry)
        new_list = T2 if variant == FIXED and of_list != NO_LIST else T1
        if of_list != NO_LIST:
            state.sizes[of_list] -= 1
        state.sizes[new_list] += 1
        state.block_ids[entry] = block_ids[row]
        recency.put(state.order, entry, new_list, rank)
        rank += 1
    recency.advance(state.order, count)
    _give_back(state, fresh)  # What the directory had no room for.


@compiled
def remove(state: Any, entries: Any) -> None:
    """Forget entries, without a ghost; see `NativePolicy.remove`."""
    for entry in entries:
        if entry >= 0:
            state.sizes[recency.list_of(state.order, entry)] -= 1
            state.block_ids[entry] = NO_BLOCK
            directory_lib.remove(state.directory, entry)
            recency.remove(state.order, entry)
    _give_back(state, entries)


@compiled
def evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict the oldest blocks of T1 down to the target, then of T2.

    If fixed, go on with those of T1 where T2 has no more; see `NativePolicy.evict`.
    """
    order, num_blocks = state.order, ref_cnt.shape[0]
    t1, t2 = np.empty(num, np.int32), np.empty(num, np.int32)
    # Taken one by one, blocks would come from T1 while |T1| >= int(target).
    above_target = state.sizes[T1] - np.int64(state.target.view(np.float64)[0]) + 1
    num_t1, head_t1 = recency.find_oldest(
        order, min(max(above_target, 0), num), T1, state.block_ids, ref_cnt, t1
    )
    num_first = num_t1
    num_t2, head_t2 = recency.find_oldest(
        order, num - num_t1, T2, state.block_ids, ref_cnt, t2
    )
    if variant == FIXED:
        num_t1, head_t1 = recency.find_oldest(
            order, num - num_t2, T1, state.block_ids, ref_cnt, t1
        )
    if num_t1 + num_t2 < num:
        return False

    # Some of T1, then those of T2, then (if fixed) the others of T1.
    victims = np.empty(num, np.int32)
    copy_items(victims, 0, t1, num_first)
    copy_items(victims, num_first, t2, num_t2)
    copy_items(victims, num_first + num_t2, t1[num_first:], num_t1 - num_first)
    # They become ghosts, and the oldest ghosts in excess of the blocks are forgotten.
    excess_b1 = max(state.sizes[B1] + num_t1 - num_blocks, 0)
    excess_b2 = max(state.sizes[B2] + num_t2 - num_blocks, 0)
    forgotten = np.empty(excess_b1 + excess_b2, np.int32)
    _, head_b1 = recency.find_oldest(
        order, excess_b1, B1, state.block_ids, _ALL_ENTRIES, forgotten
    )
    _, head_b2 = recency.find_oldest(
        order, excess_b2, B2, state.block_ids, _ALL_ENTRIES, forgotten[excess_b1:]
    )
    order.heads[B1], order.heads[B2] = head_b1, head_b2
    order.heads[T1], order.heads[T2] = head_t1, head_t2
    for row in range(num):
        entry = victims[row]
        block_ids[row] = state.block_ids[entry]
        state.block_ids[entry] = NO_BLOCK
        directory_lib.copy_key(keys, row, state.directory.keys, entry)
        recency.remove(order, entry)
    for entry in forgotten:
        directory_lib.remove(state.directory, entry)
        recency.remove(order, entry)
    recency.make_room(order, num)
    for row in range(num):
        is_t2 = num_first <= row < num_first + num_t2
        recency.put(order, victims[row], B2 if is_t2 else B1, row)
    recency.advance(order, num)
    state.sizes[T1] -= num_t1
    state.sizes[T2] -= num_t2
    state.sizes[B1] += num_t1 - excess_b1
    state.sizes[B2] += num_t2 - excess_b2
    _give_back(state, forgotten)
    return True


@compiled
def _move_target(state: Any, of_list: int) -> None:
    """Raise the target for a ghost of B1, lower it for one of B2."""
    target = state.target.view(np.float64)
    # A list of ghosts that was hit is not empty, so this `max` changes no result.
    b1, b2 = max(state.sizes[B1], 1), max(state.sizes[B2], 1)
    if of_list == B1:
        num_blocks = state.block_ids.shape[0] // 3
        target[0] = min(target[0] + max(b2 / b1, 1.0), float(num_blocks))
    else:
        target[0] = max(target[0] - max(b1 / b2, 1.0), 0.0)


@compiled
def _give_back(state: Any, entries: Any) -> None:
    """Push entries (-1 for none) on the stack of those in no list, the first on top.

    `sizes` do not count them any more.
    """
    at = state.unused.shape[0] - state.sizes.sum() - 1
    for entry in entries:
        if entry >= 0:
            state.unused[at] = entry
            at -= 1


NATIVE = NativePolicy(find, touch, insert, remove, evict, EXACT)
NATIVE_FIXED = NATIVE._replace(variant=FIXED)
