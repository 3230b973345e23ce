"""LRU: evict the least recently used block.

Matches vLLM 0.19.1's `LRUCachePolicy`: a batch is touched from its last key to its
first, so that the first block of a prefix is evicted after the blocks that follow it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike, NDArray

from jaxkv._util import check_whole, kept
from jaxkv.compiling import compiled, copy_items, copy_row
from jaxkv.keys import words_to_keys
from jaxkv.policies import directory as directory_lib
from jaxkv.policies import recency
from jaxkv.policies.base import EvictResult, InsertResult, Policy
from jaxkv.policies.directory import Directory
from jaxkv.policies.native import NativePolicy, register_native
from jaxkv.policies.recency import RecencyLog
from jaxkv.policies.xla import after, running_count
from jaxkv.types import NO_BLOCK

_IDENTITY = np.empty(0, np.int32)  # As `block_ids`: an entry is its block id.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LRUState:
    """The resident blocks, in the order of last use. An entry is a block id."""

    directory: Directory  # Maps each key to its block.
    order: RecencyLog  # The blocks from the least to the most recently used.


# Dead records of the recency log that `next_victims` scans at most.
_MAX_DEAD = 4096


def next_victims(state: LRUState, ref_cnt: ArrayLike, num: int) -> NDArray[np.int32]:
    """Return up to `num` blocks to evict next, in this order: i32[n].

    `state` has NumPy arrays. Blocks whose `ref_cnt` (i32[B]) is not 0 are skipped.
    """
    log = state.order
    head, tail = int(log.heads[0]), int(log.tail[()])
    positions = np.arange(head, min(tail, head + num + _MAX_DEAD))
    blocks = np.asarray(log.entries)[positions]
    is_entry = blocks < log.places.shape[0]
    positions, blocks = positions[is_entry], blocks[is_entry]
    is_alive = np.asarray(log.places)[blocks] == positions
    is_free = np.asarray(ref_cnt)[blocks] == 0
    victims: NDArray[np.int32] = blocks[is_alive & is_free][:num].astype(np.int32)
    return victims


def init(num_blocks: int, max_batch: int) -> LRUState:
    """Make an empty cache of `num_blocks`."""
    return LRUState(
        directory=directory_lib.init(num_blocks),
        order=recency.init(num_blocks, max_batch),
    )


def find(state: Any, keys: Array, count: Array) -> Array:
    """Find the block of each key, in any state whose entries are block ids."""
    entries = directory_lib.find_first(state.directory, keys, count)
    return jnp.where(entries < _num_blocks(state), entries, NO_BLOCK)


@compiled
def native_find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """In-place form of `find`."""
    directory_lib.native_find(state.directory, keys, entries)
    copy_items(block_ids, 0, entries, entries.shape[0])


def touch(state: LRUState, keys: Array, count: Array, ready: Array) -> LRUState:
    """Record a use of each key, the last first; see `Policy.touch`."""
    del ready  # Blocks whose store is in flight are treated like all others.
    ranks = count - 1 - jnp.arange(keys.shape[0], dtype=jnp.int32)
    entries = directory_lib.find_first(state.directory, keys, count)
    order = recency.append(state.order, entries, ranks, count)
    return dataclasses.replace(state, order=order)


@compiled
def native_touch(state: Any, entries: Any, is_use: Any) -> None:
    """In-place form of `touch`."""
    count = entries.shape[0]
    recency.native_make_room(state.order, count)
    for row in range(count - 1, -1, -1):
        if entries[row] >= 0:
            recency.native_put(state.order, entries[row], 0, count - 1 - row)
    recency.advance(state.order, count)


def insert(state: Any, keys: Array, block_ids: Array) -> InsertResult:
    """Add new keys in order, as the most recent of list 0."""
    is_new = block_ids != NO_BLOCK
    entries = jnp.where(is_new, block_ids, _num_blocks(state))
    directory, inserted = directory_lib.insert(state.directory, keys, entries)
    entries = jnp.where(inserted, entries, _num_blocks(state))
    ranks = running_count(inserted) - 1
    order = recency.append(state.order, entries, ranks, ranks[-1] + 1)
    state = dataclasses.replace(state, directory=directory, order=order)
    return InsertResult(state, inserted)


@compiled
def native_insert(state: Any, keys: Any, block_ids: Any) -> None:
    """In-place form of `insert`."""
    directory_lib.native_insert(state.directory, keys, block_ids)
    count = 0
    for row in range(block_ids.shape[0]):
        count += block_ids[row] != NO_BLOCK
    recency.native_make_room(state.order, count)
    rank = 0
    for row in range(block_ids.shape[0]):
        if block_ids[row] != NO_BLOCK:
            recency.native_put(state.order, block_ids[row], 0, rank)
            rank += 1
    recency.advance(state.order, count)


def remove(state: LRUState, keys: Array, block_ids: Array) -> LRUState:
    """Forget keys; see `Policy.remove`."""
    del keys  # An entry is its block id.
    entries = jnp.where(block_ids != NO_BLOCK, block_ids, _num_blocks(state))
    return LRUState(
        directory=directory_lib.remove(state.directory, entries),
        order=recency.remove(state.order, entries),
    )


@compiled
def native_remove(state: Any, entries: Any) -> None:
    """In-place form of `remove`."""
    for entry in entries:
        if entry >= 0:
            directory_lib.native_remove(state.directory, entry)
            recency.native_remove(state.order, entry)


def evict(state: LRUState, num: Array, ref_cnt: Array, width: int) -> EvictResult:
    """Evict the least recently used blocks; see `Policy.evict`."""
    order, victims, ok = recency.pop_oldest(
        state.order, num, lambda entries: ref_cnt[entries] == 0, width
    )
    keys = state.directory.keys.at[victims].get(mode="fill", fill_value=0)
    victims = after(victims, keys)  # Read their rows before overwriting them.
    return EvictResult(
        state=LRUState(directory_lib.remove(state.directory, victims), order),
        block_ids=jnp.where(victims < _num_blocks(state), victims, NO_BLOCK),
        keys=keys,
        ok=ok,
    )


@compiled
def native_evict(state: Any, num: int, ref_cnt: Any, block_ids: Any, keys: Any) -> Any:
    """In-place form of `evict`."""
    victims = block_ids[:num]
    num_found, head = recency.native_find_oldest(
        state.order, num, 0, _IDENTITY, ref_cnt, victims
    )
    if num_found < num:
        return False
    state.order.heads[0] = head
    for row in range(num):
        copy_row(keys, row, state.directory.keys, victims[row])
    native_remove(state, victims)
    return True


def snapshot(state: LRUState) -> dict[str, Any]:
    """Return the keys in "order", the least recently used first. Not for jit."""
    keys = np.asarray(state.directory.keys)
    return {"order": words_to_keys(keys[recency.in_order(state.order)])}


@kept
def make_lru(num_blocks: int, max_batch: int = 4096) -> Policy:
    """Make the least-recently-used policy for a tier of `num_blocks`.

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
        >>> lru = make_lru(num_blocks=4)
        >>> keys = jnp.arange(16, dtype=jnp.uint32).reshape(2, 8)
        >>> state, inserted = lru.insert(lru.init(), keys, jnp.array([3, 1]))
        >>> lru.find(state, keys, jnp.int32(2)).tolist()
        [3, 1]
        >>> evicted = lru.evict(state, jnp.int32(1), jnp.zeros(4, jnp.int32), 2)
        >>> evicted.block_ids.tolist()
        [3, -1]
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
    )


def _num_blocks(state: Any) -> int:
    num_blocks: int = state.directory.keys.shape[0]
    return num_blocks


NATIVE = NativePolicy(
    native_find, native_touch, native_insert, native_remove, native_evict
)


register_native(LRUState, NATIVE)
