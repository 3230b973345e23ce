"""A transfer that fails is reported, and damages nothing but its own blocks."""

import jax
import numpy as np
import pytest

from jaxkv.transfer import TransferEngine
from tests.transfer.conftest import callback, fault
from tests.transfer.numbered import (
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


@modes
def test_a_failed_save_is_reported_and_leaves_its_blocks_unreadable(mode, broken):
    engine, pool = make_engine(mode)
    save_and_wait(engine, pool, [7, 8], [1, 2])
    bad = broken(pool)
    ticket = engine.save(bad, [0, 1, 3], [2, 3, 4])
    _, [done] = engine.drain(bad)
    assert done.ticket == ticket
    assert isinstance(done.error, jax.errors.JaxRuntimeError)
    assert "a fault of the device" in str(done.error)
    # A failed array says that it is ready, which must not count as success.
    with pytest.raises(jax.errors.JaxRuntimeError):
        bad["k"].block_until_ready()
    assert bad["k"].is_ready()
    with pytest.raises(ValueError, match=r"host blocks \[2, 3, 4\] have no bytes"):
        engine.load(pool, [2, 3, 4], [0, 1, 2])
    check_at_rest(engine)
    pool = save_and_wait(engine, pool, [9, 10, 11], [2, 3, 4])
    assert load_numbers(engine, pool, [1, 2, 3, 4])[0] == [7, 9, 10, 11]


@modes
def test_a_late_failure_keeps_the_bytes_of_a_later_save(mode, monkeypatch):
    engine, pool = make_engine(mode)
    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "save_program", dispatch_failure)
        engine.save(pool, [0], [5])  # Fails, but is not reported yet.
    engine.save(pool, [6], [5])
    pool, done = engine.drain(pool)
    assert [each.error is None for each in done] == [False, True]
    assert load_numbers(engine, pool, [5])[0] == [6]


def dispatch_failure(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")


@modes
def test_a_save_that_fails_at_dispatch_is_reported_not_raised(mode, monkeypatch):
    engine, pool = make_engine(mode)
    ids = list(range(21))  # Six pieces; the second fails.
    real, calls = engine._copier.save_program, []

    def second_fails(*program):
        calls.append(program)
        return dispatch_failure() if len(calls) == 2 else real(*program)

    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "save_program", second_fails)
        engine.save(pool, ids, ids)
    assert len(calls) > 1
    pool, [done] = engine.drain(pool)
    assert "no staging memory" in str(done.error)
    assert done.error.__traceback__ is None  # Its frames would keep the pool alive.
    for host_id in (0, 16, 20):
        with pytest.raises(ValueError, match="no bytes to load"):
            engine.load(pool, [host_id], [0])
    check_at_rest(engine)
    pool = save_and_wait(engine, pool, ids, ids)
    assert load_numbers(engine, pool, ids)[0] == ids


@modes
def test_a_load_that_fails_at_dispatch_returns_the_pool_as_it_was(mode, monkeypatch):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [7], [1])
    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "load_program", dispatch_failure)
        pool, ticket = engine.load(pool, [1], [0])
        pool, [done] = engine.drain(pool)
    assert (done.ticket, done.direction) == (ticket, "load")
    assert "no staging memory" in str(done.error)
    check_at_rest(engine)
    assert numbers_in(pool) == list(range(NUM_BLOCKS))
    assert load_numbers(engine, pool, [1])[0] == [7]


@modes
def test_a_load_that_fails_in_flight_keeps_the_host_blocks(mode, broken):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [7], [1])
    pool, ticket = engine.load(broken(pool), [1], [0])
    pool, [done] = engine.drain(pool)
    check_at_rest(engine)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault of the device"):
        pool["k"].block_until_ready()
    assert done.ticket == ticket
    assert "a fault of the device" in str(done.error)
    assert load_numbers(engine, numbered_pool(100), [1])[0] == [7]


