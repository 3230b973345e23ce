"""The key directory: which entry holds a key, for a whole batch in one pass.

A table of buckets with `SLOTS_PER_BUCKET` slots. Every key has two buckets and lives
in one of them, the emptier at the time (balanced allocations: Azar, Broder, Karlin
and Upfal, STOC 1994). A slot holds a 32-bit tag of the key and the number of an
entry; the entry holds the key itself, so that a hit is confirmed over all 256 bits.
Nothing grows: the sizes are fixed by `init`. A deletion empties its slot and leaves
no trace.

Where this module speaks of an *entry*, E (one past the last) stands for "none":
scatters with ``mode="drop"`` then ignore it, as they would not ignore -1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.native.directory import FACTORS, FREE, SLOTS_PER_BUCKET
from jaxkv.policies.xla import running_count
from jaxkv.types import KEY_WORDS

_MAX_LOAD = 0.25
_EMPTY_TAG = 0
# One bit for each slot of a key's two buckets, and the bits of the first.
_SLOT_BITS = np.uint32(1) << np.arange(2 * SLOTS_PER_BUCKET, dtype=np.uint32)
_ONE_BUCKET = np.uint32((1 << SLOTS_PER_BUCKET) - 1)
# Of a batch, how many rows may try again without the others: one in eight, or 256.
_LOSERS_SHARE = 8
_LEAST_LOSERS = 256
_FACTORS = FACTORS.reshape(2, 1, KEY_WORDS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Directory:
    """An index from keys to entries. N buckets, S = 8 N slots.

    Attributes:
        tags: u32[N, 8]. Tag of the key in each slot, 0 where the slot is empty.
        entries: i32[S]. Entry in each slot; larger than any entry where it is empty.
        keys: u32[E, 8]. Key of each entry; stale where the entry is not in use.
        slots: i32[E]. Slot of each entry; stale where the entry is not in use.
    """

    tags: Array
    entries: Array
    keys: Array
    slots: Array


def init(num_entries: int) -> Directory:
    """Make an empty directory with room for `num_entries` keys."""
    num_buckets = 1
    while num_buckets * SLOTS_PER_BUCKET * _MAX_LOAD < num_entries:
        num_buckets *= 2
    num_slots = num_buckets * SLOTS_PER_BUCKET
    return Directory(
        tags=jnp.zeros((num_buckets, SLOTS_PER_BUCKET), jnp.uint32),
        entries=jnp.full((num_slots,), FREE, jnp.int32),
        keys=jnp.zeros((num_entries, KEY_WORDS), jnp.uint32),
        slots=jnp.full((num_entries,), num_slots, jnp.int32),
    )


def find(directory: Directory, keys: Array, valid: Array) -> Array:
    """Find the entry of each key.

    Args:
        directory: Where to look.
        keys: u32[K, 8]. What to look for.
        valid: bool[K]. False for padding.

    Returns:
        i32[K]. The entry of each key, E where the key is absent or padding.
    """
    num_entries = directory.keys.shape[0]
    tag, buckets = _address(keys, directory.tags.shape[0])
    matches = _slot_bits(directory.tags, buckets, tag)
    # A key whose buckets are one and the same has every match twice.
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

    # One round, but for two equal tags in one key's buckets: one look-up in 10^8.
    _, found = lax.while_loop(
        lambda carry: jnp.any(carry[0] > 0),
        lambda carry: (
            carry[0] & (carry[0] - 1),
            jnp.minimum(carry[1], entry_at_first(carry[0])),
        ),
        (matches, jnp.full_like(buckets[:, 0], num_entries)),
    )
    return found


def find_first(directory: Directory, keys: Array, count: Array) -> Array:
    """Find the entry of each of the first `count` (i32[]) keys; E for the others."""
    valid = jnp.arange(keys.shape[0], dtype=jnp.int32) < count
    return find(directory, keys, valid)


def insert(
    directory: Directory, keys: Array, entries: Array
) -> tuple[Directory, Array]:
    """Add keys that are absent and distinct.

    Each key claims a free slot of its emptier bucket. The result depends on nothing
    but the arguments.

    Args:
        directory: Where to add them.
        keys: u32[K, 8]. The keys.
        entries: i32[K]. The unused entry that each key gets, E for padding.

    Returns:
        The new directory, and bool[K]: whether the key was added. A key is refused
        only if all slots of its two buckets are taken; at the load that `init`
        provides for, uniform keys do not get there.
    """
    num_entries = directory.keys.shape[0]
    num_slots = directory.entries.shape[0]
    tag, buckets = _address(keys, directory.tags.shape[0])
    # Start each key's search elsewhere, so that few rows propose the same slot.
    turn = tag % SLOTS_PER_BUCKET

    def propose(table: Array, rows: Array) -> tuple[Array, Array]:
        own, ahead = _read(buckets, rows), _read(turn, rows)
        free = _slot_bits(table.reshape(-1, SLOTS_PER_BUCKET), own, FREE)
        first, second = free & _ONE_BUCKET, free >> SLOTS_PER_BUCKET
        emptier = lax.population_count(second) > lax.population_count(first)
        free = jnp.where(emptier, second, first)
        turned = (free >> ahead) | (free << (SLOTS_PER_BUCKET - ahead))
        nearest = (_lowest(turned) + ahead.astype(jnp.int32)) % SLOTS_PER_BUCKET
        bucket = jnp.where(emptier, own[:, 1], own[:, 0])
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


def remove(directory: Directory, entries: Array) -> Directory:
    """Forget the keys of `entries` (i32[K], each in use and once; E for padding)."""
    num_slots = directory.entries.shape[0]
    slots = directory.slots.at[entries].get(mode="fill", fill_value=num_slots)
    return dataclasses.replace(
        directory,
        tags=_set_tags(directory.tags, slots, _EMPTY_TAG),
        entries=directory.entries.at[slots].set(FREE, mode="drop"),
    )


def tags_of(keys: Array) -> Array:
    """Compute the tag of each key: u32[K], never 0."""
    return _address(keys, 1)[0]


def first_occurrence(keys: Array, valid: Array) -> Array:
    """Tell which rows of a batch are the first with their key.

    Args:
        keys: u32[K, 8]. The batch.
        valid: bool[K]. False for padding.

    Returns:
        bool[K]. True for every distinct valid key's first row.
    """
    num_rows = keys.shape[0]
    num_places = 16 * num_rows
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    # A table of two rows of places. Every key has a place in each; who has it is the
    # lowest row of the batch.
    one, two = (hashes % num_places for hashes in _hash(keys))
    places = jnp.stack([one, two + num_places]).astype(jnp.int32)
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

    # Few rows find both their places with other keys: these are searched for in turn.
    def search_for_one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        is_first, doubtful = carry
        row = jnp.min(jnp.where(doubtful, rows, num_rows - 1))
        same = valid & (rows < row) & jnp.all(keys == keys[row][None], axis=1)
        here = rows == row
        return is_first | (here & ~jnp.any(same)), doubtful & ~here

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
    """Let the rows of a batch take places in a table, one row a place.

    A row takes a free place by writing its number there; where several want the same
    place at the same time the lowest row has it, and the others propose again.

    Args:
        table: i32[P]. Places that are taken hold a number, the others `FREE`.
        wanted: bool[K]. The rows that want a place.
        propose: ``(table, rows) -> (places, has_room)``, i32[R] and bool[R]: a free
            place that each row tries to get, and whether there is one.

    Returns:
        The table after, and i32[K]: the place of each row, P where it has none.
    """
    num_rows, num_places = wanted.shape[0], table.shape[0]
    all_rows = jnp.arange(num_rows, dtype=jnp.int32)
    # Few lose. Once there are no more than these they try again without the others.
    width = min(num_rows, max(_LEAST_LOSERS, num_rows // _LOSERS_SHARE))

    # Where a row still wants a place, `places` is `pending`.
    pending = -1

    def bid(table: Array, rows: Array, places: Array) -> tuple[Array, Array]:
        """Let `rows` (distinct) try once; return the table and their `places`."""
        wanted, has_room = propose(table, rows)
        bids = jnp.where((places == pending) & has_room, wanted, num_places)
        table = table.at[bids].min(rows, mode="drop")
        lost = _read(table, wanted) != rows
        taken = jnp.where(lost, pending, wanted)
        taken = jnp.where(has_room, taken, num_places)
        return table, jnp.where(places == pending, taken, places)

    def bid_of_losers(table: Array, places: Array) -> tuple[Array, Array]:
        rank = running_count(places == pending) - 1
        rows = jnp.full((width,), num_rows, jnp.int32)
        at = jnp.where(places == pending, rank, width)
        rows = rows.at[at].set(all_rows, mode="drop")
        in_bounds = jnp.minimum(rows, num_rows - 1)
        own = jnp.where(rows < num_rows, _read(places, in_bounds), num_places)
        table, own = bid(table, in_bounds, own)
        return table, places.at[rows].set(own, mode="drop")

    def is_any_left(carry: tuple[Array, Array]) -> Array:
        return jnp.any(carry[1] == pending)

    def are_many_left(carry: tuple[Array, Array]) -> Array:
        return jnp.sum(carry[1] == pending, dtype=jnp.int32) > width

    carry = table, jnp.where(wanted, pending, num_places)
    if width == num_rows:
        return lax.while_loop(
            is_any_left, lambda carry: bid(carry[0], all_rows, carry[1]), carry
        )
    # In a round every row that is left tries, whatever the width: so how a batch is
    # padded changes no result.
    carry = lax.while_loop(
        are_many_left, lambda carry: bid(carry[0], all_rows, carry[1]), carry
    )
    return lax.while_loop(is_any_left, lambda carry: bid_of_losers(*carry), carry)


def _address(keys: Array, num_buckets: int) -> tuple[Array, Array]:
    """Compute each key's tag, u32[K] and never empty, and buckets, i32[K, 2]."""
    one, two = _hash(keys)
    tag = jnp.maximum(one ^ (two >> 7) * jnp.uint32(0x2545F491), _EMPTY_TAG + 1)
    buckets = jnp.stack([one, two], axis=1) & jnp.uint32(num_buckets - 1)
    return tag, buckets.astype(jnp.int32)


