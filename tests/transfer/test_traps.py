"""Traps of moving bytes with JAX; test_bits, test_cost and test_engine have others.

Where a guard can be removed, a test shows that the trap still exists: if such a test
fails, JAX has fixed it, and the guard may go.
"""

import ast
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv.transfer
from jaxkv.transfer import TransferEngine, kernels, memory, rows, tickets
from jaxkv.transfer.plans import NOTHING
from tests.rigs.device_cases import only_on_cpu, spread
from tests.rigs.waiting import wait_for
from tests.transfer.numbered import (
    DEVICE,
    EXTENT_BYTES,
    NUM_BLOCKS,
    numbered_pool,
    programs_of,
)

SOURCE = Path(jaxkv.transfer.__file__).parent


def kinds(shardings):
    """The memories of a program's arrays; the device's own is "device"."""
    return [sharding.memory_kind or "device" for sharding in jax.tree.leaves(shardings)]


@only_on_cpu
def test_without_the_compiler_options_bits_change(make, fresh_programs, monkeypatch):
    # Of bfloat16 jax 0.10 changes 252 patterns, 0.12 none.
    raw = np.arange(1 << 8, dtype=np.uint8).reshape(32, -1)

    def came_back():
        moves = make(jnp.array(raw.view(jnp.float8_e5m2)))
        moves.save_now(range(32), range(32))
        moves.pool = jnp.zeros_like(moves.pool)
        moves.load_now(range(32), range(32))
        return np.array(moves.pool).view(np.uint8)

    assert np.array_equal(came_back(), raw)
    monkeypatch.setattr(memory, "compiler_options", lambda platform: None)
    kernels.shared_copier.cache_clear()
    assert not np.array_equal(came_back(), raw)


def test_no_program_donates_across_memories_and_no_save_the_pool(make):
    programs = programs_of(make().engine)
    for program in programs:
        donated = [info.donated for info in jax.tree.leaves(program.args_info)]
        inputs = kinds(program.input_shardings)
        donated_kinds = [kind for kind, yes in zip(inputs, donated, strict=True) if yes]
        outputs = kinds(program.output_shardings)
        for kind in donated_kinds:  # Each is matched with a result in its own memory.
            outputs.remove(kind)
    for program in programs[:-1]:
        (leaves, *_), _ = program.args_info
        assert not any(info.donated for info in jax.tree.leaves(leaves))


DONATES_ACROSS = """
import jax, jax.numpy as jnp
import resource
_, most = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # The crash is expected.
host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
double = jax.jit(lambda array: array * 2, donate_argnums=0, out_shardings=host)
double(jnp.ones((64, 64))).block_until_ready()
"""


@only_on_cpu
def test_donating_across_memories_ends_the_process():
    words = [sys.executable, "-c", DONATES_ACROSS]
    child = subprocess.run(words, capture_output=True, check=False, timeout=120)
    assert child.returncode == -signal.SIGABRT


@only_on_cpu
def test_a_numpy_view_of_an_extent_does_not_change(make):
    # Donation then falls back to a copy, which is slower and correct.
    moves = make()
    moves.save_now([7], [1])
    moves.load_now([1], [0])  # From here on XLA owns the memory.
    view = np.asarray(moves.pool["k"])
    moves.load_now([1], [2])
    assert moves.numbers[:3] == [7, 1, 7]
    assert view[:3, 0].tolist() == [7, 1, 2]
    extents = moves.engine._queue._memory._extents
    views = [np.asarray(array) for extent in extents if extent for array in extent]
    before = [view.copy() for view in views]
    for _ in range(len(extents) + 1):
        moves.save_now(range(24), range(24))
    assert all(map(np.array_equal, views, before))
    assert moves.read(range(4)) == [7, 1, 7, 3]


def test_plans_have_their_own_memory(make, mode, monkeypatch):
    moves = make()
    run, plans = moves.engine._copier._run, []

    def spy(program, leaves, plan, *extents):
        plans.append(plan)
        return run(program, leaves, plan, *extents)

    monkeypatch.setattr(moves.engine._copier, "_run", spy)
    moves.save_now(range(12), range(12))
    moves.load_now(range(12), range(12))
    assert len(plans) == 6 if mode == "fused" else 4 <= len(plans) <= 5
    for n, plan in enumerate(plans):
        assert not any(np.shares_memory(plan, earlier) for earlier in plans[:n])


@pytest.mark.parametrize("is_guarded", [True, False])
def test_rows_that_are_not_wanted_are_dropped(
    make, is_guarded, fresh_programs, monkeypatch
):
    if not is_guarded:  # NOTHING is -1: the last block.
        monkeypatch.setattr(rows, "_past_the_end", lambda targets, num_blocks: targets)
    moves = make()
    moves.save_now(range(4), range(4))  # An extent; one row is wanted.
    moves.load_now([2], [10])
    assert (moves.numbers[11:] == list(range(11, NUM_BLOCKS))) == is_guarded


