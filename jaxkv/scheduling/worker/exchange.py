"""Messages between the processes of a run, in rounds and without their devices.

A thread reads and writes the messages in the key-value store of jax's coordination
service. A collective on the devices would be queued behind the model's programs, so
that the host could no longer dispatch ahead. If a peer did not join, the collective
would hang with everything queued behind it, and no error would name the peer; if plans
differed, it would pair with a collective of another program. A read of the store can be
stopped, shows which processes have written, and detects plans that differ.
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

from jaxkv.transfer.jax_internals import coordination_client

# While the thread waits for a peer, it checks this often whether it must end.
_SLICE_MS = 200
_JOIN_S = 2.0
_MIN_WAIT_S = 1.0
_worker_numbers = itertools.count()


class AgreementError(RuntimeError):
    """Processes that serve one model could not agree in time on transfer outcomes.

    The run must end, as the host tiers of the processes would diverge.

    `step` is the step of the transfers or of the plan. `processes` are the processes
    that sent no message in time: this one if its transfers have not ended, none if the
    coordination service has failed.
    """

    def __init__(self, message: str, step: int, processes: tuple[int, ...]):
        super().__init__(message)
        self.step = step
        self.processes = processes


class KeyValueStore(Protocol):
    """The methods that are used of the client of jax's coordination service.

    Not public, but equal in jax 0.10.2 to 0.12, and used by checkpointing libraries.
    """

    def key_value_set(self, key: str, value: str) -> None:
        """Write the value of a new key."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return all keys below `key/`, with their values."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; at the timeout, raise JaxRuntimeError (DEADLINE_EXCEEDED)."""

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
    # Set when all messages have been read, or at an error.
    has_ended: threading.Event = dataclasses.field(default_factory=threading.Event)


class _Messenger:
    """Runs rounds on a thread, without a reference that keeps the `Exchange` alive."""

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
        """Run the rounds of the queue in order, until a None."""
        while (round_ := self.rounds.get()) is not None:
            try:
                self._run_round(round_)
            except Exception as error:  # `Exchange.receive` raises it.
                round_.error = error
            round_.has_ended.set()

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
        # All processes have written this round, so each has read the whole previous
        # round, and its keys can be deleted. Each process leaves at most two keys.
        if round_.number:
            previous = f"{self._topic}/{round_.number - 1}/{self._process}"
            self._store.key_value_delete(previous)


def _missing(texts: dict[int, str], num_processes: int) -> tuple[int, ...]:
    """List the processes that have not sent a message."""
    return tuple(p for p in range(num_processes) if p not in texts)


class Exchange:
    """Exchanges the messages of all processes, one round after another.

    All processes must run the same rounds in the same order; a round may begin before
    the previous one ends. All keys begin with `topic`, which must be unique.
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
        self._messenger = _Messenger(store, process, num_processes, topic)
        # A daemon, so that the process can exit while the store does not answer.
        self._thread = threading.Thread(
            target=self._messenger.run, name=f"jaxkv {topic}", daemon=True
        )
        # Runs when this object is collected, or at exit before jax closes its client.
        self.close = weakref.finalize(self, _end, self._messenger, self._thread)
        atexit.register(self.close)

    @property
    def silent(self) -> tuple[int, ...]:
        """Processes whose message of the oldest round has not been read."""
        if not self._open:
            return ()
        return _missing(self._open[0].texts, self._num_processes)

    def send(self, text: str, step: int) -> None:
        """Begin a round with this process's message; never wait."""
        self._start()
        round_ = _Round(self._num_rounds, step, text)
        self._num_rounds += 1
        self._open.append(round_)
        self._messenger.rounds.put(round_)

    def receive(self, subject: str, left_s: float = math.inf) -> list[str]:
        """Return the messages of the oldest round not received yet, in process order.

        `subject` names their content in errors. `AgreementError` after `timeout_s`, or
        after the `left_s` that an earlier wait has left of it.
        """
        if self._failure is not None:
            raise self._failure
        self._start()
        round_ = self._open.popleft()
        # Even if no time is left, this process's own message takes time to be written.
        min_s = min(self.timeout_s, _MIN_WAIT_S)
        round_.has_ended.wait(min(max(left_s, min_s), self.timeout_s))
        missing = _missing(round_.texts, self._num_processes)
        if missing and round_.error is None:
            self._fail(
                f"processes {list(missing)} did not send {subject} within "
                f"agreement_timeout_s={self.timeout_s:g}: they have stalled, died, or "
                f"planned other transfers. Process {self.process} cannot continue "
                "without them.",
                round_.step,
                missing,
            )
        if round_.error is not None:
            self._fail(
                f"process {self.process} could not receive {subject}, because jax's "
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
        # Do not join the thread: the store may never answer it.
        self._messenger.is_ending.set()
        self._messenger.rounds.put(None)
        raise self._failure from cause


def _end(messenger: _Messenger, thread: threading.Thread) -> None:
    messenger.is_ending.set()
    messenger.rounds.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_JOIN_S)


def open_exchanges(timeout_s: float, topics: Sequence[str]) -> list[Exchange]:
    """Open an exchange between all processes of this run for each topic.

    The n-th call in each process opens the same exchanges.
    """
    client = coordination_client()
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
