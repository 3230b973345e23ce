"""The strict transfer engine: late reports, garbage until then, and checksums."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadConfig, TransferEngine, _util
from jaxkv.strict import StrictError, StrictTransferEngine
from jaxkv.strict.blocks import UNWRITTEN
from jaxkv.strict.engine import MAX_STEPS

NUM_BLOCKS = 6


def make_pool():
    rows = jnp.arange(NUM_BLOCKS * 4, dtype=jnp.int32).reshape(NUM_BLOCKS, 4) // 4
    return {
        "wide": rows.astype(jnp.float32),
        "bf": rows.astype(jnp.bfloat16),
        "int": rows,
    }


@pytest.fixture
def engine():
    return StrictTransferEngine(make_pool(), 4, strict_seed=5)


@pytest.mark.parametrize("name", ["JAXKV_STRICT_SEED", "JAXKV_STRICT_FAIL_LOADS"])
def test_a_variable_that_is_no_number_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "x")
    with pytest.raises(ValueError, match=f"{name}='x' must be a whole number of at"):
        StrictTransferEngine(make_pool(), 4)


def save(engine, pool):
    """Save blocks 1 and 2 as host blocks 0 and 3; wait for it."""
    ticket = engine.save(pool, [1, 2], [0, 3])
    pool, [done] = engine.drain(pool)
    assert done.ticket == ticket
    assert done.error is None
    return pool


def until_reported(engine, pool):
    """Poll until something is reported; return the pools of the steps before."""
    pools = [pool]
    while not (done := engine.poll()):
        pools.append(engine.advance(pools[-1]))
    return pools, done


def test_blocks_of_a_load_are_garbage_until_its_step(engine):
    pool = save(engine, make_pool())
    pool, ticket = engine.load(pool, [3, 0], [4, 5])
    assert engine.is_waiting(ticket)
    pools, [done] = until_reported(engine, pool)
    for early in pools[:-2]:
        assert np.isnan(early["wide"][4:]).all()
        assert np.isnan(early["bf"][4:]).all()
        assert (np.asarray(early["int"][4:]).view(np.uint8) == 0xA5).all()
    assert (done.ticket, done.num_blocks, done.error) == (ticket, 2, None)
    for leaf, old in zip(
        jax.tree.leaves(pools[-1]), jax.tree.leaves(make_pool()), strict=True
    ):
        np.testing.assert_array_equal(leaf[jnp.array([5, 4])], old[1:3])
    assert engine.num_in_flight == 0


def check_unwritten(engine, pool, *blocks):
    """Check that blocks hold finite garbage, by which they are known as unwritten."""
    assert engine._blocks.sums(pool, blocks) == dict.fromkeys(blocks, UNWRITTEN)
    assert jnp.isfinite(pool["wide"]).all()
    assert jnp.isfinite(pool["bf"]).all()


def num_steps(seed):
    engine = StrictTransferEngine(make_pool(), 4, strict_seed=seed)
    pool, steps = save(engine, make_pool()), []
    for _ in range(10):
        pool, _ = engine.load(pool, [0], [3])
        pools, _ = until_reported(engine, pool)
        pool = pools[-1]
        steps.append(len(pools) - 1)
    return steps


def test_every_so_many_th_load_fails_and_leaves_its_blocks_unwritten():
    engine = StrictTransferEngine(make_pool(), 4, strict_fail_loads=2)
    pool = save(engine, make_pool())
    outcomes = []
    for _ in range(4):
        pool, ticket = engine.load(pool, [3, 0], [4, 5])
        [*_, pool], [done] = until_reported(engine, pool)
        assert done.ticket == ticket
        assert done.host_block_ids == (3, 0)
        outcomes.append(done.error is None)
        if done.error is not None:
            check_unwritten(engine, pool, 4, 5)
            continue
        for leaf in jax.tree.leaves(pool):
            assert leaf[4:, 0].astype(int).tolist() == [2, 1]
    assert outcomes == [True, False, True, False]
    assert engine.num_in_flight == 0
    # Of those that go together as well.
    pool, tickets = engine.load_each(pool, [3, 0], [4, 5], [1, 1])
    pool, dones = engine.drain(pool)
    assert [done.ticket for done in dones] == tickets
    assert [str(done.error) for done in dones] == [
        "None",
        "strict_fail_loads=2",
    ]


def test_the_seed_chooses_how_late_reports_are():
    first = num_steps(1)
    assert first == num_steps(1) != num_steps(2)
    assert min(first) >= 1
    assert len(set(first)) == MAX_STEPS


def test_saves_are_reported_to_an_engine_that_only_polls(engine):
    ticket = engine.save(make_pool(), [1], [0])
    while not (done := engine.poll()):
        pass
    assert [completion.ticket for completion in done] == [ticket]


def test_the_pool_that_was_passed_is_not_donated(engine):
    pool = save(engine, make_pool())
    new, _ = engine.load(pool, [0], [4])
    engine.drain(new)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((pool, new)))


def test_a_pool_from_before_a_load_is_refused_and_nothing_changes(engine):
    old = save(engine, make_pool())
    pool, ticket = engine.load(old, [0], [4])
    with pytest.raises(StrictError, match="the pool is outdated"):
        engine.advance(old)
    pool, [done] = engine.drain(pool)
    assert (done.ticket, done.error) == (ticket, None)
    assert pool["int"][4, 0] == 1


def test_a_load_of_other_bytes_than_were_saved_is_refused(engine):
    pool = save(engine, make_pool())
    # Not through the strict engine, as if a fault of its own had changed the host's.
    TransferEngine.save(engine, {**pool, "int": pool["int"] + 1}, [1], [0])
    TransferEngine.drain(engine, pool)
    pool, _ = engine.load(pool, [0], [4])
    with pytest.raises(StrictError, match="something wrote to the block"):
        engine.drain(pool)


def test_compressed_blocks_are_not_compared():
    pool = {"kv": jnp.linspace(0.0, 1.0, 6 * 4 * 3 * 5).reshape(6, 4, 3, 5)}
    config = OffloadConfig(num_host_blocks=4, compression="int8", strict=True)
    engine = config.make_engine(pool)
    engine.save(pool, [1], [0])
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, [0], [2])
    pool, [done] = engine.drain(pool)
    assert done.error is None
    assert (pool["kv"][1] != pool["kv"][2]).any()


def test_a_load_that_is_abandoned_before_its_step_is_never_written(engine):
    pool = save(engine, make_pool())
    pool, ticket = engine.load(pool, [0], [4])
    engine.abandon(ticket)
    for _ in range(MAX_STEPS + 1):
        pool = engine.advance(pool)
        assert engine.poll() == []
        check_unwritten(engine, pool, 4)
    assert engine.num_in_flight == 0


def test_a_block_of_an_abandoned_load_may_be_written_at_once(engine):
    pool = save(engine, make_pool())
    pool, ticket = engine.load(pool, [0, 3], [4, 5])
    engine.abandon(ticket)
    pool = pool | {"wide": pool["wide"].at[5].set(7.0)}
    pool, _ = engine.load(pool, [3], [4])
    pool, [done] = engine.drain(pool)
    assert done.error is None
    assert pool["wide"][4:, 0].tolist() == [2, 7]
    assert (np.asarray(pool["int"][5]).view(np.uint8) == 0xA5).all()


def test_a_load_whose_copy_fails_leaves_its_block_unwritten(engine, monkeypatch):
    pool = save(engine, make_pool())
    pool, ticket = engine.load(pool, [0], [4])
    monkeypatch.setattr(engine._copier, "stage", _fail)
    pools, [done] = until_reported(engine, pool)
    assert (done.ticket, str(done.error)) == (ticket, "no copy")
    assert np.isnan(pools[-2]["wide"][4]).all()
    check_unwritten(engine, pools[-1], 4)
    assert engine.num_in_flight == 0


def _fail(*args):
    raise jax.errors.JaxRuntimeError("no copy")


@pytest.mark.parametrize("flag", ["1", "true", "On"])
def test_the_environment_makes_all_engines_strict(monkeypatch, flag):
    monkeypatch.setenv("JAXKV_STRICT", flag)
    engine = TransferEngine(make_pool(), 4, mode="fused")
    assert type(engine) is StrictTransferEngine
    assert engine.mode == "staged"
    monkeypatch.setenv("JAXKV_STRICT", "0")
    assert type(TransferEngine(make_pool(), 4)) is TransferEngine


def test_a_process_imports_strict_parts_where_its_environment_asks_for_them():
    program = "import sys, jaxkv; print('jaxkv.strict' in sys.modules)"
    for flag, imported in (("1", "True"), ("0", "False")):
        environ = os.environ | {"JAXKV_STRICT": flag}
        command = [sys.executable, "-c", program]
        out = subprocess.run(command, env=environ, check=True, capture_output=True)
        assert out.stdout.decode().strip() == imported


def test_a_variable_set_too_late_is_refused_and_not_ignored(monkeypatch):
    monkeypatch.setenv("JAXKV_STRICT", "1")
    monkeypatch.setattr(_util, "substitutes", {})
    with pytest.raises(RuntimeError, match=r"set it before, or import jaxkv\.strict"):
        TransferEngine(make_pool(), 4)


def test_a_configuration_makes_all_its_parts_strict():
    config = OffloadConfig(
        num_host_blocks=4, strict=True, strict_seed=3, strict_fail_loads=7
    )
    connected = config.connect(make_pool(), 4)
    assert [type(part).__name__ for part in connected] == [
        "StrictTransferEngine",
        "StrictOffloadScheduler",
        "StrictOffloadWorker",
    ]
    assert connected.engine._fail_loads == 7
