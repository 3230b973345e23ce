"""Saves that wait, and calls of the engine in the meantime."""

import numpy as np
import pytest

from jaxkv.transfer import TransferEngine
from jaxkv.transfer.tickets import Piece
from tests.transfer.shadow import to_device

modes = pytest.mark.parametrize("mode", ["fused", "staged"])


def make_engine(mode, staging_bytes=16):
    """An engine with 24 blocks in extents of two, one extent in flight at a time."""
    values = np.arange(48, dtype=np.int32).reshape(24, 2)
    pool = to_device(values)
    options = {"mode": mode, "extent_bytes": 16, "staging_bytes": staging_bytes}
    return TransferEngine(pool, 16, **options), pool, values


def check_nothing_left(engine):
    assert engine.bytes_in_flight == engine.num_in_flight == engine.num_waiting == 0
    assert engine._table.num_pins == 0
    engine._table.check()


@modes
def test_a_block_saved_again_while_its_save_waits_has_one_place(mode, monkeypatch):
    engine, pool, values = make_engine(mode)
    with monkeypatch.context() as patch:
        patch.setattr(Piece, "is_ready", lambda piece: False)
        engine.save(pool, range(8), range(8))
        first = engine.save(pool, [20, 21], [14, 15])
        second = engine.save(pool, [22, 23], [15, 13])
        assert engine.is_waiting(first)
        assert engine.is_waiting(second)
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None] * 3
    check_nothing_left(engine)
    pool, _ = engine.load(pool, [14, 15, 13], [0, 1, 2])
    pool, _ = engine.drain(pool)
    assert (np.array(pool)[:3] == values[[20, 22, 23]]).all()


@modes
def test_a_save_that_later_saves_replace_completes(mode, monkeypatch):
    engine, pool, values = make_engine(mode)
    with monkeypatch.context() as patch:
        patch.setattr(Piece, "is_ready", lambda piece: False)
        engine.save(pool, range(8), range(8))
        engine.save(pool, [20, 21], [14, 15])
        engine.save(pool, [22, 23], [15, 14])
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None] * 3
    check_nothing_left(engine)
    pool, _ = engine.load(pool, [14, 15], [0, 1])
    pool, _ = engine.drain(pool)
    assert (np.array(pool)[:2] == values[[23, 22]]).all()


@modes
def test_a_save_takes_room_held_by_loads_that_wait_for_it(mode, monkeypatch):
    engine, pool, values = make_engine(mode)
    engine.save(pool, range(16), range(16))
    pool, _ = engine.drain(pool)
    odd, even = np.arange(1, 16, 2), np.arange(0, 16, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Piece, "is_ready", lambda piece: False)
        engine.save(pool, odd, odd)
        # Into blocks that the save has to read, from blocks that the next one replaces.
        pool, _ = engine.load(pool, even, odd)
        engine.save(pool, even, even)
        assert engine.num_waiting == 3
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None] * 3
    check_nothing_left(engine)
    assert (np.array(pool)[odd] == values[even]).all()
    pool, _ = engine.load(pool, range(16), range(16))
    pool, _ = engine.drain(pool)
    assert (np.array(pool)[:16] == values[:16]).all()


@modes
def test_no_load_waits_for_an_abandoned_save(mode, monkeypatch):
    engine, pool, values = make_engine(mode, staging_bytes="1MB")
    engine.save(pool, [7, 8], [7, 8])
    pool, _ = engine.drain(pool)
    with monkeypatch.context() as patch:
        patch.setattr(Piece, "is_ready", lambda piece: False)
        engine.save(pool, [0], [0])
        patch.setattr(engine._table, "place", lambda ids, shards: None)
        engine.save(pool, [1, 2], [1, 2])  # Waits for room.
        abandoned = engine.save(pool, [2, 3], [3, 4])
        engine.abandon(abandoned)
        # Block 3 is free, but 2 still has to be read.
        pool, _ = engine.load(pool, [7], [3])
        assert not engine._queue._waiting_loads
        pool, _ = engine.load(pool, [8], [2])
        assert engine._queue._waiting_loads
    pool, done = engine.drain(pool)
    assert [each.error for each in done] == [None] * 4
    check_nothing_left(engine)
    pool, _ = engine.load(pool, [2], [20])
    pool, _ = engine.drain(pool)
    assert (np.array(pool)[[3, 2, 20]] == values[[7, 8, 2]]).all()
