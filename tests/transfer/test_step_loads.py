"""Loads that the caller's own jitted program writes, a group of layers at a time."""

import functools
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression
from tests.rigs.waiting import wait_for
from tests.transfer.faults import FAULT
from tests.transfer.numbered import EXTENT_BYTES, NUM_BLOCKS, NUM_HOST_BLOCKS


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
    moves.pool, loads = moves.engine.take_step_loads(moves.pool, num_extents)
    assert len(loads.extents) in (0, num_extents)  # None if no load waits.
    moves.pool, result = make_step(num_groups)(moves.pool, loads)
    moves.engine.step_started(result)


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
    assert [completion.ticket for completion in moves.drain()] == [ticket]
    assert moves.numbers[8] == 4


def test_an_abandoned_load_is_not_handed_out(make):
    moves = make()
    moves.save_now([4, 5], [4, 5])
    dropped = moves.load([4], [8], in_step=True)
    kept = moves.load([5], [9], in_step=True)
    moves.engine.abandon(dropped)
    run_step(moves)
    assert [completion.ticket for completion in moves.drain()] == [kept]
    assert moves.numbers[8:10] == [8, 5]


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
def test_a_step_writes_the_bytes_that_a_load_writes(make, dtype, compression):
    rng = np.random.default_rng(3)
    data = rng.standard_normal((2, NUM_BLOCKS, 4, 8)).astype(dtype or "float32")
    moves = make(
        {"a": jnp.array(data[0]), "b": jnp.array(data[1]).swapaxes(0, 1)},
        block_axis={"a": 0, "b": 1},
        layer_groups=2,
        compression=compression and Compression(compression, head_axis=-1),
    )
    ids, order = range(NUM_BLOCKS), rng.permutation(NUM_BLOCKS)
    moves.save_now(ids, ids)
    if compression:
        moves.load_now(ids, ids)
    expected = jax.tree.map(np.array, moves.pool)
    assert abs(expected["a"].astype(float) - data[0].astype(float)).max() < 0.1
    moves.pool = jax.tree.map(jnp.zeros_like, moves.pool)
    moves.load(order, order, in_step=True)
    run_step(moves, 3, 2)
    for name, leaf in moves.pool.items():
        np.testing.assert_array_equal(leaf, expected[name])


@pytest.mark.parametrize("num_groups", [1, 2])
def test_random_calls_leave_every_block_where_it_belongs(make, mode, num_groups):
    """A save reads what its blocks have at its call, loads before it included."""
    rng = random.Random(f"11 {mode}")
    moves = make(layer_groups=num_groups, staging_bytes=2 * EXTENT_BYTES)
    device, host = list(range(NUM_BLOCKS)), {}
    saving, writer = {}, {}  # Numbers by ticket; the last ticket of a host block.
    loads, done, num_waiting = [], [], 0
    for turn in range(60):
        for _ in range(rng.randrange(3)):
            num = rng.randint(1, 6)
            blocks = rng.sample(range(NUM_BLOCKS), num)
            hosts = rng.sample(range(NUM_HOST_BLOCKS), num)
            ticket = moves.save(blocks, hosts)
            num_waiting += moves.engine.is_waiting(ticket)
            saving[ticket] = {h: device[b] for h, b in zip(hosts, blocks, strict=True)}
            writer |= dict.fromkeys(hosts, ticket)
            for h in hosts:
                host.pop(h, None)
            if host and rng.random() < 0.7:
                hosts = rng.choices(sorted(host), k=rng.randint(1, 5))
                blocks = rng.sample(range(NUM_BLOCKS), len(hosts))
                loads.append(moves.load(hosts, blocks, in_step=True))
                assert moves.engine.is_waiting(loads[-1])
                for h, b in zip(hosts, blocks, strict=True):
                    device[b] = host[h]
        # What does not fit into some extents is written by the engine.
        run_step(moves, rng.choice([0, 1, 2, 9]), num_groups)
        assert not any(map(moves.engine.is_waiting, loads))
        if turn % 10 == 9:
            assert moves.numbers == device, turn
        completed = moves.drain() if turn % 5 == 4 else moves.engine.poll()
        for completion in completed:
            held = saving.pop(completion.ticket, {})
            host |= {h: held[h] for h in held if writer[h] == completion.ticket}
        done += completed
    done += moves.drain()
    assert num_waiting > 10
    assert [c.ticket for c in done if c.direction == "load"] == loads
    for hosts in (sorted(host)[:16], sorted(host)[16:]):
        assert moves.read(hosts) == [host[h] for h in hosts]
