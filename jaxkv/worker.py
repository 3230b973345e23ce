"""Carries a step's transfers out and reports what completed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxkv.connector import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.stats import SIZE_BUCKETS, Histogram
from jaxkv.transfer import Completion, Ticket, TransferEngine
from jaxkv.transfer.tickets import Direction
from jaxkv.types import PyTree

_RATE_WEIGHT = 0.25


class PlanMismatchError(RuntimeError):
    """Processes that serve one model have planned different transfers."""


class _Pending(NamedTuple):
    """A transfer that was started and not reported.

    Attributes:
        name: The store event, or the requests of the load event.
        start_s: When it was started.
        step: In which step.
    """

    name: int | tuple[str, ...]
    start_s: float
    step: int


class OffloadWorker:
    """Moves blocks as `OffloadScheduler` says, on the thread that runs the model.

    Where several processes serve one model, each has a scheduler and a worker, and all
    schedulers must be told the same in the same step. A transfer may arrive a step
    earlier here than there: `report_after_steps` makes its report a matter of counting.

    Args:
        engine: The transfer engine of the device pool. It is the worker's alone: what
            others move with it is not reported to anybody.
        deadline_s: How long a transfer may take. One that takes longer is given up and
            reported as failed. None to wait for as long as it takes.
        report_after_steps: Report a transfer when so many steps have started after its
            own, neither sooner nor later; if need be, wait for it. None to report it
            as soon as it is done, which one process alone may.
        check_plans: Whether all processes compare what they planned, at the start of
            each step; for debugging, as it makes them wait for one another.
        clock: Seconds since some moment, for `deadline_s` and `load_bytes_per_s`.

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
        plan_digest: Digest of all steps so far, if `check_plans`.
    """

    def __init__(
        self,
        engine: TransferEngine,
        *,
        deadline_s: float | None = 30.0,
        report_after_steps: int | None = None,
        check_plans: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if engine.num_lanes != 1:
            raise ValueError(
                f"the engine's pool has a block axis of {engine.num_lanes} shards; a "
                "scheduler does not know which blocks are on which: shard another axis."
            )
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"{deadline_s=} must be more than 0, or None.")
        if report_after_steps is not None and report_after_steps < 1:
            raise ValueError(f"{report_after_steps=} must be at least 1, or None.")
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
        self._report_after_steps = report_after_steps
        self._check_plans = check_plans
        self._clock = clock
        self._step = 0
        self._pending: dict[Ticket, _Pending] = {}
        self._completions: list[Completion] = []

    @property
    def num_in_flight(self) -> int:
        """Transfers that were started and not reported yet."""
        return len(self._pending)

    @property
    def num_in_flight_by_direction(self) -> dict[Direction, int]:
        """How many of these are stores, and how many loads; any thread may ask."""
        directions = [ticket.direction for ticket in tuple(self._pending)]
        return {"store": directions.count("store"), "load": directions.count("load")}

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
            PlanMismatchError: With `check_plans`, if another process has another plan.
        """
        self._step += 1
        if self._check_plans:
            self._compare(meta)
        if meta.need_flush or self._is_due():
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
        self._completions += self._engine.poll()
        return self._report()

    def drain(self, pool: PyTree) -> tuple[PyTree, ConnectorOutput]:
        """Wait for all transfers and report them.

        Args:
            pool: The device pool. Donated if there are loads.

        Returns:
            The pool to go on with, and the report.
        """
        pool, completions = self._engine.drain(pool)
        self._completions += completions
        return pool, self._report(is_last=True)

    def _note(self, ticket: Ticket, name: int | tuple[str, ...]) -> None:
        self._pending[ticket] = _Pending(name, self._clock(), self._step)

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

    def _report(self, *, is_last: bool = False) -> ConnectorOutput:
        recving: dict[bool, list[str]] = {True: [], False: []}
        stores: dict[bool, list[int]] = {True: [], False: []}
        completions, self._completions = self._completions, []
        now_s = self._clock()
        for done in completions:
            pending = self._pending.get(done.ticket)
            if pending is None:
                continue
            if not (is_last or self._is_old(pending)):
                self._completions.append(done)
                continue
            del self._pending[done.ticket]
            ok = done.error is None
            if isinstance(pending.name, int):
                stores[ok].append(pending.name)
            else:
                recving[ok].extend(pending.name)
            if ok:
                self._count(done, now_s - pending.start_s)
        if self._deadline_s is not None:
            for ticket, pending in list(self._pending.items()):
                if now_s - pending.start_s > self._deadline_s:
                    self._engine.abandon(ticket)
                    del self._pending[ticket]
                    if isinstance(pending.name, int):
                        stores[False].append(pending.name)
                    else:
                        recving[False].extend(pending.name)
        return ConnectorOutput(
            finished_recving=tuple(recving[True]),
            failed_recving=tuple(recving[False]),
            completed_store_events=tuple(stores[True]),
            failed_store_events=tuple(stores[False]),
        )

    def _count(self, done: Completion, duration_s: float) -> None:
        """Count a transfer that arrived."""
        if done.direction == "store":
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
        own = np.frombuffer(self.plan_digest, np.uint8).astype(np.int32)
        each = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, own.size)
        others = np.flatnonzero((each != own).any(axis=1)).tolist()
        if others:
            raise PlanMismatchError(
                f"in step {self._step} processes {others} planned other transfers than "
                f"process {jax.process_index()}: their schedulers were not told the "
                "same requests and reports in the same order."
            )


def _rows(block_ids: tuple[int, ...], blocks_per_row: int) -> PyTree:
    """Lay the device blocks out as the engine wants them."""
    if blocks_per_row == 1:
        return block_ids
    return np.array(block_ids, np.int32).reshape(-1, blocks_per_row)
