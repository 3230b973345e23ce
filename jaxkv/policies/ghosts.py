"""What is known of keys that have no block: a fixed table that forgets the oldest.

A ghost is a word, the upper bits of a key's tag and a note of the caller's, and the
time of the key's last use. Four ghosts share a place, which the lower bits of the tag
give, and a new one takes the slot of the oldest of the four. Two keys with one tag are
taken for one, and two that come in one batch and want the same slot leave one ghost:
what is learned from ghosts is statistics, and nothing that is found depends on them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.native.ghosts import NOTE_BITS, NOTE_MASK, WAYS

_OLDEST = np.uint32(0xFFFFFFFF)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ghosts:
    """A table of ghosts. N places, G = 4 N slots.

    Attributes:
        table: u32[N, 8]. Tags and notes of four, 0 where there is none; and when their
            keys were used last.
    """

    table: Array

    @property
    def num_slots(self) -> int:
        """How many ghosts there is room for; the slot that stands for none."""
        return self.table.shape[0] * WAYS


def init(num_ghosts: int) -> Ghosts:
    """Make an empty table of at least `num_ghosts`."""
    num_places = 1
    while num_places * WAYS < num_ghosts:
        num_places *= 2
    return Ghosts(jnp.zeros((num_places, 2 * WAYS), jnp.uint32))


def find(ghosts: Ghosts, tags: Array) -> Array:
    """Find the slot of each tag (u32[K]): i32[K], G where it has none."""
    first, words, _ = _read_places(ghosts, tags)
    matches = _matches(words, tags)
    slots = first * WAYS + jnp.argmax(matches, axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(matches, axis=1), slots, ghosts.num_slots)


def choose(ghosts: Ghosts, tags: Array, now_ms: Array) -> Array:
    """Choose a slot for each tag: its own, an empty one, or the oldest ghost's."""
    first, words, last_ms = _read_places(ghosts, tags)
    matches = _matches(words, tags)
    ages = jnp.where(words == 0, _OLDEST, now_ms - last_ms)
    is_own = jnp.any(matches, axis=1)
    ways = jnp.where(is_own, jnp.argmax(matches, axis=1), jnp.argmax(ages, axis=1))
    return first * WAYS + ways.astype(jnp.int32)


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

    Args:
        ghosts: The table before.
        slots: i32[K]. From `choose`; G is passed over.
        tags: u32[K].
        notes: i32[K].
        last_ms: u32[K], or u32[] for all.

    Returns:
        The table after.
    """
    words = (tags & np.uint32(~NOTE_MASK & 0xFFFFFFFF)) | notes.astype(jnp.uint32)
    last_ms = jnp.broadcast_to(last_ms, slots.shape)
    cells = jnp.concatenate([_cells(slots), _cells(slots) + WAYS])
    flat = ghosts.table.reshape(-1).at[cells].set(0, mode="drop")
    flat = flat.at[cells].max(jnp.concatenate([words, last_ms]), mode="drop")
    return Ghosts(flat.reshape(ghosts.table.shape))


def clear(ghosts: Ghosts, slots: Array) -> Ghosts:
    """Forget the ghosts in `slots` (i32[K], G for none)."""
    flat = ghosts.table.reshape(-1).at[_cells(slots)].set(0, mode="drop")
    return Ghosts(flat.reshape(ghosts.table.shape))


def count(ghosts: Ghosts) -> int:
    """Count the ghosts. For the host, not for jit."""
    return int(np.count_nonzero(np.asarray(ghosts.table)[:, :WAYS]))


def _cells(slots: Array) -> Array:
    """Give the cells of the words in slots; past the end for G."""
    return slots // WAYS * (2 * WAYS) + slots % WAYS


def _read_places(ghosts: Ghosts, tags: Array) -> tuple[Array, Array, Array]:
    """Give the place of each tag, i32[K], and its words and times, u32[K, 4] each."""
    last = np.uint32(ghosts.table.shape[0] - 1)
    first = (tags & last).astype(jnp.int32)
    own = ghosts.table.at[first].get(mode="promise_in_bounds")
    return first, own[:, :WAYS], own[:, WAYS:]


def _matches(words: Array, tags: Array) -> Array:
    """Tell which words (u32[K, 4]) are of a tag (u32[K]): bool[K, 4]."""
    return (words != 0) & ((words ^ tags[:, None]) >> NOTE_BITS == 0)
