"""What the processes of a run send one another beside their devices.

They do so over the key-value store of jax's coordination service, not by a collective
on their devices:

* A collective is queued behind the model's programs, so its reader waits for the
  model: the host could not dispatch ahead any more. The store knows no devices.
* A collective that a peer does not join hangs, and what is queued behind it. No wait
  for it can be ended, and nothing shows who is missing. A look into the store ends
  when it is stopped, and shows who has written.
* Processes whose plans differ would pair a collective with another program's. Here
  they find that they talk of different things.

A thread talks to the store: it writes what this process sends as soon as that is
known, and reads what the others send, so that the thread that runs the model finds the
answer there when it is due, or waits for it no longer than it may.
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

# How long the thread waits for a peer at a time, before it looks whether it is to end.
_SLICE_MS = 200
_JOIN_S = 2.0
_LEAST_WAIT_S = 1.0
_worker_numbers = itertools.count()


class AgreementError(RuntimeError):
    """Processes that serve one model could not agree in time on how transfers ended.

    The run is over: each process knows only how its own transfers ended, and would go
    on with another host tier than the others.

    Attributes:
        step: The step of the transfers, or of the plan, in question.
        processes: The processes that have not sent anything in time; this process
            itself, if its own transfers have not ended. Empty if the coordination
            service could not be asked.
    """

    def __init__(self, message: str, step: int, processes: tuple[int, ...]):
        super().__init__(message)
        self.step = step
        self.processes = processes


class KeyValueStore(Protocol):
    """What is used of jax's client of its coordination service.

    jax has no public name for it, but checkpointing libraries rely on these methods.
    They are the same from jax 0.10.2 to 0.12.
    """

    def key_value_set(self, key: str, value: str) -> None:
        """Write a value under a key that is new."""
        ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Read all keys that begin with a key and a slash."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a key; raise JaxRuntimeError with DEADLINE_EXCEEDED."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Delete a key."""
        ...


@dataclasses.dataclass(eq=False)
class _Round:
    """What each process sends once.

    Attributes:
        number: Counts the rounds.
        step: The step that it is about.
        text: What this process sends.
        texts: What each process has sent, by its number, as far as it is known.
        error: Why the store could not be asked.
        is_over: Set when `texts` is complete, or there is an error.
    """

    number: int
    step: int
    text: str
    texts: dict[int, str] = dataclasses.field(default_factory=dict)
    error: Exception | None = None
    is_over: threading.Event = dataclasses.field(default_factory=threading.Event)


class _Speaker:
    """What the thread runs. It holds no `Exchange`, so that one can be forgotten."""

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
        """Take one round after the other, until there is a None."""
        while (round_ := self.rounds.get()) is not None:
            try:
                self._take(round_)
            # Whatever it is: it would not be seen here, and a caller waits.
            except Exception as error:
                round_.error = error
            round_.is_over.set()

    def _take(self, round_: _Round) -> None:
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
            self._wait_for(f"{folder}/{missing[0]}")
        # Who has spoken in this round has read all of the one before, so its keys are
        # not read again: each process leaves no more than two.
        if round_.number:
            old = f"{self._topic}/{round_.number - 1}/{self._process}"
            self._store.key_value_delete(old)

    def _wait_for(self, key: str) -> None:
        try:
            self._store.blocking_key_value_get(key, _SLICE_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def _missing(texts: dict[int, str], num_processes: int) -> tuple[int, ...]:
    """List the processes that have not sent anything."""
    return tuple(p for p in range(num_processes) if p not in texts)


class Exchange:
    """Sends every process what each of them has to send, one round after the other.

    All processes take the same rounds in the same order; they may begin one before the
    last is over.

    Args:
        store: Where they write.
        process: The number of this process.
        num_processes: How many there are.
        topic: What the keys begin with; another for each exchange.
        timeout_s: How long to wait for the others.
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
        # A daemon, for a call to a store that does not answer never returns, and must
        # not keep the process from ending.
        self._thread = threading.Thread(
            target=self._speaker.run, name=f"jaxkv {topic}", daemon=True
        )
        # When nothing holds this any more, or before jax takes its client away at exit.
        self.close = weakref.finalize(self, _end, self._speaker, self._thread)
        atexit.register(self.close)

    @property
    def silent(self) -> tuple[int, ...]:
        """The processes that have sent nothing in the oldest round, as far as known."""
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

    def receive(self, about: str, left_s: float = math.inf) -> list[str]:
        """Return what each process sends in the oldest round not received yet.

        Args:
            about: What the round is about, for the message of an error.
            left_s: How much of `timeout_s` is left, if it has been waited before.

        Returns:
            The texts, by the number of the process.

        Raises:
            AgreementError: A process has not sent anything within `timeout_s`, or the
                store cannot be asked.
        """
        if self._failure is not None:
            raise self._failure
        self._start()
        round_ = self._open.popleft()
        # Some time in any case, for this process's own words have to get there.
        least_s = min(self.timeout_s, _LEAST_WAIT_S)
        round_.is_over.wait(min(max(left_s, least_s), self.timeout_s))
        missing = _missing(round_.texts, self._num_processes)
        if missing and round_.error is None:
            self._fail(
                f"processes {list(missing)} have not said {about} within "
                f"agreement_timeout_s={self.timeout_s:g}: they have stalled, died, or "
                f"planned other transfers. Process {self.process} cannot go on "
                "without them.",
                round_.step,
                missing,
            )
        if round_.error is not None:
            self._fail(
                f"process {self.process} could not ask the others {about}, for jax's "
                f"coordination service has failed: {round_.error}",
                round_.step,
                (),
                round_.error,
            )
        return [round_.texts[process] for process in range(self._num_processes)]

    def _start(self) -> None:
        """Start the thread; without it rounds wait, and the next call tries again."""
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
        # Let the thread end by itself: it may wait for an answer that never comes.
        self._speaker.is_ending.set()
        self._speaker.rounds.put(None)
        raise self._failure from cause


def _end(speaker: _Speaker, thread: threading.Thread) -> None:
    speaker.is_ending.set()
    speaker.rounds.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_JOIN_S)


def open_exchanges(timeout_s: float, topics: Sequence[str]) -> list[Exchange]:
    """Open exchanges between all processes of this run, one for each topic.

    The n-th call in one process talks to the n-th in each other.

    Raises:
        ValueError: jax does not know how the processes reach one another.
    """
    # Not public, nor is there anything public in its place: see `KeyValueStore`.
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
