"""One of the processes of test_processes.py, some of whose transfers fail.

python -m tests.transfer.outcome_cases ADDRESS NUM_PROCESSES PROCESS END TIMEOUT_S
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import DeviceBlockPool, OffloadScheduler, OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, OffloadMetadata, SchedulerOutput
from jaxkv.scheduling.worker import watchdog
from jaxkv.scheduling.worker.worker import AgreementError, PlanMismatchError

P = jax.sharding.PartitionSpec
NUM_BLOCKS, NUM_HOST_BLOCKS, NUM_STEPS = 16, 16, 14
NUM_DEVICES = 4
LOAD_AFTER = 4  # Steps from the store of a key to its load
FAILED_STORE, FAILED_LOAD = 4, 9
LOST_TIMEOUT_S = 4.0
SETTINGS_TIMEOUT_S = 60.0


@jax.jit
def model(pool, block, value):
    """Write a block; the value depends on all devices, so they have to synchronise.

    No value is negative, but XLA does not know it.
    """
    return pool.at[block].set(value + jnp.minimum(pool[block].sum(), 0))


def value_of(key):
    return np.int32(1000 + key)


def plan(number):
    """Store the block of a new key, and load the block of an older one.

    The block of a key goes into the host block of its number.
    """
    key = number - LOAD_AFTER
    is_loading = key >= 0 and key != FAILED_STORE
    return OffloadMetadata(
        load_event=number if is_loading else NO_EVENT,
        load_device_blocks=(8 + number % 8,) if is_loading else (),
        load_host_blocks=(key,) if is_loading else (),
        load_event_to_reqs={number: (f"r{number}",)} if is_loading else {},
        store_event=number,
        store_device_blocks=(number % 8,),
        store_host_blocks=(number,),
        need_flush=False,
    )


def check_loads(output, pool):
    for name in output.finished_recving:
        number = int(name[1:])
        for shard in pool.addressable_shards:
            loaded = np.array(shard.data)[8 + number % 8].tolist()
            expected = [value_of(number - LOAD_AFTER)] * len(loaded)
            assert loaded == expected, (name, loaded)
        print("a load has brought the right bytes", flush=True)


def fail(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no staging memory")


def serve(engine, worker, pool, process, num_processes):
    """Serve some steps with failing transfers, each in one process."""
    copier = engine._copier
    for number in range(NUM_STEPS):
        pool = model(pool, np.int32(number % 8), value_of(number))
        programs = copier.save_program, copier.load_program
        if number == FAILED_STORE and process == 1:
            copier.save_program = fail
        if number == FAILED_LOAD and process == num_processes - 1:
            copier.load_program = fail
        pool = worker.start(plan(number), pool)
        copier.save_program, copier.load_program = programs
        # Each process is late by another time.
        time.sleep(0.01 * (number * (process + 1) % 3))
        output = worker.poll()
        assert (FAILED_STORE in output.failed_store_events) == (
            number == FAILED_STORE + 2
        )
        assert (f"r{FAILED_LOAD}" in output.failed_recving) == (
            number == FAILED_LOAD + 2
        )
        check_loads(output, pool)
        print(f"reported in step {number}: {output}", flush=True)
    pool, output = worker.drain(pool)
    check_loads(output, pool)
    print(f"reported at the end: {output} {worker.plan_digest.hex()}", flush=True)
    return pool


def differ(worker, pool, process):
    host_blocks = (NUM_STEPS + (process == 0),)
    differing = dataclasses.replace(plan(NUM_STEPS), store_host_blocks=host_blocks)
    try:
        worker.start(differing, pool)
    except PlanMismatchError as error:
        print(error, flush=True)
    worker.drain(pool)


def differ_in_a_setting(engine, pool, process):
    """Serve with schedulers of which the last has another policy; none has moves."""
    policy = "arc" if process == jax.process_count() - 1 else "lru"
    scheduler = OffloadScheduler(4, NUM_HOST_BLOCKS, policy)
    scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    worker = OffloadWorker(engine, report_after_steps=2)
    end_s = time.monotonic() + SETTINGS_TIMEOUT_S
    while time.monotonic() < end_s:
        meta = scheduler.build_connector_meta(SchedulerOutput({}))
        try:
            pool = worker.start(meta, pool)
        except PlanMismatchError as error:
            print(error, flush=True)
            return
        time.sleep(0.01)


def lose_one(engine, pool, process, num_processes, end):
    """Lose the last process; the others have to notice and raise."""
    watchdog._MIN_LIMIT_S = watchdog._MARGIN_S = 1.0  # Everything is compiled.
    worker = OffloadWorker(
        engine,
        report_after_steps=2,
        agreement_timeout_s=LOST_TIMEOUT_S,
    )
    pool = worker.start(plan(0), pool)
    pool, _ = worker.drain(pool)
    if process == num_processes - 1:
        if end == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1e6)
    if end == "hang":
        # The devices, and so any use of the pool, wait for the lost process.
        pool = model(pool, np.int32(1), value_of(1))
    print("alone", flush=True)
    start_s = time.monotonic()
    try:
        pool = worker.start(plan(1), pool)
        if end == "die" and process % 2:
            worker.drain(pool)  # The others wait for the outcomes as steps start.
        for number in (2, 3):
            pool = worker.start(plan(number), pool)
    except AgreementError as error:
        duration_s = time.monotonic() - start_s
        print(f"AgreementError after {duration_s:.2f} s: {error}", flush=True)


def leave(process, num_processes, timeout_s):
    """Exit at once: jax would wait for the lost process. The first one exits last.

    It runs the coordination service, without which jax ends the others. The service may
    have found the lost process out by now, and refuse every call.
    """
    client = jax._src.distributed.global_state.client
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        if process:
            client.key_value_set(f"left/{process}", "")
        else:
            for peer in range(1, num_processes - 1):
                client.blocking_key_value_get(f"left/{peer}", int(1e3 * timeout_s))
    os._exit(0)


def main(address, num_processes, process, end, timeout_s):
    num_processes, process, timeout_s = int(num_processes), int(process), int(timeout_s)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // num_processes)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, num_processes, process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("heads",))
    place = jax.sharding.NamedSharding(mesh, P(None, "heads"))
    array = np.zeros((NUM_BLOCKS, NUM_DEVICES), np.int32)
    pool = jax.make_array_from_callback(
        array.shape, place, lambda index: jnp.array(array[index])
    )
    engine = TransferEngine(pool, NUM_HOST_BLOCKS)
    worker = OffloadWorker(
        engine,
        report_after_steps=2,
        check_plans=True,
        agreement_timeout_s=timeout_s,
    )
    pool = serve(engine, worker, pool, process, num_processes)
    differ(worker, pool, process)
    differ_in_a_setting(engine, pool, process)
    lose_one(engine, pool, process, num_processes, end)
    leave(process, num_processes, timeout_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
