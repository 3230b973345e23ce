"""Least recently used: evict the block whose last use is oldest.

Exact to vLLM 0.19.1's `LRUCachePolicy`: a batch is touched from its last key to its
first, so that the first block of a prefix is evicted after those that follow it.
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

from jaxkv._util import check_whole
from jaxkv.keys import words_to_keys
from jaxkv.native import lru as native
from jaxkv.native.policy import register_native
from jaxkv.policies import directory as directory_lib
from jaxkv.policies import recency
from jaxkv.policies.base import EvictResult, InsertResult, Policy
from jaxkv.policies.directory import Directory
from jaxkv.policies.recency import RecencyLog
from jaxkv.policies.xla import after, running_count
from jaxkv.types import NO_BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LRUState:
    """The blocks that are held, in the order of last use. An entry is a block id.

    Attributes:
        directory: Which block holds a key.
        order: The blocks from the least to the most recently used.
    """

    directory: Directory
    order: RecencyLog


register_native(LRUState, native.NATIVE)

# Of how many records `next_victims` looks at, beside those asked for: dead ones lie
# between the others until the log is compacted.
_MOST_DEAD = 4096


def next_victims(state: LRUState, ref_cnt: ArrayLike, num: int) -> NDArray[np.int32]:
    """Look which blocks would be evicted next; on NumPy arrays, and not under jit.

    Args:
        state: Of a native executor.
        ref_cnt: i32[B]. Blocks with more than 0 are held, and not evicted.
        num: How many to look for.

    Returns:
        i32[n], the next one first; n may be less than `num`.
    """
    log = state.order
    head, tail = int(log.heads[0]), int(log.tail[()])
    positions = np.arange(head, min(tail, head + num + _MOST_DEAD))
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


def find(state: LRUState, keys: Array, count: Array) -> Array:
    """Find the block of each key; see `Policy.find`."""
    entries = directory_lib.find_first(state.directory, keys, count)
    return jnp.where(entries < _num_blocks(state), entries, NO_BLOCK)


def touch(state: LRUState, keys: Array, count: Array, ready: Array) -> LRUState:
    """Record a use of each key, the last first; see `Policy.touch`."""
    del ready  # A block that is being stored is used like any other.
    ranks = count - 1 - jnp.arange(keys.shape[0], dtype=jnp.int32)
    entries = directory_lib.find_first(state.directory, keys, count)
    order = recency.append(state.order, entries, ranks, count)
    return dataclasses.replace(state, order=order)


def insert(state: LRUState, keys: Array, block_ids: Array) -> InsertResult:
    """Add new keys as the most recent, in their order; see `Policy.insert`."""
    wanted = block_ids != NO_BLOCK
    entries = jnp.where(wanted, block_ids, _num_blocks(state))
    directory, inserted = directory_lib.insert(state.directory, keys, entries)
    entries = jnp.where(inserted, entries, _num_blocks(state))
    ranks = running_count(inserted) - 1
    order = recency.append(state.order, entries, ranks, ranks[-1] + 1)
    return InsertResult(LRUState(directory, order), inserted)


def remove(state: LRUState, keys: Array, block_ids: Array) -> LRUState:
    """Forget keys; see `Policy.remove`."""
    del keys  # An entry is its block id.
    entries = jnp.where(block_ids != NO_BLOCK, block_ids, _num_blocks(state))
    return LRUState(
        directory=directory_lib.remove(state.directory, entries),
        order=recency.remove(state.order, entries),
    )


def evict(state: LRUState, num: Array, ref_cnt: Array, width: int) -> EvictResult:
    """Evict the least recently used blocks; see `Policy.evict`."""
    order, victims, ok = recency.pop_oldest(
        state.order, num, lambda entries: ref_cnt[entries] == 0, width
    )
    keys = state.directory.keys.at[victims].get(mode="fill", fill_value=0)
    victims = after(victims, keys)  # Which will be overwritten.
    return EvictResult(
        state=LRUState(directory_lib.remove(state.directory, victims), order),
        block_ids=jnp.where(victims < _num_blocks(state), victims, NO_BLOCK),
        keys=keys,
        ok=ok,
    )


def snapshot(state: LRUState) -> dict[str, Any]:
    """Show a state to a reader. For the host, not for jit.

    Returns:
        The keys in "order", from the least recently used on.
    """
    keys = np.asarray(state.directory.keys)
    return {"order": words_to_keys(keys[recency.in_order(state.order)])}


@functools.cache
def make_lru(num_blocks: int, max_batch: int = 4096) -> Policy:
    """Make the least-recently-used policy for a tier of `num_blocks`.

    Args:
        num_blocks: Blocks of the tier.
        max_batch: Most keys in one call.

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
        native=native.NATIVE,
        always_evicts=True,
    )


def _num_blocks(state: LRUState) -> int:
    return state.directory.keys.shape[0]
