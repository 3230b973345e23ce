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

from jaxkv._util import Resource, check_whole
from jaxkv.transfer.storage.census import Bound, Census, agreed_bound
from jaxkv.transfer.storage.health import StoreHealth, log_line
from jaxkv.transfer.storage.objects import Bytes, ObjectFormat, Refusal
from jaxkv.transfer.storage.outage import Outages
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
    listed_names,
)
from jaxkv.transfer.storage.workers import Crew, start_thread
from jaxkv.types import BlockKey

Kind: TypeAlias = Literal["read", "write", "probe"]
_What: TypeAlias = Literal["read", "write", "probe", "delete"]
Outcome: TypeAlias = Literal["done", "missing", "refused", "failed", "late"]

_MAX_CALL_ITEMS = 16  # Probes or deletes of one call to the store
_MAX_DELETES = 1 << 16
_MAX_PROBES = 1 << 16
_MAX_LISTED = 1 << 18  # Listed blocks that wait for `take_pages`
_MAX_RECORDS = 4096  # Bounds of engines that share a store
_MAX_LATENCIES = 1 << 14
_HALF_LIFE_S = 10.0
_MAX_WAIT_S = threading.TIMEOUT_MAX / 2  # Locks refuse longer waits.
# Between writes to a full store, unless a delete makes room
_FULL_RETRY_S = 1.0
_NUM_ASKED = 8  # Names of a call that finds out if the store answers: of several nodes


class Completion(NamedTuple):
    """The end of a read, a write or a probe.

    Outcomes: ``"done"``; ``"missing"`` if the store does not have the object (for a
    probe, none of the run); ``"refused"`` if the object is not valid; ``"failed"`` if
    the store failed; ``"late"`` if the deadline came first.
    """

    ticket: int  # As returned by the call that submitted it
    kind: Kind
    key: BlockKey  # Of a probe, the first key of its run
    outcome: Outcome
    reason: str | None = None  # The reason of a refusal, or the kind of the error
    payload: memoryview | None = None  # Of a read that is done; the caller owns it
    num_bytes: int = 0  # Bytes of the object, if it was moved
    num_found: int = 0  # Of a probe, known blocks of the run in the store


class ListedPage(NamedTuple):
    """Some objects of a listing, of every shard."""

    keys: list[BlockKey]
    shards: list[int]  # The shard of each key


class Listed(NamedTuple):
    """The end of a listing."""

    is_whole: bool  # False if the store failed
    bound: int | None = None  # Blocks that the store may hold; None if unknown
    num_blocks: int = 0  # Blocks that remain
    deleted: tuple[BlockKey, ...] = ()  # Keys of blocks beyond the bound


@dataclasses.dataclass(frozen=True)
class StorageIOStats:
    """Counts since the start, and what is open now."""

    num_written: int  # Objects
    num_read: int  # Valid objects
    num_missing: int  # Reads of absent objects
    num_probed: int  # Objects asked for by probes
    num_late: int  # Reads that ended by their deadline
    num_dropped: int  # Writes beyond the queue's room, or while the store was full
    num_deleted: int  # Objects deleted by request, or because they were not valid
    bytes_written: int
    bytes_read: int
    refused: dict[str, int]  # Objects that were not valid, by reason
    failed: dict[str, int]  # Failed calls, by kind of call and error: "read full"
    queued_write_bytes: int  # Of unfinished writes
    open_read_bytes: int  # Of reads that are unfinished or not polled
    last_error: str | None  # The store's latest message
    is_up: bool = True  # Whether the latest call of every kind succeeded

    @property
    def errors(self) -> dict[str, int]:
        """All errors, by kind of call and reason, such as ``"read late"``.

        They are `failed` calls, late reads, writes beyond the queue's room (``"write
        busy"``) and `refused` objects.
        """
        refused = {f"read {reason}": num for reason, num in self.refused.items()}
        rest = {"read late": self.num_late, "write busy": self.num_dropped}
        return self.failed | refused | {what: num for what, num in rest.items() if num}


