"""The recency log: an order of use, with constant time per use and per eviction.

The log is an append-only array of records; a record is an entry. Each use appends the
entry again. Only the newest record of an entry is alive, and its position is the
entry's place: so the first alive record is the least recently used entry. Eviction
scans from the head in chunks. When the tail nears the end of the array, the log is
compacted: alive records move to the front, at nanoseconds per append on average.

One log can store several lists, numbered from 0. An entry is in at most one list, and a
use always moves it to the end of its list. So log order is the order of every list, and
a list needs no data except its head.

As in `directory`, the entry E (one past the last) stands for "none".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jaxkv.compiling import compiled, inlined, lesser
from jaxkv.policies.xla import full, running_count

POSITION_BITS = 29
"""A place is (list << 29) | position; with two bits for the list it is not negative."""

NO_PLACE = -1
_POSITION_MASK = (1 << POSITION_BITS) - 1

_CHUNK = 256
_MAX_LISTS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecencyLog:
    """Lists of entries in the order of last use. N lists."""

    entries: Array  # i32[L]. The entry recorded at each position; E where none was.
    places: Array  # i32[E]. The list and newest position of each entry; -1 for no list.
    heads: Array  # i32[N]. Before this position, all records of the list are dead.
    tail: Array  # i32[]. The position of the next record.


class Oldest(NamedTuple):
    """The oldest eligible entries of a list, before their removal."""

    entries: Array  # i32[K]. The oldest first, then E as padding.
    num: Array  # i32[]. The number of entries.
    head: Array  # i32[]. The head of the list after their removal.


def init(num_entries: int, max_batch: int, num_lists: int = 1) -> RecencyLog:
    """Make empty lists for `num_entries` in total and batches of up to `max_batch`.

    Raises a ValueError if the log has more positions than `POSITION_BITS` allow.
    """
    # With four times the entries, a compaction, whose time is linear in the log, occurs
    # at most once per three uses of every entry.
    length = max(4 * num_entries, num_entries + 2 * max_batch)
    if length >= 1 << POSITION_BITS or num_lists > _MAX_LISTS:
        raise ValueError(f"{num_entries=} or {num_lists=} is too large.")
    return RecencyLog(
        entries=full((length,), num_entries, jnp.int32),
        places=full((num_entries,), NO_PLACE, jnp.int32),
        heads=full((num_lists,), 0, jnp.int32),
        tail=full((), 0, jnp.int32),
    )


def make_room(log: RecencyLog, count: Array) -> RecencyLog:
    """Compact the log if `count` more records would not fit."""
    length = log.entries.shape[0]

    def compact(log: RecencyLog) -> RecencyLog:
        num_entries = log.places.shape[0]
        at = jnp.arange(length, dtype=jnp.int32)
        places = _places(log, log.entries)
        alive = _position(places) == at
        rank = running_count(alive) - 1
        moved = jnp.full_like(log.entries, num_entries)
        num_before = rank + 1 - alive.astype(jnp.int32)
        return RecencyLog(
            entries=moved.at[jnp.where(alive, rank, length)].set(
                log.entries, mode="drop"
            ),
            places=log.places.at[jnp.where(alive, log.entries, num_entries)].set(
                places - at + rank, mode="drop"
            ),
            # A head may be one past the end; clamp it to the last record.
            heads=num_before[jnp.minimum(log.heads, length - 1)],
            tail=rank[-1] + 1,
        )

    # A loop of at most one round: on the CPU backend, a `cond` would copy the whole log
    # even without a compaction.
    return lax.while_loop(lambda log: log.tail + count > length, compact, log)


@compiled
def native_make_room(log: Any, count: int) -> None:
    """In-place form of `make_room`."""
    length, num_entries = log.entries.shape[0], log.places.shape[0]
    if log.tail[()] + count <= length:
        return
    num_alive = 0
    for position in range(length):
        for list_id in range(log.heads.shape[0]):
            # Heads before this position have moved already. A head may be one past the
            # end; clamp it to the last record.
            head = log.heads[list_id]
            if head == position or (head > position and position == length - 1):
                log.heads[list_id] = num_alive
        entry = log.entries[position]
        if entry < num_entries and log.places[entry] & _POSITION_MASK == position:
            log.places[entry] += num_alive - position
            log.entries[num_alive] = entry
            num_alive += 1
    for position in range(num_alive, length):
        log.entries[position] = num_entries
    log.tail[()] = num_alive


def append(log: RecencyLog, entries: Array, ranks: Array, count: Array) -> RecencyLog:
    """Make entries the most recent of list 0: `make_room`, then `put`."""
    return put(make_room(log, count), entries, 0, ranks, count)


def put(
    log: RecencyLog, entries: Array, lists: Array | int, ranks: Array, count: Array
) -> RecencyLog:
    """Append `entries` (i32[K]; E is skipped) to lists; call `make_room` first.

    `ranks` (i32[K]) are unique positions after the tail, in [0, count); of an entry
    that occurs twice, only the record of the highest rank is alive. The tail advances
    by `count` (i32[]). `lists` (i32[K], or one number for all) may move an entry to a
    list of a higher number only: before a move to a lower one, `remove` the entry.
    """
    num_entries, length = log.places.shape[0], log.entries.shape[0]
    positions = log.tail + ranks
    is_entry = entries < num_entries
    places = positions + (jnp.asarray(lists, jnp.int32) << POSITION_BITS)
    return dataclasses.replace(
        log,
        entries=log.entries.at[jnp.where(is_entry, positions, length)].set(
            entries, mode="drop"
        ),
        places=log.places.at[entries].max(places, mode="drop"),
        tail=log.tail + count,
    )


@inlined
def native_put(log: Any, entry: int, list_id: int, rank: int) -> None:
    """Write an entry `rank` records after the tail; call `native_make_room` first.

    After the whole batch, `advance` moves the tail.
    """
    position = log.tail[()] + rank
    log.entries[position] = entry
    log.places[entry] = position + (list_id << POSITION_BITS)


@inlined
def advance(log: Any, count: int) -> None:
    """Move the tail past `count` new records."""
    log.tail[()] += count


def remove(log: RecencyLog, entries: Array) -> RecencyLog:
    """Remove `entries` (i32[K]; E is skipped) from their lists, whose heads stay."""
    return dataclasses.replace(
        log, places=log.places.at[entries].set(NO_PLACE, mode="drop")
    )


@inlined
def native_remove(log: Any, entry: int) -> None:
    """In-place form of `remove`, for one entry."""
    log.places[entry] = NO_PLACE


def list_of(log: RecencyLog, entries: Array) -> Array:
    """Return the list of each entry (i32[K]): i32[K], -1 for none."""
    return _places(log, entries) >> POSITION_BITS


@inlined
def native_list_of(log: Any, entry: int) -> Any:
    """In-place form of `list_of`, for one entry."""
    return log.places[entry] >> POSITION_BITS


@inlined
def is_at(log: Any, position: int, list_id: int) -> Any:
    """Return whether the record at a position is alive and belongs to a list."""
    entry = log.entries[position]
    place = position + (list_id << POSITION_BITS)
    return entry < log.places.shape[0] and log.places[entry] == place


def is_newest(log: RecencyLog, entries: Array, ranks: Array, count: Array) -> Array:
    """Mark the rows whose records are alive after `put`, one per entry: bool[K]."""
    positions = log.tail - count + ranks
    return _position(_places(log, entries)) == positions


def find_oldest(
    log: RecencyLog,
    num: Array,
    is_eligible: Callable[[Array], Array],
    width: int,
    list_id: int = 0,
) -> Oldest:
    """Find the `num` (i32[]) oldest eligible entries of a list, or all if fewer.

    `is_eligible`, ``i32[C] -> bool[C]``, may return anything for entries of other
    lists. `width`, at least `num`, is the length of the result.
    """
    num_entries, length = log.places.shape[0], log.entries.shape[0]
    chunk = min(max(_CHUNK, width), length)

    def scan(
        carry: tuple[Array, Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array, Array]:
        position, num_found, oldest, first_kept, end = carry
        # The last chunk starts earlier, to fit; mask the records scanned before.
        start = jnp.minimum(position, length - chunk)
        at = start + jnp.arange(chunk, dtype=jnp.int32)
        entries = lax.dynamic_slice(log.entries, (start,), (chunk,))
        place_here = at + (list_id << POSITION_BITS)
        alive = (at >= position) & (_places(log, entries) == place_here)
        eligible = alive & is_eligible(jnp.minimum(entries, num_entries - 1))
        rank = num_found + running_count(eligible) - 1
        take = eligible & (rank < num)
        oldest = oldest.at[jnp.where(take, rank, width)].set(entries, mode="drop")
        kept = jnp.where(alive & ~take, at, length)
        first_kept = jnp.minimum(first_kept, jnp.min(kept))
        end = jnp.maximum(end, jnp.max(jnp.where(take, at + 1, 0)))
        num_found = jnp.minimum(rank[-1] + 1, num)
        return start + chunk, num_found, oldest, first_kept, end

    head = log.heads[list_id]
    _, num_found, oldest, first_kept, end = lax.while_loop(
        lambda carry: (carry[1] < num) & (carry[0] < log.tail),
        scan,
        (
            head,
            jnp.int32(0),
            jnp.full((width,), num_entries, jnp.int32),
            jnp.int32(length),
            head,
        ),
    )
    # End after the last entry found, or at the tail if too few were found, so that the
    # result does not depend on where the last chunk ends.
    end = jnp.where(num_found < num, log.tail, end)
    return Oldest(oldest, num_found, jnp.minimum(first_kept, end))


@compiled
def native_find_oldest(
    log: Any, num: int, list_id: int, block_ids: Any, ref_cnt: Any, oldest: Any
) -> Any:
    """In-place form of `find_oldest`; the log is unchanged.

    An entry is eligible if the `ref_cnt` (i32[B]) of its block in `block_ids` (i32[E])
    is 0. If `block_ids` is empty, an entry is its block id; if `ref_cnt` is empty,
    every entry is eligible. Writes the entries to `oldest` (i32[K]), and returns their
    number and the head of the list after their removal.
    """
    num_found = 0
    head, tail = log.heads[list_id], log.tail[()]
    first_kept, end = log.entries.shape[0], head
    position = head
    while num_found < num and position < tail:
        if is_at(log, position, list_id):
            entry = log.entries[position]
            block = block_ids[entry] if block_ids.size else entry
            if ref_cnt.size == 0 or ref_cnt[block] == 0:
                oldest[num_found] = entry
                num_found += 1
                end = position + 1
            else:
                first_kept = lesser(first_kept, position)
        position += 1
    if num_found < num:
        end = tail
    return num_found, lesser(first_kept, end)


def pop_oldest(
    log: RecencyLog,
    num: Array,
    is_eligible: Callable[[Array], Array],
    width: int,
) -> tuple[RecencyLog, Array, Array]:
    """Remove the `num` oldest eligible entries from list 0, all or none.

    See `find_oldest` for the arguments. Returns the log, the entries (the oldest first,
    then E; i32[width]), and whether `num` were found (bool[]). If not, the log is
    unchanged.
    """
    oldest = find_oldest(log, num, is_eligible, width)
    ok = oldest.num >= num
    entries = jnp.where(ok, oldest.entries, log.places.shape[0])
    log = remove(log, entries)
    return set_heads(log, [oldest], ok), entries, ok


def set_heads(log: RecencyLog, oldest: Sequence[Oldest], ok: Array) -> RecencyLog:
    """If `ok` (bool[]), set the head of each list, after its `oldest` were removed."""
    heads = jnp.stack([entries.head for entries in oldest])
    return dataclasses.replace(log, heads=jnp.where(ok, heads, log.heads))


def in_order(log: RecencyLog, list_id: int = 0) -> NDArray[np.int32]:
    """Return the entries of a list, the oldest first. For the host, not for jit."""
    places = np.asarray(log.places)
    members = np.flatnonzero(places >> POSITION_BITS == list_id)
    return members[np.argsort(places[members])].astype(np.int32)


def _places(log: RecencyLog, entries: Array) -> Array:
    """Return the places of entries (i32[K]): i32[K], -1 for E."""
    return log.places.at[entries].get(mode="fill", fill_value=NO_PLACE)


def _position(places: Array) -> Array:
    """Return the positions of places; that of place -1 is past the end of any log."""
    return places & _POSITION_MASK
