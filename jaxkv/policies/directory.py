"""The key directory: a hash table from keys to entries, for look-ups in batches.

The table consists of buckets with `SLOTS_PER_BUCKET` slots. Two hashes give every key
two buckets, and an insert takes the emptier one (balanced allocations: Azar, Broder,
Karlin and Upfal, STOC 1994). A slot holds a 32-bit tag of the key and the number of an
entry; the entry holds the key itself, so that all 256 bits confirm a hit. `init` fixes
all sizes. A deletion empties its slot and needs no tombstone.

In pure functions the *entry* E (one past the last) stands for "none": scatters with
``mode="drop"`` ignore it, but would not ignore -1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.compiling import (
    compiled,
    copy_row,
    count_bits,
    empty,
    equal_words,
    filled,
    greater,
    inlined,
    lesser,
    lowest_bit,
    prefetch,
    same_row,
)
from jaxkv.policies.xla import full, running_count
from jaxkv.types import KEY_WORDS

SLOTS_PER_BUCKET = 8
"""With eight slots at a load of 1/4, two choices fill the fullest bucket to six or
seven; a look-up reads half as much as with sixteen slots at a load of 1/2."""

FREE = 2**31 - 1
"""The entry of an empty slot."""

_FACTORS = np.cumprod(
    np.full(2 * KEY_WORDS, 0x9E3779B1, np.uint32), dtype=np.uint32
).reshape(2, KEY_WORDS)
"""u32[2, 8]. Odd factors per hash and key word: powers of golden ratio times 2**32."""

NO_ENTRY = -1

GROUP = 32
"""Keys whose buckets are prefetched together."""

_LOW = 0xFFFFFFFF

_MAX_LOAD = 0.25
_EMPTY_TAG = 0
# One bit for each slot of a key's two buckets, and the mask of the first bucket.
_SLOT_BITS = np.uint32(1) << np.arange(2 * SLOTS_PER_BUCKET, dtype=np.uint32)
_ONE_BUCKET = np.uint32((1 << SLOTS_PER_BUCKET) - 1)
# Rows bid again in a smaller batch once at most 1/8 of the batch, or 256, are left.
_LOSERS_SHARE = 8
_MIN_LOSERS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Directory:
    """A map from keys to E entries. N buckets, S = 8 N slots."""

    tags: Array  # u32[N, 8]. Tag of the key in each slot, 0 where the slot is empty.
    entries: Array
    """i32[S]. Entry in each slot; larger than any entry where it is empty."""
    keys: Array  # u32[E, 8]. Key of each entry; stale where the entry is not in use.
    slots: Array  # i32[E]. Slot of each entry; stale where the entry is not in use.


def init(num_entries: int) -> Directory:
    """Make an empty directory with room for `num_entries` keys."""
    num_buckets = 1
    while num_buckets * SLOTS_PER_BUCKET * _MAX_LOAD < num_entries:
        num_buckets *= 2
    num_slots = num_buckets * SLOTS_PER_BUCKET
    return Directory(
        tags=full((num_buckets, SLOTS_PER_BUCKET), 0, jnp.uint32),
        entries=full((num_slots,), FREE, jnp.int32),
        keys=full((num_entries, KEY_WORDS), 0, jnp.uint32),
        slots=full((num_entries,), num_slots, jnp.int32),
    )


@inlined
def finish(number: Any) -> Any:
    """Mix the low 32 bits with the finalizer of MurmurHash3."""
    bits = np.uint64(number) & np.uint64(_LOW)
    bits = ((bits ^ (bits >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & np.uint64(_LOW)
    bits = ((bits ^ (bits >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & np.uint64(_LOW)
    return bits ^ (bits >> np.uint64(16))


@inlined
def address(directory: Any, keys: Any, row: int) -> Any:
    """Return a key's tag, which is not 0, and its two buckets."""
    first, second = np.uint64(0), np.uint64(0)
    for word in range(KEY_WORDS):
        first += np.uint64(keys[row, word]) * _FACTORS[0, word]
        second += np.uint64(keys[row, word]) * _FACTORS[1, word]
    first, second = finish(first), finish(second)
    mixed = (second >> np.uint64(7)) * np.uint64(0x2545F491)
    tag = np.uint32((first ^ mixed) & np.uint64(_LOW))
    last_bucket = np.uint64(directory.tags.shape[0] - 1)
    return (
        greater(tag, np.uint32(1)),
        first & last_bucket,
        second & last_bucket,
    )


