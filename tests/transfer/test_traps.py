"""Traps of moving bytes with JAX, and the test for each.

Where a guard can be removed, a test shows that the trap still exists: if such a test
fails, JAX has fixed it, and the guard may go.

- A scatter of a small float converts the whole pool, and moving one changes
  signalling NaNs: test_cost `no_program_converts`, `without_the_compiler_options`;
  test_bits `every_bit_pattern`; here `without_the_compiler_options`.
- A device buffer donated to a host result aborts the process:
  `no_program_donates_across`, `donating_across` (in a separate process).
- The next step donates the pool that a save reads: `a_save_donates_nothing`;
  test_engine `a_device_block_may_be_overwritten`.
- Fresh host memory is slow: test_cost `a_fused_save_recycles`.
- A NumPy view of donated memory undoes the donation: `a_numpy_view_of_an_extent`.
- NumPy memory is read late, and in place: test_engine `the_caller_may_change`; here
  `ids_may_change`, `plans_have_their_own_memory`.
- A target of -1 is the last block: `rows_that_are_not_wanted`.
- A gather clamps ids out of range: test_engine `refused_ids`; here
  `every_row_of_a_save`.
- A failed array says that it is ready: `an_error_is_raised_only`.
- A donated array cannot be queried: `watched_arrays`.
- A program for every number of blocks: test_cost `each_kind_of_program`.
- Host memory runs out: test_memory `construction_without_enough`; here
  `running_out_of_memory`, `too_much_host_memory`.
- The runtimes set limits: test_limits.
- unpinned_host changes bfloat16, and is ignored inside jit: test_memory
  `unpinned_host_is_refused`; here `the_source_names_one_host_memory`.
- The TFRT client runs on one stream: test_probe `the_client_with_one_stream`; here
  `an_engine_checks`.
- compute_on changes its interface, `jnp.zeros(device=...)` fails for host memory:
  `the_source_has_no_call`.
- Not every backend computes in host memory: `staged_programs_stay`.
- A pool is committed to a mesh: test_cost `a_load_keeps_the_sharding`; here
  `transfers_under_a_guard`.
- Another thread dispatches in another order: test_queue `another_thread_is_refused`.
- The caller forbids implicit transfers: `transfers_under_a_guard`.
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
from jaxkv.transfer import TransferEngine, kernels, memory, probe, rows, tickets
from jaxkv.transfer.plans import NOTHING
from tests.transfer.numbered import (
    CPU,
    EXTENT_BYTES,
    NUM_BLOCKS,
    check_at_rest,
    load_numbers,
    make_engine,
    modes,
    numbered_pool,
    numbers_in,
    save_and_wait,
)

SOURCE = Path(jaxkv.transfer.__file__).parent


def programs_of(engine):
    copier = engine._copier
    return [copier.save_program(kind) for kind in kernels.SAVE_KINDS[engine.mode]] + [
        copier.load_program(group) for group in range(copier.num_layer_groups)
    ]


def kinds(shardings):
    """The memories of a program's arrays; the device's own is "device"."""
    return [each.memory_kind or "device" for each in jax.tree.leaves(shardings)]


@modes
def test_without_the_compiler_options_bits_change(mode, monkeypatch):
    # Of bfloat16 jax 0.10 changes 252 patterns, 0.12 none.
    raw = np.arange(1 << 8, dtype=np.uint8).reshape(32, -1)

    def came_back():
        pool = jax.device_put(jnp.array(raw.view(jnp.float8_e5m2)), CPU)
        engine = TransferEngine(pool, 32, mode=mode)
        pool = save_and_wait(engine, pool, range(32), range(32))
        loaded, _ = engine.load(
            jax.tree.map(jnp.zeros_like, pool), range(32), range(32)
        )
        loaded, _ = engine.drain(loaded)
        return np.array(loaded).view(np.uint8)

    assert np.array_equal(came_back(), raw)
    monkeypatch.setattr(memory, "compiler_options", lambda platform: None)
    kernels.shared_copier.cache_clear()
    assert not np.array_equal(came_back(), raw)


@modes
def test_no_program_donates_across_memories(mode):
    engine, _ = make_engine(mode, layer_groups=2)
    for program in programs_of(engine):
        donated = [info.donated for info in jax.tree.leaves(program.args_info)]
        inputs = kinds(program.input_shardings)
        assert len(donated) == len(inputs)
        given = [kind for kind, yes in zip(inputs, donated, strict=True) if yes]
        outputs = kinds(program.output_shardings)
        for kind in given:  # Each is matched with a result in its own memory.
            outputs.remove(kind)


@modes
def test_a_save_donates_nothing_of_the_pool(mode):
    engine, pool = make_engine(mode)
    for program in programs_of(engine)[:-1]:
        (leaves, *_), _ = program.args_info
        assert not any(info.donated for info in jax.tree.leaves(leaves))
    save_and_wait(engine, pool, range(8), range(8))
    assert numbers_in(pool) == list(range(NUM_BLOCKS))


DONATES_ACROSS = """
import jax, jax.numpy as jnp
host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
double = jax.jit(lambda array: array * 2, donate_argnums=0, out_shardings=host)
double(jnp.ones((64, 64))).block_until_ready()
"""


def test_donating_across_memories_ends_the_process():
    child = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from jaxkv.transfer import probe\n"
            f"probe._write_no_core_file(){DONATES_ACROSS}",
        ],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == -signal.SIGABRT


@modes
def test_a_numpy_view_of_an_extent_does_not_change(mode):
    # Donation then falls back to a copy, which is slower and correct.
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [7], [1])
    pool, _ = engine.load(pool, [1], [0])
    pool, _ = engine.drain(pool)  # From here on XLA owns the memory.
    view = np.asarray(pool["k"])
    pool, _ = engine.load(pool, [1], [2])
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[:3] == [7, 1, 7]
    assert view[:3, 0].tolist() == [7, 1, 2]
    extents = engine._queue._memory._extents
    views = [np.asarray(array) for extent in extents if extent for array in extent]
    before = [view.copy() for view in views]
    for _ in range(len(extents) + 1):
        pool = save_and_wait(engine, pool, range(24), range(24))
    assert all(map(np.array_equal, views, before))
    assert load_numbers(engine, pool, range(4))[0] == [7, 1, 7, 3]


@modes
def test_ids_may_change_while_a_transfer_waits(mode, gate):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(8), range(8))
    gate.shut = True
    sources, places = np.arange(8, 20, dtype=np.int32), np.arange(8, 20, dtype=np.int32)
    host_ids, targets = np.arange(8, dtype=np.int32), np.arange(12, 20, dtype=np.int32)
    engine.save(pool, sources, places)
    pool, _ = engine.load(pool, host_ids, targets)
    assert engine.num_waiting == 2
    for ids in (sources, places, host_ids, targets):
        ids[:] = 0
    gate.shut = False
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[12:20] == list(range(8))
    assert load_numbers(engine, pool, range(8, 20))[0] == list(range(8, 20))


@modes
def test_plans_have_their_own_memory(mode, monkeypatch):
    engine, pool = make_engine(mode)
    run, plans = engine._copier._run, []

    def spy(program, leaves, plan, *extents):
        plans.append(plan)
        return run(program, leaves, plan, *extents)

    monkeypatch.setattr(engine._copier, "_run", spy)
    pool = save_and_wait(engine, pool, range(12), range(12))
    pool, _ = engine.load(pool, range(12), range(12))
    engine.drain(pool)
    assert len(plans) == 6 if mode == "fused" else 4 <= len(plans) <= 5
    for n, plan in enumerate(plans):
        assert not any(np.shares_memory(plan, other) for other in plans[:n])


@modes
@pytest.mark.parametrize("guarded", [True, False])
def test_rows_that_are_not_wanted_are_dropped(mode, guarded, monkeypatch):
    if not guarded:  # NOTHING is -1: the last block.
        monkeypatch.setattr(rows, "_past_the_end", lambda targets, num_blocks: targets)
    engine, pool = make_engine(mode)
    pool = save_and_wait(
        engine, pool, range(4), range(4)
    )  # An extent; one row is wanted.
    pool, _ = engine.load(pool, [2], [10])
    pool, _ = engine.drain(pool)
    unchanged = numbers_in(pool)[11:] == list(range(11, NUM_BLOCKS))
    assert unchanged == guarded


@modes
@pytest.mark.parametrize("seed", [0])
def test_every_row_of_a_save_reads_a_block_in_range(mode, seed, monkeypatch):
    engine, pool = make_engine(mode)
    seen, rng = [], np.random.default_rng(seed)
    save = engine._copier.save

    def spy(leaves, plans, carry, spare):
        seen.extend(plans)
        return save(leaves, plans, carry, spare)

    monkeypatch.setattr(engine._copier, "save", spy)
    for _ in range(12):
        ids = rng.permutation(NUM_BLOCKS)[: rng.integers(1, 9)]
        pool = save_and_wait(engine, pool, ids, rng.permutation(32)[: len(ids)])
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


@modes
@pytest.mark.parametrize("guarded", [True, False])
def test_an_error_is_raised_only_by_waiting(mode, guarded, broken, monkeypatch):
    if not guarded:
        monkeypatch.setattr(tickets.Piece, "wait", lambda piece: piece.error)
    engine, pool = make_engine(mode)
    bad = broken(pool)
    engine.save(bad, [1], [1])
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(bad)
    watched = [array for piece in engine._queue._saving for array in piece.watched]
    done = []
    while not done:
        done = engine.poll()
    assert watched
    assert all(array.is_ready() for array in watched)
    assert (done[0].error is not None) == guarded


@modes
def test_watched_arrays_are_never_donated(mode, gate):
    engine, pool = make_engine(mode, layer_groups=2)
    pool = save_and_wait(engine, pool, range(24), range(24))
    gate.shut = True
    first = pool
    for _ in range(3):
        pool, _ = engine.load(pool, range(12), range(12))
        engine.save(pool, range(12, 24), range(12, 24))
    queue = engine._queue
    pieces = [*queue._saving, *queue._landing, *queue._loading]
    gate.shut = False
    pool, _ = engine.drain(pool)
    assert len(pieces) > 3
    for piece in pieces:
        assert piece.is_ready()
    assert first["k"].is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        first["k"].is_ready()


def test_running_out_of_memory_later_is_explained(monkeypatch):
    engine, pool = make_engine("fused")
    pool = save_and_wait(engine, pool, [1], [1])

    def exhausted(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._queue._memory, "_new_extent", exhausted)
        for _ in range(2):  # The first loses memory that the second wants back.
            patch.setattr(engine._copier, "save_program", exhausted)
            engine.save(pool, [2], [2])
            pool, [done] = engine.drain(pool)
        assert isinstance(done.error, MemoryError)
        assert f"allocate {EXTENT_BYTES} bytes" in str(done.error)
    check_at_rest(engine)
    pool = save_and_wait(engine, pool, [2], [2])
    assert load_numbers(engine, pool, [1, 2])[0] == [1, 2]


def test_too_much_host_memory_is_refused_before_allocation(monkeypatch):
    monkeypatch.setattr(jaxkv.transfer.engine, "HostMemory", None)
    with pytest.raises(MemoryError, match="pinned"):
        TransferEngine(
            numbered_pool(),
            host_bytes="1000TiB",
            extent_bytes="1GiB",
            staging_bytes="1TiB",
        )


def test_an_engine_checks_its_client(monkeypatch):
    def refuse(platform):
        raise ValueError(f"one stream on {platform}")

    monkeypatch.setattr(probe, "check_client", refuse)
    with pytest.raises(ValueError, match="one stream on cpu"):
        TransferEngine(numbered_pool(), 1)


def calls_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), [keyword.arg for keyword in node.keywords]


@pytest.mark.parametrize(
    "path", sorted(SOURCE.glob("*.py")), ids=lambda path: path.stem
)
def test_the_source_has_no_call_that_fails_on_other_backends(path):
    source = path.read_text(encoding="utf-8")
    assert "compute_on" not in source
    assert "TransferToMemoryKind" not in source
    for name, keywords in calls_in(source):
        if re.search(r"\b(zeros|ones|full|empty|arange)(_like)?$", name):
            assert "device" not in keywords, f"{name} cannot make pinned memory"
        if name.endswith("device_put"):
            assert "donate" not in keywords, "not implemented across memories"


def test_the_source_names_one_host_memory():
    named = re.compile(r"""["'](\w*pinned_host)["']""")
    found = {
        (path.stem, kind)
        for path in SOURCE.glob("*.py")
        for kind in named.findall(path.read_text(encoding="utf-8"))
    }
    assert found == {("memory", "pinned_host")}


def test_staged_programs_stay_on_the_device():
    engine, _ = make_engine("staged", layer_groups=2)
    for program in programs_of(engine):
        used = kinds((program.input_shardings, program.output_shardings))
        assert set(used) == {"device"}


MESHES = {
    "one device": None,
    "mesh of one": (1, jax.sharding.AxisType.Auto, "x"),
    "two shards": (2, jax.sharding.AxisType.Auto, "x"),
    "two copies": (2, jax.sharding.AxisType.Explicit, None),
}


@modes
@pytest.mark.parametrize("mesh", MESHES)
def test_transfers_under_a_guard_against_implicit_transfers(mode, mesh):
    pool = numbered_pool()
    if MESHES[mesh]:
        num, axis_type, spec = MESHES[mesh]
        mesh = jax.make_mesh((num,), ("x",), (axis_type,), devices=jax.devices()[:num])
        spec = jax.sharding.PartitionSpec(spec)
        pool = jax.device_put(pool, jax.sharding.NamedSharding(mesh, spec))
    sharding = pool["k"].sharding
    with jax.transfer_guard("disallow"):
        engine = TransferEngine(pool, 32, mode=mode)
        engine.warm_up()
        for _ in range(3):
            engine.save(pool, range(24), range(24))
            pool, [saved] = engine.drain(pool)
            pool, _ = engine.load(pool, range(12), range(11, -1, -1))
            pool = engine.advance(pool)
            pool, [loaded] = engine.drain(pool)
    assert (saved.error, loaded.error) == (None, None)
    assert pool["k"].sharding.is_equivalent_to(sharding, 2)
    assert numbers_in(pool) == [*range(11, -1, -1), *range(12, 24)]
    check_at_rest(engine)
