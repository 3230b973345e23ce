"""Who holds which block of the device, and what it caches: functions over one pytree.

The rules are those of vLLM 0.19.1's `BlockPool`: a block that nobody holds keeps its
contents and its key until it is needed for something else, the longest unused first.
Pins are jaxkv's own: a transfer that reads a block keeps it from being given up, but
leaves it its place among those that wait for that. A block can be allocated if it is
neither held nor pinned.

The functions take a state and a batch and return the state afterwards and an answer;
they may be traced, never raise, and leave the state bit for bit as it was when they
refuse. Of a batch of block ids NO_BLOCK is padding; the null block, and ids that the
tier has not, are ignored like it. Give a batch at least two rows (see
`jaxkv.manager`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv import prefix_cache
from jaxkv.policies import recency
from jaxkv.policies.counting import running_count
from jaxkv.policies.ordering import after
from jaxkv.policies.recency import RecencyLog
from jaxkv.prefix_cache import PrefixCache
from jaxkv.types import NO_BLOCK

NULL_BLOCK = 0
"""Never handed out: engines point unused entries of block tables at it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceTier:
    """Everything known about the blocks of the device.

    Attributes:
        cache: Which block holds which key.
        ref_cnt: i32[B]. Holders of each block; always 0 for the null block.
        pins: i32[B]. Transfers that keep each block from being allocated.
        queue: The blocks that nobody holds, the next to be given up first.
        num_free: i32[]. How many of these are not pinned.
    """

    cache: PrefixCache
    ref_cnt: Array
    pins: Array
    queue: RecencyLog
    num_free: Array


class Given(NamedTuple):
    """Blocks that are, or would be, given up for something else.

    Attributes:
        block_ids: i32[K]. In this order, then NO_BLOCK.
        has_key: bool[K]. Whether the block had a key.
        keys: u32[K, 8]. The key, where it had one.
    """

    block_ids: Array
    has_key: Array
    keys: Array


class CacheAnswer(NamedTuple):
    """What became of keys for blocks.

    Attributes:
        bad: bool[K]. Blocks known under another key. If any, nothing was done.
        added: bool[K]. Whether the block got the key; not if it had it, and not in
            the unlikely case that there was no room in the directory.
    """

    bad: Array
    added: Array


def init(num_blocks: int, max_batch: int) -> DeviceTier:
    """Make the state of a tier of `num_blocks`, all free but the null block."""
    return DeviceTier(
        cache=prefix_cache.init(num_blocks),
        ref_cnt=jnp.zeros((num_blocks,), jnp.int32),
        pins=jnp.zeros((num_blocks,), jnp.int32),
        queue=recency.init_filled(num_blocks, max_batch, first=NULL_BLOCK + 1),
        num_free=jnp.asarray(num_blocks - 1, jnp.int32),
    )


def find(tier: DeviceTier, keys: Array, count: Array) -> Array:
    """Find the block that serves each key.

    Args:
        tier: The state.
        keys: u32[K, 8].
        count: i32[]. How many of them are meant.

    Returns:
        i32[K]. NO_BLOCK where the key is absent or padding.
    """
    valid = jnp.arange(keys.shape[0], dtype=jnp.int32) < count
    return _block_ids(tier, prefix_cache.find(tier.cache, keys, valid))


def holds(tier: DeviceTier, block_ids: Array, keys: Array) -> Array:
    """Tell whether blocks (i32[K]) hold keys (u32[K, 8]), serving or not: bool[K]."""
    has_key, own = prefix_cache.keys_of(tier.cache, _entries(tier, block_ids))
    return has_key & jnp.all(own == keys, axis=1)


def counts(tier: DeviceTier, block_ids: Array) -> tuple[Array, Array]:
    """Read the `ref_cnt` and the `pins` of blocks: i32[K] each."""
    entries = _entries(tier, block_ids)
    return _read(tier.ref_cnt, entries), _read(tier.pins, entries)


def next_free(tier: DeviceTier, num: Array, width: int) -> Given:
    """Tell which blocks `allocate` would give, or as many of them as there are.

    Args:
        tier: The state.
        num: i32[]. How many, at most `width`.
        width: Length of the answer.
    """
    num = jnp.minimum(num, tier.num_free)
    oldest = recency.find_oldest(
        tier.queue, num, lambda entries: tier.pins[entries] == 0, width
    )
    return _given(tier, oldest.entries)


def allocate(
    tier: DeviceTier, num: Array, width: int
) -> tuple[DeviceTier, Array, Given]:
    """Take blocks for something new, all or none, and hold each once.

    Args:
        tier: The state before.
        num: i32[]. How many, at most `width`.
        width: Length of the answer.

    Returns:
        The state after; bool[], whether there were enough; and the blocks, none if
        there were not, with the keys that they lost.
    """
    ok = num <= tier.num_free
    # Not to search the whole queue in vain.
    num = jnp.where(ok, num, 0)
    queue, taken, _ = recency.pop_oldest(
        tier.queue, num, lambda entries: tier.pins[entries] == 0, width
    )
    given = _given(tier, taken)
    return (
        dataclasses.replace(
            tier,
            cache=prefix_cache.drop(tier.cache, taken),
            ref_cnt=tier.ref_cnt.at[taken].set(1, mode="drop"),
            queue=queue,
            num_free=tier.num_free - num,
        ),
        ok,
        given,
    )


