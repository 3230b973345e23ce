"""A transfer that fails is reported, and damages nothing but its own blocks."""

import jax
import numpy as np
import pytest

from tests.transfer.faults import FAULT
from tests.transfer.numbered import (
    EXTENT_BYTES,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    numbered_pool,
)

REFUSAL = "RESOURCE_EXHAUSTED: no staging memory"


def refuse(*_):
    raise jax.errors.JaxRuntimeError(REFUSAL)


def only_call(number, real, failing=refuse):
    """A function with one failing call, and the calls so far."""
    calls = []

    def call(*args):
        calls.append(args)
        return (failing if len(calls) == number else real)(*args)

    return call, calls


def fail_at_dispatch(moves, request, monkeypatch):
    monkeypatch.setattr(moves.engine._copier, "save_program", refuse)
    return moves.pool


def fail_in_flight(moves, request, monkeypatch):
    return request.getfixturevalue("broken")(moves.pool)


def fail_for_want_of_memory(moves, request, monkeypatch):
    def take(index):
        moves.engine._queue._memory._extents[index] = None
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(moves.engine._queue._memory, "take", take)
    return moves.pool


FAILURES = {
    fail_at_dispatch: (jax.errors.JaxRuntimeError, "no staging memory"),
    fail_in_flight: (jax.errors.JaxRuntimeError, FAULT),
    fail_for_want_of_memory: (MemoryError, "no pinned memory"),
}


@pytest.mark.parametrize("fail", FAILURES)
def test_a_failed_save_is_reported_and_loses_only_its_blocks(
    make, fail, request, monkeypatch
):
    moves = make()
    engine, pool = moves.engine, moves.pool
    moves.save_now(range(24), range(24))
    moves.save_now(range(8), range(24, 32))
    expected = [*range(24), *range(8)]
    host_ids = (1, 6, 30)
    # The host is full, so each save carries over the rest of an extent.
    with monkeypatch.context() as patch:
        bad = fail(moves, request, patch)
        ticket = engine.save(bad, [20, 21, 22], host_ids)
        carried = [piece.placement.carry for piece in engine._queue._saving]
        assert min(carried) >= 0
        bad, [done] = engine.drain(bad)
    assert done.ticket == ticket
    error, text = FAILURES[fail]
    assert isinstance(done.error, error)
    assert text in str(done.error)
    assert done.error.__traceback__ is None  # Its frames would keep the pool alive.
    if fail is fail_in_flight:
        # A failed array says that it is ready, which must not count as success.
        with pytest.raises(error, match=FAULT):
            bad["k"].block_until_ready()
        assert bad["k"].is_ready()
    moves.pool = pool
    moves.check_empty(host_ids)
    kept = [host_id for host_id in range(NUM_HOST_BLOCKS) if host_id not in host_ids]
    for ids in (kept[:16], kept[16:]):
        assert moves.read(ids) == [expected[host_id] for host_id in ids]
    moves.pool = numbered_pool()
    moves.save_now([20, 21, 22], host_ids)
    assert moves.read([0, 1, 5, 6, 31, 30]) == [0, 20, 5, 21, 7, 22]


def test_a_load_that_fails_at_dispatch_returns_the_pool_as_it_was(make, monkeypatch):
    moves = make()
    moves.save_now([7], [1])
    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._copier, "load_program", refuse)
        ticket = moves.load([1], [0])
        [done] = moves.drain()
    assert done.ticket == ticket
    assert REFUSAL in str(done.error)
    assert moves.numbers == list(range(NUM_BLOCKS))
    assert moves.read([1]) == [7]


@pytest.mark.parametrize("mode", ["staged"])
@pytest.mark.parametrize("fails_late", [False, True])
def test_a_staged_load_that_fails_leaves_the_other_blocks_unchanged(
    make, mode, fails_late, request, monkeypatch
):
    moves = make(staging_bytes=EXTENT_BYTES)
    moves.save_now(range(12), range(12))
    stage = moves.engine._copier.stage
    broken = request.getfixturevalue("broken") if fails_late else refuse
    call, calls = only_call(2, stage, lambda *args: broken(stage(*args)))
    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._copier, "stage", call)
        ticket = moves.load(range(12), range(12, 24))
        [done] = moves.drain()
    assert done.ticket == ticket
    assert isinstance(done.error, jax.errors.JaxRuntimeError)
    assert done.error.__traceback__ is None
    assert len(calls) < 3  # The rest was dropped.
    assert np.array(moves.pool["k"])[:12, 0].tolist() == list(range(12))
    moves.load_now(range(12), range(12, 24))
    assert moves.numbers == [*range(12), *range(12)]


@pytest.mark.parametrize("mode", ["staged"])
def test_landed_pieces_of_a_failed_load_are_not_written(make, mode, monkeypatch):
    moves = make()
    moves.save_now(range(12), range(12))
    real, calls = moves.engine._copier.stage, []

    def first_fails(extents):  # Three together, then each by itself.
        calls.append(len(extents))
        return refuse() if len(calls) <= 2 else real(extents)

    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._copier, "stage", first_fails)
        moves.load(range(12), range(12, 24))
        [done] = moves.drain()
    assert calls == [3, 1, 1, 1]
    assert REFUSAL in str(done.error)
    assert moves.numbers == list(range(NUM_BLOCKS))


def test_a_failed_load_does_not_stop_the_others(make, monkeypatch, gate):
    moves = make(staging_bytes=EXTENT_BYTES)
    moves.save_now(range(8), range(8))
    call, _ = only_call(1, moves.engine._copier.load_program)
    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._copier, "load_program", call)
        gate.shut = True
        failed, loaded = moves.load(range(8), range(8, 16)), moves.load([5], [20])
        saved = moves.save([20], [20])  # Waits for the load before it.
        gate.shut = False
        done = moves.drain()
    assert [completion.ticket for completion in done] == [failed, loaded, saved]
    assert [completion.error is None for completion in done] == [False, True, True]
    assert moves.read([5, 20]) == [5, 5]


@pytest.mark.parametrize("error", [KeyboardInterrupt, FloatingPointError])
def test_an_interrupted_call_is_not_reported_as_done(make, error, monkeypatch):
    moves = make()
    moves.save_now([3], [0])

    def stop(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._copier, "_run", stop)
        patch.setattr(moves.engine._copier, "stage", stop)
        with pytest.raises(error):
            moves.save([5], [1])
        with pytest.raises(error):
            moves.load([0], [9])
    assert [error.__name__ in str(done.error) for done in moves.drain()] == [True] * 2
    moves.check_empty([1])
    assert moves.read([0]) == [3]


def test_a_save_that_is_interrupted_while_it_is_placed_has_failed(make, monkeypatch):
    moves = make()
    place = moves.engine._queue._place_save

    def place_and_stop(save):
        place(save)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moves.engine._queue, "_place_save", place_and_stop)
        with pytest.raises(KeyboardInterrupt):
            moves.save([5], [1])
    [saved] = moves.drain()
    assert "interrupted before it was issued" in str(saved.error)
    moves.check_empty([1])


def test_nans_are_moved_under_jax_debug_nans(make):
    moves = make({"k": jax.numpy.full((8, 4), np.nan)})
    with jax.debug_nans(True):
        moves.save_now([1], [2])
        moves.load_now([2], [3])
    assert np.isnan(np.array(moves.pool["k"])).all()
