"""Loads that the caller's own jitted program writes, a group of layers at a time."""

import functools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, TransferEngine
from tests.transfer.numbered import (
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    check_at_rest,
    make_engine,
    modes,
    numbered_pool,
    numbers_in,
    save_and_wait,
)

KEPT = [100 + number for number in range(NUM_BLOCKS)]


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


def loaded_in_step(engine, step, pool, num_extents=2):
    pool, loads = engine.take_step_loads(pool, num_extents)
    pool, result = step(pool, loads)
    engine.step_started(result)
    return pool, loads


@modes
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_extents", [0, 1, 2, 9])
def test_blocks_are_there_after_the_step(mode, num_groups, num_extents):
    engine, pool = make_engine(mode, layer_groups=num_groups)
    pool = save_and_wait(engine, pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool = numbered_pool(offset=100)
    wanted = [1, 2, 6, 11, 23]
    step = make_step(num_groups)
    pool, ticket = engine.load(pool, wanted, [3, 4, 0, 9, 7], in_step=True)
    assert engine.is_waiting(ticket)
    assert engine.num_waiting == 1
    pool, loads = loaded_in_step(engine, step, pool, num_extents)
    assert len(loads.extents) == num_extents  # Of four, or the rest by the engine.
    assert not engine.is_waiting(ticket)
    expected = list(KEPT)
    for host, device in zip(wanted, [3, 4, 0, 9, 7], strict=True):
        expected[device] = host
    assert numbers_in(pool) == expected
    pool, [done] = engine.drain(pool)
    assert (done.ticket, done.error, done.num_blocks) == (ticket, None, 5)
    check_at_rest(engine)


@modes
def test_a_step_is_traced_once_with_loads_and_once_without(mode):
    engine, pool = make_engine(mode, layer_groups=2)
    pool = save_and_wait(engine, pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    step, rng = make_step(2), random.Random(0)
    for turn in range(8):
        if turn % 3:
            num = rng.randint(1, 9)
            hosts = rng.sample(range(NUM_BLOCKS), num)
            pool, _ = engine.load(pool, hosts, range(num), in_step=True)
        pool, _ = loaded_in_step(engine, step, pool, 3)
    assert step.num_traces == 2
    pool, _ = engine.drain(pool)
    check_at_rest(engine)


@modes
def test_loads_of_several_requests_are_taken_together(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool, first = engine.load(pool, [1, 2], [10, 11], in_step=True)
    pool, second = engine.load(pool, [2, 9], [12, 13], in_step=True)
    pool, _ = loaded_in_step(engine, make_step(), pool, 4)
    pool, done = engine.drain(pool)
    assert [each.ticket for each in done] == [first, second]
    assert numbers_in(pool)[10:14] == [1, 2, 2, 9]
    check_at_rest(engine)


@modes
def test_a_repeated_host_block_is_loaded_twice(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, range(8), range(8))
    pool, _ = engine.load(pool, [5, 5, 5], [20, 21, 22], in_step=True)
    pool, _ = loaded_in_step(engine, make_step(), pool, 4)
    assert numbers_in(pool)[20:23] == [5, 5, 5]
    pool, _ = engine.drain(pool)
    check_at_rest(engine)


@modes
def test_what_nobody_takes_is_written_by_drain(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4], [4])
    pool, ticket = engine.load(pool, [4], [8], in_step=True)
    pool = engine.advance(pool)
    assert engine.poll() == []
    assert engine.is_waiting(ticket)
    pool, [done] = engine.drain(pool)
    assert done.ticket == ticket
    assert numbers_in(pool)[8] == 4
    check_at_rest(engine)


@modes
def test_an_abandoned_load_is_not_handed_out(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4, 5], [4, 5])
    pool, dropped = engine.load(pool, [4], [8], in_step=True)
    pool, kept = engine.load(pool, [5], [9], in_step=True)
    engine.abandon(dropped)
    pool, _ = loaded_in_step(engine, make_step(), pool)
    pool, [done] = engine.drain(pool)
    assert done.ticket == kept
    assert numbers_in(pool)[8:10] == [8, 5]
    check_at_rest(engine)


@modes
def test_older_saves_read_before_the_step_writes(mode, delayed):
    # One extent at a time may be in flight: the second save waits for the first.
    engine, pool = make_engine(mode, staging_bytes=4 * 48, extent_bytes=4 * 48)
    pool = save_and_wait(engine, pool, [1], [1])
    # So that none of the time is taken to compile.
    pool = save_and_wait(engine, pool, range(4), range(16, 20))
    late = delayed(pool, 0.3)
    engine.save(late, range(4), range(8, 12))
    waiting = engine.save(late, range(4, 8), range(12, 16))
    assert engine.is_waiting(waiting)
    pool, _ = engine.load(late, [1], [5], in_step=True)
    pool, loads = engine.take_step_loads(pool, 1)
    assert not engine.is_waiting(waiting)
    pool, result = make_step()(pool, loads)
    engine.step_started(result)
    assert numbers_in(pool)[5] == 1
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, range(8, 16), range(8, 16))
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[8:16] == list(range(8))
    check_at_rest(engine)


