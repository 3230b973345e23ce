"""Shadows: simulated host tiers of other sizes and policies, without bytes.

A shadow gets the lookups, uses, stores and ends of the requests that the engine serves,
at the same times:

- A lookup hits the shadow's blocks that continue the device's own prefix.
- When the serving tier is offered blocks, the shadow is offered all computed blocks
  that it lacks, whether the serving tier has them or not.
- A block that both tiers store becomes a hit when its transfer arrives, and never if it
  fails. A block that only the shadow stores is a hit at once.
- The hits of a request are held until its load ends, or until it begins without one.

So the shadow of the serving policy and size has the same hits as the tier. A shadow
assumes that the engine loads all hits and stores all that there is room for:
`skip_slow_loads` and `pause_unused_stores` do not change its hits. It does not see
blocks from tiers below the host.

Beyond `FULL_BLOCKS`, a shadow replays a sample of the keys on the same share of the
blocks (`jaxkv.scheduling.whatif.key_sample`), and its hits are scaled up. Its stores
arrive at once, and no block is held.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import pack, words_to_keys
from jaxkv.policies import get_policy_maker
from jaxkv.scheduling.rules import OFF, Shadow
from jaxkv.scheduling.whatif.key_sample import NUM_GROUPS, KeySample
from jaxkv.tiers.bare import BareTier, Course, select_keys
from jaxkv.tiers.executors import ExecutorName, Ids, Store, Words, make_executor
from jaxkv.tiers.learned import make_emptied
from jaxkv.types import KEY_BYTES, NO_BLOCK, STOPS, BlockKey, Stop

FULL_BLOCKS = 2048
"""Up to this many blocks of the host tier, its shadows see all keys."""

_MAX_KEYS = 4096  # Per request; later keys are ignored.
_NO_IDS = np.empty(0, np.int64)
_, _NO_WORDS = pack([])


class ShadowCount(NamedTuple):
    """The counts of a shadow so far; scaled up if it replays a sample of keys.

    A sample may get more or fewer lookups than its share. Then `share` is more accurate
    than `num_found_tokens`.
    """

    policy: str  # Or `OFF`.
    num_blocks: int  # The host blocks of the simulated tier.
    num_asked_tokens: int = 0  # Looked up after the device's own prefix.
    num_found_tokens: int = 0
    num_loads: int = 0  # Requests with a hit.
    num_stored: int = 0  # Blocks, as `num_evicted`.
    num_evicted: int = 0
    # The standard error of `num_found_tokens`, if only a sample of keys is replayed.
    error_tokens: float = 0.0

    @property
    def share(self) -> float:
        """The hit ratio of the tokens that were looked up, from 0 to 1."""
        return self.num_found_tokens / max(self.num_asked_tokens, 1)


class _Visit:
    """The state of a request in all shadows."""

    __slots__ = (
        *("courses", "end", "first", "groups", "last", "mark", "num_hot", "rows"),
        *("start", "words"),
    )

    def __init__(self) -> None:
        self.mark = KeyMark()  # The keys that `words` were chosen from.
        self.words = _NO_WORDS  # u32[n, 8], the replayed keys of the request.
        self.rows: list[int] | None = None  # The block of each key; None for all.
        self.num_hot = 0  # How many first keys are assumed to be resident.
        self.groups: list[int] = []  # The sample group of each of `words`.
        # The request's progress in each tier; empty if no key is replayed.
        self.courses: list[Course] = []
        # The blocks [first, last) were looked up, after the device's own prefix.
        self.first = self.last = 0
        self.start = self.end = 0  # `words[start:end]` are keys of these blocks.

    def cut(self, num_blocks: int) -> int:
        """Return how many of `words` are keys of the first `num_blocks` blocks."""
        if self.rows is None:
            return min(num_blocks, len(self.words))
        return bisect_left(self.rows, num_blocks)


class _Tier(BareTier):
    """The simulated tier of a shadow; counts its hits."""

    def __init__(self, policy: str, num_blocks: int, executor: ExecutorName) -> None:
        max_batch = max(_MAX_KEYS, 2 * num_blocks)
        self.policy = get_policy_maker(policy)(num_blocks, max_batch)
        self._executor_name: ExecutorName = executor
        listens = self.policy.listens
        super().__init__(make_executor(self.policy, executor), listens=listens)
        self.hits = [0] * NUM_GROUPS  # Hits in blocks, by group of the sample.
        self.num_loads = 0  # Requests with a hit.

    def place_victims(
        self, keys: Words, passes: NDArray[np.bool_] | None
    ) -> tuple[Words, Store] | None:
        """Store victims of the device without evicting one of them for another."""
        if not len(keys):
            return None
        block_ids = self.executor.find(keys).astype(np.int64)
        is_new = block_ids == NO_BLOCK
        if passes is not None:
            is_new &= passes
        num = len(keys)
        while is_new[:num].any():
            resident = block_ids[:num][block_ids[:num] != NO_BLOCK]
            # Blocks of stores in flight cannot be pinned, nor evicted.
            resident = resident[np.asarray(self.executor.state.ref_cnt)[resident] >= 0]
            self.executor.pin(resident)
            new_keys = select_keys(keys[:num], is_new[:num])
            store = self.place_all(new_keys)
            self.executor.complete_step(resident, len(resident))
            if store is not None:
                return new_keys, store
            num //= 2
        return None

    def settle(self, keys: Words, store: Store, placed: Container[BlockKey]) -> None:
        """Complete a store, except of keys that the serving tier has just `placed`."""
        ids = store.block_ids
        if placed:
            rows = np.flatnonzero(ids != NO_BLOCK)
            ids = ids[rows][[key not in placed for key in words_to_keys(keys[rows])]]
        if ids.size:
            self.executor.complete_step(ids, 0)

    def complete(self, keys: Words, *, ok: bool) -> None:
        """End the stores of keys; unless `ok`, free their blocks."""
        ended = self.executor.complete_store(keys, ok)
        if not ok:
            self.num_removed += int(ended.sum())

    def discard(self, keys: Words) -> None:
        """Remove blocks that are not in flight."""
        self.num_removed += int(self.executor.discard(keys).sum())

    def clear(self) -> None:
        """Forget all blocks, but keep the counts and the policy's statistics."""
        self.executor = make_emptied(self.executor, self.policy, self._executor_name)


