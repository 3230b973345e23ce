"""A pool whose blocks hold their numbers, for tests of where blocks end up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine
from jaxkv.transfer.kernels import SAVE_KINDS
from tests.rigs.device_cases import devices
from tests.rigs.extent_tables import check_table

[DEVICE] = devices(1)
NUM_BLOCKS, NUM_HOST_BLOCKS = 24, 32
# These follow: host blocks per extent, and extents with the spare one.
EXTENT_BLOCKS, NUM_EXTENTS = 4, 9
BLOCK_BYTES = 8 * 4 + 8 * 2
EXTENT_BYTES = EXTENT_BLOCKS * BLOCK_BYTES


def numbered_pool(offset=0):
    """Blocks that hold their numbers: n in leaf k, -n in leaf v."""
    numbers = jnp.arange(offset, offset + NUM_BLOCKS, dtype=jnp.float32)
    k = jnp.broadcast_to(numbers[:, None], (NUM_BLOCKS, 8))
    return jax.device_put({"k": k, "v": -k.astype(jnp.bfloat16)}, DEVICE)


def numbers_in(pool):
    """The number that each block holds; checks all its elements."""
    k, v = np.array(pool["k"]), np.array(pool["v"].astype(jnp.float32))
    assert (k == k[:, :1]).all()
    assert (v == -k).all()
    return k[:, 0].astype(int).tolist()


def check_at_rest(engine):
    """Check that nothing is in flight, pinned or held."""
    assert engine.num_in_flight == engine.num_waiting == engine.bytes_in_flight == 0
    assert engine._table.num_pins == 0
    assert not engine._table._held.any()
    check_table(engine._table)


def programs_of(engine):
    """The programs of an engine, first for saves, then for loads."""
    copier = engine._copier
    saves = [copier.save_program(kind) for kind in SAVE_KINDS[copier.mode]]
    return [*saves, copier.load_program()]


class Moves:
    """An engine, and the pool that it returned last; a numbered one at first."""

    def __init__(self, mode, pool=None, num_host_blocks=NUM_HOST_BLOCKS, **options):
        self.pool = numbered_pool() if pool is None else pool
        self.engine = TransferEngine(self.pool, num_host_blocks, mode=mode, **options)

    def save(self, device_ids, host_ids):
        return self.engine.save(self.pool, device_ids, host_ids)

    def load(self, host_ids, device_ids, **options):
        self.pool, ticket = self.engine.load(self.pool, host_ids, device_ids, **options)
        return ticket

    def drain(self):
        self.pool, done = self.engine.drain(self.pool)
        return done

    def advance(self):
        self.pool = self.engine.advance(self.pool)
        return self.engine.poll()

    def save_now(self, device_ids, host_ids):
        ticket = self.save(device_ids, host_ids)
        assert [(done.ticket, done.error) for done in self.drain()] == [(ticket, None)]

    def load_now(self, host_ids, device_ids):
        ticket = self.load(host_ids, device_ids)
        assert [(done.ticket, done.error) for done in self.drain()] == [(ticket, None)]

    def read(self, host_ids):
        """Load host blocks into the first blocks of the pool; return their numbers."""
        self.load_now(host_ids, range(len(host_ids)))
        return self.numbers[: len(host_ids)]

    @property
    def numbers(self):
        return numbers_in(self.pool)

    def check_empty(self, host_ids):
        for host_id in host_ids:
            with pytest.raises(ValueError, match=rf"\[{host_id}\] have no bytes"):
                self.engine.read_host([host_id])
