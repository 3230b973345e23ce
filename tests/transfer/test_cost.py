"""Transfers must not copy the pool, take fresh memory or compile again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine, kernels, memory, rows
from tests.rigs.device_cases import only_on_cpu
from tests.rigs.waiting import wait_for
from tests.transfer.numbered import DEVICE, programs_of

NUM_BLOCKS = 40


def new_pool(dtype="bfloat16"):
    pool = [jnp.ones((NUM_BLOCKS, 64), dtype), jnp.ones((NUM_BLOCKS, 64), dtype)]
    return jax.device_put([*pool, jnp.zeros((NUM_BLOCKS, 8))], DEVICE)


def move(moves, ids):
    moves.save_now(ids, ids)
    moves.load_now(ids, ids)


def pointers(arrays):
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(arrays)]


def whole_pool_converts(program):
    """Lines of the optimised program that convert an array as large as a leaf."""
    return re.findall(rf".*\[{NUM_BLOCKS},64\]\S* convert\(.*", program.as_text())


@only_on_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_no_program_converts_the_pool(mode, dtype):
    for program in programs_of(TransferEngine(new_pool(dtype), 4, mode=mode)):
        assert whole_pool_converts(program) == []


@only_on_cpu
def test_without_the_compiler_options_a_load_converts_the_pool(
    fresh_programs, monkeypatch
):
    # If this fails, XLA has fixed it: the options may go, with their test above.
    monkeypatch.setattr(memory, "compiler_options", lambda platform: None)
    copier = TransferEngine(new_pool("float8_e5m2"), 4)._copier
    assert whole_pool_converts(copier.load_program())


def test_a_load_updates_the_pool_in_place(make):
    moves, ids = make(new_pool()), np.arange(21)
    move(moves, ids)  # From here on XLA owns the memory.
    before = pointers(moves.pool)
    moves.load_now(ids, ids + 3)
    assert pointers(moves.pool) == before


@pytest.mark.parametrize("mode", ["fused"])
def test_a_fused_save_recycles_the_host_memory_in_place(make, mode):
    moves = make(new_pool(), num_host_blocks=30)
    extents = moves.engine._queue._memory._extents
    before = pointers(extents)
    # 30 blocks are 10 extents of 3, and one is spare; each has an array per leaf.
    assert len(set(before)) == 11 * 3
    carried = 0
    for start in (5, 0, 9, 2, 7):  # Runs that cut extents in two, so that rows move.
        moves.save(np.arange(21), np.arange(21) + start)
        pieces = moves.engine._queue._saving
        carried += sum(piece.placement.carry >= 0 for piece in pieces)
        assert [completion.error for completion in moves.drain()] == [None]
        assert sorted(pointers(extents)) == sorted(before)
    assert carried


def test_extents_are_pinned_and_stacked_where_they_travel_alone(make, mode):
    shapes = {
        "fused": [(3, 64), (3, 64), (3, 8)],  # One leaf each: a stack would be copied.
        "staged": [(2, 3, 64), (1, 3, 8)],  # Equal leaves share one array.
    }
    moves = make(new_pool(), num_host_blocks=30)
    moves.save_now([0], [1])
    extents = [extent for extent in moves.engine._queue._memory._extents if extent]
    assert len(extents) == {"fused": 11, "staged": 1}[mode]
    for extent in extents:
        assert [array.shape for array in extent] == shapes[mode]
        assert {array.sharding.memory_kind for array in extent} == {"pinned_host"}


@pytest.fixture
def traced(fresh_programs, monkeypatch):
    """The functions of `rows` that were traced, in order."""
    names = []

    def counting(name, function):
        def count(*args):
            names.append(name)
            return function(*args)

        return count

    for name in ("write_rows", "gather_rows", "scatter_rows"):
        monkeypatch.setattr(rows, name, counting(name, getattr(rows, name)))
    return names


# A save has programs for all rows of an extent, for some (in the mode "fused"), and
# for some beside those carried over. Staged ones copy one, two or four extents.
PROGRAMS = {
    "fused": ["gather_rows", "scatter_rows", "write_rows", "write_rows"],
    "staged": ["gather_rows"] * (1 + 2 + 4 + 1) + ["scatter_rows"] * (1 + 2 + 4),
}


def test_each_kind_of_program_is_traced_once_by_warm_up(make, mode, traced):
    rng = np.random.default_rng(5)
    moves = make(new_pool(), num_host_blocks=NUM_BLOCKS)
    moves.engine.warm_up()
    assert sorted(traced) == PROGRAMS[mode]
    make(new_pool(), num_host_blocks=NUM_BLOCKS).engine.warm_up()  # Of an equal pool.
    for num_blocks in (3, *rng.integers(1, NUM_BLOCKS, 24)):
        move(moves, rng.permutation(NUM_BLOCKS)[:num_blocks])
    moves.save_now(range(NUM_BLOCKS), range(NUM_BLOCKS))
    moves.save_now(range(0, NUM_BLOCKS, 3), range(0, NUM_BLOCKS, 3))  # Carries rows.
    with jax.default_device(DEVICE):
        uncommitted = [jnp.ones((NUM_BLOCKS, 64), jnp.bfloat16) for _ in range(2)]
        uncommitted.append(jnp.full((NUM_BLOCKS, 8), 1.0))
    assert not uncommitted[0].committed
    assert uncommitted[2].weak_type
    moves.pool = uncommitted
    move(moves, range(21))
    assert sorted(traced) == PROGRAMS[mode]


def test_a_transfer_takes_one_program_for_up_to_four_extents(make, mode, monkeypatch):
    moves = make(new_pool(), num_host_blocks=NUM_BLOCKS)  # Five blocks an extent.
    copier, calls = moves.engine._copier, []
    moves.engine.warm_up()
    run = copier._run
    monkeypatch.setattr(copier, "_run", lambda *args: calls.append(args) or run(*args))
    for num_blocks, num_extents, together in [
        (0, 0, 0),
        (1, 1, 1),
        (5, 1, 1),
        (6, 2, 1),
        (23, 5, 2),
    ]:
        num_programs = together if mode == "staged" else num_extents
        calls.clear()
        moves.save_now(range(num_blocks), range(num_blocks))
        assert len(calls) == num_programs
        calls.clear()
        moves.load(range(num_blocks), range(num_blocks))
        landing = moves.engine._queue._landing
        wait_for(lambda landing=landing: all(piece.is_ready() for piece in landing))
        moves.drain()
        assert len(calls) == num_programs


@only_on_cpu
def test_programs_run_in_the_background(mode, fresh_programs, monkeypatch):
    # XLA:CPU runs a program of less than 1,000 operations in the thread that calls.
    def num_operations():
        programs = programs_of(TransferEngine(new_pool(), 16, mode=mode))
        return [program.cost_analysis()["flops"] for program in programs]

    assert min(num_operations()) >= 1000
    monkeypatch.setattr(kernels, "_token", lambda plan: plan[:, :1])
    kernels.shared_copier.cache_clear()
    assert min(num_operations()) < 1000