@inlined
def tag_of(directory: Any, keys: Any, row: int) -> Any:
    """Return the tag of the key in a row."""
    tag, _, _ = address(directory, keys, row)
    return tag


@inlined
def find_at(
    directory: Any, tag: Any, first: Any, second: Any, keys: Any, row: int
) -> Any:
    """Find the entry of the key with a known address, NO_ENTRY if there is none."""
    match = np.int32(NO_ENTRY)
    # One bit per slot of both buckets, set if it holds the tag. In one look-up of 10^8,
    # two bits are set, because two keys have the same tag.
    matches = equal_words(directory.tags, first, tag)
    matches |= equal_words(directory.tags, second, tag) << np.uint64(SLOTS_PER_BUCKET)
    while matches:
        slot = lowest_bit(matches)
        bucket = first if slot < np.uint64(SLOTS_PER_BUCKET) else second
        slot &= np.uint64(SLOTS_PER_BUCKET - 1)
        entry = directory.entries[bucket * np.uint64(SLOTS_PER_BUCKET) + slot]
        if same_row(directory.keys, entry, keys, row):
            match = entry
            break
        matches &= matches - np.uint64(1)
    return match


@inlined
def find_one(directory: Any, keys: Any, row: int) -> Any:
    """Find the entry of the key in a row, NO_ENTRY if there is none."""
    tag, first, second = address(directory, keys, row)
    return find_at(directory, tag, first, second, keys, row)


@inlined
def addresses(
    directory: Any, keys: Any, start: int, stop: int, tags: Any, buckets: Any
) -> None:
    """Compute the addresses of rows `start` to `stop`, and prefetch their buckets.

    The prefetches overlap. Writes the tags (u32[GROUP]) and two buckets per row
    (u64[2 * GROUP]), both from index 0 on.
    """
    for row in range(start, stop):
        tag, first, second = address(directory, keys, row)
        at = row - start
        tags[at], buckets[2 * at], buckets[2 * at + 1] = tag, first, second
        prefetch(directory.tags, first * np.uint64(SLOTS_PER_BUCKET))
        prefetch(directory.tags, second * np.uint64(SLOTS_PER_BUCKET))


def find(directory: Directory, keys: Array, valid: Array) -> Array:
    """Find the entry of each key that is `valid` (bool[K]): i32[K], E for no entry."""
    num_entries = directory.keys.shape[0]
    tag, buckets = _address(keys, directory.tags.shape[0])
    matches = _slot_bits(directory.tags, buckets, tag)
    # If a key's two buckets are equal, every match occurs twice.
    is_one_bucket = buckets[:, 0] == buckets[:, 1]
    matches = jnp.where(is_one_bucket, matches & _ONE_BUCKET, matches)
    matches = jnp.where(valid, matches, 0)

    def entry_at_first(matches: Array) -> Array:
        bit = _lowest(matches)
        bucket = jnp.where(bit < SLOTS_PER_BUCKET, buckets[:, 0], buckets[:, 1])
        slots = bucket * SLOTS_PER_BUCKET + bit % SLOTS_PER_BUCKET
        entries = _read(directory.entries, jnp.where(matches > 0, slots, 0))
        entries = jnp.where(matches > 0, entries, 0)
        same = jnp.all(_read(directory.keys, entries) == keys, axis=1)
        return jnp.where((matches > 0) & same, entries, num_entries)

    # One round, except in one look-up of 10^8, where two keys have the same tag.
    _, matched = lax.while_loop(
        lambda carry: jnp.any(carry[0] > 0),
        lambda carry: (
            carry[0] & (carry[0] - 1),
            jnp.minimum(carry[1], entry_at_first(carry[0])),
        ),
        (matches, jnp.full_like(buckets[:, 0], num_entries)),
    )
    return matched


@compiled
def native_find(directory: Any, keys: Any, entries: Any) -> None:
    """In-place form of `find`: write i32[K], NO_ENTRY for absent keys."""
    tags = empty(GROUP, np.uint32)
    buckets = empty(2 * GROUP, np.uint64)
    num_keys = keys.shape[0]
    for start in range(0, num_keys, GROUP):
        stop = lesser(start + GROUP, num_keys)
        addresses(directory, keys, start, stop, tags, buckets)
        for row in range(start, stop):
            at = row - start
            entries[row] = find_at(
                directory, tags[at], buckets[2 * at], buckets[2 * at + 1], keys, row
            )