@modes
def test_later_saves_read_what_the_step_writes(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4], [4])
    pool, _ = engine.load(pool, [4], [8], in_step=True)
    later = engine.save(pool, [8], [20])
    assert engine.is_waiting(later)
    pool, _ = loaded_in_step(engine, make_step(), pool)
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, [20], [0])
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[0] == 4
    check_at_rest(engine)


@modes
def test_calls_between_the_taking_and_the_start_are_refused(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4], [4])
    pool, ticket = engine.load(pool, [4], [8], in_step=True)
    pool, loads = engine.take_step_loads(pool, 1)
    for call in (
        lambda: engine.save(pool, [1], [1]),
        lambda: engine.load(pool, [4], [1]),
        lambda: engine.copy(pool, [1], [2]),
        lambda: engine.advance(pool),
        lambda: engine.drain(pool),
        lambda: engine.take_step_loads(pool, 1),
    ):
        with pytest.raises(RuntimeError, match="call step_started"):
            call()
    assert engine.poll() == []
    assert engine.is_waiting(ticket)
    pool, result = make_step()(pool, loads)
    engine.step_started(result)
    pool, [done] = engine.drain(pool)
    assert done.ticket == ticket
    check_at_rest(engine)


@modes
def test_wrong_arguments_are_refused(mode):
    engine, pool = make_engine(mode, layer_groups=2)
    with pytest.raises(ValueError, match="num_extents=-1 must be at least 0"):
        engine.take_step_loads(pool, -1)
    pool, loads = engine.take_step_loads(pool, 1)
    assert loads.extents == ()
    with pytest.raises(ValueError, match=r"layer_group=2 must be in \[0, 2\)"):
        loads.write(pool, 2)
    with pytest.raises(ValueError, match="must have the structure"):
        loads.write([pool["k"]])
    assert numbers_in(engine.advance(pool)) == list(range(NUM_BLOCKS))


@modes
def test_a_step_that_fails_fails_its_loads(mode, broken):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4], [4])
    pool, ticket = engine.load(pool, [4], [8], in_step=True)
    pool, loads = engine.take_step_loads(pool, 1)
    pool, _ = make_step()(pool, loads)
    result = broken(jnp.zeros(1))
    engine.step_started(result)
    while not (done := engine.poll()):
        pass
    assert done[0].ticket == ticket
    assert "a fault of the device" in str(done[0].error)
    check_at_rest(engine)


