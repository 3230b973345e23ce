"""Tests that need a GPU: `JAXKV_TEST_PLATFORM=cuda pytest -m gpu`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine, probe_fused

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 512
ROWS = (64, 1024)  # A block of one leaf: 128 KiB in bfloat16.


def random_pool(seed, num_leaves=4):
    """Leaves of random bits, NaNs included, and the same on the host."""
    rng = np.random.default_rng(seed)
    shape = (NUM_BLOCKS, *ROWS)
    raw = [rng.integers(0, 1 << 16, shape, np.uint16) for _ in range(num_leaves)]
    return [jnp.array(bits.view(jnp.bfloat16)) for bits in raw], raw


def bits_of(leaf):
    return np.asarray(leaf).view(np.uint16)


@jax.jit
def long_step(x):
    """Some tenths of a second of products."""
    return jax.lax.fori_loop(0, 400, lambda _, y: (y @ x) * 1e-4, x)


def round_trip(mode):
    pool, raw = random_pool(1)
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode)
    order = np.random.default_rng(2)
    source, host, target = (order.permutation(NUM_BLOCKS) for _ in range(3))
    engine.save(pool, source, host)
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None]
    pool = jax.tree.map(jnp.zeros_like, pool)
    pool, _ = engine.load(pool, host, target)
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None]
    for leaf, bits in zip(pool, raw, strict=True):
        assert np.array_equal(bits_of(leaf)[target], bits[source])


def test_blocks_survive_a_round_trip():
    round_trip("staged")


def test_the_default_is_staged():
    pool, _ = random_pool(0, num_leaves=1)
    assert TransferEngine(pool, 8).mode == "staged"


def test_the_probe_is_right_about_fused():
    result = probe_fused("gpu")
    print(result)
    if result.ok:
        round_trip("fused")
    else:
        pool, _ = random_pool(0, num_leaves=1)
        with pytest.raises(ValueError, match="cannot be used here"):
            TransferEngine(pool, 8, mode="fused")


def test_host_blocks_are_pinned():
    pool, _ = random_pool(0)
    engine = TransferEngine(pool, NUM_BLOCKS)
    engine.save(pool, range(64), range(64))
    engine.drain(pool)
    extents = [extent for extent in engine._queue._memory._extents if extent]
    assert extents
    kinds = {array.sharding.memory_kind for array in jax.tree.leaves(extents)}
    assert kinds == {"pinned_host"}


def test_neither_direction_waits_for_the_step_before():
    pool, raw = random_pool(3)
    engine = TransferEngine(pool, NUM_BLOCKS)
    engine.warm_up()
    engine.save(pool, range(16), range(16))
    pool, _ = engine.drain(pool)
    x = jnp.ones((4096, 4096), jnp.float32)
    jax.block_until_ready(long_step(x))
    output = long_step(x)
    engine.save(pool, range(32, 64), range(32, 64))
    pool, _ = engine.load(pool, range(16), range(100, 116))
    assert engine.poll() == []
    assert not output.is_ready()
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None, None]
    assert np.array_equal(bits_of(pool[0])[100:116], raw[0][:16])


def test_a_pool_over_all_gpus_round_trips():
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if len(devices) < 2:
        pytest.skip("one GPU")
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
    spec = jax.sharding.PartitionSpec(None, None, "x")
    pool, raw = random_pool(4)
    pool = jax.device_put(pool, jax.sharding.NamedSharding(mesh, spec))
    engine = TransferEngine(pool, NUM_BLOCKS)
    engine.save(pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, range(NUM_BLOCKS), range(NUM_BLOCKS)[::-1])
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None]
    assert np.array_equal(bits_of(pool[0])[::-1], raw[0])
