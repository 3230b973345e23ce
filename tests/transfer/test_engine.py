"""The engine as its caller sees it: sizes, order, and calls that do not wait."""

import numpy as np
import pytest

from jaxkv.transfer import PoolLayout, TransferEngine
from jaxkv.transfer.kernels import choose_mode
from tests.rigs.device_cases import ON_CPU
from tests.rigs.waiting import wait_for
from tests.transfer.numbered import (
    BLOCK_BYTES,
    EXTENT_BYTES,
    NUM_BLOCKS,
    NUM_EXTENTS,
    NUM_HOST_BLOCKS,
    numbered_pool,
)


def test_an_engine_reports_its_sizes(make, mode):
    engine = make().engine
    assert engine.mode == mode
    assert engine.block_bytes == BLOCK_BYTES
    assert engine.num_host_blocks == NUM_HOST_BLOCKS
    assert engine.host_bytes == NUM_EXTENTS * EXTENT_BYTES
    assert engine.num_in_flight == 0


def test_the_default_mode_is_fused_on_cpu_and_staged_elsewhere():
    mode = "fused" if ON_CPU else "staged"
    assert TransferEngine(numbered_pool(), 1).mode == mode
    for platform in ("gpu", "tpu"):
        assert choose_mode(None, platform) == "staged"
        with pytest.raises(ValueError, match=f"this one is on {platform}, .* 'staged'"):
            choose_mode("fused", platform)


def test_empty_transfers_complete_at_the_next_poll(make):
    moves = make()
    pool = moves.pool
    for empty in ([], (), np.zeros(0, np.int64), np.zeros(0)):
        tickets = [moves.save(empty, empty), moves.load(empty, empty)]
        done = moves.engine.poll()
        assert [completion.ticket for completion in done] == tickets
        assert {(c.num_blocks, c.error) for c in done} == {(0, None)}
    assert moves.engine.poll() == moves.drain() == []
    assert not pool["k"].is_deleted()


def test_the_caller_may_change_its_ids_after_the_call(make, held):
    moves = make(staging_bytes=EXTENT_BYTES)
    # At an address that XLA would read in place.
    memory = np.zeros(64, np.int32)
    start = -memory.ctypes.data % 64 // 4
    device_ids = memory[start : start + 4]
    device_ids[:] = [5, 6, 7, 8]
    host_ids = np.array([1, 2, 3, 4], np.int32)
    moves.engine.warm_up()
    moves.pool = held.pool(moves.pool)
    moves.save(device_ids, host_ids)
    device_ids += 4
    host_ids += 4
    waiting = moves.save(device_ids, host_ids)  # Beyond the budget.
    assert moves.engine.is_waiting(waiting)
    device_ids[:] = host_ids[:] = 0
    held.release()
    moves.drain()
    assert moves.read(range(1, 9)) == list(range(5, 13))


def test_save_and_load_do_not_wait_for_the_step_before(make, held):
    moves = make()
    moves.engine.warm_up()
    moves.save_now([4], [9])
    moves.pool = held.pool(moves.pool)
    step_output = moves.pool["k"]
    stored = moves.save(range(NUM_BLOCKS), [*range(10, 32), 0, 1])
    assert not step_output.is_ready()
    assert moves.engine.poll() == []
    loaded = moves.load([9], [0])
    assert not moves.pool["k"].is_ready()
    assert moves.advance() == []
    assert moves.engine.num_in_flight == 2
    held.release()
    assert [completion.ticket for completion in moves.drain()] == [stored, loaded]
    assert moves.numbers == [4, *range(1, NUM_BLOCKS)]


def test_advance_with_nothing_to_do_looks_at_no_leaf(make, monkeypatch):
    moves = make()
    moves.save(range(8), range(8))
    with monkeypatch.context() as patch:
        patch.setattr(PoolLayout, "flatten", None)
        # A save that has been issued reads no more.
        wait_for(lambda: moves.advance() or not moves.engine.num_in_flight)
        assert moves.engine.advance(moves.pool) is moves.pool
