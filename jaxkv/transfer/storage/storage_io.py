"""Blocks to and from a store in the background; no caller waits for the store."""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxkv._util import Resource
from jaxkv.transfer.storage.census import Bound, Census, agreed_bound
from jaxkv.transfer.storage.health import StoreHealth, log_line
from jaxkv.transfer.storage.objects import Bytes, ObjectFormat, Refusal
from jaxkv.transfer.storage.run_search import RunSearch
from jaxkv.transfer.storage.store import (
    BlobStore,
    Piece,
    StoreError,
    answers_of,
    attempt,
    can_list,
    error_of,
    lanes_of,
)
from jaxkv.transfer.storage.workers import Crew, start_thread
from jaxkv.types import BlockKey

Kind: TypeAlias = Literal["read", "write", "probe"]
_What: TypeAlias = Literal["read", "write", "probe", "delete"]
Outcome: TypeAlias = Literal["done", "missing", "refused", "failed", "late"]

_MOST_AT_ONCE = 16  # Probes or deletes of one call to the store.
_MOST_DELETES = 1 << 16
_MOST_PROBES = 1 << 16
_MOST_LISTED = 1 << 18  # Blocks that were listed and not taken.
_MOST_LATENCIES = 1 << 14
_HALF_LIFE_S = 10.0
_MOST_WAIT_S = threading.TIMEOUT_MAX / 2  # What a lock can be asked to wait.
# After a write that found no room, when to try the next if nothing is deleted.
_FULL_RETRY_S = 1.0


class Completion(NamedTuple):
    """What came of a read, a write or a probe.

    Attributes:
        ticket: What the call that asked for it returned.
        kind: What it was.
        key: The key of the block; of a probe, of the first of its run.
        outcome: ``"done"``; ``"missing"`` if the store has no such object (of a probe,
            none of the run); ``"refused"`` if what it has is not right; ``"failed"`` if
            the store failed; ``"late"`` if the deadline came first.
        reason: The reason of a refusal, or the kind of the error; else None.
        payload: The payload of a read that is done, which is the caller's; else None.
        num_bytes: Bytes of the object, if it was moved; else 0.
        num_found: Of a probe, how many blocks of the run are there, as far as known.
    """

    ticket: int
    kind: Kind
    key: BlockKey
    outcome: Outcome
    reason: str | None = None
    payload: memoryview | None = None
    num_bytes: int = 0
    num_found: int = 0


class ListedPage(NamedTuple):
    """Some of the objects that a store has.

    Attributes:
        keys: Their keys, of every shard's objects.
        shards: The shard of each.
    """

    keys: list[BlockKey]
    shards: list[int]


class Listed(NamedTuple):
    """How a listing ended.

    Attributes:
        is_whole: Whether the store has listed all of them; not if it failed.
        bound: How many blocks the store may hold; None if it is not known.
        num_blocks: How many blocks are left there.
        gone: Keys of blocks that are deleted, because there were too many.
    """

    is_whole: bool
    bound: int | None = None
    num_blocks: int = 0
    gone: tuple[BlockKey, ...] = ()


@dataclasses.dataclass(frozen=True)
class StorageIOStats:
    """Counts since the start, and what is open now.

    Attributes:
        num_written: Objects that were written.
        num_read: Objects that were read, and were right.
        num_missing: Reads of what was not there.
        num_probed: Objects of which the store was asked whether they are there.
        num_late: Reads that the deadline overtook.
        num_dropped: Writes that did not fit into the queue, or came while the store
            was full.
        num_deleted: Objects that were deleted, here or because they were not right.
        bytes_written: Bytes of the objects written.
        bytes_read: Bytes of the objects read.
        refused: Objects that were not right, by reason.
        failed: Calls that the store failed, by ``"read full"`` and the like: what was
            asked for, and the kind of error.
        queued_write_bytes: Bytes of writes that are not done.
        open_read_bytes: Bytes of reads that are not done, or not polled.
        last_error: The store's message at its latest failure.
        is_up: Whether no kind of call failed when it was last made.
    """

    num_written: int
    num_read: int
    num_missing: int
    num_probed: int
    num_late: int
    num_dropped: int
    num_deleted: int
    bytes_written: int
    bytes_read: int
    refused: dict[str, int]
    failed: dict[str, int]
    queued_write_bytes: int
    open_read_bytes: int
    last_error: str | None
    is_up: bool = True

    @property
    def errors(self) -> dict[str, int]:
        """What went wrong, by what was asked for and why, as ``"read late"``.

        The calls in `failed`, with those that the deadline overtook, the writes that
        did not fit into the queue (``"write busy"``), and the objects in `refused`.
        """
        refused = {f"read {reason}": num for reason, num in self.refused.items()}
        rest = {"read late": self.num_late, "write busy": self.num_dropped}
        return self.failed | refused | {what: num for what, num in rest.items() if num}


