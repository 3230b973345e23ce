"""Blocks on their way between the host and a store that outlives the process.

What a request finds only in the store is fetched to the host while the request waits;
then it is a hit on the host like any other. What is worth keeping is written behind the
host's back. Both end when every worker has reported them; nothing here waits.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import compress, filterfalse
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import key_from_foreign
from jaxkv.scheduling.gate import Gate
from jaxkv.scheduling.protocol import (
    Request,
    StorageBatch,
    StorageMoves,
    StorageReport,
)
from jaxkv.scheduling.request_keys import RequestKeys
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import FullAttention, GroupSpec
from jaxkv.search.tiers import Match, Source, first_tokens, search, source_of
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.host import OffloadingManager
from jaxkv.tiers.key_memory import ReuseFilter
from jaxkv.tiers.storage import StorageTier
from jaxkv.types import NO_BLOCK, BlockKey

Ids = NDArray[np.int64]

# Blocks may wait to be written for as many as are written at a time, times this.
_WAITING_PER_WRITE = 4

# Of how many keys it is remembered that they were asked for: some times those that are
# on the host, as what it has evicted may come back.
_LEAST_REMEMBERED = 1 << 16
_REMEMBERED_PER_BLOCK = 4


@dataclasses.dataclass(eq=False)
class _Batch:
    """Blocks that move together.

    Attributes:
        event: Its number.
        keys: Their keys.
        host_blocks: i64[n]. Where they are, or come, on the host.
        places: i64[n]. Their places in the storage tier.
        oks: bool[n]. Which of them every worker so far has reported as arrived.
        num_reports: Workers that reported it.
        waiters: Requests that wait for it, as keys of a dict, which keeps their order.
        is_stale: Whether the tiers have forgotten it.
    """

    event: int
    keys: list[BlockKey]
    host_blocks: Ids
    places: Ids
    oks: NDArray[np.bool_]
    num_reports: int = 0
    waiters: dict[str, None] = dataclasses.field(default_factory=dict)
    is_stale: bool = False

    @property
    def as_told(self) -> StorageBatch:
        """Say it to the worker."""
        keys = tuple(map(key_from_foreign, self.keys))
        return StorageBatch(self.event, keys, tuple(self.host_blocks.tolist()))


@dataclasses.dataclass(eq=False)
class _Wait:
    """What a request waits for, and holds meanwhile.

    Attributes:
        events: Of the fetches that are not over.
        rows: Host blocks that are pinned until it has asked again, each once for each
            time that it is in the list.
        ends: Where each block ends that it waits for.
        arrived_ends: Of these, the ones that have arrived.
    """

    events: set[int]
    rows: list[int]
    ends: dict[BlockKey, int]
    arrived_ends: set[int] = dataclasses.field(default_factory=set)


class Lack(NamedTuple):
    """What a request lacks on the host of the prefix that the store completes.

    Attributes:
        match: The longest prefix, with the device, the host and the store.
        host_rows: Host blocks that it needs and that are there.
        keys: Keys of the host blocks that only the store has, in the prefix's order.
        end_tokens: Where each of them ends.
    """

    match: Match
    host_rows: list[int]
    keys: list[BlockKey]
    end_tokens: list[int]


class Storage:
    """Fetches of the blocks that requests wait for, and writes of those to keep.

    Args:
        groups: The groups of the model's layers.
        host: The host tier.
        tier: The storage tier.
        rules: What the engine chose.
        gate: Tells whether a fetch is worth its time.
        keys: The requests' keys.
        stats: Where all of it is counted.
        is_private: Tells the keys of blocks that are never written to the store; None
            for none.

    Attributes:
        tier: As given.
        num_fetched_tokens: How many tokens were fetched for each request that has not
            finished, if any were.
        num_lost: Blocks that left for the store so far, and did not get there in time.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: OffloadingManager,
        tier: StorageTier,
        rules: OffloadRules,
        gate: Gate,
        keys: RequestKeys,
        stats: OffloadStats,
        is_private: Callable[[BlockKey], bool] | None = None,
    ) -> None:
        self.tier = tier
        self.num_fetched_tokens: dict[str, int] = {}
        self.num_lost = 0
        self._groups = groups
        self._host = host
        self._rules = rules
        self._gate = gate
        self._keys = keys
        self._stats = stats
        self._is_private = is_private
        # Whether the store is not used any more, and the worker does not know it yet.
        self._is_left = self._must_say_so = False
        self._factor = rules.blocks_per_host_block
        # Neither may hold so much of the host that requests find no room on it.
        share = max(1, host.num_blocks // 8)
        self._most_written = min(rules.max_storage_blocks, share)
        self._most_fetched = min(rules.max_storage_blocks, max(1, host.num_blocks // 2))
        # Where every block is read, a shorter prefix consists of its first ones.
        self._may_cut = all(isinstance(group, FullAttention) for group in groups)
        # Which blocks were asked for again; None where that does not matter.
        self._asked: ReuseFilter | None = None
        if rules.storage_write == "on_reuse":
            most = max(_LEAST_REMEMBERED, _REMEMBERED_PER_BLOCK * host.num_blocks)
            self._asked = ReuseFilter(threshold=2, max_size=most)
        self._fetches: dict[int, _Batch] = {}
        self._fetch_of: dict[BlockKey, _Batch] = {}
        self._waits: dict[str, _Wait] = {}
        # Requests that have been looked up, by how many listed blocks there were then.
        self._looked_up: dict[str, int] = {}
        self._writes: dict[int, _Batch] = {}
        self._to_write: OrderedDict[BlockKey, None] = OrderedDict()
        self._to_fetch: list[_Batch] = []
        self._to_delete: list[BlockKey] = []
        self._num_fetched = 0
        self._num_writing = 0
        # What `_look_at_victims` saw when it last looked.
        self._seen: tuple[int, int, int] | None = None
        self._next_fetch = 0
        self._next_write = 0

    @property
    def has_fetches(self) -> bool:
        """Whether blocks are on their way to the host, or held for a request."""
        return bool(self._fetches or self._waits)

    @property
    def has_writes(self) -> bool:
        """Whether blocks are on their way to the store, or wait to be written."""
        waits = self._to_write or self._to_delete or self._must_say_so
        return bool(self._writes or waits)

    def is_awaited(self, request_id: str) -> bool:
        """Whether a request waits for the store."""
        wait = self._waits.get(request_id)
        return wait is not None and bool(wait.events)

    def hold_up(
        self, pool: DeviceBlockPool, request: Request, num_computed_tokens: int
    ) -> bool:
        """Tell whether a request is to wait for the store; begin a fetch if need be.

        Args:
            pool: The device's blocks.
            request: A request that asks what continues its prefix.
            num_computed_tokens: What it has of it.
        """
        name = request.request_id
        wait = self._waits.get(name)
        if wait is not None:
            return bool(wait.events)
        num_found = self.tier.num_found
        if self._looked_up.get(name) == num_found or not self.tier.num_held_blocks:
            return False
        self._looked_up[name] = num_found
        lack = self._lack(pool, request, num_computed_tokens)
        return lack is not None and self.fetch(name, lack)

    def would_hold_up(
        self,
        pool: DeviceBlockPool,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_computed_tokens: int,
    ) -> bool:
        """Tell whether `hold_up` would have a request wait; nothing changes.

        It does not look whether the host has room, which other requests may take.
        """
        name = request.request_id
        wait = self._waits.get(name)
        if wait is not None:
            return bool(wait.events)
        if self._looked_up.get(name) == self.tier.num_found:
            return False
        lack = self._lack_of(pool, request, keys, num_computed_tokens)
        if lack is None:
            return False
        num = self._most_now(lack)
        return bool(num) and self._is_worth(lack, num, is_preview=True)

    def is_fetching(self, key: BlockKey) -> bool:
        """Whether a block is on its way from the store to the host."""
        return key in self._fetch_of

    def release(self, request_id: str) -> None:
        """Let go of what a request held: it has asked again, or asks no more."""
        wait = self._waits.pop(request_id, None)
        if wait is None:
            return
        for event in wait.events:
            del self._fetches[event].waiters[request_id]
        if wait.rows:
            self._host.unpin(wait.rows)
        if wait.arrived_ends:
            num = len(wait.arrived_ends) * self._factor * self._groups[0].block_size
            self.num_fetched_tokens[request_id] = num

    def forget(self, request_id: str) -> None:
        """Let go of a request that is over, or has its blocks."""
        self.release(request_id)
        self._looked_up.pop(request_id, None)

    def note_asked(self, keys: Sequence[BlockKey]) -> None:
        """Note that a new request asks for blocks, before it uses them."""
        if self._asked is not None:
            self._asked.count(keys)
            is_there = self._host.find(keys) != NO_BLOCK
            self._offer(list(compress(keys, is_there.tolist())))
        self.tier.touch(keys)

    def note_stored(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks have got to the host."""
        if self._rules.storage_write == "through":
            self._offer(keys)
        elif (
            self._asked is not None
        ):  # Some have been asked for before, and were evicted since.
            self._offer(list(compress(keys, self._asked.passes(keys))))

    def issue(self) -> StorageMoves | None:
        """Send out what a step asks of the store; None for nothing."""
        fetches, self._to_fetch = self._to_fetch, []
        if self._rules.storage_write == "on_evict":
            self._look_at_victims()
        writes: list[_Batch] = []
        if self._to_write and self._num_writing < self._most_written:
            written = self._take_writes(self._most_written - self._num_writing)
            writes = [written] if written is not None else []
        deletes, self._to_delete = self._to_delete, []
        is_last, self._must_say_so = self._must_say_so, False
        if not (fetches or writes or deletes or is_last):
            return None
        return StorageMoves(
            tuple(batch.as_told for batch in fetches),
            tuple(batch.as_told for batch in writes),
            tuple(map(key_from_foreign, deletes)),
            is_last,
        )

    def check_reports(self, reports: Sequence[StorageReport]) -> None:
        """Refuse reports of what is not in flight.

        Raises:
            ValueError: If no report of such an event is due.
        """
        for what, batches, events in (
            ("fetch", self._fetches, [e for r in reports for e in r.fetched]),
            ("write", self._writes, [e for r in reports for e in r.written]),
        ):
            counts: dict[int, int] = {}
            for event, oks in events:
                batch = batches.get(event)
                counts[event] = counts.get(event, 0) + 1
                due = self._rules.world_size - batch.num_reports if batch else 0
                if batch is None or counts[event] > due or len(oks) != len(batch.keys):
                    raise ValueError(
                        f"a report of {len(oks)} blocks of {what} {event} of the "
                        f"storage tier is not due; in flight are {list(batches)[:8]}."
                    )

    def report(self, reports: Sequence[StorageReport]) -> None:
        """Note what workers reported, as checked before."""
        for report in reports:
            for event, oks in report.fetched:
                self._count(self._fetches, event, oks, self._end_fetch)
            for event, oks in report.written:
                self._count(self._writes, event, oks, self._end_write)
            if report.found and not self._is_left:
                self.tier.add_found(report.found)

    def reset(self) -> None:
        """Forget all that is known to be in the store, which stays there.

        The host has been cleared. What is on its way from the store must be over before
        its blocks are given to others (`StorageWorker.end_fetches`).
        """
        for batch in (*self._writes.values(), *self._fetches.values()):
            batch.is_stale = True
        for batch in self._to_fetch:  # Nobody will report these.
            self._end_fetch(self._fetches.pop(batch.event))
        self._to_fetch.clear()
        self._fetch_of.clear()
        self._waits.clear()
        self._to_write.clear()
        self._to_delete.clear()
        self._looked_up.clear()
        self.tier.clear()

    def leave(self) -> None:
        """Forget what is in the store, for good: nothing is read or written any more.

        What is on its way ends as it does after `reset`. The host has been cleared, or
        will be before a block of it is used again.
        """
        if self._is_left:
            return
        self._is_left = self._must_say_so = True
        if self.tier.num_held_blocks:
            self.reset()
        self._to_write.clear()

    def _lack(
        self, pool: DeviceBlockPool, request: Request, num_computed_tokens: int
    ) -> Lack | None:
        """Find what only the store has of a request's longest prefix."""
        keys = self._keys.of(request)
        return self._lack_of(pool, request, keys, num_computed_tokens)

    def _lack_of(
        self,
        pool: DeviceBlockPool,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_computed_tokens: int,
    ) -> Lack | None:
        """Likewise, of a request whose keys are known. Nothing changes."""
        device = first_tokens(num_computed_tokens)
        if self._rules.copy_on_device:
            device = source_of(pool)
        tiers = device, self._host, self.tier
        most_tokens = request.num_tokens - 1
        return find_lack(
            self._groups, tiers, keys, most_tokens, num_computed_tokens, self._factor
        )

    def fetch(self, request_id: str, lack: Lack) -> bool:
        """Begin to fetch what a request lacks; tell whether it is to wait.

        Args:
            request_id: The request, which waits for nothing.
            lack: What `find_lack` has just found.
        """
        num = self._most_now(lack)
        if not num or not self._is_worth(lack, num):
            return False
        # So that making room does not evict what the rest continues.
        self._host.pin(lack.host_rows)
        started: _Batch | None = None
        while num:
            new = [key for key in lack.keys[:num] if key not in self._fetch_of]
            answer = self._host.prepare_store(new, filtered=False)
            if answer is not None:
                started = self._start(
                    answer.block_hashes_to_store, answer.store_spec.block_ids
                )
                break
            num = num // 2 if self._may_cut else 0
        of = self._fetch_of
        events = {of[key].event for key in lack.keys[:num] if key in of}
        if not events:
            self._host.unpin(lack.host_rows)
            return False
        if started is not None:
            self._to_fetch.append(started)
        ends = dict(zip(lack.keys[:num], lack.end_tokens[:num], strict=True))
        self._waits[request_id] = _Wait(events, lack.host_rows, ends)
        for event in events:
            self._fetches[event].waiters[request_id] = None
        return True

    def _most_now(self, lack: Lack) -> int:
        """Count how much of what a request lacks may be fetched, from the first on."""
        room = self._most_fetched - self._num_fetched
        for num, key in enumerate(lack.keys):
            room -= key not in self._fetch_of
            if room < 0:
                return num if self._may_cut else 0
        return len(lack.keys)

    def _is_worth(self, lack: Lack, num: int, *, is_preview: bool = False) -> bool:
        """Ask the gate about the first blocks that a request lacks."""
        end = lack.match.num_tokens
        if num < len(lack.keys):
            end = lack.end_tokens[num] - self._factor * self._groups[0].block_size
        start = lack.end_tokens[0] - self._factor * self._groups[0].block_size
        return self._gate.is_worth_fetch(
            num_tokens=max(end - start, 0),
            num_blocks=num * self._factor,
            num_blocks_ahead=self._num_fetched * self._factor,
            is_preview=is_preview,
        )

    def _start(self, keys: list[BlockKey], host_blocks: Ids) -> _Batch | None:
        """Begin a fetch of blocks that have a place on the host."""
        if not keys:
            return None
        places = self.tier.find(keys).astype(np.int64)
        self.tier.pin(places)
        oks = np.ones(len(keys), np.bool_)
        batch = _Batch(self._next_fetch, keys, host_blocks, places, oks)
        self._next_fetch += 1
        self._num_fetched += len(keys)
        self._fetches[batch.event] = batch
        self._fetch_of.update(dict.fromkeys(keys, batch))
        return batch

    def _offer(self, keys: Sequence[BlockKey]) -> None:
        """Take note of blocks that are on the host and worth writing."""
        if self._is_left:
            return
        keys = self._public(keys)
        new = compress(keys, (~self.tier.contains(keys)).tolist())
        most = self._most_written * _WAITING_PER_WRITE
        for key in new:
            if key in self._to_write:
                continue
            if len(self._to_write) >= most:
                self._stats.num_storage_dropped += self._factor
            else:
                self._to_write[key] = None

    def _public(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Leave out blocks that may not be written."""
        if self._is_private is None:
            return keys
        return list(filterfalse(self._is_private, keys))

    def _look_at_victims(self) -> None:
        """Offer what the host will evict next, as much as may be written at a time."""
        host = self._host
        look = host.num_evicted, host.num_held_blocks, self._num_writing
        if look != self._seen:
            self._seen = look
            room = self._most_written - len(self._to_write)
            victims = self._public(host.next_victims(2 * self._most_written))
            self._offer(victims[: max(room, 0)])

    def _take_writes(self, most: int) -> _Batch | None:
        """Hold blocks that leave for the store."""
        keys = [
            self._to_write.popitem(last=False)[0]
            for _ in range(min(most, len(self._to_write)))
        ]
        rows = self._host.find(keys)
        is_there = rows != NO_BLOCK
        self._stats.num_storage_dropped += int((~is_there).sum()) * self._factor
        keys, rows = list(compress(keys, is_there.tolist())), rows[is_there]
        answer = self.tier.prepare_store(keys)
        while answer is None:  # Most of it is being read or written.
            num = len(keys) // 2
            self._stats.num_storage_dropped += (len(keys) - num) * self._factor
            keys = keys[:num]
            answer = self.tier.prepare_store(keys)
        self._to_delete += answer.block_hashes_evicted
        if not answer.block_hashes_to_store:
            return None
        host_blocks = rows[answer.rows].astype(np.int64)
        self._host.pin(host_blocks)
        keys = answer.block_hashes_to_store
        oks = np.ones(len(keys), np.bool_)
        places = answer.store_spec.block_ids
        batch = _Batch(self._next_write, keys, host_blocks, places, oks)
        self._next_write += 1
        self._writes[batch.event] = batch
        self._num_writing += len(keys)
        return batch

    def _count(
        self,
        batches: dict[int, _Batch],
        event: int,
        oks: Sequence[bool],
        end: Callable[[_Batch], None],
    ) -> None:
        """Count a worker's report of a batch, and end it after the last one's."""
        batch = batches[event]
        batch.oks &= np.array(oks, np.bool_)
        batch.num_reports += 1
        if batch.num_reports == self._rules.world_size:
            del batches[event]
            end(batch)

    def _end_fetch(self, batch: _Batch) -> None:
        self._num_fetched -= len(batch.keys)
        if batch.is_stale:
            self._stats.num_storage_failed += len(batch.keys) * self._factor
            return
        for key in batch.keys:
            del self._fetch_of[key]
        arrived = batch.host_blocks[batch.oks]
        keys = list(compress(batch.keys, batch.oks.tolist()))
        lost = list(compress(batch.keys, (~batch.oks).tolist()))
        self._host.publish(arrived, keys)
        self._host.complete_store(lost, False)
        self.tier.unpin(batch.places)
        # Whoever asks next is not to wait for it; a listing may find it again.
        self.tier.discard(lost)
        self._stats.num_storage_loaded += len(arrived) * self._factor
        self._stats.num_storage_failed += len(lost) * self._factor
        for request_id in batch.waiters:
            wait = self._waits[request_id]
            wait.events.discard(batch.event)
            self._host.pin(arrived)
            wait.rows += arrived.tolist()
            wait.arrived_ends.update(wait.ends[key] for key in keys if key in wait.ends)

    def _end_write(self, batch: _Batch) -> None:
        self._num_writing -= len(batch.keys)
        num_lost = int((~batch.oks).sum()) * self._factor
        if batch.is_stale:
            self._stats.num_storage_dropped += len(batch.keys) * self._factor
            return
        self._host.unpin(batch.host_blocks)
        if num_lost:
            self.tier.complete_store(list(compress(batch.keys, batch.oks.tolist())))
            lost = list(compress(batch.keys, (~batch.oks).tolist()))
            self.tier.complete_store(lost, False)
        else:
            self.tier.complete_store(batch.keys)
        self.num_lost += num_lost
        self._stats.num_storage_dropped += num_lost
        self._stats.num_storage_stored += len(batch.keys) * self._factor - num_lost


def find_lack(
    groups: tuple[GroupSpec, ...],
    tiers: tuple[Source, OffloadingManager, StorageTier],
    keys: Sequence[Sequence[BlockKey]],
    max_tokens: int,
    num_computed_tokens: int = 0,
    factor: int = 1,
) -> Lack | None:
    """Find what only the store has of a request's longest prefix. Nothing changes.

    Args:
        groups: The groups of the model's layers.
        tiers: What the device has, the host tier and the storage tier.
        keys: The request's keys, for each group.
        max_tokens: Most tokens that the prefix may have.
        num_computed_tokens: What the request has of it.
        factor: Blocks of the request in a host block.

    Returns:
        What it lacks; None if nothing, or if the store has nothing of it.
    """
    device, host, storage = tiers
    sources = device, source_of(host, factor), source_of(storage, factor)
    match = search(groups, keys, max_tokens, sources)
    if match.num_tokens <= num_computed_tokens:
        return None
    host_rows: list[int] = []
    rows: list[tuple[int, BlockKey]] = []
    for group, (spec, needed, on_device, on_host) in enumerate(
        zip(groups, match.needed, *match.block_ids[:2], strict=True)
    ):
        start = num_computed_tokens // spec.block_size
        missing = np.flatnonzero(needed[start:]) + start
        missing = missing[on_device[missing] == NO_BLOCK]
        is_on_host = on_host[missing] != NO_BLOCK
        host_rows += np.unique(on_host[missing[is_on_host]]).tolist()
        for row in np.unique(missing[~is_on_host] // factor).tolist():
            end = (row + 1) * factor
            rows.append((end * spec.block_size, keys[group][end - 1]))
    if not rows:
        return None
    rows.sort(key=lambda row: row[0])
    return Lack(match, host_rows, [key for _, key in rows], [end for end, _ in rows])
