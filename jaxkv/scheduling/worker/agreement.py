"""Agreement between the processes that serve one model on outcomes of transfers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from jaxkv.scheduling.protocol import NO_MOVES
from jaxkv.scheduling.worker.exchange import AgreementError, Exchange
from jaxkv.scheduling.worker.watchdog import Watchdog
from jaxkv.transfer import AnyEngine, Completion, Ticket
from jaxkv.types import PyTree

EventName: TypeAlias = int | tuple[str, ...]
"""The number of a store event, or the requests that wait for a load."""

# The pause between polls of the engine doubles from the minimum to the maximum.
_MIN_PAUSE_S, _MAX_PAUSE_S = 1e-4, 5e-3
_MAX_NAMED = 8  # Transfers, or differing values, named in an error.


class PlanMismatchError(RuntimeError):
    """Processes that serve one model have planned different transfers."""


def check_equal(
    what: str, facts: Sequence[Mapping[str, str]], process: int, remedy: str
) -> None:
    """Raise PlanMismatchError, with both values, if a process has other facts."""
    own = facts[process]
    differing = [number for number, other in enumerate(facts) if other != own]
    if differing:
        other = facts[differing[0]]
        values = [
            f"{name} is {own.get(name)} in process {process}, and {other.get(name)} in "
            f"process {differing[0]}"
            for name in {**own, **other}
            if own.get(name) != other.get(name)
        ]
        raise PlanMismatchError(
            f"{what.format(differing)} than process {process}: "
            f"{'; '.join(values[:_MAX_NAMED])}. {remedy}"
        )


def check_same_plans(
    step: int, verb: str, plans: Sequence[Mapping[str, str]], process: int
) -> None:
    """Raise PlanMismatchError if a process has another plan than `process`."""
    what = f"in step {step} processes {{}} {verb} other transfers"
    remedy = "All schedulers must receive the same requests and reports in one order."
    check_equal(what, plans, process, remedy)


@dataclasses.dataclass(eq=False)
class Batch:
    """The transfers of a step in one direction, which share the bandwidth."""

    start_s: float
    num_left: int  # Transfers not reported yet.
    num_bytes: int = 0  # Of the transfers that succeeded.
    end_s: float | None = None  # Last report of a transfer that succeeded.


@dataclasses.dataclass(eq=False)
class Transfer:
    """A transfer from its start until it is reported."""

    ticket: Ticket
    name: EventName
    batch: Batch
    step: int
    has_ended: bool = False  # In this process: succeeded, failed or was abandoned.
    # None unless it succeeded in this process and, after the agreement, in all.
    done: Completion | None = None

    def __str__(self) -> str:
        if isinstance(self.name, int):
            return f"store event {self.name} of step {self.step}"
        return f"the load of {', '.join(map(repr, self.name))} of step {self.step}"

    def end(self, done: Completion | None) -> None:
        """Record the outcome in this process; None if the transfer was abandoned."""
        self.has_ended = True
        self.done = done if done is not None and done.error is None else None


class Agreement:
    """Makes a transfer that has failed in one process fail in all.

    Each process sends its outcomes of a step once all transfers of the step have ended
    there, and receives the outcomes of the others in `settle`, when the transfers are
    due. All processes must call `settle` in the same order. `settle` abandons a due
    transfer after `deadline_s`; if that is None, it ends the run instead.
    """

    def __init__(
        self,
        exchange: Exchange,
        engine: AnyEngine,
        deadline_s: float | None,
        clock: Callable[[], float],
    ):
        self._exchange = exchange
        self._engine = engine
        self._deadline_s = deadline_s
        self._clock = clock
        self._transfers: dict[Ticket, Transfer] = {}
        # The transfers by step, the oldest step first, until the processes agree.
        self._steps: dict[int, list[Transfer]] = {}
        self._unsent: deque[int] = deque()  # Steps whose outcomes have not been sent.
        self.plan = NO_MOVES  # Of the step that begins.
        self._plans: dict[int, Mapping[str, str]] = {}  # Facts, by unsent step.
        self._awaits_settings = False
        self._failure: Exception | None = None
        self._watchdog = Watchdog(exchange.timeout_s)

    def watch(self, call: str) -> contextlib.AbstractContextManager[None]:
        """End the process if the `with` block, named `call`, does not end in time."""

        def describe() -> str:
            text = (
                f"{call} has not returned in process {self._exchange.process} for "
                f"{self._watchdog.limit_s:g} s. It waits inside jax's runtime, most "
                "likely for a process that has stalled or died"
            )
            silent = list(self._exchange.silent)
            return f"{text}: no message from {silent}." if silent else f"{text}."

        return self._watchdog.watch(describe)

    def announce(self, settings: Mapping[str, str]) -> None:
        """Send this process's settings, before anything else; never wait."""
        self._exchange.send(json.dumps(settings), 1)
        self._awaits_settings = True

    def begin(self, transfer: Transfer) -> None:
        """Add a started transfer."""
        if transfer.step not in self._steps:
            self._unsent.append(transfer.step)
            step = str(transfer.step)
            self._plans[transfer.step] = {"step": step, **self.plan.facts()}
        self._transfers[transfer.ticket] = transfer
        self._steps.setdefault(transfer.step, []).append(transfer)

    def send(self) -> None:
        """Send the outcomes of steps whose transfers have all ended; never wait."""
        for done in self._engine.poll():
            transfer = self._transfers.get(done.ticket)
            if transfer is not None:
                transfer.end(done)
        # Send steps in order: rounds of the exchange are matched by number.
        while self._unsent and not _in_flight(self._steps[self._unsent[0]]):
            step = self._unsent.popleft()
            oks = "".join(
                "0" if transfer.done is None else "1" for transfer in self._steps[step]
            )
            self._exchange.send(json.dumps([self._plans.pop(step), oks]), step)

    def settle(
        self, pool: PyTree, last: int, *, wait_for_all: bool
    ) -> tuple[PyTree, list[Transfer]]:
        """Wait for this process's due transfers, then for the others' outcomes.

        Return the due transfers, of the steps up to `last`. `wait_for_all` also waits
        for later transfers of this process. Raises AgreementError or PlanMismatchError.
        """
        if self._failure is not None:
            raise self._failure
        self._watchdog.beat()
        end_s = self._clock() + self._exchange.timeout_s
        try:
            pool = self._wait(pool, last, wait_for_all)
            agreed = self._receive(last, end_s)
        except (AgreementError, PlanMismatchError) as error:
            self._failure = error
            raise
        self._watchdog.beat()
        return pool, agreed

    def _wait(self, pool: PyTree, last: int, wait_for_all: bool) -> PyTree:
        """Wait until this process's transfers have ended."""
        # `engine.drain` would not do: it may wait for a collective that another process
        # never joins.
        start_s, pause_s = self._clock(), _MIN_PAUSE_S
        while True:
            pool = self._engine.advance(pool)
            self.send()
            waited_s = self._clock() - start_s
            steps = self._steps if wait_for_all else self._up_to(last)
            late = [late for step in steps for late in _in_flight(self._steps[step])]
            if not late:
                return pool
            if self._deadline_s is not None and waited_s > self._deadline_s:
                for transfer in late:
                    self._engine.abandon(transfer.ticket)
                    transfer.end(None)
                continue
            if waited_s > self._exchange.timeout_s:
                process = self._exchange.process
                raise AgreementError(
                    f"{_names(late)} did not end in process {process} "
                    f"within agreement_timeout_s={self._exchange.timeout_s:g}. The "
                    "device is stuck, or waits for a process that has stalled or died. "
                    "With a shorter deadline_s, such a transfer fails instead.",
                    late[0].step,
                    (process,),
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _receive(self, last: int, end_s: float) -> list[Transfer]:
        """Wait for the outcomes of all processes; return the due transfers."""
        agreed, due = [], self._up_to(last)
        if self._awaits_settings and (due or not self._exchange.silent):
            self._awaits_settings = False
            texts = self._exchange.receive("their settings", end_s - self._clock())
            facts, what = [*map(json.loads, texts)], "processes {} have other settings"
            remedy = "Start all processes with the same settings."
            check_equal(what, facts, self._exchange.process, remedy)
        for step in due:
            transfers = self._steps[step]
            subject = f"the outcome of {_names(transfers)}"
            texts = self._exchange.receive(subject, end_s - self._clock())
            plans, outcomes = zip(*map(json.loads, texts), strict=True)
            check_same_plans(step, "started", plans, self._exchange.process)
            oks = [set(column) == {"1"} for column in zip(*outcomes, strict=True)]
            del self._steps[step]
            for transfer, ok in zip(transfers, oks, strict=True):
                del self._transfers[transfer.ticket]
                transfer.done = transfer.done if ok else None
                agreed.append(transfer)
        return agreed

    def _up_to(self, last: int) -> list[int]:
        # The steps are in order, so the search ends at the first later one.
        return list(itertools.takewhile(lambda step: step <= last, self._steps))


def _in_flight(transfers: list[Transfer]) -> list[Transfer]:
    """List the transfers that have not ended in this process."""
    return [transfer for transfer in transfers if not transfer.has_ended]


def _names(transfers: list[Transfer]) -> str:
    """Name the first transfers for a message."""
    names = " and ".join(map(str, transfers[:_MAX_NAMED]))
    num_more = len(transfers) - _MAX_NAMED
    return f"{names} and {num_more} more" if num_more > 0 else names
