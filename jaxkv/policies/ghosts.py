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

LABEL_BITS = 12
"""Low bits of a ghost's word that hold its label; the others are from its key's tag."""

LABEL_MASK = (1 << LABEL_BITS) - 1
NO_SLOT = -1
_TIME_MASK = (1 << 32) - 1
_TAG_MASK = np.uint32(~LABEL_MASK & _TIME_MASK)
_WAY_BITS = 2
_SET_WORDS = np.uint64(2 * WAYS)

_MAX_AGE = np.uint32(0xFFFFFFFF)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ghosts:
    """A table of ghosts. N sets, G = 4 N slots."""

    table: Array  # u32[N, 8]. Per set: four words, 0 for no ghost, then four times.

    @property
    def num_slots(self) -> int:
        """The number of slots, G. As a slot, it means "none"."""
        return self.table.shape[0] * WAYS


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


def find(ghosts: Ghosts, tags: Array) -> Array:
    """Find the slot of each tag (u32[K]): i32[K], G if it has no ghost."""
    set_id, words, _ = _read_sets(ghosts, tags)
    matches = _matches(words, tags)
    slots = set_id * WAYS + jnp.argmax(matches, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(matches, axis=1), slots, ghosts.num_slots)


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


def choose(ghosts: Ghosts, tags: Array, now_ms: Array) -> Array:
    """Choose each tag's slot (i32[K]): its ghost's, an empty one or the oldest's."""
    set_id, words, last_ms = _read_sets(ghosts, tags)
    matches = _matches(words, tags)
    ages = jnp.where(words == 0, _MAX_AGE, now_ms - last_ms)
    has_ghost = jnp.any(matches, axis=1)
    ways = jnp.where(has_ghost, jnp.argmax(matches, axis=1), jnp.argmax(ages, axis=1))
    return set_id * WAYS + ways.astype(jnp.int32)


@inlined
def native_choose(ghosts: Any, tag: Any, now_ms: int) -> Any:
    """In-place form of `choose`, for one tag."""
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


def read(ghosts: Ghosts, slots: Array) -> tuple[Array, Array]:
    """Return the labels (i32[K]) and times (u32[K]) of `slots` (i32[K]); 0 for G."""
    cells, flat = _cells(slots), ghosts.table.reshape(-1)
    words = flat.at[cells].get(mode="fill", fill_value=0)
    last_ms = flat.at[cells + WAYS].get(mode="fill", fill_value=0)
    return (words & LABEL_MASK).astype(jnp.int32), last_ms


def write(
    ghosts: Ghosts, slots: Array, tags: Array, labels: Array, last_ms: Array
) -> Ghosts:
    """Write ghosts; if slots are equal, the highest word and the latest time win.

    `slots` (i32[K]) are from `choose`; G is skipped. `tags` are u32[K],
    `labels` i32[K], `last_ms` u32[K], or u32[] for all.
    """
    words = (tags & _TAG_MASK) | labels.astype(jnp.uint32)
    last_ms = jnp.broadcast_to(last_ms, slots.shape)
    cells = jnp.concatenate([_cells(slots), _cells(slots) + WAYS])
    flat = ghosts.table.reshape(-1).at[cells].set(0, mode="drop")
    flat = flat.at[cells].max(jnp.concatenate([words, last_ms]), mode="drop")
    return Ghosts(flat.reshape(ghosts.table.shape))


@compiled
def native_write(ghosts: Any, slots: Any, tags: Any, labels: Any, last_ms: Any) -> None:
    """In-place form of `write`; `slots` are i64[K], NO_SLOT for none."""
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


def clear(ghosts: Ghosts, slots: Array) -> Ghosts:
    """Forget the ghosts in `slots` (i32[K]; G is skipped)."""
    flat = ghosts.table.reshape(-1).at[_cells(slots)].set(0, mode="drop")
    return Ghosts(flat.reshape(ghosts.table.shape))


def count(ghosts: Ghosts) -> int:
    """Count the ghosts. For the host, not for jit."""
    return int(np.count_nonzero(np.asarray(ghosts.table)[:, :WAYS]))


def _cells(slots: Array) -> Array:
    """Return the flat index of each slot's word, past the end for slot G: i32[K]."""
    return slots // WAYS * (2 * WAYS) + slots % WAYS


def _read_sets(ghosts: Ghosts, tags: Array) -> tuple[Array, Array, Array]:
    """Return each tag's set (i32[K]), and its words and times (u32[K, 4] each)."""
    set_id = (tags & np.uint32(ghosts.table.shape[0] - 1)).astype(jnp.int32)
    sets = ghosts.table.at[set_id].get(mode="promise_in_bounds")
    return set_id, sets[:, :WAYS], sets[:, WAYS:]


def _matches(words: Array, tags: Array) -> Array:
    """Mark the words (u32[K, 4]) that match their tag (u32[K]): bool[K, 4]."""
    return (words != 0) & ((words ^ tags[:, None]) >> LABEL_BITS == 0)
