"""The ghost table in place; `jaxkv.policies.ghosts` says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native.compiling import compiled, inlined, prefetch

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


@inlined
def fetch(ghosts: Any, tag: Any) -> None:
    """Have the place of a tag fetched from memory, and do not wait for it."""
    last = np.uint64(ghosts.table.shape[0] - 1)
    prefetch(ghosts.table, (np.uint64(tag) & last) * _PLACE)


@inlined
def find(ghosts: Any, tag: Any) -> Any:
    """Find the slot of a tag, NO_SLOT if it has none."""
    first = np.int64(tag) & (ghosts.table.shape[0] - 1)
    own, found = np.uint32(tag) & _TAG_MASK, np.int64(NO_SLOT)
    for way in range(WAYS - 1, -1, -1):
        word = ghosts.table[first, way]
        if word & _TAG_MASK == own and word != 0:
            found = first << _WAY_BITS | way
    return found


@inlined
def choose(ghosts: Any, tag: Any, now_ms: int) -> Any:
    """Choose a slot for a tag: its own, an empty one, or that of the oldest ghost."""
    first = np.int64(tag) & (ghosts.table.shape[0] - 1)
    own, chosen = np.uint32(tag) & _TAG_MASK, first << _WAY_BITS
    oldest = np.int64(-1)
    for way in range(WAYS):
        word = ghosts.table[first, way]
        age = (now_ms - np.int64(ghosts.table[first, WAYS + way])) & _TIME_MASK
        if word == 0:
            age = np.int64(_TIME_MASK)
        elif word & _TAG_MASK == own:
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


@compiled
def write(ghosts: Any, slots: Any, tags: Any, notes: Any, last_ms: Any) -> None:
    """Write ghosts; of those with the same slot the highest word and time stay.

    Args:
        ghosts: A `Ghosts`.
        slots: i64[K]. From `choose`; NO_SLOT is passed over.
        tags: u32[K].
        notes: i32[K].
        last_ms: u32[K], or u32[1] for all.
    """
    for slot in slots:
        if slot >= 0:
            ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1] = 0
            ghosts.table[slot >> _WAY_BITS, WAYS + (slot & WAYS - 1)] = 0
    step = 1 if last_ms.shape[0] > 1 else 0
    for row in range(slots.shape[0]):
        if slots[row] >= 0:
            at, way = slots[row] >> _WAY_BITS, slots[row] & WAYS - 1
            word = np.uint32((tags[row] & _TAG_MASK) | np.uint32(notes[row]))
            ghosts.table[at, way] = max(ghosts.table[at, way], word)
            last = last_ms[row * step]
            ghosts.table[at, WAYS + way] = max(ghosts.table[at, WAYS + way], last)
