"""The key directory in place; `jaxkv.policies.directory` says what it is.

A batch is inserted in rounds, as there: every row that has no slot yet proposes one,
and of those that want the same slot the first has it. So both give the same slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native.compiling import (
    compiled,
    count_bits,
    equal_words,
    inlined,
    lowest_bit,
    prefetch,
)
from jaxkv.types import KEY_WORDS

SLOTS_PER_BUCKET = 8
"""Eight slots at a quarter of the load: two choices keep the fullest bucket at six or
seven, and a look-up reads half of what it would with sixteen slots at half the load."""

FREE = 2**31 - 1
"""The entry of an empty slot."""

FACTORS = np.cumprod(np.full(2 * KEY_WORDS, 0x9E3779B1, np.uint32), dtype=np.uint32)
"""Odd numbers, one for each bucket and word: powers of the golden ratio times 2**32."""

NO_ENTRY = -1

GROUP = 32
"""How many keys are looked for at a time."""

_LOW = 0xFFFFFFFF
_FACTORS = FACTORS.astype(np.uint64).reshape(2, KEY_WORDS)


@inlined
def finish(number: Any) -> Any:
    """Let every bit of the low 32 count in every other, as MurmurHash3 does."""
    bits = np.uint64(number) & np.uint64(_LOW)
    bits = ((bits ^ (bits >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & np.uint64(_LOW)
    bits = ((bits ^ (bits >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & np.uint64(_LOW)
    return bits ^ (bits >> np.uint64(16))


@inlined
def address(directory: Any, keys: Any, row: int) -> Any:
    """Compute a key's tag, which is not 0, and its two buckets."""
    one, two = np.uint64(0), np.uint64(0)
    for word in range(KEY_WORDS):
        one += np.uint64(keys[row, word]) * _FACTORS[0, word]
        two += np.uint64(keys[row, word]) * _FACTORS[1, word]
    one, two = finish(one), finish(two)
    mixed = (two >> np.uint64(7)) * np.uint64(0x2545F491)
    tag = np.uint32((one ^ mixed) & np.uint64(_LOW))
    last_bucket = np.uint64(directory.tags.shape[0] - 1)
    return (
        max(tag, np.uint32(1)),
        one & last_bucket,
        two & last_bucket,
    )


@inlined
def tag_of(directory: Any, keys: Any, row: int) -> Any:
    """Compute the tag of the key in a row."""
    tag, _, _ = address(directory, keys, row)
    return tag


@inlined
def find_at(
    directory: Any, tag: Any, first: Any, second: Any, keys: Any, row: int
) -> Any:
    """Find the entry of the key in a row, whose address is known, NO_ENTRY if none."""
    found = np.int32(NO_ENTRY)
    # A bit for each slot of both buckets that holds the tag: one or none, but for two
    # equal tags, of which one look-up in 10^8 meets any.
    matches = equal_words(directory.tags, first, tag)
    matches |= equal_words(directory.tags, second, tag) << np.uint64(SLOTS_PER_BUCKET)
    while matches:
        slot = lowest_bit(matches)
        bucket = first if slot < np.uint64(SLOTS_PER_BUCKET) else second
        slot &= np.uint64(SLOTS_PER_BUCKET - 1)
        entry = directory.entries[bucket * np.uint64(SLOTS_PER_BUCKET) + slot]
        if same_key(directory.keys, entry, keys, row):
            found = entry
            break
        matches &= matches - np.uint64(1)
    return found


@inlined
def find_one(directory: Any, keys: Any, row: int) -> Any:
    """Find the entry of the key in a row, NO_ENTRY if there is none."""
    tag, first, second = address(directory, keys, row)
    return find_at(directory, tag, first, second, keys, row)


@inlined
def addresses(
    directory: Any, keys: Any, start: int, stop: int, tags: Any, buckets: Any
) -> None:
    """Compute the addresses of some rows, and have their buckets fetched.

    They are on their way from memory together, while the first is read.

    Args:
        directory: A `Directory`.
        keys: u32[K, 8].
        start: The first row.
        stop: The row after the last.
        tags: u32[GROUP]. Written, from 0 on.
        buckets: u64[GROUP, 2]. Likewise.
    """
    for row in range(start, stop):
        tag, first, second = address(directory, keys, row)
        at = row - start
        tags[at], buckets[at, 0], buckets[at, 1] = tag, first, second
        prefetch(directory.tags, first * np.uint64(SLOTS_PER_BUCKET))
        prefetch(directory.tags, second * np.uint64(SLOTS_PER_BUCKET))


@compiled
def find(directory: Any, keys: Any, entries: Any) -> None:
    """Write the entry of each key to `entries` (i32[K]), NO_ENTRY where it is absent.

    Args:
        directory: A `Directory`.
        keys: u32[K, 8].
        entries: i32[K]. Written.
    """
    tags = np.empty(GROUP, np.uint32)
    buckets = np.empty((GROUP, 2), np.uint64)
    num_keys = keys.shape[0]
    for start in range(0, num_keys, GROUP):
        stop = min(start + GROUP, num_keys)
        addresses(directory, keys, start, stop, tags, buckets)
        for row in range(start, stop):
            at = row - start
            entries[row] = find_at(
                directory, tags[at], buckets[at, 0], buckets[at, 1], keys, row
            )


