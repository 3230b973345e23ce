"""The engine as its caller sees it: order, refusals, failures, no blocking."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import PoolLayout, TransferEngine
from tests.transfer.numbered import (
    EXTENT_BYTES,
    NUM_BLOCKS,
    NUM_EXTENTS,
    NUM_HOST_BLOCKS,
    check_at_rest,
    load_numbers,
    make_engine,
    modes,
    numbered_pool,
    numbers_in,
    save_and_wait,
)


@modes
def test_an_engine_reports_its_sizes(mode):
    engine, _ = make_engine(mode)
    assert engine.mode == mode
    assert engine.block_bytes == 8 * 4 + 8 * 2
    assert engine.num_host_blocks == NUM_HOST_BLOCKS
    assert engine.host_bytes == NUM_EXTENTS * EXTENT_BYTES
    assert engine.num_in_flight == 0


def test_the_default_on_cpu_is_fused():
    assert TransferEngine(numbered_pool(), 1).mode == "fused"


@modes
def test_completions_are_in_the_order_of_issue(mode):
    engine, pool = make_engine(mode)
    tickets = [engine.save(pool, [i, i + 1], [2 * i, 2 * i + 1]) for i in range(5)]
    assert engine.num_in_flight == 5
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == tickets
    for i in range(3):
        pool, ticket = engine.load(pool, [i], [i])
        tickets += [ticket, engine.save(pool, [9], [30])]
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == tickets[5:]
    assert [each.ticket.number for each in done] == list(range(5, 11))
    assert [each.direction for each in done] == ["load", "save"] * 3
    assert [each.num_blocks for each in done] == [1] * 6
    assert [each.num_bytes for each in done] == [engine.block_bytes] * 6
    assert engine.poll() == engine.drain(pool)[1] == []
    check_at_rest(engine)


@modes
@pytest.mark.parametrize("empty", [[], (), np.zeros(0, np.int64), np.zeros(0)])
def test_empty_transfers_complete_at_the_next_poll(mode, empty):
    engine, pool = make_engine(mode)
    stored = engine.save(pool, empty, empty)
    same, loaded = engine.load(pool, empty, empty)
    assert numbers_in(same) == numbers_in(pool)  # Not donated.
    done = engine.poll()
    assert [each.ticket for each in done] == [stored, loaded]
    assert [(each.num_blocks, each.error) for each in done] == [(0, None)] * 2


@modes
@pytest.mark.parametrize("num_blocks", [1, 3, 4, 15, 16, 17, 21, 24])
def test_any_number_of_blocks_can_be_moved(mode, num_blocks):
    engine, pool = make_engine(mode)
    ids = np.random.default_rng(num_blocks).permutation(NUM_BLOCKS)[:num_blocks]
    engine.save(pool, ids.tolist(), ids.astype(np.uint16))
    pool, [done] = engine.drain(pool)
    assert done.num_blocks == num_blocks
    found, _ = load_numbers(engine, pool, ids)
    assert found == ids.tolist()


@modes
def test_a_host_block_can_be_loaded_twice_at_once(mode):
    engine, pool = make_engine(mode)
    save_and_wait(engine, pool, [7], [3])
    assert load_numbers(engine, pool, [3, 3, 3])[0] == [7, 7, 7]


@modes
def test_the_caller_may_change_his_ids_after_the_call(mode, delayed):
    engine, pool = make_engine(mode)
    engine.warm_up()
    # At an address that XLA would read in place.
    memory = np.zeros(64, np.int32)
    start = -memory.ctypes.data % 64 // 4
    device_ids = memory[start : start + 4]
    device_ids[:] = [5, 6, 7, 8]
    host_ids = np.array([1, 2, 3, 4], np.int32)
    pool = delayed(pool, 0.3)
    engine.save(pool, device_ids, host_ids)
    device_ids[:] = host_ids[:] = 0
    pool, _ = engine.drain(pool)
    assert load_numbers(engine, pool, [1, 2, 3, 4])[0] == [5, 6, 7, 8]


@modes
def test_save_and_load_do_not_wait_for_the_step_before(mode, delayed):
    engine, pool = make_engine(mode)
    engine.warm_up()
    save_and_wait(engine, pool, [4], [9])
    pool = delayed(pool, 1.0)
    step_output = pool["k"]
    stored = engine.save(pool, range(NUM_BLOCKS), [*range(10, 32), 0, 1])
    assert not step_output.is_ready()
    assert engine.poll() == []
    pool, loaded = engine.load(pool, [9], [0])
    assert not pool["k"].is_ready()
    assert engine.poll() == []
    assert engine.num_in_flight == 2
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == [stored, loaded]
    assert numbers_in(pool) == [4, *range(1, NUM_BLOCKS)]


@modes
def test_poll_reports_without_drain(mode, delayed):
    engine, pool = make_engine(mode)
    pool = delayed(pool, 0.2)
    ticket = engine.save(pool, [4], [9])
    reports = []
    deadline_s = time.perf_counter() + 60
    while not reports and time.perf_counter() < deadline_s:
        reports = engine.poll()
    assert [done.ticket for done in reports] == [ticket]
    assert load_numbers(engine, pool, [9])[0] == [4]


@modes
def test_advance_and_poll_finish_a_load_without_drain(mode, delayed):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4], [9])
    pool, ticket = engine.load(delayed(pool, 0.2), [9], [0])
    reports = []
    deadline_s = time.perf_counter() + 60
    while not reports and time.perf_counter() < deadline_s:
        pool = engine.advance(pool)
        reports = engine.poll()
    assert [done.ticket for done in reports] == [ticket]
    assert numbers_in(pool) == [4, *range(1, NUM_BLOCKS)]
    check_at_rest(engine)


@modes
def test_advance_with_nothing_to_do_looks_at_no_leaf(mode, monkeypatch):
    engine, pool = make_engine(mode)
    engine.save(pool, range(8), range(8))
    with monkeypatch.context() as patch:
        patch.setattr(PoolLayout, "flatten", None)
        while engine.num_in_flight:  # A save that has been issued reads no more.
            assert engine.advance(pool) is pool
            engine.poll()
        assert engine.advance(pool) is pool
    check_at_rest(engine)


@modes
def test_a_device_block_may_be_overwritten_right_after_save(mode, delayed):
    engine, pool = make_engine(mode)
    engine.warm_up()

    def overwrite(pool):
        return jax.tree.map(lambda leaf: leaf * 0 + jnp.ones((), leaf.dtype), pool)

    overwrite = jax.jit(overwrite, donate_argnums=0)
    overwrite(numbered_pool())  # Compiled now, so that it comes right after the save.
    pool = delayed(pool, 0.3)  # The save is still to run when its blocks are donated.
    ticket = engine.save(pool, [3, 14, 15], [2, 7, 1])
    assert not engine.is_waiting(ticket)
    overwritten = overwrite(pool)
    assert pool["k"].is_deleted()
    assert [done.error for done in engine.drain(overwritten)[1]] == [None]
    assert load_numbers(engine, numbered_pool(), [2, 7, 1])[0] == [3, 14, 15]


REFUSALS = {
    "device id too large": ([0, 24], [1, 2], r"device_block_ids has \[24\]; .*0, 24"),
    "device id negative": ([0, -1], [1, 2], r"device_block_ids has \[-1\]"),
    "host id too large": ([0, 1], [1, 32], r"host_block_ids has \[32\]; .*0, 32\)"),
    "host id negative": ([0, 1], [-1, 2], r"host_block_ids has \[-1\]"),
    "too wide an id": ([0], [2**40 + 1], "host_block_ids has"),
    "lengths differ": ([0, 1], [2], "2 device_block_ids and 1 host_block_ids must be"),
    "device id twice": ([3, 3], [1, 2], r"device_block_ids has \[3\] more than once"),
    "floats": ([0.0], [1], r"device_block_ids must be a flat sequence of ints, not fl"),
    "bools": ([True], [1], "flat sequence of ints, not bool"),
    "nested": ([[0]], [[1]], r"host_block_ids must be a flat .* not int64\[1, 1\]"),
    "too deep": ([[[0]]], [1], r"device_block_ids must be a flat .* int64\[1, 1, 1\]"),
    "too many": ([[0, 1]], [1], r"int64\[1, 2\]: a host block holds 1 of them"),
}


@modes
@pytest.mark.parametrize("case", REFUSALS)
def test_refused_ids_change_nothing(mode, case):
    engine, pool = make_engine(mode)
    first = engine.save(pool, [7, 8], [1, 2])
    pool, _ = engine.drain(pool)
    device_ids, host_ids, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        engine.save(pool, device_ids, host_ids)
    with pytest.raises(ValueError, match=message):
        engine.load(pool, host_ids, device_ids)
    assert engine.poll() == []
    check_at_rest(engine)
    pool, ticket = engine.load(pool, [1, 2], [0, 1])
    assert ticket.number == first.number + 1
    pool, [done] = engine.drain(pool)
    assert (done.ticket, done.error) == (ticket, None)
    assert numbers_in(pool)[:2] == [7, 8]


@modes
def test_a_save_into_one_host_block_twice_is_refused(mode):
    engine, pool = make_engine(mode)
    with pytest.raises(ValueError, match=r"host_block_ids has \[5\] more than once"):
        engine.save(pool, [0, 1, 2], [5, 6, 5])
    assert engine.num_in_flight == 0


@modes
def test_host_blocks_without_bytes_cannot_be_loaded(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [7], [1])
    with pytest.raises(ValueError, match=r"host blocks \[4, 5\] have no bytes to load"):
        engine.load(pool, [1, 4, 5], [0, 1, 2])
    engine.save(pool, [8], [1])
    with pytest.raises(ValueError, match=r"\[1\] .* reported as completed"):
        engine.load(pool, [1], [0])
    pool, _ = engine.drain(pool)
    assert load_numbers(engine, pool, [1])[0] == [8]


@modes
def test_a_stale_pool_is_refused_and_changes_nothing(mode):
    engine, stale = make_engine(mode)
    save_and_wait(engine, stale, [7], [1])
    pool, _ = engine.load(stale, [1], [0])
    pool, _ = engine.drain(pool)
    message = r"pool\['k'\] has been deleted .* pass the pool that the last load"
    with pytest.raises(RuntimeError, match=message):
        engine.save(stale, [2], [1])
    for use in (
        lambda: engine.load(stale, [1], [2]),
        lambda: engine.drain(stale),
    ):
        with pytest.raises(RuntimeError, match=message):
            use()
    assert engine.num_in_flight == 0
    assert load_numbers(engine, pool, [1])[0] == [7]


@modes
def test_a_pool_of_another_layout_is_refused_and_changes_nothing(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [7], [1])
    other = {"k": pool["k"], "v": pool["k"]}
    with pytest.raises(ValueError, match=r"pool\['v'\] must be bfloat16\[24, 8\]"):
        engine.save(other, [2], [1])
    for use in (
        lambda: engine.load(other, [1], [2]),
        lambda: engine.drain(other),
    ):
        with pytest.raises(ValueError, match=r"pool\['v'\] must be bfloat16\[24, 8\]"):
            use()
    assert engine.num_in_flight == 0
    assert load_numbers(engine, pool, [1])[0] == [7]


def test_invalid_arguments_are_refused_at_construction():
    with pytest.raises(ValueError, match="num_host_blocks=0 must be at least 1"):
        TransferEngine(numbered_pool(), 0)
    with pytest.raises(ValueError, match="mode='eager' must be one of"):
        TransferEngine(numbered_pool(), 4, mode="eager")
    with pytest.raises(ValueError, match="blocks_per_host_block=0 must be at least 1"):
        TransferEngine(numbered_pool(), 4, blocks_per_host_block=0)
    with pytest.raises(ValueError, match=r"layer_groups=3 must be in \[1, 2\]"):
        TransferEngine(numbered_pool(), 4, layer_groups=3)
    with pytest.raises(ValueError, match="staging_bytes=47 must be at least the 48 by"):
        TransferEngine(numbered_pool(), 4, staging_bytes=47)
    with pytest.raises(
        ValueError, match="num_host_blocks=None and host_bytes=None must"
    ):
        TransferEngine(numbered_pool())
    with pytest.raises(
        ValueError, match="num_host_blocks=4 and host_bytes='4KiB' must"
    ):
        TransferEngine(numbered_pool(), 4, host_bytes="4KiB")
    with pytest.raises(ValueError, match="host_bytes=95 must be at least 96"):
        TransferEngine(numbered_pool(), host_bytes=95)
