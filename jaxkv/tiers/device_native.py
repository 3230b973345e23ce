"""In-place updates of the device tier, for `jaxkv.tiers.device`.

Every function takes a `Bound` of a `DeviceTier`. Block ids are i64[K], keys u32[K, 8].
The null block among block ids is skipped. On bad input, such as an id out of range, a
function changes nothing and returns the first bad row; -1 means success.

The free queue is a doubly linked ring, by `newer` and `older`, closed by the null
block: `newer` of the null block is allocated first, `older` of it last. Blocks with the
same key form a chain in the order of `cache` calls. The first block of a chain serves
the key: `find` returns it. Its `preceding` is ~id of the chain's last block, below 0.
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
    """Return the first row with an id out of range, -1 for none."""
    num_blocks = tier.ref_cnt.shape[0]
    for row in range(block_ids.shape[0]):
        if not 0 <= block_ids[row] < num_blocks:
            return row
    return -1


@compiled
def find(tier: Any, keys: Any, block_ids: Any) -> None:
    """Write the block that serves each key, NO_BLOCK if none (i32[K])."""
    directory_lib.native_find(tier.directory, keys, block_ids)


@compiled
def find_prefix(tier: Any, keys: Any, block_ids: Any) -> Any:
    """Like `find`, up to the first miss; return the number of keys before the miss."""
    return directory_lib.find_prefix(tier.directory, keys, block_ids)


@compiled
def holds(tier: Any, block_ids: Any, keys: Any, flags: Any) -> Any:
    """Write whether each block has its row's key, served by it or not (bool[K])."""
    bad_row = find_outside(tier, block_ids)
    if bad_row >= 0:
        return bad_row
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
    """Write the next `num` blocks to be allocated; at least `num` must be free.

    `block_ids` is i64[num], `has_key` bool[num], and `keys` u32[num, 8], whose rows are
    valid where `has_key`.
    """
    block, row = tier.newer[NULL_BLOCK], 0
    while row < num:
        if tier.pins[block] == 0:
            _write_row(tier, block, row, block_ids, has_key, keys)
            row += 1
        block = tier.newer[block]


@compiled
def next_victims(
    tier: Any, num: int, block_ids: Any, copies: Any, rows: Any, keys: Any
) -> Any:
    """Write the victims: of the next `num` blocks to be allocated, those with a key.

    `block_ids` and `copies` (i64[num]) get the victims and their `DeviceTier.copies`,
    `rows` (i64[num]) the rows of victims without a copy, and `keys` (u32[num, 8]) the
    keys of these. Return the number of victims, and of victims without a copy.
    """
    block, num_seen, num_victims, num_uncopied = tier.newer[NULL_BLOCK], 0, 0, 0
    while num_seen < num:
        if tier.pins[block] == 0:
            num_seen += 1
            if tier.has_key[block]:
                block_ids[num_victims], copies[num_victims] = block, tier.copies[block]
                if tier.copies[block] == NO_BLOCK:
                    rows[num_uncopied] = num_victims
                    copy_row(keys, num_uncopied, tier.directory.keys, block)
                    num_uncopied += 1
                num_victims += 1
        block = tier.newer[block]
    return num_victims, num_uncopied


@compiled
def record_copies(tier: Any, block_ids: Any, copies: Any) -> Any:
    """Record the host block with the same contents (`copies`, i64[K]) of each block."""
    bad_row = find_outside(tier, block_ids)
    if bad_row >= 0:
        return bad_row
    for row in range(block_ids.shape[0]):
        if block_ids[row] > NULL_BLOCK:
            tier.copies[block_ids[row]] = copies[row]
    return -1


@compiled
def forget_copies(tier: Any, keys: Any) -> Any:
    """Forget the host copies of some keys; return how many blocks had one."""
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
    """Allocate the blocks that `next_free` would write; each gets one holder."""
    block, row = tier.newer[NULL_BLOCK], 0
    while row < num:
        next_block = tier.newer[block]
        if tier.pins[block] == 0:
            _write_row(tier, block, row, block_ids, has_key, keys)
            _dequeue(tier, block)
            _remove_key(tier, block)
            tier.ref_cnt[block] = 1
            row += 1
        block = next_block
    tier.num_free[()] -= num


@compiled
def touch(tier: Any, block_ids: Any) -> Any:
    """Add a holder for each time that a block is listed."""
    bad_row = find_outside(tier, block_ids)
    if bad_row >= 0:
        return bad_row
    for block in block_ids:
        if block > NULL_BLOCK:
            if tier.ref_cnt[block] == 0:
                _dequeue(tier, block)
                _count_free(tier, block, -1)
            tier.ref_cnt[block] += 1
    return -1


@compiled
def free(tier: Any, block_ids: Any) -> Any:
    """Remove a holder for each time that a block is listed.

    Blocks that lose their last holder are queued in this order, a repeated one at its
    first row. A row is bad if its block has too few holders.
    """
    bad_row = find_outside(tier, block_ids)
    if bad_row < 0:
        bad_row = _decrement(tier.ref_cnt, block_ids)
    if bad_row < 0:
        for block in block_ids:
            is_unqueued = block > NULL_BLOCK and tier.newer[block] == NO_LINK
            if is_unqueued and tier.ref_cnt[block] == 0:
                _enqueue(tier, block)
                _count_free(tier, block, 1)
    return bad_row


