"""Boundaries: blocks in flight between a tier and the next one down.

Blocks that only the lower tier has are fetched to the upper one while their request
waits. Then they are hits like any others, and are held until the request has device
blocks, lest waiting requests evict them. No more is fetched than can be held. The lower
tier may first be probed for blocks that no tier is known to have. Blocks worth keeping
are written down in the background. A move ends when every worker has reported it;
nothing here waits.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, filterfalse
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import key_from_foreign
from jaxkv.scheduling.moves import Ledger, Move
from jaxkv.scheduling.protocol import TierBatch, TierMoves, TierProbe, TierReport
from jaxkv.scheduling.rules import OffloadRules, WriteRule, check_victims
from jaxkv.scheduling.stats import TierCounts
from jaxkv.search.groups import FullAttention, GroupSpec
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.key_memory import ReuseFilter
from jaxkv.tiers.storage import StorageTier
from jaxkv.types import NO_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int64]
_TierMove: TypeAlias = Move[Ids]

_WAITING_PER_WRITE = 4  # Blocks that may wait to be written, per block in flight.
# Keys whose requests are remembered, also per block of the upper tier: evicted blocks
# may come back.
_MIN_REMEMBERED_KEYS, _REMEMBERED_PER_BLOCK = 1 << 16, 4
_MAX_ABSENT_KEYS = 1 << 12  # Remembered as missing from the lower tier.

# After asking this often for room that others hold, while none of them makes progress,
# a request takes the room of those that have stopped asking, or does without a fetch.
_MAX_VAIN_ASKS = 8
# After this many vain asks, even if holders make progress, it goes before all others.
_OVERDUE_ASKS = 64
_NO_IDS = np.empty(0, np.int64)


@dataclasses.dataclass(eq=False)
class _Wait:
    """The fetches that a request waits for, and the blocks that it holds meanwhile."""

    events: set[int]  # Of the fetches that have not ended.
    rows: list[int]  # Blocks of the upper tier, pinned once for each entry.
    ends: dict[BlockKey, int]  # Where each block ends that it waits for.
    arrived_ends: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(eq=False)
class _Queued:
    """A request that waits for room that other requests hold."""

    num_released: int = -1  # `Boundary._num_released` at `first_ask`.
    first_ask: int = 0  # The number of its first ask since a hold has ended.
    num_asks: int = 0  # Vain asks since then, while no fetch was in flight.
    num_vain: int = 0  # Vain asks in all.


@dataclasses.dataclass(eq=False)
class Probing:
    """The probes of the lower tier on behalf of a request."""

    events: set[int] = dataclasses.field(default_factory=set)  # Probes in flight.
    num: int = 0  # Probes so far.
    absent: set[BlockKey] = dataclasses.field(default_factory=set)  # Blocks not there.


class TierBelow(NamedTuple):
    """A tier below the host, and which blocks go there."""

    tier: BlockIndex
    # Which blocks of the tier above it are written to it: those that are asked for a
    # second time ("on_reuse"), those that the tier above is about to evict
    # ("on_evict"), or all that get there ("through").
    write: WriteRule = "through"
    # Host blocks in flight at a time, in either direction; fewer below a small tier.
    max_blocks: int = 128
    # How long a request waits while the tier is asked for blocks that its index does
    # not know, as others may have written them; 0 not to ask.
    probe_s: float = 0.0
    has_other_writers: bool = False  # Whether others may write to it at all.


class Fetch(NamedTuple):
    """The blocks that must come to the upper tier before a request has a prefix."""

    num_tokens: int  # Of the longest prefix, with all tiers down to the lower one.
    upper_rows: list[int]  # Blocks of the upper tier that it reads.
    keys: list[BlockKey]  # Of the blocks that only the lower tier has, in order.
    end_tokens: list[int]  # Where each of them ends.
    row_tokens: int  # Tokens in each.
    is_awaited: bool = False  # Whether others may yet write some of them there.


class Boundary:
    """Fetches of the blocks that requests wait for, and writes of those to keep.

    `is_private` returns True for the key of a block that must never be written to the
    lower tier, which is tier `number` below the host. `on_arrival` is called with the
    keys of blocks that have arrived there.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        upper: BlockIndex,
        below: TierBelow,
        rules: OffloadRules,
        *,
        is_private: Callable[[BlockKey], bool] | None = None,
        on_arrival: Callable[[Sequence[BlockKey]], None] | None = None,
        number: int = 0,
    ) -> None:
        check_victims(below.write, upper.can_list_victims)
        self.groups = groups
        self.upper = upper
        self.number = number
        self.counts = TierCounts()
        self.bytes_per_s = 0.0  # Of fetches; 0 if unknown.
        self.tier = tier = below.tier
        self.name = tier.medium.lower()  # In `Plan.deferral` and explanations.
        self.num_fetched_tokens: dict[str, int] = {}  # For requests not finished.
        self.num_lost = 0  # Blocks that left and did not arrive in time.
        self._write = below.write
        self._is_private = is_private
        self._on_arrival = on_arrival
        # Whether the tier is not used any more, and the worker has not been notified.
        self._is_disabled = self._must_send_last = False
        self.factor = rules.blocks_per_host_block
        # Neither may hold so much of the upper tier that requests find no room there.
        max_blocks, num_blocks = below.max_blocks, upper.num_blocks
        self._max_written = min(max_blocks, max(1, num_blocks // 8))
        self.max_fetched = min(max_blocks, max(1, num_blocks // 2))
        # For requests without device blocks, unless one alone needs more.
        self.max_held = max(1, num_blocks // 2)
        # Whether a part of a prefix may be fetched: if every block is read, a shorter
        # one consists of its first blocks.
        self.may_cut = all(isinstance(group, FullAttention) for group in groups)
        # Which blocks were asked for again; None if all are written.
        self._reuse_filter: ReuseFilter | None = None
        if below.write == "on_reuse":
            max_keys = max(_MIN_REMEMBERED_KEYS, _REMEMBERED_PER_BLOCK * num_blocks)
            self._reuse_filter = ReuseFilter(threshold=2, max_size=max_keys)
        # From the lower tier to the upper one, and back.
        num = rules.world_size
        self.fetches: Ledger[_TierMove] = Ledger(f"fetch from {self.name}", num)
        self._writes: Ledger[_TierMove] = Ledger(f"write to {self.name}", num)
        self.probes: Ledger[_TierMove] = Ledger(f"probe of {self.name}", num)
        self.fetch_of: dict[BlockKey, _TierMove] = {}
        self.waits: dict[str, _Wait] = {}
        # Blocks of the upper tier that are held for requests which have asked again.
        self.holds: dict[str, list[int]] = {}
        # How often each block is held for requests.
        self._num_holders: dict[int, int] = {}
        # Asks so far, and the number of each request's last one.
        self._num_asks = 0
        self._last_ask: dict[str, int] = {}
        self._queued: dict[str, _Queued] = {}
        self._overdue: dict[str, None] = {}  # Of these, the overdue ones in order.
        # How often a hold has ended, and whether the last fetch brought anything.
        self._num_released = 0
        self._is_bringing = True
        # The number of listed blocks when each request was looked up.
        self.looked_up: dict[str, int] = {}
        # Where the length of a prefix decides which blocks are read, a second probe may
        # follow, and the two share the time.
        self.max_probes = 1 if self.may_cut else 2
        self.probe_s = below.probe_s / self.max_probes
        self.has_other_writers = below.has_other_writers
        self.probing: dict[str, Probing] = {}
        self._probe_of: dict[BlockKey, _TierMove] = {}
        self._to_probe: list[TierProbe] = []
        # Keys that it lacked when it was last asked, the oldest first.
        self._absent: OrderedDict[BlockKey, None] = OrderedDict()
        self._to_write: OrderedDict[BlockKey, None] = OrderedDict()
        self._to_fetch: list[_TierMove] = []
        self._to_delete: list[BlockKey] = []
        # The fetches of blocks that others may still be writing.
        self._awaited: set[int] = set()
        # The state of the upper tier at the last `_look_at_victims`.
        self._seen: tuple[int, int, int] | None = None

    @property
    def has_fetches(self) -> bool:
        """Whether fetches or probes are in flight, or requests wait for them."""
        return bool(self.fetches.moves or self.waits or self.probes.moves)

    @property
    def has_writes(self) -> bool:
        """Whether writes are in flight, or wait."""
        waits = self._to_write or self._to_delete or self._must_send_last
        return bool(self._writes.moves or waits)

    def is_awaited(self, request_id: str) -> bool:
        """Whether a request waits for a fetch or a probe."""
        wait = self.waits.get(request_id)
        return bool(wait and wait.events) or self.is_probing(request_id)

    def is_probing(self, request_id: str) -> bool:
        """Whether a request waits for a probe."""
        probing = self.probing.get(request_id)
        return bool(probing and probing.events)

    def may_have(self, request_id: str, keys: Sequence[BlockKey]) -> NDArray[np.int32]:
        """Return 0 for each block that the tier may have, NO_BLOCK for others: i32[n].

        It has neither what it reported missing to the request nor private blocks.
        """
        ids = np.zeros(len(keys), np.int32)
        probing = self.probing.get(request_id)
        if probing and probing.absent:
            ids[[key in probing.absent for key in keys]] = NO_BLOCK
        if self._is_private is not None:
            ids[[self._is_private(key) for key in keys]] = NO_BLOCK
        return ids

    def was_absent(self, key: BlockKey) -> bool:
        """Whether the tier lacked a block when it was last asked for it."""
        return key in self._absent

    def limit_held(self, num_blocks: int) -> None:
        """Hold at most as many blocks of the tiers as the device has room for."""
        self.max_held = min(self.max_held, max(1, num_blocks))

    def has_room(self, request_id: str, fetch: Fetch) -> bool:
        """Whether a fetch fits beside what is fetched and held for other requests.

        An overdue request goes first: a large fetch would never find room otherwise.
        One that has waited while the lower tier brought nothing does not wait again.
        """
        if request_id in self._queued and not self._is_bringing:
            return False
        keys = fetch.keys[: self.max_fetched] if self.may_cut else fetch.keys
        num_new = len(self._not_fetched(fetch, len(keys)))
        num_fetched = self.fetches.num_blocks
        if not num_new or num_new > self.max_fetched:
            return True  # All of it is on its way, or it never fits.
        if next(iter(self._overdue), request_id) != request_id:
            return False
        if num_fetched and num_fetched + num_new > self.max_fetched:
            return False
        num_held = len(self._num_holders) + num_fetched
        num_new += sum(row not in self._num_holders for row in fetch.upper_rows)
        return not num_held or num_held + num_new <= self.max_held

    def may_queue(self, request_id: str) -> bool:
        """Whether a request that finds no room waits for it.

        It does not if it holds something itself, if the lower tier brings nothing, or
        if it has waited long enough and no holder makes progress.
        """
        if request_id in self.holds or not self._is_bringing:
            return False
        queued = self._queued.get(request_id, _Queued())
        return (
            bool(self.fetches.moves)
            or queued.num_released != self._num_released
            or queued.num_asks < _MAX_VAIN_ASKS
        )

    def queue(self, request_id: str) -> None:
        """Record that a request waits for room, as it `may_queue`."""
        self._note_ask(request_id)
        queued = self._queued.setdefault(request_id, _Queued())
        if queued.num_released != self._num_released:
            queued.num_released = self._num_released
            queued.first_ask, queued.num_asks = self._num_asks, 0
        queued.num_vain += 1
        if queued.num_vain == _OVERDUE_ASKS:
            self._overdue[request_id] = None
        queued.num_asks += not self.fetches.moves
        if queued.num_asks == _MAX_VAIN_ASKS:
            for name in {**self.holds, **self.waits, **self._queued}:
                wait = self.waits.get(name)
                has_ended = wait is None or not wait.events
                if has_ended and self._last_ask[name] < queued.first_ask:
                    self.forget(name)

    def hold(self, request_id: str) -> None:
        """Hold what was fetched for a request, which has asked again."""
        self._note_ask(request_id)
        rows = self._end_wait(request_id)
        if rows:
            self.holds.setdefault(request_id, []).extend(rows)

    def decline(self, request_id: str) -> None:
        """Record that a request gives its offer back, and stays in the queue."""
        self.hold(request_id)
        self.looked_up.pop(request_id, None)
        self.probing.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """Release what is held for a request."""
        rows = self.holds.pop(request_id, []) + self._end_wait(request_id)
        if rows:
            self._unpin(rows)
            self._num_released += 1

    def forget(self, request_id: str) -> None:
        """Forget a request that has finished, or has its blocks."""
        self.release(request_id)
        self._leave_queue(request_id)
        for of_requests in (self.looked_up, self.probing, self._last_ask):
            of_requests.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """Forget a request that has finished."""
        self.forget(request_id)
        self.num_fetched_tokens.pop(request_id, None)

    def _leave_queue(self, request_id: str) -> None:
        self._queued.pop(request_id, None)
        self._overdue.pop(request_id, None)

    def _note_ask(self, request_id: str) -> None:
        self._num_asks += 1
        self._last_ask[request_id] = self._num_asks

    def _end_wait(self, request_id: str) -> list[int]:
        """End the wait of a request, if it waits; return the blocks that it holds."""
        probing = self.probing.get(request_id)
        if probing is not None:
            for event in probing.events:
                del self.probes.moves[event].waiters[request_id]
            probing.events.clear()
        wait = self.waits.pop(request_id, None)
        if wait is None:
            return []
        for event in wait.events:
            del self.fetches.moves[event].waiters[request_id]
        if wait.arrived_ends:
            num = len(wait.arrived_ends) * self.factor * self.groups[0].block_size
            self.num_fetched_tokens[request_id] = num
        return wait.rows

    def _pin(self, rows: Sequence[int]) -> None:
        """Hold blocks of the upper tier for a request."""
        self.upper.pin(rows)
        for row in rows:
            self._num_holders[row] = self._num_holders.get(row, 0) + 1

    def _unpin(self, rows: Sequence[int]) -> None:
        """Undo `_pin`."""
        self.upper.unpin(rows)
        for row in rows:
            self._num_holders[row] -= 1
            if not self._num_holders[row]:
                del self._num_holders[row]

    def note_asked(self, keys: Sequence[BlockKey]) -> None:
        """Count the blocks that a new request asks for, before it uses them."""
        if self._reuse_filter is not None:
            self._reuse_filter.count(keys)
            self._offer(_select(keys, self.upper.find(keys) != NO_BLOCK))
        self.tier.touch(keys)

    def note_stored(self, keys: Sequence[BlockKey]) -> None:
        """Offer blocks that have arrived in the upper tier to the lower one."""
        if self._write == "through":
            self._offer(keys)
        elif self._reuse_filter is not None:
            # Some were asked for before, and evicted since.
            self._offer(list(compress(keys, self._reuse_filter.passes(keys))))

    def issue(self) -> TierMoves | None:
        """Return what a step asks of the lower tier; None for nothing."""
        fetches, self._to_fetch = self._to_fetch, []
        probes, self._to_probe = self._to_probe, []
        if self._write == "on_evict":
            self._look_at_victims()
        writes = self._take_writes()
        deletes, self._to_delete = self._to_delete, []
        is_last, self._must_send_last = self._must_send_last, False
        if not (fetches or writes or deletes or is_last or probes):
            return None
        return TierMoves(
            tuple(
                _as_batch(move, move.targets, move.sources, move.event in self._awaited)
                for move in fetches
            ),
            tuple(_as_batch(move, move.sources, move.targets) for move in writes),
            tuple(map(key_from_foreign, deletes)),
            is_last,
            self.number,
            tuple(probes),
        )

    def check(self, reports: Sequence[TierReport]) -> None:
        """Raise ValueError if a report of this tier is of a move not in flight."""
        reports = [report for report in reports if report.tier == self.number]
        self.fetches.check([end for report in reports for end in report.fetched])
        self._writes.check([end for report in reports for end in report.written])
        self.probes.check([end for report in reports for end in report.probed])

    def report(self, reports: Sequence[TierReport]) -> None:
        """Apply the checked reports of this tier."""
        for report in reports:
            if report.tier != self.number:
                continue
            for move in self.fetches.report(report.fetched):
                self._end_fetch(move)
            for move in self._writes.report(report.written):
                self._end_write(move)
            for move in self.probes.report(report.probed):
                self._end_probe(move)
            if not self._is_disabled:
                listing = report.found, report.gone, report.listed, report.bound
                self._to_delete += self.tier.note_listing(*listing)
                if report.num_full:
                    self._to_delete += self.tier.note_full(report.num_full)

    def reset(self) -> None:
        """Forget the blocks of the lower tier, after the upper one has been cleared.

        What is in flight there must have ended before its blocks are given to others.
        """
        for ledger in (self._writes, self.fetches, self.probes):
            for move in ledger.moves.values():
                move.is_stale = True
        for probe in self._to_probe:
            self.probes.remove(self.probes.moves[probe.event])
        for move in self._to_fetch:  # No worker will report these.
            self.fetches.remove(move)
            self._end_fetch(move)
        content: Any
        for content in (
            *(self._to_probe, self._to_fetch, self._to_write, self._to_delete),
            *(self.probing, self._probe_of, self._absent, self.fetch_of),
            *(self.waits, self.holds, self._num_holders, self.looked_up),
            *(self._queued, self._overdue, self.tier),
        ):
            content.clear()
        self._is_bringing = True

    def disable(self) -> None:
        """Stop reading and writing the lower tier, for good.

        The upper tier has been cleared, or will be before a block of it is used again.
        """
        if self._is_disabled:
            return
        self._is_disabled = self._must_send_last = True
        self.probe_s = 0.0
        self.has_other_writers = False
        if self.tier.num_held_blocks or self.has_fetches:
            self.reset()
        self._to_write.clear()
        self._to_delete.clear()

    def fetch(self, request_id: str, fetch: Fetch, num: int) -> bool:
        """Begin a fetch that has just been planned; return whether its request waits.

        Of the fetch at most `num` blocks come. The request waits for nothing yet.
        """
        expected: list[BlockKey] = []
        if fetch.is_awaited:
            keys = fetch.keys[:num]
            expected = _select(keys, ~self.tier.contains(keys))
            if not self.tier.has_room(keys):
                return False
            self.tier.note_resident(keys)
        # So that making room does not evict what the rest continues.
        self._pin(fetch.upper_rows)
        placed = None
        for share in self._shares(num):
            new = self._not_fetched(fetch, share)
            placed = self.upper.place(new, filtered=False)
            if placed is not None:
                break
        else:
            share = 0
        if placed is not None and placed.keys:
            keys = list(placed.keys)
            sources = self.tier.find(keys).astype(np.int64)
            self.tier.pin(sources)
            move = Move(keys, sources, placed.block_ids)
            self.fetches.issue([move])
            self.fetch_of.update(dict.fromkeys(keys, move))
            self._to_fetch.append(move)
            if fetch.is_awaited:
                self._awaited.add(move.event)
        if expected:
            awaited = set(fetch.keys[:share])
            self.tier.discard([key for key in expected if key not in awaited])
        of = self.fetch_of
        events = {of[key].event for key in fetch.keys[:share] if key in of}
        if not events:
            self._unpin(fetch.upper_rows)
            return False
        ends = dict(zip(fetch.keys[:share], fetch.end_tokens[:share], strict=True))
        self._leave_queue(request_id)
        self._note_ask(request_id)
        self.waits[request_id] = _Wait(events, fetch.upper_rows, ends)
        for event in events:
            self.fetches.moves[event].waiters[request_id] = None
        return True

    def probe(
        self, request_id: str, runs: Sequence[Sequence[BlockKey]], wait_s: float
    ) -> None:
        """Probe the tier for missing blocks of a request, which waits `wait_s` for it.

        Keys of a run continue one another. No key has two probes in flight.
        """
        probing = self.probing.setdefault(request_id, Probing())
        probing.num += 1
        unasked = [[key for key in run if key not in self._probe_of] for run in runs]
        new = [run for run in unasked if run]
        if new:
            keys = [key for run in new for key in run]
            move: _TierMove = Move(keys, _NO_IDS, _NO_IDS)
            event = self.probes.issue([move])
            self._probe_of.update(dict.fromkeys(keys, move))
            sent = tuple(tuple(map(key_from_foreign, run)) for run in new)
            self._to_probe.append(TierProbe(event, sent, wait_s))
        probing.events = {self._probe_of[key].event for run in runs for key in run}
        for event in probing.events:
            self.probes.moves[event].waiters[request_id] = None

    def would_fetch(self, fetch: Fetch, num: int) -> bool:
        """Whether `fetch` would have a request wait; nothing changes."""
        if fetch.is_awaited and not self.tier.has_room(fetch.keys[:num]):
            return False
        for share in self._shares(num):
            if self.upper.has_room(self._not_fetched(fetch, share), fetch.upper_rows):
                head = fetch.keys[:share]
                is_fetched = any(key in self.fetch_of for key in head)
                return is_fetched or not bool(self.upper.contains(head).all())
        return False

    def _shares(self, num: int) -> Iterator[int]:
        """Yield how much to try to fetch: all, half of it and so on, or all or none."""
        while num:
            yield num
            num = num // 2 if self.may_cut else 0

    def _not_fetched(self, fetch: Fetch, num: int) -> list[BlockKey]:
        """List the first blocks of a fetch that are not in flight."""
        return [key for key in fetch.keys[:num] if key not in self.fetch_of]

    def _offer(self, keys: Sequence[BlockKey]) -> None:
        """Queue blocks that are in the upper tier and worth writing."""
        if self._is_disabled:
            return
        keys = self._public(keys)
        max_waiting = self._max_written * _WAITING_PER_WRITE
        for key in _select(keys, ~self.tier.contains(keys)):
            if key in self._to_write:
                continue
            if len(self._to_write) >= max_waiting:
                self.counts.dropped_slow += self.factor
            else:
                self._to_write[key] = None

    def _public(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the keys of blocks that are not private."""
        if self._is_private is None:
            return keys
        return list(filterfalse(self._is_private, keys))

    def _look_at_victims(self) -> None:
        """Offer the next victims, as many as may be written at a time."""
        upper = self.upper
        look = upper.num_evicted, upper.num_held_blocks, self._writes.num_blocks
        if look != self._seen:
            self._seen = look
            room = self._max_written - len(self._to_write)
            victims = self._public(upper.next_victims(2 * self._max_written))
            self._offer(victims[: max(room, 0)])

    def _take_writes(self) -> list[_TierMove]:
        """Hold blocks that leave for the lower tier, all together."""
        num = min(self._max_written - self._writes.num_blocks, len(self._to_write))
        if num <= 0:
            return []
        keys = [self._to_write.popitem(last=False)[0] for _ in range(num)]
        rows = self.upper.find(keys)
        is_resident = rows != NO_BLOCK
        self.counts.dropped_evicted += int((~is_resident).sum()) * self.factor
        keys, rows = _select(keys, is_resident), rows[is_resident]
        while (placed := self.tier.place(keys)) is None:  # Most of it is in flight.
            num = len(keys) // 2
            self.counts.dropped_slow += (len(keys) - num) * self.factor
            keys = keys[:num]
        self._to_delete += self.tier.choose_deletions(placed.evicted_keys)
        if not placed.keys:
            return []
        upper_blocks = rows[: len(keys)].astype(np.int64)
        if placed.rows is not None:
            upper_blocks = upper_blocks[placed.rows]
        self.upper.pin(upper_blocks)
        move = Move(list(placed.keys), upper_blocks, placed.block_ids)
        self._writes.issue([move])
        return [move]

    def _end_fetch(self, move: _TierMove) -> None:
        is_awaited = move.event in self._awaited
        self._awaited.discard(move.event)
        if move.is_stale:
            self.counts.failed += len(move.keys) * self.factor
            return
        for key in move.keys:
            del self.fetch_of[key]
        arrived = move.targets[move.ok]
        rows, self._is_bringing = arrived.tolist(), bool(arrived.size)
        keys, missing = _split(move)
        self.upper.publish(arrived, keys)
        self.upper.complete_store(missing, False)
        self.tier.unpin(move.sources)
        # The next request that asks does not wait for it; a listing may find it again.
        self.tier.discard(missing)
        self.counts.loaded += len(arrived) * self.factor
        self.counts.failed += len(missing) * self.factor
        for request_id in move.waiters:
            wait = self.waits[request_id]
            wait.events.discard(move.event)
            self._pin(rows)
            wait.rows += rows
            wait.arrived_ends.update(wait.ends[key] for key in keys if key in wait.ends)
            if is_awaited:  # It waits once.
                self.probing.setdefault(request_id, Probing()).absent.update(missing)
        if is_awaited:
            self._note_absent(missing)

    def _end_probe(self, move: _TierMove) -> None:
        if move.is_stale:
            return
        for key in move.keys:
            del self._probe_of[key]
        resident, absent = _split(move)
        self.tier.note_resident(resident)
        self.counts.found += len(resident) * self.factor
        for key in resident:
            self._absent.pop(key, None)
        self._note_absent(absent)
        for request_id in move.waiters:
            probing = self.probing[request_id]
            probing.events.discard(move.event)
            probing.absent.update(absent)

    def _note_absent(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            self._absent[key] = None
            self._absent.move_to_end(key)
        while len(self._absent) > _MAX_ABSENT_KEYS:
            self._absent.popitem(last=False)

    def _end_write(self, move: _TierMove) -> None:
        if move.is_stale:
            self.counts.dropped_reset += len(move.keys) * self.factor
            return
        self.upper.unpin(move.sources)
        arrived, missing = _split(move)
        self.tier.complete_store(arrived)
        if missing:
            self.tier.complete_store(missing, False)
        self.num_lost += len(missing) * self.factor
        self.counts.dropped_failed += len(missing) * self.factor
        self.counts.stored += len(arrived) * self.factor
        if arrived and self._on_arrival is not None:
            self._on_arrival(arrived)


def make_boundaries(
    groups: tuple[GroupSpec, ...],
    host: BlockIndex,
    rules: OffloadRules,
    tiers_below: Sequence[TierBelow],
    num_storage_blocks: int,
    is_private: Callable[[BlockKey], bool] | None,
    enable_events: bool,
    executor: ExecutorName,
) -> tuple[Boundary, ...]:
    """Make the boundaries below the host, the nearest first, the store's last."""
    tiers = list(tiers_below)
    if num_storage_blocks:
        size = host.block_size
        tier = StorageTier(size, num_storage_blocks, enable_events, executor=executor)
        blocks, probe_s = rules.max_storage_blocks, rules.storage_probe_s or 0.0
        write = rules.storage_write
        tiers.append(TierBelow(tier, write, blocks, probe_s, has_other_writers=True))
    uppers = [host, *[below.tier for below in tiers]]
    boundaries: list[Boundary] = []
    for number, below in reversed(list(enumerate(tiers))):
        boundary = Boundary(
            groups,
            uppers[number],
            below,
            rules,
            is_private=is_private,
            on_arrival=boundaries[0].note_stored if boundaries else None,
            number=number,
        )
        boundaries.insert(0, boundary)
    return tuple(boundaries)


def check_reports(
    boundaries: Sequence[Boundary], reports: Sequence[TierReport]
) -> None:
    """Refuse reports of tiers below the host that are not due."""
    for report in reports:
        if not 0 <= report.tier < len(boundaries):
            raise ValueError(
                f"a report of tier {report.tier} below the host came, and the "
                f"scheduler has {len(boundaries)} such tiers: give it "
                "num_storage_blocks, or tiers_below."
            )
    if reports:
        for boundary in boundaries:
            boundary.check(reports)


def _as_batch(
    move: _TierMove, upper: Ids, lower: Ids, is_awaited: bool = False
) -> TierBatch:
    """Make the worker's description of a move."""
    keys = tuple(map(key_from_foreign, move.keys))
    ids = tuple(upper.tolist()), tuple(lower.tolist())
    return TierBatch(move.event, keys, *ids, is_awaited)


def _split(move: _TierMove) -> tuple[list[BlockKey], list[BlockKey]]:
    """List the keys of a move's blocks that arrived, and of those that did not."""
    ok = np.asarray(move.ok)
    return _select(move.keys, ok), _select(move.keys, ~ok)


def _select(keys: Sequence[BlockKey], flags: NDArray[np.bool_]) -> list[BlockKey]:
    return list(compress(keys, flags.tolist()))
