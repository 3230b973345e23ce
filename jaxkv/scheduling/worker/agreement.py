"""How the processes that serve one model agree on how transfers ended."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

from jaxkv.scheduling.worker.exchange import AgreementError, Exchange
from jaxkv.scheduling.worker.watchdog import Watchdog
from jaxkv.transfer import AnyEngine, Completion, Ticket
from jaxkv.types import PyTree

EventName: TypeAlias = int | tuple[str, ...]
"""A store event, or the requests of a load event."""

# How long to wait between two looks at transfers that are due; doubled up to the most.
_LEAST_PAUSE_S = 1e-4
_MOST_PAUSE_S = 5e-3
# How many transfers an error lists.
_MOST_NAMED = 8


class PlanMismatchError(RuntimeError):
    """Processes that serve one model have planned different transfers."""


@dataclasses.dataclass(eq=False)
class Batch:
    """The transfers of a step in one direction, which share its bandwidth.

    Attributes:
        start_s: When they were started.
        num_left: Those that were not reported.
        in_step: Whether the step's own program writes them, in its own time.
        num_bytes: Bytes of those that arrived.
        end_s: When the last of these was reported.
    """

    start_s: float
    num_left: int
    in_step: bool = False
    num_bytes: int = 0
    end_s: float | None = None


@dataclasses.dataclass(eq=False)
class Transfer:
    """A transfer that was started and not reported.

    Attributes:
        ticket: What the engine calls it.
        name: What the scheduler calls it.
        batch: What was started with it.
        step: In which step.
        is_over: Whether it has ended in this process, or was abandoned.
        done: How it ended, if it succeeded; in all processes, once they have agreed.
    """

    ticket: Ticket
    name: EventName
    batch: Batch
    step: int
    is_over: bool = False
    done: Completion | None = None

    def __str__(self) -> str:
        if isinstance(self.name, int):
            return f"store event {self.name} of step {self.step}"
        return f"the load of {', '.join(map(repr, self.name))} of step {self.step}"

    def end(self, done: Completion | None) -> None:
        """Note how it ended here; None if it was abandoned."""
        self.is_over = True
        self.done = done if done is not None and done.error is None else None


@dataclasses.dataclass(eq=False)
class _Step:
    """The transfers of a step that the processes have not agreed on.

    Attributes:
        number: The step.
        transfers: In the order in which they were started.
        num_open: Those that are not over in this process.
    """

    number: int
    transfers: list[Transfer]
    num_open: int = 0


class Agreement:
    """Makes a transfer that has failed in one process fail in all.

    How the transfers of a step ended here is sent as soon as it is known, and received
    when they are due, from `settle`. All processes call that in the same order.

    Args:
        exchange: How the processes talk; it is this object's alone.
        engine: What moves blocks in this process.
        deadline_s: How long to wait for one of its transfers that is due, which is
            then abandoned and has failed; None to end the run instead.
        clock: Seconds since some moment.
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
        # In order; and of these, the ones whose outcome was not sent.
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._unsent: deque[_Step] = deque()
        self._failure: Exception | None = None
        self._watchdog = Watchdog(exchange.timeout_s)

    def watch(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Watch over a call: it ends the process if it does not return for long."""
        return self._watchdog.watch(lambda: self._describe(call))

    def begin(self, transfer: Transfer) -> None:
        """Take note of a transfer that was started."""
        step = transfer.step
        if step not in self._steps:
            self._steps[step] = _Step(step, [])
            self._unsent.append(self._steps[step])
        self._transfers[transfer.ticket] = transfer
        self._steps[step].transfers.append(transfer)
        self._steps[step].num_open += 1

    def send(self) -> None:
        """Tell the others which transfers are over here, and how; never waits."""
        for done in self._engine.poll():
            transfer = self._transfers.get(done.ticket)
            if transfer is not None:
                self._end(transfer, done)
        # Step by step, for the rounds of the exchange are counted.
        while self._unsent and not self._unsent[0].num_open:
            step = self._unsent.popleft()
            self._exchange.send(_text(step.number, step.transfers), step.number)

    def settle(
        self, pool: PyTree, last: int, *, wait_for_all: bool
    ) -> tuple[PyTree, list[Transfer]]:
        """Agree on transfers; wait for those of this process, then for the others.

        Args:
            pool: The device pool.
            last: The last step whose transfers are due.
            wait_for_all: Whether to wait for this process's later ones, too.

        Returns:
            The pool to go on with, and the transfers that were due.

        Raises:
            AgreementError: This process's transfers are not over in time, or not all
                processes have sent how theirs ended.
            PlanMismatchError: Others have moved something else.
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
        """Wait until this process's own transfers are over."""
        # Not `engine.drain`: what it waits for may depend on a collective that another
        # process never joins.
        start_s, pause_s = self._clock(), _LEAST_PAUSE_S
        while True:
            pool = self._engine.advance(pool)
            self.send()
            waited_s = self._clock() - start_s
            late = [
                transfer
                for step in self._up_to(None if wait_for_all else last)
                if step.num_open
                for transfer in step.transfers
                if not transfer.is_over
            ]
            if not late:
                return pool
            if self._deadline_s is not None and waited_s > self._deadline_s:
                for transfer in late:
                    self._engine.abandon(transfer.ticket)
                    self._end(transfer, None)
                continue
            if waited_s > self._exchange.timeout_s:
                process = self._exchange.process
                raise AgreementError(
                    f"{_listed(late)}: not over in process {process} "
                    f"within agreement_timeout_s={self._exchange.timeout_s:g}. The "
                    "device is stuck, or waits for a process that has stalled or died. "
                    "With a deadline_s below that, such a transfer fails.",
                    late[0].step,
                    (process,),
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _receive(self, last: int, end_s: float) -> list[Transfer]:
        """Wait for the outcomes of the others."""
        agreed = []
        for step in list(self._up_to(last)):
            about = f"how {_listed(step.transfers)} ended"
            texts = self._exchange.receive(about, end_s - self._clock())
            oks = self._agree(step.number, step.transfers, texts)
            del self._steps[step.number]
            for transfer, ok in zip(step.transfers, oks, strict=True):
                del self._transfers[transfer.ticket]
                transfer.done = transfer.done if ok else None
                agreed.append(transfer)
        return agreed

    def _end(self, transfer: Transfer, done: Completion | None) -> None:
        """Note how a transfer ended here; None if it was abandoned."""
        self._steps[transfer.step].num_open -= not transfer.is_over
        transfer.end(done)

    def _describe(self, call: str) -> str:
        text = (
            f"{call} has not returned in process {self._exchange.process} for "
            f"{self._watchdog.limit_s:g} s. It waits inside jax's runtime, most likely "
            "for a process that has stalled or died"
        )
        silent = self._exchange.silent
        return f"{text}: processes {list(silent)} are silent." if silent else f"{text}."

    def _up_to(self, last: int | None) -> Iterator[_Step]:
        """Give the steps up to one; all if that is None."""
        for number, step in self._steps.items():
            if last is not None and number > last:
                break
            yield step

    def _agree(
        self, step: int, transfers: list[Transfer], texts: list[str]
    ) -> list[bool]:
        """Say of each transfer of a step whether it has succeeded everywhere."""
        own = self._exchange.process
        plans = [text.rpartition(" ")[0] for text in texts]
        others = [process for process, p in enumerate(plans) if p != plans[own]]
        if others:
            raise PlanMismatchError(
                f"in step {step} processes {others} started other transfers than "
                f"process {own}: their schedulers were not told the same requests and "
                "reports in the same order."
            )
        outcomes = [text.rpartition(" ")[2] for text in texts]
        return [set(column) == {"1"} for column in zip(*outcomes, strict=True)]


def _listed(transfers: list[Transfer]) -> str:
    """List transfers for a message; not all of many."""
    named = " and ".join(map(str, transfers[:_MOST_NAMED]))
    more = len(transfers) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _text(step: int, transfers: list[Transfer]) -> str:
    """Write what a process sends: the step, what it moved, how that ended."""
    names = repr([transfer.name for transfer in transfers])
    digest = hashlib.sha256(names.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{step} {digest} " + "".join(
        "0" if transfer.done is None else "1" for transfer in transfers
    )
