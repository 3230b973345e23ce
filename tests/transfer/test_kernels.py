"""Rows are copied by asynchronous copies, which are interpreted here, or by XLA."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas
from jax.experimental.pallas import tpu as pltpu

from jaxkv.transfer import Compression, TransferEngine, dma, kernels, rows
from jaxkv.transfer.kernels import Copier
from tests.rigs.device_cases import only_on_cpu
from tests.transfer.numbered import NUM_BLOCKS, Moves
from tests.transfer.shadow import Shadow, exercise, random_array, to_device

pytestmark = only_on_cpu
# With one extent in flight there are programs for one only: they take long to compile.
ONE_EXTENT = 4 * (2 * 128 + 16 + 6)
MIXED = {
    "kv": [((NUM_BLOCKS, 4, 2, 8), "bfloat16")] * 2,
    "scale": [((NUM_BLOCKS, 4), "float32")],
    "flags": [((NUM_BLOCKS, 2, 3), "bool")],
}


def mixed():
    """A pool of leaves that asynchronous copies can copy and others, and a shadow."""
    rng = np.random.default_rng(0)
    arrays = {
        name: [random_array(rng, shape, dtype) for shape, dtype in leaves]
        for name, leaves in MIXED.items()
    }
    return to_device(arrays), Shadow(arrays)


def check_moves(moves, shadow, rounds=2):
    """Save, with rows carried over, load, copy; compare everything."""
    exercise(moves, shadow, np.random.default_rng(1), rounds)


@pytest.fixture
def kinds_of_saves(fresh_programs, monkeypatch):
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
    moves = Moves("staged", pool, kernel="dma", staging_bytes=ONE_EXTENT)
    assert moves.engine.kernel == "dma"
    assert sorted(moves.engine._copier._by_dma) == [1, 2]  # Not "flags", nor "scale".
    check_moves(moves, shadow, rounds=4)
    assert set(kinds_of_saves) == {"gather", "merge"}


# Of two leaves: two rows, also where there are more leaves than copies.
@pytest.mark.parametrize("in_flight", [4, 1])
def test_no_copy_races_with_another_and_each_is_waited_for(
    in_flight, fresh_programs, monkeypatch
):
    # This interpreter copies only when a copy is waited for, and sees what overlaps.
    interpreter = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    monkeypatch.setattr(dma, "_INTERPRETER", interpreter)
    monkeypatch.setattr(dma, "_COPIES_IN_FLIGHT", in_flight)
    rng = np.random.default_rng(2)
    arrays = [random_array(rng, (NUM_BLOCKS, 2, 8), "int32") for _ in range(2)]
    options = {"kernel": "dma", "staging_bytes": 4 * 2 * 64}
    moves = Moves("staged", to_device(arrays), **options)
    assert moves.engine._copier.extents.rows == 4
    check_moves(moves, Shadow(arrays))
    assert not interpret_pallas_call.races.races_found


class Refusal(Exception):
    """An error of a private class, such as Pallas raises."""


@pytest.mark.parametrize("when", ["it is traced", "it is compiled"])
def test_a_refused_kernel_is_replaced_and_the_log_says_so(
    when, fresh_programs, monkeypatch, caplog
):
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
    moves = Moves("staged", pool, staging_bytes=ONE_EXTENT)
    assert moves.engine.kernel == "dma"
    with caplog.at_level(logging.WARNING, "jaxkv"):
        moves.engine.warm_up()
    assert moves.engine.kernel == "xla"
    [record] = caplog.records
    assert "refuses the asynchronous copies of 2 arrays" in record.getMessage()
    assert "Mosaic failed to compile TPU kernel" in record.getMessage()
    assert not traced, "jax took the old trace"
    check_moves(moves, shadow)
    with pytest.raises(Refusal):
        Moves("staged", mixed()[0], kernel="dma").engine.warm_up()


def test_an_error_that_is_not_the_kernels_is_raised(fresh_programs, monkeypatch):
    def refuse(lowered, platform):
        raise MemoryError("no memory to compile in")

    monkeypatch.setattr(kernels, "_DMA_PLATFORMS", ("cpu",))
    engine = Moves("staged", mixed()[0]).engine
    monkeypatch.setattr(kernels.memory, "compile_program", refuse)
    with pytest.raises(MemoryError):
        engine.warm_up()


def test_kernels_that_cannot_be_are_refused():
    pool, _ = mixed()
    with pytest.raises(ValueError, match="for mode 'staged' on TPU, not for mode 'fu"):
        Moves("fused", pool, kernel="dma")
    for options in ({}, {"compression": Compression("int8")}):
        only = pool["kv"] if options else [pool["scale"][0], pool["flags"][0]]
        with pytest.raises(ValueError, match="can copy no leaf of this pool"):
            Moves("staged", only, kernel="dma", **options)
    assert Moves("staged", pool, kernel="xla").engine.kernel == "xla"
    assert Moves("staged", pool).engine.kernel == "xla"
    assert TransferEngine(pool, 32).kernel == "xla"


def test_a_short_fused_save_writes_single_rows():
    copier = Moves("fused", mixed()[0]).engine._copier
    assert " while(" in copier.save_program("write").as_text()


def test_wide_rows_are_copied_one_by_one_in_loops_of_known_length(
    mode, fresh_programs, monkeypatch
):
    monkeypatch.setattr(rows, "_is_wide", lambda leaf, axis, platform: True)
    pool, shadow = mixed()
    moves = Moves(mode, pool, staging_bytes=ONE_EXTENT)
    check_moves(moves, shadow)
    copier = moves.engine._copier
    for program in (copier.save_program("gather"), copier.load_program()):
        text = program.as_text()
        assert text.count(" while(") >= 1
        assert text.count("known_trip_count") >= text.count(" while(")


def test_rows_are_wide_by_their_bytes_on_a_device_and_only_on_tpu():
    pool = jnp.zeros((2, 4, 32, 1024), jnp.float32)
    assert not rows._is_wide(pool, 1, "tpu")  # 256 KiB a block
    assert rows._is_wide(pool, 0, "tpu")
    assert not rows._is_wide(pool, 0, "cpu")
    assert not rows._is_wide(pool, 0, "gpu")
