"""Boundaries: blocks in flight between a tier and the next one down.

Blocks that only the lower tier has are fetched to the upper tier while their request
waits. Then they are ordinary hits, held until the request has device blocks, so that
other requests do not evict them. A prefix of more blocks than may be in flight is
fetched in windows. The lower tier may first be probed for blocks that no tier is known
to have. Blocks worth keeping are written to the lower tier in the background. A move
ends when every worker has reported it; no method blocks.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import compress, filterfalse, islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type
from jaxkv.keys.packed import key_from_foreign
from jaxkv.scheduling.moves import Ledger, Move
from jaxkv.scheduling.protocol import TierBatch, TierMoves, TierProbe, TierReport
from jaxkv.scheduling.rules import OffloadRules, WriteRule, check_lists_victims
from jaxkv.scheduling.stats import TierCounts
from jaxkv.search.groups import FullAttention, GroupSpec
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.key_memory import ReuseFilter
from jaxkv.tiers.storage import StorageTier
from jaxkv.types import NO_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int64]
_TierMove: TypeAlias = Move[Ids]

_MAX_WAITING_PER_WRITE = 4  # Blocks that may be queued, per block in flight.
_MAX_VICTIMS_PER_WRITE = 8  # Next victims that may be written, per block in flight.
# How many keys the reuse filter counts: at least this many, or this many per block of
# the upper tier. Evicted blocks count as well, because they may be stored again.
_MIN_REMEMBERED_KEYS, _REMEMBERED_PER_BLOCK = 1 << 16, 4

# A request without room for its fetch asks again at each lookup. After this many vain
# asks without progress of any holder, the blocks held for requests that stopped asking
# are released. If this makes no room, the request does not fetch.
_MAX_VAIN_ASKS = 8
_OVERDUE_ASKS = 64  # After this many vain asks, a request goes before all others.
_NUM_WINDOWS = 4  # Windows in flight of a prefix that is fetched in windows.
# Without full attention, a missing block changes which blocks a prefix needs.
_MAX_SEARCHES = 16
_NO_IDS = np.empty(0, np.int64)


@dataclasses.dataclass(eq=False)
class _Wait:
    """The fetches that a request waits for, and the blocks that it holds meanwhile."""

    rows: list[int]  # Upper-tier block ids, pinned once per entry.
    ends: dict[BlockKey, int]  # The end, in tokens, of each block that it waits for.
    rest: deque[BlockKey]  # The part of `ends` that later windows fetch.
    is_awaited: bool  # Whether other engines may still be writing some.
    events: set[int] = dataclasses.field(default_factory=set)  # Of fetches in flight.
    arrived_ends: set[int] = dataclasses.field(default_factory=set)
    has_missing: bool = False  # Whether a block has not arrived.
    num_searches: int = 1

    @property
    def is_open(self) -> bool:
        """Whether more blocks may arrive."""
        return bool(self.events or self.rest)


@dataclasses.dataclass(eq=False)
class _Queued:
    """A request that waits for room that other requests hold."""

    num_released: int = -1  # `Boundary._num_released` at `first_ask`.
    first_ask: int = 0  # The number of its first ask since the last release of blocks.
    num_asks: int = 0  # Vain asks since then while no fetch was in flight.
    num_vain: int = 0  # Vain asks in all.


@dataclasses.dataclass(eq=False)
class Probing:
    """The probes of the lower tier on behalf of a request."""

    events: set[int] = dataclasses.field(default_factory=set)  # Probes in flight.
    num: int = 0  # Probes sent so far.
    absent: set[BlockKey] = dataclasses.field(default_factory=set)  # Reported missing.


class TierBelow(NamedTuple):
    """A tier below the host, and which blocks are written to it."""

    tier: BlockIndex
    # Which blocks of the tier above are written to it: all ("through"), those that are
    # requested a second time ("on_reuse"), or those that the tier above is about to
    # evict ("on_evict").
    write: WriteRule = "through"
    # Maximum host blocks in flight per direction; less if the tier above is small.
    max_blocks: int = 128
    # Seconds that a request waits for a probe of blocks that are not in the tier's
    # index, but may have been written by other engines; 0 for no probes.
    probe_s: float = 0.0
    has_other_writers: bool = False  # Whether other engines may write to it.


class Fetch(NamedTuple):
    """The blocks that a request's longest prefix needs from the lower tier."""

    num_tokens: int  # Length of the longest prefix, with the lower tier's blocks.
    upper_rows: list[int]  # Upper-tier ids of the prefix's blocks that are there.
    keys: list[BlockKey]  # The prefix's blocks that only the lower tier has, in order.
    end_tokens: list[int]  # For each key, the end of its block in tokens.
    row_tokens: int  # Tokens per block.
    is_awaited: bool = False  # Whether other engines may still be writing some.


