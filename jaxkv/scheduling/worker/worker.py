"""Runs each step's transfers on the worker and reports the ones that have ended."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxkv._util import check_seconds, check_type, check_whole, shown, strict_class
from jaxkv.scheduling.checks import check_engine, check_plan
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    NO_MOVES,
    NO_REPORTS,
    ConnectorOutput,
    Mover,
    OffloadMetadata,
    TierReport,
)
from jaxkv.scheduling.stats import SIZE_BUCKETS, Histogram
from jaxkv.scheduling.worker.agreement import (
    Agreement,
    Batch,
    EventName,
    Transfer,
    check_same_plans,
)
from jaxkv.scheduling.worker.agreement import PlanMismatchError as PlanMismatchError
from jaxkv.scheduling.worker.exchange import AgreementError as AgreementError
from jaxkv.scheduling.worker.exchange import open_exchanges
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.scheduling.worker.tier_agreement import KEYS_PER_STEP, TierAgreement
from jaxkv.transfer import AnyEngine, Completion, Ticket
from jaxkv.transfer.ownership import owned
from jaxkv.types import PyTree

_RATE_WEIGHT = 0.25


class OffloadWorker:
    """Runs the transfers that `OffloadScheduler` plans, on the model's thread.

    If several processes serve one model, each has a scheduler and a worker, and all
    schedulers must receive the same inputs in the same step. A transfer may complete a
    step earlier in one process than in another: with `report_after_steps`, all
    processes report it in the same step. A transfer may fail in one process only: the
    processes exchange outcomes, and all report a failure. All processes must call
    `start` and `drain` in the same order.

    Args:
        engine: The transfer engine of the device pool. Only this worker may use it: it
            does not report transfers that others start.
        deadline_s: Abandon a slower transfer and report it as failed; None waits
            without limit. For a transfer that is due, several processes wait this long,
            and one process waits without limit.
        report_after_steps: A transfer is due exactly this many steps after its own:
            `start` waits for it if necessary, and it is reported. None reports it as
            soon as it ends; not for several processes. With 1, several processes wait
            for one another in the step after a transfer; with 2 or more, they exchange
            outcomes in the steps between.
        check_plans: For debugging: at the start of each step, wait for all processes
            and compare their plans and the outcomes they agreed on.
        agreement_timeout_s: End the run with `AgreementError` if several processes wait
            longer for one another, or for transfers that are due. Must exceed the lag
            of a process that compiles what the others have cached, and `deadline_s`, so
            that a stuck transfer fails before it ends the run. One process ignores it.
        clock: Returns seconds, for `deadline_s`, `load_bytes_per_s` and the wait for
            transfers that are due. Must never go back.
        storage: Moves blocks between the host and a store, with the same engine; None
            for no store.
        movers: One for each of the scheduler's `tiers_below`: moves blocks between that
            tier and the tier above it.
        shares_scheduler: Whether one scheduler plans for all processes and merges their
            reports (`OffloadRules.world_size`). The processes then never wait for one
            another. The engine's pool must lie on this process's devices only.
        num_shards: Shards of the block axis of the engine's pool. If not 1, plans must
            keep each transfer in one shard, which `OffloadScheduler` does not ensure.

    Raises:
        ValueError: If the block axis of the engine's pool does not have `num_shards`,
            or arguments contradict one another.

    Attributes:
        blocks_stored: Host blocks whose store has completed.
        blocks_loaded: Host blocks whose load has completed.
        bytes_stored: Bytes of these stores.
        bytes_loaded: Bytes of these loads.
        store_s: Sum over these stores of the seconds from start to report, although
            stores of several steps may overlap.
        load_s: Sum over steps of the seconds from the start of a step's loads to the
            report of the last one.
        store_sizes: Histogram of the bytes stored per step.
        load_sizes: Histogram of the bytes loaded per step.
        load_bytes_per_s: Moving average over steps of the load rate, from the start of
            a step's loads to the last report; 0 before the first.
        storage: The mover of the store, or None.
        settings: Texts by name that must be equal in all processes, and in the
            scheduler's first plan. More may be added before the first step.
        plan_digest: With `check_plans`, a digest of all plans so far and of all
            outcomes that the processes agreed on.
    """

    def __new__(cls, *_args: Any, **_named: Any) -> Self:
        """Make a strict worker where `JAXKV_STRICT` is set."""
        return super().__new__(strict_class(cls))

    def __init__(
        self,
        engine: AnyEngine,
        *,
        deadline_s: float | None = 30.0,
        report_after_steps: int | None = None,
        check_plans: bool = False,
        agreement_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        storage: StorageWorker | None = None,
        movers: Sequence[Mover] = (),
        shares_scheduler: bool = False,
        num_shards: int = 1,
    ) -> None:
        check_engine(engine, "num_shards")
        if storage is not None and not hasattr(storage, "shards"):
            raise TypeError(f"storage={shown(storage)} must be a StorageWorker.")
        must_agree = jax.process_count() > 1 and not shares_scheduler
        shards = (0, 1) if storage is None else storage.shards
        if storage is not None and shards != (jax.process_index(), jax.process_count()):
            raise ValueError(
                f"storage has shard {shards[0]} of {shards[1]}, but this is process "
                f"{jax.process_index()} of {jax.process_count()}: each process must "
                "open the shard of its own index."
            )
        check_type(Callable, "a function", clock=clock)
        check_type(Sequence, "a list of movers", movers=movers)
        if engine.num_shards != num_shards:
            raise ValueError(
                f"the block axis of the engine's pool has {engine.num_shards} shards, "
                f"but {num_shards=}; a scheduler does not know which shard holds a "
                "block: shard another axis."
            )
        if deadline_s is not None:
            check_seconds(deadline_s=deadline_s)
        if report_after_steps is not None:
            check_whole(1, report_after_steps=report_after_steps)
        check_seconds(agreement_timeout_s=agreement_timeout_s)
        if report_after_steps is None and must_agree:
            raise ValueError(
                f"report_after_steps=None is for one process, not {jax.process_count()}"
                ": a transfer may complete in a different step in each. Pass 1 or more."
            )
        self.blocks_stored = self.blocks_loaded = 0
        self.bytes_stored = self.bytes_loaded = 0
        self.store_s = self.load_s = 0.0
        self.store_sizes = Histogram(SIZE_BUCKETS)
        self.load_sizes = Histogram(SIZE_BUCKETS)
        self.load_bytes_per_s = 0.0
        self.plan_digest = b""
        self.storage = storage
        self._engine = engine
        self.owner = engine.owner
        self._deadline_s = deadline_s if report_after_steps is None else None
        self._agreement, self._plans = None, None
        self._movers: tuple[Mover, ...] = tuple(movers)
        if storage is not None:
            self._movers += (storage,)
        self._tier_agreement: TierAgreement | None = None
        if must_agree:
            outcomes, self._plans, below = open_exchanges(
                agreement_timeout_s, ("outcomes", "plans", "below")
            )
            self._agreement = Agreement(outcomes, engine, deadline_s, clock)
            if self._movers:
                self._tier_agreement = TierAgreement(below, jax.process_count())
        sizes = ("num_host_blocks", "num_device_blocks", "blocks_per_host_block")
        named = {name: getattr(engine, name) for name in sizes} | {
            "version": sys.modules["jaxkv"].__version__,
            "host block": engine.host_bytes_description,
            "transfer_mode": engine.mode,
            "report_after_steps": report_after_steps,
            "check_plans": check_plans,
            "tiers_below": len(self._movers),
            "storage": storage and storage.storage_io.objects.folder,
        }
        self.settings = {name: str(value) for name, value in named.items()}
        self._report_after_steps = report_after_steps
        self._check_plans = check_plans
        self._clock = clock
        self._step = 0
        # Transfers not reported yet, in the order of their start.
        self._pending: dict[Ticket, Transfer] = {}
        # The pending transfers that have ended. Empty if processes must agree.
        self._ended: dict[Ticket, Transfer] = {}
        self._num_pending = {"save": 0, "load": 0}
        # Outcomes that the processes have agreed on and this one has not reported.
        self._agreed: list[Transfer] = []
        self._agreed_below: list[TierReport] = []

    @property
    def num_in_flight(self) -> int:
        """Transfers that have started and are not reported yet."""
        return len(self._pending)

    @property
    def num_in_flight_by_direction(self) -> dict[str, int]:
        """Stores and loads in flight, counted apart; any thread may read this."""
        return {"store": self._num_pending["save"], "load": self._num_pending["load"]}

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of copies that were issued and are not known to have completed."""
        return self._engine.bytes_in_flight

    @property
    def storage_bytes_per_s(self) -> float:
        """Recent read rate of the store; 0 if unknown."""
        return self.storage.read_bytes_per_s if self.storage is not None else 0.0

    @property
    def tier_bytes_per_s(self) -> tuple[float, ...]:
        """Read rate of each tier below the host, the nearest first; 0 if unknown.

        The rate is the optional attribute `read_bytes_per_s` of the tier's mover.
        """
        return tuple(getattr(mover, "read_bytes_per_s", 0.0) for mover in self._movers)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the engine has allocated in this process."""
        return self._engine.host_bytes

    def adopt(self) -> None:
        """Make the calling thread the owner; see `TransferEngine.adopt`."""
        self.owner.adopt()

    @owned
    def start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        """Start the transfers of a step; return before they complete.

        Call it before the step's model runs. The stores read blocks that earlier steps
        wrote, the copies are complete when the model runs, and the model must not read
        the blocks that the loads write until the loads are reported.

        Args:
            meta: The plan of the step.
            pool: The device pool. Donated if the plan has loads.

        Returns:
            The pool to run the model on.

        Raises:
            TypeError: If `meta` is not a plan. Nothing is started.
            ValueError: If any transfer of the plan is invalid. Nothing is started.
            PlanMismatchError: If another process has another plan. `check_plans` finds
                it before any transfer starts, else it is found when a transfer is due.
            AgreementError: If this process waits longer than `agreement_timeout_s` for
                another one, or for a transfer that is due.
        """
        if not isinstance(meta, OffloadMetadata):
            raise TypeError(
                f"meta={shown(meta)} must be an OffloadMetadata, such as "
                "OffloadScheduler.build_connector_meta() returns."
            )
        if meta is not NO_MOVES:
            self._check_moves(meta, pool)
        self.check_settings(meta.settings)
        if meta.is_nothing and self.start_nothing():
            return pool
        self._step += 1
        if self._step == 1 and self._agreement is not None:
            self._agreement.announce(self.settings)
        try:
            with self._watch("OffloadWorker.start"):
                return self._start(meta, pool)
        except (TypeError, ValueError):
            if self._agreement is None:
                self._step -= 1  # The plan was refused.
            raise

    def start_nothing(self) -> bool:
        """Start a step whose plan is `NO_MOVES` without the pool, if that is possible.

        Returns:
            Whether the step was started; if not, call `start`.
        """
        needs_pool = self._movers or self._agreement is not None or self._check_plans
        if needs_pool or self._engine.num_in_flight:
            return False
        self._step += 1
        return True

    def check_settings(self, settings: Mapping[str, str]) -> None:
        """Raise PlanMismatchError unless a scheduler's settings are this worker's."""
        for name, value in settings.items():
            if (own := self.settings.get(name, value)) != value:
                raise PlanMismatchError(
                    f"{name} is {own} in this worker, and {value} in its scheduler. "
                    "Start both with the same settings."
                )
        self.settings |= settings

    def _check_moves(self, meta: OffloadMetadata, pool: PyTree) -> None:
        """Refuse a plan with an invalid transfer before any transfer starts."""
        check_plan(meta)
        engine, rows = self._engine, self._engine.blocks_per_host_block
        # The engine's own check suffices for the first call if nothing precedes it.
        is_shared = self._agreement is not None or self._check_plans
        is_first = not (self._num_pending["load"] or is_shared)
        if meta.store_event != NO_EVENT:
            if not is_first:
                device_blocks = _rows(meta.store_device_blocks, rows)
                engine.check_save(device_blocks, meta.store_host_blocks)
            is_first = False
        if meta.load_event != NO_EVENT and not is_first:
            device_blocks = _rows(meta.load_device_blocks, rows)
            _, sizes = _split_loads(meta)
            engine.check_load(pool, meta.load_host_blocks, device_blocks, sizes)

    def _start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        if self._check_plans:
            self.plan_digest = meta.digest(self.plan_digest)
            if self._plans is not None:
                facts = {**meta.facts(), "digest": self.plan_digest.hex()}
                first = self.settings if self._step == 1 else {}
                self._plans.send(json.dumps({**first, **facts}), self._step)
                texts = self._plans.receive(f"the plan of step {self._step}")
                plans = [*map(json.loads, texts)]
                check_same_plans(self._step, "planned", plans, self._plans.process)
        if self._agreement is not None:
            self._agreement.plan = meta
            pool = self._settle(pool, self._agreement, self._last_due, meta.need_flush)
        elif meta.need_flush or self._is_due():
            pool = self._drain(pool)
        else:
            pool = self._engine.advance(pool)
        rows = self._engine.blocks_per_host_block
        if meta.store_event != NO_EVENT:
            ticket = self._engine.save(
                pool, _rows(meta.store_device_blocks, rows), meta.store_host_blocks
            )
            self._add([ticket], [meta.store_event])
        if meta.load_event != NO_EVENT:
            names, sizes = _split_loads(meta)
            pool, tickets = self._engine.load_each(
                pool,
                meta.load_host_blocks,
                _rows(meta.load_device_blocks, rows),
                sizes,
            )
            self._add(tickets, names)
        if self._movers:
            by_tier = {moves.tier: moves for moves in meta.below}
            for number, mover in enumerate(self._movers):
                mover.start(by_tier.get(number))
            self._settle_below(self._last_due, meta)
        return pool

    def poll(self) -> ConnectorOutput:
        """Report the transfers that have ended since the last call; never wait."""
        is_alone = self._agreement is None and not self._movers
        # Abandoned transfers are not pending, but the engine may still copy them.
        if is_alone and not (self._pending or self._engine.num_in_flight):
            return NO_REPORTS
        return self._poll()

    @owned
    def _poll(self) -> ConnectorOutput:
        if self._agreement is not None:
            self._agreement.send()
        elif self._pending or self._engine.num_in_flight:
            self._record(self._engine.poll())
        for mover in self._movers:
            mover.advance()
        return self._report(self._take_due())

    @owned
    def poll_storage(self, *, is_late: bool = False) -> ConnectorOutput:
        """Report on the store only.

        Processes that serve one model wait for one another: call it equally often.

        Args:
            is_late: Whether to end the wait for the store's listing. Only the first
                process's value counts.

        Raises:
            RuntimeError: If there is no store.
            AgreementError: If another process does not answer in time.
        """
        if self.storage is None:
            raise RuntimeError("this worker has no storage to poll.")
        self.storage.advance()
        if is_late or not self.storage.is_listing_due:
            self.storage.abandon_listing()
        with self._watch("the store"):
            self._settle_below(self._step)
        return ConnectorOutput(below=self._take_below())

    @owned
    def drain(self, pool: PyTree) -> tuple[PyTree, ConnectorOutput]:
        """Wait for all transfers and report them.

        Transfers to and from tiers below the host are abandoned at their deadlines.

        Args:
            pool: The device pool. Donated if there are loads.

        Returns:
            The pool to continue with, and the report.

        Raises:
            PlanMismatchError: See `start`.
            AgreementError: See `start`.
        """
        with self._watch("OffloadWorker.drain"):
            if self._agreement is not None:
                pool = self._settle(pool, self._agreement, self._step, True)
            else:
                pool = self._drain(pool)
            for mover in self._movers:
                mover.wait()
            self._settle_below(self._step)
        return pool, self._report(self._take_due(is_last=True))

    @owned
    def abandon(self) -> ConnectorOutput:
        """Abandon all transfers and report them as failed, such as for a lost pool."""
        transfers = list(self._pending.values())
        for transfer in transfers:
            if not transfer.has_ended:
                self._engine.abandon(transfer.ticket)
            transfer.end(None)
        return self._report(transfers)

    def _watch(self, call: str) -> contextlib.AbstractContextManager[None]:
        """End the process if a call waits too long for the other processes."""
        if self._agreement is None:
            return contextlib.nullcontext()
        return self._agreement.watch(f"{call} in step {self._step}")

    def _drain(self, pool: PyTree) -> PyTree:
        pool, completions = self._engine.drain(pool)
        self._record(completions)
        return pool

    def _add(self, tickets: Sequence[Ticket], names: Sequence[EventName]) -> None:
        """Add the transfers of a step in one direction."""
        batch = Batch(self._clock(), len(tickets))
        for ticket, name in zip(tickets, names, strict=True):
            transfer = Transfer(ticket, name, batch, self._step)
            self._pending[ticket] = transfer
            self._num_pending[ticket.direction] += 1
            if self._agreement is not None:
                self._agreement.begin(transfer)

    def _record(self, completions: Iterable[Completion]) -> None:
        """Keep the completions of this worker's transfers until they are due."""
        for done in completions:
            transfer = self._pending.get(done.ticket)
            if transfer is not None:
                transfer.end(done)
                self._ended[done.ticket] = transfer

    def _is_due(self) -> bool:
        """Whether any transfer is due but has not ended."""
        if self._report_after_steps is None:
            return False
        self._record(self._engine.poll())
        return not all(transfer.has_ended for transfer in self._due())

    @property
    def _last_due(self) -> int:
        """The last step whose transfers are due."""
        return self._step - (self._report_after_steps or 0)

    def _due(self) -> Iterator[Transfer]:
        last, pending = self._last_due, self._pending.values()
        return itertools.takewhile(lambda transfer: transfer.step <= last, pending)

    def _settle(
        self, pool: PyTree, agreement: Agreement, last: int, wait_for_all: bool
    ) -> PyTree:
        """Agree with the other processes on the outcomes of steps up to `last`."""
        pool, agreed = agreement.settle(pool, last, wait_for_all=wait_for_all)
        self._agreed += agreed
        self._extend_digest([(move.name, move.done is not None) for move in agreed])
        return pool

    def _extend_digest(self, agreed: Sequence[object]) -> None:
        """Add the outcomes that the processes agreed on to `plan_digest`."""
        if self._check_plans and agreed:
            data = self.plan_digest + repr(agreed).encode("utf-8", "surrogatepass")
            self.plan_digest = hashlib.sha256(data).digest()

    def _settle_below(self, last: int, meta: OffloadMetadata = NO_MOVES) -> None:
        """Agree on the reports of tiers below the host, of steps up to `last`."""
        agreement = self._tier_agreement
        if agreement is None:
            return
        plan = {"below": meta.facts()["below"]}
        agreement.send(self._reports_below(KEYS_PER_STEP), self._step, plan)
        reports = agreement.receive(last)
        self._agreed_below += reports
        self._extend_digest(reports)

    def _reports_below(self, *max_found_keys: int) -> tuple[TierReport, ...]:
        return tuple(
            dataclasses.replace(report, tier=number)
            for number, mover in enumerate(self._movers)
            for report in mover.take_reports(*max_found_keys)
        )

    def _take_below(self) -> tuple[TierReport, ...]:
        """Collect the due reports of tiers below the host."""
        if self._tier_agreement is None:
            return self._reports_below()
        agreed, self._agreed_below = self._agreed_below, []
        return tuple(agreed)

    def _take_due(self, *, is_last: bool = False) -> list[Transfer]:
        """Collect the transfers to report; without an agreement, abandon late ones."""
        if self._agreement is not None:
            agreed, self._agreed = self._agreed, []
            return agreed
        counts_steps = not is_last and self._report_after_steps is not None
        candidates = self._due() if counts_steps else self._ended.values()
        due = [transfer for transfer in candidates if transfer.has_ended]
        if self._deadline_s is not None:
            start_s = self._clock() - self._deadline_s
            for transfer in self._pending.values():
                if not transfer.batch.start_s < start_s:
                    break
                if not transfer.has_ended:
                    self._engine.abandon(transfer.ticket)
                    transfer.end(None)
                    due.append(transfer)
        return due

    def _report(self, transfers: list[Transfer]) -> ConnectorOutput:
        if not (transfers or self._movers):
            return NO_REPORTS
        recving: dict[bool, list[str]] = {True: [], False: []}
        stores: dict[bool, list[int]] = {True: [], False: []}
        now_s = self._clock()
        for transfer in transfers:
            del self._pending[transfer.ticket]
            self._ended.pop(transfer.ticket, None)
            self._num_pending[transfer.ticket.direction] -= 1
            ok = transfer.done is not None
            if isinstance(transfer.name, int):
                stores[ok].append(transfer.name)
            else:
                recving[ok].extend(transfer.name)
            self._add_stats(transfer.batch, transfer.done, now_s)
        return ConnectorOutput(
            finished_recving=tuple(recving[True]),
            failed_recving=tuple(recving[False]),
            completed_store_events=tuple(stores[True]),
            failed_store_events=tuple(stores[False]),
            below=self._take_below(),
        )

    def _add_stats(self, batch: Batch, done: Completion | None, now_s: float) -> None:
        """Add a reported transfer of `batch` to the statistics; None if it failed."""
        batch.num_left -= 1
        if done is not None:
            batch.num_bytes += done.num_bytes
            batch.end_s = now_s
            if done.direction == "save":
                self.blocks_stored += done.num_blocks
                self.bytes_stored += done.num_bytes
                self.store_s += now_s - batch.start_s
                self.store_sizes.add(done.num_bytes)
                return
            self.blocks_loaded += done.num_blocks
            self.bytes_loaded += done.num_bytes
        # Time all loads of a step together, because they share the bandwidth.
        if batch.end_s is None or batch.num_left or not batch.num_bytes:
            return
        duration_s = batch.end_s - batch.start_s
        self.load_s += duration_s
        self.load_sizes.add(batch.num_bytes)
        rate = batch.num_bytes / max(duration_s, 1e-9)
        if self.load_bytes_per_s:
            rate = (1 - _RATE_WEIGHT) * self.load_bytes_per_s + _RATE_WEIGHT * rate
        self.load_bytes_per_s = rate


def _split_loads(meta: OffloadMetadata) -> tuple[list[EventName], Sequence[int]]:
    """Return the requests that wait for each load, and each load's host blocks."""
    requests = meta.load_event_to_reqs[meta.load_event]
    if not meta.load_sizes:
        return [requests], [len(meta.load_host_blocks)]
    if len(meta.load_sizes) != len(requests):
        raise ValueError(
            f"the plan has {len(meta.load_sizes)} load_sizes for the "
            f"{len(requests)} requests of load event {meta.load_event}; it must have "
            "one per request."
        )
    return [(request_id,) for request_id in requests], meta.load_sizes


def _rows(block_ids: tuple[int, ...], blocks_per_row: int) -> PyTree:
    """Arrange device blocks as the engine expects them: one row per host block."""
    if blocks_per_row == 1:
        return block_ids
    if len(block_ids) % blocks_per_row:
        raise ValueError(
            f"the plan has {len(block_ids)} device blocks; it must have a multiple of "
            f"{blocks_per_row}, the device blocks per host block."
        )
    return np.array(block_ids).reshape(-1, blocks_per_row)
