"""A host tier without bytes, to simulate its hits, stores and evictions.

It follows the rules of eager stores (`jaxkv.scheduling.eager`). `jaxkv replay` serves
traces with it, and `jaxkv.scheduling.whatif.shadows` live requests.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.tiers.executors import Executor, Store, Words
from jaxkv.types import NO_BLOCK

REORDER_SHARE = 4
"""Reorder a request's prefix if at least 1 / REORDER_SHARE of its blocks are new. More
reorders would take too long: each takes time per block of the prefix."""


@dataclasses.dataclass(slots=True)
class Course:
    """The progress of a request with a tier."""

    num_known: int = 0  # Length of the prefix that was hit or offered.
    is_ordered: bool = True  # Whether the tier would evict this prefix tail first.
    # `BareTier.num_removed` when the tier last had the whole prefix; -1 for never.
    whole_at: int = -1
    is_refused: bool = False  # Whether there was no room for some keys.
    mark: int = 0  # The policy's answer to the `BEGIN` of the request.
    num_found: int = 0  # Hits of the last lookup.
    # The keys and blocks of stores in flight.
    in_flight: list[tuple[Words, Store]] = dataclasses.field(default_factory=list)


class BareTier:
    """A tier without bytes, around the executor of an empty index.

    Keys are u32[n, 8], C-contiguous and read-only. `passes` (bool[n]) marks the keys
    that may be stored; None for all.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_stored = 0
        self.num_evicted = 0
        self.num_removed = 0  # Blocks evicted, discarded, or whose stores failed.

    def offer(
        self,
        course: Course,
        keys: Words,
        end: int,
        passes: NDArray[np.bool_] | None = None,
        start: int = 0,
    ) -> None:
        """Offer the keys of a request up to `end` that were not offered before.

        `passes` begins at key `start`, which must not be beyond the first new key.
        """
        first_new = course.num_known
        if first_new >= end:
            return
        if passes is not None:
            passes = passes[first_new - start : end - start]
        num_done, stored = self.place(keys[first_new:end], passes)
        if stored is not None:
            course.in_flight.append(stored)
        course.is_refused |= num_done < end - first_new
        course.num_known = first_new + num_done
        course.is_ordered = (end - first_new) * REORDER_SHARE >= end
        if course.is_ordered:
            self.executor.touch(keys[:end], False)
        if first_new == 0 and course.num_known == end and passes is None:
            course.whole_at = self.num_removed

    def end(
        self,
        course: Course,
        keys: Words,
        end: int,
        passes: NDArray[np.bool_] | None = None,
        *,
        can_store: bool = True,
    ) -> None:
        """End a request: offer all of its keys again, unless the tier has them."""
        is_whole = course.whole_at == self.num_removed and course.num_known == end
        if not end or (is_whole and course.is_ordered):
            return
        if not is_whole and (self.executor.find(keys[:end]) == NO_BLOCK).any():
            if can_store:
                # Offer the whole prefix: storing its tail must not evict its head.
                course.num_known = 0
                self.offer(course, keys, end, passes)
        elif not course.is_ordered:
            self.executor.touch(keys[:end], False)

    def place(
        self, keys: Words, passes: NDArray[np.bool_] | None = None
    ) -> tuple[int, tuple[Words, Store] | None]:
        """Store all keys; if there is no room, the first half of them, and so on.

        Returns the number of these keys, and the admitted ones with their store; None
        if none is stored.
        """
        num = len(keys)
        while num:
            admitted = keys[:num]
            if passes is not None:
                admitted = select_keys(admitted, passes[:num])
            if not len(admitted):
                break
            store = self.place_all(admitted)
            if store is not None:
                return num, (admitted, store)
            num //= 2
        return num, None

    def place_all(self, keys: Words) -> Store | None:
        """Store all keys, or return None if there is no room for all."""
        store = self.executor.prepare_store(keys)
        if store is not None:
            self.num_stored += store.num_stored
            self.num_evicted += len(store.evicted_keys)
            self.num_removed += len(store.evicted_keys)
        return store

    def complete(self, keys: Words, *, ok: bool) -> None:
        """End the stores of keys; unless `ok`, free their blocks."""
        ended = self.executor.complete_store(keys, ok)
        if not ok:
            self.num_removed += int(ended.sum())

    def discard(self, keys: Words) -> None:
        """Remove blocks that are not in flight."""
        self.num_removed += int(self.executor.discard(keys).sum())


def select_keys(keys: Words, passes: NDArray[np.bool_]) -> Words:
    """Return the keys whose `passes` is True."""
    if passes.all():
        return keys
    selected = keys[passes]
    selected.flags.writeable = False  # Executors take read-only keys.
    return selected
