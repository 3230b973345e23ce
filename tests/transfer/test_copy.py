"""Copies from block to block within a pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine
from tests.transfer.shadow import bits, random_array

NUM_BLOCKS = 16

modes = pytest.mark.parametrize("mode", ["fused", "staged"])
# Asynchronous copies are interpreted.
ways = pytest.mark.parametrize(
    ("mode", "kernel"), [("fused", None), ("staged", None), ("staged", "dma")]
)


def make_engine(mode, pool, **more):
    return TransferEngine(pool, 4, mode=mode, **more)


def check_copied(before, after, axes, pairs):
    for leaf, new, axis in zip(before, after, axes, strict=True):
        expected = np.moveaxis(np.array(leaf), axis, 0)
        sources, targets = [list(ids) for ids in zip(*pairs, strict=True)]
        expected[targets] = expected[sources]
        got = np.moveaxis(np.array(new), axis, 0)
        assert (bits(got) == bits(expected)).all()


@ways
def test_blocks_of_any_layout_are_copied_bit_for_bit(mode, kernel):
    rng = np.random.default_rng(0)
    axes = {"half": 1, "bytes": 0, "pair": 2, "float": 0, "flags": 1}
    shapes = {
        "half": ((2, NUM_BLOCKS, 4), "bfloat16"),
        "bytes": ((NUM_BLOCKS, 3), "int8"),
        "pair": ((2, 3, NUM_BLOCKS), "float32"),
        "float": ((NUM_BLOCKS, 2, 2), "float8_e4m3fn"),
        "flags": ((1, NUM_BLOCKS, 2), "uint16"),
    }
    arrays = {n: random_array(rng, shape, kind) for n, (shape, kind) in shapes.items()}
    pool = jax.tree.map(jnp.array, arrays)
    engine = make_engine(mode, pool, kernel=kernel, block_axis=axes)
    pairs = [(3, 0), (7, 15), (3, 1)]  # one source may go to several places
    new = engine.copy(pool, *zip(*pairs, strict=True))
    names = list(arrays)
    check_copied(
        [arrays[n] for n in names],
        [new[n] for n in names],
        [axes[n] for n in names],
        pairs,
    )


@ways
def test_sharded_heads_are_copied_where_they_are(mode, kernel):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("heads",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "heads"))
    array = np.arange(NUM_BLOCKS * 8, dtype=np.int32).reshape(NUM_BLOCKS, 4, 2)
    pool = jax.device_put(array, place)
    engine = make_engine(mode, pool, kernel=kernel)
    new = engine.copy(pool, [1, 2], [3, 0])
    assert new.sharding == place
    check_copied([array], [new], [0], [(1, 3), (2, 0)])


@modes
def test_a_pool_is_copied_in_place_and_each_size_compiled_once(mode):
    pool = {"k": jnp.arange(NUM_BLOCKS * 64, dtype=jnp.float32).reshape(NUM_BLOCKS, 64)}
    engine = make_engine(mode, pool)
    expected = np.array(pool["k"])
    where = pool["k"].unsafe_buffer_pointer()
    for num in (1, 2, 7, 8, 3):
        before = pool["k"]
        pool = engine.copy(pool, range(num), range(8, 8 + num))
        expected[8 : 8 + num] = expected[:num]
        assert before.is_deleted()
        np.testing.assert_array_equal(pool["k"], expected)
        assert pool["k"].unsafe_buffer_pointer() == where
    assert engine._copier.copy_program.cache_info().misses == 1


@modes
def test_an_empty_copy_runs_no_program(mode):
    pool = {"k": jnp.ones((NUM_BLOCKS, 2))}
    same = make_engine(mode, pool).copy(pool, [], [])
    assert same["k"] is pool["k"]


@modes
def test_a_save_before_a_copy_saves_the_old_bytes(mode):
    pool = jnp.arange(NUM_BLOCKS, dtype=jnp.int32)
    engine = make_engine(mode, pool)
    engine.save(pool, [5], [0])
    pool = engine.copy(pool, [6], [5])
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, [0], [6])
    pool, [done] = engine.drain(pool)
    assert done.error is None
    assert np.array(pool)[[5, 6]].tolist() == [6, 5]


@pytest.mark.parametrize(
    ("sources", "targets", "why"),
    [
        ([1, 2], [3], "go in pairs"),
        ([1, 2], [3, 3], "distinct"),
        ([1, 2], [2, 3], "sources too"),
        ([NUM_BLOCKS], [3], "must be in"),
        ([1], [-1], "must be in"),
        ([1.0], [2], "flat sequence of ints"),
    ],
)
def test_invalid_copies_are_refused_and_change_nothing(sources, targets, why):
    pool = jnp.arange(NUM_BLOCKS, dtype=jnp.int32)
    engine = make_engine("staged", pool)
    with pytest.raises(ValueError, match=why):
        engine.copy(pool, sources, targets)
    assert not pool.is_deleted()
    np.testing.assert_array_equal(pool, np.arange(NUM_BLOCKS))


def test_a_copy_refuses_another_layout_and_a_sharded_block_axis():
    pool = jnp.arange(NUM_BLOCKS, dtype=jnp.int32)
    engine = make_engine("staged", pool)
    with pytest.raises(ValueError, match="int32"):
        engine.copy(pool.astype(jnp.float32), [1], [2])
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("blocks",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("blocks"))
    spread = jax.device_put(pool, place)
    with pytest.raises(ValueError, match="block axis is not sharded"):
        make_engine("staged", spread).copy(spread, [1], [2])
    assert not spread.is_deleted()
