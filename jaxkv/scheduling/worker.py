"""Carries a step's transfers out and reports what completed."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from jaxkv.scheduling.agreement import Agreement, EventName
from jaxkv.scheduling.agreement import PlanMismatchError as PlanMismatchError
from jaxkv.scheduling.exchange import AgreementError as AgreementError
from jaxkv.scheduling.exchange import open_exchanges
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.stats import SIZE_BUCKETS, Histogram
from jaxkv.transfer import Completion, Ticket, TransferEngine
from jaxkv.types import PyTree

_RATE_WEIGHT = 0.25


class _Pending(NamedTuple):
    """A transfer that was started and not reported.

    Attributes:
        name: The store event, or the requests of the load event.
        start_s: When it was started.
        step: In which step.
    """

    name: EventName
    start_s: float
    step: int


class OffloadWorker:
    """Moves blocks as `OffloadScheduler` says, on the thread that runs the model.

    Where several processes serve one model, each has a scheduler and a worker, and all
    schedulers must be told the same in the same step. A transfer may arrive a step
    earlier here than there: `report_after_steps` makes its report a matter of counting.
    It may fail here and not there: the processes tell one another, and it is reported
    as failed in all. `start` and `drain` are then to be called by all of them, in the
    same order.

    Args:
        engine: The transfer engine of the device pool. It is the worker's alone: what
            others move with it is not reported to anybody.
        deadline_s: How long a transfer may take. One that takes longer is abandoned and
            reported as failed. None to wait for as long as it takes, which one process
            with `report_after_steps` does in any case. Where several processes serve
            one model: how long they wait for a transfer that is due.
        report_after_steps: Report a transfer when this number of steps have started
            after its own, neither sooner nor later; if need be, wait for it. None to
            report it as soon as it is done, which one process alone may. With 1,
            several processes wait for one another in each step that follows a transfer;
            from 2 on they have the last step to agree in.
        check_plans: Whether all processes compare what they planned, and what they
            agreed on, at the start of each step; for debugging, as it makes them wait
            for one another.
        agreement_timeout_s: How long several processes wait for one another, and for
            transfers that are due, before they end the run with `AgreementError`. It
            is to be longer than one may be behind the others, such as to compile what
            the others find compiled; and longer than `deadline_s`, if a transfer that
            is stuck is to fail and not to end the run. One process alone ignores it.
        clock: Seconds since some moment, for `deadline_s` and `load_bytes_per_s`, and
            for how long transfers that are due are waited for.

    Raises:
        ValueError: If the block axis of the engine's pool is sharded, or if arguments
            do not go together.

    Attributes:
        blocks_stored: Host blocks whose store arrived so far.
        blocks_loaded: Host blocks whose load arrived so far.
        bytes_stored: Bytes of the former.
        bytes_loaded: Bytes of the latter.
        store_s: Seconds that these stores took, from the start to the report. Those of
            transfers that overlap count for each.
        load_s: Seconds that these loads took.
        store_sizes: Bytes of each of these stores; a step has one.
        load_sizes: Bytes of each of these loads.
        load_bytes_per_s: How fast loads were of late, from the start to the report;
            0 before the first.
        plan_digest: Digest of all steps so far, if `check_plans`, and of all outcomes
            that the processes agreed on.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        deadline_s: float | None = 30.0,
        report_after_steps: int | None = None,
        check_plans: bool = False,
        agreement_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if engine.num_shards != 1:
            raise ValueError(
                f"the engine's pool has a block axis of {engine.num_shards} shards; a "
                "scheduler does not know which blocks are on which: shard another axis."
            )
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"{deadline_s=} must be more than 0, or None.")
        if report_after_steps is not None and report_after_steps < 1:
            raise ValueError(f"{report_after_steps=} must be at least 1, or None.")
        if not 0 < agreement_timeout_s < math.inf:
            raise ValueError(
                f"{agreement_timeout_s=} must be a number of seconds above 0."
            )
        if report_after_steps is None and jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes see transfers arrive in different "
                "steps: give report_after_steps, so that they report them in the same."
            )
        self.blocks_stored = 0
        self.blocks_loaded = 0
        self.bytes_stored = 0
        self.bytes_loaded = 0
        self.store_s = 0.0
        self.load_s = 0.0
        self.store_sizes = Histogram(SIZE_BUCKETS)
        self.load_sizes = Histogram(SIZE_BUCKETS)
        self.load_bytes_per_s = 0.0
        self.plan_digest = b""
        self._engine = engine
        self._deadline_s = deadline_s if report_after_steps is None else None
        self._agreement, self._plans = None, None
        if jax.process_count() > 1:
            outcomes, self._plans = open_exchanges(
                agreement_timeout_s, ("outcomes", "plans")
            )
            self._agreement = Agreement(outcomes, engine, deadline_s, clock)
        self._report_after_steps = report_after_steps
        self._check_plans = check_plans
        self._clock = clock
        self._step = 0
        self._pending: dict[Ticket, _Pending] = {}
        self._completions: list[Completion] = []
        # Where several processes agree: how transfers ended, None for those that have
        # failed, and that is to be reported.
        self._agreed: list[tuple[Ticket, Completion | None]] = []

    @property
    def num_in_flight(self) -> int:
        """Transfers that were started and not reported yet."""
        return len(self._pending)

    @property
    def num_in_flight_by_direction(self) -> dict[str, int]:
        """How many of these are stores, and how many loads; any thread may ask."""
        directions = [ticket.direction for ticket in tuple(self._pending)]
        return {"store": directions.count("save"), "load": directions.count("load")}

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that were issued and are not known to have arrived."""
        return self._engine.bytes_in_flight

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory set aside in this process."""
        return self._engine.host_bytes

    def start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        """Start the transfers of a step; returns before they are done.

        Call it before the step's model runs: the stores read what earlier steps
        wrote, the copies are there when it runs, the loads write what it may not read
        yet.

        Args:
            meta: The transfers.
            pool: The device pool. Donated if there are loads or copies.

        Returns:
            The pool to run the model on.

        Raises:
            PlanMismatchError: If another process has another plan: with `check_plans`
                before anything of it is started, else when a transfer is due.
            AgreementError: If another process, or a transfer that is due, makes this
                one wait for longer than `agreement_timeout_s`.
        """
        self._step += 1
        if self._agreement is None:
            return self._start(meta, pool)
        with self._agreement.watch(f"OffloadWorker.start in step {self._step}"):
            return self._start(meta, pool)

    def _start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        if self._check_plans:
            self._compare(meta)
        if self._agreement is not None:
            last = self._step - (self._report_after_steps or 0)
            pool = self._settle(pool, self._agreement, last, meta.need_flush)
        elif meta.need_flush or self._is_due():
            pool, completions = self._engine.drain(pool)
            self._completions += completions
        else:
            pool = self._engine.advance(pool)
        rows = self._engine.blocks_per_host_block
        if meta.store_event != NO_EVENT:
            ticket = self._engine.save(
                pool, _rows(meta.store_device_blocks, rows), meta.store_host_blocks
            )
            self._note(ticket, meta.store_event)
        if meta.copy_from_blocks:
            pool = self._engine.copy(pool, meta.copy_from_blocks, meta.copy_to_blocks)
        if meta.load_event != NO_EVENT:
            pool, ticket = self._engine.load(
                pool, meta.load_host_blocks, _rows(meta.load_device_blocks, rows)
            )
            self._note(ticket, meta.load_event_to_reqs[meta.load_event])
        return pool

    def poll(self) -> ConnectorOutput:
        """Report the transfers that completed since the last time; never waits."""
        if self._agreement is not None:
            self._agreement.say()
            return self._report(self._take_agreed())
        self._completions += self._engine.poll()
        return self._report(self._take_own())

    def drain(self, pool: PyTree) -> tuple[PyTree, ConnectorOutput]:
        """Wait for all transfers and report them.

        Args:
            pool: The device pool. Donated if there are loads.

        Returns:
            The pool to go on with, and the report.

        Raises:
            PlanMismatchError: As `start`.
            AgreementError: As `start`.
        """
        if self._agreement is not None:
            with self._agreement.watch(f"OffloadWorker.drain in step {self._step}"):
                pool = self._settle(pool, self._agreement, self._step, True)
            return pool, self._report(self._take_agreed())
        pool, completions = self._engine.drain(pool)
        self._completions += completions
        return pool, self._report(self._take_own(is_last=True))

    def _note(self, ticket: Ticket, name: EventName) -> None:
        self._pending[ticket] = _Pending(name, self._clock(), self._step)
        if self._agreement is not None:
            self._agreement.begin(ticket, name, self._step)

    def _is_due(self) -> bool:
        """Whether a transfer has to be waited for now."""
        if self._report_after_steps is None:
            return False
        self._completions += self._engine.poll()
        done = {completion.ticket for completion in self._completions}
        return any(
            self._is_old(pending) and ticket not in done
            for ticket, pending in self._pending.items()
        )

    def _is_old(self, pending: _Pending) -> bool:
        after = self._report_after_steps
        return after is None or self._step - pending.step >= after

    def _settle(
        self, pool: PyTree, agreement: Agreement, last: int, wait_for_all: bool
    ) -> PyTree:
        """Agree with the other processes on the transfers up to a step."""
        pool, agreed = agreement.settle(pool, last, wait_for_all=wait_for_all)
        self._agreed += agreed
        if self._check_plans:
            for ticket, done in agreed:
                text = f"{self._pending[ticket].name!r} {done is not None}"
                link = self.plan_digest + text.encode("utf-8", "surrogatepass")
                self.plan_digest = hashlib.sha256(link).digest()
        return pool

    def _take_agreed(self) -> list[tuple[_Pending, Completion | None]]:
        """Take what is to be reported, and how it ended; None if it has failed."""
        agreed, self._agreed = self._agreed, []
        return [(self._pending.pop(ticket), done) for ticket, done in agreed]

    def _take_own(
        self, *, is_last: bool = False
    ) -> list[tuple[_Pending, Completion | None]]:
        """Take what one process alone is to report, in the same form."""
        taken: list[tuple[_Pending, Completion | None]] = []
        completions, self._completions = self._completions, []
        for done in completions:
            pending = self._pending.get(done.ticket)
            if pending is None:
                continue
            if not (is_last or self._is_old(pending)):
                self._completions.append(done)
                continue
            del self._pending[done.ticket]
            taken.append((pending, done if done.error is None else None))
        if self._deadline_s is not None:
            now_s = self._clock()
            for ticket, pending in list(self._pending.items()):
                if now_s - pending.start_s > self._deadline_s:
                    self._engine.abandon(ticket)
                    del self._pending[ticket]
                    taken.append((pending, None))
        return taken

    def _report(
        self, taken: list[tuple[_Pending, Completion | None]]
    ) -> ConnectorOutput:
        recving: dict[bool, list[str]] = {True: [], False: []}
        stores: dict[bool, list[int]] = {True: [], False: []}
        now_s = self._clock()
        for pending, done in taken:
            ok = done is not None
            if isinstance(pending.name, int):
                stores[ok].append(pending.name)
            else:
                recving[ok].extend(pending.name)
            if done is not None:
                self._count(done, now_s - pending.start_s)
        return ConnectorOutput(
            finished_recving=tuple(recving[True]),
            failed_recving=tuple(recving[False]),
            completed_store_events=tuple(stores[True]),
            failed_store_events=tuple(stores[False]),
        )

    def _count(self, done: Completion, duration_s: float) -> None:
        """Count a transfer that arrived."""
        if done.direction == "save":
            self.blocks_stored += done.num_blocks
            self.bytes_stored += done.num_bytes
            self.store_s += duration_s
            self.store_sizes.add(done.num_bytes)
            return
        self.blocks_loaded += done.num_blocks
        self.bytes_loaded += done.num_bytes
        self.load_s += duration_s
        self.load_sizes.add(done.num_bytes)
        if not done.num_bytes:
            return
        rate = done.num_bytes / max(duration_s, 1e-9)
        if self.load_bytes_per_s:
            rate = (1 - _RATE_WEIGHT) * self.load_bytes_per_s + _RATE_WEIGHT * rate
        self.load_bytes_per_s = rate

    def _compare(self, meta: OffloadMetadata) -> None:
        """Compare the plan with those of the other processes."""
        self.plan_digest = meta.digest(self.plan_digest)
        if self._plans is None:
            return
        own = self.plan_digest.hex()
        self._plans.say(own, self._step)
        each = self._plans.hear(f"what they plan in step {self._step}")
        others = [process for process, text in enumerate(each) if text != own]
        if others:
            raise PlanMismatchError(
                f"in step {self._step} processes {others} planned other transfers than "
                f"process {self._plans.process}: their schedulers were not told the "
                "same requests and reports in the same order."
            )


def _rows(block_ids: tuple[int, ...], blocks_per_row: int) -> PyTree:
    """Lay the device blocks out as the engine wants them."""
    if blocks_per_row == 1:
        return block_ids
    return np.array(block_ids, np.int32).reshape(-1, blocks_per_row)
