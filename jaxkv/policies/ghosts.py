"""Notes on keys that have no block: a fixed table that forgets the oldest.

A ghost is a word, the upper bits of a key's tag and a note of the caller's, and the
time of the key's last use. Four ghosts share a place, which the lower bits of the tag
select, and a new one takes the slot of the oldest of the four. Two keys with one tag
are taken for one, and two keys of one batch that choose the same slot leave one ghost:
ghosts only feed statistics, and no look-up depends on them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.compiling import compiled, greater, inlined, prefetch
from jaxkv.policies.xla import full

WAYS = 4
"""Ghosts that share a place; a new one takes that of the oldest of them."""

NOTE_BITS = 12
"""Bits of a ghost for its note; the others are of its key's tag."""

NOTE_MASK = (1 << NOTE_BITS) - 1
NO_SLOT = -1
_TIME_MASK = (1 << 32) - 1
_TAG_MASK = np.uint32(~NOTE_MASK & _TIME_MASK)
_WAY_BITS = 2
_PLACE = np.uint64(2 * WAYS)

_OLDEST = np.uint32(0xFFFFFFFF)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ghosts:
    """A table of ghosts. N places, G = 4 N slots.

    Attributes:
        table: u32[N, 8]. Tags and notes of four, 0 for none; and their keys' last uses.
    """

    table: Array

    @property
    def num_slots(self) -> int:
        """The number of slots, G, which also stands for no slot."""
        return self.table.shape[0] * WAYS


def init(num_ghosts: int) -> Ghosts:
    """Make an empty table of at least `num_ghosts`."""
    num_places = 1
    while num_places * WAYS < num_ghosts:
        num_places *= 2
    return Ghosts(full((num_places, 2 * WAYS), 0, jnp.uint32))


@inlined
def fetch(ghosts: Any, tag: Any) -> None:
    """Prefetch the place of a tag from memory."""
    last = np.uint64(ghosts.table.shape[0] - 1)
    prefetch(ghosts.table, (np.uint64(tag) & last) * _PLACE)


def find(ghosts: Ghosts, tags: Array) -> Array:
    """Find the slot of each tag (u32[K]): i32[K], G where it has none."""
    first, words, _ = _read_places(ghosts, tags)
    matches = _matches(words, tags)
    slots = first * WAYS + jnp.argmax(matches, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(matches, axis=1), slots, ghosts.num_slots)


@inlined
def native_find(ghosts: Any, tag: Any) -> Any:
    """Find the slot of a tag, NO_SLOT if it has none."""
    first = np.int64(tag) & (ghosts.table.shape[0] - 1)
    upper, slot = np.uint32(tag) & _TAG_MASK, np.int64(NO_SLOT)
    for way in range(WAYS - 1, -1, -1):
        word = ghosts.table[first, way]
        if word & _TAG_MASK == upper and word != 0:
            slot = first << _WAY_BITS | way
    return slot


def choose(ghosts: Ghosts, tags: Array, now_ms: Array) -> Array:
    """Choose a slot for each tag: its own, an empty one, or the oldest ghost's."""
    first, words, last_ms = _read_places(ghosts, tags)
    matches = _matches(words, tags)
    ages = jnp.where(words == 0, _OLDEST, now_ms - last_ms)
    is_own = jnp.any(matches, axis=1)
    ways = jnp.where(is_own, jnp.argmax(matches, axis=1), jnp.argmax(ages, axis=1))
    return first * WAYS + ways.astype(jnp.int32)


@inlined
def native_choose(ghosts: Any, tag: Any, now_ms: int) -> Any:
    """Choose a slot for a tag: its own, an empty one, or the oldest ghost's."""
    first = np.int64(tag) & (ghosts.table.shape[0] - 1)
    upper, chosen = np.uint32(tag) & _TAG_MASK, first << _WAY_BITS
    oldest = np.int64(-1)
    for way in range(WAYS):
        word = ghosts.table[first, way]
        age = (now_ms - np.int64(ghosts.table[first, WAYS + way])) & _TIME_MASK
        if word == 0:
            age = np.int64(_TIME_MASK)
        elif word & _TAG_MASK == upper:
            age = np.int64(_TIME_MASK + 1)
        if age > oldest:
            oldest = age
            chosen = first << _WAY_BITS | way
    return chosen


