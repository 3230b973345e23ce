"""Least recently used, in place; `jaxkv.policies.lru` says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native import directory as directory_lib
from jaxkv.native import recency
from jaxkv.native.compiling import compiled, copy_items
from jaxkv.native.policy import NativePolicy
from jaxkv.types import NO_BLOCK

_IDENTITY = np.empty(0, np.int32)  # An entry is its block id.


@compiled
def find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Find the block of each key; see `NativePolicy.find`."""
    directory_lib.find(state.directory, keys, entries)
    copy_items(block_ids, 0, entries, entries.shape[0])


@compiled
def touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """Record a use of each key; see `NativePolicy.touch`."""
    count = entries.shape[0]
    recency.make_room(state.order, count)
    for row in range(count - 1, -1, -1):
        if entries[row] >= 0:
            recency.put(state.order, entries[row], 0, count - 1 - row)
    recency.advance(state.order, count)


@compiled
def insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """Add new keys as the most recent; see `NativePolicy.insert`."""
    directory_lib.insert(state.directory, keys, block_ids)
    count = 0
    for row in range(block_ids.shape[0]):
        count += block_ids[row] != NO_BLOCK
    recency.make_room(state.order, count)
    rank = 0
    for row in range(block_ids.shape[0]):
        if block_ids[row] != NO_BLOCK:
            recency.put(state.order, block_ids[row], 0, rank)
            rank += 1
    recency.advance(state.order, count)


@compiled
def remove(state: Any, entries: Any) -> None:
    """Forget entries; see `NativePolicy.remove`."""
    for entry in entries:
        if entry >= 0:
            directory_lib.remove(state.directory, entry)
            recency.remove(state.order, entry)


@compiled
def evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict the least recently used blocks; see `NativePolicy.evict`."""
    victims = block_ids[:num]
    num_found, head = recency.find_oldest(
        state.order, num, 0, _IDENTITY, ref_cnt, victims
    )
    if num_found < num:
        return False
    state.order.heads[0] = head
    for row in range(num):
        directory_lib.copy_key(keys, row, state.directory.keys, victims[row])
    remove(state, victims)
    return True


NATIVE = NativePolicy(find, touch, insert, remove, evict)
