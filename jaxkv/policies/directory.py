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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxkv.policies.ordering import after
from jaxkv.types import KEY_LANES

# Eight slots at a quarter of the load: two choices keep the fullest bucket at six or
# seven, and a look-up reads half of what it would with sixteen slots at half the load.
SLOTS_PER_BUCKET = 8
_MAX_LOAD = 0.25
_WITHIN = np.arange(SLOTS_PER_BUCKET, dtype=np.int32)[None, :]
_FREE = 2**31 - 1
_EMPTY_TAG = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Directory:
    """An index from keys to entries. N buckets, S = 8 N slots.

    Attributes:
        tags: u32[N, 8]. Tag of the key in each slot, 0 where the slot is empty.
        entries: i32[S]. Entry in each slot; larger than any entry where it is empty.
        keys: u32[E, 8]. Key of each entry; stale where the entry is not in use.
        slots: i32[E]. Slot of each entry, S where the entry is not in use.
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
        entries=jnp.full((num_slots,), _FREE, jnp.int32),
        keys=jnp.zeros((num_entries, KEY_LANES), jnp.uint32),
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
    num_slots = directory.entries.shape[0]
    tag, buckets = _address(keys, directory.tags.shape[0])

    def matching_slots(otherwise: int) -> Array:
        matches = _read(directory.tags, buckets) == tag[:, None, None]
        return jnp.where(matches, _slots(buckets), otherwise)  # [K, 2, 8]

    def entry_at(slots: Array, keys: Array) -> Array:
        is_slot = slots < num_slots
        entries = _read(directory.entries, jnp.where(is_slot, slots, 0))
        entries = jnp.where(is_slot, entries, 0)
        same = jnp.all(_read(directory.keys, entries) == keys, axis=-1)
        return jnp.where(is_slot & same, entries, num_entries)

    def by_every_match(_: Array) -> Array:
        # Matches once more: handing them in would have every call write them down.
        entries = entry_at(matching_slots(num_slots), keys[:, None, None, :])
        return jnp.min(entries, axis=(1, 2))

    first = jnp.min(matching_slots(num_slots), axis=(1, 2))
    last = jnp.max(matching_slots(-1), axis=(1, 2))
    # Two equal tags in one key's buckets: one look-up in 10^8, but it must be right.
    ambiguous = jnp.any(valid & (first < last))
    found = lax.cond(
        ambiguous, by_every_match, lambda found: found, entry_at(first, keys)
    )
    return jnp.where(valid, found, num_entries)


def insert(
    directory: Directory, keys: Array, entries: Array
) -> tuple[Directory, Array]:
    """Add keys that are absent and distinct.

    Each key claims a free slot with the number of its row in the batch; where several
    want the same slot the lowest row has it and the others propose again. The result
    depends on nothing but the arguments.

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
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)
    tag, buckets = _address(keys, directory.tags.shape[0])
    # Start each key's search elsewhere, so that few rows propose the same slot.
    turn = (tag % SLOTS_PER_BUCKET).astype(jnp.int32)
    steps = (_WITHIN - turn[:, None]) % SLOTS_PER_BUCKET  # [K, 8]

    def propose(table: Array) -> tuple[Array, Array]:
        free = _read(table.reshape(-1, SLOTS_PER_BUCKET), buckets) == _FREE  # [K, 2, 8]
        num_free = jnp.sum(free, axis=2, dtype=jnp.int32)
        nearest = jnp.min(jnp.where(free, steps[:, None, :], SLOTS_PER_BUCKET), axis=2)
        emptier = num_free[:, 1] > num_free[:, 0]
        bucket, step = (
            jnp.where(emptier, pair[:, 1], pair[:, 0]) for pair in (buckets, nearest)
        )
        slot = bucket * SLOTS_PER_BUCKET + (turn + step) % SLOTS_PER_BUCKET
        return slot, step < SLOTS_PER_BUCKET

    def claim(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        table, claimed, pending = carry
        slot, has_room = propose(table)
        pending &= has_room
        table = table.at[jnp.where(pending, slot, num_slots)].min(rows, mode="drop")
        won = pending & (_read(table, slot) == rows)
        return table, jnp.where(won, slot, claimed), pending & ~won

    table, slots, _ = lax.while_loop(
        lambda carry: jnp.any(carry[2]),
        claim,
        (
            directory.entries,
            jnp.full_like(rows, num_slots),
            entries < num_entries,
        ),
    )
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
        entries=directory.entries.at[slots].set(_FREE, mode="drop"),
        slots=directory.slots.at[after(entries, slots)].set(num_slots, mode="drop"),
    )


