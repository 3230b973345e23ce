"""A tier of one's own between the host and whatever comes next: a dictionary.

docs/write-a-tier.md says what each part is for.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from jaxkv import (
    DeviceBlockPool,
    OffloadScheduler,
    OffloadWorker,
    SchedulerOutput,
    TransferEngine,
)
from jaxkv.scheduling.boundary import TierBelow
from jaxkv.scheduling.protocol import TierReport
from jaxkv.tiers.index import BlockIndex


class MemoryMover:
    """Carries blocks between the host and a dictionary."""

    def __init__(self, engine):
        self.engine, self.memory = engine, {}
        self.fetches, self.written = {}, []

    def start(self, moves):
        """Begin the moves of a step."""
        for key in moves.deletes if moves else ():
            self.memory.pop(key, None)
        for batch in moves.writes if moves else ():
            held = self.engine.read_host(batch.upper_blocks)
            for index, key in enumerate(batch.keys):
                self.memory[key] = np.empty(self.engine.host_payload_bytes, np.uint8)
                held.copy(index, self.memory[key])
            held.close()
            self.written.append((batch.event, (True,) * len(batch.keys)))
        for batch in moves.fetches if moves else ():
            rows = [self.memory[key] for key in batch.keys]
            write = self.engine.write_host(batch.upper_blocks, rows)
            self.fetches[batch.event] = write
        self.advance()

    def advance(self):
        """Advance the writes in flight."""
        self.engine.advance_host(lambda copy: copy())

    def take_reports(self, max_found_keys=0):
        """Return the moves that ended since the last call."""
        ended = {event: write for event, write in self.fetches.items() if write.is_over}
        fetched = [
            (event, (write.error is None,) * len(write.host_ids))
            for event, write in ended.items()
        ]
        for event in ended:
            del self.fetches[event]
        written, self.written = self.written, []
        return (TierReport(tuple(fetched), tuple(written)),)

    def wait(self):
        """Wait until no write is in flight."""
        while not all(write.is_over for write in self.fetches.values()):
            self.advance()

    @property
    def num_in_flight(self):
        """The number of moves in flight."""
        return len(self.fetches)


# A host of two blocks, and eight behind it.
pool, device = jnp.zeros((8, 4, 2)), DeviceBlockPool(8)
engine = TransferEngine(pool, 2)
memory = BlockIndex(block_size=4, num_blocks=8, medium="MEMORY")
scheduler = OffloadScheduler(4, 2, tiers_below=[TierBelow(memory, "through")])
scheduler.bind_device_block_pool(device)
worker = OffloadWorker(engine, movers=[MemoryMover(engine)])


def step(**tokens):
    """Run a step of an engine that computes nothing."""
    global pool
    meta = scheduler.build_connector_meta(SchedulerOutput(tokens))
    pool = worker.start(meta, pool)
    pool, report = worker.drain(pool)
    scheduler.update_connector_output(report)


def make(name):
    """Make a request of one full block and a token."""
    keys = [name.encode().ljust(32)]
    return SimpleNamespace(
        request_id=name, block_keys=keys, num_tokens=5, num_computed_tokens=0
    )


for name in ("a", "b", "c"):
    request, blocks = make(name), device.allocate(2)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, blocks, 0)
    step(**{name: 5})
    request.num_computed_tokens = 5
    device.cache(blocks[:1], request.block_keys)
    scheduler.request_finished(request, blocks)
    device.free(blocks)
    while scheduler.has_pending_stores():
        step()
device.evict(range(1, 8))

again = make("a")  # The host has evicted it.
answers = [scheduler.get_num_new_matched_tokens(again, 0)]
step()
answers.append(scheduler.get_num_new_matched_tokens(again, 0))
print(f"{scheduler.below[0].counts.stored} blocks went down; answers: {answers}")
