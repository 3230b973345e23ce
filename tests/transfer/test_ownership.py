"""One thread at a time dispatches all work of an engine, and can be replaced."""

import contextlib
import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.strict import StrictTransferEngine
from jaxkv.transfer import MultiPoolEngine, TransferEngine
from tests.rigs.waiting import WAIT_S
from tests.transfer.numbered import EXTENT_BYTES, NUM_BLOCKS, numbered_pool

OTHER = "one thread must dispatch all work .* call adopt"


@pytest.fixture
def threads():
    """Three threads that live until the end of the test: each runs functions."""
    executors = [ThreadPoolExecutor(1, f"thread-{number}") for number in range(3)]
    yield [
        lambda call, executor=executor: executor.submit(call).result(WAIT_S)
        for executor in executors
    ]
    for executor in executors:
        executor.shutdown()


def one_pool(make=TransferEngine):
    engine = make(numbered_pool(), 8)
    return engine, numbered_pool(), lambda pool: pool["k"][4, 0]


strict = functools.partial(one_pool, StrictTransferEngine)


def several_pools():
    pools = [jnp.arange(5), jnp.arange(10, 12)]
    return MultiPoolEngine(pools, 8), pools, lambda pools: pools[0][4]


ENGINES = pytest.mark.parametrize(
    "new",
    [one_pool, strict, several_pools],
    ids=["one pool", "strict", "several pools"],
)


@ENGINES
def test_only_the_first_thread_that_passes_a_pool_may_call_the_engine(new, threads):
    engine, pool, read = new()
    first, second, _ = threads
    engine.warm_up()
    assert engine.poll() == []
    ticket = first(lambda: engine.save(pool, [1], [0]))
    with pytest.raises(
        RuntimeError, match=f"thread 'thread-0_0' .*'MainThread'.*{OTHER}"
    ):
        engine.poll()
    calls = [
        lambda: engine.save(pool, [2], [0]),
        lambda: engine.load_each(pool, [0], [3], [1]),
        lambda: engine.advance(pool),
        lambda: engine.drain(pool),
        lambda: engine.read_host([0]),
        lambda: engine.write_host([1], []),
        lambda: engine.advance_host(lambda copy: copy()),
        lambda: engine.abandon(ticket),
    ]
    if new is not several_pools:
        calls += [
            lambda: engine.load(pool, [0], [3]),
            lambda: engine.forget([0]),
        ]
    for call in calls:
        with pytest.raises(RuntimeError, match=OTHER):
            second(call)
    assert engine.num_in_flight == 1
    pool, [done] = first(lambda: engine.drain(pool))
    assert (done.ticket, done.error) == (ticket, None)
    pool, _ = first(lambda: engine.load_each(pool, [0], [4], [1]))
    pool, _ = first(lambda: engine.drain(pool))
    assert read(pool) == 1


def test_transfers_in_flight_continue_on_each_thread_that_adopts(make, gate, threads):
    rng = random.Random(5)
    moves = make(staging_bytes=2 * EXTENT_BYTES)
    engine, blocks = moves.engine, range(NUM_BLOCKS)

    def run(call, *args):
        """Call a function on a thread that adopts the engine."""
        thread = rng.choice(threads)
        thread(engine.adopt)
        return thread(lambda: call(*args))

    run(moves.save_now, blocks, blocks)
    on_host, on_device = [*blocks], [*blocks]  # The number that each block holds.
    max_waiting = 0
    for _ in range(30):
        saved, loaded = np.split(np.array(rng.sample(blocks, 16)), 2)
        sources, targets = np.split(np.array(rng.sample(blocks, 16)), 2)
        gate.shut = True
        tickets = [run(moves.save, sources, saved), run(moves.load, loaded, targets)]
        max_waiting = max(max_waiting, engine.num_waiting)
        assert engine.num_in_flight == 2
        gate.shut = False
        for host, block in zip(saved, sources, strict=True):
            on_host[host] = on_device[block]
        for host, block in zip(loaded, targets, strict=True):
            on_device[block] = on_host[host]
        completions = run(moves.drain)
        assert [done.ticket for done in completions] == tickets
        assert [done.error for done in completions] == [None, None]
        assert moves.numbers == on_device
    assert max_waiting == 2
    engine.adopt()  # The fixture drains it.


def test_an_engine_is_not_adopted_while_its_thread_is_inside_a_call(threads):
    engine, pool, _ = one_pool()
    payload = threads[0](lambda: _read(engine, pool))
    is_inside, may_return = threading.Event(), threading.Event()

    def wait_inside(copy):
        is_inside.set()
        assert may_return.wait(WAIT_S)
        copy()

    def write():
        written = engine.write_host([5], [payload])
        engine.advance_host(wait_inside)
        return written

    with ThreadPoolExecutor(1) as watcher:
        call = watcher.submit(threads[0], write)
        assert is_inside.wait(WAIT_S)
        with pytest.raises(RuntimeError, match="another thread is inside a call"):
            engine.adopt()
        with pytest.raises(RuntimeError, match=OTHER):  # And does not wait.
            engine.poll()
        may_return.set()
        call.result(WAIT_S)
    engine.adopt()
    with pytest.raises(RuntimeError, match=OTHER):
        threads[0](engine.poll)
    assert engine.poll() == []


def _read(engine, pool):
    engine.save(pool, [1], [0])
    engine.drain(pool)
    payload = np.zeros(engine.host_payload_bytes, np.uint8)
    read = engine.read_host([0])
    read.copy(0, payload)
    read.close()
    return payload


def test_of_threads_that_adopt_at_once_one_owns_the_engine(threads):
    engine, pool, _ = one_pool()
    engine.save(pool, [1], [0])

    def adopt(barrier):
        barrier.wait(WAIT_S)
        # Refused if it comes between another thread's first step and its last.
        with contextlib.suppress(RuntimeError):
            engine.adopt()

    def is_owner(thread):
        try:
            thread(engine.poll)
        except RuntimeError:
            return False
        return True

    for _ in range(20):
        barrier = threading.Barrier(len(threads))
        with ThreadPoolExecutor(len(threads)) as runners:
            calls = [
                runners.submit(thread, functools.partial(adopt, barrier))
                for thread in threads
            ]
            for call in calls:
                call.result(WAIT_S)
        [owner] = filter(is_owner, threads)
    owner(lambda: engine.drain(pool))


def test_a_thread_with_the_number_of_one_that_ended_must_adopt():
    engine, pool, _ = one_pool()

    def run(call):
        result = []
        thread = threading.Thread(target=lambda: result.append(call()))
        thread.start()
        thread.join()
        return result

    run(lambda: engine.save(pool, [1], [0]))

    def poll():
        with pytest.raises(RuntimeError, match=OTHER):
            engine.poll()
        engine.adopt()
        return engine.drain(pool)

    [(_, [done])] = run(poll)
    assert done.error is None
