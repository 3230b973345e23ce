"""The worker between the scheduler and a real transfer engine."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.transfer.tickets import Piece
from jaxkv.types import NO_BLOCK

NUM_BLOCKS = 6


def make_pool():
    values = np.arange(NUM_BLOCKS * 2, dtype=np.float32).reshape(NUM_BLOCKS, 2)
    return {"k": jnp.array(values), "v": jnp.array(-values)}


def metadata(store=(), load=(), *, store_event=0, load_event=0, requests=("r",)):
    """Transfers as pairs of (device block, host block)."""
    return OffloadMetadata(
        load_event=load_event if load else NO_EVENT,
        load_device_blocks=tuple(device for device, _ in load),
        load_host_blocks=tuple(host for _, host in load),
        load_event_to_reqs={load_event: requests} if load else {},
        store_event=store_event if store else NO_EVENT,
        store_device_blocks=tuple(device for device, _ in store),
        store_host_blocks=tuple(host for _, host in store),
        need_flush=False,
    )


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_block_goes_to_the_host_and_comes_back(mode):
    pool = make_pool()
    engine = TransferEngine(pool, 3, mode=mode)
    worker = OffloadWorker(engine)
    pool = worker.start(metadata(store=[(4, 2), (1, 0)], store_event=7), pool)
    assert worker.num_in_flight == 1
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(completed_store_events=(7,))
    pool = worker.start(metadata(load=[(0, 2)], requests=("a", "b")), pool)
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(finished_recving=("a", "b"))
    assert worker.num_in_flight == 0
    np.testing.assert_array_equal(pool["k"][0], [8, 9])
    np.testing.assert_array_equal(pool["v"][0], [-8, -9])
    assert (worker.blocks_stored, worker.blocks_loaded) == (2, 1)
    assert worker.bytes_stored == 2 * engine.block_bytes == 2 * worker.bytes_loaded


def test_a_plan_without_transfers_changes_nothing():
    pool = make_pool()
    worker = OffloadWorker(TransferEngine(pool, 3))
    same = worker.start(metadata(), pool)
    assert all(same[name] is pool[name] for name in pool)  # Not donated.
    assert worker.poll() == ConnectorOutput()


def test_other_transfers_of_the_engine_do_not_stop_reports():
    pool = make_pool()
    engine = TransferEngine(pool, 3)
    worker = OffloadWorker(engine)
    pool = worker.start(metadata(store=[(1, 0)]), pool)
    engine.save(pool, [2], [1])
    pool, output = worker.drain(pool)
    assert output.completed_store_events == (0,)
    assert worker.num_in_flight == 0


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def late(monkeypatch):
    """Transfers arrive only when waited for, until this is undone."""
    is_ready, wait, waited = Piece.is_ready, Piece.wait, []

    def wait_and_note(piece):
        wait(piece)
        waited.append(piece)

    def is_ready_if_waited_for(piece):
        return any(piece is waited_piece for waited_piece in waited) and is_ready(piece)

    with monkeypatch.context() as patch:
        patch.setattr(Piece, "is_ready", is_ready_if_waited_for)
        patch.setattr(Piece, "wait", wait_and_note)
        yield patch


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_transfer_that_takes_too_long_is_given_up(mode, late):
    pool, clock = make_pool(), Clock()
    engine = TransferEngine(pool, 3, mode=mode)
    worker = OffloadWorker(engine, deadline_s=5.0, clock=clock)
    pool = worker.start(metadata(store=[(4, 2)]), pool)
    pool, _ = worker.drain(pool)
    pool = worker.start(metadata(store=[(1, 0)], store_event=7), pool)
    clock.now_s += 3
    pool = worker.start(metadata(load=[(0, 2)], requests=("a", "b")), pool)
    clock.now_s += 2
    assert worker.poll() == ConnectorOutput()
    clock.now_s += 1
    assert worker.poll() == ConnectorOutput(failed_store_events=(7,))
    clock.now_s += 3
    assert worker.poll() == ConnectorOutput(failed_recving=("a", "b"))
    assert worker.num_in_flight == 0
    assert (worker.blocks_stored, worker.blocks_loaded) == (1, 0)
    late.undo()
    # Transfers that arrive now are not reported, and their blocks are free.
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput()
    pool = worker.start(metadata(store=[(3, 0)], store_event=8), pool)
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(completed_store_events=(8,))
    pool = worker.start(metadata(load=[(5, 0)]), pool)
    pool, _ = worker.drain(pool)
    np.testing.assert_array_equal(pool["k"][5], [6, 7])


def test_without_a_deadline_a_transfer_takes_as_long_as_it_takes(late):
    pool, clock = make_pool(), Clock()
    worker = OffloadWorker(TransferEngine(pool, 3), deadline_s=None, clock=clock)
    pool = worker.start(metadata(store=[(4, 2)]), pool)
    clock.now_s += 1e9
    assert worker.poll() == ConnectorOutput()
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(completed_store_events=(0,))


@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize("is_late", [True, False])
def test_reports_come_after_a_fixed_number_of_steps(mode, is_late, late):
    """They come in the same step wherever the transfers arrive sooner or later."""
    if not is_late:
        late.undo()
    pool = make_pool()
    engine = TransferEngine(pool, 3, mode=mode)
    worker = OffloadWorker(engine, report_after_steps=2, clock=Clock())
    nothing = ConnectorOutput()
    stored = [ConnectorOutput(completed_store_events=(event,)) for event in (0, 1)]
    loaded = [ConnectorOutput(finished_recving=(name,)) for name in "ab"]
    for plan, expected in (
        (metadata(store=[(4, 2)], store_event=0), nothing),
        (metadata(store=[(1, 0)], store_event=1), nothing),
        (metadata(), stored[0]),
        (metadata(load=[(0, 2)], load_event=0, requests=("a",)), stored[1]),
        (metadata(load=[(3, 0)], load_event=1, requests=("b",)), nothing),
        (metadata(), loaded[0]),
        (metadata(), loaded[1]),
    ):
        pool = worker.start(plan, pool)
        if not is_late:
            # What has arrived is written by a later program, when it is reported.
            jax.block_until_ready(pool)
        assert worker.poll() == expected
    np.testing.assert_array_equal(pool["k"][0], [8, 9])
    np.testing.assert_array_equal(pool["k"][3], [2, 3])


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_thread_that_adopts_the_worker_continues_with_what_is_in_flight(mode, late):
    pool = make_pool()
    worker = OffloadWorker(TransferEngine(pool, 3, mode=mode), report_after_steps=2)
    for event, pair in enumerate([(4, 2), (1, 0)]):
        pool = worker.start(metadata(store=[pair], store_event=event), pool)
    with ThreadPoolExecutor(1) as thread:

        def run(call, *args):
            return thread.submit(call, *args).result()

        for call, *args in (
            (worker.start, metadata(load=[(0, 1)]), pool),
            (worker.start, metadata(), pool),
            (worker.poll,),
            (worker.drain, pool),
            (worker.abandon,),
        ):
            with pytest.raises(RuntimeError, match="call adopt"):
                run(call, *args)
        run(worker.adopt)
        with pytest.raises(RuntimeError, match="call adopt"):
            worker.poll()
        pool = run(worker.start, metadata(), pool)  # The third step.
        assert run(worker.poll) == ConnectorOutput(completed_store_events=(0,))
        pool = run(worker.start, metadata(load=[(0, 2)]), pool)
        assert run(worker.poll) == ConnectorOutput(completed_store_events=(1,))
        worker.adopt()
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(finished_recving=("r",))
    np.testing.assert_array_equal(pool["k"][0], [8, 9])


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_host_blocks_of_several_device_blocks_in_part(mode):
    pool = make_pool()
    engine = TransferEngine(pool, 3, mode=mode, blocks_per_host_block=2)
    worker = OffloadWorker(engine)
    plan = dataclasses.replace(
        metadata(store=[(0, 2), (0, 0)]), store_device_blocks=(4, 1, 2, 3)
    )
    pool = worker.start(plan, pool)
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(completed_store_events=(0,))
    assert worker.bytes_stored == 2 * engine.block_bytes
    plan = dataclasses.replace(
        metadata(load=[(0, 2), (0, 0)]),
        load_device_blocks=(NO_BLOCK, 0, 5, NO_BLOCK),
    )
    pool = worker.start(plan, pool)
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(finished_recving=("r",))
    numbers = [1, 1, 2, 3, 4, 2]
    np.testing.assert_array_equal(pool["k"][:, 0], np.multiply(2, numbers))
    np.testing.assert_array_equal(pool["v"][:, 1], -np.multiply(2, numbers) - 1)


def test_the_rate_of_loads_is_measured_from_start_to_report():
    pool, clock = make_pool(), Clock()
    engine = TransferEngine(pool, 3)
    worker = OffloadWorker(engine, clock=clock)
    pool = worker.start(metadata(store=[(4, 2), (1, 0)]), pool)
    clock.now_s += 1
    pool, _ = worker.drain(pool)
    assert worker.load_bytes_per_s == 0
    rates = []
    for pairs, seconds in (([(0, 2)], 2), ([(0, 2), (3, 0)], 1)):
        pool = worker.start(metadata(load=pairs), pool)
        clock.now_s += seconds
        pool, _ = worker.drain(pool)
        rates.append(worker.load_bytes_per_s / engine.block_bytes)
    # The newest counts for a quarter.
    np.testing.assert_allclose(rates, [0.5, 0.75 * 0.5 + 0.25 * 2])


def test_equal_plans_have_equal_digests():
    digests = []
    for plans in (
        [metadata(store=[(4, 2)]), metadata(load=[(0, 2)])],
        [metadata(store=[(4, 2)]), metadata(load=[(0, 2)])],
        [metadata(store=[(4, 2)]), metadata(load=[(0, 2)], requests=("s",))],
        [metadata(store=[(4, 1)]), metadata(load=[(0, 1)])],
        [metadata(store=[(4, 2)])],
        [metadata(store=[(4, 2)]), metadata()],  # A step more.
    ):
        digest = b""
        for plan in plans:
            digest = plan.digest(digest)
        digests.append(digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_settings_and_pools_that_a_worker_cannot_serve_are_refused(monkeypatch):
    engine = TransferEngine(make_pool(), 3)
    for arguments, why in (
        ({"deadline_s": 0.0}, "deadline_s=0.0 must be a number of seconds above 0"),
        (
            {"deadline_s": float("nan")},
            "deadline_s=nan must be a number of seconds above 0",
        ),
        ({"report_after_steps": 0}, "report_after_steps=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=why):
            OffloadWorker(engine, **arguments)
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("blocks",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("blocks"))
    sharded = TransferEngine(jax.device_put(make_pool(), place), 4)
    with pytest.raises(ValueError, match="engine's pool has 2 shards"):
        OffloadWorker(sharded)
    assert OffloadWorker(sharded, num_shards=2).num_in_flight == 0
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="report_after_steps=None is for one"):
        OffloadWorker(engine)


def test_tier_bytes_per_s_has_a_rate_for_each_mover():
    movers = [SimpleNamespace(read_bytes_per_s=5.0), SimpleNamespace()]
    worker = OffloadWorker(TransferEngine(make_pool(), 2), movers=movers)
    assert worker.tier_bytes_per_s == (5.0, 0.0)
