"""A worker that checks that stored blocks do not change, and that `poll` is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.strict.blocks import PoolBlocks, StrictError
from jaxkv.transfer import AnyEngine, MultiPoolEngine
from jaxkv.transfer.ownership import owned
from jaxkv.types import PyTree

MAX_SILENT_STEPS = 16
"""The maximum steps without a poll while transfers are in flight."""


class StrictOffloadWorker(OffloadWorker):
    """Runs transfers, and refuses a pool if a block whose store is in flight changed.

    Raises:
        StrictError: By `start` and `drain`: something wrote to a block whose store is
            in flight, or `poll` is not called.
    """

    def __init__(self, engine: AnyEngine, **named: Any) -> None:
        super().__init__(engine, **named)
        self._has_pools = isinstance(engine, MultiPoolEngine)
        engines = engine.engines if isinstance(engine, MultiPoolEngine) else [engine]
        self._blocks = [PoolBlocks(pool.layout) for pool in engines]
        self._num_silent = 0
        # By store event in flight: the checksum of each of its device blocks.
        self._storing: dict[int, dict[int, int]] = {}

    @owned
    def start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        """Start the transfers of a step; see `OffloadWorker.start`."""
        if self.num_in_flight and self._num_silent >= MAX_SILENT_STEPS:
            raise StrictError(
                f"OffloadWorker.poll() was not called in {self._num_silent} steps with "
                f"{self.num_in_flight} transfers in flight: call it in every step, and "
                "pass its result to OffloadScheduler.update_connector_output()."
            )
        self._check(pool)
        sums = None
        if meta.store_event != NO_EVENT:
            sums = self._sums(pool, meta.store_device_blocks)
        pool = super().start(meta, pool)
        self._num_silent += 1
        if sums is not None:
            self._storing[meta.store_event] = sums
        return pool

    @owned
    def poll(self) -> ConnectorOutput:
        """Report ended transfers; see `OffloadWorker.poll`."""
        self._num_silent = 0
        return self._forget_reported(super().poll())

    @owned
    def drain(self, pool: PyTree) -> tuple[PyTree, ConnectorOutput]:
        """Wait for all transfers; see `OffloadWorker.drain`."""
        self._check(pool)
        self._num_silent = 0
        pool, output = super().drain(pool)
        return pool, self._forget_reported(output)

    @owned
    def abandon(self) -> ConnectorOutput:
        """Abandon all transfers; see `OffloadWorker.abandon`."""
        return self._forget_reported(super().abandon())

    def _sums(self, pool: PyTree, block_ids: Sequence[int]) -> dict[int, int] | None:
        sums: dict[int, int] = {}
        pools = pool if self._has_pools else [pool]
        end = 0
        for leaves, blocks in zip(pools, self._blocks, strict=True):
            first, end = end, end + blocks.num_blocks
            local = blocks.sums(
                leaves, [block - first for block in block_ids if first <= block < end]
            )
            if local is None:
                return None
            sums |= {first + block: crc for block, crc in local.items()}
        return sums

    def _forget_reported(self, output: ConnectorOutput) -> ConnectorOutput:
        for event in (*output.completed_store_events, *output.failed_store_events):
            self._storing.pop(event, None)
        return output

    def _check(self, pool: PyTree) -> None:
        """Refuse a pool if a block whose store is in flight has changed."""
        expected: dict[int, int] = {}
        for sums in self._storing.values():
            expected |= sums
        current = self._sums(pool, list(expected))
        if current is None:
            self._storing.clear()  # The pool is lost.
            return
        for block, checksum in current.items():
            if checksum != expected[block]:
                raise StrictError(
                    f"device block {block} was written while its store is in flight. "
                    "A freed block stays pinned until poll() reports its store: write "
                    "only to blocks that were allocated for a running request."
                )
