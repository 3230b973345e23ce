"""Loads that leave in one step are reported request by request."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.transfer.tickets import Piece

NUM_BLOCKS = 64
EXTENT_BLOCKS = 4
BLOCK_SHAPE = (4, 8)
EXTENT_BYTES = EXTENT_BLOCKS * 4 * 4 * 8
MODES = ["fused", "staged"]


def make(mode, *, extents=1, **more):
    """A pool whose blocks are full of their numbers, stored in blocks of the host.

    Host block n has device block n; 32 of them, in 8 extents of 4.
    """
    numbers = np.arange(NUM_BLOCKS, dtype=np.float32)[:, None, None]
    pool = [jnp.array(np.broadcast_to(numbers, (NUM_BLOCKS, *BLOCK_SHAPE)))]
    engine = TransferEngine(
        pool,
        32,
        mode=mode,
        extent_bytes=EXTENT_BYTES,
        staging_bytes=extents * EXTENT_BYTES,
    )
    worker = OffloadWorker(engine, **more)
    pool = worker.start(plan(stores=range(32)), pool)
    pool, output = worker.drain(pool)
    assert output.completed_store_events == (0,)
    return engine, worker, pool


def plan(stores=(), event=1, **loads):
    """Store blocks to where their numbers say; load (first device, host blocks)."""
    return OffloadMetadata(
        load_event=event if loads else NO_EVENT,
        load_device_blocks=tuple(
            first + n for first, hosts in loads.values() for n in range(len(hosts))
        ),
        load_host_blocks=tuple(n for _, hosts in loads.values() for n in hosts),
        load_event_to_reqs={event: tuple(loads)} if loads else {},
        store_event=0 if stores else NO_EVENT,
        store_device_blocks=tuple(stores),
        store_host_blocks=tuple(stores),
        need_flush=False,
        load_sizes=tuple(len(hosts) for _, hosts in loads.values()),
    )


LONG = (32, range(20))  # Five extents.
SHORT = (60, [24, 25])  # One other.


class OneByOne:
    """Pieces are done when a test says so, in the order in which they were issued."""

    def __init__(self, engine):
        self.queue = engine._queue
        self.done = set()

    def is_ready(self, piece):
        return piece in self.done

    def next(self):
        """Let the oldest piece be done."""
        pending = [*self.queue._loading, *self.queue._landing]
        piece = next(each for each in pending if each not in self.done)
        self.done.add(piece)
        return piece


@pytest.fixture
def one_by_one(monkeypatch):
    def begin(engine):
        steps = OneByOne(engine)
        monkeypatch.setattr(Piece, "is_ready", lambda piece: steps.is_ready(piece))
        return steps

    return begin


def run_dry(worker, pool, steps):
    """Let one piece after the other be done; give the reports, piece by piece."""
    seen = []
    while worker.num_in_flight:
        steps.next()
        outputs = []
        for _ in range(2):  # What has landed is written, then the next is issued.
            pool = worker.start(plan(), pool)
            outputs.append(worker.poll())
        seen.append(ConnectorOutput.aggregate(outputs))
    return pool, seen


def blocks(pool, first, num):
    return np.asarray(pool[0])[first : first + num, 0, 0].tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["long", "short"])
def test_a_short_load_waits_for_a_long_one_of_its_step(mode, first, one_by_one):
    engine, worker, pool = make(mode)
    steps = one_by_one(engine)
    loads = {"long": LONG, "short": SHORT}
    if first == "short":
        loads = {"short": SHORT, "long": LONG}
    pool = worker.start(plan(**loads), pool)
    assert worker.num_in_flight == engine.num_in_flight == 2
    assert engine.num_waiting == 1  # The long one, whichever was asked for first.
    assert worker.poll() == ConnectorOutput()
    pool, seen = run_dry(worker, pool, steps)
    assert len(seen) == 6  # As many pieces as one load of all would have.
    assert seen[0] == ConnectorOutput(finished_recving=("short",))
    assert seen[1:5] == [ConnectorOutput()] * 4
    assert seen[5] == ConnectorOutput(finished_recving=("long",))
    assert blocks(pool, 32, 20) == [*range(20)]
    assert blocks(pool, 60, 2) == [24, 25]
    assert engine.bytes_in_flight == engine.num_waiting == 0


@pytest.mark.parametrize("mode", MODES)
def test_what_several_requests_need_of_an_extent_moves_once(mode, one_by_one):
    engine, worker, pool = make(mode)
    steps = one_by_one(engine)
    # Three that share extents, and one that shares host blocks with the first.
    loads = {"a": (32, [0, 4, 8]), "b": (40, [1, 5]), "c": (50, [9]), "d": (55, [0])}
    pool = worker.start(plan(**loads), pool)
    pool, seen = run_dry(worker, pool, steps)
    assert len(seen) == 4  # Three extents, and one again for host block 0.
    order = [name for output in seen for name in output.finished_recving]
    assert order.index("c") == 0  # It has a single piece, and is the first of these.
    assert sorted(order) == ["a", "b", "c", "d"]
    for first, hosts in loads.values():
        assert blocks(pool, first, len(hosts)) == list(hosts)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_sizes_is_reported_together(mode):
    _, worker, pool = make(mode)
    meta = dataclasses.replace(plan(long=LONG, short=SHORT), load_sizes=())
    pool = worker.start(meta, pool)
    assert worker.num_in_flight == 1
    pool, output = worker.drain(pool)
    assert output.finished_recving == ("long", "short")


def test_sizes_that_do_not_add_up_are_refused():
    engine, worker, pool = make("fused")
    meta = dataclasses.replace(plan(long=LONG, short=SHORT), load_sizes=(20,))
    with pytest.raises(ValueError, match="1 load_sizes for the 2 requests"):
        worker.start(meta, pool)
    for sizes in ([20, 3], [23, -1], [22]):
        with pytest.raises(ValueError, match="sizes="):
            engine.load_each(
                pool, [*range(20), 24, 25, 26][:21], [*range(40, 61)], sizes
            )
    assert engine.num_in_flight == worker.num_in_flight == 0


def test_a_load_that_fails_does_not_fail_those_beside_it(monkeypatch):
    """Only the requests with blocks in the extent that failed compute again."""
    engine, worker, pool = make("staged", extents=8)
    stage, calls = engine._copier.stage, []

    def fail_once(extents, group):
        calls.append(len(extents))
        if len(extents) > 1 or calls.count(1) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")
        return stage(extents, group)

    monkeypatch.setattr(engine._copier, "stage", fail_once)
    # "both" has blocks in the extent of "bad", and in another one with "good".
    loads = {"good": (32, [0]), "bad": (40, [4, 5]), "both": (50, [1, 6])}
    pool = worker.start(plan(**loads), pool)
    pool, output = worker.drain(pool)
    assert output.finished_recving == ("good",)
    assert sorted(output.failed_recving) == ["bad", "both"]
    assert blocks(pool, 32, 1) == [0]
    assert blocks(pool, 40, 2) == [40, 41]
    assert engine.num_in_flight == engine.bytes_in_flight == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_abandoned_load_writes_nothing_more_while_others_go_on(mode, one_by_one):
    """Its device blocks may be others' by then."""
    engine, _, pool = make(mode)
    steps = one_by_one(engine)
    pool, (gone, kept, alone) = engine.load_each(
        pool, [0, 4, 1, 5, 9], [32, 33, 40, 41, 50], [2, 2, 1]
    )
    # A piece of it that has not been issued, and others that have or will be.
    engine.abandon(gone)
    assert not engine.is_waiting(gone)
    before = blocks(pool, 32, 2)
    while engine.num_in_flight:
        steps.next()
        for _ in range(2):
            pool = engine.advance(pool)
            for done in engine.poll():
                assert done.ticket in (kept, alone)
                assert done.error is None
    assert blocks(pool, 32, 2) == before == [32, 33]
    assert blocks(pool, 40, 2) == [1, 5]
    assert blocks(pool, 50, 1) == [9]
    assert engine._table.num_pins == engine.num_waiting == engine.bytes_in_flight == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_piece_that_nobody_wants_is_not_issued(mode, one_by_one):
    engine, _, pool = make(mode)
    steps = one_by_one(engine)
    pool, (first, long) = engine.load_each(
        pool, [24, *range(20)], [60, *range(32, 52)], [1, 20]
    )
    later = engine.save(pool, [32], [30])  # It reads what the long one was to write.
    engine.abandon(long)
    assert engine.num_waiting == 1  # The save.
    pieces = 0
    while engine.num_in_flight:
        pending = [*engine._queue._saving, *engine._queue._loading]
        pieces += 1
        for piece in pending or [*engine._queue._landing]:
            steps.done.add(piece)
        pool = engine.advance(pool)
        engine.poll()
        assert pieces < 10
    assert blocks(pool, 32, 20) == [*range(32, 52)]
    assert blocks(pool, 60, 1) == [24]
    assert not engine.is_waiting(first)
    assert not engine.is_waiting(later)
    assert engine._table.num_pins == 0


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_deadline_ends_the_long_load_alone(one_by_one):
    clock = Clock()
    engine, worker, pool = make("staged", deadline_s=5.0, clock=clock)
    steps = one_by_one(engine)
    pool = worker.start(plan(long=LONG, short=SHORT), pool)
    steps.next()
    pool = worker.start(plan(), pool)
    assert worker.poll() == ConnectorOutput(finished_recving=("short",))
    clock.now_s = 6.0
    assert worker.poll() == ConnectorOutput(failed_recving=("long",))
    assert worker.num_in_flight == 0
    assert blocks(pool, 60, 2) == [24, 25]