@compiled
def find_prefix(directory: Any, keys: Any, entries: Any) -> Any:
    """Find leading keys up to the first miss; return their number."""
    num_keys = keys.shape[0]
    start, width = 0, 8
    # Look up growing chunks, as entries after the first miss are not needed.
    while start < num_keys:
        stop = lesser(start + width, num_keys)
        native_find(directory, keys[start:stop], entries[start:stop])
        for row in range(start, stop):
            if entries[row] == NO_ENTRY:
                return row
        start, width = stop, 4 * width
    return num_keys


def find_first(directory: Directory, keys: Array, count: Array) -> Array:
    """Find the entry of each of the first `count` (i32[]) keys; E for the others."""
    valid = jnp.arange(keys.shape[0], dtype=jnp.int32) < count
    return find(directory, keys, valid)


def insert(
    directory: Directory, keys: Array, entries: Array
) -> tuple[Directory, Array]:
    """Add absent, unique keys; return whether each was added (bool[K]).

    Each key gets the unused entry in `entries` (i32[K], E for padding) and a free slot
    of its emptier bucket. The result depends only on the arguments. A key is refused
    only if its two buckets are full, which uniform keys do not reach at the load that
    `init` sets.
    """
    num_entries = directory.keys.shape[0]
    num_slots = directory.entries.shape[0]
    tag, buckets = _address(keys, directory.tags.shape[0])
    # Each key's search starts at another slot, so that few rows propose the same one.
    rotation = tag % SLOTS_PER_BUCKET

    def propose(table: Array, rows: Array) -> tuple[Array, Array]:
        pair, shift = _read(buckets, rows), _read(rotation, rows)
        free = _slot_bits(table.reshape(-1, SLOTS_PER_BUCKET), pair, FREE)
        first, second = free & _ONE_BUCKET, free >> SLOTS_PER_BUCKET
        emptier = lax.population_count(second) > lax.population_count(first)
        free = jnp.where(emptier, second, first)
        rotated = (free >> shift) | (free << (SLOTS_PER_BUCKET - shift))
        nearest = (_lowest(rotated) + shift.astype(jnp.int32)) % SLOTS_PER_BUCKET
        bucket = jnp.where(emptier, pair[:, 1], pair[:, 0])
        return bucket * SLOTS_PER_BUCKET + nearest, free > 0

    table, slots = _claim(directory.entries, entries < num_entries, propose)
    added = slots < num_slots
    entries = jnp.where(added, entries, num_entries)
    return (
        Directory(
            tags=_set_tags(directory.tags, slots, tag),
            entries=table.at[slots].set(entries, mode="drop"),
            keys=directory.keys.at[entries].set(keys, mode="drop"),
            slots=directory.slots.at[entries].set(slots, mode="drop"),
        ),
        added,
    )


