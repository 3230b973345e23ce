"""The device tier's transitions in place; `jaxkv.tiers.device` defines them.

Every function takes a `Bound` of a `DeviceTier`. Block ids are i64[K], keys u32[K, 8].
The null block among block ids is passed over. On bad input a function changes nothing
and returns the first bad row, such as one that is no block's (`find_outside`); -1 means
success.

The free blocks are in a ring of two links per block, `newer` and `older`, that the null
block closes: the one after it goes next, the one before it last. Blocks with the same
key form a chain in the order of their arrival. The first of the chain serves the key;
its `preceding` is the complement of the last, a number below 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.compiling import compiled, copy_row, empty, inlined, lesser, same_row
from jaxkv.policies import directory as directory_lib
from jaxkv.types import NO_BLOCK, NULL_BLOCK

NO_LINK = -1


@compiled
def find_outside(tier: Any, block_ids: Any) -> Any:
    """Find the first row that is no block of the pool, -1 for none."""
    num_blocks = tier.ref_cnt.shape[0]
    for row in range(block_ids.shape[0]):
        if not 0 <= block_ids[row] < num_blocks:
            return row
    return -1


@compiled
def find(tier: Any, keys: Any, block_ids: Any) -> None:
    """Write the block that serves each key, NO_BLOCK if none, to i32[K]."""
    directory_lib.native_find(tier.directory, keys, block_ids)


@compiled
def find_prefix(tier: Any, keys: Any, block_ids: Any) -> Any:
    """`find` up to the first key that has none; return how many come before it."""
    return directory_lib.find_prefix(tier.directory, keys, block_ids)


@compiled
def holds(tier: Any, block_ids: Any, keys: Any, flags: Any) -> Any:
    """Write to bool[K] whether blocks hold a key, serving it or not."""
    bad = find_outside(tier, block_ids)
    if bad >= 0:
        return bad
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        flags[row] = (
            block > NULL_BLOCK
            and tier.has_key[block]
            and same_row(tier.directory.keys, block, keys, row)
        )
    return -1


@compiled
def next_free(tier: Any, num: int, block_ids: Any, has_key: Any, keys: Any) -> None:
    """Write the next `num` blocks that `allocate` would take, which are free.

    `block_ids` is i64[num]; `has_key`, bool[num], whether each has a key; `keys`,
    u32[num, 8], the keys of those that have.
    """
    block, row = tier.newer[NULL_BLOCK], 0
    while row < num:
        if tier.pins[block] == 0:
            _show(tier, block, row, block_ids, has_key, keys)
            row += 1
        block = tier.newer[block]


@compiled
def next_victims(
    tier: Any, num: int, block_ids: Any, copies: Any, rows: Any, keys: Any
) -> Any:
    """Write those of the next `num` free blocks that have a key.

    Written are the blocks and their `DeviceTier.copies` (i64[num] each), the rows
    without a copy (i64[num]) and the keys of these (u32[num, 8]). The answer is how
    many have a key, and how many of them have no copy.
    """
    block, num_seen, num_found, num_bare = tier.newer[NULL_BLOCK], 0, 0, 0
    while num_seen < num:
        if tier.pins[block] == 0:
            num_seen += 1
            if tier.has_key[block]:
                block_ids[num_found], copies[num_found] = block, tier.copies[block]
                if tier.copies[block] == NO_BLOCK:
                    rows[num_bare] = num_found
                    copy_row(keys, num_bare, tier.directory.keys, block)
                    num_bare += 1
                num_found += 1
        block = tier.newer[block]
    return num_found, num_bare


@compiled
def note_copies(tier: Any, block_ids: Any, copies: Any) -> Any:
    """Record copies (i64[K]) of blocks with a key."""
    bad = find_outside(tier, block_ids)
    if bad >= 0:
        return bad
    for row in range(block_ids.shape[0]):
        if block_ids[row] > NULL_BLOCK:
            tier.copies[block_ids[row]] = copies[row]
    return -1


@compiled
def forget_copies(tier: Any, keys: Any) -> Any:
    """Forget the copies of all blocks with some keys; count them."""
    num_forgotten = 0
    for row in range(keys.shape[0]):
        block = directory_lib.find_one(tier.directory, keys, row)
        while block >= 0:
            num_forgotten += tier.copies[block] != NO_BLOCK
            tier.copies[block] = NO_BLOCK
            block = tier.following[block]
    return num_forgotten


@compiled
def allocate(tier: Any, num: int, block_ids: Any, has_key: Any, keys: Any) -> None:
    """Take the blocks that `next_free` returns, and hold each once."""
    block, row = tier.newer[NULL_BLOCK], 0
    while row < num:
        after = tier.newer[block]
        if tier.pins[block] == 0:
            _show(tier, block, row, block_ids, has_key, keys)
            _unqueue(tier, block)
            _drop(tier, block)
            tier.ref_cnt[block] = 1
            row += 1
        block = after
    tier.num_free[()] -= num


@compiled
def touch(tier: Any, block_ids: Any) -> Any:
    """Hold blocks once more for each time they are given."""
    bad = find_outside(tier, block_ids)
    if bad >= 0:
        return bad
    for block in block_ids:
        if block > NULL_BLOCK:
            if tier.ref_cnt[block] == 0:
                _unqueue(tier, block)
                _tally(tier, block, -1)
            tier.ref_cnt[block] += 1
    return -1


@compiled
def free(tier: Any, block_ids: Any) -> Any:
    """Release blocks once for each time they are given.

    Those that are free now are queued in this order, a repeated one at its first place.
    A block that is not held as often is a bad row.
    """
    bad = find_outside(tier, block_ids)
    if bad < 0:
        bad = _lower(tier.ref_cnt, block_ids)
    if bad < 0:
        for block in block_ids:
            is_new = block > NULL_BLOCK and tier.newer[block] == NO_LINK
            if is_new and tier.ref_cnt[block] == 0:
                _queue(tier, block)
                _tally(tier, block, 1)
    return bad


@compiled
def pin(tier: Any, block_ids: Any, is_offer: bool) -> Any:
    """Keep blocks from being allocated, once more for each time they are given."""
    bad = find_outside(tier, block_ids)
    if bad >= 0:
        return bad
    for block in block_ids:
        if block > NULL_BLOCK:
            add_pins(tier, block, 1, is_offer)
    return -1


@compiled
def unpin(tier: Any, block_ids: Any, is_offer: bool) -> Any:
    """Remove a pin for each time that a block is given.

    A block that is not pinned as often is a bad row.
    """
    bad = find_outside(tier, block_ids)
    if bad >= 0:
        return bad
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        if block > NULL_BLOCK:
            num_offers = tier.offers[block]
            if (num_offers if is_offer else tier.pins[block] - num_offers) == 0:
                pin(tier, block_ids[:row], is_offer)
                return row
            add_pins(tier, block, -1, is_offer)
    return -1


@inlined
def add_pins(tier: Any, block: int, num: int, is_offer: bool) -> None:
    """Pin a block, which may be held, once more or less."""
    if tier.ref_cnt[block] == 0:
        _tally(tier, block, -1)
    tier.pins[block] += num
    if is_offer:
        tier.offers[block] += num
    if tier.ref_cnt[block] == 0:
        _tally(tier, block, 1)


@inlined
def _tally(tier: Any, block: int, num: int) -> None:
    """Count a block that is not held as free or pending, once more or less."""
    if tier.pins[block] == 0:
        tier.num_free[()] += num
    elif tier.offers[block] == 0:
        tier.num_pending_free[()] += num


@compiled
def cache(tier: Any, block_ids: Any, keys: Any, added: Any) -> Any:
    """Make blocks findable by their keys. A block that has its key is left alone.

    Written to `added` (bool[K]) is whether the block got the key; not if it had it, or
    in the unlikely case that the directory had no room. A block with another key is a
    bad row.
    """
    bad = find_outside(tier, block_ids)
    if bad < 0:
        bad = _find_contradiction(tier, block_ids, keys)
    if bad >= 0:
        return bad
    group = directory_lib.GROUP
    tags, buckets = empty(group, np.uint32), empty(2 * group, np.uint64)
    for start in range(0, block_ids.shape[0], group):
        stop = lesser(start + group, block_ids.shape[0])
        directory_lib.addresses(tier.directory, keys, start, stop, tags, buckets)
        for row in range(start, stop):
            block, at = block_ids[row], row - start
            added[row] = False
            if block > NULL_BLOCK and not tier.has_key[block]:
                where = tags[at], buckets[2 * at], buckets[2 * at + 1]
                added[row] = _add(tier, block, where, keys, row)
    return -1


@compiled
def evict(tier: Any, block_ids: Any, has_key: Any, keys: Any) -> None:
    """Forget the contents of blocks, each given once; they stay with their requests.

    Written are whether each had a key (bool[K]), and the keys of those that had.
    """
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        _show(tier, block, row, block_ids, has_key, keys)
        if block > NULL_BLOCK:
            _drop(tier, block)


@inlined
def _show(
    tier: Any, block: int, row: int, block_ids: Any, has_key: Any, keys: Any
) -> None:
    """Write a block and its key to a row of an answer."""
    block_ids[row] = block
    has_key[row] = tier.has_key[block]
    if tier.has_key[block]:
        copy_row(keys, row, tier.directory.keys, block)


@inlined
def _queue(tier: Any, block: int) -> None:
    last = tier.older[NULL_BLOCK]
    tier.newer[last], tier.newer[block] = block, NULL_BLOCK
    tier.older[NULL_BLOCK], tier.older[block] = block, last


@inlined
def _unqueue(tier: Any, block: int) -> None:
    newer, older = tier.newer[block], tier.older[block]
    tier.newer[older], tier.older[newer] = newer, older
    tier.newer[block] = tier.older[block] = NO_LINK


@compiled
def _lower(counts: Any, block_ids: Any) -> Any:
    """Subtract one for each row; return the first row without any left, or -1."""
    is_bad = False
    for block in block_ids:
        if block > NULL_BLOCK:
            counts[block] -= 1
            is_bad |= counts[block] < 0
    if not is_bad:
        return -1
    bad = -1
    for row in range(block_ids.shape[0] - 1, -1, -1):
        if block_ids[row] > NULL_BLOCK and counts[block_ids[row]] < 0:
            bad = row
    for block in block_ids:
        if block > NULL_BLOCK:
            counts[block] += 1
    return bad


@compiled
def _find_contradiction(tier: Any, block_ids: Any, keys: Any) -> Any:
    """Find the first row whose block has another key, or gets one from an earlier row.

    A block without a key has no links. During this call its `following` is the first
    row with it.
    """
    bad = -1
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        if block <= NULL_BLOCK:
            continue
        if tier.has_key[block]:
            is_same = same_row(tier.directory.keys, block, keys, row)
        elif tier.following[block] == NO_LINK:
            tier.following[block] = row
            is_same = True
        else:
            is_same = same_row(keys, tier.following[block], keys, row)
        if not is_same:
            bad = row
            break
    for block in block_ids:
        if block > NULL_BLOCK and not tier.has_key[block]:
            tier.following[block] = NO_LINK
    return bad


@inlined
def _add(tier: Any, block: int, where: Any, keys: Any, row: int) -> Any:
    """Give a block the key of a row; return whether there was room for it."""
    tag, first, second = where
    directory = tier.directory
    serving = directory_lib.find_at(directory, tag, first, second, keys, row)
    is_added = True
    if serving == directory_lib.NO_ENTRY:
        is_added = directory_lib.insert_at(
            directory, tag, first, second, keys, row, block
        )
        if is_added:
            tier.preceding[block] = ~block
    else:
        last = ~tier.preceding[serving]
        tier.following[last], tier.preceding[block] = block, last
        tier.preceding[serving] = ~block
        copy_row(directory.keys, block, keys, row)
    tier.has_key[block] |= is_added
    return is_added


@compiled
def _drop(tier: Any, block: int) -> None:
    """Take the key from a block that may have one."""
    if not tier.has_key[block]:
        return
    following, preceding = tier.following[block], tier.preceding[block]
    if preceding >= 0:
        tier.following[preceding] = following
        if following >= 0:
            tier.preceding[following] = preceding
        else:
            serving = directory_lib.find_one(tier.directory, tier.directory.keys, block)
            tier.preceding[serving] = ~preceding
    elif following >= 0:
        # The next one of the chain serves from now on.
        slot = tier.directory.slots[block]
        tier.directory.entries[slot] = following
        tier.directory.slots[following] = slot
        tier.preceding[following] = preceding
    else:
        directory_lib.native_remove(tier.directory, block)
    tier.has_key[block] = False
    tier.copies[block] = NO_BLOCK
    tier.following[block] = tier.preceding[block] = NO_LINK