class Rate:
    """Bytes per second while something is in flight, the past counting less and less.

    Example:
        >>> rate = Rate()
        >>> rate.start(0.0)
        >>> rate.stop(2.0, 100)
        >>> rate.bytes_per_s
        50.0
    """

    def __init__(self) -> None:
        self._num_open = 0
        self._since_s = 0.0
        self._bytes = 0.0
        self._busy_s = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 before the first bytes."""
        return self._bytes / self._busy_s if self._busy_s > 0 else 0.0

    def start(self, now_s: float) -> None:
        """Note that something is in flight from now on."""
        self._advance(now_s)
        self._num_open += 1

    def stop(self, now_s: float, num_bytes: int) -> None:
        """Note that it has arrived, with so many bytes; 0 if it never will."""
        self._advance(now_s)
        self._num_open -= 1
        self._bytes += num_bytes

    def _advance(self, now_s: float) -> None:
        if self._num_open:
            busy_s = max(0.0, now_s - self._since_s)
            fade = 0.5 ** (busy_s / _HALF_LIFE_S)
            self._bytes *= fade
            self._busy_s = self._busy_s * fade + busy_s
        self._since_s = now_s


_NO_SEARCH = RunSearch(0)


class _Job:
    """Something asked for: in a queue, then with the store."""

    __slots__ = (
        *("indices", "is_out", "is_over", "key", "kind", "out_s", "payload", "run"),
        *("search", "ticket"),
    )

    def __init__(
        self,
        ticket: int,
        kind: Kind,
        run: Sequence[BlockKey],
        payload: Sequence[Bytes] = (),
    ) -> None:
        self.ticket = ticket
        self.kind: Kind = kind
        self.key = run[0]
        self.payload = payload
        self.run = run  # Of a probe; else there is the key alone.
        self.search = RunSearch(len(run)) if kind == "probe" else _NO_SEARCH
        self.indices: list[int] = []  # Of the run, those that the store is asked about.
        self.is_out = False  # The store has it.
        self.out_s = 0.0  # Since when.
        self.is_over = False  # No caller waits for it any more.

    def ended(self, outcome: Outcome, **more: Any) -> Completion:
        """Say what came of it."""
        found = self.search.num_found
        return Completion(
            self.ticket, self.kind, self.key, outcome, num_found=found, **more
        )


class _Way(NamedTuple):
    """How the store is asked for things of a kind, jobs or names of objects.

    Attributes:
        call: Asks for some at once; returns an answer for each, perhaps an error.
        note: Takes the answer of one; called without the lock.
        fail: Takes the error of one; called with the lock held.
        at_once: How many one call has at most.
    """

    call: Callable[[Any], Sequence[Any]]
    note: Callable[[Any, Any], None]
    fail: Callable[[Any, BaseException], None]
    at_once: int


class StorageIO(Resource):
    """Reads and writes the blocks of one shard in a store, in the background.

    No call waits for the store, whatever it does: a store that hangs fills the queues,
    after which writes are dropped and reads fail at once. All methods may be called
    from any thread.

    Args:
        store: Where objects are; closed with this.
        objects: How they are written.
        write_bytes: Bytes of writes that may be open: queued, or with the store.
        read_bytes: Bytes of reads that may be open: queued, with the store, or not
            polled yet. One that is not waited for any more counts until the store
            answers.
        num_in_flight: Objects that the store reads, or writes, at once.
        clock: Gives the time in seconds, for deadlines.

    Example:
        >>> from jaxkv.transfer.storage import MemoryStore
        >>> blocks = ObjectFormat(b"model", "u8[4]", 4)
        >>> with StorageIO(MemoryStore(), blocks) as storage:
        ...     _ = storage.submit_writes([(b"k" * 32, [b"body"])])
        ...     _ = storage.wait()
        ...     _ = storage.submit_reads([b"k" * 32], deadline_s=float("inf"))
        ...     bytes(storage.wait()[0].payload)
        b'body'
    """

    def __init__(
        self,
        store: BlobStore,
        objects: ObjectFormat,
        *,
        write_bytes: int = 256 << 20,
        read_bytes: int = 256 << 20,
        num_in_flight: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (
            ("write_bytes", write_bytes),
            ("read_bytes", read_bytes),
            ("num_in_flight", num_in_flight),
        ):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        self.objects = objects
        self._store = store
        self._most_bytes = {"write": write_bytes, "read": read_bytes}
        self._clock = clock

        self._lock = threading.Lock()
        self._wakes_waiters = threading.Condition(self._lock)
        self._is_closed = False
        self._next_ticket = 0
        self._queues: dict[Kind, collections.deque[_Job]] = {
            "read": collections.deque(),
            "probe": collections.deque(),
            "write": collections.deque(),
        }
        self._num_idle = {"read": 0, "probe": 0, "write": 0}  # Given up, in a queue.
        self._deletes: dict[str, None] = {}  # An ordered set of names.
        self._undeleted: dict[str, None] = {}  # Deletes that failed.
        # Until when the store counts as full, if no delete makes room before.
        self._full_until_s = float("-inf")
        self._num_deleting = 0  # Of these, with the store.
        self._jobs: dict[int, _Job] = {}  # By ticket, those that a caller waits for.
        self._deadlines: list[tuple[float, int]] = []
        self._completions: collections.deque[Completion] = collections.deque()
        self._awaited = 1  # Completions that `wait` waits for.
        self._open_bytes = {"write": 0, "read": 0}
        self._rates = {"read": Rate(), "write": Rate()}
        self._pages: collections.deque[ListedPage] = collections.deque()
        self._num_listed = 0  # Blocks of these.
        self._listed: Listed | None = None
        self._bounds: list[Bound] = []  # Of all engines, as of the last listing.
        self._fresh: list[BlockKey] = []  # Written while the store is listed.
        self._lister: threading.Thread | None = None

        self._counts: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[str] = collections.Counter()
        self._last_error: str | None = None
        self._health = StoreHealth(store.url)
        # Seconds that the last reads and writes took, until they are taken.
        self._latencies: dict[str, collections.deque[float]] = {
            kind: collections.deque(maxlen=_MOST_LATENCIES)
            for kind in ("read", "write", "probe")
        }
        lanes = lanes_of(store)
        num_threads: dict[_What, int] = {
            "read": min(num_in_flight, lanes.readers),
            "write": min(num_in_flight, lanes.writers),
            "probe": min(num_in_flight, lanes.readers),
            "delete": 1,
        }
        fitting = max(1, lanes.call_bytes // objects.object_bytes)
        reads, writes = (
            min(fitting, num_in_flight // num_threads[kind])
            for kind in ("read", "write")
        )
        fail, few = self._fail, _MOST_AT_ONCE
        self._ways: dict[_What, _Way] = {
            "read": _Way(self._get, self._note_read, fail, reads),
            "write": _Way(self._put, self._note_written, fail, writes),
            "probe": _Way(self._exists, self._note_probed, fail, few),
            "delete": _Way(store.delete, self._note_deleted, self._fail_delete, few),
        }
        self._wakes = {what: threading.Condition(self._lock) for what in self._ways}
        self._crews = {
            what: Crew(
                f"jaxkv storage {what}", num, functools.partial(self._serve_all, what)
            )
            for what, num in num_threads.items()
        }
        with self._lock:
            for what in self._crews:
                self._start_threads(what)

    def submit_writes(
        self, items: Iterable[tuple[BlockKey, Sequence[Bytes]]]
    ) -> list[int | None]:
        """Ask for blocks to be written.

        Args:
            items: Keys, and the payload of each in pieces. They belong to the store
                from now on, and must never change: hand over copies.

        Returns:
            A ticket for each; None for what does not fit into the queue, which is
            dropped and counted.

        Raises:
            ValueError: A payload is not of `objects.payload_bytes`, or a key not of 32
                bytes. Then nothing is written.
        """
        items = [(key, list(payload)) for key, payload in items]
        for key, payload in items:
            self.objects.check(key, payload)
        tickets: list[int | None] = []
        with self._lock:
            is_full = self._is_full and not self._has_deletes
            for key, payload in items:
                if self._is_closed or is_full or not self._reserve("write"):
                    self._counts["dropped"] += 1
                    tickets.append(None)
                    continue
                # The object that was to go is the one that comes.
                name = self.objects.name(key)
                self._deletes.pop(name, None)
                self._undeleted.pop(name, None)
                tickets.append(self._add("write", (key,), payload))
            self._wake_for("write", len(tickets))
        return tickets

    def submit_reads(self, keys: Iterable[BlockKey], deadline_s: float) -> list[int]:
        """Ask for blocks to be read.

        Args:
            keys: Their keys.
            deadline_s: When to give up on them, by `clock`. They are then late, and an
                answer that comes after that is dropped.

        Returns:
            A ticket for each. What does not fit into the queue has failed at once, with
            the reason ``"busy"``.
        """
        return self._ask("read", [(key,) for key in keys], deadline_s)

    def submit_probes(
        self, runs: Iterable[Sequence[BlockKey]], deadline_s: float
    ) -> list[int]:
        """Ask how many blocks of runs the store has, from the first on.

        The rounds of a `RunSearch` follow one another in the threads of the store. What
        is asked for are the objects of this shard.

        Args:
            runs: For each the keys of blocks that continue one another.
            deadline_s: As of `submit_reads`.

        Returns:
            A ticket for each. Too many at once have failed, as ``"busy"``.

        Raises:
            ValueError: A run has no keys. Then nothing is asked.
        """
        runs = list(runs)
        if not all(runs):
            raise ValueError("a run of no keys must have one to ask for.")
        return self._ask("probe", runs, deadline_s)

    def num_found_so_far(self, ticket: int) -> int:
        """Tell how many blocks of a run are known to be there; 0 of what is over."""
        with self._lock:
            job = self._jobs.get(ticket)
            return 0 if job is None else job.search.num_found

    def delete(self, keys: Iterable[BlockKey]) -> None:
        """Ask for the objects of this shard of some blocks to be deleted.

        Nothing reports it. What a store fails to delete is tried again when it is
        listed; what is too much at once stays, and a later `list_all` finds it.
        """
        names = [self.objects.name(key) for key in keys]
        with self._lock:
            self._delete(names)

    def list_all(self, bound: Bound | None = None) -> None:
        """Begin to list all blocks of the store; `take_pages` has them.

        A listing that cannot begin has failed, as one whose store fails.

        Args:
            bound: How many blocks the store may hold, according to this engine; None
                if it keeps no bound. It is recorded, and the oldest blocks beyond the
                bound that holds by all that were recorded (`agreed_bound`) are deleted.

        Raises:
            RuntimeError: A listing is under way.
        """
        with self._lock:
            if self._lister is not None:
                raise RuntimeError("The store is being listed already.")
            self._fresh, self._listed = [], None
            undeleted, self._undeleted = self._undeleted, {}
            self._delete(undeleted)
            try:
                self._lister = start_thread("jaxkv storage list", self._list, bound)
            except StoreError as error:
                self._note_error("list", error)
                self._listed = Listed(False)

    def take_pages(self, most_keys: int) -> tuple[list[ListedPage], Listed | None]:
        """Hand out what `list_all` has found since the last time.

        Args:
            most_keys: No page is begun once those before it have as many. A page has
                one block, or some thousands.

        Returns:
            The pages, and how the listing has ended if they were the last ones. A store
            that fails ends them; `stats` counts it.
        """
        pages: list[ListedPage] = []
        num_keys = 0
        with self._lock:
            while self._pages and num_keys < most_keys:
                pages.append(self._pages.popleft())
                num_keys += len(pages[-1].keys)
            self._num_listed -= num_keys
            self._wakes_waiters.notify_all()
            if self._pages or self._listed is None:
                return pages, None
            ended, self._lister, self._listed = self._listed, None, None
            return pages, ended

    def poll(self) -> list[Completion]:
        """Hand out what has ended since the last time; waits for nothing."""
        if not (self._completions or self._deadlines):
            return []  # What ends in this moment is for the next time.
        with self._lock:
            return self._poll()

    def wait(self, timeout_s: float | None = None, least: int = 1) -> list[Completion]:
        """Wait until something has ended, if anything is open; then `poll`.

        Args:
            timeout_s: Seconds to wait at most; None for no limit. Deadlines are looked
                at when it is over.
            least: How many reads, writes and probes to wait for.
        """
        if timeout_s is not None:
            timeout_s = min(timeout_s, _MOST_WAIT_S)
        with self._lock:
            self._awaited = least
            self._wakes_waiters.wait_for(
                lambda: len(self._completions) >= least or not self._jobs, timeout_s
            )
            self._awaited = 1
            return self._poll()

    def cancel(self, tickets: Iterable[int], *, is_late: bool = False) -> None:
        """Give up reads, writes and probes, which are not reported any more.

        Args:
            tickets: Their tickets.
            is_late: Whether they take too long, which counts as a failure.
        """
        gone = set(tickets)
        with self._lock:
            for ticket in gone:
                job = self._jobs.pop(ticket, None)
                if job is not None:
                    if is_late:
                        self._failed[f"{job.kind} late"] += 1
                        self._note_late(job)
                    self._give_up(job)
            kept = [each for each in self._completions if each.ticket not in gone]
            if len(kept) < len(self._completions):
                for each in self._completions:
                    if each.ticket in gone and each.payload is not None:
                        self._release("read")
                self._completions = collections.deque(kept)
            self._wakes_waiters.notify_all()

    def note_failure(self, kind: Kind, error: BaseException) -> None:
        """Count a read or a write that failed before the store was asked."""
        with self._lock:
            self._note_error(kind, error_of(error))

    @property
    def read_bytes_per_s(self) -> float:
        """Bytes per second of reads while some are open; 0 before the first.

        The last seconds count most. Reads that come late count as no bytes.
        """
        with self._lock:
            return self._rates["read"].bytes_per_s

    @property
    def write_bytes_per_s(self) -> float:
        """Bytes per second of writes while some are open; 0 before the first."""
        with self._lock:
            return self._rates["write"].bytes_per_s

    @property
    def url(self) -> str:
        """Where objects are, without secrets."""
        return self._store.url

    @property
    def can_list(self) -> bool:
        """Whether the store can be listed."""
        return can_list(self._store)

    @property
    def is_up(self) -> bool:
        """Whether no kind of call failed when it was last made."""
        return self._health.is_up

    def take_latencies(self) -> dict[str, list[float]]:
        """Hand out how many seconds reads and writes took since the last time."""
        taken: dict[str, list[float]] = {}
        for kind, latencies in self._latencies.items():
            if latencies:
                with self._lock:
                    taken[kind] = list(latencies)
                    latencies.clear()
        return taken

    def log_health(self) -> None:
        """Log that the store begins to fail, or has recovered, if it is time to."""
        if self._health.has_news:
            with self._lock:
                line = self._health.next_line(self._clock())
            log_line(line)

    @property
    def stats(self) -> StorageIOStats:
        """What has happened so far."""
        with self._lock:
            counts = self._counts
            return StorageIOStats(
                num_written=counts["written"],
                num_read=counts["read"],
                num_missing=counts["missing"],
                num_probed=counts["probed"],
                num_late=counts["late"],
                num_dropped=counts["dropped"],
                num_deleted=counts["deleted"],
                bytes_written=counts["bytes written"],
                bytes_read=counts["bytes read"],
                refused=dict(sorted(self._refused.items())),
                failed=dict(sorted(self._failed.items())),
                queued_write_bytes=self._open_bytes["write"],
                open_read_bytes=self._open_bytes["read"],
                last_error=self._last_error,
                is_up=self._health.is_up,
            )

    def close(self, timeout_s: float = 0.0) -> None:
        """Take nothing more, and let the threads end.

        Args:
            timeout_s: Seconds to wait at most for writes and deletes that are open.
                Whatever is still queued then has failed, as ``"closed"``; writes are
                counted as dropped.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wakes_waiters.wait_for(
                lambda: not (self._open_bytes["write"] or self._has_deletes),
                min(timeout_s, _MOST_WAIT_S),
            )
            for kind in self._queues:
                num_ended = self._end_queue(kind, "closed")
                self._counts["dropped"] += num_ended * (kind == "write")
            self._deletes.clear()
            for wakes in (*self._wakes.values(), self._wakes_waiters):
                wakes.notify_all()
        self._store.close()

    # What follows down to `_serve_all` is called with the lock held.

    def _ask(
        self, kind: Kind, runs: Sequence[Sequence[BlockKey]], deadline_s: float
    ) -> list[int]:
        for key in itertools.chain.from_iterable(runs):
            self.objects.name(key)  # Refuses what is no key, before any is asked for.
        tickets = []
        with self._lock:
            for run in runs:
                if self._is_closed or not self._reserve(kind):
                    ticket = self._next_ticket
                    self._next_ticket += 1
                    self._failed[f"{kind} busy"] += 1
                    self._completions.append(
                        Completion(ticket, kind, run[0], "failed", "busy")
                    )
                else:
                    ticket = self._add(kind, run)
                    if deadline_s < float("inf"):
                        heapq.heappush(self._deadlines, (deadline_s, ticket))
                tickets.append(ticket)
            self._wake_for(kind, len(tickets))
        return tickets

    def _wake_for(self, kind: Kind, num_jobs: int) -> None:
        """Wake the threads that take new jobs; without a thread they have failed."""
        error = self._start_threads(kind)
        if error is not None:
            for _ in range(self._end_queue(kind, error.kind)):
                self._note_error(kind, error)
        else:
            self._wakes[kind].notify(num_jobs)

    def _start_threads(self, what: _What) -> StoreError | None:
        """Start threads that are missing; return the error if there is none at all."""
        crew = self._crews[what]
        if crew.num_missing:
            try:
                crew.start()
            except StoreError as error:
                return None if crew.has_thread else error
        return None

    def _reserve(self, kind: Kind) -> bool:
        if kind == "probe":
            return len(self._queues["probe"]) < _MOST_PROBES
        open_bytes = self._open_bytes[kind] + self.objects.object_bytes
        # One fits always, whatever the size of a block.
        if self._open_bytes[kind] and open_bytes > self._most_bytes[kind]:
            return False
        self._open_bytes[kind] = open_bytes
        return True

    def _release(self, kind: Kind) -> None:
        if kind != "probe":
            self._open_bytes[kind] -= self.objects.object_bytes

    def _add(
        self, kind: Kind, run: Sequence[BlockKey], payload: Sequence[Bytes] = ()
    ) -> int:
        ticket = self._next_ticket
        self._next_ticket += 1
        job = self._jobs[ticket] = _Job(ticket, kind, run, payload)
        self._queues[kind].append(job)
        return ticket

    def _give_up(self, job: _Job) -> None:
        """Release those who wait for a job that has left `_jobs`."""
        job.is_over = True
        if job.is_out:
            return
        job.payload = ()
        self._release(job.kind)
        # Taking it out of its queue now would look at all that wait before it.
        self._num_idle[job.kind] += 1
        queue = self._queues[job.kind]
        if 2 * self._num_idle[job.kind] > len(queue) + _MOST_AT_ONCE:
            self._queues[job.kind] = collections.deque(
                each for each in queue if not each.is_over
            )
            self._num_idle[job.kind] = 0

    def _poll(self) -> list[Completion]:
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ticket = heapq.heappop(self._deadlines)
            job = self._jobs.pop(ticket, None)
            if job is not None:
                self._give_up(job)
                if job.kind == "probe":
                    self._failed["probe late"] += 1
                else:
                    self._counts["late"] += 1
                self._note_late(job)
                self._completions.append(job.ended("late"))
        completions, self._completions = self._completions, collections.deque()
        for each in completions:
            if each.payload is not None:
                self._release("read")
        return list(completions)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._is_closed and len(self._deletes) < _MOST_DELETES:
                self._deletes[name] = None
        if self._deletes:
            self._start_threads("delete")
            self._wakes["delete"].notify()

    @property
    def _has_deletes(self) -> bool:
        return bool(self._deletes or self._num_deleting)

    @property
    def _is_full(self) -> bool:
        return self._clock() < self._full_until_s

    def _take(self, what: _What) -> Sequence[Any]:
        """Take what one call asks for: jobs from a queue, or names to delete."""
        at_once = self._ways[what].at_once
        if what == "delete":
            names = list(itertools.islice(self._deletes, at_once))
            for name in names:
                del self._deletes[name]
            self._num_deleting += len(names)
            return names
        jobs: list[_Job] = []
        # Writes to a full store wait until deletes make room.
        is_held = self._has_deletes and self._is_full and not self._is_closed
        if what == "write" and is_held:
            return jobs
        queue = self._queues[what]
        while queue and len(jobs) < at_once:
            job = queue.popleft()
            if job.is_over:
                self._num_idle[what] -= 1
                continue
            # A probe has been out before, for an earlier round.
            job.is_out, job.out_s = True, job.out_s or self._clock()
            jobs.append(job)
            if what != "probe":
                self._rates[what].start(job.out_s)
        return jobs

    def _end(self, job: _Job, outcome: Outcome, **more: Any) -> None:
        """Report a job that the store has answered, if a caller waits for it."""
        num_bytes = more.get("num_bytes", 0)
        if outcome != "failed":
            self._health.note_answer(job.kind)
        now_s = self._clock()
        if job.kind != "probe":
            self._rates[job.kind].stop(now_s, 0 if job.is_over else num_bytes)
        if outcome != "failed":
            self._latencies[job.kind].append(now_s - job.out_s)
        if job.is_over:
            more["payload"] = None
        else:
            job.is_over = True
            del self._jobs[job.ticket]
            self._completions.append(job.ended(outcome, **more))
        if more.get("payload") is None:
            self._release(job.kind)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Wake those that wait for enough to have ended; a thread for each is slow."""
        if len(self._completions) >= self._awaited or not self._jobs or self._is_closed:
            self._wakes_waiters.notify_all()

    def _end_queue(self, kind: Kind, reason: str) -> int:
        """Fail what no thread has taken from a queue; return how many jobs that is."""
        jobs = [job for job in self._queues[kind] if not job.is_over]
        self._queues[kind].clear()
        self._num_idle[kind] = 0
        for job in jobs:
            job.is_over = True
            self._release(kind)
            del self._jobs[job.ticket]
            self._completions.append(job.ended("failed", reason=reason))
        self._wake_waiters()
        return len(jobs)

    def _end_read(
        self,
        job: _Job,
        payload: memoryview | Refusal | None,
        data: Piece | None,
    ) -> None:
        """Report a read: of what was not there, what was not checked, or what came."""
        if data is None:
            self._counts["missing"] += 1
            self._end(job, "missing")
        elif payload is None:
            self._end(job, "late")
        elif isinstance(payload, Refusal):
            self._refused[payload.reason] += 1
            self._health.note_refusal(payload.reason)
            if payload.is_ours:
                self._delete([self.objects.name(job.key)])
            self._end(job, "refused", reason=payload.reason, num_bytes=len(data))
        else:
            self._counts["read"] += 1
            self._counts["bytes read"] += len(data)
            self._end(job, "done", payload=payload, num_bytes=len(data))

    def _fail(self, job: _Job, error: BaseException) -> None:
        error = error_of(error)
        self._note_error(job.kind, error)
        self._end(job, "failed", reason=error.kind)

    def _fail_delete(self, name: str, error: BaseException) -> None:
        self._note_error("delete", error_of(error))
        if len(self._undeleted) < _MOST_DELETES:
            self._undeleted[name] = None
        self._end_delete()

    def _end_delete(self) -> None:
        self._num_deleting -= 1
        if not self._has_deletes and self._is_full:
            self._full_until_s = float("-inf")
            self._wakes["write"].notify_all()
        self._wake_waiters()

    def _note_error(self, what: str, error: StoreError) -> None:
        now_s = self._clock()
        self._failed[f"{what} {error.kind}"] += 1
        self._last_error = str(error)
        self._health.note_failure(what, error.kind, str(error), now_s)
        if (what, error.kind) == ("write", "full"):
            self._full_until_s = now_s + _FULL_RETRY_S

    def _note_late(self, job: _Job) -> None:
        why = "no answer in time"
        self._health.note_failure(job.kind, "late", why, self._clock())

    # What follows runs in threads of this, without the lock.

    def _serve_all(self, what: _What) -> None:
        """Ask the store for one call's worth after another; the work of a thread."""
        while items := self._next(what):
            self._serve(what, items)
            # Let go of their bytes while there is nothing else to do.
            del items

    def _next(self, what: _What) -> Sequence[Any]:
        """Wait for what the next call asks for; nothing once there will be no more."""
        with self._lock:
            while not (items := self._take(what)) and not self._is_closed:
                self._wakes[what].wait()
            return items

    def _serve(self, what: _What, items: Sequence[Any]) -> None:
        """Ask the store for some things at once, and note what comes of each."""
        way = self._ways[what]
        answers = attempt(way.call, items)
        if not isinstance(answers, StoreError) and len(answers) != len(items):
            answers = StoreError("other", f"{len(answers)} answers for {len(items)}")
        if isinstance(answers, StoreError):
            answers = [answers] * len(items)
        for item, answer in zip(items, answers, strict=True):
            failure = answer
            if not isinstance(answer, StoreError):
                failure = attempt(way.note, item, answer)
            if failure is not None:
                with self._lock:
                    way.fail(item, failure)

    def _get(self, jobs: list[_Job]) -> Sequence[Piece | StoreError | None]:
        names = [self.objects.name(job.key) for job in jobs]
        return self._store.get(names, self.objects.object_bytes)

    def _put(self, jobs: list[_Job]) -> Sequence[StoreError | None]:
        return self._store.put(
            [
                (self.objects.name(job.key), self.objects.encode(job.key, job.payload))
                for job in jobs
            ]
        )

    def _exists(self, jobs: list[_Job]) -> list[list[bool] | StoreError]:
        names: list[str] = []
        for job in jobs:
            job.indices = job.search.next_indices()
            names += [self.objects.name(job.run[index]) for index in job.indices]
        with self._lock:
            self._counts["probed"] += len(names)
        answers = iter(self._store.exists(names))
        return [
            attempt(answers_of, itertools.islice(answers, len(job.indices)))
            for job in jobs
        ]

    def _note_written(self, job: _Job, _: None) -> None:
        num_bytes = self.objects.object_bytes
        with self._lock:
            self._counts["written"] += 1
            self._counts["bytes written"] += num_bytes
            if self._lister is not None:
                self._fresh.append(job.key)
            job.payload = ()
            self._end(job, "done", num_bytes=num_bytes)

    def _note_read(self, job: _Job, data: Piece | None) -> None:
        payload = None
        if data is not None and not job.is_over:
            payload = self.objects.decode(job.key, data)
        with self._lock:
            self._end_read(job, payload, data)

    def _note_probed(self, job: _Job, are_there: list[bool]) -> None:
        with self._lock:
            job.search.note(job.indices, are_there)
            if job.search.is_over or job.is_over or self._is_closed:
                self._end(job, "done" if job.search.num_found else "missing")
                return
            job.is_out = False
            self._queues["probe"].appendleft(job)  # The next round, before others.

    def _note_deleted(self, _name: str, _: None) -> None:
        with self._lock:
            self._health.note_answer("delete")
            self._counts["deleted"] += 1
            self._end_delete()

    def _list(self, bound: Bound | None) -> None:
        listed = Listed(False)
        recorded: list[Bound] = []
        census = Census(self._store, self.objects.order_name)
        try:
            for names in self._store.list(self.objects.folder):
                page = ListedPage(*self.objects.keys_of(names))
                if bound is not None:
                    recorded += self.objects.bounds_of(names)
                    pairs = zip(page.keys, page.shards, strict=True)
                    own = [self.objects.name_of(*pair) for pair in pairs]
                    census.add_page(page.keys, own)
                with self._lock:
                    self._wakes_waiters.wait_for(
                        lambda: self._num_listed < _MOST_LISTED or self._is_closed
                    )
                    if self._is_closed:
                        return
                    if page.keys:
                        self._pages.append(page)
                        self._num_listed += len(page.keys)
            with self._lock:
                self._health.note_answer("list")
            listed = Listed(True)
            if bound is not None:
                listed = self._keep_bound(bound, recorded, census)
        except Exception as error:
            with self._lock:
                self._note_error("list", error_of(error))
        finally:
            with self._lock:
                self._listed = listed
                self._wakes_waiters.notify_all()

    def _keep_bound(self, own: Bound, recorded: list[Bound], census: Census) -> Listed:
        """Record a bound, and delete what is beyond the one that holds."""
        known = self._known_bounds(own, recorded)
        bound = agreed_bound(own, known)
        stale = [each for each in recorded if each.is_owners and each != own]
        if own.is_owners and stale:
            names = list(map(self.objects.bound_name, stale))
            answers_of(self._store.delete(names))
        # Others need not know of what is less than they know.
        if own not in known and (own == bound or own.is_owners):
            known.append(own)
        names = [
            self.objects.bound_name(each) for each in known if each not in recorded
        ]
        if names:
            records = [(name, [b"jaxkv\n"]) for name in names]
            self._record(lambda: answers_of(self._store.put(records)))
        self._bounds = known
        with self._lock:
            fresh, self._fresh = self._fresh, []
        keys = census.oldest_first(fresh)
        num_gone = max(0, len(keys) - bound.num_blocks)
        gone, kept = keys[:num_gone], keys[num_gone:]
        self._record(lambda: census.record(kept))
        with self._lock:
            for key in gone:
                self._delete(self.objects.all_names(key))
        return Listed(True, bound.num_blocks, len(kept), tuple(gone))

    def _record(self, put: Callable[[], object]) -> None:
        """Write what the store records of itself; a full one must still make room."""
        try:
            put()
        except StoreError as error:
            if error.kind != "full":
                raise
            with self._lock:
                self._note_error("write", error)

    def _known_bounds(self, own: Bound, recorded: Sequence[Bound]) -> list[Bound]:
        """Return the bounds that were recorded, with those that the store has lost.

        A store that evicts what was not used for long evicts records first, unless they
        are read. Without the record of a large engine, a small one would delete blocks.
        """
        try:
            answers_of(self._store.get(list(map(self.objects.bound_name, recorded)), 1))
        except StoreError as error:
            with self._lock:
                self._note_error("list", error)
        has_owner = own.is_owners or any(each.is_owners for each in recorded)
        lost = (
            each
            for each in self._bounds
            if each not in recorded and not (each.is_owners and has_owner)
        )
        known = dict.fromkeys((*recorded, *lost))
        return [
            each
            for each in known
            if each == own or not (each.is_owners and own.is_owners)
        ]
