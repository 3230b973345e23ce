"""A worker that checks the blocks of each step, and that `poll` is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv._util import shown
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.worker.worker import OffloadWorker
from jaxkv.strict.blocks import UNWRITTEN, PoolBlocks, StrictError
from jaxkv.transfer import AnyEngine, MultiPoolEngine
from jaxkv.transfer.ownership import owned
from jaxkv.types import PyTree

MAX_SILENT_STEPS = 16
"""The maximum steps without a poll while transfers are in flight."""

_UNWRITTEN_RULE = (
    "nothing wrote it since it was allocated: count tokens in num_computed_tokens, and "
    "pass blocks to a prefix cache, after the step that computes them or the load that "
    "brings them, not after a failed load, and pass tables in the order of tokens."
)


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """The strict scheduler's knowledge of a step, for the strict worker."""

    allocated: tuple[int, ...]  # Blocks that requests got, and that this step fills.
    # Computed blocks that the step does not write: the request that has each, or had.
    computed: Mapping[int, str]
    # Store events, and requests with loads, whose report the scheduler awaits.
    in_flight: frozenset[int | str]


def ended_moves(output: ConnectorOutput) -> set[int | str]:
    """Return the store events, and the requests with loads, that a report names."""
    events = *output.completed_store_events, *output.failed_store_events
    return {*events, *output.finished_recving, *output.failed_recving}


class StrictOffloadWorker(OffloadWorker):
    """Runs transfers, and refuses a pool whose blocks are not as they should be.

    Raises:
        StrictError: By `start` and `drain`: a block is stored or counts as computed
            that nothing wrote, something wrote to a computed block or to one whose
            store is in flight, `poll` is not called, or its report was dropped.
    """

    def __init__(self, engine: AnyEngine, **named: Any) -> None:
        super().__init__(engine, **named)
        self._has_pools = isinstance(engine, MultiPoolEngine)
        engines = engine.engines if isinstance(engine, MultiPoolEngine) else [engine]
        self._blocks = [PoolBlocks(pool.layout) for pool in engines]
        self._num_silent = 0
        # By store event in flight: the checksum of each of its device blocks.
        self._storing: dict[int, dict[int, int]] = {}
        self._computed: dict[int, int] = {}  # Checksums at the start of the last step.
        self._num_starts = 0
        # By store event and request with a load: `_num_starts` when it was reported.
        self._reported: dict[int | str, int] = {}

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
        if meta.strict is not None and not self._has_pools:
            pool = self._checked_step(meta.strict, pool)
            for name in meta.load_event_to_reqs.get(meta.load_event, ()):
                self._reported.pop(name, None)  # It loads again.
        sums = None
        if meta.store_event != NO_EVENT:
            sums = self._sums(pool, meta.store_device_blocks)
            for block, crc in (sums or {}).items():
                if crc == UNWRITTEN:
                    message = f"device block {block} is stored, but {_UNWRITTEN_RULE}"
                    raise StrictError(message)
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

    def _checked_step(self, facts: StepFacts, pool: PyTree) -> PyTree:
        """Fill the blocks allocated for a step; refuse computed blocks that changed."""
        kept = facts.in_flight & self._reported.keys()
        self._reported = {name: self._reported[name] for name in kept}
        for name, start in self._reported.items():
            if (num_steps := self._num_starts - start) > MAX_SILENT_STEPS:
                move = "store event" if isinstance(name, int) else "load of request"
                raise StrictError(
                    f"OffloadWorker.poll() reported the {move} {shown(name)} "
                    f"{num_steps} steps ago, and the scheduler still has it in flight: "
                    "pass each report to OffloadScheduler.update_connector_output()."
                )
        self._num_starts += 1
        if facts.allocated:
            pool = self._blocks[0].unwritten(pool, facts.allocated)
        sums = self._sums(pool, list(facts.computed)) or {}
        for block, crc in sums.items():
            name = shown(facts.computed[block])
            if crc == UNWRITTEN:
                counted = f"request {name} counts device block {block} as computed"
                raise StrictError(f"{counted}, but {_UNWRITTEN_RULE}")
            if crc != self._computed.get(block, crc):
                raise StrictError(
                    f"device block {block} was written after request {name} counted it "
                    "as computed: write only a step's tokens, nothing for a request "
                    "that was preempted or has ended, and let a prefix cache have only "
                    "blocks that are written."
                )
        self._computed = sums
        return pool

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
        if self._num_starts:
            self._reported |= dict.fromkeys(ended_moves(output), self._num_starts)
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