class Boundary:
    """Fetches, probes and writes between a tier and the next one down.

    `number` is 0 below the host. `is_private` returns True for keys that must never be
    written to the lower tier; `on_arrival` gets the keys that have arrived there.
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
        check_lists_victims(below.write, upper.can_list_victims)
        self.groups = groups
        self.upper = upper
        self.number = number
        self.counts = TierCounts()
        self.bytes_per_s = 0.0  # The rate of fetches; 0 if unknown.
        self.latencies_s = 0.0, 0.0  # Mean seconds of reads and probes.
        self.tier = tier = below.tier
        self.name = tier.medium.lower()  # In `Plan.deferral` and explanations.
        self.num_fetched_tokens: dict[str, int] = {}  # Per unfinished request.
        self._write = below.write
        self._is_private = is_private
        self._on_arrival = on_arrival
        # Whether the tier is disabled, and the worker must still be notified of it.
        self._is_disabled = self._must_send_last = False
        self.factor = rules.blocks_per_host_block
        # Limits that leave requests enough blocks of the upper tier.
        max_blocks, num_blocks = below.max_blocks, upper.num_blocks
        self._max_written = min(max_blocks, max(1, num_blocks // 8))
        self.max_fetched = min(max_blocks, max(1, num_blocks // 2))
        self._window = max(1, self.max_fetched // _NUM_WINDOWS)
        # Maximum blocks held for requests without device blocks; one may exceed it.
        self.max_held = max(1, num_blocks // 2)
        # Whether a fetch may be truncated: with full attention, the first blocks of a
        # prefix are a shorter prefix.
        self.can_truncate = all(isinstance(group, FullAttention) for group in groups)
        # Passes keys that were requested twice; None unless the write rule needs it.
        self._reuse_filter: ReuseFilter | None = None
        if below.write == "on_reuse":
            max_keys = max(_MIN_REMEMBERED_KEYS, _REMEMBERED_PER_BLOCK * num_blocks)
            self._reuse_filter = ReuseFilter(threshold=2, max_size=max_keys)
        num = rules.world_size
        self.fetches: Ledger[_TierMove] = Ledger(f"fetch from {self.name}", num)
        self._writes: Ledger[_TierMove] = Ledger(f"write to {self.name}", num)
        self.probes: Ledger[_TierMove] = Ledger(f"probe of {self.name}", num)
        self.fetch_of: dict[BlockKey, _TierMove] = {}
        self.waits: dict[str, _Wait] = {}
        # Blocks of the upper tier that are held for requests after their wait.
        self.holds: dict[str, list[int]] = {}
        # How many entries of `waits` and `holds` have each block of the upper tier.
        self._num_holders: dict[int, int] = {}
        # Lookups ("asks") so far, and the number of each request's last one.
        self._num_asks = 0
        self._last_ask: dict[str, int] = {}
        self._queued: dict[str, _Queued] = {}
        self._overdue: dict[str, None] = {}  # Overdue requests in `_queued`, in order.
        self._num_released = 0  # How often blocks held for a request were released.
        self._last_fetch_arrived = True  # Whether the last fetch brought any block.
        self._num_down = 0  # Workers that do not reach the lower tier.
        # `BlockIndex.num_found` when each request was last looked up.
        self.looked_up: dict[str, int] = {}
        # Without full attention, the length of a prefix decides which blocks are read:
        # a second probe may be needed. Both share `probe_s`.
        self.max_probes = 1 if self.can_truncate else 2
        self.probe_s = below.probe_s / self.max_probes
        self.has_other_writers = below.has_other_writers
        self.probing: dict[str, Probing] = {}
        self._probe_of: dict[BlockKey, _TierMove] = {}
        self._to_probe: list[TierProbe] = []
        self._to_write: OrderedDict[BlockKey, None] = OrderedDict()
        self._to_fetch: list[_TierMove] = []
        self._to_delete: list[BlockKey] = []
        # Events of fetches whose blocks other engines may still be writing.
        self._awaited: set[int] = set()
        # The state of the upper tier at the last `_offer_victims`.
        self._seen: tuple[int, int, int] | None = None

    @property
    def is_down(self) -> bool:
        """Whether nothing is asked of the lower tier, which a worker cannot reach."""
        return self._num_down > 0

    @property
    def has_fetches(self) -> bool:
        """Whether fetches or probes are in flight, or requests wait for them."""
        return bool(self.fetches.moves or self.waits or self.probes.moves)

    @property
    def has_writes(self) -> bool:
        """Whether writes are in flight, or writes or deletions are unsent."""
        unsent = self._to_write or self._to_delete or self._must_send_last
        return bool(self._writes.moves or unsent)

    def may_have(self, request_id: str, keys: Sequence[BlockKey]) -> NDArray[np.int32]:
        """Return 0 for each block that the lower tier may have, else NO_BLOCK: i32[n].

        The tier has no private blocks, and none that the request's probes missed.
        """
        ids = np.zeros(len(keys), np.int32)
        probing = self.probing.get(request_id)
        if probing and probing.absent:
            ids[[key in probing.absent for key in keys]] = NO_BLOCK
        if self._is_private is not None:
            ids[[self._is_private(key) for key in keys]] = NO_BLOCK
        return ids

    def limit_held(self, num_blocks: int) -> None:
        """Hold at most `num_blocks`, the device's capacity in host blocks."""
        self.max_held = min(self.max_held, max(1, num_blocks))

    def has_room(self, request_id: str, fetch: Fetch) -> bool:
        """Whether a fetch fits next to blocks in flight and held for other requests.

        An overdue request goes first: otherwise a large fetch would never find room. A
        queued request finds none if the last fetch brought nothing (see `may_queue`).
        """
        if request_id in self._queued and not self._last_fetch_arrived:
            return False
        num_new = self._count_new(fetch.keys)
        num_fetched = self.fetches.num_blocks
        if not num_new:
            return True  # All blocks are in flight.
        if next(iter(self._overdue), request_id) != request_id:
            return False
        num_first = num_new if num_new <= self.max_fetched else self._window
        if num_fetched and num_fetched + num_first > self.max_fetched:
            return False
        num_held = len(self._num_holders) + num_fetched
        num_held += sum(len(wait.rest) for wait in self.waits.values())
        num_new += sum(row not in self._num_holders for row in fetch.upper_rows)
        return not num_held or num_held + num_new <= self.max_held

    def may_search_again(self, request_id: str) -> bool:
        """Whether a request whose wait has ended may fetch another prefix's blocks."""
        wait = self.waits[request_id]
        may_search = wait.has_missing and wait.num_searches < _MAX_SEARCHES
        return may_search and not (self.can_truncate or self.is_down)

    def num_left(self, request_id: str) -> tuple[int, int]:
        """Return how many blocks a waiting request lacks, and the tokens they span."""
        ends = self.waits[request_id].ends
        if not ends:
            return 0, 0
        num_tokens = next(reversed(ends.values())) - next(iter(ends.values()))
        return len(ends), num_tokens + self.factor * self.groups[0].block_size

    def may_queue(self, request_id: str) -> bool:
        """Whether a request without room for its fetch may wait for room.

        It may not if it holds blocks itself, if the last fetch brought nothing, or
        after `_MAX_VAIN_ASKS` asks without progress of any holder.
        """
        if request_id in self.holds or not self._last_fetch_arrived:
            return False
        queued = self._queued.get(request_id, _Queued())
        return (
            bool(self.fetches.moves)
            or queued.num_released != self._num_released
            or queued.num_asks < _MAX_VAIN_ASKS
        )

    def queue(self, request_id: str) -> None:
        """Queue a request for room, or count its next vain ask; see `may_queue`."""
        self._record_ask(request_id)
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
                has_ended = wait is None or not wait.is_open
                if has_ended and self._last_ask[name] < queued.first_ask:
                    self.forget(name)

    def hold(self, request_id: str) -> None:
        """End a request's wait at its next lookup, and keep its fetched blocks held."""
        self._record_ask(request_id)
        rows = self._end_wait(request_id)
        if rows:
            self.holds.setdefault(request_id, []).extend(rows)

    def decline(self, request_id: str) -> None:
        """Record that a request declines its offer and stays in the engine's queue."""
        self.hold(request_id)
        self.looked_up.pop(request_id, None)
        self.probing.pop(request_id, None)

    def release(self, request_id: str) -> None:
        """Release the blocks held for a request."""
        rows = self.holds.pop(request_id, []) + self._end_wait(request_id)
        if rows:
            self._unpin(rows)
            self._num_released += 1

    def forget(self, request_id: str) -> None:
        """Forget a request that has finished or has device blocks."""
        self.release(request_id)
        self._leave_queue(request_id)
        for by_request in (self.looked_up, self.probing, self._last_ask):
            by_request.pop(request_id, None)

    def finish(self, request_id: str) -> None:
        """Forget a request that has finished."""
        self.forget(request_id)
        self.num_fetched_tokens.pop(request_id, None)

    def _leave_queue(self, request_id: str) -> None:
        self._queued.pop(request_id, None)
        self._overdue.pop(request_id, None)

    def _record_ask(self, request_id: str) -> None:
        self._num_asks += 1
        self._last_ask[request_id] = self._num_asks

    def _end_wait(self, request_id: str) -> list[int]:
        """End a request's waits, if any; return the blocks that it holds."""
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
            num_tokens = len(wait.arrived_ends) * self.factor
            num_tokens *= self.groups[0].block_size
            self.num_fetched_tokens[request_id] = num_tokens
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

    def record_asked(self, keys: Sequence[BlockKey]) -> None:
        """Record which blocks a new request looks up, before it touches them."""
        if self._reuse_filter is not None:
            self._reuse_filter.count(keys)
            self._offer(_select(keys, self.upper.find(keys) != NO_BLOCK))
        self.tier.touch(keys)

    def record_stored(self, keys: Sequence[BlockKey]) -> None:
        """Offer blocks that have arrived in the upper tier, by the write rule."""
        self._seen = None  # They may be among the next victims.
        if self._write == "through":
            self._offer(keys)
        elif self._reuse_filter is not None:
            # Some blocks were requested before they were evicted and stored again.
            self._offer(list(compress(keys, self._reuse_filter.passes(keys))))

    def issue(self) -> TierMoves | None:
        """Return the moves and probes to start in this step; None for none."""
        fetches, self._to_fetch = self._to_fetch, []
        probes, self._to_probe = self._to_probe, []
        if self._write == "on_evict" and not self.is_down:
            self._offer_victims()
        writes = self._begin_writes()
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
        """Raise ValueError if a report for this tier names a move not in flight."""
        reports = [report for report in reports if report.tier == self.number]
        self.fetches.check([end for report in reports for end in report.fetched])
        self._writes.check([end for report in reports for end in report.written])
        self.probes.check([end for report in reports for end in report.probed])

    def report(self, reports: Sequence[TierReport]) -> None:
        """Apply the checked reports for this tier."""
        for report in reports:
            if report.tier != self.number:
                continue
            self._record_down(report.num_down)
            self.latencies_s = report.latencies_s or self.latencies_s
            for move in self.fetches.report(report.fetched):
                self._end_fetch(move)
            if report.fetched:
                for request_id, wait in self.waits.items():
                    self._extend(request_id, wait, self._window)
            for move in self._writes.report(report.written):
                self._end_write(move)
            for move in self.probes.report(report.probed):
                self._end_probe(move)
            if not self._is_disabled:
                listing = report.found, report.gone, report.listed, report.bound
                self._to_delete += self.tier.record_listing(*listing)
                if report.num_full:
                    self._to_delete += self.tier.record_full(report.num_full)

    def _record_down(self, num_down: int) -> None:
        """Count a worker that no longer reaches the lower tier, or does again."""
        self._num_down += num_down
        if num_down > 0:
            for wait in self.waits.values():
                wait.rest.clear()
            self.counts.dropped_failed += len(self._to_write) * self.factor
            self._to_write.clear()
        elif num_down < 0:
            self.looked_up.clear()
            self._last_fetch_arrived = True

    def reset(self) -> None:
        """Forget the lower tier's blocks, after the upper tier has been cleared."""
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
            *(self.probing, self._probe_of, self.fetch_of),
            *(self.waits, self.holds, self._num_holders, self.looked_up),
            *(self._queued, self._overdue, self.tier),
        ):
            content.clear()
        self._last_fetch_arrived = True

    def disable(self) -> None:
        """Stop using the lower tier for good, before the upper tier is cleared."""
        if self._is_disabled:
            return
        self._is_disabled = self._must_send_last = True
        self.probe_s = 0.0
        self.has_other_writers = False
        if self.tier.num_held_blocks or self.has_fetches:
            self.reset()
        self._to_write.clear()
        self._to_delete.clear()

    def fetch(self, request_id: str, fetch: Fetch) -> bool:
        """Begin a planned fetch, the request's only one; return whether it waits."""
        wait = _Wait(
            fetch.upper_rows,
            dict(zip(fetch.keys, fetch.end_tokens, strict=True)),
            deque(fetch.keys),
            fetch.is_awaited,
        )
        ended = self.waits.get(request_id)
        if ended is not None:
            held = set(ended.rows)
            wait.rows = [row for row in fetch.upper_rows if row not in held]
            wait.arrived_ends = ended.arrived_ends
            wait.num_searches = ended.num_searches + 1
        self._pin(wait.rows)  # Making room must not evict the prefix's blocks.
        if ended is not None:
            wait.rows += ended.rows
        self.waits[request_id] = wait
        self._extend(request_id, wait, self._first_size(fetch))
        if not wait.is_open:
            if ended is None:
                self._unpin(self.waits.pop(request_id).rows)
            return False
        self._leave_queue(request_id)
        self._record_ask(request_id)
        return True

    def _first_size(self, fetch: Fetch) -> int:
        """Return the blocks of a prefix's first fetch: all of them if they fit."""
        if self._count_new(fetch.keys) <= self.max_fetched:
            return len(fetch.keys)
        return self.max_fetched if fetch.is_awaited else self._window

    def _extend(self, request_id: str, wait: _Wait, size: int) -> None:
        """Start fetches of at most `size` blocks of a wait's rest, if there is room."""
        if wait.is_awaited:
            size = max(size, self.max_fetched)  # One at a time, which waits as a whole.
        while wait.rest and self._has_window(wait, list(islice(wait.rest, size))):
            keys = [wait.rest.popleft() for _ in range(min(size, len(wait.rest)))]
            keys = self._skip_known(wait, keys)
            num = self._start_fetch(request_id, wait, keys)
            wait.rest.extendleft(reversed(keys[num:]))
            if keys and not num:
                if not wait.events:  # No event will make room.
                    wait.rest.clear()
                return

    def _has_window(self, wait: _Wait, keys: Sequence[BlockKey]) -> bool:
        """Whether the next window of a wait fits next to other blocks in flight."""
        num_fetched, num_new = self.fetches.num_blocks, self._count_new(keys)
        moves = self.fetches.moves
        num_own = sum(len(moves[event].keys) for event in wait.events)
        if num_own and self._queued and num_own + num_new > self.max_fetched // 2:
            return False  # Other requests are about to begin.
        return not num_fetched or num_fetched + num_new <= self.max_fetched

    def _skip_known(self, wait: _Wait, keys: list[BlockKey]) -> list[BlockKey]:
        """Return the keys to fetch: a tier may have changed since the search."""
        rows = self.upper.find(keys)
        is_resident = rows != NO_BLOCK
        if is_resident.any():
            arrived = rows[is_resident].tolist()
            self._pin(arrived)
            wait.rows += arrived
            for key in _select(keys, is_resident):
                del wait.ends[key]
            keys = _select(keys, ~is_resident)
        if wait.is_awaited:
            return keys
        is_lost = ~self.tier.contains(keys)
        is_lost[[key in self.fetch_of for key in keys]] = False
        if is_lost.any():
            self._record_missing(wait, _select(keys, is_lost))
            keys = keys[: int(is_lost.argmax())]
        return keys

    def _record_missing(self, wait: _Wait, keys: Sequence[BlockKey]) -> None:
        """Record blocks that do not arrive: blocks after them are of no use."""
        missing = [key for key in keys if wait.ends.pop(key, None) is not None]
        if missing:
            wait.has_missing = True
            wait.rest.clear()

    def _start_fetch(
        self, request_id: str, wait: _Wait, keys: Sequence[BlockKey]
    ) -> int:
        """Fetch the first keys that the upper tier has room for; return how many."""
        expected: list[BlockKey] = []
        if wait.is_awaited:
            expected = _select(keys, ~self.tier.contains(keys))
            if not self.tier.has_room(keys):
                return 0
            self.tier.record_resident(keys)
        placed = None
        for num in self._fetch_sizes(len(keys)):
            placed = self.upper.place(self._not_in_flight(keys[:num]), filtered=False)
            if placed is not None:
                break
        else:
            num = 0
        if placed is not None and placed.keys:
            new = list(placed.keys)
            sources = self.tier.find(new).astype(np.int64)
            self.tier.pin(sources)
            move = Move(new, sources, placed.block_ids)
            self.fetches.issue([move])
            self.fetch_of.update(dict.fromkeys(new, move))
            self._to_fetch.append(move)
            if wait.is_awaited:
                self._awaited.add(move.event)
        if expected:
            awaited = set(keys[:num])
            self.tier.discard([key for key in expected if key not in awaited])
        fetch_of = self.fetch_of
        events = {fetch_of[key].event for key in keys[:num] if key in fetch_of}
        wait.events |= events
        for event in events:
            self.fetches.moves[event].waiters[request_id] = None
        return num

    def probe(
        self, request_id: str, runs: Sequence[Sequence[BlockKey]], wait_s: float
    ) -> None:
        """Probe the tier for missing blocks of a request, which waits `wait_s` for it.

        A run has the keys of consecutive blocks. No key has two probes in flight.
        """
        probing = self.probing.setdefault(request_id, Probing())
        probing.num += 1
        unprobed = [[key for key in run if key not in self._probe_of] for run in runs]
        new = [run for run in unprobed if run]
        if new:
            keys = [key for run in new for key in run]
            move: _TierMove = Move(keys, _NO_IDS, _NO_IDS)
            event = self.probes.issue([move])
            self._probe_of.update(dict.fromkeys(keys, move))
            new_runs = tuple(tuple(map(key_from_foreign, run)) for run in new)
            self._to_probe.append(TierProbe(event, new_runs, wait_s))
        probing.events = {self._probe_of[key].event for run in runs for key in run}
        for event in probing.events:
            self.probes.moves[event].waiters[request_id] = None

    def would_fetch(self, fetch: Fetch) -> bool:
        """Return what `fetch` would return, without changes."""
        size = self._first_size(fetch)
        if fetch.is_awaited and not self.tier.has_room(fetch.keys[:size]):
            return False
        for start in range(0, len(fetch.keys), size):
            window = fetch.keys[start : start + size]
            if not self._is_there(window):
                break  # Blocks before it have arrived, or are being stored.
        else:
            return False
        for num in self._fetch_sizes(len(window)):
            if self.upper.has_room(self._not_in_flight(window[:num]), fetch.upper_rows):
                return not self._is_there(window[:num])
        return False

    def _is_there(self, keys: Sequence[BlockKey]) -> bool:
        """Whether no block has to be fetched, or is being fetched."""
        is_fetching = any(key in self.fetch_of for key in keys)
        return not is_fetching and bool(self.upper.contains(keys).all())

    def _fetch_sizes(self, num: int) -> Iterator[int]:
        """Yield the sizes to try: `num` blocks, then half and so on if truncatable."""
        while num:
            yield num
            num = num // 2 if self.can_truncate else 0

    def _not_in_flight(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return which keys of a fetch are not in flight."""
        return [key for key in keys if key not in self.fetch_of]

    def _count_new(self, keys: Sequence[BlockKey]) -> int:
        return sum(key not in self.fetch_of for key in keys)

    def _offer(self, keys: Sequence[BlockKey]) -> None:
        """Queue blocks of the upper tier to be written, except private ones."""
        if self._is_disabled:
            return
        keys = self._public(keys)
        max_waiting = self._max_written * _MAX_WAITING_PER_WRITE
        for key in _select(keys, ~self.tier.contains(keys)):
            if key in self._to_write:
                continue
            if self.is_down:
                self.counts.dropped_failed += self.factor
            elif len(self._to_write) >= max_waiting:
                self.counts.dropped_slow += self.factor
            else:
                self._to_write[key] = None

    def _public(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Return the keys that are not private."""
        if self._is_private is None:
            return keys
        return list(filterfalse(self._is_private, keys))

    def _offer_victims(self) -> None:
        """Offer the upper tier's next victims, if they may have changed."""
        upper = self.upper
        state = upper.num_evicted, upper.num_held_blocks, self._writes.num_blocks
        if state != self._seen:
            self._seen = state
            room = self._max_written - len(self._to_write)
            num = min(_MAX_VICTIMS_PER_WRITE * self._max_written, upper.num_blocks // 2)
            victims = self._public(upper.next_victims(num))
            new = _select(victims, ~self.tier.contains(victims))
            # The tail of a prefix is evicted first, and is worth nothing without its
            # head.
            self._offer(new[::-1][: max(room, 0)])

    def _begin_writes(self) -> list[_TierMove]:
        """Begin one write of the queued blocks that are still resident."""
        num = min(self._max_written - self._writes.num_blocks, len(self._to_write))
        if num <= 0:
            return []
        keys = [self._to_write.popitem(last=False)[0] for _ in range(num)]
        rows = self.upper.find(keys)
        is_resident = rows != NO_BLOCK
        self.counts.dropped_evicted += int((~is_resident).sum()) * self.factor
        keys, rows = _select(keys, is_resident), rows[is_resident]
        while (placed := self.tier.place(keys)) is None:  # Too many are in flight.
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
        rows, self._last_fetch_arrived = arrived.tolist(), bool(arrived.size)
        keys, missing = _split(move)
        self.upper.publish(arrived, keys)
        self.upper.complete_store(missing, False)
        self.tier.unpin(move.sources)
        if is_awaited or not self.is_down:
            # The next request must not wait for these; a listing may find them again.
            self.tier.discard(missing)
        self.counts.loaded += len(arrived) * self.factor
        self.counts.failed += len(missing) * self.factor
        for request_id in move.waiters:
            wait = self.waits[request_id]
            wait.events.discard(move.event)
            self._pin(rows)
            wait.rows += rows
            ends = [wait.ends.pop(key) for key in keys if key in wait.ends]
            wait.arrived_ends.update(ends)
            self._record_missing(wait, missing)
            if is_awaited:  # A request waits only once.
                self.probing.setdefault(request_id, Probing()).absent.update(missing)

    def _end_probe(self, move: _TierMove) -> None:
        if move.is_stale:
            return
        for key in move.keys:
            del self._probe_of[key]
        resident, absent = _split(move)
        self.tier.record_resident(resident)
        self.counts.found += len(resident) * self.factor
        for request_id in move.waiters:
            probing = self.probing[request_id]
            probing.events.discard(move.event)
            probing.absent.update(absent)

    def _end_write(self, move: _TierMove) -> None:
        if move.is_stale:
            self.counts.dropped_reset += len(move.keys) * self.factor
            return
        self.upper.unpin(move.sources)
        self._seen = None  # There is room for more.
        arrived, missing = _split(move)
        self.tier.complete_store(arrived)
        if missing:
            self.tier.complete_store(missing, False)
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
    """Return the boundaries below the host, the nearest first, the store's last."""
    check_type(Sequence, "a list of TierBelow", tiers_below=tiers_below)
    for below in tiers_below:
        check_type(TierBelow, "a list of TierBelow, not of others", tiers_below=below)
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
            on_arrival=boundaries[0].record_stored if boundaries else None,
            number=number,
        )
        boundaries.insert(0, boundary)
    return tuple(boundaries)


def check_reports(
    boundaries: Sequence[Boundary], reports: Sequence[TierReport]
) -> None:
    """Raise ValueError for a report of an unknown tier, or a move not in flight."""
    for report in reports:
        if not 0 <= report.tier < len(boundaries):
            raise ValueError(
                f"a worker reported tier {report.tier} below the host, but the "
                f"scheduler has {len(boundaries)} such tiers: pass it "
                "num_storage_blocks or tiers_below."
            )
    if reports:
        for boundary in boundaries:
            boundary.check(reports)


def _as_batch(
    move: _TierMove, upper: Ids, lower: Ids, is_awaited: bool = False
) -> TierBatch:
    """Return a move in the form that workers get."""
    keys = tuple(map(key_from_foreign, move.keys))
    ids = tuple(upper.tolist()), tuple(lower.tolist())
    return TierBatch(move.event, keys, *ids, is_awaited)


def _split(move: _TierMove) -> tuple[list[BlockKey], list[BlockKey]]:
    """Return the keys of a move that arrived, and those that are missing."""
    ok = np.asarray(move.ok)
    return _select(move.keys, ok), _select(move.keys, ~ok)


def _select(keys: Sequence[BlockKey], flags: NDArray[np.bool_]) -> list[BlockKey]:
    return list(compress(keys, flags.tolist()))