class Rate:
    """Bytes per second while something is in flight; the past counts less and less."""

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
        """Begin a transfer."""
        self._advance(now_s)
        self._num_open += 1

    def stop(self, now_s: float, num_bytes: int) -> None:
        """End a transfer of `num_bytes`; 0 if it failed."""
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


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """A submitted operation: in a queue, then with the store."""

    ticket: int
    kind: Kind
    run: Sequence[BlockKey]  # Of a probe; otherwise the key alone
    payload: Sequence[Bytes]
    search: RunSearch  # Of a probe
    indices: Sequence[int] = ()  # Blocks of the run in the current call
    is_out: bool = False  # A call to the store has it.
    since_s: float = 0.0  # When it was submitted, or its first call began
    is_over: bool = False  # No caller waits for it any more.

    @property
    def key(self) -> BlockKey:
        """The first key of its run."""
        return self.run[0]

    def ended(self, outcome: Outcome, **fields: Any) -> Completion:
        """Make its completion."""
        num_found = self.search.num_found
        return Completion(
            self.ticket, self.kind, self.key, outcome, num_found=num_found, **fields
        )


class _Operation(NamedTuple):
    """Callbacks of one kind of store call, for jobs or names of objects."""

    call: Callable[[Any], Sequence[Any]]  # Calls the store; one answer per item
    note: Callable[[Any, Any], None]  # Records an answer; called without the lock
    fail: Callable[[Any, BaseException], None]  # Records an error; with the lock
    max_items: int  # Of one call


