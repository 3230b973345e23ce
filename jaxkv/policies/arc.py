"""ARC (adaptive replacement): balances blocks used once against blocks used again.

ARC keeps four LRU lists. T1 holds the resident blocks used once, T2 those used again.
An evicted block's key becomes a ghost: in B1 if the block was in T1, in B2 if it was in
T2. `target` is the desired size of T1: a hit in B1 raises it, because T1 was too small;
a hit in B2 lowers it (Megiddo and Modha, FAST 2003).

`make_arc` matches vLLM 0.19.1's `ARCCachePolicy`, which departs from the paper in three
points. A new block starts in T1 even if its key has a ghost. A hit does not promote a
block whose store is in flight. The target moves once per ghost in a batch. One
thing is as in later versions (vLLM pull request 55461): T1 is evicted until it is
smaller than the target, then T2, and if T2 has too few idle blocks, T1 again.

An entry is the number of a key in these lists. A used entry always moves to the recent
end of a list, so one recency log stores all four lists.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv._util import check_whole, kept
from jaxkv.compiling import (
    compiled,
    copy_items,
    copy_row,
    empty,
    filled,
    greater,
    inlined,
    lesser,
)
from jaxkv.keys import words_to_keys
from jaxkv.policies import directory as directory_lib
from jaxkv.policies import recency
from jaxkv.policies.base import EvictResult, InsertResult, Policy
from jaxkv.policies.directory import Directory
from jaxkv.policies.native import NativePolicy, register_native
from jaxkv.policies.recency import Oldest, RecencyLog
from jaxkv.policies.xla import after, full, running_count
from jaxkv.types import NO_BLOCK

# Only an eviction moves an entry to a lower number, which `recency.put` cannot do.
B1, B2, T1, T2 = range(4)
NO_LIST = -1

_NO_REF_CNT = np.empty(0, np.int32)  # As `ref_cnt`: every entry is eligible.

_NUM_LISTS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ARCState:
    """The resident blocks and the ghosts of a tier of B blocks. E = 3 B entries.

    3 B entries suffice: T1 and T2 have at most B blocks together, and B1 and B2 have at
    most B ghosts each after every eviction. A block that is evicted keeps its entry.
    """

    directory: Directory  # Maps each key to its entry.
    block_ids: Array  # i32[E]. The block of each entry in T1 or T2, else NO_BLOCK.
    order: RecencyLog  # The four lists.
    sizes: Array  # i32[4]. Entries in each list.
    unused: Array  # i32[E]. Stack of the entries in no list, E - sum(sizes) high.
    target: Array
    """u32[2]. The bits of a float64, because vLLM's target is one and equal decisions
    need equal rounding. JAX disables float64 by default."""


def init(num_blocks: int, max_batch: int) -> ARCState:
    """Make an empty cache of `num_blocks`."""
    num_entries = 3 * num_blocks
    return ARCState(
        directory=directory_lib.init(num_entries),
        block_ids=full((num_entries,), NO_BLOCK, jnp.int32),
        order=recency.init(num_entries, max_batch, _NUM_LISTS),
        sizes=full((_NUM_LISTS,), 0, jnp.int32),
        unused=jax.device_put(np.arange(num_entries, dtype=np.int32)[::-1]),
        target=full((2,), 0, jnp.uint32),  # The bits of 0.0.
    )


def find(state: ARCState, keys: Array, count: Array) -> Array:
    """Find the block of each key; see `Policy.find`."""
    return _blocks(state, directory_lib.find_first(state.directory, keys, count))


@compiled
def native_find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """In-place form of `find`."""
    directory_lib.native_find(state.directory, keys, entries)
    for row in range(entries.shape[0]):
        entry = entries[row]
        block_ids[row] = state.block_ids[entry] if entry >= 0 else NO_BLOCK


def touch(state: ARCState, keys: Array, count: Array, ready: Array) -> ARCState:
    """Record a use of each key, the last key first; see `Policy.touch`.

    A block of T1 moves to T2, unless its store is in flight. Any other entry moves to
    the recent end of its own list. Hits in B1 and B2 move the target.
    """
    entries = directory_lib.find_first(state.directory, keys, count)
    order = recency.make_room(state.order, count)
    lists = recency.list_of(order, entries)
    new_lists = jnp.where((lists == T1) & ready, T2, lists)
    ranks = count - 1 - jnp.arange(keys.shape[0], dtype=jnp.int32)
    order = recency.put(order, entries, new_lists, ranks, count)
    # One row per entry: a key that occurs twice in the batch moves only once.
    moved = recency.is_newest(order, entries, ranks, count)
    hits = lists[::-1]  # In the order of use, from the last key to the first.
    return dataclasses.replace(
        state,
        order=order,
        sizes=state.sizes + _list_sizes(new_lists, moved) - _list_sizes(lists, moved),
        target=_adapt_target(state.target, hits, state.sizes, _num_entries(state) // 3),
    )


@compiled
def native_touch(state: Any, entries: Any, is_use: Any) -> None:
    """In-place form of `touch`."""
    count = entries.shape[0]
    recency.native_make_room(state.order, count)
    for row in range(count - 1, -1, -1):
        entry = entries[row]
        if entry < 0:
            continue
        list_id = recency.native_list_of(state.order, entry)
        if list_id == T1 and is_use[row]:
            state.sizes[T1] -= 1
            state.sizes[T2] += 1
            list_id = T2
        elif list_id in (B1, B2):
            _move_target(state, list_id)
        recency.native_put(state.order, entry, list_id, count - 1 - row)
    recency.advance(state.order, count)


def insert(state: ARCState, keys: Array, block_ids: Array) -> InsertResult:
    """Add new keys to T1, in their order; a key with a ghost keeps its entry."""
    no_entry = _num_entries(state)
    is_new = block_ids != NO_BLOCK
    ghosts = directory_lib.find(state.directory, keys, is_new)
    fresh = _take_unused(state, is_new & (ghosts == no_entry))
    directory, added = directory_lib.insert(state.directory, keys, fresh)
    entries = jnp.where(added, fresh, ghosts)
    inserted = entries < no_entry

    ranks = running_count(inserted) - 1
    count = ranks[-1] + 1
    order = recency.make_room(state.order, count)
    lists = recency.list_of(order, entries)
    new_lists = jnp.full_like(lists, T1)
    sizes = state.sizes + _list_sizes(new_lists, inserted)
    sizes -= _list_sizes(lists, inserted)
    inserted_state = dataclasses.replace(
        state,
        directory=directory,
        block_ids=state.block_ids.at[entries].set(block_ids, mode="drop"),
        order=recency.put(order, after(entries, lists), new_lists, ranks, count),
        sizes=sizes,
        # Return the entries of keys that the directory had no room for.
        unused=_push_unused(state.unused, sizes, jnp.where(added, no_entry, fresh)),
    )
    return InsertResult(inserted_state, inserted)


@compiled
def native_insert(state: Any, keys: Any, block_ids: Any) -> None:
    """In-place form of `insert`."""
    num_rows = block_ids.shape[0]
    entries = filled(num_rows, directory_lib.NO_ENTRY, np.int32)
    fresh = filled(num_rows, directory_lib.NO_ENTRY, np.int32)
    height = _native_num_unused(state)
    num_fresh = 0
    for row in range(num_rows):
        if block_ids[row] == NO_BLOCK:
            continue
        entries[row] = directory_lib.find_one(state.directory, keys, row)
        if entries[row] < 0:
            fresh[row] = state.unused[height - 1 - num_fresh]
            num_fresh += 1
    added = empty(num_rows, np.int32)
    copy_items(added, 0, fresh, num_rows)
    directory_lib.native_insert(state.directory, keys, added)

    count = 0
    for row in range(num_rows):
        if added[row] >= 0:
            entries[row] = added[row]
            fresh[row] = directory_lib.NO_ENTRY
        if entries[row] < 0:
            block_ids[row] = NO_BLOCK
        else:
            count += 1
    recency.native_make_room(state.order, count)
    rank = 0
    for row in range(num_rows):
        entry = entries[row]
        if entry < 0:
            continue
        list_id = recency.native_list_of(state.order, entry)
        if list_id != NO_LIST:
            state.sizes[list_id] -= 1
        state.sizes[T1] += 1
        state.block_ids[entry] = block_ids[row]
        recency.native_put(state.order, entry, T1, rank)
        rank += 1
    recency.advance(state.order, count)
    # Return the entries of keys that the directory had no room for.
    _native_push_unused(state, fresh)


def remove(state: ARCState, keys: Array, block_ids: Array) -> ARCState:
    """Forget keys without leaving ghosts; see `Policy.remove`."""
    entries = directory_lib.find(state.directory, keys, block_ids != NO_BLOCK)
    lists = recency.list_of(state.order, entries)
    sizes = state.sizes - _list_sizes(lists, lists != NO_LIST)
    return ARCState(
        directory=directory_lib.remove(state.directory, entries),
        block_ids=state.block_ids.at[entries].set(NO_BLOCK, mode="drop"),
        order=recency.remove(state.order, after(entries, lists)),
        sizes=sizes,
        unused=_push_unused(state.unused, sizes, entries),
        target=state.target,
    )


@compiled
def native_remove(state: Any, entries: Any) -> None:
    """In-place form of `remove`."""
    for entry in entries:
        if entry >= 0:
            state.sizes[recency.native_list_of(state.order, entry)] -= 1
            state.block_ids[entry] = NO_BLOCK
            directory_lib.native_remove(state.directory, entry)
            recency.native_remove(state.order, entry)
    _native_push_unused(state, entries)


def evict(state: ARCState, num: Array, ref_cnt: Array, width: int) -> EvictResult:
    """Evict the oldest of T1 down to the target, of T2, and of T1 if T2 has too few."""
    no_entry, num_blocks = _num_entries(state), ref_cnt.shape[0]

    def oldest(num: Array, list_id: int) -> Oldest:
        def is_eligible(entries: Array) -> Array:
            if list_id in (B1, B2):
                return jnp.ones_like(entries, jnp.bool_)
            return ref_cnt[state.block_ids[entries]] == 0

        return recency.find_oldest(state.order, num, is_eligible, width, list_id)

    # vLLM evicts one block at a time, from T1 while |T1| >= int(target).
    above_target = state.sizes[T1] - _target_as_int(state.target) + 1
    t1 = oldest(jnp.clip(above_target, 0, num), T1)
    num_first_t1 = t1.num
    t2 = oldest(num - num_first_t1, T2)
    t1 = oldest(num - t2.num, T1)
    ok = t1.num + t2.num >= num
    from_t1, from_t2 = jnp.where(ok, num - t2.num, 0), jnp.where(ok, t2.num, 0)

    # The victims: blocks of T1, then of T2, then more of T1.
    row = jnp.arange(width, dtype=jnp.int32)
    is_t2 = (row >= num_first_t1) & (row < num_first_t1 + t2.num)
    of_t1 = t1.entries[jnp.where(row < num_first_t1, row, row - t2.num)]
    of_t2 = t2.entries[jnp.where(is_t2, row - num_first_t1, 0)]
    victims = jnp.where(ok, jnp.where(is_t2, of_t2, of_t1), no_entry)
    keys = state.directory.keys.at[victims].get(mode="fill", fill_value=0)
    block_ids = _blocks(state, after(victims, keys))
    victims = after(victims, block_ids)  # Read their rows before overwriting them.

    # The victims become ghosts; B1 and B2 then keep only their newest B ghosts each.
    b1 = oldest(jnp.maximum(state.sizes[B1] + from_t1 - num_blocks, 0), B1)
    b2 = oldest(jnp.maximum(state.sizes[B2] + from_t2 - num_blocks, 0), B2)
    dropped = jnp.concatenate([b1.entries, b2.entries])
    sizes = state.sizes + jnp.stack(
        [from_t1 - b1.num, from_t2 - b2.num, -from_t1, -from_t2]
    )
    num_victims = from_t1 + from_t2
    order = recency.remove(state.order, jnp.concatenate([victims, dropped]))
    order = recency.set_heads(order, [b1, b2, t1, t2], ok)
    order = recency.make_room(order, num_victims)
    ghost_lists = jnp.where(is_t2, B2, B1)
    order = recency.put(order, victims, ghost_lists, row, num_victims)
    evicted = ARCState(
        directory=directory_lib.remove(state.directory, dropped),
        block_ids=state.block_ids.at[victims].set(NO_BLOCK, mode="drop"),
        order=order,
        sizes=sizes,
        unused=_push_unused(state.unused, sizes, dropped),
        target=state.target,
    )
    return EvictResult(evicted, block_ids, keys, ok)


@compiled
def native_evict(state: Any, num: int, ref_cnt: Any, block_ids: Any, keys: Any) -> Any:
    """In-place form of `evict`."""
    order, num_blocks = state.order, ref_cnt.shape[0]
    t1, t2 = empty(num, np.int32), empty(num, np.int32)
    # vLLM evicts one block at a time, from T1 while |T1| >= int(target).
    above_target = state.sizes[T1] - np.int64(state.target.view(np.float64)[0]) + 1
    num_t1, head_t1 = recency.native_find_oldest(
        order, lesser(greater(above_target, 0), num), T1, state.block_ids, ref_cnt, t1
    )
    num_first_t1 = num_t1
    num_t2, head_t2 = recency.native_find_oldest(
        order, num - num_t1, T2, state.block_ids, ref_cnt, t2
    )
    num_t1, head_t1 = recency.native_find_oldest(
        order, num - num_t2, T1, state.block_ids, ref_cnt, t1
    )
    if num_t1 + num_t2 < num:
        return False

    # The victims: blocks of T1, then of T2, then more of T1.
    victims = empty(num, np.int32)
    copy_items(victims, 0, t1, num_first_t1)
    copy_items(victims, num_first_t1, t2, num_t2)
    copy_items(victims, num_first_t1 + num_t2, t1[num_first_t1:], num_t1 - num_first_t1)
    # The victims become ghosts; B1 and B2 then keep only their newest B ghosts each.
    excess_b1 = greater(state.sizes[B1] + num_t1 - num_blocks, 0)
    excess_b2 = greater(state.sizes[B2] + num_t2 - num_blocks, 0)
    dropped = empty(excess_b1 + excess_b2, np.int32)
    _, head_b1 = recency.native_find_oldest(
        order, excess_b1, B1, state.block_ids, _NO_REF_CNT, dropped
    )
    _, head_b2 = recency.native_find_oldest(
        order, excess_b2, B2, state.block_ids, _NO_REF_CNT, dropped[excess_b1:]
    )
    order.heads[B1], order.heads[B2] = head_b1, head_b2
    order.heads[T1], order.heads[T2] = head_t1, head_t2
    for row in range(num):
        entry = victims[row]
        block_ids[row] = state.block_ids[entry]
        state.block_ids[entry] = NO_BLOCK
        copy_row(keys, row, state.directory.keys, entry)
        recency.native_remove(order, entry)
    for entry in dropped:
        directory_lib.native_remove(state.directory, entry)
        recency.native_remove(order, entry)
    recency.native_make_room(order, num)
    for row in range(num):
        is_t2 = num_first_t1 <= row < num_first_t1 + num_t2
        recency.native_put(order, victims[row], B2 if is_t2 else B1, row)
    recency.advance(order, num)
    state.sizes[T1] -= num_t1
    state.sizes[T2] -= num_t2
    state.sizes[B1] += num_t1 - excess_b1
    state.sizes[B2] += num_t2 - excess_b2
    _native_push_unused(state, dropped)
    return True


@compiled
def _move_target(state: Any, list_id: int) -> None:
    """Move the target for one hit in `list_id`: up for B1, down for B2."""
    target = state.target.view(np.float64)
    # The list of a hit is never empty: `greater` only prevents a division by 0.
    b1, b2 = greater(state.sizes[B1], 1), greater(state.sizes[B2], 1)
    if list_id == B1:
        num_blocks = state.block_ids.shape[0] // 3
        target[0] = lesser(target[0] + greater(b2 / b1, 1.0), float(num_blocks))
    else:
        target[0] = greater(target[0] - greater(b1 / b2, 1.0), 0.0)


def snapshot(state: ARCState) -> dict[str, Any]:
    """Describe a state. For the host, not for jit.

    Returns:
        The keys of lists "t1", "t2", "b1" and "b2", the oldest first, and "target".
    """
    keys = np.asarray(state.directory.keys)
    lists = {"t1": T1, "t2": T2, "b1": B1, "b2": B2}
    return {
        name: words_to_keys(keys[recency.in_order(state.order, list_id)])
        for name, list_id in lists.items()
    } | {"target": target_as_float(state.target)}


@kept
def make_arc(num_blocks: int, max_batch: int = 4096) -> Policy:
    """Make vLLM's adaptive replacement policy for a tier of `num_blocks`.

    Args:
        num_blocks: Blocks of the tier.
        max_batch: Maximum keys in one call.

    Returns:
        The policy. Equal arguments give the same object, so that functions traced
        with it are shared. It needs a backend with float64, such as CPU and GPU.

    Raises:
        ValueError: If an argument is less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> arc = make_arc(num_blocks=4)
        >>> keys = jnp.arange(16, dtype=jnp.uint32).reshape(2, 8)
        >>> refs = jnp.zeros(4, jnp.int32)
        >>> state, _ = arc.insert(arc.init(), keys, jnp.array([3, 1]))
        >>> ready = jnp.ones(2, bool)
        >>> state = arc.touch(state, keys, jnp.int32(1), ready)  # 3 is used again
        >>> arc.evict(state, jnp.int32(1), refs, 2).block_ids.tolist()
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
    )


