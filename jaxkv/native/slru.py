"""Segmented LRU, in place; `jaxkv.policies.slru` says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native import directory as directory_lib
from jaxkv.native import recency
from jaxkv.native.compiling import compiled, copy_items
from jaxkv.native.policy import NativePolicy
from jaxkv.types import NO_BLOCK

# In this order because most moves are upwards (`recency.put`).
PROBATION, PROTECTED = range(2)

_IDENTITY = np.empty(0, np.int32)  # An entry is its block id.
_ALL_ENTRIES = np.empty(0, np.int32)


@compiled
def find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Find the block of each key; see `NativePolicy.find`."""
    directory_lib.find(state.directory, keys, entries)
    copy_items(block_ids, 0, entries, entries.shape[0])


@compiled
def touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """Record a use of each key, the last first; see `NativePolicy.touch`."""
    order, count = state.order, entries.shape[0]
    recency.make_room(order, count)
    for row in range(count - 1, -1, -1):
        entry = entries[row]
        if entry < 0:
            continue
        of_list = recency.list_of(order, entry)
        if of_list == PROBATION and is_use[row]:
            of_list = PROTECTED
            state.num_protected[()] += 1
        recency.put(order, entry, of_list, count - 1 - row)
    recency.advance(order, count)

    excess = max(state.num_protected[()] - order.places.shape[0] // 2, 0)
    if excess:
        demoted = np.empty(excess, np.int32)
        _, head = recency.find_oldest(
            order, excess, PROTECTED, _IDENTITY, _ALL_ENTRIES, demoted
        )
        order.heads[PROTECTED] = head
        for entry in demoted:
            recency.remove(order, entry)
        recency.make_room(order, excess)
        for rank in range(excess):
            recency.put(order, demoted[rank], PROBATION, rank)
        recency.advance(order, excess)
        state.num_protected[()] -= excess


@compiled
def insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """Add new keys on probation; see `NativePolicy.insert`."""
    directory_lib.insert(state.directory, keys, block_ids)
    count = 0
    for row in range(block_ids.shape[0]):
        count += block_ids[row] != NO_BLOCK
    recency.make_room(state.order, count)
    rank = 0
    for row in range(block_ids.shape[0]):
        if block_ids[row] != NO_BLOCK:
            recency.put(state.order, block_ids[row], PROBATION, rank)
            rank += 1
    recency.advance(state.order, count)


@compiled
def remove(state: Any, entries: Any) -> None:
    """Forget entries; see `NativePolicy.remove`."""
    for entry in entries:
        if entry >= 0:
            if recency.list_of(state.order, entry) == PROTECTED:
                state.num_protected[()] -= 1
            directory_lib.remove(state.directory, entry)
            recency.remove(state.order, entry)


@compiled
def evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict the oldest blocks on probation, then others; see `NativePolicy.evict`."""
    victims = block_ids[:num]
    num_first, head_first = recency.find_oldest(
        state.order, num, PROBATION, _IDENTITY, ref_cnt, victims
    )
    num_second, head_second = recency.find_oldest(
        state.order, num - num_first, PROTECTED, _IDENTITY, ref_cnt, victims[num_first:]
    )
    if num_first + num_second < num:
        return False
    state.order.heads[PROBATION] = head_first
    state.order.heads[PROTECTED] = head_second
    for row in range(num):
        directory_lib.copy_key(keys, row, state.directory.keys, victims[row])
    remove(state, victims)
    return True


NATIVE = NativePolicy(find, touch, insert, remove, evict)
