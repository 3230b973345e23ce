"""A pool whose blocks hold their numbers, for tests of where blocks end up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine

CPU = jax.devices("cpu")[0]
MODES = ("fused", "staged")
NUM_BLOCKS, NUM_HOST_BLOCKS = 24, 32
# These follow: host blocks per extent, and extents with the spare one.
EXTENT_BLOCKS, NUM_EXTENTS = 4, 9
BLOCK_BYTES = 8 * 4 + 8 * 2
EXTENT_BYTES = EXTENT_BLOCKS * BLOCK_BYTES

modes = pytest.mark.parametrize("mode", MODES)


def numbered_pool(offset=0):
    """Blocks that hold their numbers: n in leaf k, -n in leaf v."""
    numbers = jnp.arange(offset, offset + NUM_BLOCKS, dtype=jnp.float32)
    k = jnp.broadcast_to(numbers[:, None], (NUM_BLOCKS, 8))
    return jax.device_put({"k": k, "v": -k.astype(jnp.bfloat16)}, CPU)


def numbers_in(pool):
    """The number that each block holds; checks all its elements."""
    k, v = np.array(pool["k"]), np.array(pool["v"].astype(jnp.float32))
    assert (k == k[:, :1]).all()
    assert (v == -k).all()
    return k[:, 0].astype(int).tolist()


def make_engine(mode, **arguments):
    pool = numbered_pool()
    return TransferEngine(pool, NUM_HOST_BLOCKS, mode=mode, **arguments), pool


def save_and_wait(engine, pool, device_ids, host_ids):
    """Save blocks and wait until they can be loaded."""
    ticket = engine.save(pool, device_ids, host_ids)
    pool, done = engine.drain(pool)
    assert [(each.ticket, each.error) for each in done] == [(ticket, None)]
    return pool


def load_numbers(engine, pool, host_ids):
    """Load `host_ids` into the first blocks of `pool` and read them."""
    pool, ticket = engine.load(pool, host_ids, list(range(len(host_ids))))
    pool, done = engine.drain(pool)
    assert [(each.ticket, each.error) for each in done] == [(ticket, None)]
    return numbers_in(pool)[: len(host_ids)], pool


def check_at_rest(engine):
    """Check that nothing is in flight, pinned or held."""
    assert engine.num_in_flight == engine.num_waiting == engine.bytes_in_flight == 0
    queue = engine._queue
    assert not [*queue._landing, *queue._saving, *queue._loading]
    assert queue.table.num_pins == 0
    assert not queue.table._held.any()
    queue.table.check()