def _hash(keys: Array) -> tuple[Array, Array]:
    """Compute two hashes of each key, u32[K]."""
    # Keys of jaxkv.keys.hashing are uniform already. Keys of others may differ in one
    # bit of one word, so every word counts: a multilinear hash, finished as
    # MurmurHash3 is.
    one, two = _finish(jnp.sum(keys[None] * _FACTORS, axis=2, dtype=jnp.uint32))
    return one, two


def _finish(hashes: Array) -> Array:
    """Let every bit count in every other: u32[...]."""
    hashes = (hashes ^ (hashes >> 16)) * jnp.uint32(0x85EBCA6B)
    hashes = (hashes ^ (hashes >> 13)) * jnp.uint32(0xC2B2AE35)
    return hashes ^ (hashes >> 16)


def _slot_bits(table: Array, buckets: Array, content: Array | int) -> Array:
    """Tell which slots of each key's buckets hold `content`, a bit each: u32[K].

    Args:
        table: u32[N, 8] or i32[N, 8]. What the slots hold.
        buckets: i32[K, 2].
        content: What to look for; of the same type, [K] or one for all.

    Returns:
        Bits 0 to 7 for the first bucket, bits 8 to 15 for the second.
    """
    slots = _read(table, buckets).reshape(-1, _SLOT_BITS.size)
    wanted = jnp.asarray(content, table.dtype).reshape(-1, 1)
    bits = jnp.where(slots == wanted, _SLOT_BITS[None], jnp.uint32(0))
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def _lowest(bits: Array) -> Array:
    """Number the lowest bit that is set, 32 if none is: i32[K]."""
    return lax.population_count((bits & -bits) - 1).astype(jnp.int32)


def _read(table: Array, indices: Array) -> Array:
    """Read rows whose indices are in bounds, so that none has to be checked."""
    return table.at[indices].get(mode="promise_in_bounds")


def _set_tags(tags: Array, slots: Array, tag: Array | int) -> Array:
    """Write the tags of some slots; a slot past the end is ignored."""
    return tags.reshape(-1).at[slots].set(tag, mode="drop").reshape(tags.shape)
