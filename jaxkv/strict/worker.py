"""A worker that watches the blocks of stores, and whether it is polled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.strict.blocks import PoolBlocks, StrictError
from jaxkv.transfer import AnyEngine, MultiPoolEngine
from jaxkv.types import PyTree

MOST_SILENT_STEPS = 16
"""The most steps that an engine may go on without asking for reports."""


class StrictOffloadWorker(OffloadWorker):
    """Carries transfers out, and refuses a pool whose blocks in flight have changed.

    Args:
        engine: As of `OffloadWorker`, and so are the others.
        named: See `engine`.

    Raises:
        StrictError: By `start` and `drain`: something wrote to a block whose store is
            in flight, or `poll` is never called.
    """

    def __init__(self, engine: AnyEngine, **named: Any) -> None:
        super().__init__(engine, **named)
        self._has_pools = isinstance(engine, MultiPoolEngine)
        # Of each pool, the id of its first block.
        if isinstance(engine, MultiPoolEngine):
            firsts = engine.first_blocks.tolist()
            layouts = [one.layout for one in engine.engines]
        else:
            firsts, layouts = [0], [engine.layout]
        each = zip(firsts, map(PoolBlocks, layouts), strict=False)
        self._blocks: list[tuple[int, PoolBlocks]] = list(each)
        self._num_silent = 0
        # Checksums of what is being stored, by store event.
        self._storing: dict[int, dict[int, int]] = {}

    def start(self, meta: OffloadMetadata, pool: PyTree) -> PyTree:
        """Start the transfers of a step; see `OffloadWorker.start`."""
        if self.num_in_flight and self._num_silent >= MOST_SILENT_STEPS:
            raise StrictError(
                f"OffloadWorker.poll() was not called in {self._num_silent} steps with "
                f"{self.num_in_flight} transfers in flight: call it in every step, and "
                "give what it returns to OffloadScheduler.update_connector_output()."
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

    def poll(self) -> ConnectorOutput:
        """Report what completed; see `OffloadWorker.poll`."""
        self._num_silent = 0
        return self._noted(super().poll())

    def drain(self, pool: PyTree) -> tuple[PyTree, ConnectorOutput]:
        """Wait for all transfers; see `OffloadWorker.drain`."""
        self._check(pool)
        self._num_silent = 0
        pool, output = super().drain(pool)
        return pool, self._noted(output)

    def abandon(self) -> ConnectorOutput:
        """Abandon all transfers; see `OffloadWorker.abandon`."""
        return self._noted(super().abandon())

    def _sums(self, pool: PyTree, block_ids: Sequence[int]) -> dict[int, int] | None:
        """Make checksums of blocks, as `PoolBlocks.sums` does."""
        sums: dict[int, int] = {}
        for own, (first, blocks) in zip(
            pool if self._has_pools else [pool], self._blocks, strict=True
        ):
            end = first + blocks.num_blocks
            of_pool = blocks.sums(
                own, [n - first for n in block_ids if first <= n < end]
            )
            if of_pool is None:
                return None
            sums |= {first + number: crc for number, crc in of_pool.items()}
        return sums

    def _noted(self, output: ConnectorOutput) -> ConnectorOutput:
        """Take note of what is reported."""
        for event in (*output.completed_store_events, *output.failed_store_events):
            self._storing.pop(event, None)
        return output

    def _check(self, pool: PyTree) -> None:
        """Refuse a pool in which a block has changed that is being stored."""
        expected: dict[int, int] = {}
        for sums in self._storing.values():
            expected |= sums
        found = self._sums(pool, list(expected))
        if found is None:
            self._storing.clear()  # The pool is lost.
            return
        for block, now in found.items():
            if now != expected[block]:
                raise StrictError(
                    f"device block {block} was written while its store is in flight. "
                    "A block that has been freed is pinned until poll() reports its "
                    "store: write only to blocks that DeviceBlockPool.allocate() "
                    "gave to a request that runs."
                )