@modes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_bits_are_kept(mode, dtype):
    rng = np.random.default_rng(3)
    shape = (NUM_BLOCKS, 4, 8)
    data = rng.standard_normal((2, *shape)).astype(dtype)
    pool = {"a": jnp.array(data[0]), "b": jnp.array(data[1]).swapaxes(0, 1)}
    axes = {"a": 0, "b": 1}
    engine = TransferEngine(pool, 32, mode=mode, block_axis=axes, layer_groups=2)
    pool = save_and_wait(engine, pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool = jax.tree.map(jnp.zeros_like, pool)
    order = rng.permutation(NUM_BLOCKS)
    pool, _ = engine.load(pool, order, order, in_step=True)
    pool, _ = loaded_in_step(engine, make_step(2), pool, 3)
    np.testing.assert_array_equal(np.array(pool["a"]), data[0])
    np.testing.assert_array_equal(np.array(pool["b"].swapaxes(0, 1)), data[1])
    engine.drain(pool)


@modes
def test_compressed_blocks_are_expanded_in_the_step(mode):
    data = np.random.default_rng(3).standard_normal((NUM_BLOCKS, 4, 8))
    pool = {"a": jnp.array(data, jnp.float32)}
    engine = TransferEngine(pool, 32, mode=mode, compression=Compression("int8"))
    pool = save_and_wait(engine, pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    expected, _ = engine.load(pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    expected, _ = engine.drain(expected)
    expected = np.array(expected["a"])
    pool = {"a": jnp.zeros_like(expected)}
    pool, _ = engine.load(pool, range(NUM_BLOCKS), range(NUM_BLOCKS), in_step=True)
    pool, _ = loaded_in_step(engine, make_step(), pool, 3)
    np.testing.assert_array_equal(np.array(pool["a"]), expected)
    assert abs(expected - data).max() < 0.1
    engine.drain(pool)


@modes
def test_random_calls_leave_every_block_where_it_belongs(mode):
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(f"{seed} {mode}")
    engine, pool = make_engine(mode, layer_groups=2, staging_bytes=4 * 48 * 2)
    step = make_step(2)
    host = {}
    device = list(range(NUM_BLOCKS))
    for turn in range(150):
        for _ in range(rng.randrange(3)):
            num = rng.randint(1, 6)
            blocks = rng.sample(range(NUM_BLOCKS), num)
            hosts = rng.sample(range(NUM_HOST_BLOCKS), num)
            engine.save(pool, blocks, hosts)
            pool, _ = engine.drain(pool)
            host |= {h: device[b] for h, b in zip(hosts, blocks, strict=True)}
        for _ in range(rng.randrange(3)):
            if not host:
                continue
            hosts = rng.choices(sorted(host), k=rng.randint(1, 5))
            blocks = rng.sample(range(NUM_BLOCKS), len(hosts))
            pool, _ = engine.load(pool, hosts, blocks, in_step=True)
            for h, b in zip(hosts, blocks, strict=True):
                device[b] = host[h]
        pool, _ = loaded_in_step(engine, step, pool, rng.choice([0, 2, 4]))
        if turn % 10 == 0:
            assert numbers_in(pool) == device
    assert numbers_in(pool) == device
    pool, _ = engine.drain(pool)
    check_at_rest(engine)


@modes
def test_a_save_that_waits_for_a_host_read_goes_before_the_step_writes(mode):
    """The host read ends while `take_step_loads` waits."""
    pool = numbered_pool()
    engine = TransferEngine(pool, 2, mode=mode)  # Two extents, one of them spare.
    pool = save_and_wait(engine, pool, [5, 6], [0, 1])
    read = engine.read_host([0])
    waiting = engine.save(pool, [8], [0])
    assert engine.is_waiting(waiting)
    pool, _ = engine.load(pool, [1], [8], in_step=True)
    ender = threading.Timer(0.05, read.close)
    ender.start()
    pool, _ = loaded_in_step(engine, make_step(), pool, 1)
    ender.join()
    assert numbers_in(pool)[8] == 6
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, [0], [4])
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[4] == 8
    check_at_rest(engine)


@modes
def test_a_save_between_two_loads_of_a_step_reads_what_the_first_writes(mode):
    engine, pool = make_engine(mode)
    pool = save_and_wait(engine, pool, [4, 5], [4, 5])
    pool, _ = engine.load(pool, [4], [8], in_step=True)
    engine.save(pool, [8], [20])
    pool, _ = engine.load(pool, [5], [8], in_step=True)
    pool, _ = loaded_in_step(engine, make_step(), pool)
    assert numbers_in(pool)[8] == 5
    pool, _ = engine.drain(pool)
    pool, _ = engine.load(pool, [20], [0])
    pool, _ = engine.drain(pool)
    assert numbers_in(pool)[0] == 4
    check_at_rest(engine)