class StorageIO(Resource):
    """Reads and writes the blocks of one shard in a store, in the background.

    No method waits for the store. Any thread may call any method. `close` also
    closes the store.

    A store that cannot be reached, or answers no call until a deadline, is down: what
    it has to answer fails, and so does each new operation, as ``"down"``, until the
    `Outages` or a late answer show that it is up again. Of a store with `nodes`, only
    the objects of a node that is down count as missing.

    At most `write_bytes` of writes are open (queued or with the store), and at most
    `read_bytes` of reads (queued, with the store, or not polled; an abandoned read
    counts until the store answers). `num_in_flight` objects are read, or written, at
    once.
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
        check_whole(1, write_bytes=write_bytes, read_bytes=read_bytes)
        check_whole(1, num_in_flight=num_in_flight)
        self.objects = objects
        self.label = ""  # See `ObjectFormat.label_name`. Set before `list_all`.
        self._store = store
        self._nodes: Outages | None = getattr(store, "nodes", None)
        self._max_bytes = {"write": write_bytes, "read": read_bytes}
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
        self._num_idle = {"read": 0, "probe": 0, "write": 0}  # Abandoned, in a queue
        self._deletes: dict[str, None] = {}  # An ordered set of names
        self._undeleted: dict[str, None] = {}  # Names whose deletion failed
        # The store counts as full until then, or until a delete makes room.
        self._full_until_s = float("-inf")
        self._num_deleting = 0  # Names with the store
        self._jobs: dict[int, _Job] = {}  # Those that a caller waits for, by ticket
        self._deadlines: list[tuple[float, int]] = []
        self._completions: collections.deque[Completion] = collections.deque()
        self._awaited = 1  # Completions that `wait` waits for
        self._open_bytes = {"write": 0, "read": 0}
        self._read_rate = Rate()
        self._pages: collections.deque[ListedPage] = collections.deque()
        self._num_listed = 0  # Blocks of `_pages`
        self._listed: Listed | None = None
        self._bounds: list[Bound] = []  # Of all engines, at the last listing
        self._fresh: list[BlockKey] = []  # Written during the listing
        self._lister: threading.Thread | None = None

        self._counts: collections.Counter[str] = collections.Counter()
        self._refused: collections.Counter[str] = collections.Counter()
        self._failed: collections.Counter[str] = collections.Counter()
        self._last_error: str | None = None
        self._health = StoreHealth(store.url)
        self._is_down = False
        self._answered_s = float("-inf")  # Latest answer to any call
        self._outage = Outages(store.url, self._ask_store, self._record_up)
        # Seconds that recent operations took, until `take_latencies`
        self._latencies: dict[str, collections.deque[float]] = {
            kind: collections.deque(maxlen=_MAX_LATENCIES)
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
        fail, max_items = self._fail, _MAX_CALL_ITEMS
        self._operations: dict[_What, _Operation] = {
            "read": _Operation(self._get, self._record_read, fail, reads),
            "write": _Operation(self._put, self._record_written, fail, writes),
            "probe": _Operation(self._exists, self._record_probed, fail, max_items),
            "delete": _Operation(
                store.delete, self._record_deleted, self._fail_delete, max_items
            ),
        }
        self._wakes = {
            what: threading.Condition(self._lock) for what in self._operations
        }
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
        """Submit writes of blocks: keys, and the pieces of each payload.

        The payloads belong to the store from now on, and must never change. Returns a
        ticket for each; None for a write beyond the queue's room, which is dropped and
        counted. A ValueError refuses all if a key or a payload has the wrong size.
        """
        items = [(key, list(payload)) for key, payload in items]
        for key, payload in items:
            self.objects.check(key, payload)
        tickets: list[int | None] = []
        with self._lock:
            is_full = self._is_full and not self._has_deletes
            is_refused = self._is_closed or self._is_down or is_full
            for key, payload in items:
                if is_refused or not self._reserve("write"):
                    self._counts["dropped"] += 1
                    tickets.append(None)
                    continue
                # A pending delete would delete the new object.
                name = self.objects.name(key)
                self._deletes.pop(name, None)
                self._undeleted.pop(name, None)
                tickets.append(self._add("write", (key,), payload))
            self._wake_for("write", len(tickets))
        return tickets

    def submit_reads(self, keys: Iterable[BlockKey], deadline_s: float) -> list[int]:
        """Submit reads; return a ticket for each.

        A read that is not done at `deadline_s` by `clock` is late, and a later answer
        is dropped. Reads beyond the queue's room fail at once, as ``"busy"``.
        """
        return self._ask("read", [(key,) for key in keys], deadline_s)

    def submit_probes(
        self, runs: Iterable[Sequence[BlockKey]], deadline_s: float
    ) -> list[int]:
        """Probe how many blocks of each run this shard has, from the first on.

        A run is the keys of consecutive blocks; an empty one is a ValueError. Its
        `RunSearch` takes several rounds in the store's threads. Deadlines, tickets and
        ``"busy"`` are as for `submit_reads`.
        """
        runs = list(runs)
        if not all(runs):
            raise ValueError("a run of no keys must have one to ask for.")
        return self._ask("probe", runs, deadline_s)

    def num_found_so_far(self, ticket: int) -> int:
        """Return how many blocks of a run are known to exist; 0 after its end."""
        with self._lock:
            job = self._jobs.get(ticket)
            return 0 if job is None else job.search.num_found

    def delete(self, keys: Iterable[BlockKey]) -> None:
        """Delete this shard's objects of some blocks, without a report.

        Failed deletes are tried again at the next listing. Deletes beyond the queue's
        room are forgotten, and `list_all` finds their objects.
        """
        names = [self.objects.name(key) for key in keys]
        with self._lock:
            self._delete(names)

    def list_all(self, bound: Bound | None = None) -> None:
        """Begin to list all blocks of the store, for `take_pages`.

        `bound` is how many blocks the store may hold according to this engine; None if
        it keeps no bound. The bound is recorded, and the oldest blocks beyond the
        `agreed_bound` of all records are deleted. If no listing can begin, it counts as
        failed. RuntimeError: a listing is in progress.
        """
        with self._lock:
            if self._lister is not None:
                raise RuntimeError("The store is being listed already.")
            self._fresh, self._listed = [], None
            undeleted, self._undeleted = self._undeleted, {}
            self._delete(undeleted)
            if self._is_down:
                self._listed = Listed(False)
                return
            try:
                self._lister = start_thread("jaxkv storage list", self._list, bound)
            except StoreError as error:
                self._record_error("list", error)
                self._listed = Listed(False)

    def take_pages(self, max_keys: int) -> tuple[list[ListedPage], Listed | None]:
        """Return what `list_all` has found since the last call, and its end, if any.

        No page is begun once those before it have `max_keys`; a page has one block to
        some thousands. A failing store ends the listing, and `stats` counts it.
        """
        pages: list[ListedPage] = []
        num_keys = 0
        with self._lock:
            while self._pages and num_keys < max_keys:
                pages.append(self._pages.popleft())
                num_keys += len(pages[-1].keys)
            self._num_listed -= num_keys
            self._wakes_waiters.notify_all()
            if self._pages or self._listed is None:
                return pages, None
            ended, self._lister, self._listed = self._listed, None, None
            return pages, ended

    def poll(self) -> list[Completion]:
        """Return what has ended since the last call, without waiting."""
        if not (self._completions or self._deadlines):
            return []  # An operation that ends at this moment waits for the next call.
        with self._lock:
            return self._poll()

    def wait(
        self, timeout_s: float | None = None, min_ended: int = 1
    ) -> list[Completion]:
        """Wait until `min_ended` operations have ended, or all, then `poll`.

        Deadlines are checked when the wait is over.
        """
        if timeout_s is not None:
            timeout_s = min(timeout_s, _MAX_WAIT_S)
        with self._lock:
            self._awaited = min_ended
            self._wakes_waiters.wait_for(
                lambda: len(self._completions) >= min_ended or not self._jobs, timeout_s
            )
            self._awaited = 1
            return self._poll()

    def cancel(self, tickets: Iterable[int], *, is_late: bool = False) -> None:
        """Abandon operations without a report; `is_late` counts them as failures."""
        cancelled = set(tickets)
        with self._lock:
            jobs = [self._jobs.pop(ticket, None) for ticket in cancelled]
            late = list(filter(None, jobs))
            for job in late:
                self._give_up(job)
            if is_late:
                self._failed.update(f"{job.kind} late" for job in late)
                self._record_late(late)
            kept: collections.deque[Completion] = collections.deque()
            for completion in self._completions:
                if completion.ticket not in cancelled:
                    kept.append(completion)
                elif completion.payload is not None:
                    self._release("read")
            self._completions = kept
            self._wakes_waiters.notify_all()

    def record_failure(self, kind: Kind, error: BaseException) -> None:
        """Count a read or a write that failed before its call."""
        with self._lock:
            self._record_error(kind, error_of(error))

    @property
    def read_bytes_per_s(self) -> float:
        """Recent bytes per second while reads are open, late ones as 0; 0 at first."""
        with self._lock:
            return self._read_rate.bytes_per_s

    @property
    def url(self) -> str:
        """The store's URL, without secrets."""
        return self._store.url

    @property
    def can_list(self) -> bool:
        """Whether the store can be listed."""
        return can_list(self._store)

    @property
    def is_up(self) -> bool:
        """Whether the latest call of every kind succeeded."""
        return self._health.is_up

    @property
    def is_down(self) -> bool:
        """Whether operations fail at once, until the store answers again."""
        return self._is_down

    @property
    def node_states(self) -> dict[str, bool]:
        """Whether each node of the store is up, by name; the store if it has none."""
        states = {} if self._nodes is None else self._nodes.states()
        return states or {self.url: not self._is_down}

    def take_latencies(self) -> dict[str, list[float]]:
        """Return the seconds that operations took since the last call, by kind."""
        latencies_s: dict[str, list[float]] = {}
        for kind, latencies in self._latencies.items():
            if latencies:
                with self._lock:
                    latencies_s[kind] = list(latencies)
                    latencies.clear()
        return latencies_s

    def log_health(self) -> None:
        """Log an outage of the store, or its end, when due."""
        if self._health.has_news:
            with self._lock:
                line = self._health.next_line(self._clock())
            log_line(line)

    @property
    def stats(self) -> StorageIOStats:
        """Counts so far."""
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
        """Refuse new operations and end the threads.

        Waits up to `timeout_s` seconds for open writes and deletes. Operations still
        queued then fail as ``"closed"``; writes count as dropped.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wakes_waiters.wait_for(
                lambda: not (self._open_bytes["write"] or self._has_deletes),
                min(timeout_s, _MAX_WAIT_S),
            )
            for kind in self._queues:
                num_ended = self._end_queue(kind, "closed")
                self._counts["dropped"] += num_ended * (kind == "write")
            self._deletes.clear()
            self._outage.close()
            for wakes in (*self._wakes.values(), self._wakes_waiters):
                wakes.notify_all()
        self._store.close()

    # The methods down to `_serve_all` are called with the lock held.

    def _ask(
        self, kind: Kind, runs: Sequence[Sequence[BlockKey]], deadline_s: float
    ) -> list[int]:
        for key in itertools.chain.from_iterable(runs):
            self.objects.name(key)  # Refuse a bad key before submitting any.
        tickets = []
        with self._lock:
            for run in runs:
                if self._is_closed or self._is_down or not self._reserve(kind):
                    ticket = self._next_ticket
                    self._next_ticket += 1
                    reason = "down" if self._is_down else "busy"
                    self._failed[f"{kind} {reason}"] += 1
                    self._completions.append(
                        Completion(ticket, kind, run[0], "failed", reason)
                    )
                else:
                    ticket = self._add(kind, run)
                    if deadline_s < float("inf"):
                        heapq.heappush(self._deadlines, (deadline_s, ticket))
                tickets.append(ticket)
            self._wake_for(kind, len(tickets))
        return tickets

    def _wake_for(self, kind: Kind, num_jobs: int) -> None:
        """Wake threads for new jobs; if there is no thread, the jobs fail."""
        error = self._start_threads(kind)
        if error is not None:
            for _ in range(self._end_queue(kind, error.kind)):
                self._record_error(kind, error)
        else:
            self._wakes[kind].notify(num_jobs)

    def _start_threads(self, what: _What) -> StoreError | None:
        """Start missing threads; return the error if there is no thread at all."""
        crew = self._crews[what]
        if crew.num_missing:
            try:
                crew.start()
            except StoreError as error:
                return None if crew.has_thread else error
        return None

    def _reserve(self, kind: Kind) -> bool:
        if kind == "probe":
            return len(self._queues["probe"]) < _MAX_PROBES
        open_bytes = self._open_bytes[kind] + self.objects.object_bytes
        # One always fits, whatever the size of a block.
        if self._open_bytes[kind] and open_bytes > self._max_bytes[kind]:
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
        search = RunSearch(len(run)) if kind == "probe" else _NO_SEARCH
        job = _Job(ticket, kind, run, payload, search, since_s=self._clock())
        self._jobs[ticket] = job
        self._queues[kind].append(job)
        return ticket

    def _give_up(self, job: _Job) -> None:
        """Abandon a job that has left `_jobs`."""
        job.is_over = True
        if job.is_out:
            return
        job.payload = ()
        self._release(job.kind)
        # Removing it from its queue now would scan the jobs before it.
        self._num_idle[job.kind] += 1
        queue = self._queues[job.kind]
        if 2 * self._num_idle[job.kind] > len(queue) + _MAX_CALL_ITEMS:
            self._queues[job.kind] = collections.deque(
                queued for queued in queue if not queued.is_over
            )
            self._num_idle[job.kind] = 0

    def _poll(self) -> list[Completion]:
        now_s = self._clock()
        late: list[_Job] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, ticket = heapq.heappop(self._deadlines)
            job = self._jobs.pop(ticket, None)
            if job is not None:
                self._give_up(job)
                if job.kind == "probe":
                    self._failed["probe late"] += 1
                else:
                    self._counts["late"] += 1
                late.append(job)
                self._completions.append(job.ended("late"))
        if late:
            self._record_late(late)
        completions, self._completions = self._completions, collections.deque()
        for completion in completions:
            if completion.payload is not None:
                self._release("read")
        return list(completions)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            if not self._is_closed and len(self._deletes) < _MAX_DELETES:
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
        """Remove the items of one call: jobs from a queue, or names to delete."""
        max_items = self._operations[what].max_items
        if what == "delete" and self._is_down and not self._is_closed:
            return ()
        if what == "delete":
            names = list(itertools.islice(self._deletes, max_items))
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
        while queue and len(jobs) < max_items:
            job = queue.popleft()
            if job.is_over:
                self._num_idle[what] -= 1
                continue
            if not job.search.num_found:  # A probe may have had an earlier round.
                job.since_s = self._clock()
            job.is_out = True
            jobs.append(job)
            if what == "read":
                self._read_rate.start(job.since_s)
        return jobs

    def _end(self, job: _Job, outcome: Outcome, **fields: Any) -> None:
        """Report a job that the store has answered, if a caller waits for it."""
        num_bytes = fields.get("num_bytes", 0)
        if outcome != "failed":
            self._record_answer(job.kind)
        now_s = self._clock()
        if job.kind == "read":
            self._read_rate.stop(now_s, 0 if job.is_over else num_bytes)
        if outcome != "failed":
            self._latencies[job.kind].append(now_s - job.since_s)
        if job.is_over:
            fields["payload"] = None
        else:
            job.is_over = True
            del self._jobs[job.ticket]
            self._completions.append(job.ended(outcome, **fields))
        if fields.get("payload") is None:
            self._release(job.kind)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Wake the waiters, but only once enough has ended: each wake-up takes time."""
        if len(self._completions) >= self._awaited or not self._jobs or self._is_closed:
            self._wakes_waiters.notify_all()

    def _end_queue(self, kind: Kind, reason: str) -> int:
        """Fail the jobs that are still in a queue; return their number."""
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

    def _fail(self, job: _Job, error: BaseException) -> None:
        error = error_of(error)
        self._record_error(job.kind, error)
        self._end(job, "failed", reason=error.kind)

    def _fail_delete(self, name: str, error: BaseException) -> None:
        self._record_error("delete", error_of(error))
        if len(self._undeleted) < _MAX_DELETES:
            self._undeleted[name] = None
        self._end_delete()

    def _end_delete(self) -> None:
        self._num_deleting -= 1
        if not self._has_deletes and self._is_full:
            self._full_until_s = float("-inf")
            self._wakes["write"].notify_all()
        self._wake_waiters()

    def _record_error(self, what: str, error: StoreError) -> None:
        now_s = self._clock()
        self._failed[f"{what} {error.kind}"] += 1
        self._last_error = str(error)
        if not error.was_down:
            self._health.record_failure(what, error.kind, str(error), now_s)
        if (what, error.kind) == ("write", "full"):
            self._full_until_s = now_s + _FULL_RETRY_S

    def _record_late(self, jobs: Sequence[_Job]) -> None:
        """Record jobs without an answer in time; find out what is down."""
        now_s, has_down = self._clock(), False
        for job in jobs:
            self._health.record_failure(job.kind, "late", "no answer in time", now_s)
        if jobs and self._nodes is not None:
            has_down = self._nodes.give_up(now_s - min(job.since_s for job in jobs))
        if not has_down and any(self._answered_s <= job.since_s for job in jobs):
            self._record_down()

    def _record_answer(self, what: str) -> None:
        self._answered_s = self._clock()
        self._health.record_answer(what)
        if self._is_down:
            self._set_up()

    def _record_down(self) -> None:
        """End all operations, and let later ones fail until the store answers."""
        if self._is_down or self._is_closed:
            return
        if not self._outage.begin():
            return  # Each operation waits for the store.
        self._is_down = True
        self._health.record_down()
        for kind in self._queues:
            num_ended = self._end_queue(kind, "down")
            self._counts["dropped"] += num_ended * (kind == "write")
        for job in self._jobs.values():
            self._give_up(job)
            self._completions.append(job.ended("failed", reason="down"))
        self._jobs.clear()
        self._wake_waiters()

    def _set_up(self) -> None:
        self._is_down = False
        self._outage.end("")
        self._health.record_up()
        self._wakes["delete"].notify_all()

    # The methods below run in this object's threads, without the lock.

    def _ask_store(self, _: str) -> None:
        """Wait for an answer of the store; raise an error if it fails."""
        names = [f"{self.objects.folder}/up.{number}" for number in range(_NUM_ASKED)]
        answers = self._store.exists(names)
        if all(isinstance(answer, StoreError) for answer in answers):
            answers_of(answers)

    def _record_up(self) -> None:
        with self._lock:
            if self._is_down:
                self._answered_s = self._clock()
                self._set_up()

    def _serve_all(self, what: _What) -> None:
        """Call the store until it is closed; runs in a thread."""
        while items := self._next(what):
            self._serve(what, items)
            # Release their bytes before waiting for the next.
            del items

    def _next(self, what: _What) -> Sequence[Any]:
        """Wait for the items of the next call; none after `close`."""
        with self._lock:
            while not (items := self._take(what)) and not self._is_closed:
                self._wakes[what].wait()
            return items

    def _serve(self, what: _What, items: Sequence[Any]) -> None:
        """Make one call of the store, and record each answer."""
        operation = self._operations[what]
        answers = attempt(operation.call, items)
        if not isinstance(answers, StoreError) and len(answers) != len(items):
            answers = StoreError("other", f"{len(answers)} answers for {len(items)}")
        if isinstance(answers, StoreError):
            if answers.kind == "unreachable":
                error = answers
                with self._lock:
                    for item in items:
                        operation.fail(item, error)
                    self._record_down()
                return
            answers = [answers] * len(items)
        for item, answer in zip(items, answers, strict=True):
            failure = answer
            if not isinstance(answer, StoreError):
                failure = attempt(operation.note, item, answer)
            if failure is not None:
                with self._lock:
                    operation.fail(item, failure)

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
        answers = (
            False if isinstance(answer, StoreError) and answer.was_down else answer
            for answer in self._store.exists(names)
        )
        return [
            attempt(answers_of, itertools.islice(answers, len(job.indices)))
            for job in jobs
        ]

    def _record_written(self, job: _Job, _: None) -> None:
        num_bytes = self.objects.object_bytes
        with self._lock:
            self._counts["written"] += 1
            self._counts["bytes written"] += num_bytes
            if self._lister is not None:
                self._fresh.append(job.key)
            job.payload = ()
            self._end(job, "done", num_bytes=num_bytes)

    def _record_read(self, job: _Job, data: Piece | None) -> None:
        payload = None
        if data is not None and not job.is_over:
            payload = self.objects.decode(job.key, data)
        with self._lock:
            if data is None:
                self._counts["missing"] += 1
                self._end(job, "missing")
            elif payload is None:
                self._end(job, "late")  # It was not decoded.
            elif isinstance(payload, Refusal):
                self._refused[payload.reason] += 1
                self._health.record_refusal(payload.reason)
                if payload.is_ours:
                    self._delete([self.objects.name(job.key)])
                self._end(job, "refused", reason=payload.reason, num_bytes=len(data))
            else:
                self._counts["read"] += 1
                self._counts["bytes read"] += len(data)
                self._end(job, "done", payload=payload, num_bytes=len(data))

    def _record_probed(self, job: _Job, are_there: list[bool]) -> None:
        with self._lock:
            job.search.note(job.indices, are_there)
            if job.search.is_over or job.is_over or self._is_closed:
                self._end(job, "done" if job.search.num_found else "missing")
                return
            job.is_out = False
            self._queues["probe"].appendleft(job)  # Its next round goes first.

    def _record_deleted(self, _name: str, _: None) -> None:
        with self._lock:
            self._record_answer("delete")
            self._counts["deleted"] += 1
            self._end_delete()

    def _list(self, bound: Bound | None) -> None:
        listed = Listed(False)
        recorded: list[Bound] = []
        labels = [self.objects.label_name(self.label)] if self.label else []
        census = Census(self._store, self.objects.order_name)
        try:
            for names in listed_names(self._store, self.objects.folder):
                page = ListedPage(*self.objects.keys_of(names))
                if bound is not None:
                    recorded += self.objects.bounds_of(names)
                    del recorded[_MAX_RECORDS:]
                    labels = [name for name in labels if name not in names]
                    pairs = zip(page.keys, page.shards, strict=True)
                    block_names = [self.objects.name_of(*pair) for pair in pairs]
                    census.add_page(page.keys, block_names)
                with self._lock:
                    self._wakes_waiters.wait_for(
                        lambda: self._num_listed < _MAX_LISTED or self._is_closed
                    )
                    if self._is_closed:
                        return
                    if page.keys:
                        self._pages.append(page)
                        self._num_listed += len(page.keys)
            with self._lock:
                self._record_answer("list")
            listed = Listed(True)
            if bound is not None:
                listed = self._keep_bound(bound, recorded, census, labels)
        except Exception as error:
            with self._lock:
                failure = error_of(error)
                self._record_error("list", failure)
                if failure.kind == "unreachable":
                    self._record_down()
        finally:
            with self._lock:
                self._listed = listed
                self._wakes_waiters.notify_all()

    def _keep_bound(
        self, bound: Bound, recorded: list[Bound], census: Census, labels: list[str]
    ) -> Listed:
        """Record bound and labels, and delete blocks beyond the agreed bound."""
        known_bounds = self._known_bounds(bound, recorded)
        agreed = agreed_bound(bound, known_bounds)
        stale = [record for record in recorded if record.is_owners and record != bound]
        if bound.is_owners and stale:
            names = list(map(self.objects.bound_name, stale))
            answers_of(self._store.delete(names))
        # Others need no record of a smaller bound than they know.
        if bound not in known_bounds and (bound == agreed or bound.is_owners):
            known_bounds.append(bound)
        unrecorded = [record for record in known_bounds if record not in recorded]
        names = [*map(self.objects.bound_name, unrecorded), *labels]
        if names:
            records = [(name, [b"jaxkv\n"]) for name in names]
            self._record(lambda: answers_of(self._store.put(records)))
        self._bounds = known_bounds
        with self._lock:
            fresh, self._fresh = self._fresh, []
        keys = census.oldest_first(fresh)
        num_deleted = max(0, len(keys) - agreed.num_blocks)
        deleted, kept = keys[:num_deleted], keys[num_deleted:]
        self._record(lambda: census.record(kept))
        with self._lock:
            for key in deleted:
                self._delete(self.objects.all_names(key))
        return Listed(True, agreed.num_blocks, len(kept), tuple(deleted))

    def _record(self, put: Callable[[], object]) -> None:
        """Write records of the listing; a full store must still make room."""
        try:
            put()
        except StoreError as error:
            if error.kind != "full":
                raise
            with self._lock:
                self._record_error("write", error)

    def _known_bounds(self, bound: Bound, recorded: Sequence[Bound]) -> list[Bound]:
        """Return the recorded bounds and those that the store has evicted since.

        An evicting store evicts records first unless they are read. Without the record
        of a large engine, a small one would delete blocks.
        """
        try:
            answers_of(self._store.get(list(map(self.objects.bound_name, recorded)), 1))
        except StoreError as error:
            with self._lock:
                self._record_error("list", error)
        has_owner = bound.is_owners or any(record.is_owners for record in recorded)
        evicted = (
            record
            for record in self._bounds
            if record not in recorded and not (record.is_owners and has_owner)
        )
        return [
            record
            for record in dict.fromkeys((*recorded, *evicted))
            if record == bound or not (record.is_owners and bound.is_owners)
        ]
