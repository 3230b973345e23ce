"""A fourth tier: blocks in plain memory, between the host and the store.

`MemoryConfig` has its key, and makes its index and its mover.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np

from jaxkv import OffloadConfig
from jaxkv._util import settings
from jaxkv.scheduling.boundary import TierBelow
from jaxkv.scheduling.protocol import TierReport
from jaxkv.search.groups import as_groups
from jaxkv.tiers.index import BlockIndex

MEDIUM = "MEMORY"


class Memory:
    """The bytes of blocks; to the store's mover they are what an engine's host has."""

    def __init__(self, num_blocks, engine):
        self.host_payload_bytes = engine.host_payload_bytes
        self.host_bytes_description = engine.host_bytes_description
        self.rows = np.zeros((num_blocks, self.host_payload_bytes), np.uint8)

    def read_host(self, blocks):
        rows = self.rows[list(blocks)]
        return SimpleNamespace(
            num_blocks=len(rows),
            copy=lambda index, out: np.copyto(out, rows[index]),
            close=lambda: None,
        )

    def write_host(self, blocks, payloads):
        for block, payload in zip(blocks, payloads, strict=True):
            self.rows[block] = payload
        return SimpleNamespace(is_over=True, error=None)

    def advance_host(self, run):
        """Nothing is ever under way."""


class MemoryMover:
    def __init__(self, engine, memory, fails=lambda: False):
        self._engine, self._memory, self._fails = engine, memory, fails
        self._fetches = []  # (batch, which of its blocks arrive, their copy)
        self._fetched, self._written = [], []

    @property
    def num_in_flight(self):
        """Fetches that were started and are not over; writes are, at once."""
        return len(self._fetches)

    def start(self, moves):
        for batch in moves.writes if moves else ():
            held = self._engine.read_host(batch.upper_blocks)
            for index, block in enumerate(batch.lower_blocks):
                held.copy(index, self._memory.rows[block])
            held.close()
            self._written.append((batch.event, self._oks(batch)))
        for batch in moves.fetches if moves else ():
            oks = self._oks(batch)
            pairs = zip(batch.upper_blocks, batch.lower_blocks, oks, strict=True)
            pairs = [(upper, lower) for upper, lower, ok in pairs if ok]
            blocks = [upper for upper, _ in pairs]
            rows = [self._memory.rows[lower].copy() for _, lower in pairs]
            write = self._engine.write_host(blocks, rows) if pairs else None
            self._fetches.append((batch.event, oks, write))
        self.advance()

    def advance(self):
        self._engine.advance_host(lambda copy: copy())
        self._engine.advance_host(lambda copy: copy())  # Sees that they are done.
        under_way = []
        for event, oks, write in self._fetches:
            if write is not None and not write.is_over:
                under_way.append((event, oks, write))
                continue
            has_come = write is None or write.error is None
            self._fetched.append((event, tuple(ok and has_come for ok in oks)))
        self._fetches = under_way

    def take_reports(self, max_found_keys=0):
        report = TierReport(tuple(self._fetched), tuple(self._written))
        self._fetched, self._written = [], []
        return (report,) if report.fetched or report.written else ()

    def wait(self):
        while self._fetches:
            self.advance()

    def _oks(self, batch):
        return tuple(not self._fails() for _ in batch.keys)


@dataclasses.dataclass(frozen=True)
class MemoryConfig(OffloadConfig):
    """A configuration with a key for the tier."""

    memory_blocks: int = settings.number(
        64, "memory", "Blocks of the memory tier.", unit="host blocks", minimum=1
    )
    fails = staticmethod(lambda: False)

    def make_worker(self, engine, **named):
        memory = Memory(self.memory_blocks, engine)
        mover = MemoryMover(engine, memory, self.fails)
        storage = self.open_storage(memory)
        return super().make_worker(engine, movers=[mover], storage=storage, **named)

    def make_scheduler(self, groups, *args, **named):
        """Make the scheduler, with the memory below the host."""
        index = BlockIndex(
            as_groups(groups)[0].block_size * self.blocks_per_host_block,
            self.memory_blocks,
            enable_events=self.enable_events,
            medium=MEDIUM,
        )
        named["tiers_below"] = [TierBelow(index, "through")]
        return super().make_scheduler(groups, *args, **named)
