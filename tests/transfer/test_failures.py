"""A transfer that fails is reported, and spares everything but itself."""

import jax
import numpy as np
import pytest

from tests.transfer.numbered import (
    NUM_BLOCKS,
    check_at_rest,
    load_numbers,
    make_engine,
    modes,
    numbered_pool,
    numbers_in,
    store,
)


@modes
def test_a_failed_save_is_reported_and_leaves_its_blocks_unreadable(mode, broken):
    engine, pool = make_engine(mode)
    store(engine, pool, [7, 8], [1, 2])
    bad = broken(pool)
    ticket = engine.save(bad, [0, 1, 3], [2, 3, 4])
    _, [done] = engine.drain(bad)
    assert done.ticket == ticket
    assert isinstance(done.error, jax.errors.JaxRuntimeError)
    assert "a fault of the device" in str(done.error)
    # The guard against taking it for a success: asked whether it is ready, a failed
    # array says yes.
    with pytest.raises(jax.errors.JaxRuntimeError):
        bad["k"].block_until_ready()
    assert bad["k"].is_ready()
    with pytest.raises(ValueError, match=r"host blocks \[2, 3, 4\] have no bytes"):
        engine.load(pool, [2, 3, 4], [0, 1, 2])
    check_at_rest(engine)
    pool = store(engine, pool, [9, 10, 11], [2, 3, 4])
    assert load_numbers(engine, pool, [1, 2, 3, 4])[0] == [7, 9, 10, 11]


@modes
def test_a_late_failure_spares_what_a_later_save_wrote(mode, monkeypatch):
    engine, pool = make_engine(mode)
    with monkeypatch.context() as patch:
        patch.setattr(engine._mover, "save_program", dispatch_failure)
        engine.save(pool, [0], [5])  # Fails, but is not reported yet.
    engine.save(pool, [6], [5])
    pool, done = engine.drain(pool)
    assert [each.error is None for each in done] == [False, True]
    assert load_numbers(engine, pool, [5])[0] == [6]


def dispatch_failure(size):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")


@modes
def test_a_save_that_fails_at_dispatch_is_a_value_too(mode, monkeypatch):
    engine, pool = make_engine(mode)
    ids = list(range(21))  # Six pieces; the second fails.
    real, calls = engine._mover.save_program, []

    def second_fails(carries):
        calls.append(carries)
        return dispatch_failure(carries) if len(calls) == 2 else real(carries)

    with monkeypatch.context() as patch:
        patch.setattr(engine._mover, "save_program", second_fails)
        engine.save(pool, ids, ids)
    assert len(calls) > 1
    pool, [done] = engine.drain(pool)
    assert "no staging memory" in str(done.error)
    assert done.error.__traceback__ is None  # Its frames would keep the pool alive.
    for host_id in (0, 16, 20):
        with pytest.raises(ValueError, match="no bytes to load"):
            engine.load(pool, [host_id], [0])
    check_at_rest(engine)
    pool = store(engine, pool, ids, ids)
    assert load_numbers(engine, pool, ids)[0] == ids


@modes
def test_a_load_that_fails_at_dispatch_returns_the_pool_as_it_was(mode, monkeypatch):
    engine, pool = make_engine(mode)
    pool = store(engine, pool, [7], [1])
    with monkeypatch.context() as patch:
        patch.setattr(engine._mover, "load_program", dispatch_failure)
        pool, ticket = engine.load(pool, [1], [0])
        pool, [done] = engine.drain(pool)
    assert (done.ticket, done.direction) == (ticket, "load")
    assert "no staging memory" in str(done.error)
    check_at_rest(engine)
    assert numbers_in(pool) == list(range(NUM_BLOCKS))
    assert load_numbers(engine, pool, [1])[0] == [7]


@modes
def test_a_load_that_fails_on_its_way_spares_the_host_blocks(mode, broken):
    engine, pool = make_engine(mode)
    pool = store(engine, pool, [7], [1])
    pool, ticket = engine.load(broken(pool), [1], [0])
    pool, [done] = engine.drain(pool)
    check_at_rest(engine)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault of the device"):
        pool["k"].block_until_ready()
    assert done.ticket == ticket
    assert "a fault of the device" in str(done.error)
    assert load_numbers(engine, numbered_pool(100), [1])[0] == [7]
