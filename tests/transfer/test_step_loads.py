"""Loads that the caller's own jitted program writes, a group of layers at a time."""

import functools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, TransferEngine
from tests.rigs.waiting import wait_for
from tests.transfer.faults import FAULT
from tests.transfer.numbered import (
    EXTENT_BYTES,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    numbered_pool,
)


@functools.cache
def make_step(num_groups=1):
    """A program that writes its loads group by group and reads every leaf."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool, loads):
        step.num_traces += 1
        result = jnp.zeros(())
        for group in range(num_groups):
            pool = loads.write(pool, group, after=result)
            result += sum(leaf.ravel()[0].astype(jnp.float32) for leaf in pool.values())
        return pool, result

    step.num_traces = 0
    return step


def run_step(moves, num_extents=2, num_groups=1):
    """Take the loads, and run a step that writes them."""
    moves.pool, loads = moves.engine.take_step_loads(moves.pool, num_extents)
    moves.pool, result = make_step(num_groups)(moves.pool, loads)
    moves.engine.step_started(result)
    return loads


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_extents", [0, 1, 2, 9])
def test_blocks_are_there_after_the_step(make, num_groups, num_extents):
    moves = make(layer_groups=num_groups)
    moves.save_now(range(NUM_BLOCKS), range(NUM_BLOCKS))
    moves.pool = numbered_pool(offset=100)
    expected, wanted, targets = moves.numbers, [1, 2, 6, 11, 23], [3, 4, 0, 9, 7]
    ticket = moves.load(wanted, targets, in_step=True)
    assert moves.engine.is_waiting(ticket)
    assert moves.engine.num_waiting == 1
    loads = run_step(moves, num_extents, num_groups)
    assert len(loads.extents) == num_extents  # Of four, or the rest by the engine.
    assert not moves.engine.is_waiting(ticket)
    for host, device in zip(wanted, targets, strict=True):
        expected[device] = host
    assert moves.numbers == expected
    [done] = moves.drain()
    assert (done.ticket, done.error, done.num_blocks) == (ticket, None, 5)


def test_a_step_is_traced_once_with_loads_and_once_without(make):
    moves = make(layer_groups=2)
    moves.save_now(range(NUM_BLOCKS), range(NUM_BLOCKS))
    make_step.cache_clear()
    rng = random.Random(0)
    for turn in range(8):
        if turn % 3:
            num = rng.randint(1, 9)
            moves.load(rng.sample(range(NUM_BLOCKS), num), range(num), in_step=True)
        run_step(moves, 3, 2)
    assert make_step(2).num_traces == 2


def test_what_nobody_takes_is_written_by_drain(make):
    moves = make()
    moves.save_now([4], [4])
    ticket = moves.load([4], [8], in_step=True)
    assert moves.advance() == []
    assert moves.engine.is_waiting(ticket)
    assert [each.ticket for each in moves.drain()] == [ticket]
    assert moves.numbers[8] == 4


def test_an_abandoned_load_is_not_handed_out(make):
    moves = make()
    moves.save_now([4, 5], [4, 5])
    dropped = moves.load([4], [8], in_step=True)
    kept = moves.load([5], [9], in_step=True)
    moves.engine.abandon(dropped)
    run_step(moves)
    assert [each.ticket for each in moves.drain()] == [kept]
    assert moves.numbers[8:10] == [8, 5]


def test_older_saves_read_before_the_step_writes(make, held):
    # One extent at a time may be in flight: the second save waits for the first.
    moves = make(staging_bytes=EXTENT_BYTES, extent_bytes=EXTENT_BYTES)
    moves.engine.warm_up()
    moves.save_now([1], [1])
    moves.pool = held.pool(moves.pool)
    moves.save(range(4), range(8, 12))
    waiting = moves.save(range(4, 8), range(12, 16))
    assert moves.engine.is_waiting(waiting)
    moves.load([1], [5], in_step=True)
    held.release()
    run_step(moves, 1)
    assert not moves.engine.is_waiting(waiting)
    assert moves.numbers[5] == 1
    moves.drain()
    assert moves.read(range(8, 16)) == list(range(8))


def test_later_saves_read_what_the_step_writes(make):
    moves = make()
    moves.save_now([4, 5], [4, 5])
    moves.load([4], [8], in_step=True)
    between = moves.save([8], [20])
    assert moves.engine.is_waiting(between)
    moves.load([5], [8], in_step=True)
    moves.save([8], [21])
    run_step(moves)
    assert moves.numbers[8] == 5
    moves.drain()
    assert moves.read([20, 21]) == [4, 5]


def test_a_save_that_waits_for_a_host_read_goes_before_the_step_writes(make):
    """The host read ends while `take_step_loads` waits."""
    moves = make(num_host_blocks=2)  # Two extents, one of them spare.
    moves.save_now([5, 6], [0, 1])
    read = moves.engine.read_host([0])
    waiting = moves.save([8], [0])
    assert moves.engine.is_waiting(waiting)
    moves.load([1], [8], in_step=True)
    ender = threading.Timer(0.05, read.close)
    ender.start()
    run_step(moves, 1)
    ender.join()
    assert moves.numbers[8] == 6
    moves.drain()
    assert moves.read([0]) == [8]


def test_a_step_that_fails_fails_its_loads(make, broken):
    moves = make()
    moves.save_now([4], [4])
    ticket = moves.load([4], [8], in_step=True)
    moves.pool, loads = moves.engine.take_step_loads(moves.pool, 1)
    moves.pool, _ = make_step()(moves.pool, loads)
    moves.engine.step_started(broken(jnp.zeros(1)))
    [done] = wait_for(moves.engine.poll)
    assert done.ticket == ticket
    assert FAULT in str(done.error)


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [(None, "int8"), ("float32", None), ("bfloat16", None), ("float8_e4m3fn", None)],
)
def test_a_step_writes_the_bytes_that_a_load_writes(mode, dtype, compression):
    rng = np.random.default_rng(3)
    data = rng.standard_normal((2, NUM_BLOCKS, 4, 8)).astype(dtype or "float32")
    pool = {"a": jnp.array(data[0]), "b": jnp.array(data[1]).swapaxes(0, 1)}
    engine = TransferEngine(
        pool,
        NUM_HOST_BLOCKS,
        mode=mode,
        block_axis={"a": 0, "b": 1},
        layer_groups=2,
        compression=compression and Compression(compression, head_axis=-1),
    )
    ids, order = range(NUM_BLOCKS), rng.permutation(NUM_BLOCKS)
    engine.save(pool, ids, ids)
    pool, _ = engine.drain(pool)
    if compression:
        pool, _ = engine.load(pool, ids, ids)
        pool, _ = engine.drain(pool)
    expected = jax.tree.map(np.array, pool)
    assert abs(expected["a"].astype(float) - data[0].astype(float)).max() < 0.1
    pool = jax.tree.map(jnp.zeros_like, pool)
    pool, _ = engine.load(pool, order, order, in_step=True)
    pool, loads = engine.take_step_loads(pool, 3)
    pool, result = make_step(2)(pool, loads)
    engine.step_started(result)
    for name, leaf in pool.items():
        np.testing.assert_array_equal(leaf, expected[name])
    engine.drain(pool)


def test_random_calls_leave_every_block_where_it_belongs(make, mode):
    rng = random.Random(f"11 {mode}")
    moves = make(layer_groups=2, staging_bytes=2 * EXTENT_BYTES)
    host, device = {}, list(range(NUM_BLOCKS))
    loads, done = [], []
    for turn in range(100):
        for _ in range(rng.randrange(3)):
            num = rng.randint(1, 6)
            blocks = rng.sample(range(NUM_BLOCKS), num)
            hosts = rng.sample(range(NUM_HOST_BLOCKS), num)
            moves.save(blocks, hosts)
            done += moves.drain()
            host |= {h: device[b] for h, b in zip(hosts, blocks, strict=True)}
        for _ in range(rng.randrange(3) if host else 0):
            hosts = rng.choices(sorted(host), k=rng.randint(1, 5))
            blocks = rng.sample(range(NUM_BLOCKS), len(hosts))
            loads.append(moves.load(hosts, blocks, in_step=True))
            for h, b in zip(hosts, blocks, strict=True):
                device[b] = host[h]
        run_step(moves, rng.choice([0, 2, 4]), 2)
        if turn % 10 == 9:
            assert moves.numbers == device, turn
    done += moves.drain()
    assert [each.ticket for each in done if each.direction == "load"] == loads
