"""Carries a step's transfers out and reports what completed."""

from __future__ import annotations

from jaxkv.connector import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.transfer import Completion, Ticket, TransferEngine
from jaxkv.types import PyTree


class OffloadWorker:
    """Moves blocks as `OffloadScheduler` says, on the thread that runs the model.

    Args:
        engine: The transfer engine of the device pool. It is the worker's alone: what
            others move with it is not reported to anybody.

    Attributes:
        blocks_stored: Blocks whose store arrived so far.
        blocks_loaded: Blocks whose load arrived so far.
        bytes_stored: Bytes of the former.
        bytes_loaded: Bytes of the latter.
    """

    def __init__(self, engine: TransferEngine) -> None:
        if engine.blocks_per_host_block != 1 or engine.num_lanes != 1:
            raise ValueError(
                f"the engine has {engine.blocks_per_host_block} device blocks per host "
                f"block and a block axis of {engine.num_lanes} shards; a scheduler "
                "knows of neither yet, both must be 1."
            )
        self.blocks_stored = 0
        self.blocks_loaded = 0
        self.bytes_stored = 0
        self.bytes_loaded = 0
        self._engine = engine
        self._store_events: dict[Ticket, int] = {}
        self._load_requests: dict[Ticket, tuple[str, ...]] = {}
        self._flushed: list[Completion] = []

    @property
    def num_in_flight(self) -> int:
        """Transfers that were started and not reported yet."""
        return len(self._store_events) + len(self._load_requests)

    def start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        """Start the transfers of a step; returns before they are done.

        Call it before the step's model runs: the stores read what earlier steps
        wrote, the loads write what this step may not read yet.

        Args:
            meta: The transfers.
            pool: The device pool. Donated if there are loads.

        Returns:
            The pool to run the model on.
        """
        if meta.need_flush:
            pool, flushed = self._engine.drain(pool)
            self._flushed += flushed
        else:
            pool = self._engine.advance(pool)
        if meta.store_event != NO_EVENT:
            ticket = self._engine.save(
                pool, meta.store_device_blocks, meta.store_host_blocks
            )
            self._store_events[ticket] = meta.store_event
        if meta.load_event != NO_EVENT:
            pool, ticket = self._engine.load(
                pool, meta.load_host_blocks, meta.load_device_blocks
            )
            self._load_requests[ticket] = meta.load_event_to_reqs[meta.load_event]
        return pool

    def poll(self) -> ConnectorOutput:
        """Report the transfers that completed since the last time; never waits."""
        return self._report(self._engine.poll())

    def drain(self, pool: PyTree) -> tuple[PyTree, ConnectorOutput]:
        """Wait for all transfers and report them.

        Args:
            pool: The device pool. Donated if there are loads.

        Returns:
            The pool to go on with, and the report.
        """
        pool, completions = self._engine.drain(pool)
        return pool, self._report(completions)

    def _report(self, completions: list[Completion]) -> ConnectorOutput:
        recving: dict[bool, list[str]] = {True: [], False: []}
        stores: dict[bool, list[int]] = {True: [], False: []}
        for done in self._flushed + completions:
            ok = done.error is None
            if done.ticket in self._store_events:
                stores[ok].append(self._store_events.pop(done.ticket))
                self.blocks_stored += done.num_blocks * ok
                self.bytes_stored += done.num_bytes * ok
            elif done.ticket in self._load_requests:
                recving[ok].extend(self._load_requests.pop(done.ticket))
                self.blocks_loaded += done.num_blocks * ok
                self.bytes_loaded += done.num_bytes * ok
        self._flushed = []
        return ConnectorOutput(
            finished_recving=tuple(recving[True]),
            failed_recving=tuple(recving[False]),
            completed_store_events=tuple(stores[True]),
            failed_store_events=tuple(stores[False]),
        )
