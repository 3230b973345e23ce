"""Ghosts, labels of evicted keys: a 4-way associative table that drops the oldest.

A ghost is a word (the upper bits of a key's tag, and the caller's label) and the time
of the key's last use. The lower bits of the tag select a set of four ghosts, where a
new ghost replaces the oldest. Two keys with equal tags share one ghost. If two keys of
a batch choose the same slot, only one ghost is kept. Neither harms, because ghosts only
feed statistics.
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
"""Ghosts in a set."""

LABEL_BITS = 15
"""Low bits of a ghost's word that hold its label; the others are from its key's tag."""

LABEL_MASK = (1 << LABEL_BITS) - 1
NO_SLOT = -1
_TIME_MASK = (1 << 32) - 1
_TAG_MASK = np.uint32(~LABEL_MASK & _TIME_MASK)
_WAY_BITS = 2
_SET_WORDS = np.uint64(2 * WAYS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ghosts:
    """A table of ghosts. N sets of four slots."""

    table: Array  # u32[N, 8]. Per set: four words, 0 for no ghost, then four times.


def init(num_ghosts: int) -> Ghosts:
    """Make an empty table of at least `num_ghosts`."""
    num_sets = 1
    while num_sets * WAYS < num_ghosts:
        num_sets *= 2
    return Ghosts(full((num_sets, 2 * WAYS), 0, jnp.uint32))


@inlined
def fetch(ghosts: Any, tag: Any) -> None:
    """Prefetch the set of a tag from memory."""
    set_id = np.uint64(tag) & np.uint64(ghosts.table.shape[0] - 1)
    prefetch(ghosts.table, set_id * _SET_WORDS)


@inlined
def native_find(ghosts: Any, tag: Any) -> Any:
    """Find the slot of a tag, NO_SLOT if it has no ghost."""
    set_id = np.int64(tag) & (ghosts.table.shape[0] - 1)
    tag_bits, slot = np.uint32(tag) & _TAG_MASK, np.int64(NO_SLOT)
    for way in range(WAYS - 1, -1, -1):
        word = ghosts.table[set_id, way]
        if word & _TAG_MASK == tag_bits and word != 0:
            slot = set_id << _WAY_BITS | way
    return slot


@inlined
def native_choose(ghosts: Any, tag: Any, now_ms: int) -> Any:
    """Choose the slot for a tag: its ghost's, an empty one or the oldest's."""
    set_id = np.int64(tag) & (ghosts.table.shape[0] - 1)
    tag_bits, chosen = np.uint32(tag) & _TAG_MASK, set_id << _WAY_BITS
    oldest = np.int64(-1)
    for way in range(WAYS):
        word = ghosts.table[set_id, way]
        age = (now_ms - np.int64(ghosts.table[set_id, WAYS + way])) & _TIME_MASK
        if word == 0:
            age = np.int64(_TIME_MASK)
        elif word & _TAG_MASK == tag_bits:
            age = np.int64(_TIME_MASK + 1)
        if age > oldest:
            oldest = age
            chosen = set_id << _WAY_BITS | way
    return chosen


@inlined
def label_at(ghosts: Any, slot: int) -> Any:
    """Return the label of a ghost."""
    return np.int64(ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1]) & LABEL_MASK


@inlined
def last_ms_at(ghosts: Any, slot: int) -> Any:
    """Return the time of a ghost's last use."""
    return np.int64(ghosts.table[slot >> _WAY_BITS, WAYS + (slot & WAYS - 1)])


@inlined
def clear_at(ghosts: Any, slot: int) -> None:
    """Forget a ghost."""
    ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1] = 0


@compiled
def native_write(ghosts: Any, slots: Any, tags: Any, labels: Any, last_ms: Any) -> None:
    """Write ghosts; if slots are equal, the highest word and the latest time win.

    `slots` (i64[K]) are from `native_choose`, or NO_SLOT. `tags` are u32[K], `labels`
    i32[K], `last_ms` u32[K], or u32[1] for all.
    """
    for slot in slots:
        if slot >= 0:
            ghosts.table[slot >> _WAY_BITS, slot & WAYS - 1] = 0
            ghosts.table[slot >> _WAY_BITS, WAYS + (slot & WAYS - 1)] = 0
    step = 1 if last_ms.shape[0] > 1 else 0
    for row in range(slots.shape[0]):
        if slots[row] >= 0:
            at, way = slots[row] >> _WAY_BITS, slots[row] & WAYS - 1
            word = np.uint32((tags[row] & _TAG_MASK) | np.uint32(labels[row]))
            ghosts.table[at, way] = greater(ghosts.table[at, way], word)
            last = last_ms[row * step]
            ghosts.table[at, WAYS + way] = greater(ghosts.table[at, WAYS + way], last)


def count(ghosts: Ghosts) -> int:
    """Count the ghosts. For the host, not for jit."""
    return int(np.count_nonzero(np.asarray(ghosts.table)[:, :WAYS]))
