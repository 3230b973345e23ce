"""A host tier that is only an index: what it would find, admit and evict.

`jaxkv replay` serves traces with it, and the shadows of a serving tier
(`jaxkv.scheduling.whatif.shadows`) their requests, by the rules of eager stores
(`jaxkv.scheduling.eager`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.tiers.executors import Executor, Store, Words
from jaxkv.types import NO_BLOCK

REORDER_SHARE = 4
"""A request's prefix is moved to the recent end of the order of eviction when at least
1 / REORDER_SHARE of its blocks are new. To do so more often would cost time for each
block of the prefix."""


@dataclasses.dataclass(slots=True)
class Course:
    """How far a request has come with a tier."""

    num_known: int = 0  # Its keys, from the first on, that were hits or offered.
    is_ordered: bool = True  # Whether these are in order in the order of eviction.
    # `BareTier.num_lost` when the tier had all of them, from the head on, or -1.
    whole_at: int = -1
    is_refused: bool = False  # Whether there was no room for some.
    mark: int = 0  # What `Executor.begin` returned.
    num_found: int = 0  # Keys that its last lookup found.
    # Keys that are being stored, and where.
    under_way: list[tuple[Words, Store]] = dataclasses.field(default_factory=list)


class BareTier:
    """A tier without bytes, around an empty index.

    Keys are u32[n, 8], C-contiguous and read-only, as executors take them. `passes`
    (bool[n]) says which of n keys may be stored; None for all.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_stored = 0
        self.num_evicted = 0
        self.num_lost = 0  # Blocks that have left, evicted or not.

    def offer(
        self,
        course: Course,
        keys: Words,
        end: int,
        passes: NDArray[np.bool_] | None = None,
        start: int = 0,
    ) -> None:
        """Offer the keys of a request up to `end` that were not offered before.

        `passes` begins at `start`: a key that was offered before, or the first new one.
        """
        first = course.num_known
        if first >= end:
            return
        if passes is not None:
            passes = passes[first - start : end - start]
        num_done, stored = self.place(keys[first:end], passes)
        if stored is not None:
            course.under_way.append(stored)
        course.is_refused |= num_done < end - first
        course.num_known = first + num_done
        course.is_ordered = (end - first) * REORDER_SHARE >= end
        if course.is_ordered:
            self.executor.touch(keys[:end], False)
        if first == 0 and course.num_known == end and passes is None:
            course.whole_at = self.num_lost

    def end(
        self,
        course: Course,
        keys: Words,
        end: int,
        passes: NDArray[np.bool_] | None = None,
        *,
        can_store: bool = True,
    ) -> None:
        """Offer all of a request again at its end, unless the tier has it."""
        is_whole = course.whole_at == self.num_lost and course.num_known == end
        if not end or (is_whole and course.is_ordered):
            return
        if not is_whole and (self.executor.find(keys[:end]) == NO_BLOCK).any():
            if can_store:
                # All of it, so that its tail does not take the place of its head.
                course.num_known = 0
                self.offer(course, keys, end, passes)
        elif not course.is_ordered:
            self.executor.touch(keys[:end], False)

    def place(
        self, keys: Words, passes: NDArray[np.bool_] | None = None
    ) -> tuple[int, tuple[Words, Store] | None]:
        """Store all keys or half of them and so on.

        Returns how many are done, from the first on; and those that may be stored, and
        where, None if there are none.
        """
        num = len(keys)
        while num:
            admitted = keys[:num]
            if passes is not None:
                admitted = those_of(admitted, passes[:num])
            if not len(admitted):
                break
            store = self.take(admitted)
            if store is not None:
                return num, (admitted, store)
            num //= 2
        return num, None

    def take(self, keys: Words) -> Store | None:
        """Store keys, all or none."""
        store = self.executor.prepare_store(keys)
        if store is not None:
            self.num_stored += store.num_stored
            self.num_evicted += len(store.evicted_keys)
            self.num_lost += len(store.evicted_keys)
        return store

    def complete(self, keys: Words, *, ok: bool) -> None:
        """End the stores of keys; if they failed, forget the blocks."""
        ended = self.executor.complete_store(keys, ok)
        if not ok:
            self.num_lost += int(ended.sum())

    def discard(self, keys: Words) -> None:
        """Forget idle blocks."""
        self.num_lost += int(self.executor.discard(keys).sum())


def those_of(keys: Words, passes: NDArray[np.bool_]) -> Words:
    """Return the keys that may be stored."""
    if passes.all():
        return keys
    chosen = keys[passes]
    chosen.flags.writeable = False  # As all keys are.
    return chosen
