"""The recency log in place; `jaxkv.policies.recency` says what it is."""

from __future__ import annotations

from typing import Any

from jaxkv.native.compiling import compiled, inlined

POSITION_BITS = 29
"""A place is (list << 29) | position. Two bits for the list keep it above -1."""

NO_PLACE = -1
_POSITION_MASK = (1 << POSITION_BITS) - 1


@compiled
def make_room(log: Any, count: int) -> None:
    """Move the alive records to the front if `count` more would not fit."""
    length, num_entries = log.entries.shape[0], log.places.shape[0]
    if log.tail[()] + count <= length:
        return
    num_alive = 0
    heads = log.heads.copy()
    for position in range(length):
        for of_list in range(heads.shape[0]):
            # A head past the end may as well be at the last record.
            if min(heads[of_list], length - 1) == position:
                log.heads[of_list] = num_alive
        entry = log.entries[position]
        if entry < num_entries and log.places[entry] & _POSITION_MASK == position:
            log.places[entry] += num_alive - position
            log.entries[num_alive] = entry
            num_alive += 1
    for position in range(num_alive, length):
        log.entries[position] = num_entries
    log.tail[()] = num_alive


@inlined
def put(log: Any, entry: int, of_list: int, rank: int) -> None:
    """Put an entry `rank` records after the tail, for which there must be room.

    The tail stays; `advance` moves it once all of a batch have been put.
    """
    position = log.tail[()] + rank
    log.entries[position] = entry
    log.places[entry] = position + (of_list << POSITION_BITS)


@inlined
def advance(log: Any, count: int) -> None:
    """Count `count` records as written."""
    log.tail[()] += count


@inlined
def remove(log: Any, entry: int) -> None:
    """Take an entry out of its list."""
    log.places[entry] = NO_PLACE


@inlined
def list_of(log: Any, entry: int) -> Any:
    """Tell the list that an entry is in, -1 for none."""
    return log.places[entry] >> POSITION_BITS


@inlined
def is_at(log: Any, position: int, of_list: int) -> Any:
    """Tell whether the record at a position is alive and of a list."""
    entry = log.entries[position]
    here = position + (of_list << POSITION_BITS)
    return entry < log.places.shape[0] and log.places[entry] == here


@compiled
def find_oldest(
    log: Any, num: int, of_list: int, block_ids: Any, ref_cnt: Any, found: Any
) -> Any:
    """Find the `num` oldest entries of a list that may be taken, or as many as it has.

    Args:
        log: A `RecencyLog`, which stays as it is.
        num: How many.
        of_list: The list.
        block_ids: i32[E]. The block of each entry; of no length if an entry is its
            block id.
        ref_cnt: i32[B]. An entry may be taken if that of its block is 0; of no length
            if every entry may be.
        found: i32[K]. The entries are written to it, from the oldest on.

    Returns:
        How many were found, and the head of the list once they are gone.
    """
    num_found = 0
    head, tail = log.heads[of_list], log.tail[()]
    left, end = log.entries.shape[0], head
    position = head
    while num_found < num and position < tail:
        if is_at(log, position, of_list):
            entry = log.entries[position]
            block = block_ids[entry] if block_ids.size else entry
            if ref_cnt.size == 0 or ref_cnt[block] == 0:
                found[num_found] = entry
                num_found += 1
                end = position + 1
            else:
                left = min(left, position)
        position += 1
    if num_found < num:
        end = tail
    return num_found, min(left, end)