def _blocks(state: ARCState, entries: Array) -> Array:
    """Return the block of each entry (i32[K]): i32[K], NO_BLOCK for ghosts and E."""
    return state.block_ids.at[entries].get(mode="fill", fill_value=NO_BLOCK)


def _list_sizes(lists: Array, mask: Array) -> Array:
    """Count the rows of each list number in `lists` (i32[K]) under `mask`: i32[4]."""
    is_list = lists[:, None] == jnp.arange(_NUM_LISTS, dtype=jnp.int32)[None, :]
    return jnp.sum(is_list & mask[:, None], axis=0, dtype=jnp.int32)


def _take_unused(state: ARCState, mask: Array) -> Array:
    """Choose an unused entry for each row of `mask` (bool[K]): i32[K], else E."""
    num_entries = _num_entries(state)
    rank = running_count(mask) - 1
    top = num_entries - jnp.sum(state.sizes, dtype=jnp.int32) - 1
    at = jnp.where(mask, top - rank, num_entries)
    return state.unused.at[at].get(mode="fill", fill_value=num_entries)


def _push_unused(unused: Array, sizes: Array, entries: Array) -> Array:
    """Push entries (i32[K]; E is skipped) that `sizes` (i32[4]) no longer counts."""
    num_entries = unused.shape[0]
    is_entry = entries < num_entries
    rank = running_count(is_entry) - 1
    height = num_entries - jnp.sum(sizes, dtype=jnp.int32)
    at = jnp.where(is_entry, height - 1 - rank, num_entries)
    return unused.at[at].set(entries, mode="drop")


