"""What a transfer must not cost: copies of the pool, fresh memory, compilations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine, kernels, memory

CPU = jax.devices("cpu")[0]
MODES = ("fused", "staged")
NUM_BLOCKS = 40

modes = pytest.mark.parametrize("mode", MODES)


def make_pool(dtype="bfloat16"):
    pool = [jnp.ones((NUM_BLOCKS, 64), dtype), jnp.ones((NUM_BLOCKS, 64), dtype)]
    return jax.device_put([*pool, jnp.zeros((NUM_BLOCKS, 8))], CPU)


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(arrays)]


def whole_pool_converts(program):
    """Lines of the optimised program that convert an array as large as a leaf."""
    return re.findall(rf".*\[{NUM_BLOCKS},64\]\S* convert\(.*", program.as_text())


@modes
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_no_program_converts_the_pool(mode, dtype):
    mover = TransferEngine(make_pool(dtype), 4, mode=mode)._mover
    for size in kernels.PROGRAM_SIZES:
        assert whole_pool_converts(mover.save_program(size)) == []
        assert whole_pool_converts(mover.load_program(size)) == []


def test_without_the_compiler_options_a_load_converts_the_pool(monkeypatch):
    # If this fails, XLA has learnt better: the options may go, with their test above.
    monkeypatch.setattr(memory, "compiler_options", lambda platform: None)
    mover = TransferEngine(make_pool("float8_e5m2"), 4)._mover
    assert whole_pool_converts(mover.load_program(4))


@modes
def test_a_load_updates_the_pool_in_place(mode):
    pool = make_pool()
    engine = TransferEngine(pool, 30, mode=mode)
    ids = np.arange(21)
    engine.save(pool, ids, ids)
    engine.drain()
    pool, _ = engine.load(pool, ids, ids)  # From here on XLA owns the memory.
    engine.drain()
    before = pointers(pool)
    pool, _ = engine.load(pool, ids, ids + 3)
    engine.drain()
    assert pointers(pool) == before


@modes
def test_a_load_keeps_the_sharding_of_the_pool(mode):
    # One device, but a mesh whose block axis the pool is spread over.
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("x",), explicit, devices=[CPU])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    pool = jax.device_put(make_pool(), sharding)
    engine = TransferEngine(pool, 30, mode=mode)
    ids = np.arange(21)
    engine.save(pool, ids, ids)
    engine.drain()
    pool, _ = engine.load(pool, ids, ids)
    assert [leaf.sharding for leaf in pool] == [sharding] * 3
    engine.save(pool, ids, ids)
    assert [done.error for done in engine.drain()] == [None, None]


def test_a_fused_save_recycles_the_host_memory_in_place():
    pool = make_pool()
    engine = TransferEngine(pool, 30, mode="fused")
    before = pointers(engine._store._blocks)
    assert len(set(before)) == 30 * 2  # An array per block and group.
    for _ in range(3):
        engine.save(pool, np.arange(21), np.arange(21) + 5)
        engine.drain()
    assert sorted(pointers(engine._store._blocks)) == sorted(before)


def test_host_blocks_are_pinned_and_grouped():
    pool = make_pool()
    for mode in MODES:
        engine = TransferEngine(pool, 3, mode=mode)
        engine.save(pool, [0], [1])
        engine.drain()
        for block in engine._store._blocks:
            assert [array.shape for array in block] == [(2, 64), (1, 8)]
            assert {array.sharding.memory_kind for array in block} == {"pinned_host"}


@modes
def test_one_program_a_size_and_direction(mode, monkeypatch):
    traced = {"gather": [], "scatter": []}

    def count(name):
        function = getattr(kernels, name)

        def counting(leaves, ids, *args):
            traced[name].append(len(ids))
            return function(leaves, ids, *args)

        monkeypatch.setattr(kernels, name, counting)

    count("gather")
    count("scatter")
    rng = np.random.default_rng(5)
    pool = make_pool()
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode)
    for _ in range(25):
        ids = rng.permutation(NUM_BLOCKS)[: rng.integers(1, NUM_BLOCKS)]
        engine.save(pool, ids, ids)
        engine.drain()
        pool, _ = engine.load(pool, ids, ids)
        engine.drain()
    with jax.default_device(CPU):
        uncommitted = [jnp.ones((NUM_BLOCKS, 64), jnp.bfloat16) for _ in range(2)]
        uncommitted.append(jnp.full((NUM_BLOCKS, 8), 1.0))
    assert not uncommitted[0].committed
    assert uncommitted[2].weak_type
    engine.save(uncommitted, range(21), range(21))
    engine.drain()
    engine.load(uncommitted, range(21), range(21))
    assert [done.error for done in engine.drain()] == [None]
    assert {name: sorted(sizes) for name, sizes in traced.items()} == {
        "gather": sorted(kernels.PROGRAM_SIZES),
        "scatter": sorted(kernels.PROGRAM_SIZES),
    }


def test_warm_up_compiles_all_there_is(monkeypatch):
    pool = make_pool()
    engine = TransferEngine(pool, NUM_BLOCKS)
    engine.warm_up()
    monkeypatch.setattr(kernels, "gather", None)
    monkeypatch.setattr(kernels, "scatter", None)
    engine.save(pool, range(21), range(21))
    assert [done.error for done in engine.drain()] == [None]
    engine.load(pool, range(21), range(21))
    assert [done.error for done in engine.drain()] == [None]


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [(0, []), (1, [1]), (4, [4]), (7, [4, 1, 1, 1]), (53, [16, 16, 16, 4, 1])],
)
def test_chunks_cover_all_blocks_once(num_blocks, sizes):
    runs = list(kernels.chunks(num_blocks))
    assert [run.stop - run.start for run in runs] == sizes
    assert [i for run in runs for i in range(num_blocks)[run]] == list(
        range(num_blocks)
    )