class Shadows:
    """The shadows of a host tier. They change nothing in the tiers that serve.

    One key in ``2**sample_bits`` is replayed; None to derive the bits from the host's
    size. With `is_lazy`, the device's victims are offered instead of prefixes.
    """

    def __init__(
        self,
        shadows: Sequence[Shadow],
        num_host_blocks: int,
        block_size: int,
        executor: ExecutorName = "native",
        sample_bits: int | None = None,
        *,
        is_lazy: bool = False,
    ) -> None:
        if sample_bits is None:
            sample_bits = max((num_host_blocks - 1) // FULL_BLOCKS, 0).bit_length()
        self._shadows = tuple(shadows)
        self._knows_prefixes = not is_lazy
        self._num_blocks = [
            max(round(shadow.factor * num_host_blocks), shadow.policy != OFF)
            for shadow in shadows
        ]
        self.block_size = block_size
        self._bits = sample_bits
        self._executor_name: ExecutorName = executor
        sizes = [num for num in self._num_blocks if num]
        # Chooses the keys to replay; None for all.
        self.sample = (
            KeySample(sample_bits, min(sizes)) if sample_bits and sizes else None
        )
        self._tiers = [
            _Tier(shadow.policy, max(num >> sample_bits, 1), executor)
            for shadow, num in zip(shadows, self._num_blocks, strict=True)
            if shadow.policy != OFF
        ]
        # Looked-up blocks: all, and hot ones, which are assumed to be resident; and
        # requests with a hot block.
        self._num_asked = self._num_hot = self._num_hot_loads = 0
        self.num_requests = 0  # Requests that looked up their prefix.
        self._sample_lookups = [0] * NUM_GROUPS  # Looked-up blocks, by sample group.
        self._visits: dict[str, _Visit] = {}
        # The block ids held for each request: i64[n] per tier.
        self._held: dict[str, list[Ids]] = {}

    def warm_up(self) -> None:
        """Load or compile the code of all methods, so that no later call waits."""
        policies = {shadow.policy for shadow in self._shadows} - {OFF}
        shadows = [Shadow(policy, 1.0) for policy in sorted(policies)]
        scratch = Shadows(shadows, 4, 1, self._executor_name)
        keys = [bytes(KEY_BYTES), bytes(KEY_BYTES - 1) + b"1"]
        for placed in (keys, ()):
            scratch.look_up("", keys, 0, 1)
            scratch.begin("", keys, 2, 0, has_lookup=True, has_load=True)
            scratch.offer("", keys, 1, placed, None)
            scratch.arrive(keys, ok=True)
            scratch.offer("", keys, 2, (), None, is_end=True)
            scratch.offer_victims(pack(keys)[1], (), None)
            scratch.finish("", keys, 0, None, None)
            scratch.forget("")
            scratch.discard(keys)

    @property
    def num_asked_tokens(self) -> int:
        """Tokens that requests looked up after the device's own prefix."""
        return self._num_asked * self.block_size

    @property
    def counts(self) -> tuple[ShadowCount, ...]:
        """The counts of each shadow so far; thread-safe."""
        bits, size, counts = self._bits, self.block_size, []
        tiers = iter(self._tiers)
        num_asked = (self._num_hot + (sum(self._sample_lookups) << bits)) * size
        for shadow, num_blocks in zip(self._shadows, self._num_blocks, strict=True):
            if shadow.policy == OFF:
                counts.append(ShadowCount(OFF, 0, num_asked))
                continue
            tier = next(tiers)
            error = 0.0
            if self.sample is not None:
                error = self.sample.error(tier.hits, self._sample_lookups) * size
            counts.append(
                ShadowCount(
                    shadow.policy,
                    num_blocks,
                    num_asked,
                    (self._num_hot + (sum(tier.hits) << bits)) * size,
                    self._num_hot_loads + (tier.num_loads << bits),
                    tier.num_stored << bits,
                    tier.num_evicted << bits,
                    error,
                )
            )
        return tuple(counts)

    def look_up(
        self, name: str, keys: Sequence[BlockKey], first: int, last: int
    ) -> None:
        """Look up the blocks [first, last) that continue the device's own prefix."""
        visit = self._visit(name, keys)
        self.release(name)
        visit.first, visit.last = first, last
        if not visit.courses:
            return
        visit.start, visit.end = start, end = visit.cut(first), visit.cut(last)
        # When more keys become hot, other keys up to the stratum's end are sampled.
        # Such a key may be missing although keys after the stratum are resident.
        resume_at = start
        if self.sample is not None and self._knows_prefixes:
            stratum_end = visit.cut(self.sample.end_of_stratum(visit.num_hot))
            resume_at = max(stratum_end, start)
        held: list[Ids] = []
        for tier, course in zip(self._tiers, visit.courses, strict=True):
            num, ids = 0, _NO_IDS
            if start < end:
                num, ids = self._find(tier, visit.words[start:end])
            if num < resume_at - start and resume_at < end:
                num_more, _ = self._find(tier, visit.words[resume_at:end])
                num = resume_at - start + num_more if num_more else num
            held.append(ids)
            course.num_known, course.num_found = start + num, num
            course.is_ordered, course.whole_at = True, -1
        if self.sample is None:
            self._held[name] = held

    def begin(
        self,
        name: str,
        keys: Sequence[BlockKey],
        num_tokens: int,
        now_ms: int,
        kind: int | None = None,
        *,
        has_lookup: bool,
        has_load: bool,
    ) -> None:
        """Use a request's blocks for the first time.

        `has_lookup` is whether it has looked up its prefix, `has_load` whether the
        serving tier loads blocks for it.
        """
        visit = self._visit(name, keys)
        if not has_load:
            self.release(name)
        if has_lookup:
            self._count(visit)
        words = visit.words
        if not visit.courses:
            return
        for tier, course in zip(self._tiers, visit.courses, strict=True):
            tier.begin(course, words, now_ms, num_tokens, kind)
            tier.executor.touch(words, True)

    def first_open_block(self, name: str, keys: Sequence[BlockKey]) -> int:
        """Return the index of a request's first block that some shadow may lack."""
        visit = self._visit(name, keys)
        num = min((course.num_known for course in visit.courses), default=0)
        if num >= len(visit.words):
            return visit.mark.num
        return num if visit.rows is None else visit.rows[num]

    def offer(
        self,
        name: str,
        keys: Sequence[BlockKey],
        num_blocks: int,
        placed: Container[BlockKey],
        passes: NDArray[np.bool_] | None,
        start: int = 0,
        *,
        is_end: bool = False,
        can_store: bool = True,
    ) -> None:
        """Offer the first `num_blocks` blocks of a request, which are computed.

        `placed` are the keys that the serving tier has just placed. `passes`
        (bool[num_blocks - start], None for all) is whether each block from `start` on
        may be stored; `start` is at most `first_open_block`. If the request ends
        (`is_end`), `start` is 0, all blocks that a shadow lacks are offered again, and
        `can_store` is whether the serving tier may store any block.
        """
        visit = self._visit(name, keys)
        end = visit.cut(num_blocks)
        if not end:
            return
        if passes is not None and visit.rows is not None:
            first = bisect_left(visit.rows, start)
            passes = passes[np.array(visit.rows[first:end], np.intp) - start]
            start = first
        if self.sample is not None:
            placed = ()
        for tier, course in zip(self._tiers, visit.courses, strict=True):
            if is_end:
                tier.end(course, visit.words, end, passes, can_store=can_store)
            else:
                tier.offer(course, visit.words, end, passes, start)
            for stored in course.in_flight:
                tier.settle(*stored, placed)
            course.in_flight.clear()

    def offer_victims(
        self,
        words: Words,
        placed: Container[BlockKey],
        passes: NDArray[np.bool_] | None,
    ) -> None:
        """Offer the blocks that the device evicts next (u32[n, 8]), for lazy stores."""
        if self.sample is not None:
            rows = self.sample.choose(words)
            words = words[rows]
            words.flags.writeable = False  # As all keys are.
            passes, placed = None if passes is None else passes[rows], ()
        for tier in self._tiers:
            stored = tier.place_victims(words, passes)
            if stored is not None:
                tier.settle(*stored, placed)

    def arrive(self, keys: Sequence[BlockKey], *, ok: bool) -> None:
        """Complete the stores of keys whose store to the serving tier has ended."""
        if self.sample is None:
            _, words = pack(keys)
            for tier in self._tiers:
                tier.complete(words, ok=ok)

    def release(self, name: str) -> None:
        """Release the held hits of a request."""
        for tier, ids in zip(self._tiers, self._held.pop(name, ()), strict=False):
            if ids.size:
                tier.executor.complete_step(ids, len(ids))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks whose load has failed."""
        _, words = pack(keys)
        for tier in self._tiers:
            tier.discard(words)

    def recompute(self, name: str) -> None:
        """Expect a request to recompute the blocks whose load has failed."""
        visit = self._visits.get(name)
        for course in visit.courses if visit else ():
            course.num_known = 0

    def finish(
        self,
        name: str,
        keys: Sequence[BlockKey],
        now_ms: int,
        num_output_tokens: int | None,
        stop: Stop | None,
    ) -> None:
        """Notify policies that a request has finished; it must have begun."""
        visit = self._visit(name, keys)
        if not visit.courses:
            return
        output = -1 if num_output_tokens is None else num_output_tokens
        reason = STOPS.index(stop)
        for tier, course in zip(self._tiers, visit.courses, strict=True):
            tier.finish(course, visit.words, now_ms, output, reason)

    def forget(self, name: str, *, is_held: bool = False) -> None:
        """Forget a request; `is_held` keeps its hits held, for a load in flight."""
        self._visits.pop(name, None)
        if not is_held:
            self.release(name)

    def clear(self) -> None:
        """Forget all blocks, as the serving tier does."""
        self._held.clear()
        for tier in self._tiers:
            tier.clear()
        for visit in self._visits.values():
            for course in visit.courses:
                course.num_known, course.whole_at = 0, -1

    def _find(self, tier: _Tier, words: Words) -> tuple[int, Ids]:
        """Return how many first keys are hits, and the ids held (none if sampled)."""
        num, ids = tier.executor.lookup(words), _NO_IDS
        if num and self.sample is None:
            _, ids = tier.executor.prepare_load(words[:num])
        return num, ids

    def _visit(self, name: str, keys: Sequence[BlockKey]) -> _Visit:
        """Return the state of a request, after reading its new keys."""
        visit = self._visits.get(name)
        if visit is None or not visit.mark.is_in(keys):
            visit = self._begin_visit(visit, keys)
            self._visits[name] = visit
        first, num = visit.mark.num, len(keys)
        if num == first:
            return visit
        _, words = pack(keys)
        if self.sample is None:
            visit.words = words[:_MAX_KEYS]
        elif rows := self._rows_of(words, visit.num_hot, first, len(visit.words)):
            assert visit.rows is not None
            visit.rows += rows
            visit.groups += self.sample.groups(words[rows])
            visit.words = np.concatenate([visit.words, words[rows]])
            visit.words.flags.writeable = False  # As all keys are.
        visit.mark = KeyMark.of(keys, num)
        if len(visit.words) and not visit.courses:
            visit.courses = [Course() for _ in self._tiers]
        return visit

    def _begin_visit(self, before: _Visit | None, keys: Sequence[BlockKey]) -> _Visit:
        """Return a new state; it replaces `before` if keys were rewritten."""
        visit = _Visit()
        if self.sample is not None:
            visit.num_hot = self.sample.record_request(keys)
            visit.rows = []
        if before is not None:
            visit.courses = [Course(mark=course.mark) for course in before.courses]
        return visit

    def _rows_of(
        self, words: Words, num_hot: int, first: int, num_chosen: int
    ) -> list[int]:
        """Return the indices of keys to replay, from the new key `first` on."""
        assert self.sample is not None
        room = _MAX_KEYS - num_chosen
        if room <= 0:
            return []
        if self._knows_prefixes:
            return self.sample.choose_of_prefix(words, num_hot, first)[:room]
        first = max(first, num_hot)
        return [first + row for row in self.sample.choose(words[first:])][:room]

    def _count(self, visit: _Visit) -> None:
        """Count a request's lookup and its hits."""
        first, start = visit.first, visit.start
        self.num_requests += 1
        self._num_asked += visit.last - first
        num_hot = max(min(visit.num_hot, visit.last) - first, 0)
        self._num_hot += num_hot
        self._num_hot_loads += num_hot > 0
        if start == visit.end:
            return
        groups = visit.groups[start : visit.end]
        _count_groups(self._sample_lookups, groups, visit.end - start)
        # A request with hits hits its first block. So requests whose first block is in
        # the sample represent all requests.
        has_first = visit.rows is None or visit.rows[start] == first
        for tier, course in zip(self._tiers, visit.courses, strict=True):
            _count_groups(tier.hits, groups, course.num_found)
            tier.num_loads += has_first and course.num_found > 0


def _count_groups(counts: list[int], groups: list[int], num: int) -> None:
    """Count the first `num` keys by their `groups`; in group 0 if that is empty."""
    if not groups:
        counts[0] += num
    for group in groups[:num]:
        counts[group] += 1
