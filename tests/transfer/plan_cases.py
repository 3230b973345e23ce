"""One of the processes of test_processes.py.

python -m tests.transfer.plan_cases ADDRESS NUM_PROCESSES PROCESS CASE
"""

import random
import sys
import time

import jax
import numpy as np

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.worker.worker import PlanMismatchError
from tests.rigs.offload_rig import NUM_BLOCKS, Rig

P = jax.sharding.PartitionSpec


def make_worker():
    """A pool whose heads are spread over all devices, and its worker."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("heads",))
    place = jax.sharding.NamedSharding(mesh, P(None, "heads"))
    array = np.arange(NUM_BLOCKS * 4, dtype=np.int32).reshape(NUM_BLOCKS, 4)
    pool = jax.make_array_from_callback(
        array.shape, place, lambda index: jax.numpy.array(array[index])
    )
    engine = TransferEngine(pool, NUM_BLOCKS)
    return OffloadWorker(engine, report_after_steps=2, check_plans=True), pool


def plan(number, load=True):
    """Store block `number`, and load the one stored three steps before."""
    is_loading = load and number >= 3
    return OffloadMetadata(
        load_event=number if is_loading else NO_EVENT,
        load_device_blocks=(number + 4,) if is_loading else (),
        load_host_blocks=(number - 3,) if is_loading else (),
        load_event_to_reqs={number: (f"r{number}",)} if is_loading else {},
        store_event=number,
        store_device_blocks=(number,),
        store_host_blocks=(number,),
        need_flush=False,
    )


def agree(rng):
    """Reports come in the same steps, however long each process takes for a step."""
    worker, pool = make_worker()
    for number in range(10):
        pool = worker.start(plan(number), pool)
        time.sleep(rng.choice([0, 0.02]))
        stores, loads = (number - 2,), (f"r{number - 2}",)
        expected = ConnectorOutput(
            finished_recving=loads if number >= 5 else (),
            completed_store_events=stores if number >= 2 else (),
        )
        assert worker.poll() == expected, number
    pool, output = worker.drain(pool)
    assert output == ConnectorOutput(("r8", "r9"), (), (8, 9))
    for shard in pool.addressable_shards:
        rows = np.array(shard.data)[7:14, 0] // 4
        # Block n + 4 has the bytes of block n - 3, which may be from a load too.
        assert rows.tolist() == [0, 1, 2, 3, 4, 5, 6], rows
    print(worker.plan_digest.hex(), flush=True)


def differ(own):
    """One process leaves out a load in the fifth step."""
    worker, pool = make_worker()
    for number in range(4):
        pool = worker.start(plan(number), pool)
        worker.poll()
    try:
        worker.start(plan(4, load=own == 0), pool)
    except PlanMismatchError as error:
        print(error, flush=True)
    worker.drain(pool)


def schedule(rng, shared):
    """Two schedulers, told the same in the same steps, plan the same."""
    worker, pool = make_worker()
    rig = Rig()
    for number in range(60):
        path = [shared.randrange(2) for _ in range(shared.randint(1, 4))]
        if shared.random() < 0.5 and rig.pool.num_free > len(path):
            rig.admit(rig.request(f"r{number}", *path))
        ready = [name for name, r in rig.requests.items() if not r.loading_tokens]
        pool = worker.start(rig.step(**dict.fromkeys(ready, 2)), pool)
        time.sleep(rng.choice([0, 0.02]))
        output = worker.poll()
        for event in output.completed_store_events:
            assert rig.stores[0][0] == event
            rig.store_arrives()
        heard = output.finished_recving
        while heard:
            names = rig.loads[0][0]
            assert heard[: len(names)] == names
            heard = heard[len(names) :]
            rig.load_arrives()
        if ready and shared.random() < 0.5:
            rig.finish(ready[0])
        if number % 9 == 8:
            rig.forget_device()
    assert worker.blocks_loaded > 0
    print(worker.plan_digest.hex(), flush=True)


def main(address, num_processes, process, case):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, int(num_processes), int(process))
    rng = random.Random(int(process))
    if case == "agree, then differ":
        agree(rng)
        differ(int(process))
    else:
        schedule(rng, random.Random(0))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