@compiled
def native_insert(directory: Any, keys: Any, entries: Any) -> None:
    """In-place form of `insert`: NO_ENTRY is written to `entries` of refused keys."""
    num_rows = keys.shape[0]
    rows = empty(num_rows, np.int32)
    tags = empty(num_rows, np.uint32)
    buckets = empty(2 * num_rows, np.uint64)
    proposals = empty(num_rows, np.int64)
    num_left = 0
    for row in range(num_rows):
        if entries[row] >= 0:
            tag, first, second = address(directory, keys, row)
            tags[row], buckets[2 * row], buckets[2 * row + 1] = tag, first, second
            prefetch(directory.entries, first * np.uint64(SLOTS_PER_BUCKET))
            prefetch(directory.entries, second * np.uint64(SLOTS_PER_BUCKET))
            rows[num_left] = row
            num_left += 1
    while num_left:
        for at in range(num_left):
            row = rows[at]
            proposals[at] = _propose(
                directory, tags[row], buckets[2 * row], buckets[2 * row + 1]
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
    """Add the absent key in a row; return whether it was added."""
    slot = _propose(directory, tag, first, second)
    if slot >= 0:
        _take(directory, slot, tag, keys, row, entry)
    return slot >= 0


def remove(directory: Directory, entries: Array) -> Directory:
    """Forget the keys of `entries` (i32[K], unique and in use; E is skipped)."""
    num_slots = directory.entries.shape[0]
    slots = directory.slots.at[entries].get(mode="fill", fill_value=num_slots)
    return dataclasses.replace(
        directory,
        tags=_set_tags(directory.tags, slots, _EMPTY_TAG),
        entries=directory.entries.at[slots].set(FREE, mode="drop"),
    )


@inlined
def native_remove(directory: Any, entry: int) -> None:
    """Forget the key of an entry that is in use."""
    slot = directory.slots[entry]
    directory.tags[slot // SLOTS_PER_BUCKET, slot % SLOTS_PER_BUCKET] = 0
    directory.entries[slot] = FREE


@compiled
def mark_first(keys: Any, wanted: Any) -> Any:
    """Clear rows of `wanted` (bool[K]) that repeat a key; return how many stay set."""
    num_rows = keys.shape[0]
    size = 16
    while size < 2 * num_rows:
        size *= 2
    table = filled(size, -1, np.int32)
    num_wanted = 0
    for row in range(num_rows):
        if not wanted[row]:
            continue
        # Hash all words, as keys of other libraries may differ in one bit only.
        number = np.uint64(0)
        for word in range(KEY_WORDS):
            number += np.uint64(keys[row, word]) * _FACTORS[0, word]
        place = np.int64(finish(number)) & (size - 1)
        while table[place] >= 0 and not same_row(keys, table[place], keys, row):
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

    The search starts at a slot that depends on the tag, so that few rows of a batch
    propose the same one.
    """
    free_first = equal_words(directory.tags, first, np.uint32(0))
    free_second = equal_words(directory.tags, second, np.uint32(0))
    is_second = count_bits(free_second) > count_bits(free_first)
    free = free_second if is_second else free_first
    proposal: Any = -1
    if free:
        shift = np.uint64(tag) % np.uint64(SLOTS_PER_BUCKET)
        rotated = (free >> shift) | (free << (np.uint64(SLOTS_PER_BUCKET) - shift))
        slot = (lowest_bit(rotated) + shift) % np.uint64(SLOTS_PER_BUCKET)
        bucket = second if is_second else first
        proposal = np.int64(bucket * np.uint64(SLOTS_PER_BUCKET) + slot)
    return proposal


@inlined
def _take(directory: Any, slot: int, tag: Any, keys: Any, row: int, entry: int) -> None:
    directory.tags[slot // SLOTS_PER_BUCKET, slot % SLOTS_PER_BUCKET] = tag
    directory.entries[slot] = entry
    directory.slots[entry] = slot
    copy_row(directory.keys, entry, keys, row)


def first_occurrence(keys: Array, valid: Array) -> Array:
    """Mark the first row of each key among `valid` rows (bool[K]): bool[K]."""
    num_rows = keys.shape[0]
    num_places = 16 * num_rows
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    # Two hash tables in one array. A key has a place in each; the place's owner is the
    # lowest row of the batch that has it.
    first, second = (hashes % num_places for hashes in _hash(keys))
    places = jnp.stack([first, second + num_places]).astype(jnp.int32)
    table = jnp.full((2 * num_places,), FREE, jnp.int32)
    owners = _read(
        table.at[jnp.where(valid[None], places, 2 * num_places)].min(
            jnp.broadcast_to(rows, places.shape), mode="drop"
        ),
        places,
    )
    is_first = valid & ((owners[0] == rows) | (owners[1] == rows))
    owner = jnp.minimum(owners[0], num_rows - 1)
    repeats = jnp.all(_read(keys, owner) == keys, axis=1)

    # In a few rows, other keys own both places: search the batch for each such row.
    def search_for_one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        is_first, unresolved = carry
        row = jnp.min(jnp.where(unresolved, rows, num_rows - 1))
        same = valid & (rows < row) & jnp.all(keys == keys[row][None], axis=1)
        is_row = rows == row
        return is_first | (is_row & ~jnp.any(same)), unresolved & ~is_row

    return lax.while_loop(
        lambda carry: jnp.any(carry[1]),
        search_for_one,
        (is_first, valid & ~is_first & ~repeats),
    )[0]


def _claim(
    table: Array,
    wanted: Array,
    propose: Callable[[Array, Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """Assign a place in `table` to each `wanted` row (bool[K]) of a batch.

    A row claims a place by writing its number there. If several rows bid for a place in
    one round, the lowest row wins, and the others propose again. Free places of `table`
    (i32[P]) hold `FREE`. ``propose(table, rows) -> (places, has_room)`` returns a free
    place for each row to bid for (i32[R]), and whether there is one (bool[R]). Returns
    the table and the place of each row: i32[K], P for none.
    """
    num_rows, num_places = wanted.shape[0], table.shape[0]
    all_rows = jnp.arange(num_rows, dtype=jnp.int32)
    # Few rows lose. Once at most `width` are left, bid with a batch of these only.
    width = min(num_rows, max(_MIN_LOSERS, num_rows // _LOSERS_SHARE))

    pending = -1  # The place of a row that has none yet.

    def bid(table: Array, rows: Array, places: Array) -> tuple[Array, Array]:
        """Bid once for unique `rows` (i32[R]); return the table and their `places`."""
        proposed, has_room = propose(table, rows)
        bids = jnp.where((places == pending) & has_room, proposed, num_places)
        table = table.at[bids].min(rows, mode="drop")
        has_lost = _read(table, proposed) != rows
        won = jnp.where(has_lost, pending, proposed)
        won = jnp.where(has_room, won, num_places)
        return table, jnp.where(places == pending, won, places)

    def bid_of_losers(table: Array, places: Array) -> tuple[Array, Array]:
        rank = running_count(places == pending) - 1
        rows = jnp.full((width,), num_rows, jnp.int32)
        at = jnp.where(places == pending, rank, width)
        rows = rows.at[at].set(all_rows, mode="drop")
        in_bounds = jnp.minimum(rows, num_rows - 1)
        won = jnp.where(rows < num_rows, _read(places, in_bounds), num_places)
        table, won = bid(table, in_bounds, won)
        return table, places.at[rows].set(won, mode="drop")

    def is_any_left(carry: tuple[Array, Array]) -> Array:
        return jnp.any(carry[1] == pending)

    def are_many_left(carry: tuple[Array, Array]) -> Array:
        return jnp.sum(carry[1] == pending, dtype=jnp.int32) > width

    carry = table, jnp.where(wanted, pending, num_places)
    if width == num_rows:
        return lax.while_loop(
            is_any_left, lambda carry: bid(carry[0], all_rows, carry[1]), carry
        )
    # Each round has the bids of all rows that are left, whatever the width, so that
    # padding does not change the result.
    carry = lax.while_loop(
        are_many_left, lambda carry: bid(carry[0], all_rows, carry[1]), carry
    )
    return lax.while_loop(is_any_left, lambda carry: bid_of_losers(*carry), carry)


def _address(keys: Array, num_buckets: int) -> tuple[Array, Array]:
    """Return each key's tag, u32[K] and not `_EMPTY_TAG`, and buckets, i32[K, 2]."""
    first, second = _hash(keys)
    tag = jnp.maximum(first ^ (second >> 7) * jnp.uint32(0x2545F491), _EMPTY_TAG + 1)
    buckets = jnp.stack([first, second], axis=1) & jnp.uint32(num_buckets - 1)
    return tag, buckets.astype(jnp.int32)


def _hash(keys: Array) -> tuple[Array, Array]:
    """Return two hashes of each key, u32[K]."""
    # A multilinear hash of all words, because keys of other libraries, unlike those of
    # jaxkv.keys.hashing, may differ in one bit only; then MurmurHash3's finalizer.
    sums = jnp.sum(keys[None] * _FACTORS[:, None], axis=2, dtype=jnp.uint32)
    first, second = _finish(sums)
    return first, second


def _finish(hashes: Array) -> Array:
    """Mix the bits with the finalizer of MurmurHash3: u32[...]."""
    hashes = (hashes ^ (hashes >> 16)) * jnp.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> 13)) * jnp.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> 16)


def _slot_bits(table: Array, buckets: Array, content: Array | int) -> Array:
    """Mark the slots of each key's buckets (i32[K, 2]) that hold `content`: u32[K].

    Bits 0 to 7 are of the first bucket, bits 8 to 15 of the second. `content` ([K], or
    one for all) has the dtype of the table.
    """
    slots = _read(table, buckets).reshape(-1, _SLOT_BITS.size)
    wanted = jnp.asarray(content, table.dtype).reshape(-1, 1)
    bits = jnp.where(slots == wanted, _SLOT_BITS[None], jnp.uint32(0))
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def _lowest(bits: Array) -> Array:
    """Return the index of the lowest set bit, 32 if there is none: i32[K]."""
    return lax.population_count((bits & -bits) - 1).astype(jnp.int32)


def _read(table: Array, indices: Array) -> Array:
    """Read rows without bounds checks; the indices must be in bounds."""
    return table.at[indices].get(mode="promise_in_bounds")


def _set_tags(tags: Array, slots: Array, tag: Array | int) -> Array:
    """Write the tags of slots; a slot past the end is skipped."""
    return tags.reshape(-1).at[slots].set(tag, mode="drop").reshape(tags.shape)
