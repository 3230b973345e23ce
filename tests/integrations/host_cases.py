"""One of the hosts of test_hosts.py, with two chips and a worker's half.

python -m tests.integrations.host_cases ADDRESS NUM_HOSTS HOST FOLDER

The hosts go one after the other, the last one first: none waits for another.
"""

import dataclasses
import functools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxkv.integrations.vllm import worker
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.ranks import StepMetadata
from jaxkv.integrations.vllm.worker import WorkerHalf
from jaxkv.scheduling.protocol import NO_MOVES, TierBatch, TierMoves
from jaxkv.transfer import TransferEngine
from tests.rigs.fake_vllm import make_configs

NUM_BLOCKS, SHAPE = 24, (24, 2, 8, 4)
STORED, LOADED, ON_HOST, FETCHED = (
    tuple(range(first, first + 6)) for first in (1, 9, 20, 3)
)
HEADS = jax.P(None, None, "model")
KEYS = tuple(bytes([number]) * 32 for number in range(6))


def content(layer):
    """The contents of a layer's blocks, f32[SHAPE]."""
    return np.random.default_rng(layer).standard_normal(SHAPE).astype(np.float32)


def make_caches(mesh, spec=HEADS):
    """Return two layers that are spread over the hosts."""
    sharding = jax.NamedSharding(mesh, spec)
    return [
        jax.make_array_from_callback(SHAPE, sharding, content(layer).__getitem__)
        for layer in range(2)
    ]


def make_half(num_hosts, caches, **extra):
    group = SimpleNamespace(bundle_specs=[{"TPU": 2}] * num_hosts)
    config = ConnectorConfig.of(
        *make_configs(parallel_config__placement_group=group, extra=extra)
    )
    half = WorkerHalf(config)
    runner = SimpleNamespace(kv_caches=caches)
    half.register_runner(runner)
    return half, runner


def run(half, **moves):
    """Carry out a plan; return what has moved to or from the store."""
    below, awaits_store = [], "below" in moves
    # As in tpu-inference's runner.
    with jax.set_mesh(half._runner.kv_caches[0].sharding.mesh):
        half.start(StepMetadata(dataclasses.replace(NO_MOVES, **moves)))
        while half._worker.num_in_flight or (awaits_store and not below):
            half.start(StepMetadata(NO_MOVES))
            done = half.poll()
            assert not done.failed_recving
            assert not done.failed_store_events
            below += [
                report for report in done.below if report.written or report.fetched
            ]
            time.sleep(1e-3)
    return below


def store(half):
    run(half, store_event=0, store_device_blocks=STORED, store_host_blocks=ON_HOST)


def load(half, host_blocks, event):
    run(
        half,
        load_event=event,
        load_device_blocks=LOADED,
        load_host_blocks=host_blocks,
        load_event_to_reqs={event: ("r",)},
        load_sizes=(6,),
    )


def check(caches):
    """The blocks loaded are those stored, in this host's shards."""
    for layer, cache in enumerate(caches):
        assert not cache.is_fully_addressable
        expected = content(layer)
        expected[list(LOADED)] = expected[list(STORED)]
        for shard in cache.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])


def serve_alone(num_hosts, mesh, folder):
    """Store and load, through a store, too; return caches, and the store's settings."""
    for mode in ("staged", "fused"):
        # As on a TPU, and as on a CPU.
        worker.TransferEngine = functools.partial(TransferEngine, mode=mode)
        half, runner = make_half(num_hosts, make_caches(mesh))
        store(half)
        load(half, ON_HOST, 1)
        check(runner.kv_caches)

    storage = {"storage": str(folder / "store"), "storage_bytes": "1MiB"}
    storage |= {"storage_namespace": "the caches'", "storage_deadline_s": 600}
    half, runner_beside_store = make_half(num_hosts, make_caches(mesh), **storage)
    store(half)
    batch = TierBatch(0, KEYS, ON_HOST, tuple(range(6)))
    (report,) = run(half, below=(TierMoves(writes=(batch,)),))
    assert report.written == ((0, (True,) * 6),)
    assert fetch(half) == ((1, (True,) * 6),)
    load(half, FETCHED, 1)
    check(runner_beside_store.kv_caches)
    half.shut_down()
    return runner.kv_caches, storage


def fetch(half):
    batch = TierBatch(1, KEYS, FETCHED, tuple(range(6)))
    (report,) = run(half, below=(TierMoves(fetches=(batch,)),))
    return report.fetched


def fetch_on(num_hosts, mesh, storage, is_there):
    """Fetch blocks that engines with other meshes have written, and check them."""
    half, runner = make_half(num_hosts, make_caches(mesh), **storage)
    assert fetch(half) == ((1, (is_there,) * 6),)
    if is_there:
        load(half, FETCHED, 2)
        check(runner.kv_caches)
    half.shut_down()


def listed(num_hosts, mesh, storage):
    """List the store; return the keys found, and whether this host says it is over."""
    half, _ = make_half(num_hosts, make_caches(mesh), **storage)
    keys, is_listed = [], False
    num_polls = 0
    while not is_listed and not (jax.process_index() and num_polls == 50):
        num_polls += 1
        half.start(StepMetadata(NO_MOVES))
        for report in half.poll().below:
            keys += report.found
        said = half.take_report()
        is_listed |= said is not None and said.is_listed
        time.sleep(0.01)
    half.shut_down()
    return sorted(keys), is_listed


def main(address, num_hosts, host, folder):
    os.environ["PYTHONHASHSEED"] = "0"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    num_hosts, host, folder = int(num_hosts), int(host), Path(folder)
    jax.distributed.initialize(address, num_hosts, host)
    devices = np.array(jax.devices())  # It waits for all hosts.
    turns = [folder / f"host {number} is done" for number in range(num_hosts)]
    while host + 1 < num_hosts and not turns[host + 1].exists():
        time.sleep(0.01)
    in_a_row = jax.sharding.Mesh(devices, "model")
    # A mesh has the order of its links.
    mixed = jax.sharding.Mesh(devices.reshape(2, 2).T.ravel(), "model")
    copies = jax.sharding.Mesh(devices.reshape(2, 2), ("model", "copy"))
    for mesh in (in_a_row, mixed, copies):
        caches, storage = serve_alone(num_hosts, mesh, folder)
        # The first host lists, and finds what all have written with this placement.
        listing = listed(num_hosts, mesh, storage)
        assert listing == (([], False) if host else (list(KEYS), True)), listing
    # Chips of one host in another order share its part; hosts in another order do not.
    for order, is_there in (((1, 0, 3, 2), True), ((2, 3, 0, 1), False)):
        mesh = jax.sharding.Mesh(devices[list(order)], "model")
        fetch_on(num_hosts, mesh, storage, is_there)
    both = jax.P("model", None, "copy")
    for wrong, hosts, text in (
        (make_caches(copies, both), num_hosts, "only one axis may be sharded"),
        (make_caches(mixed), num_hosts + 1, f"{num_hosts} processes share the mesh"),
    ):
        with pytest.raises(ValueError, match=text):
            make_half(hosts, wrong)
    turns[host].touch()
    while not all(turn.exists() for turn in turns):  # Gloo waits for half a minute.
        time.sleep(0.01)
    # The model's programs read all hosts' shards, and the blocks that each has loaded.
    total = jax.jit(lambda trees: sum(tree.sum() for tree in trees))(caches)
    expected = [content(layer) for layer in range(2)]
    for layer in expected:
        layer[list(LOADED)] = layer[list(STORED)]
    np.testing.assert_allclose(total, np.sum(expected, dtype=np.float64), rtol=1e-3)
    print("as it should be", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
