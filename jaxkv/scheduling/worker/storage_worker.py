"""Moves blocks between the host and a store, beside everything else."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from jaxkv.scheduling.protocol import TierBatch, TierMoves, TierProbe, TierReport
from jaxkv.scheduling.stats import DELAY_BUCKETS, Histogram
from jaxkv.transfer import AnyEngine, host_rows
from jaxkv.transfer.host_bytes import HostRead, HostWrite
from jaxkv.transfer.multi_pool import JointRead, JointWrite
from jaxkv.transfer.storage import Completion, ObjectFormat, StorageIO, open_store
from jaxkv.transfer.storage.buffers import Buffers
from jaxkv.transfer.storage.census import Bound
from jaxkv.transfer.storage.workers import Workers
from jaxkv.types import BlockKey

# How long `wait` sleeps between two looks.
_PAUSE_S = 1e-3
_LEAST_QUEUE_BYTES = 256 << 20
_KEPT_BYTES = 64 << 20
# How much is copied before the store is asked to write it.
_BYTES_AT_ONCE = 1 << 20
# Keys of a listing that are told at a time: the index takes about 1 us for each.
_KEYS_AT_ONCE = 2048
# How long a block is not asked for again that was missing or refused.
_ABSENT_S = 0.5
# No probe is sent while this many have passed their deadlines without an answer.
_MOST_UNANSWERED = 16
# After how long blocks that another engine may still be writing are read again, at
# first, and at most if none of them comes.
_LEAST_AGAIN_S, _MOST_AGAIN_S = 0.005, 0.08
# A listing that failed is tried again after this, if the store is listed once.
_RELIST_S = 60.0
_NO_REPORT = TierReport()


@dataclasses.dataclass(eq=False)
class _Fetch:
    """Blocks on their way to the host.

    Attributes:
        batch: What was asked for.
        payloads: Of each block that the store has read.
        num_open: Reads that are not over.
        deadline_s: When it is abandoned.
        await_until_s: Until when the next block may come that is not there yet.
        missing: Blocks that are not there yet, and may come.
        again_s: When these are read again.
        pause_s: After how long they were read again the last time.
        write: How the bytes get into the host's memory; None until all reads are over.
    """

    batch: TierBatch
    payloads: dict[int, NDArray[np.uint8]]
    num_open: int
    deadline_s: float
    await_until_s: float
    missing: list[int] = dataclasses.field(default_factory=list)
    again_s: float = 0.0
    pause_s: float = _LEAST_AGAIN_S
    write: HostWrite | JointWrite | None = None


@dataclasses.dataclass(eq=False)
class _Write:
    """Blocks on their way to the store.

    Attributes:
        batch: What was asked for.
        deadline_s: When it is abandoned.
        oks: Which blocks the store has.
        tickets: Of the writes that are not over, with the index of the block; None
            until the bytes are copied.
    """

    batch: TierBatch
    deadline_s: float
    oks: list[bool]
    tickets: dict[int, int] | None = None


@dataclasses.dataclass(eq=False)
class _Probe:
    """Blocks that the store is asked for.

    Attributes:
        probe: What was asked.
        deadline_s: When it is reported with what is known by then.
        nums_found: How many blocks of each run are there, from the first on.
        tickets: Of the runs that the store has not answered, with their index, and
            what of them it was asked for.
        has_failed: Whether the store has failed, or has too much to answer.
        is_reported: Whether it has been reported.
    """

    probe: TierProbe
    deadline_s: float
    nums_found: list[int]
    tickets: dict[int, tuple[int, Sequence[BlockKey]]] = dataclasses.field(
        default_factory=dict
    )
    has_failed: bool = False
    is_reported: bool = False

    @property
    def outcome(self) -> str:
        """What has come of it."""
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

    Args:
        engine: Has the host blocks.
        url: Where the store is; see `jaxkv.transfer.storage.open_store`.
        namespace: What the bytes of all blocks depend on, as in `Namespace`. Blocks of
            others are neither listed nor found; their keys differ in any case.
        secret: Seals objects against others who may write to the store.
        shard: Which part of each block this worker has.
        num_shards: How many parts there are.
        deadline_s: As of `StorageWorker`.
        await_s: Likewise.
        list_every_s: How long after a listing the store is listed again; one that has
            no list is never listed.
        max_blocks: Blocks on their way in either direction for which there is room at
            least, as `OffloadRules.max_storage_blocks`.
        clock: Seconds since some moment.

    Raises:
        ValueError: An argument is wrong.
        ImportError: The store needs an extra that is not there.
        StoreError: The store cannot be used.
    """
    objects = ObjectFormat(
        namespace,
        engine.host_bytes_description,
        engine.host_payload_bytes,
        shard=shard,
        num_shards=num_shards,
        secret=secret,
    )
    # Of all that the scheduler may ask for at a time nothing may be turned away.
    num_bytes = max(_LEAST_QUEUE_BYTES, max_blocks * objects.object_bytes)
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
    """Carries out what `OffloadScheduler` asks of the store, and lists the store.

    A probe is reported when the store has answered, or by its own deadline with what is
    known then. What the store says later is reported as listings are, unless there are
    several processes: each asks for its own shard.

    No call waits for the store but `wait`. Bytes are copied by a thread, and move in
    those of the `StorageIO`.

    Args:
        engine: Has the host blocks. The worker is used on its thread.
        storage_io: Reads and writes objects; its payloads are the engine's host blocks.
        deadline_s: How long a fetch may take, after which its blocks are computed, or a
            write, after which it is abandoned.
        await_s: How long a fetch waits for the next block that another engine writes.
        list_every_s: How long after the end of a listing the store is listed again, to
            find what others have written; None for once, 0 for never.
        clock: Seconds since some moment, the clock of `storage_io`.

    Raises:
        ValueError: If a number is not above 0, or payloads are of other sizes.

    Attributes:
        is_listed: Whether this worker has listed the store once, if it is to, and has
            handed out all of it. Of several processes only the first one lists.
        latencies: Seconds of each ``"read"``, ``"write"`` and ``"probe"`` that the
            store answered.
        num_probes: How many probes there were, by what came of them: ``"found"`` if any
            of the blocks is there, ``"missing"``, ``"late"`` or ``"failed"``.
        bound: How many blocks the store may hold, as this engine is set; None if it
            keeps no bound. Set it before the first `advance`.
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
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"{deadline_s=} must be a number of seconds above 0.")
        if not await_s > 0:
            raise ValueError(f"{await_s=} must be a number of seconds above 0.")
        if list_every_s is not None and not list_every_s >= 0:
            raise ValueError(f"{list_every_s=} must be at least 0, or None.")
        if storage_io.objects.payload_bytes != engine.host_payload_bytes:
            raise ValueError(
                f"the store's payloads of {storage_io.objects.payload_bytes} bytes "
                f"must be the engine's host blocks, of {engine.host_payload_bytes}."
            )
        host_rows.prepare()
        self.is_listed = False
        self.latencies = {
            "read": Histogram(DELAY_BUCKETS),
            "write": Histogram(DELAY_BUCKETS),
            "probe": Histogram(DELAY_BUCKETS),
        }
        self.num_probes = dict.fromkeys(("failed", "found", "late", "missing"), 0)
        self.bound: Bound | None = None
        self._engine = engine
        self._io = storage_io
        self._deadline_s = deadline_s
        self._await_s = await_s
        self._list_every_s = list_every_s
        self._clock = clock
        self._copies = Workers("jaxkv storage copy", 1)
        self._buffers = Buffers(_KEPT_BYTES)
        # Writes whose bytes were copied, with their tickets; the copying thread adds.
        self._copied: collections.deque[tuple[_Write, list[int | None]]] = (
            collections.deque()
        )
        self._fetches: dict[int, _Fetch] = {}
        self._writes: dict[int, _Write] = {}  # The oldest first.
        self._read_of: dict[int, tuple[_Fetch, int]] = {}
        # Writes may end before it is known which ones they are.
        self._write_of: dict[int, tuple[_Write, int]] = {}
        self._early: dict[int, Completion] = {}
        self._fetched: list[tuple[int, tuple[bool, ...]]] = []
        self._written: list[tuple[int, tuple[bool, ...]]] = []
        self._num_full = 0  # Writes that found no room, until they are reported.
        self._probes: dict[int, _Probe] = {}  # Those that are not reported.
        self._probe_of: dict[int, _Probe] = {}  # By ticket, those without an answer.
        # Until when blocks are not asked for again; the oldest answer first.
        self._absent: collections.OrderedDict[BlockKey, float] = (
            collections.OrderedDict()
        )
        self._probed: list[tuple[int, tuple[bool, ...]]] = []
        self._found: list[BlockKey] = []
        # What to report of the listing, after what it has found.
        self._listed: bool | None = None
        self._bound: tuple[int, int] | None = None
        self._gone: list[BlockKey] = []
        # The shards that a listing has found so far of blocks that lack some.
        self._parts: dict[BlockKey, set[int]] = {}
        self._lists = storage_io.objects.shard == 0
        self._next_list_s = -math.inf
        self._is_listing = False
        self._has_listed = False
        if list_every_s == 0:
            self._next_list_s = math.inf
            self._listed, self._has_listed = False, True

    @property
    def read_bytes_per_s(self) -> float:
        """How fast reads are, the last seconds most; 0 before the first."""
        return self._io.read_bytes_per_s

    @property
    def deadline_s(self) -> float:
        """How long a fetch or a write may take."""
        return self._deadline_s

    @property
    def num_in_flight(self) -> int:
        """Fetches, writes and probes that were started and are not over."""
        return len(self._fetches) + len(self._writes) + len(self._probes)

    @property
    def shards(self) -> tuple[int, int]:
        """Which shard of each block this worker has, and how many there are."""
        return self._io.objects.shard, self._io.objects.num_shards

    @property
    def object_bytes(self) -> int:
        """Bytes of a host block in the store, all shards together."""
        return self._io.objects.object_bytes * self._io.objects.num_shards

    def num_blocks(self, num_bytes: int) -> int:
        """Count the host blocks that a store of some bytes may hold.

        Raises:
            ValueError: It cannot hold one.
        """
        if num_bytes < self.object_bytes:
            raise ValueError(
                f"storage_bytes={num_bytes} must be at least {self.object_bytes}, what "
                "one host block takes in the store."
            )
        return num_bytes // self.object_bytes

    @property
    def storage_io(self) -> StorageIO:
        """What reads and writes objects."""
        return self._io

    def start(self, moves: TierMoves | None) -> None:
        """Start what a step asks for; returns at once."""
        if moves is not None:
            for batch in moves.fetches:
                self._start_fetch(batch)
            for batch in moves.writes:
                self._start_write(batch)
            for probe in moves.probes:
                self._start_probe(probe)
            if moves.deletes:
                self._io.delete(moves.deletes)
            if moves.is_last:
                self._lists = False
                self._found.clear()
                self._gone.clear()
                self._listed = self._bound = None
                self._parts.clear()
        self.advance()

    def advance(self) -> None:
        """Go on with what is under way; returns at once."""
        for done in self._io.poll():
            self._note(done)
        for fetch in list(self._fetches.values()):
            if fetch.missing:
                self._read_again(fetch)
            if not fetch.num_open:
                self._go_on(fetch)
        while self._copied:
            self._take_tickets(*self._copied.popleft())
        if self._writes:
            self._abandon_late_writes()
        if self._probes:
            self._end_probes()
        self._engine.advance_host(self._run_copy)
        if self._lists:
            self._list()
        self._observe()

    def take_reports(self, most_found: int = _KEYS_AT_ONCE) -> tuple[TierReport, ...]:
        """Hand out what is over since the last time; nothing if nothing is.

        Args:
            most_found: Keys of a listing at most; the listing waits for what is left.
        """
        found, self._found = self._found[:most_found], self._found[most_found:]
        room = most_found - len(found)
        gone, self._gone = self._gone[:room], self._gone[room:]
        listed = bound = None
        if not (self._found or self._gone):
            self.is_listed = self._has_listed
            listed, self._listed = self._listed, None
            bound, self._bound = self._bound, None
        ended = tuple(self._fetched), tuple(self._written)
        report = TierReport(
            *(*ended, tuple(found), listed, bound, tuple(gone)),
            probed=tuple(self._probed),
            num_full=self._num_full,
        )
        self._fetched, self._written, self._probed = [], [], []
        self._num_full = 0
        return () if report == _NO_REPORT else (report,)

    @property
    def is_listing_due(self) -> bool:
        """Whether the store is being listed, or will be."""
        return self._is_listing or self._next_list_s < math.inf

    def note_late(self) -> None:
        """Report that the listing takes longer than a caller waits for it."""
        if self._lists and self._listed is None:
            self._listed = False

    def wait(self) -> None:
        """Wait until all fetches, writes and probes are over, or late."""
        # By the time that passes, whatever the clock is.
        end_s = time.monotonic() + self._deadline_s
        while self.num_in_flight:
            self.advance()
            if self.num_in_flight:
                time.sleep(_PAUSE_S)
                if time.monotonic() > end_s:
                    self._give_up()

    def end_fetches(self) -> None:
        """Abandon all fetches, and wait until their host blocks are not written to.

        It does not wait for the store, only for copies in memory. They are reported, as
        what they have brought until now.
        """
        self._give_up_reads()
        while self._fetches:
            self.advance()
            if self._fetches:
                time.sleep(_PAUSE_S)

    def close(self, timeout_s: float = 0.0) -> None:
        """Let go of the store and of the threads.

        Args:
            timeout_s: How long to wait for writes and deletes that are under way.
        """
        _close(self._copies, self._io, timeout_s)
        self._observe()

    @property
    def closer(self) -> Callable[[], None]:
        """Does as `close`, and keeps neither this nor the engine in memory."""
        return functools.partial(_close, self._copies, self._io)

    def _give_up(self) -> None:
        """Wait no more for the store, only for copies in memory."""
        self._give_up_reads()
        for write in self._writes.values():
            write.deadline_s = -math.inf
        for probe in self._probes.values():
            probe.deadline_s = -math.inf

    def _give_up_reads(self) -> None:
        self._io.cancel(self._read_of)
        for fetch in self._fetches.values():
            fetch.num_open = 0
            fetch.missing.clear()
        self._read_of.clear()

    def _start_fetch(self, batch: TierBatch) -> None:
        now_s = self._clock()
        num, deadline_s = len(batch.keys), now_s + self._deadline_s
        fetch = _Fetch(batch, {}, num, deadline_s, now_s + self._await_s)
        self._fetches[batch.event] = fetch
        self._read(fetch, range(num))

    def _read(self, fetch: _Fetch, indices: Sequence[int]) -> None:
        keys = [fetch.batch.keys[index] for index in indices]
        tickets = self._io.submit_reads(keys, fetch.deadline_s)
        for index, ticket in zip(indices, tickets, strict=True):
            self._read_of[ticket] = fetch, index

    def _read_again(self, fetch: _Fetch) -> None:
        """Read what was not there yet again, if it is time, or wait for it no more."""
        now_s = self._clock()
        if now_s < fetch.again_s:
            return
        missing, fetch.missing = fetch.missing, []
        if now_s < min(fetch.await_until_s, fetch.deadline_s):
            self._read(fetch, missing)
        else:
            fetch.num_open -= len(missing)

    def _note_read(self, fetch: _Fetch, index: int, done: Completion) -> None:
        """Take note of a read that is over, which may have to be done again."""
        if done.outcome == "missing" and fetch.batch.is_awaited:
            if not fetch.missing:
                fetch.again_s = self._clock() + fetch.pause_s
                fetch.pause_s = min(2 * fetch.pause_s, _MOST_AGAIN_S)
            fetch.missing.append(index)
            return
        fetch.num_open -= 1
        if done.outcome == "refused":
            # Until it is deleted, a probe would find it, and it would be read again.
            self._note_absent(done.key)
        if done.payload is not None:
            fetch.payloads[index] = np.frombuffer(done.payload, np.uint8)
            if fetch.batch.is_awaited:
                fetch.await_until_s = self._clock() + self._await_s
                fetch.pause_s = _LEAST_AGAIN_S

    def _start_write(self, batch: TierBatch) -> None:
        held = self._engine.read_host(batch.upper_blocks)
        oks = [False] * len(batch.keys)
        write = _Write(batch, self._clock() + self._deadline_s, oks)
        self._writes[batch.event] = write
        tickets: list[int | None] = []
        copying = self._copies.submit(self._copy, write, held, tickets)
        copying.add_done_callback(
            functools.partial(self._end_copy, write, held, tickets)
        )

    def _start_probe(self, probe: TierProbe) -> None:
        """Ask the store for what it was not asked for just now."""
        now_s = self._clock()
        own = _Probe(probe, now_s + probe.wait_s, [0] * len(probe.runs))
        self._probes[probe.event] = own
        num_unanswered = sum(each.is_reported for each in self._probe_of.values())
        if num_unanswered >= _MOST_UNANSWERED:
            own.has_failed = True
            return
        runs = [(index, self._unknown(run)) for index, run in enumerate(probe.runs)]
        runs = [(index, run) for index, run in runs if run]
        until_s = now_s + self._deadline_s
        tickets = self._io.submit_probes([run for _, run in runs], until_s)
        for ticket, asked in zip(tickets, runs, strict=True):
            own.tickets[ticket] = asked
            self._probe_of[ticket] = own

    def _unknown(self, run: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """Cut a run where it is known to end."""
        if self._absent:
            now_s = self._clock()
            for index, key in enumerate(run):
                if self._absent.get(key, now_s) > now_s:
                    return run[:index]
        return run

    def _note_probe(self, done: Completion) -> None:
        """Note how much of a run the store has."""
        own = self._probe_of.pop(done.ticket)
        index, run = own.tickets.pop(done.ticket)
        num = own.nums_found[index] = done.num_found
        if done.outcome == "failed":
            own.has_failed = True
        elif done.outcome != "late" and num < len(run):
            self._note_absent(run[num])
        if own.is_reported and self._lists and self._io.objects.num_shards == 1:
            self._found += run[:num]  # For the next one who asks.

    def _note_absent(self, key: BlockKey) -> None:
        now_s = self._clock()
        while self._absent and next(iter(self._absent.values())) <= now_s:
            self._absent.popitem(last=False)
        self._absent[key] = now_s + _ABSENT_S
        self._absent.move_to_end(key)

    def _end_probes(self) -> None:
        """Report the probes that are answered or past their deadlines."""
        now_s = self._clock()
        for own in list(self._probes.values()):
            if own.tickets and now_s < own.deadline_s:
                continue
            for ticket, (index, _) in own.tickets.items():
                own.nums_found[index] = self._io.num_found_so_far(ticket)
            oks = [
                at < num
                for run, num in zip(own.probe.runs, own.nums_found, strict=True)
                for at in range(len(run))
            ]
            self.num_probes[own.outcome] += 1
            own.is_reported = True
            del self._probes[own.probe.event]
            self._probed.append((own.probe.event, tuple(oks)))

    def _copy(
        self, write: _Write, held: HostRead | JointRead, tickets: list[int | None]
    ) -> None:
        """Copy blocks and hand them to the store; on the thread that copies."""
        copied: list[tuple[BlockKey, list[memoryview]]] = []
        for index, key in enumerate(write.batch.keys):
            payload = self._buffers.take(self._engine.host_payload_bytes)
            held.copy(index, np.frombuffer(payload, np.uint8))
            copied.append((key, [payload]))
            num_bytes = len(copied) * self._engine.host_payload_bytes
            if num_bytes >= _BYTES_AT_ONCE or index + 1 == held.num_blocks:
                tickets += self._io.submit_writes(copied)
                copied = []

    def _end_copy(
        self,
        write: _Write,
        held: HostRead | JointRead,
        tickets: list[int | None],
        copying: Future[None],
    ) -> None:
        """Let go of blocks that were copied; what was not copied is not written."""
        error = copying.exception()
        if error is not None:
            self._io.note_failure("write", error)
        held.close()
        self._copied.append((write, tickets))

    def _run_copy(self, copy: Callable[[], None]) -> None:
        """Have bytes copied to the host by the thread that copies.

        Raises:
            StoreError: There is no such thread.
        """
        copying = self._copies.submit(copy)
        if copying.done():
            copying.result()

    def _note(self, done: Completion) -> None:
        """Take note of a read or a write that is over."""
        if done.kind == "read":
            self._note_read(*self._read_of.pop(done.ticket), done)
        elif done.kind == "probe":
            self._note_probe(done)
        elif done.ticket in self._write_of:
            write, index = self._write_of.pop(done.ticket)
            assert write.tickets is not None
            del write.tickets[done.ticket]
            self._note_write(write, index, done)
            if not write.tickets:
                self._end_write(write)
        else:
            self._early[done.ticket] = done

    def _note_write(self, write: _Write, index: int, done: Completion) -> None:
        write.oks[index] = done.outcome == "done"
        self._num_full += done.reason == "full"

    def _go_on(self, fetch: _Fetch) -> None:
        """Bring what was read into the host's memory, and then report it."""
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
            self._io.note_failure("read", fetch.write.error)
            oks = [False] * len(oks)
        del self._fetches[batch.event]
        self._fetched.append((batch.event, tuple(oks)))

    def _take_tickets(self, write: _Write, tickets: list[int | None]) -> None:
        """Take note of which writes the store was asked for."""
        write.tickets = {}
        for index, ticket in enumerate(tickets):
            if ticket is None:
                continue
            early = self._early.pop(ticket, None)
            if early is not None:
                self._note_write(write, index, early)
            else:
                write.tickets[ticket] = index
                self._write_of[ticket] = write, index
        if not write.tickets:
            self._end_write(write)

    def _abandon_late_writes(self) -> None:
        """Report writes that are late; the oldest are late, and copied, first."""
        now_s = self._clock()
        while self._writes:
            write = next(iter(self._writes.values()))
            if write.tickets is None or now_s <= write.deadline_s:
                return
            self._io.cancel(write.tickets, is_late=True)
            for ticket in write.tickets:
                del self._write_of[ticket]
            write.tickets = {}
            self._end_write(write)

    def _end_write(self, write: _Write) -> None:
        del self._writes[write.batch.event]
        self._written.append((write.batch.event, tuple(write.oks)))

    def _observe(self) -> None:
        """Count how long the store took, and log whether it fails."""
        for kind, latencies in self._io.take_latencies().items():
            for latency_s in latencies:
                self.latencies[kind].add(latency_s)
        self._io.log_health()

    def _list(self) -> None:
        """Begin to list the store when it is time, and take what was found."""
        if not self._is_listing:
            if self._clock() < self._next_list_s:
                return
            self._io.list_all(self.bound)
            self._is_listing = True
        if len(self._found) + len(self._gone) >= _KEYS_AT_ONCE:
            return
        pages, ended = self._io.take_pages(_KEYS_AT_ONCE - len(self._found))
        num_shards = self._io.objects.num_shards
        for page in pages:
            if num_shards == 1:
                self._found += page.keys
                continue
            for key, shard in zip(page.keys, page.shards, strict=True):
                shards = self._parts.setdefault(key, set())
                shards.add(shard)
                if len(shards) == num_shards:
                    del self._parts[key]
                    self._found.append(key)
        if ended is not None:
            self._parts.clear()
            self._is_listing, self._has_listed = False, True
            self._listed = ended.is_whole
            self._gone += ended.gone
            if ended.bound is not None:
                self._bound = ended.bound, ended.num_blocks
            every_s = self._list_every_s
            if every_s is None:
                every_s = math.inf if ended.is_whole else _RELIST_S
            self._next_list_s = self._clock() + every_s


def _close(copies: Workers, storage_io: StorageIO, timeout_s: float = 0.0) -> None:
    copies.close()
    storage_io.close(timeout_s)
