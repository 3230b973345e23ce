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
from tests.scheduling.test_worker import Clock
from tests.transfer.numbered import check_at_rest

NUM_BLOCKS = 64
EXTENT_BLOCKS = 4
BLOCK_SHAPE = (4, 8)
EXTENT_BYTES = EXTENT_BLOCKS * 4 * 4 * 8
modes = pytest.mark.parametrize("mode", ["fused", "staged"])


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


class Loading:
    """A pool whose blocks are full of their numbers, stored in blocks of the host.

    Host block n has device block n; 32 of them, in 8 extents of 4.
    """

    def __init__(self, mode, *, extents=1, **options):
        numbers = np.arange(NUM_BLOCKS, dtype=np.float32)[:, None, None]
        self.pool = [jnp.array(np.broadcast_to(numbers, (NUM_BLOCKS, *BLOCK_SHAPE)))]
        self.engine = TransferEngine(
            self.pool,
            32,
            mode=mode,
            extent_bytes=EXTENT_BYTES,
            staging_bytes=extents * EXTENT_BYTES,
        )
        self.worker = OffloadWorker(self.engine, **options)
        self.start(plan(stores=range(32)))
        assert self.drain().completed_store_events == (0,)
        self.done = set()  # Pieces, where a test says when they are.

    def start(self, meta):
        self.pool = self.worker.start(meta, self.pool)

    def drain(self):
        self.pool, output = self.worker.drain(self.pool)
        return output

    def load_each(self, *arguments):
        self.pool, tickets = self.engine.load_each(self.pool, *arguments)
        return tickets

    def blocks(self, first, num):
        return np.asarray(self.pool[0])[first : first + num, 0, 0].tolist()

    def next_piece(self):
        """Complete the oldest piece, if the test completes pieces itself."""
        queue = self.engine._queue
        pending = [*queue._saving, *queue._loading, *queue._landing]
        self.done.add(next(piece for piece in pending if piece not in self.done))

    def run_dry(self):
        """Complete one piece after the other; return the reports of each."""
        seen = []
        while self.worker.num_in_flight:
            self.next_piece()
            outputs = []
            for _ in range(2):  # What has landed is written, then the next is issued.
                self.start(plan())
                outputs.append(self.worker.poll())
            seen.append(ConnectorOutput.aggregate(outputs))
        return seen


@pytest.fixture
def piecewise(monkeypatch):
    """Make loading where pieces are done when a test says so, in their order."""

    def make(mode, **options):
        monkeypatch.undo()  # What is made stores blocks, in whatever order.
        loading = Loading(mode, **options)
        monkeypatch.setattr(Piece, "is_ready", lambda piece: piece in loading.done)
        return loading

    return make


@modes
def test_a_short_load_waits_for_a_long_one_of_its_step(mode, piecewise):
    for loads in ({"long": LONG, "short": SHORT}, {"short": SHORT, "long": LONG}):
        loading = piecewise(mode)
        loading.start(plan(**loads))
        assert loading.worker.num_in_flight == loading.engine.num_in_flight == 2
        # The long one, whichever was asked for first.
        assert loading.engine.num_waiting == 1
        assert loading.worker.poll() == ConnectorOutput()
        seen = loading.run_dry()
        assert len(seen) == 6  # As many pieces as one load of all would have.
        assert seen[0] == ConnectorOutput(finished_recving=("short",))
        assert seen[1:5] == [ConnectorOutput()] * 4
        assert seen[5] == ConnectorOutput(finished_recving=("long",))
        assert loading.blocks(32, 20) == [*range(20)]
        assert loading.blocks(60, 2) == [24, 25]
        check_at_rest(loading.engine)


@modes
def test_what_several_requests_need_of_an_extent_moves_once(mode, piecewise):
    loading = piecewise(mode)
    # Three that share extents, and one that shares host blocks with the first.
    loads = {"a": (32, [0, 4, 8]), "b": (40, [1, 5]), "c": (50, [9]), "d": (55, [0])}
    loading.start(plan(**loads))
    seen = loading.run_dry()
    assert len(seen) == 4  # Three extents, and one again for host block 0.
    order = [name for output in seen for name in output.finished_recving]
    assert order.index("c") == 0  # It has a single piece, and is the first of these.
    assert sorted(order) == ["a", "b", "c", "d"]
    for first, hosts in loads.values():
        assert loading.blocks(first, len(hosts)) == list(hosts)


def test_a_step_without_sizes_is_reported_together_and_wrong_ones_are_refused():
    loading = Loading("fused")
    meta = dataclasses.replace(plan(long=LONG, short=SHORT), load_sizes=(20,))
    with pytest.raises(ValueError, match="1 load_sizes for the 2 requests"):
        loading.start(meta)
    for sizes in ([20, 3], [23, -1], [22]):
        with pytest.raises(ValueError, match="sizes="):
            loading.load_each([*range(20), 24], [*range(40, 61)], sizes)
    check_at_rest(loading.engine)
    loading.start(dataclasses.replace(meta, load_sizes=()))
    assert loading.worker.num_in_flight == 1
    assert loading.drain().finished_recving == ("long", "short")