@compiled
def pin(tier: Any, block_ids: Any) -> Any:
    """Add a pin for each time that a block is listed."""
    bad_row = find_outside(tier, block_ids)
    if bad_row >= 0:
        return bad_row
    for block in block_ids:
        if block > NULL_BLOCK:
            add_pins(tier, block, 1)
    return -1


@compiled
def unpin(tier: Any, block_ids: Any) -> Any:
    """Remove a pin for each time that a block is listed.

    A row is bad if its block has too few pins.
    """
    bad_row = find_outside(tier, block_ids)
    if bad_row >= 0:
        return bad_row
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        if block > NULL_BLOCK:
            if tier.pins[block] == 0:
                pin(tier, block_ids[:row])
                return row
            add_pins(tier, block, -1)
    return -1


@inlined
def add_pins(tier: Any, block: int, num: int) -> None:
    """Change the pins of a block by `num`, 1 or -1."""
    if tier.ref_cnt[block] == 0:
        _count_free(tier, block, -1)
    tier.pins[block] += num
    if tier.ref_cnt[block] == 0:
        _count_free(tier, block, 1)


@inlined
def _count_free(tier: Any, block: int, num: int) -> None:
    """Add `num` to `num_free` or `num_pending_free`, for a block without holders."""
    if tier.pins[block] == 0:
        tier.num_free[()] += num
    else:
        tier.num_pending_free[()] += num


@compiled
def cache(tier: Any, block_ids: Any, keys: Any, added: Any) -> Any:
    """Make blocks findable by their keys.

    Write whether each block got its key (`added`, bool[K]): False if it had the key
    already or, which is unlikely, the directory is full. A row is bad if its block has
    another key.
    """
    bad_row = find_outside(tier, block_ids)
    if bad_row < 0:
        bad_row = _find_conflict(tier, block_ids, keys)
    if bad_row >= 0:
        return bad_row
    group = directory_lib.GROUP
    tags, buckets = empty(group, np.uint32), empty(2 * group, np.uint64)
    for start in range(0, block_ids.shape[0], group):
        stop = lesser(start + group, block_ids.shape[0])
        directory_lib.addresses(tier.directory, keys, start, stop, tags, buckets)
        for row in range(start, stop):
            block, at = block_ids[row], row - start
            added[row] = False
            if block > NULL_BLOCK and not tier.has_key[block]:
                address = tags[at], buckets[2 * at], buckets[2 * at + 1]
                added[row] = _set_key(tier, block, address, keys, row)
    return -1


@compiled
def evict(tier: Any, block_ids: Any, has_key: Any, keys: Any) -> None:
    """Remove the keys of unique blocks, which keep their holders.

    Writes whether each block had a key (bool[K]), and that key.
    """
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        _write_row(tier, block, row, block_ids, has_key, keys)
        if block > NULL_BLOCK:
            _remove_key(tier, block)


@inlined
def _write_row(
    tier: Any, block: int, row: int, block_ids: Any, has_key: Any, keys: Any
) -> None:
    """Write a block and its key to a row of the outputs."""
    block_ids[row] = block
    has_key[row] = tier.has_key[block]
    if tier.has_key[block]:
        copy_row(keys, row, tier.directory.keys, block)


@inlined
def _enqueue(tier: Any, block: int) -> None:
    last = tier.older[NULL_BLOCK]
    tier.newer[last], tier.newer[block] = block, NULL_BLOCK
    tier.older[NULL_BLOCK], tier.older[block] = block, last


@inlined
def _dequeue(tier: Any, block: int) -> None:
    newer, older = tier.newer[block], tier.older[block]
    tier.newer[older], tier.older[newer] = newer, older
    tier.newer[block] = tier.older[block] = NO_LINK


@compiled
def _decrement(counts: Any, block_ids: Any) -> Any:
    """Subtract 1 per row; undo it, and return the row, if a count falls below 0."""
    is_bad = False
    for block in block_ids:
        if block > NULL_BLOCK:
            counts[block] -= 1
            is_bad |= counts[block] < 0
    if not is_bad:
        return -1
    bad_row = -1
    for row in range(block_ids.shape[0] - 1, -1, -1):
        if block_ids[row] > NULL_BLOCK and counts[block_ids[row]] < 0:
            bad_row = row
    for block in block_ids:
        if block > NULL_BLOCK:
            counts[block] += 1
    return bad_row


@compiled
def _find_conflict(tier: Any, block_ids: Any, keys: Any) -> Any:
    """Return the first row whose block has another key, in `tier` or an earlier row.

    A block without a key does not use `following`: during this call it stores the first
    row that lists the block.
    """
    bad_row = -1
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
            bad_row = row
            break
    for block in block_ids:
        if block > NULL_BLOCK and not tier.has_key[block]:
            tier.following[block] = NO_LINK
    return bad_row


@inlined
def _set_key(tier: Any, block: int, address: Any, keys: Any, row: int) -> Any:
    """Set a block's key; return False if the directory is full."""
    tag, first, second = address
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
def _remove_key(tier: Any, block: int) -> None:
    """Remove a block's key, if any, and its recorded host copy."""
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
        # The next block of the chain serves the key from now on.
        slot = tier.directory.slots[block]
        tier.directory.entries[slot] = following
        tier.directory.slots[following] = slot
        tier.preceding[following] = preceding
    else:
        directory_lib.native_remove(tier.directory, block)
    tier.has_key[block] = False
    tier.copies[block] = NO_BLOCK
    tier.following[block] = tier.preceding[block] = NO_LINK
