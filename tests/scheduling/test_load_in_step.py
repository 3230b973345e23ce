"""Loads that the step's own program writes: no request waits for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput
from tests.rigs.offload_rig import BLOCK_SIZE, HYBRID, NUM_BLOCKS, Rig


def stored(*path, **options):
    """An engine whose host has a prefix, and whose device has nothing."""
    rig = Rig(load_in_step=True, **options)
    rig.store(*path)
    return rig


@pytest.mark.parametrize("groups", [BLOCK_SIZE, HYBRID], ids=["full", "hybrid"])
def test_offered_blocks_count_as_resident_in_the_step(groups):
    rig = stored(1, 2, 3, groups=groups)
    request = rig.request("one", 1, 2, 3, 4)
    assert rig.offer(request) == (3 * BLOCK_SIZE, False)
    explained = rig.scheduler.explain(request)
    assert (explained.num_offered_tokens, explained.is_awaited) == (12, False)
    assert rig.admit(request) == 3 * BLOCK_SIZE
    assert request.num_computed_tokens == 3 * BLOCK_SIZE
    meta = rig.step(one=1)  # Looks at the bytes.
    assert meta.load_in_step
    assert meta.load_event_to_reqs == {meta.load_event: ("one",)}
    assert rig.scheduler.has_pending_loads()
    rig.end()
    rig.admit(rig.request("two", 7))
    meta = rig.step(two=1)
    assert (meta.load_event, meta.load_in_step) == (NO_EVENT, False)


def test_only_failed_loads_of_running_requests_are_reported():
    for ok in (True, False):
        rig = stored(1, 2)
        rig.admit(rig.request("one", 1, 2, 3))
        rig.step(one=1)
        names, _ = rig.loads.popleft()
        field = "finished_recving" if ok else "failed_recving"
        answer = rig.report(**{field: names})
        assert answer.finished_recving == ()
        assert answer.failed_recving == (() if ok else ("one",))
        assert not rig.scheduler.has_pending_loads()
        # Unreadable blocks are forgotten; the engine must preempt the request.
        assert rig.scheduler.num_host_blocks_held == 2 * ok
        rig.end()


def test_loads_in_the_step_ignore_the_in_flight_limit():
    rig = stored(1, 2, 3, max_blocks_in_flight=1)
    rig.admit(rig.request("one", 1, 2, 3, 4))
    rig.admit(rig.request("two", 1, 2, 3, 5))
    meta = rig.step(one=1, two=1)
    assert len(meta.load_device_blocks) == 6
    rig.end()


class WorkerRig:
    """A worker over a pool whose blocks hold their numbers, and a rig that plans."""

    def __init__(self, mode, **options):
        self.now_s = 0.0
        self.pool = jnp.arange(NUM_BLOCKS, dtype=jnp.int32)
        engine = TransferEngine(self.pool, NUM_BLOCKS, mode=mode)
        engine.save(self.pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
        self.pool, _ = engine.drain(self.pool)
        clock = lambda: self.now_s  # noqa: E731
        self.worker = OffloadWorker(engine, clock=clock, **options)
        self.rig = stored(1, 2)
        self.request = self.rig.request("one", 1, 2, 3)
        self.rig.admit(self.request)
        self.meta = self.rig.step(one=1)
        self.pool = self.worker.start(self.meta, self.pool)

    def run_step(self, num_extents=1):
        self.pool, loads = self.worker.take_step_loads(self.pool, num_extents)

        @jax.jit
        def step(pool, loads):
            pool = loads.write(pool)
            return pool, pool.sum()

        self.pool, result = step(self.pool, loads)
        self.worker.step_started(result)
        return loads

    def poll(self):
        for _ in range(100_000):
            output = self.worker.poll()
            if output != ConnectorOutput():
                return output
        raise AssertionError("nothing was reported")


modes = pytest.mark.parametrize("mode", ["fused", "staged"])


@modes
@pytest.mark.parametrize("num_extents", [0, 1])
def test_the_worker_hands_over_the_loads_of_its_plan(mode, num_extents):
    rig = WorkerRig(mode)
    loads = rig.run_step(num_extents)
    assert len(loads.extents) == num_extents
    contents = np.array(rig.pool)[list(rig.meta.load_device_blocks)]
    assert contents.tolist() == list(rig.meta.load_host_blocks)
    assert rig.poll() == ConnectorOutput(("one",))
    assert rig.worker.blocks_loaded == 2
    assert rig.worker.load_bytes_per_s == 0  # The time was the step's.
    assert rig.worker.num_in_flight == 0


@modes
def test_a_step_whose_loads_were_not_taken_is_refused(mode):
    rig = WorkerRig(mode)
    with pytest.raises(RuntimeError, match="the loads of the last step were not taken"):
        rig.worker.start(rig.meta, rig.pool)
    rig.run_step()
    assert rig.poll() == ConnectorOutput(("one",))


@modes
def test_there_is_no_deadline_for_a_load_in_the_step(mode):
    rig = WorkerRig(mode, deadline_s=1.0)
    rig.now_s = 100.0
    assert rig.worker.poll() == ConnectorOutput()
    rig.run_step()
    assert rig.poll() == ConnectorOutput(("one",))