def test_the_speed_of_loads_is_that_of_a_step_and_not_of_each_request():
    """Each by itself seems slow, as it shares the bandwidth with the others."""
    clock = Clock()
    engine, worker, pool = make("fused", clock=clock, extents=8)
    pool = worker.start(plan(long=LONG, short=SHORT), pool)
    clock.now_s += 2.0
    pool, _ = worker.drain(pool)
    assert worker.load_bytes_per_s == 22 * engine.block_bytes / 2.0
    assert worker.load_s == 2.0
    assert worker.blocks_loaded == 22
    assert worker.load_sizes.total == worker.bytes_loaded == 22 * engine.block_bytes
    assert sum(worker.load_sizes.counts) == 1
    assert worker.num_in_flight_by_direction == {"store": 0, "load": 0}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_random_loads_failures_and_aborts_leave_every_block_right(
    mode, seed, monkeypatch
):
    """Beside a plain copy of what each block must be."""
    rng = np.random.default_rng(seed)
    engine, _, pool = make(mode, extents=int(rng.integers(1, 4)))
    truth = np.arange(NUM_BLOCKS, dtype=np.float32)
    stage = engine._copier.stage

    calls = itertools.count()

    def fail_now_and_then(extents, group):
        # By number, as how many calls there are depends on when transfers land.
        if len(extents) > 1 or next(calls) % 7 == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")
        return stage(extents, group)

    monkeypatch.setattr(engine._copier, "stage", fail_now_and_then)
    free, pending = set(range(32, NUM_BLOCKS)), {}
    counts = {"finished": 0, "failed": 0, "abandoned": 0}
    for step in range(60):
        loads, flat_hosts, flat_devices, sizes = [], [], [], []
        for number in range(int(rng.integers(0, 5))):
            num = int(rng.integers(1, 9))
            if num > len(free):
                break
            devices = rng.choice(sorted(free), num, replace=False).tolist()
            free -= set(devices)
            hosts = rng.choice(32, num, replace=False).tolist()
            loads.append((f"{step}.{number}", hosts, devices))
            flat_hosts += hosts
            flat_devices += devices
            sizes.append(num)
        if loads:
            pool, tickets = engine.load_each(pool, flat_hosts, flat_devices, sizes)
            pending |= dict(zip(tickets, loads, strict=True))
        else:
            pool = engine.advance(pool)
        if pending and rng.random() < 0.2:
            gone = sorted(pending)[int(rng.integers(len(pending)))]
            engine.abandon(gone)
            _, _, devices = pending.pop(gone)
            # Whoever gets the blocks next writes them in a later program.
            for block in devices:
                pool = [pool[0].at[block].set(1000.0 + block)]
                truth[block] = 1000.0 + block
            free |= set(devices)
            counts["abandoned"] += 1
        completions = list(engine.poll())
        if step % 10 == 8:  # However busy the machine is, some arrive.
            pool, others = engine.drain(pool)
            completions += others
        for done in completions:
            _, hosts, devices = pending.pop(done.ticket)
            if done.error is None:
                truth[devices] = hosts
                counts["finished"] += 1
            else:
                for block in devices:
                    pool = [pool[0].at[block].set(2000.0 + block)]
                    truth[block] = 2000.0 + block
                counts["failed"] += 1
            free |= set(devices)
        busy = {block for _, _, devices in pending.values() for block in devices}
        if step % 10 == 9:
            rest = sorted(set(range(NUM_BLOCKS)) - busy)
            found = np.asarray(pool[0])[rest, 0, 0]
            np.testing.assert_array_equal(found, truth[rest])
    pool, _ = engine.drain(pool)
    assert engine.num_in_flight == engine.num_waiting == engine.bytes_in_flight == 0
    assert engine._table.num_pins == 0
    assert not engine._queue._waiting_of_extent
    assert counts["finished"] > 5
    assert counts["abandoned"] > 2
    assert (counts["failed"] > 1) == (mode == "staged")