def touch(tier: DeviceTier, block_ids: Array) -> DeviceTier:
    """Hold blocks (i32[K]) once more for each time they are given."""
    entries = _entries(tier, block_ids)
    ref_cnt, was_free = _raise(tier.ref_cnt, entries)
    taken = was_free & (_read(tier.pins, entries) == 0)
    return dataclasses.replace(
        tier,
        ref_cnt=ref_cnt,
        queue=recency.remove(tier.queue, _where(was_free, entries, tier)),
        num_free=tier.num_free - jnp.sum(taken, dtype=jnp.int32),
    )


def free(tier: DeviceTier, block_ids: Array) -> tuple[DeviceTier, Array]:
    """Let go of blocks once for each time they are given.

    Args:
        tier: The state before.
        block_ids: i32[K]. Those that nobody holds any more go to the end of the queue
            in this order, where one that is repeated counts at its first place.

    Returns:
        The state after, and bool[K]: blocks given more often than they are held. If
        any, nothing was done.
    """
    entries = _entries(tier, block_ids)
    ref_cnt, is_free, bad = _lower(tier.ref_cnt, entries)
    rank = running_count(is_free) - 1
    given = is_free & (_read(tier.pins, entries) == 0)
    queue = recency.append(
        tier.queue, _where(is_free, entries, tier), rank, rank[-1] + 1
    )
    return (
        dataclasses.replace(
            tier,
            ref_cnt=ref_cnt,
            queue=queue,
            num_free=tier.num_free + jnp.sum(given, dtype=jnp.int32),
        ),
        bad,
    )


def pin(tier: DeviceTier, block_ids: Array) -> DeviceTier:
    """Keep blocks (i32[K]) from being allocated, once more for each time given."""
    entries = _entries(tier, block_ids)
    pins, was_unpinned = _raise(tier.pins, entries)
    taken = was_unpinned & (_read(tier.ref_cnt, entries) == 0)
    num_free = tier.num_free - jnp.sum(taken, dtype=jnp.int32)
    return dataclasses.replace(tier, pins=pins, num_free=num_free)


def unpin(tier: DeviceTier, block_ids: Array) -> tuple[DeviceTier, Array]:
    """Take pins back, one for each time that a block is given.

    Args:
        tier: The state before.
        block_ids: i32[K]. None of them moves in the queue.

    Returns:
        The state after, and bool[K]: blocks given more often than they are pinned. If
        any, nothing was done.
    """
    entries = _entries(tier, block_ids)
    pins, is_unpinned, bad = _lower(tier.pins, entries)
    given = is_unpinned & (_read(tier.ref_cnt, entries) == 0)
    num_free = tier.num_free + jnp.sum(given, dtype=jnp.int32)
    return dataclasses.replace(tier, pins=pins, num_free=num_free), bad


def cache(
    tier: DeviceTier, block_ids: Array, keys: Array
) -> tuple[DeviceTier, CacheAnswer]:
    """Make blocks findable.

    Args:
        tier: The state before.
        block_ids: i32[K].
        keys: u32[K, 8]. What each block contains. One that has its key is left alone.

    Returns:
        The state after, and what became of the keys.
    """
    entries = _entries(tier, block_ids)
    has_key, own = prefix_cache.keys_of(tier.cache, entries)
    ref_cnt, first_row = _first_rows(tier.ref_cnt, entries)
    # Of a block that is repeated, the first row says what the others must say.
    own = jnp.where(has_key[:, None], own, keys[first_row])
    bad = (entries < tier.ref_cnt.shape[0]) & jnp.any(own != keys, axis=1)
    rows = jnp.arange(entries.shape[0], dtype=jnp.int32)
    fresh = ~has_key & (first_row == rows) & ~jnp.any(bad)
    fresh_entries = after(_where(fresh, entries, tier), own)
    cached, added = prefix_cache.add(tier.cache, fresh_entries, keys)
    tier = dataclasses.replace(tier, ref_cnt=ref_cnt, cache=cached)
    return tier, CacheAnswer(bad, added)


def evict(tier: DeviceTier, block_ids: Array) -> tuple[DeviceTier, Given]:
    """Forget what blocks (i32[K]) contain; they stay with whoever holds them.

    Returns:
        The state after, and the blocks as given, with the keys that they lost.
    """
    entries = _entries(tier, block_ids)
    given = _given(tier, entries)
    dropped = prefix_cache.drop(tier.cache, entries)
    return dataclasses.replace(tier, cache=dropped), given


