"""A host tier that is only an index: what it would find, take and evict.

`jaxkv replay` serves traces with it, and the shadows of a tier that serves
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
    """How far a request has come with a tier.

    Attributes:
        num_known: Its keys, from the first on, that were found, offered or refused.
        is_ordered: Whether these have their place in the tier's order of eviction.
        whole_at: `BareTier.num_lost` when the tier had all of them, from the head on;
            -1 if that was never looked at.
        is_refused: Whether there was no room for some.
        mark: What `Executor.begin` returned.
        num_found: Of its keys, those that its last look-up found.
        under_way: Keys that have been stored, and where, until that is completed.
    """

    num_known: int = 0
    is_ordered: bool = True
    whole_at: int = -1
    is_refused: bool = False
    mark: int = 0
    num_found: int = 0
    under_way: list[tuple[Words, Store]] = dataclasses.field(default_factory=list)


class BareTier:
    """A tier without bytes.

    Keys are u32[n, 8], C-contiguous and read-only, as executors take them.

    Args:
        executor: Its index, empty.

    Attributes:
        executor: As given.
        num_stored: Blocks that it has taken.
        num_evicted: Blocks that it has evicted.
        num_lost: Blocks that have left it, evicted or not.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.num_stored = 0
        self.num_evicted = 0
        self.num_lost = 0

    def offer(
        self,
        course: Course,
        keys: Words,
        end: int,
        passes: NDArray[np.bool_] | None = None,
        start: int = 0,
    ) -> None:
        """Offer what a request has computed and not offered before.

        Args:
            course: The request's.
            keys: All its keys.
            end: How many of them, from the first on, are computed.
            passes: bool[n]. Which of its keys, from `start` on, may be stored; None for
                all.
            start: A key that was offered before, or the first one that was not.
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
        """Offer all of a request again at its end, unless the tier has it.

        Args:
            course: As of `offer`, like those that follow.
            keys: All its keys.
            end: How many of them are computed.
            passes: bool[n]. Which may be stored; None for all.
            can_store: Whether anything may be stored now.
        """
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
        """Store what there is room for, all or half and so on, as `Stores.place` does.

        Args:
            keys: What could be stored.
            passes: bool[n]. Which of it may be; None for all.

        Returns:
            How many keys are done, from the first on; and those that may be stored, and
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
        """End the stores of keys; if they failed, their blocks are forgotten."""
        ended = self.executor.complete_store(keys, ok)
        if not ok:
            self.num_lost += int(ended.sum())

    def discard(self, keys: Words) -> None:
        """Forget idle blocks."""
        self.num_lost += int(self.executor.discard(keys).sum())


def those_of(keys: Words, passes: NDArray[np.bool_]) -> Words:
    """Choose the keys that may be stored."""
    if passes.all():
        return keys
    chosen = keys[passes]
    chosen.flags.writeable = False  # As all keys are.
    return chosen
