"""Transfers must not copy the pool, take fresh memory or compile again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine, kernels, memory, rows

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
    copier = TransferEngine(make_pool(dtype), 4, mode=mode)._copier
    for kind in kernels.SAVE_KINDS[mode]:
        assert whole_pool_converts(copier.save_program(kind)) == []
    assert whole_pool_converts(copier.load_program(0)) == []


def test_without_the_compiler_options_a_load_converts_the_pool(monkeypatch):
    # If this fails, XLA has fixed it: the options may go, with their test above.
    monkeypatch.setattr(memory, "compiler_options", lambda platform: None)
    copier = TransferEngine(make_pool("float8_e5m2"), 4)._copier
    assert whole_pool_converts(copier.load_program(0))


@modes
def test_a_load_updates_the_pool_in_place(mode):
    pool = make_pool()
    engine = TransferEngine(pool, 30, mode=mode)
    ids = np.arange(21)
    engine.save(pool, ids, ids)
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, ids, ids)
    pool, _ = engine.drain(pool)  # From here on XLA owns the memory.
    before = pointers(pool)
    pool, _ = engine.load(pool, ids, ids + 3)
    pool, _ = engine.drain(pool)
    assert pointers(pool) == before


@modes
def test_a_load_keeps_the_sharding_of_the_pool(mode):
    # One device, as a mesh whose axis shards the block axis.
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("x",), explicit, devices=[CPU])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    pool = jax.device_put(make_pool(), sharding)
    engine = TransferEngine(pool, 30, mode=mode)
    ids = np.arange(21)
    engine.save(pool, ids, ids)
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, ids, ids)
    engine.save(pool, ids, ids)
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None, None]
    assert [leaf.sharding for leaf in pool] == [sharding] * 3


def test_a_fused_save_recycles_the_host_memory_in_place():
    pool = make_pool()
    engine = TransferEngine(pool, 30, mode="fused")
    extents = engine._queue._memory._extents
    before = pointers(extents)
    # 30 blocks are 10 extents of 3, and one is spare; each has an array per leaf.
    assert len(set(before)) == 11 * 3
    carried = 0
    for start in (5, 0, 9, 2, 7):  # Runs that cut extents in two, so that rows move.
        engine.save(pool, np.arange(21), np.arange(21) + start)
        carried += sum(piece.placement.carry >= 0 for piece in engine._queue._saving)
        pool, done = engine.drain(pool)
        assert [each.error for each in done] == [None]
        assert sorted(pointers(extents)) == sorted(before)
    assert carried


def test_extents_are_pinned_and_stacked_where_they_travel_alone():
    pool = make_pool()
    shapes = {
        "fused": [(3, 64), (3, 64), (3, 8)],  # One leaf each: a stack would be copied.
        "staged": [(2, 3, 64), (1, 3, 8)],  # Equal leaves share one array.
    }
    for mode in MODES:
        engine = TransferEngine(pool, 30, mode=mode)
        engine.save(pool, [0], [1])
        engine.drain(pool)
        extents = [extent for extent in engine._queue._memory._extents if extent]
        assert len(extents) == {"fused": 11, "staged": 1}[mode]
        for extent in extents:
            assert [array.shape for array in extent] == shapes[mode]
            assert {array.sharding.memory_kind for array in extent} == {"pinned_host"}


@pytest.fixture
def traced(monkeypatch):
    """The functions of `rows` that were traced, in order."""
    names = []

    def count(name):
        function = getattr(rows, name)

        def counting(*args):
            names.append(name)
            return function(*args)

        monkeypatch.setattr(rows, name, counting)

    for name in ("write_rows", "gather_rows", "scatter_rows"):
        count(name)
    return names


# A save has programs for all rows of an extent, for some (in the mode "fused"), and
# for some beside those carried over. Staged ones copy one, two or four extents.
PROGRAMS = {
    "fused": ["gather_rows", "scatter_rows", "write_rows", "write_rows"],
    "staged": ["gather_rows"] * (1 + 2 + 4 + 1) + ["scatter_rows"] * (1 + 2 + 4),
}


@modes
@pytest.mark.parametrize("seed", [5])
def test_each_kind_of_program_is_traced_once(mode, seed, traced):
    rng = np.random.default_rng(seed)
    pool = make_pool()
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode)
    engine.warm_up()
    for num_blocks in (3, *rng.integers(1, NUM_BLOCKS, 24)):
        ids = rng.permutation(NUM_BLOCKS)[:num_blocks]
        engine.save(pool, ids, ids)
        pool, _ = engine.drain(pool)
        pool, _ = engine.load(pool, ids, ids)
        pool, done = engine.drain(pool)
        assert [each.error for each in done] == [None]
    with jax.default_device(CPU):
        uncommitted = [jnp.ones((NUM_BLOCKS, 64), jnp.bfloat16) for _ in range(2)]
        uncommitted.append(jnp.full((NUM_BLOCKS, 8), 1.0))
    assert not uncommitted[0].committed
    assert uncommitted[2].weak_type
    engine.save(uncommitted, range(21), range(21))
    pool, _ = engine.drain(uncommitted)
    pool, _ = engine.load(pool, range(21), range(21))
    assert [done.error for done in engine.drain(pool)[1]] == [None]
    assert sorted(traced) == PROGRAMS[mode]


@modes
def test_each_layer_group_has_one_load_program(mode, traced):
    pool = make_pool()
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode, layer_groups=3)
    engine.warm_up()
    for num in (3, 21, 40):
        engine.save(pool, range(num), range(num))
        pool, _ = engine.drain(pool)
        pool, _ = engine.load(pool, range(num), range(num))
        pool, _ = engine.drain(pool)
    # Of one, two and four extents, each traced extent by extent.
    extents_traced = 1 + 2 + 4 if mode == "staged" else 1
    assert traced.count("scatter_rows") == 3 * extents_traced


@modes
def test_engines_of_equal_pools_compile_once(mode, traced):
    for dtype in ("float32", "float32", "int32"):
        TransferEngine(make_pool(dtype), NUM_BLOCKS, mode=mode).warm_up()
    assert sorted(traced) == sorted(2 * PROGRAMS[mode])


@modes
def test_warm_up_compiles_every_program(mode, traced, monkeypatch):
    pool = make_pool()
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode)
    engine.warm_up()
    assert sorted(traced) == PROGRAMS[mode]
    for name in ("write_rows", "gather_rows", "scatter_rows"):
        monkeypatch.setattr(rows, name, None)
    for ids in (range(40), range(0, 40, 3)):  # The second carries rows over.
        engine.save(pool, ids, ids)
        pool, done = engine.drain(pool)
        assert [each.error for each in done] == [None]
    pool, _ = engine.load(pool, range(21), range(21))
    assert [done.error for done in engine.drain(pool)[1]] == [None]


@modes
def test_a_transfer_takes_one_program_for_up_to_four_extents(mode, monkeypatch):
    pool = make_pool()
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode)  # Five blocks an extent.
    engine.warm_up()
    run, calls = engine._copier._run, []
    monkeypatch.setattr(
        engine._copier, "_run", lambda *args: calls.append(args) or run(*args)
    )
    for num_blocks, num_extents, together in [
        (0, 0, 0),
        (1, 1, 1),
        (5, 1, 1),
        (6, 2, 1),
        (23, 5, 2),
    ]:
        num_programs = together if mode == "staged" else num_extents
        calls.clear()
        engine.save(pool, range(num_blocks), range(num_blocks))
        pool, _ = engine.drain(pool)
        assert len(calls) == num_programs
        calls.clear()
        pool, _ = engine.load(pool, range(num_blocks), range(num_blocks))
        while not all(piece.is_ready() for piece in engine._queue._landing):
            pass
        pool, _ = engine.drain(pool)
        assert len(calls) == num_programs


@modes
def test_programs_run_in_the_background(mode, monkeypatch):
    # XLA:CPU runs a program of less than 1,000 operations in the thread that calls.
    def num_operations():
        copier = TransferEngine(make_pool(), 16, mode=mode)._copier
        programs = [copier.save_program(kind) for kind in kernels.SAVE_KINDS[mode]]
        programs.append(copier.load_program(0))
        return [program.cost_analysis()["flops"] for program in programs]

    assert min(num_operations()) >= 1000
    monkeypatch.setattr(kernels, "_token", lambda plan: plan[:, :1])
    kernels.shared_copier.cache_clear()
    assert min(num_operations()) < 1000