@inlined
def _native_num_unused(state: Any) -> Any:
    """Return the height of the stack of unused entries."""
    num = state.unused.shape[0]
    for size in state.sizes:
        num -= size
    return num


@compiled
def _native_push_unused(state: Any, entries: Any) -> None:
    """In-place form of `_push_unused`, the first entry on top; -1 is skipped."""
    at = _native_num_unused(state) - 1
    for entry in entries:
        if entry >= 0:
            state.unused[at] = entry
            at -= 1


def _num_entries(state: ARCState) -> int:
    return state.block_ids.shape[0]


def _adapt_target(target: Array, lists: Array, sizes: Array, num_blocks: int) -> Array:
    """Move the target (u32[2], the bits of a float64) once per hit in B1 or B2.

    `lists` (i32[K]) has the list of each used entry before the touch, in the order of
    use. `sizes` (i32[4]) are the list sizes, which hits in B1 and B2 do not change.
    """
    is_ghost = (lists == B1) | (lists == B2)
    rank = running_count(is_ghost) - 1
    at = jnp.where(is_ghost, rank, lists.shape[0])
    ghosts = jnp.zeros_like(lists).at[at].set(lists, mode="drop")
    # Each step clamps the target, so the steps cannot be summed first.
    with jax.enable_x64(True):
        # The list of a hit is never empty: `maximum` only prevents a division by 0.
        b1, b2 = jnp.maximum(sizes[:2], 1).astype(jnp.float64)
        up, down = jnp.maximum(b2 / b1, 1.0), jnp.maximum(b1 / b2, 1.0)

        def move(i: Array, value: Array) -> Array:
            raised = jnp.minimum(value + up, float(num_blocks))
            lowered = jnp.maximum(value - down, 0.0)
            return jnp.where(ghosts[i] == B1, raised, lowered)

        value = lax.bitcast_convert_type(target, jnp.float64)
        value = lax.fori_loop(jnp.int32(0), rank[-1] + 1, move, value)
        return lax.bitcast_convert_type(value, jnp.uint32)


def _target_as_int(target: Array) -> Array:
    """Truncate the target (u32[2], the bits of a float64) to an integer: i32[]."""
    with jax.enable_x64(True):
        return lax.bitcast_convert_type(target, jnp.float64).astype(jnp.int32)


def target_as_float(target: Array) -> float:
    """Return the target as a float. For the host, not for jit."""
    return float(np.asarray(target).view(np.float64)[0])


NATIVE = NativePolicy(
    native_find, native_touch, native_insert, native_remove, native_evict
)


register_native(ARCState, NATIVE)
