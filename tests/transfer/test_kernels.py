"""What copies rows: asynchronous copies, which are interpreted here, or XLA."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pltpu

from jaxkv.transfer import Compression, PoolLayout, TransferEngine, dma, kernels, rows
from jaxkv.transfer.extents import ExtentLayout
from jaxkv.transfer.kernels import SAVE_KINDS, Copier
from tests.transfer.numbered import NUM_BLOCKS, save_and_wait
from tests.transfer.shadow import Shadow, random_array, to_device

MIXED = {
    "kv": [((NUM_BLOCKS, 4, 2, 8), "bfloat16")] * 3,
    "scale": [((NUM_BLOCKS, 4), "float32")],
    "flags": [((NUM_BLOCKS, 2, 3), "bool")],
}


def is_spec(node):
    return isinstance(node, tuple)


def mixed(seed=0):
    """A pool of leaves that asynchronous copies can copy and others, and a shadow."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        shape, dtype = spec
        if dtype == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        return random_array(rng, shape, dtype)

    arrays = jax.tree.map(leaf, MIXED, is_leaf=is_spec)
    return to_device(arrays), Shadow(arrays)


def exercise(engine, pool, shadow, rounds=3):
    """Save, with rows carried over, load, copy; compare everything."""
    rng = np.random.default_rng(1)
    for _ in range(rounds):
        ids = rng.permutation(NUM_BLOCKS)[: int(rng.integers(1, NUM_BLOCKS // 2))]
        host_ids = rng.permutation(engine.num_host_blocks)[: len(ids)]
        pool = save_and_wait(engine, pool, ids, host_ids)
        shadow.save(ids, host_ids)
        known = rng.permutation(sorted(shadow.host))[:5]
        targets = rng.permutation(NUM_BLOCKS)[: len(known)]
        pool, _ = engine.load(pool, known, targets)
        shadow.load(known, targets)
        pool, [done] = engine.drain(pool)
        assert done.error is None
        source, target = rng.permutation(NUM_BLOCKS)[:2]
        pool = engine.copy(pool, [source], [target])
        for leaf in shadow.leaves:
            leaf[target] = leaf[source]
        shadow.check(pool)
    return pool


def make(pool, **options):
    """An engine with four blocks an extent."""
    return TransferEngine(pool, 32, **options)


@pytest.fixture
def kinds_of_saves(monkeypatch):
    """The kinds of the save programs that were taken."""
    kinds = []
    compile_save = Copier._compile_save
    monkeypatch.setattr(
        Copier,
        "_compile_save",
        lambda self, kind, *number: (
            kinds.append(kind) or compile_save(self, kind, *number)
        ),
    )
    return kinds


def test_leaves_are_copied_by_whichever_kernel_can(kinds_of_saves):
    pool, shadow = mixed()
    engine = make(pool, mode="staged", kernel="dma")
    assert engine.kernel == "dma"
    assert sorted(engine._copier._by_dma) == [1, 2, 3]  # Not "flags", nor "scale".
    exercise(engine, pool, shadow, rounds=6)
    assert set(kinds_of_saves) == {"gather", "merge"}


# Of two leaves: two rows, also where there are more leaves than copies.
@pytest.mark.parametrize("in_flight", [4, 1])
def test_no_copy_races_with_another_and_each_is_waited_for(monkeypatch, in_flight):
    # This interpreter copies only when a copy is waited for, and sees what overlaps.
    interpreter = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    monkeypatch.setattr(dma, "_INTERPRETER", interpreter)
    monkeypatch.setattr(dma, "_COPIES_IN_FLIGHT", in_flight)
    rng = np.random.default_rng(2)
    arrays = [random_array(rng, (NUM_BLOCKS, 2, 8), "int32") for _ in range(2)]
    pool, shadow = to_device(arrays), Shadow(arrays)
    engine = make(pool, mode="staged", kernel="dma")
    assert engine._copier.extents.rows == 4
    exercise(engine, pool, shadow, rounds=2)
    assert not interpret_pallas_call.races.races_found


def test_rows_that_are_not_wanted_are_not_written():
    array = np.arange(NUM_BLOCKS * 16, dtype=np.int32).reshape(NUM_BLOCKS, 2, 8)
    pool = jnp.array(array)
    layout = PoolLayout.of(pool)
    extents = ExtentLayout.of(layout, 4, stacked=True)

    @jax.jit
    def gather(pool, sources):
        return dma.gather_rows(extents, extents.bundles, {0: pool}, sources, None)

    @jax.jit
    def merge(pool, sources, old):
        return dma.gather_rows(extents, extents.bundles, {0: pool}, sources, old)

    @jax.jit
    def scatter(pool, targets, arrays):
        bundles = extents.bundles
        return dma.scatter_rows(extents, bundles, {0: pool}, targets, arrays)[0]

    sources = jnp.array([-1, 7, -1, 2, 1, 0, 1, 0], jnp.int32)
    old = (jnp.full((1, 4, 2, 8), -5, jnp.int32),)
    (merged,) = merge(pool, sources, old)
    assert (np.array(merged[0, [1, 3]]) == array[[7, 2]]).all()
    assert (np.array(merged[0, [0, 2]]) == -5).all()
    (gathered,) = gather(pool, sources)
    assert (np.array(gathered[0, [1, 3]]) == array[[7, 2]]).all()
    after = np.array(scatter(pool, jnp.array([3, -1, 0, -1], jnp.int32), (merged,)))
    expected = array.copy()
    expected[[3, 0]] = -5
    assert (after == expected).all()


class Refusal(Exception):
    """What Pallas raises, of a class that nobody may import."""


@pytest.mark.parametrize("when", ["it is traced", "it is compiled"])
def test_a_refused_kernel_is_replaced_and_the_log_says_so(when, monkeypatch, caplog):
    compile_program, traced = kernels.memory.compile_program, []
    pallas_call = pallas.pallas_call

    def trace(*args, **options):
        if when == "it is traced":
            raise Refusal("Mosaic failed to compile TPU kernel")
        traced.append(1)
        return pallas_call(*args, **options)

    def compile_traced(lowered, platform):
        if traced:
            traced.clear()
            raise Refusal("Mosaic failed to compile TPU kernel")
        return compile_program(lowered, platform)

    monkeypatch.setattr(pallas, "pallas_call", trace)
    monkeypatch.setattr(kernels.memory, "compile_program", compile_traced)
    # As on TPU, where no kernel is asked for.
    monkeypatch.setattr(kernels, "_DMA_PLATFORMS", ("cpu",))
    pool, shadow = mixed()
    engine = make(pool, mode="staged")
    assert engine.kernel == "dma"
    with caplog.at_level(logging.WARNING, "jaxkv"):
        engine.warm_up()
    assert engine.kernel == "xla"
    [record] = caplog.records
    assert "refuses the asynchronous copies of 3 arrays" in record.getMessage()
    assert "Mosaic failed to compile TPU kernel" in record.getMessage()
    assert not traced, "jax took the old trace"
    exercise(engine, pool, shadow)
    asked = make(mixed()[0], mode="staged", kernel="dma")
    with pytest.raises(Refusal):
        asked.warm_up()


def test_an_error_that_is_not_the_kernels_is_raised(monkeypatch):
    def refuse(lowered, platform):
        raise MemoryError("no memory to compile in")

    monkeypatch.setattr(kernels, "_DMA_PLATFORMS", ("cpu",))
    engine = make(mixed()[0], mode="staged")
    monkeypatch.setattr(kernels.memory, "compile_program", refuse)
    with pytest.raises(MemoryError):
        engine.warm_up()


def test_kernels_that_cannot_be_are_refused():
    pool, _ = mixed()
    with pytest.raises(ValueError, match="kernel='cuda' must be one of"):
        make(pool, kernel="cuda")
    with pytest.raises(ValueError, match="for mode 'staged' on TPU, not for mode 'fu"):
        make(pool, mode="fused", kernel="dma")
    for options in ({}, {"compression": Compression("int8")}):
        only = pool["kv"] if options else [pool["scale"][0], pool["flags"][0]]
        with pytest.raises(ValueError, match="can copy no leaf of this pool"):
            make(only, mode="staged", kernel="dma", **options)
    assert make(pool, mode="staged", kernel="xla").kernel == "xla"
    assert make(pool, mode="staged").kernel == make(pool).kernel == "xla"


@pytest.fixture
def off_cpu(monkeypatch):
    """Compile what fused programs are elsewhere than on CPU."""
    choose = Copier._choose_by_dma

    def pretend(self, kernel):
        self._writes_single_rows = False
        return choose(self, kernel)

    monkeypatch.setattr(Copier, "_choose_by_dma", pretend)


def test_off_cpu_a_fused_save_leaves_the_spare_extent_alone(off_cpu, kinds_of_saves):
    pool, shadow = mixed()
    engine = make(pool, mode="fused")
    exercise(engine, pool, shadow, rounds=6)
    assert sorted(kinds_of_saves) == ["gather", "merge", "write"]
    for kind in SAVE_KINDS["fused"]:
        text = engine._copier.save_program(kind).as_text()
        assert " while(" not in text
        entry = text[text.index("ENTRY") :]
        parameters = re.findall(r"%(\S+) = \S+ parameter\((\d+)\)", entry)
        num_spare = len(engine._copier.extents.bundles)
        spare = sorted(parameters, key=lambda each: int(each[1]))[-num_spare:]
        for name, _ in spare:
            assert len(re.findall(rf"%{re.escape(name)}\b", entry)) == 1, "it is read"


def test_on_cpu_a_short_fused_save_writes_single_rows():
    copier = make(mixed()[0], mode="fused")._copier
    assert " while(" in copier.save_program("write").as_text()


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_wide_rows_are_copied_one_by_one_in_loops_of_known_length(mode, monkeypatch):
    monkeypatch.setattr(rows, "_is_wide", lambda leaf, axis, platform: True)
    pool, shadow = mixed()
    engine = make(pool, mode=mode)
    exercise(engine, pool, shadow)
    programs = [engine._copier.save_program("gather"), engine._copier.load_program(0)]
    for program in programs:
        text = program.as_text()
        assert text.count(" while(") >= 1
        assert text.count("known_trip_count") >= text.count(" while(")


def test_rows_are_wide_by_their_bytes_on_a_device_and_only_on_tpu():
    leaf = jax.ShapeDtypeStruct((2, 4, 32, 1024), jnp.float32)
    pool = jnp.zeros(leaf.shape, leaf.dtype)
    assert not rows._is_wide(pool, 1, "tpu")  # 256 KiB a block
    assert rows._is_wide(pool, 0, "tpu")
    assert not rows._is_wide(pool, 0, "cpu")
    assert not rows._is_wide(pool, 0, "gpu")