@modes
def test_pieces_that_were_dispatched_with_a_failed_pool_fail_the_save(
    mode, broken, gate
):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    gate.shut = True
    ticket = engine.save(pool, range(12), range(12))
    assert engine.is_waiting(ticket)  # Two pieces of three.
    gate.shut = False
    _, [done] = engine.drain(broken(pool))
    assert done.ticket == ticket
    assert "a fault of the device" in str(done.error)
    check_at_rest(engine)
    for host_id in range(12):
        with pytest.raises(ValueError, match="have no bytes"):
            engine.load(pool, [host_id], [0])
    pool = save_and_wait(engine, pool, range(12), range(12))
    assert load_numbers(engine, pool, range(12))[0] == list(range(12))


def fail_at_dispatch(engine, pool, broken, monkeypatch):
    monkeypatch.setattr(engine._copier, "save_program", dispatch_failure)
    return pool


def fail_on_its_way(engine, pool, broken, monkeypatch):
    return broken(pool)


def fail_for_want_of_memory(engine, pool, broken, monkeypatch):
    def take(index):
        engine._queue._memory._extents[index] = None
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(engine._queue._memory, "take", take)
    return pool


@modes
@pytest.mark.parametrize(
    "fail", [fail_at_dispatch, fail_on_its_way, fail_for_want_of_memory]
)
def test_a_failed_save_keeps_the_other_blocks_of_its_extents(
    mode, fail, broken, monkeypatch
):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, range(24), range(24))
    pool = save_and_wait(engine, pool, range(8), range(24, 32))
    expected = [*range(24), *range(8)]
    # The host is full, so each save carries over the rest of an extent.
    with monkeypatch.context() as patch:
        bad = fail(engine, pool, broken, patch)
        engine.save(bad, [20, 21, 22], [1, 6, 30])
        carried = [piece.placement.carry for piece in engine._queue._saving]
        assert min(carried) >= 0
        _, [done] = engine.drain(bad)
    assert done.error is not None
    check_at_rest(engine)
    lost = (1, 6, 30)
    for host_id in lost:
        with pytest.raises(ValueError, match="have no bytes"):
            engine.load(pool, [host_id], [0])
    others = [host_id for host_id in range(32) if host_id not in lost]
    for ids in (others[:16], others[16:]):
        found, pool = load_numbers(engine, pool, ids)
        assert found == [expected[host_id] for host_id in ids]
    pool = save_and_wait(engine, numbered_pool(), [20, 21, 22], lost)
    assert load_numbers(engine, pool, [0, 1, 5, 6, 31, 30])[0] == [0, 20, 5, 21, 7, 22]
    check_at_rest(engine)


def stage_refuses(real, engine):
    def stage(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")

    return stage


def stage_fails_later(real, engine):
    def stage(*args):
        arrays = real(*args)
        zero = jax.jit(lambda: callback(fault))()
        return tuple(array + zero.astype(array.dtype) for array in arrays)

    return stage


@pytest.mark.parametrize("stage", [stage_refuses, stage_fails_later])
@pytest.mark.parametrize("layer_groups", [1, 2])
def test_a_staged_load_that_fails_leaves_the_pool_unchanged(
    stage, layer_groups, broken, monkeypatch
):
    del broken  # Only for its teardown.
    engine, pool = make_engine(
        "staged", staging_bytes=EXTENT_BYTES, layer_groups=layer_groups
    )
    pool = save_and_wait(engine, pool, range(12), range(12))
    real, calls = engine._copier.stage, []

    def second_fails(*args):
        calls.append(args)
        failing = stage(real, engine) if len(calls) == 2 else real
        return failing(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "stage", second_fails)
        pool, ticket = engine.load(pool, range(12), range(12, 24))
        pool, [done] = engine.drain(pool)
    assert done.ticket == ticket
    assert isinstance(done.error, jax.errors.JaxRuntimeError)
    assert done.error.__traceback__ is None
    assert len(calls) < 3 * layer_groups  # The rest was dropped.
    check_at_rest(engine)
    k = np.array(pool["k"])[:, 0].astype(int).tolist()
    assert k[:12] == list(range(12))  # Blocks that were not loaded.
    pool, _ = engine.load(pool, range(12), range(12, 24))
    pool, [done] = engine.drain(pool)
    assert done.error is None
    assert numbers_in(pool) == [*range(12), *range(12)]


def test_landed_pieces_of_a_failed_load_are_not_written(monkeypatch):
    engine, pool = make_engine("staged")
    pool = save_and_wait(engine, pool, range(12), range(12))
    real, calls = engine._copier.stage, []

    def first_fails(extents, group):  # Three together, then each by itself.
        calls.append(len(extents))
        return dispatch_failure() if len(calls) <= 2 else real(extents, group)

    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "stage", first_fails)
        pool, _ = engine.load(pool, range(12), range(12, 24))
        pool, [done] = engine.drain(pool)
    assert calls == [3, 1, 1, 1]
    assert "no staging memory" in str(done.error)
    assert numbers_in(pool) == list(range(NUM_BLOCKS))
    check_at_rest(engine)


