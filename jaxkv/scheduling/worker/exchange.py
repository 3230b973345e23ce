"""Messages between the processes of a run, in rounds and without their devices.

They pass through the key-value store of jax's coordination service, which a thread
reads and writes. A collective on the devices would be queued behind the model's
programs, so that the host could no longer dispatch ahead. If a peer does not join, it
hangs with everything queued behind it and names no process; if plans differ, it pairs
with another program's. A read of the store can be stopped, shows which processes have
written, and detects messages about different transfers.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import itertools
import math
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

import jax

# After this wait for a peer the thread checks whether it must end.
_SLICE_MS = 200
_JOIN_S = 2.0
_MIN_WAIT_S = 1.0
_worker_numbers = itertools.count()


class AgreementError(RuntimeError):
    """Processes that serve one model could not agree in time on how transfers ended.

    The run is over: the processes would go on with different host tiers.

    `step` is the step of the transfers or of the plan. `processes` have not sent
    anything in time: this one if its transfers have not ended, none if the coordination
    service has failed.
    """

    def __init__(self, message: str, step: int, processes: tuple[int, ...]):
        super().__init__(message)
        self.step = step
        self.processes = processes


class KeyValueStore(Protocol):
    """The methods used of jax's client of its coordination service.

    It is not public. Checkpointing libraries rely on it, too: jax 0.10.2 to 0.12 agree.
    """

    def key_value_set(self, key: str, value: str) -> None:
        """Write a value under a key that is new."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Read all keys that begin with a key and a slash."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; raise JaxRuntimeError with DEADLINE_EXCEEDED."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key."""


@dataclasses.dataclass(eq=False)
class _Round:
    """A round: one message of each process."""

    number: int
    step: int
    text: str  # This process's message.
    texts: dict[int, str] = dataclasses.field(default_factory=dict)  # By process.
    error: Exception | None = None  # Of the store.
    # Set when all messages are known, or there is an error.
    is_over: threading.Event = dataclasses.field(default_factory=threading.Event)


class _Speaker:
    """The thread's part. It holds no `Exchange`, so that one can be collected."""

    def __init__(
        self, store: KeyValueStore, process: int, num_processes: int, topic: str
    ):
        self.rounds: queue.SimpleQueue[_Round | None] = queue.SimpleQueue()
        self.is_ending = threading.Event()
        self._store = store
        self._process = process
        self._num_processes = num_processes
        self._topic = topic

    def run(self) -> None:
        """Run one round after the other, until a None."""
        while (round_ := self.rounds.get()) is not None:
            try:
                self._run_round(round_)
            except Exception as error:  # A caller waits, and raises it.
                round_.error = error
            round_.is_over.set()

    def _run_round(self, round_: _Round) -> None:
        folder = f"{self._topic}/{round_.number}"
        self._store.key_value_set(f"{folder}/{self._process}", round_.text)
        while True:
            pairs = self._store.key_value_dir_get(folder)
            round_.texts = {int(key.rpartition("/")[2]): text for key, text in pairs}
            missing = _missing(round_.texts, self._num_processes)
            if not missing:
                break
            if self.is_ending.is_set():
                raise InterruptedError("the exchange was closed")
            key = f"{folder}/{missing[0]}"
            try:
                self._store.blocking_key_value_get(key, _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        # A process that has written in this round has read all of the last one, whose
        # keys are not read again: each process leaves at most two keys.
        if round_.number:
            old = f"{self._topic}/{round_.number - 1}/{self._process}"
            self._store.key_value_delete(old)


def _missing(texts: dict[int, str], num_processes: int) -> tuple[int, ...]:
    """List the processes that have not sent a message."""
    return tuple(p for p in range(num_processes) if p not in texts)


class Exchange:
    """Sends every process the messages of all processes, one round after the other.

    All processes take the same rounds in the same order; they may begin a round before
    the last is over. All keys begin with `topic`, which no other exchange may have.
    """

    def __init__(
        self,
        store: KeyValueStore,
        process: int,
        num_processes: int,
        topic: str,
        timeout_s: float,
    ):
        self.process = process
        self.timeout_s = timeout_s
        self._num_processes = num_processes
        self._num_rounds = 0
        self._open: collections.deque[_Round] = collections.deque()
        self._failure: AgreementError | None = None
        self._speaker = _Speaker(store, process, num_processes, topic)
        # A daemon: a call to a store that does not answer must not keep the process.
        self._thread = threading.Thread(
            target=self._speaker.run, name=f"jaxkv {topic}", daemon=True
        )
        # When this is collected, or at exit before jax closes its client.
        self.close = weakref.finalize(self, _end, self._speaker, self._thread)
        atexit.register(self.close)

    @property
    def silent(self) -> tuple[int, ...]:
        """The processes not known to have sent a message in the oldest round."""
        if not self._open:
            return ()
        return _missing(self._open[0].texts, self._num_processes)

    def send(self, text: str, step: int) -> None:
        """Begin a round; never waits."""
        self._start()
        round_ = _Round(self._num_rounds, step, text)
        self._num_rounds += 1
        self._open.append(round_)
        self._speaker.rounds.put(round_)

    def receive(self, subject: str, left_s: float = math.inf) -> list[str]:
        """Return the messages of the oldest round not received yet, in process order.

        `subject` completes the errors' "have not said". `left_s` is what a wait before
        this one has left of `timeout_s`. Raises `AgreementError`.
        """
        if self._failure is not None:
            raise self._failure
        self._start()
        round_ = self._open.popleft()
        # At least some time, as this process's own message has to be written.
        min_s = min(self.timeout_s, _MIN_WAIT_S)
        round_.is_over.wait(min(max(left_s, min_s), self.timeout_s))
        missing = _missing(round_.texts, self._num_processes)
        if missing and round_.error is None:
            self._fail(
                f"processes {list(missing)} have not said {subject} within "
                f"agreement_timeout_s={self.timeout_s:g}: they have stalled, died, or "
                f"planned other transfers. Process {self.process} cannot go on "
                "without them.",
                round_.step,
                missing,
            )
        if round_.error is not None:
            self._fail(
                f"process {self.process} could not ask the others {subject}, for jax's "
                f"coordination service has failed: {round_.error}",
                round_.step,
                (),
                round_.error,
            )
        return [round_.texts[process] for process in range(self._num_processes)]

    def _start(self) -> None:
        """Start the thread; if that fails, the next call tries again."""
        if self._thread.ident is None:
            with contextlib.suppress(RuntimeError, MemoryError):
                self._thread.start()

    def _fail(
        self,
        message: str,
        step: int,
        processes: tuple[int, ...],
        cause: Exception | None = None,
    ) -> None:
        self._failure = AgreementError(message, step, processes)
        # Do not join the thread, which may wait for an answer that never comes.
        self._speaker.is_ending.set()
        self._speaker.rounds.put(None)
        raise self._failure from cause


def _end(speaker: _Speaker, thread: threading.Thread) -> None:
    speaker.is_ending.set()
    speaker.rounds.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_JOIN_S)


def open_exchanges(timeout_s: float, topics: Sequence[str]) -> list[Exchange]:
    """Open an exchange between all processes of this run for each topic.

    The n-th call in one process talks to the n-th in every other.
    """
    # jax has no public name for it: see `KeyValueStore`.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise ValueError(
            f"{jax.process_count()} processes cannot agree on transfers without jax's "
            "coordination service: call jax.distributed.initialize() first."
        )
    number, process = next(_worker_numbers), jax.process_index()
    return [
        Exchange(
            client, process, jax.process_count(), f"jaxkv/{number}/{topic}", timeout_s
        )
        for topic in topics
    ]