@compiled
def find_prefix(directory: Any, keys: Any, entries: Any) -> Any:
    """As `find`, up to the first key that is absent; tell how many come before it."""
    num_keys = keys.shape[0]
    start, width = 0, 8
    # A part at a time, as nothing after the first miss is of interest.
    while start < num_keys:
        stop = min(start + width, num_keys)
        find(directory, keys[start:stop], entries[start:stop])
        for row in range(start, stop):
            if entries[row] == NO_ENTRY:
                return row
        start, width = stop, 4 * width
    return num_keys


@compiled
def insert(directory: Any, keys: Any, entries: Any) -> None:
    """Add keys that are absent and distinct.

    Args:
        directory: A `Directory`.
        keys: u32[K, 8].
        entries: i32[K]. The unused entry that each key gets, NO_ENTRY for none. Where
            the key finds no slot, NO_ENTRY is written.
    """
    num_rows = keys.shape[0]
    rows = np.empty(num_rows, np.int32)
    tags = np.empty(num_rows, np.uint32)
    buckets = np.empty((num_rows, 2), np.uint64)
    proposals = np.empty(num_rows, np.int64)
    num_left = 0
    for row in range(num_rows):
        if entries[row] >= 0:
            tag, first, second = address(directory, keys, row)
            tags[row], buckets[row, 0], buckets[row, 1] = tag, first, second
            prefetch(directory.entries, first * np.uint64(SLOTS_PER_BUCKET))
            prefetch(directory.entries, second * np.uint64(SLOTS_PER_BUCKET))
            rows[num_left] = row
            num_left += 1
    while num_left:
        for at in range(num_left):
            row = rows[at]
            proposals[at] = _propose(
                directory, tags[row], buckets[row, 0], buckets[row, 1]
            )
        num_losers = 0
        for at in range(num_left):
            row, slot = rows[at], proposals[at]
            if slot < 0:
                entries[row] = NO_ENTRY
            elif directory.entries[slot] == FREE:
                _take(directory, slot, tags[row], keys, row, entries[row])
            else:
                rows[num_losers] = row
                num_losers += 1
        num_left = num_losers


@inlined
def insert_at(
    directory: Any, tag: Any, first: Any, second: Any, keys: Any, row: int, entry: int
) -> Any:
    """Add the key in a row, which is absent and whose address is known.

    Returns:
        Whether there was a slot for it.
    """
    slot = _propose(directory, tag, first, second)
    if slot >= 0:
        _take(directory, slot, tag, keys, row, entry)
    return slot >= 0


@inlined
def remove(directory: Any, entry: int) -> None:
    """Forget the key of an entry that is in use."""
    slot = directory.slots[entry]
    directory.tags[slot // SLOTS_PER_BUCKET, slot % SLOTS_PER_BUCKET] = 0
    directory.entries[slot] = FREE


@inlined
def same_key(keys: Any, row: int, others: Any, other_row: int) -> Any:
    """Tell whether two rows of u32[..., 8] are equal."""
    difference = np.uint32(0)
    for word in range(KEY_WORDS):
        difference |= keys[row, word] ^ others[other_row, word]
    return difference == 0


@inlined
def copy_key(target: Any, target_row: int, source: Any, source_row: int) -> None:
    """Copy a row of u32[..., 8]."""
    for word in range(KEY_WORDS):
        target[target_row, word] = source[source_row, word]


@compiled
def mark_first(keys: Any, wanted: Any) -> Any:
    """Clear `wanted` (bool[K]) where an earlier row that is wanted has the same key.

    Returns:
        How many rows are wanted after.
    """
    num_rows = keys.shape[0]
    size = 16
    while size < 2 * num_rows:
        size *= 2
    table = np.full(size, -1, np.int32)
    num_wanted = 0
    for row in range(num_rows):
        if not wanted[row]:
            continue
        # All words count: keys of others may differ in one bit of one word.
        number = np.uint64(0)
        for word in range(KEY_WORDS):
            number += np.uint64(keys[row, word]) * _FACTORS[0, word]
        place = np.int64(finish(number)) & (size - 1)
        while table[place] >= 0 and not same_key(keys, table[place], keys, row):
            place = (place + 1) & (size - 1)
        if table[place] >= 0:
            wanted[row] = False
        else:
            table[place] = row
            num_wanted += 1
    return num_wanted


@inlined
def _propose(directory: Any, tag: Any, first: int, second: int) -> Any:
    """Choose a free slot of the emptier bucket, -1 if there is none.

    The search begins at a slot that depends on the tag, so that few rows of a batch
    propose the same.
    """
    free_first = equal_words(directory.tags, first, np.uint32(0))
    free_second = equal_words(directory.tags, second, np.uint32(0))
    is_second = count_bits(free_second) > count_bits(free_first)
    free = free_second if is_second else free_first
    proposal: Any = -1
    if free:
        turn = np.uint64(tag) % np.uint64(SLOTS_PER_BUCKET)
        turned = (free >> turn) | (free << (np.uint64(SLOTS_PER_BUCKET) - turn))
        slot = (lowest_bit(turned) + turn) % np.uint64(SLOTS_PER_BUCKET)
        bucket = second if is_second else first
        proposal = np.int64(bucket * np.uint64(SLOTS_PER_BUCKET) + slot)
    return proposal


@inlined
def _take(directory: Any, slot: int, tag: Any, keys: Any, row: int, entry: int) -> None:
    directory.tags[slot // SLOTS_PER_BUCKET, slot % SLOTS_PER_BUCKET] = tag
    directory.entries[slot] = entry
    directory.slots[entry] = slot
    copy_key(directory.keys, entry, keys, row)