def test_a_load_that_fails_does_not_fail_those_beside_it(monkeypatch):
    """Only the requests with blocks in the extent that failed compute again."""
    loading = Loading("staged", extents=8)
    copier, calls = loading.engine._copier, []
    stage = copier.stage

    def fail_once(extents):
        calls.append(len(extents))
        if len(extents) > 1 or calls.count(1) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")
        return stage(extents)

    monkeypatch.setattr(copier, "stage", fail_once)
    # "both" has blocks in the extent of "bad", and in another one with "good".
    loads = {"good": (32, [0]), "bad": (40, [4, 5]), "both": (50, [1, 6])}
    loading.start(plan(**loads))
    output = loading.drain()
    assert output.finished_recving == ("good",)
    assert sorted(output.failed_recving) == ["bad", "both"]
    assert loading.blocks(32, 1) == [0]
    assert loading.blocks(40, 2) == [40, 41]
    check_at_rest(loading.engine)


def test_a_deadline_ends_the_long_load_alone(piecewise):
    clock = Clock()
    loading = piecewise("staged", deadline_s=5.0, clock=clock)
    loading.start(plan(long=LONG, short=SHORT))
    loading.next_piece()
    loading.start(plan())
    assert loading.worker.poll() == ConnectorOutput(finished_recving=("short",))
    clock.now_s += 6.0
    assert loading.worker.poll() == ConnectorOutput(failed_recving=("long",))
    assert loading.worker.num_in_flight == 0
    assert loading.blocks(60, 2) == [24, 25]


def test_the_speed_of_loads_is_that_of_a_step_and_not_of_each_request():
    """Each by itself seems slow, as it shares the bandwidth with the others."""
    clock = Clock()
    loading = Loading("fused", clock=clock, extents=8)
    worker, block_bytes = loading.worker, loading.engine.block_bytes
    loading.start(plan(long=LONG, short=SHORT))
    clock.now_s += 2.0
    loading.drain()
    assert worker.load_bytes_per_s == 22 * block_bytes / 2.0
    assert worker.load_s == 2.0
    assert worker.blocks_loaded == 22
    assert worker.load_sizes.total == worker.bytes_loaded == 22 * block_bytes
    assert sum(worker.load_sizes.counts) == 1
    assert worker.num_in_flight_by_direction == {"store": 0, "load": 0}


@pytest.mark.parametrize("seed", range(2))
@modes
def test_random_loads_failures_and_aborts_leave_every_block_right(
    mode, seed, monkeypatch
):
    rng = np.random.default_rng(seed)
    loading = Loading(mode, extents=int(rng.integers(1, 4)))
    engine, truth = loading.engine, np.arange(NUM_BLOCKS, dtype=np.float32)
    stage, calls = engine._copier.stage, itertools.count()

    def fail_now_and_then(extents):
        # By number, as how many calls there are depends on when transfers land.
        if len(extents) > 1 or next(calls) % 7 == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")
        return stage(extents)

    def overwrite(devices, value):
        """Write blocks, as the next owner does in a later program."""
        for block in devices:
            loading.pool = [loading.pool[0].at[block].set(value + block)]
            truth[block] = value + block

    monkeypatch.setattr(engine._copier, "stage", fail_now_and_then)
    free, pending = set(range(32, NUM_BLOCKS)), {}
    counts = dict.fromkeys(("finished", "failed", "abandoned"), 0)
    for step in range(60):
        loads = []
        for num in rng.integers(1, 9, int(rng.integers(0, 5))).tolist():
            if num > len(free):
                break
            devices = rng.choice(sorted(free), num, replace=False).tolist()
            free -= set(devices)
            loads.append((rng.choice(32, num, replace=False).tolist(), devices))
        if loads:
            hosts, devices = (
                list(itertools.chain(*rows)) for rows in zip(*loads, strict=True)
            )
            sizes = [len(rows) for rows, _ in loads]
            tickets = loading.load_each(hosts, devices, sizes)
            pending |= dict(zip(tickets, loads, strict=True))
        else:
            loading.pool = engine.advance(loading.pool)
        if pending and rng.random() < 0.2:
            aborted = sorted(pending)[int(rng.integers(len(pending)))]
            engine.abandon(aborted)
            _, devices = pending.pop(aborted)
            overwrite(devices, 1000.0)
            free |= set(devices)
            counts["abandoned"] += 1
        completions = list(engine.poll())
        if step % 10 == 8:  # However busy the machine is, some arrive.
            loading.pool, drained = engine.drain(loading.pool)
            completions += drained
        for done in completions:
            hosts, devices = pending.pop(done.ticket)
            if done.error is None:
                truth[devices] = hosts
            else:
                overwrite(devices, 2000.0)
            counts["finished" if done.error is None else "failed"] += 1
            free |= set(devices)
        if step % 10 == 9:
            busy = {block for _, devices in pending.values() for block in devices}
            rest = sorted(set(range(NUM_BLOCKS)) - busy)
            contents = np.asarray(loading.pool[0])[rest, 0, 0]
            np.testing.assert_array_equal(contents, truth[rest])
    loading.pool, _ = engine.drain(loading.pool)
    check_at_rest(loading.engine)
    assert counts["finished"] > 5
    assert counts["abandoned"] > 2
    assert (counts["failed"] > 1) == (mode == "staged")
