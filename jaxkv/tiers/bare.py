"""The simulator: a host tier without bytes, with the hits, stores and evictions of one.

It follows the rules of `jaxkv.scheduling.eager`. `jaxkv.tools.replay.run` feeds it with
a file's requests, `jaxkv.scheduling.whatif.shadows` with those that an engine serves.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies.facts import BEGIN, FINISH, Facts, begun, finished
from jaxkv.tiers.executors import Executor, Store, Words
from jaxkv.types import NO_BLOCK

_TIMES = 1 << 32  # Policies count ms in 32 bits, which wrap around.

REORDER_SHARE = 4
"""Reorder a prefix if 1 in this many of its blocks is new: a reorder visits all."""


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
    that may be stored; None for all. Only a policy that `listens` is notified.
    """

    def __init__(self, executor: Executor, *, listens: bool = False) -> None:
        self.executor = executor
        self.listens = listens
        self.num_stored = 0
        self.num_evicted = 0
        self.num_declined = 0
        self.num_removed = 0  # Blocks evicted, discarded, or whose stores failed.

    def begin(
        self,
        course: Course,
        keys: Words,
        now_ms: int,
        num_tokens: int,
        kind: int | None = None,
    ) -> None:
        """Notify the policy that a request begins, with `num_tokens` tokens so far."""
        if self.listens and len(keys):
            facts = begun(now_ms % _TIMES, num_tokens, kind)
            course.mark = self._note(BEGIN, keys, facts)

    def finish(
        self, course: Course, keys: Words, now_ms: int, num_output: int, stop: int
    ) -> None:
        """Notify the policy that a request has finished: see `facts.finished`."""
        if self.listens:
            facts = finished(now_ms % _TIMES, num_output, stop, course.mark)
            self._note(FINISH, keys, facts)

    def _note(self, event: int, keys: Words, facts: Facts) -> int:
        positions_alone = np.arange(len(keys), dtype=np.int32)
        return self.executor.note(keys, event, positions_alone, facts)

    def offer(
        self,
        course: Course,
        keys: Words,
        end: int,
        passes: NDArray[np.bool_] | None = None,
        start: int = 0,
    ) -> None:
        """Offer the keys up to `end` that were not; `passes` begins at key `start`."""
        first_new = course.num_known
        if first_new >= end:
            return
        if passes is not None:
            passes = passes[first_new - start : end - start]
        num_declined = self.num_declined
        num_done, stored = self.place(keys[first_new:end], passes)
        if stored is not None:
            course.in_flight.append(stored)
        course.is_refused |= num_done < end - first_new
        course.num_known = first_new + num_done
        course.is_ordered = (end - first_new) * REORDER_SHARE >= end
        if course.is_ordered:
            self.executor.touch(keys[:end], False)
        has_all = passes is None and num_declined == self.num_declined
        if first_new == 0 and course.num_known == end and has_all:
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
        self,
        keys: Words,
        passes: NDArray[np.bool_] | None = None,
        *,
        may_decline: bool = True,
    ) -> tuple[int, tuple[Words, Store] | None]:
        """Store all keys, or if there is no room their first half, and so on.

        Returns the number of these keys, and the stored ones with their store or None.
        """
        num = len(keys)
        while num:
            admitted = keys[:num]
            if passes is not None:
                admitted = select_keys(admitted, passes[:num])
            if not len(admitted):
                break
            store = self.place_all(admitted, may_decline=may_decline)
            if store is not None:
                return num, (admitted, store)
            num //= 2
        return num, None

    def place_all(self, keys: Words, *, may_decline: bool = True) -> Store | None:
        """Store all keys, or return None if there is no room for all."""
        store = self.executor.prepare_store(keys, may_decline)
        if store is not None:
            self.num_stored += store.num_stored
            self.num_declined += store.num_declined
            self.num_evicted += len(store.evicted_keys)
            self.num_removed += len(store.evicted_keys)
        return store


def select_keys(keys: Words, passes: NDArray[np.bool_]) -> Words:
    """Return the keys whose `passes` is True."""
    if passes.all():
        return keys
    selected = keys[passes]
    selected.flags.writeable = False  # Executors take read-only keys.
    return selected