def test_every_row_of_a_save_reads_a_block_in_range(make, monkeypatch):
    moves = make()
    seen, rng = [], np.random.default_rng(0)
    save = moves.engine._copier.save

    def spy(leaves, plans, carry, spare):
        seen.extend(plans)
        return save(leaves, plans, carry, spare)

    monkeypatch.setattr(moves.engine._copier, "save", spy)
    for _ in range(12):
        ids = rng.permutation(NUM_BLOCKS)[: rng.integers(1, 9)]
        moves.save_now(ids, rng.permutation(32)[: len(ids)])
    assert any(plan.carried.any() for plan in seen)
    for plan in seen:
        [rows_of] = plan.row_sources
        ids, carried = np.split(rows_of, 2)
        assert ids.min() >= NOTHING
        assert ids.max() < NUM_BLOCKS
        assert not (carried & (plan.sources[0] >= 0)).any()
        [lists] = plan.row_lists()
        num_written, num_carried = lists[-2:]
        assert lists.min() >= 0
        assert num_written + num_carried <= plan.sources.shape[1]


@pytest.mark.parametrize("is_guarded", [True, False])
def test_an_error_is_raised_only_by_waiting(make, is_guarded, broken, monkeypatch):
    if not is_guarded:
        monkeypatch.setattr(tickets.Piece, "wait", lambda piece: piece.error)
    moves = make()
    bad = broken(moves.pool)
    moves.engine.save(bad, [1], [1])
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(bad)
    pieces = moves.engine._queue._saving
    watched = [array for piece in pieces for array in piece.watched]
    [done] = wait_for(moves.engine.poll)
    assert watched
    assert all(array.is_ready() for array in watched)
    assert (done.error is not None) == is_guarded


@pytest.mark.parametrize("mode", ["fused"])
def test_running_out_of_memory_later_is_explained(make, mode, monkeypatch):
    moves = make()
    moves.save_now([1], [1])

    def exhausted(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._queue._memory, "_new_extent", exhausted)
        for _ in range(2):  # The first loses memory that the second allocates.
            patch.setattr(moves.engine._copier, "save_program", exhausted)
            moves.save([2], [2])
            [done] = moves.drain()
        assert isinstance(done.error, MemoryError)
        assert f"allocate {EXTENT_BYTES} bytes" in str(done.error)
    moves.save_now([2], [2])
    assert moves.read([1, 2]) == [1, 2]


def test_an_engine_checks_its_memory_and_its_client_before_it_allocates(monkeypatch):
    def refuse(platform):
        raise ValueError(f"one stream on {platform}")

    monkeypatch.setattr(jaxkv.transfer.engine, "HostMemory", None)
    sizes = {"extent_bytes": "1GiB", "staging_bytes": "1TiB"}
    with pytest.raises(MemoryError, match="pinned"):
        TransferEngine(numbered_pool(), host_bytes="1000TiB", **sizes)
    monkeypatch.setattr(memory, "check_client", refuse)
    with pytest.raises(ValueError, match=f"one stream on {DEVICE.platform}"):
        TransferEngine(numbered_pool(), 1)


def calls_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), [keyword.arg for keyword in node.keywords]


def test_the_source_has_no_call_that_fails_on_other_backends():
    host_kinds = set()
    for path in SOURCE.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "compute_on" not in source, path
        assert "TransferToMemoryKind" not in source, path
        quoted = re.findall(r"""["'](\w*pinned_host)["']""", source)
        host_kinds |= {(path.stem, kind) for kind in quoted}
        for name, keywords in calls_in(source):
            if re.search(r"\b(zeros|ones|full|empty|arange)(_like)?$", name):
                assert "device" not in keywords, f"{path}: {name} is not pinned"
            if name.endswith("device_put"):
                assert "donate" not in keywords, f"{path}: not across memories"
    assert host_kinds == {("memory", "pinned_host")}


def test_staged_programs_stay_on_the_device():
    engine = TransferEngine(numbered_pool(), 32, mode="staged")
    for program in programs_of(engine):
        used = kinds((program.input_shardings, program.output_shardings))
        assert set(used) == {"device"}


MESHES = {
    "one device": None,
    "mesh of one": (1, "x", {}),
    "two shards": (2, "x", {}),
    "two copies": (2, None, {"axis_type": jax.sharding.AxisType.Explicit}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_transfers_under_a_guard_against_implicit_transfers(make, mesh):
    pool = numbered_pool()
    if MESHES[mesh]:
        num_devices, spec, options = MESHES[mesh]
        pool = spread(pool, num_devices, spec, **options)
    with jax.transfer_guard("disallow"):
        moves = make(pool)
        moves.engine.warm_up()
        for _ in range(3):
            moves.save_now(range(24), range(24))
            moves.load(range(12), range(11, -1, -1))
            moves.pool = moves.engine.advance(moves.pool)
            [loaded] = moves.drain()
    assert loaded.error is None
    assert moves.pool["k"].sharding.is_equivalent_to(pool["k"].sharding, 2)
    assert moves.numbers == [*range(11, -1, -1), *range(12, 24)]