def reset(tier: DeviceTier) -> tuple[DeviceTier, Array]:
    """Forget what all blocks contain, unless one is held or pinned.

    Takes time in proportion to the tier.

    Returns:
        The state after, and bool[]: whether it was done.
    """
    num_blocks = tier.ref_cnt.shape[0]
    ok = tier.num_free == num_blocks - 1
    empty = prefix_cache.init(num_blocks)
    emptied = jax.tree.map(lambda old, new: jnp.where(ok, new, old), tier.cache, empty)
    return dataclasses.replace(tier, cache=emptied), ok


def check(tier: DeviceTier) -> None:
    """Raise AssertionError if something is not as it should be. For the host."""
    prefix_cache.check(tier.cache)
    ref_cnt, pins = np.array(tier.ref_cnt), np.array(tier.pins)
    assert ref_cnt.min() >= 0
    assert pins.min() >= 0
    assert ref_cnt[NULL_BLOCK] == pins[NULL_BLOCK] == 0
    assert not np.array(tier.cache.has_key)[NULL_BLOCK]
    waiting = np.sort(recency.in_order(jax.tree.map(jnp.copy, tier.queue)))
    assert waiting.tolist() == (np.flatnonzero(ref_cnt[1:] == 0) + 1).tolist()
    assert int(tier.num_free) == np.count_nonzero(pins[waiting] == 0)


def _raise(counts: Array, entries: Array) -> tuple[Array, Array]:
    """Add one for each row (i32[K], B for none) to the count of its block.

    Returns:
        The counts after, and bool[K]: of the blocks whose count was 0 the first rows.
    """
    was_zero = counts.at[entries].get(mode="fill", fill_value=1) == 0
    marked, is_first = _mark(counts, entries, was_zero)
    change = 1 - jnp.where(is_first, _marks(entries), 0)
    return marked.at[entries].add(change, mode="drop"), is_first


def _lower(counts: Array, entries: Array) -> tuple[Array, Array, Array]:
    """Take one for each row (i32[K], B for none) from the count of its block.

    Returns:
        The counts after; bool[K], of the blocks whose count became 0 the first rows;
        and bool[K], the rows whose count would be negative. If any, the counts are as
        they were, and none became 0.
    """
    lowered = counts.at[entries].add(-1, mode="drop")
    left = _read(lowered, entries)
    bad = left < 0
    ok = ~jnp.any(bad)
    ended = ok & (left == 0) & (entries < counts.shape[0])
    marked, is_first = _mark(lowered, entries, ended)
    change = jnp.where(is_first, -_marks(entries), 0)
    return marked.at[entries].add(jnp.where(ok, change, 1), mode="drop"), is_first, bad


def _mark(counts: Array, entries: Array, where: Array) -> tuple[Array, Array]:
    """Put the mark of the first of its rows on each block whose count is 0.

    Returns:
        The counts, marked; and bool[K], the rows whose mark was put.
    """
    at = jnp.where(where, entries, counts.shape[0])
    marked = counts.at[at].min(_marks(entries), mode="drop")
    return marked, where & (_read(marked, entries) == _marks(entries))


def _first_rows(counts: Array, entries: Array) -> tuple[Array, Array]:
    """Tell the first row that has the same block: i32[K]; the row itself for none.

    Returns:
        The counts as they were, which served to find out, and the rows.
    """
    num_rows = entries.shape[0]
    own = _read(counts, entries)
    marked = counts.at[after(entries, own)].min(_marks(entries), mode="drop")
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    first = marked.at[entries].get(mode="fill", fill_value=0) + num_rows
    restored = marked.at[after(entries, first)].set(own, mode="drop")
    return restored, jnp.where(entries < counts.shape[0], first, rows)


def _marks(entries: Array) -> Array:
    """Number the rows from -K on: no count is that low, and the first is lowest."""
    num_rows = entries.shape[0]
    return jnp.arange(-num_rows, 0, dtype=jnp.int32)


def _given(tier: DeviceTier, entries: Array) -> Given:
    has_key, keys = prefix_cache.keys_of(tier.cache, entries)
    return Given(_block_ids(tier, entries), has_key, keys)


def _entries(tier: DeviceTier, block_ids: Array) -> Array:
    """Map what is to be ignored out of range, where a scatter drops it."""
    num_blocks = tier.ref_cnt.shape[0]
    meant = (block_ids > NULL_BLOCK) & (block_ids < num_blocks)
    return jnp.where(meant, block_ids, num_blocks)


def _block_ids(tier: DeviceTier, entries: Array) -> Array:
    return jnp.where(entries < tier.ref_cnt.shape[0], entries, NO_BLOCK)


def _where(flags: Array, entries: Array, tier: DeviceTier) -> Array:
    """Keep the entries whose flag (bool[K]) is set."""
    return jnp.where(flags, entries, tier.ref_cnt.shape[0])


def _read(counts: Array, entries: Array) -> Array:
    """Read counts, 0 for no block."""
    return counts.at[entries].get(mode="fill", fill_value=0)