@inlined
def note_at(ghosts: Any, slot: int) -> Any:
    """Read the note of a ghost."""
    return np.int64(ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1]) & NOTE_MASK


@inlined
def last_at(ghosts: Any, slot: int) -> Any:
    """Read the time of a ghost."""
    return np.int64(ghosts.table[slot >> _WAY_BITS, WAYS + (slot & WAYS - 1)])


@inlined
def clear_at(ghosts: Any, slot: int) -> None:
    """Forget a ghost."""
    ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1] = 0


def read(ghosts: Ghosts, slots: Array) -> tuple[Array, Array]:
    """Read notes and times: i32[K] and u32[K], 0 for no slot."""
    cells, flat = _cells(slots), ghosts.table.reshape(-1)
    words = flat.at[cells].get(mode="fill", fill_value=0)
    last_ms = flat.at[cells + WAYS].get(mode="fill", fill_value=0)
    return (words & NOTE_MASK).astype(jnp.int32), last_ms


def write(
    ghosts: Ghosts, slots: Array, tags: Array, notes: Array, last_ms: Array
) -> Ghosts:
    """Write ghosts; of those with the same slot the highest word and time stay.

    `slots` (i32[K]) are from `choose`; G is skipped. `tags` are u32[K], `notes` i32[K],
    `last_ms` u32[K], or u32[] for all.
    """
    words = (tags & np.uint32(~NOTE_MASK & 0xFFFFFFFF)) | notes.astype(jnp.uint32)
    last_ms = jnp.broadcast_to(last_ms, slots.shape)
    cells = jnp.concatenate([_cells(slots), _cells(slots) + WAYS])
    flat = ghosts.table.reshape(-1).at[cells].set(0, mode="drop")
    flat = flat.at[cells].max(jnp.concatenate([words, last_ms]), mode="drop")
    return Ghosts(flat.reshape(ghosts.table.shape))


@compiled
def native_write(ghosts: Any, slots: Any, tags: Any, notes: Any, last_ms: Any) -> None:
    """In-place form of `write`; `slots` are i64[K], NO_SLOT for none."""
    for slot in slots:
        if slot >= 0:
            ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1] = 0
            ghosts.table[slot >> _WAY_BITS, WAYS + (slot & WAYS - 1)] = 0
    step = 1 if last_ms.shape[0] > 1 else 0
    for row in range(slots.shape[0]):
        if slots[row] >= 0:
            at, way = slots[row] >> _WAY_BITS, slots[row] & WAYS - 1
            word = np.uint32((tags[row] & _TAG_MASK) | np.uint32(notes[row]))
            ghosts.table[at, way] = greater(ghosts.table[at, way], word)
            last = last_ms[row * step]
            ghosts.table[at, WAYS + way] = greater(ghosts.table[at, WAYS + way], last)


def clear(ghosts: Ghosts, slots: Array) -> Ghosts:
    """Forget the ghosts in `slots` (i32[K], G for none)."""
    flat = ghosts.table.reshape(-1).at[_cells(slots)].set(0, mode="drop")
    return Ghosts(flat.reshape(ghosts.table.shape))


def count(ghosts: Ghosts) -> int:
    """Count the ghosts. For the host, not for jit."""
    return int(np.count_nonzero(np.asarray(ghosts.table)[:, :WAYS]))


def _cells(slots: Array) -> Array:
    """Return the cells of the words in slots; past the end for G."""
    return slots // WAYS * (2 * WAYS) + slots % WAYS


def _read_places(ghosts: Ghosts, tags: Array) -> tuple[Array, Array, Array]:
    """Return the place of each tag, i32[K], and its words and times, u32[K, 4] each."""
    last = np.uint32(ghosts.table.shape[0] - 1)
    first = (tags & last).astype(jnp.int32)
    places = ghosts.table.at[first].get(mode="promise_in_bounds")
    return first, places[:, :WAYS], places[:, WAYS:]


def _matches(words: Array, tags: Array) -> Array:
    """Mark the words (u32[K, 4]) of a tag (u32[K]): bool[K, 4]."""
    return (words != 0) & ((words ^ tags[:, None]) >> NOTE_BITS == 0)