@modes
def test_a_failed_load_does_not_stop_the_others(mode, monkeypatch, gate):
    engine, pool = make_engine(mode, staging_bytes=EXTENT_BYTES)
    pool = save_and_wait(engine, pool, range(8), range(8))
    real, calls = engine._copier.load_program, []

    def first_fails(*program):
        calls.append(program)
        return dispatch_failure() if len(calls) == 1 else real(*program)

    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "load_program", first_fails)
        gate.shut = True
        pool, failed = engine.load(pool, range(8), range(8, 16))
        pool, loaded = engine.load(pool, [5], [20])
        saved = engine.save(pool, [20], [20])  # Waits for the load before it.
        gate.shut = False
        pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == [failed, loaded, saved]
    assert [each.error is None for each in done] == [False, True, True]
    check_at_rest(engine)
    assert load_numbers(engine, pool, [5, 20])[0] == [5, 5]


@modes
def test_a_shard_without_room_fails_one_save_only(mode):
    # Two shards: blocks 0 to 11 on one device, the others on a second.
    devices = jax.devices("cpu")[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    pool = jax.device_put(numbered_pool(), sharding)
    engine = TransferEngine(pool, 8, mode=mode)
    first = engine.save(pool, range(8), range(8))  # Twice what a shard holds.
    second = engine.save(pool, [12, 13], [2, 3])
    third = engine.save(pool, [14], [4])
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == [first, second, third]
    assert "the extents of the shards [0] are full" in str(done[0].error)
    assert [each.error for each in done[1:]] == [None, None]
    check_at_rest(engine)
    pool, _ = engine.load(pool, [4, 2, 3], [20, 21, 22])
    pool, [done] = engine.drain(pool)
    assert done.error is None
    assert numbers_in(pool)[20:23] == [14, 12, 13]


@modes
@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
def test_an_interrupted_call_is_not_reported_as_done(mode, error, monkeypatch):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [3], [0])

    def stop(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine._copier, "_run", stop)
        patch.setattr(engine._copier, "stage", stop)
        with pytest.raises(error):
            engine.save(pool, [5], [1])
        with pytest.raises(error):
            engine.load(pool, [0], [9])
    pool, done = engine.drain(pool)
    assert [error.__name__ in str(each.error) for each in done] == [True, True]
    with pytest.raises(ValueError, match=r"\[1\] have no bytes"):
        engine.load(pool, [1], [0])
    check_at_rest(engine)
    assert load_numbers(engine, pool, [0])[0] == [3]


@modes
def test_nans_are_moved_under_jax_debug_nans(mode):
    pool = {"k": jax.numpy.full((8, 4), np.nan)}
    engine = TransferEngine(pool, 4, mode=mode)
    with jax.debug_nans(True):
        engine.save(pool, [1], [2])
        pool, done = engine.drain(pool)
        assert [each.error for each in done] == [None]
        pool, _ = engine.load(pool, [2], [3])
        pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None]
    assert np.isnan(np.array(pool["k"])).all()
