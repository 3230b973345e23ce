"""The worker between the scheduler and a real transfer engine."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.connector import NO_EVENT, ConnectorOutput, OffloadMetadata

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


def test_nothing_to_move_is_nothing_done():
    pool = make_pool()
    worker = OffloadWorker(TransferEngine(pool, 3))
    same = worker.start(metadata(), pool)
    assert all(same[name] is pool[name] for name in pool)  # Not donated.
    assert worker.poll() == ConnectorOutput()


def test_polling_reports_each_transfer_once():
    pool = make_pool()
    worker = OffloadWorker(TransferEngine(pool, 3))
    pool = worker.start(metadata(store=[(4, 2)]), pool)
    seen = []
    for _ in range(100_000):
        seen += worker.poll().completed_store_events
        if seen:
            break
    assert seen == [0]
    assert worker.drain(pool)[1] == ConnectorOutput()


def test_a_flush_waits_and_is_reported_with_the_next_poll():
    pool = make_pool()
    engine = TransferEngine(pool, 3)
    worker = OffloadWorker(engine)
    pool = worker.start(metadata(store=[(4, 2)], store_event=3), pool)
    flush = OffloadMetadata(NO_EVENT, (), (), {}, NO_EVENT, (), (), need_flush=True)
    pool = worker.start(flush, pool)
    assert engine.num_in_flight == 0
    assert worker.poll() == ConnectorOutput(completed_store_events=(3,))


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_step_finishes_the_loads_that_landed(mode):
    pool = make_pool()
    worker = OffloadWorker(TransferEngine(pool, 3, mode=mode))
    pool = worker.start(metadata(store=[(4, 2)]), pool)
    pool, _ = worker.drain(pool)
    pool = worker.start(metadata(load=[(0, 2)]), pool)
    seen = []
    for _ in range(100_000):
        pool = worker.start(metadata(), pool)
        seen += worker.poll().finished_recving
        if seen:
            break
    assert seen == ["r"]
    np.testing.assert_array_equal(pool["k"][0], [8, 9])


def test_a_failed_transfer_is_told_to_the_scheduler(monkeypatch):
    pool = make_pool()
    engine = TransferEngine(pool, 3)
    worker = OffloadWorker(engine)
    pool = worker.start(metadata(store=[(4, 2)], store_event=5), pool)
    pool, [done] = engine.drain(pool)
    failed = dataclasses.replace(done, error=RuntimeError("bus on fire"))
    monkeypatch.setattr(engine, "poll", lambda: [failed])
    assert worker.poll() == ConnectorOutput(failed_store_events=(5,))
    assert worker.blocks_stored == 0


def test_what_others_move_with_the_engine_does_not_stop_the_reports():
    pool = make_pool()
    engine = TransferEngine(pool, 3)
    worker = OffloadWorker(engine)
    pool = worker.start(metadata(store=[(1, 0)]), pool)
    engine.save(pool, [2], [1])
    pool, output = worker.drain(pool)
    assert output.completed_store_events == (0,)
    assert worker.num_in_flight == 0


def test_an_engine_that_the_scheduler_does_not_know_is_refused():
    engine = TransferEngine(make_pool(), 3, blocks_per_host_block=2)
    with pytest.raises(ValueError, match="has 2 device blocks per host block"):
        OffloadWorker(engine)
