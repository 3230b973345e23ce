"""Moves blocks between the host and a store, in the background."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_seconds
from jaxkv.scheduling.checks import check_engine
from jaxkv.scheduling.protocol import TierBatch, TierMoves, TierProbe, TierReport
from jaxkv.scheduling.stats import DELAY_BUCKETS, Histogram
from jaxkv.transfer import AnyEngine, host_rows
from jaxkv.transfer.host_bytes import HostRead
from jaxkv.transfer.multi_pool import JointRead, JointWrite
from jaxkv.transfer.storage import Completion, ObjectFormat, StorageIO, open_store
from jaxkv.transfer.storage.buffers import Buffers
from jaxkv.transfer.storage.census import Bound
from jaxkv.transfer.storage.store import StoreError, attempt
from jaxkv.transfer.storage.workers import DaemonThread
from jaxkv.transfer.tickets import HostWrite
from jaxkv.types import BlockKey

_PAUSE_S = 1e-3  # Between polls of the store in blocking calls.
_MIN_QUEUE_BYTES = 256 << 20
_MAX_KEPT_BYTES = 64 << 20
_BYTES_PER_CALL = 1 << 20  # Copied before one call that writes them to the store.
_KEYS_PER_REPORT = 2048  # Of a listing; the scheduler's index takes 1 us per key.
_ABSENT_S = 0.5  # A missing or refused block is not probed for again for this long.
# No probe is sent while this many runs have been reported without an answer.
_MAX_UNANSWERED = 16
# Blocks that another engine may still be writing are read again after a pause, which
# doubles from the minimum to the maximum until one of them arrives.
_MIN_RETRY_S, _MAX_RETRY_S = 0.005, 0.08
_RELIST_S = 60.0  # Until a failed listing is retried if the store is listed only once.
_NO_REPORT = TierReport()


@dataclasses.dataclass(eq=False)
class _Task:
    """The store calls of a fetch, a write or a probe."""

    deadline_s: float
    # By ticket of each unanswered call: the index of its block, or its run in a probe.
    tickets: dict[int, int]


@dataclasses.dataclass(eq=False)
class _Fetch(_Task):
    """Blocks in flight to the host."""

    batch: TierBatch
    await_until_s: float  # When to stop waiting for missing blocks.
    payloads: dict[int, NDArray[np.uint8]]  # Bytes of the blocks read, by index.
    missing: list[int]  # Indices of blocks that another engine may still write.
    retry_s: float = 0.0  # When these blocks are read again.
    pause_s: float = _MIN_RETRY_S  # The pause before the next retry.
    # The write to the host's memory; None until all reads have ended.
    write: HostWrite | JointWrite | None = None


@dataclasses.dataclass(eq=False)
class _Write(_Task):
    """Blocks in flight to the store."""

    batch: TierBatch
    oks: list[bool]  # Whether each block has been written.
    # The ticket of each block, None if the queue was full. The copying thread appends.
    block_tickets: list[int | None]
    is_copied: bool = False  # Whether `block_tickets` is complete and in `tickets`.


@dataclasses.dataclass(eq=False)
class _Probe(_Task):
    """A query of the store: how many leading blocks of each run of keys it has."""

    request: TierProbe
    sent: list[Sequence[BlockKey]]  # The leading keys of each run that were sent.
    nums_found: list[int]  # Leading blocks of each run that the store has.
    has_failed: bool = False  # The store has failed, or owes too many answers.

    @property
    def outcome(self) -> str:
        if any(self.nums_found):
            return "found"
        if self.has_failed:
            return "failed"
        return "late" if self.tickets else "missing"


def open_storage(
    engine: AnyEngine,
    url: str,
    *,
    namespace: bytes = b"",
    secret: str | None = None,
    shard: int = 0,
    num_shards: int = 1,
    deadline_s: float = 5.0,
    await_s: float = 1.0,
    list_every_s: float | None = 60.0,
    max_blocks: int = 128,
    clock: Callable[[], float] = time.monotonic,
) -> StorageWorker:
    """Open a store for the host blocks of an engine.

    `url` is checked by `jaxkv.transfer.storage.open_store`. `namespace` identifies
    what determines a block's bytes, like `Namespace`: blocks of other namespaces are
    neither listed nor read. `secret` protects objects against others who can write to
    the store. This worker moves `shard` of each block. The queues have room for
    `max_blocks` per direction, as in `OffloadRules.max_storage_blocks`. `StorageWorker`
    explains the times; a store that cannot list is never listed. ValueError if an
    argument is wrong, ImportError if an extra is missing, StoreError if it fails.
    """
    check_engine(engine, "host_bytes_description")
    objects = ObjectFormat(
        namespace,
        engine.host_bytes_description,
        engine.host_payload_bytes,
        shard=shard,
        num_shards=num_shards,
        secret=secret,
    )
    # The queues must hold everything that the scheduler may have in flight.
    num_bytes = max(_MIN_QUEUE_BYTES, max_blocks * objects.object_bytes)
    storage_io = StorageIO(
        open_store(url),
        objects,
        write_bytes=num_bytes,
        read_bytes=num_bytes,
        clock=clock,
    )
    return StorageWorker(
        engine,
        storage_io,
        deadline_s=deadline_s,
        await_s=await_s,
        list_every_s=list_every_s if storage_io.can_list else 0.0,
        clock=clock,
    )


class StorageWorker:
    """Moves the blocks that `OffloadScheduler` plans, and lists the store.

    A probe is reported when the store has answered, or at its deadline with the blocks
    found by then. Blocks in a later answer are reported like listed blocks, except with
    several processes, because each probes only for its own shard.

    Only `wait` blocks. The worker is used on the engine's thread. One thread copies
    between host blocks and buffers; threads of `StorageIO` do the I/O.

    A fetch or a write is abandoned after `deadline_s`; the blocks that a fetch lacks
    are recomputed. A fetch waits up to `await_s` for each next block that another
    engine is writing. A new listing begins `list_every_s` after the previous one ends,
    to find blocks of other engines; None lists the store once, 0 never. `storage_io`
    must have the same `clock`.
    """

    def __init__(
        self,
        engine: AnyEngine,
        storage_io: StorageIO,
        *,
        deadline_s: float = 5.0,
        await_s: float = 1.0,
        list_every_s: float | None = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_seconds(deadline_s=deadline_s, await_s=await_s)
        if list_every_s is not None and not list_every_s >= 0:
            raise ValueError(f"{list_every_s=} must be at least 0, or None.")
        if storage_io.objects.payload_bytes != engine.host_payload_bytes:
            raise ValueError(
                f"storage_io has payloads of {storage_io.objects.payload_bytes} bytes; "
                f"they must be host blocks of {engine.host_payload_bytes} bytes."
            )
        host_rows.prepare()
        self.storage_io = storage_io
        self.deadline_s = deadline_s
        # Whether the first listing has ended and its keys are all reported, or no
        # listing is needed. Only the first of several processes lists.
        self.is_listed = False
        kinds = "read", "write", "probe"
        # By kind of call: seconds until the store answered.
        self.latencies = {kind: Histogram(DELAY_BUCKETS) for kind in kinds}
        self._means_s = {"read": 0.0, "probe": 0.0}  # Moving ones of `latencies`.
        # Probes by outcome: "found" if the store has any of the blocks.
        self.num_probes = dict.fromkeys(("failed", "found", "late", "missing"), 0)
        # Max blocks in the store by this engine's settings. Set before first `advance`.
        self.bound: Bound | None = None
        self._engine, self._clock = engine, clock
        self._await_s, self._list_every_s = await_s, list_every_s
        self._copies = DaemonThread("jaxkv storage copy")
        self._buffers = Buffers(_MAX_KEPT_BYTES)
        # Writes whose bytes are copied; the copying thread appends.
        self._copied: deque[_Write] = deque()
        # By event: tasks that are not reported yet, the oldest first.
        self._fetches: dict[int, _Fetch] = {}
        self._writes: dict[int, _Write] = {}
        self._probes: dict[int, _Probe] = {}
        self._num_unanswered = 0  # Runs of probes that were reported without an answer.
        self._task_of: dict[int, _Task] = {}  # By ticket.
        # By ticket: calls of a write that completed before `_add_write`.
        self._early: dict[int, Completion] = {}
        # By field of a report: moves that have ended since the last report.
        self._ended: defaultdict[str, list[tuple[int, tuple[bool, ...]]]]
        self._ended = defaultdict(list)
        self._num_full = 0  # Writes since the last report that found the store full.
        self._is_down = False  # Whether the last report said so.
        self._num_nodes_down = 0  # At the last report.
        # Blocks not to probe for, and until when; the earliest time first.
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        self._listed_keys: list[BlockKey] = []  # Not reported yet.
        # The end of a listing, which is reported after all of its keys.
        self._listed: bool | None = None
        self._bound: tuple[int, int] | None = None
        self._deleted_keys: list[BlockKey] = []
        # The shards listed so far of blocks with shards missing.
        self._shards: dict[BlockKey, set[int]] = {}
        self._lists = storage_io.objects.shard == 0
        self._next_list_s = -math.inf
        self._is_listing, self._has_listed = False, list_every_s == 0
        self._is_whole = True  # Whether the last listing has ended without a failure.
        if list_every_s == 0:
            self._next_list_s, self._listed = math.inf, False

    @property
    def read_bytes_per_s(self) -> float:
        """Recent read rate; 0 before the first read."""
        return self.storage_io.read_bytes_per_s

    @property
    def num_in_flight(self) -> int:
        """Fetches, writes and probes in flight."""
        return len(self._fetches) + len(self._writes) + len(self._probes)

    @property
    def shards(self) -> tuple[int, int]:
        """The shard of each block that this worker moves, and the number of shards."""
        return self.storage_io.objects.shard, self.storage_io.objects.num_shards

    @property
    def object_bytes(self) -> int:
        """Bytes of a host block in the store, over all shards."""
        return self.storage_io.objects.object_bytes * self.storage_io.objects.num_shards

    def num_blocks(self, num_bytes: int) -> int:
        """Return how many host blocks `num_bytes` can hold; ValueError for none."""
        if num_bytes < self.object_bytes:
            raise ValueError(
                f"storage_bytes={num_bytes} must be at least {self.object_bytes}, what "
                "one host block takes in the store."
            )
        return num_bytes // self.object_bytes

    def start(self, moves: TierMoves | None) -> None:
        """Start a step's moves; return at once."""
        if moves is not None:
            now_s = self._clock()
            for batch in moves.fetches:
                deadline_s, until_s = now_s + self.deadline_s, now_s + self._await_s
                fetch = _Fetch(deadline_s, {}, batch, until_s, {}, [])
                self._fetches[batch.event] = fetch
                self._read(fetch, range(len(batch.keys)))
            for batch in moves.writes:
                self._start_write(batch)
            for probe in moves.probes:
                self._start_probe(probe)
            if moves.deletes:
                self.storage_io.delete(moves.deletes)
            if moves.is_last:
                self._lists = False
                self._listed_keys.clear()
                self._deleted_keys.clear()
                self._listed = self._bound = None
                self._shards.clear()
        self.advance()

    def advance(self) -> None:
        """Advance everything in flight; return at once."""
        for done in self.storage_io.poll():
            self._complete(done)
        for fetch in list(self._fetches.values()):
            if fetch.missing:
                self._retry_missing(fetch)
            if not (fetch.tickets or fetch.missing):
                self._finish_fetch(fetch)
        while self._copied:
            self._add_write(self._copied.popleft())
        if self._writes:
            self._abandon_late_writes()
        if self._probes:
            self._end_probes()
        self._engine.advance_host(self._copies.submit)
        if self._lists:
            self._list()
        self._observe()

    def take_reports(
        self, max_found_keys: int = _KEYS_PER_REPORT, *, is_last: bool = False
    ) -> tuple[TierReport, ...]:
        """Return the moves that have ended since the last call, and listed keys.

        At most `max_found_keys` keys are returned; the rest waits for later calls.
        After the last call, the store no longer counts as down.
        """
        keys, deleted = self._listed_keys, self._deleted_keys
        room = max(max_found_keys - len(keys), 0)
        self._listed_keys, self._deleted_keys = keys[max_found_keys:], deleted[room:]
        listed = bound = None
        if not (self._listed_keys or self._deleted_keys):
            self.is_listed = self._has_listed
            listed, self._listed = self._listed, None
            bound, self._bound = self._bound, None
        ended: dict[str, Any] = {
            kind: tuple(ends) for kind, ends in self._ended.items()
        }
        report = TierReport(
            found=tuple(keys[:max_found_keys]),
            listed=listed,
            bound=bound,
            gone=tuple(deleted[:room]),
            num_full=self._num_full,
            num_down=self._record_state(is_last),
            **ended,
        )
        self._ended.clear()
        self._num_full = 0
        if report == _NO_REPORT:
            return ()
        means_s = self._means_s["read"], self._means_s["probe"]
        latencies_s = means_s if any(means_s) else None
        return (dataclasses.replace(report, latencies_s=latencies_s),)

    def _record_state(self, is_last: bool) -> int:
        """Return 1 if the store went down since the last report, -1 if it came back."""
        was_down, num_down = self._is_down, self._num_nodes_down
        self._is_down = self.storage_io.is_down and not is_last
        self._num_nodes_down = list(self.storage_io.node_states.values()).count(False)
        is_back = self._num_nodes_down < num_down and self._list_every_s != 0
        if not self._is_down and (not self._is_whole if was_down else is_back):
            self._next_list_s = min(self._next_list_s, self._clock())
        return self._is_down - was_down

    @property
    def is_listing_due(self) -> bool:
        """Whether a listing is in progress or will begin."""
        return self._is_listing or self._next_list_s < math.inf

    def abandon_listing(self) -> None:
        """Report the listing as failed, because the caller no longer waits for it."""
        if self._lists and self._listed is None:
            self._listed = False

    def wait(self) -> None:
        """Wait until all fetches, writes and probes have ended or are late."""
        # Real time, because the worker's clock may be a simulated one.
        end_s = time.monotonic() + self.deadline_s
        while self.num_in_flight:
            self.advance()
            if self.num_in_flight:
                time.sleep(_PAUSE_S)
                if time.monotonic() > end_s:
                    # Abandon unanswered store calls, but finish copies in memory.
                    for fetch in self._fetches.values():
                        self._cancel(fetch)
                        fetch.missing.clear()
                    for task in (*self._writes.values(), *self._probes.values()):
                        task.deadline_s = -math.inf

    def close(self, timeout_s: float = 0.0) -> None:
        """Release the store and the threads; wait up to this for writes and deletes."""
        self._copies.close()
        self.storage_io.close(timeout_s)
        self._observe()

    def _add(
        self, task: _Task, indices: Iterable[int], tickets: Iterable[int | None]
    ) -> None:
        """Add the calls of a task; a ticket is None if the queue was full."""
        for index, ticket in zip(indices, tickets, strict=False):
            if ticket is not None:
                task.tickets[ticket] = index
                self._task_of[ticket] = task

    def _cancel(self, task: _Task, *, is_late: bool = False) -> None:
        self.storage_io.cancel(task.tickets, is_late=is_late)
        for ticket in task.tickets:
            del self._task_of[ticket]
        task.tickets.clear()

    def _read(self, fetch: _Fetch, indices: Sequence[int]) -> None:
        keys = [fetch.batch.keys[index] for index in indices]
        tickets = self.storage_io.submit_reads(keys, fetch.deadline_s)
        self._add(fetch, indices, tickets)

    def _retry_missing(self, fetch: _Fetch) -> None:
        """Read missing blocks again when their pause has ended, or give up on them."""
        now_s = self._clock()
        if now_s < fetch.retry_s:
            return
        missing, fetch.missing = fetch.missing, []
        if now_s < min(fetch.await_until_s, fetch.deadline_s):
            self._read(fetch, missing)

    def _complete_read(self, fetch: _Fetch, index: int, done: Completion) -> None:
        if done.outcome == "missing" and fetch.batch.is_awaited:
            if not fetch.missing:
                fetch.retry_s = self._clock() + fetch.pause_s
                fetch.pause_s = min(2 * fetch.pause_s, _MAX_RETRY_S)
            fetch.missing.append(index)
            return
        if done.outcome == "refused":
            # A probe would find the damaged block until it is deleted.
            self._add_absent(done.key)
        if done.payload is not None:
            fetch.payloads[index] = np.frombuffer(done.payload, np.uint8)
            if fetch.batch.is_awaited:
                fetch.await_until_s = self._clock() + self._await_s
                fetch.pause_s = _MIN_RETRY_S

    def _start_write(self, batch: TierBatch) -> None:
        held = self._engine.read_host(batch.upper_blocks)
        oks = [False] * len(batch.keys)
        write = _Write(self._clock() + self.deadline_s, {}, batch, oks, [])
        self._writes[batch.event] = write

        def end(error: StoreError | None) -> None:
            """Release the host blocks, after the copy has ended or failed."""
            if error is not None:
                self.storage_io.record_failure("write", error)
            held.close()
            self._copied.append(write)

        try:
            self._copies.submit(lambda: end(attempt(self._copy, write, held)))
        except StoreError as error:
            end(error)

    def _start_probe(self, probe: TierProbe) -> None:
        """Send the leading keys that are not known to be absent to the store."""
        now_s = self._clock()
        sent, nums_found = list(map(self._cut_run, probe.runs)), [0] * len(probe.runs)
        started = _Probe(now_s + probe.wait_s, {}, probe, sent, nums_found)
        self._probes[probe.event] = started
        if self._num_unanswered >= _MAX_UNANSWERED:
            started.has_failed = True
            return
        indices = [index for index, run in enumerate(sent) if run]
        runs = [sent[index] for index in indices]
        tickets = self.storage_io.submit_probes(runs, now_s + self.deadline_s)
        self._add(started, indices, tickets)

    def _cut_run(self, run: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Cut a run before its first key that is known to be absent."""
        if self._absent:
            now_s = self._clock()
            for index, key in enumerate(run):
                if self._absent.get(key, now_s) > now_s:
                    return run[:index]
        return run

    def _complete_probe(self, probe: _Probe, index: int, done: Completion) -> None:
        run = probe.sent[index]
        num = probe.nums_found[index] = done.num_found
        if done.outcome == "failed":
            probe.has_failed = True
        elif done.outcome != "late" and num < len(run):
            self._add_absent(run[num])
        is_reported = probe.request.event not in self._probes
        self._num_unanswered -= is_reported
        if is_reported and self._lists and self.shards[1] == 1:
            self._listed_keys += run[:num]  # Too late for this request, not for others.

    def _add_absent(self, key: BlockKey) -> None:
        now_s = self._clock()
        while self._absent and next(iter(self._absent.values())) <= now_s:
            self._absent.popitem(last=False)
        self._absent[key] = now_s + _ABSENT_S
        self._absent.move_to_end(key)

    def _end_probes(self) -> None:
        """Report the probes that are answered or past their deadline."""
        now_s = self._clock()
        for probe in list(self._probes.values()):
            if probe.tickets and now_s < probe.deadline_s:
                continue
            for ticket, index in probe.tickets.items():
                probe.nums_found[index] = self.storage_io.num_found_so_far(ticket)
            oks = [
                index < num
                for run, num in zip(probe.request.runs, probe.nums_found, strict=True)
                for index in range(len(run))
            ]
            self.num_probes[probe.outcome] += 1
            self._num_unanswered += len(probe.tickets)
            del self._probes[probe.request.event]
            self._ended["probed"].append((probe.request.event, tuple(oks)))

    def _copy(self, write: _Write, held: HostRead | JointRead) -> None:
        """On the copying thread: copy blocks out and submit them to the store."""
        copied: list[tuple[BlockKey, list[memoryview]]] = []
        for index, key in enumerate(write.batch.keys):
            payload = self._buffers.take(self._engine.host_payload_bytes)
            held.copy(index, np.frombuffer(payload, np.uint8))
            copied.append((key, [payload]))
            num_bytes = len(copied) * self._engine.host_payload_bytes
            if num_bytes >= _BYTES_PER_CALL or index + 1 == held.num_blocks:
                write.block_tickets += self.storage_io.submit_writes(copied)
                copied = []

    def _complete(self, done: Completion) -> None:
        task = self._task_of.pop(done.ticket, None)
        if task is None:
            self._early[done.ticket] = done
            return
        index = task.tickets.pop(done.ticket)
        if isinstance(task, _Fetch):
            self._complete_read(task, index, done)
        elif isinstance(task, _Probe):
            self._complete_probe(task, index, done)
        elif isinstance(task, _Write):
            task.oks[index] = done.outcome == "done"
            self._num_full += done.reason == "full"
            if not task.tickets:
                self._end_write(task)

    def _finish_fetch(self, fetch: _Fetch) -> None:
        """Write the blocks that were read to the host's memory, then report them."""
        batch, indices = fetch.batch, sorted(fetch.payloads)
        if fetch.write is None and indices:
            fetch.write = self._engine.write_host(
                [batch.upper_blocks[index] for index in indices],
                [fetch.payloads[index] for index in indices],
            )
        if fetch.write is not None and not fetch.write.is_over:
            return
        oks = [index in fetch.payloads for index in range(len(batch.keys))]
        if fetch.write is not None and fetch.write.error is not None:
            self.storage_io.record_failure("read", fetch.write.error)
            oks = [False] * len(oks)
        del self._fetches[batch.event]
        self._ended["fetched"].append((batch.event, tuple(oks)))

    def _add_write(self, write: _Write) -> None:
        """Add the calls of a write whose bytes are copied."""
        write.is_copied = True
        self._add(write, itertools.count(), write.block_tickets)
        if not write.tickets:
            self._end_write(write)
        for ticket in list(write.tickets):
            if ticket in self._early:
                self._complete(self._early.pop(ticket))

    def _abandon_late_writes(self) -> None:
        """Abandon and report late writes; the oldest is always late first."""
        now_s = self._clock()
        while self._writes:
            write = next(iter(self._writes.values()))
            if not write.is_copied or now_s <= write.deadline_s:
                return
            self._cancel(write, is_late=True)
            self._end_write(write)

    def _end_write(self, write: _Write) -> None:
        del self._writes[write.batch.event]
        self._ended["written"].append((write.batch.event, tuple(write.oks)))

    def _observe(self) -> None:
        """Record the store's latencies; log if it has failed or recovered."""
        for kind, latencies in self.storage_io.take_latencies().items():
            for latency_s in latencies:
                self.latencies[kind].add(latency_s)
                if kind in self._means_s:
                    mean_s = self._means_s[kind] or latency_s
                    self._means_s[kind] = mean_s + (latency_s - mean_s) / 16
        self.storage_io.log_health()

    def _list(self) -> None:
        """Begin a listing if it is due, and collect the keys listed so far."""
        if not self._is_listing:
            if self._clock() < self._next_list_s:
                return
            self.storage_io.list_all(self.bound)
            self._is_listing = True
        room = _KEYS_PER_REPORT - len(self._listed_keys)
        if room <= len(self._deleted_keys):
            return
        pages, ended = self.storage_io.take_pages(room)
        num_shards = self.storage_io.objects.num_shards
        for page in pages:
            if num_shards == 1:
                self._listed_keys += page.keys
                continue
            for key, shard in zip(page.keys, page.shards, strict=True):
                shards = self._shards.setdefault(key, set())
                shards.add(shard)
                if len(shards) == num_shards:
                    del self._shards[key]
                    self._listed_keys.append(key)
        if ended is not None:
            self._shards.clear()
            self._is_listing, self._has_listed = False, True
            self._listed = self._is_whole = ended.is_whole
            self._deleted_keys += ended.deleted
            if ended.bound is not None:
                self._bound = ended.bound, ended.num_blocks
            every_s = self._list_every_s
            if every_s is None:
                every_s = math.inf if ended.is_whole else _RELIST_S
            self._next_list_s = self._clock() + every_s