def first_occurrence(keys: Array, valid: Array) -> Array:
    """Tell which rows of a batch are the first with their key.

    Args:
        keys: u32[K, 8]. The batch.
        valid: bool[K]. False for padding.

    Returns:
        bool[K]. True for every distinct valid key's first row.
    """
    num_rows = keys.shape[0]
    num_slots = 16 * num_rows
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    tag, _ = _address(keys, 1)

    # As in `insert`, rows claim places in a table and the lowest has it; a loser with
    # the winner's key is a repetition, any other loser tries the next place. Rows with
    # equal keys walk in step, so they always meet.
    def claim(
        carry: tuple[Array, Array, Array, Array],
    ) -> tuple[Array, Array, Array, Array]:
        table, first, pending, place = carry
        table = table.at[jnp.where(pending, place, num_slots)].min(rows, mode="drop")
        winner = _read(table, place)
        won = pending & (winner == rows)
        others = _read(keys, jnp.minimum(winner, num_rows - 1))
        repeats = jnp.all(others == keys, axis=1)
        return table, first | won, pending & ~won & ~repeats, (place + 1) % num_slots

    _, first, _, _ = lax.while_loop(
        lambda carry: jnp.any(carry[2]),
        claim,
        (
            jnp.full((num_slots,), _FREE, jnp.int32),
            jnp.zeros_like(valid),
            valid,
            (tag % num_slots).astype(jnp.int32),
        ),
    )
    return first


def _address(keys: Array, num_buckets: int) -> tuple[Array, Array]:
    """Compute each key's tag, u32[K] and never empty, and buckets, i32[K, 2]."""
    # Keys of jaxkv.hashing are uniform already. Foreign keys may differ in a byte of
    # one lane only, so every lane is mixed in, as MurmurHash3 mixes and finishes.
    one = jnp.full(keys.shape[:1], 0x9E3779B9, jnp.uint32)
    two = jnp.full(keys.shape[:1], 0x7F4A7C15, jnp.uint32)
    for lane in range(KEY_LANES):
        one = _scramble(one ^ keys[:, lane], 0xCC9E2D51)
        two = _scramble(two ^ keys[:, lane], 0x1B873593)
    one, two = (_scramble(_scramble(h, 0x85EBCA6B), 0xC2B2AE35) for h in (one, two))
    tag = jnp.maximum(_scramble(one ^ (two >> 7), 0x2545F491), _EMPTY_TAG + 1)
    buckets = jnp.stack([one, two], axis=1) & jnp.uint32(num_buckets - 1)
    return tag, buckets.astype(jnp.int32)


def _scramble(hashes: Array, factor: int) -> Array:
    """Spread every bit upwards, then the upper half downwards: u32[K]."""
    hashes *= jnp.uint32(factor)
    return hashes ^ (hashes >> 16)


def _slots(buckets: Array) -> Array:
    """List the slots of each bucket of each key: i32[K, 2, 8]."""
    return buckets[:, :, None] * SLOTS_PER_BUCKET + _WITHIN[:, None, :]


def _read(table: Array, indices: Array) -> Array:
    """Read rows whose indices are in bounds, so that none has to be checked."""
    return table.at[indices].get(mode="promise_in_bounds")


def _set_tags(tags: Array, slots: Array, tag: Array | int) -> Array:
    """Write the tags of some slots; a slot past the end is ignored."""
    return tags.reshape(-1).at[slots].set(tag, mode="drop").reshape(tags.shape)
