"""One of the processes of test_processes.py.

python -m tests.transfer.process_cases ADDRESS NUM_PROCESSES PROCESS
"""

import sys

import jax
import numpy as np

from jaxkv.transfer import Compression, TransferEngine
from tests.transfer.shadow import Shadow, bits, random_array

P = jax.sharding.PartitionSpec
NUM_BLOCKS, HEADS, NUM_HOST_BLOCKS = 16, 8, 24
SPECS = {
    "by blocks": P("blocks"),
    "by heads": P(None, None, "heads"),
    "by both": P("blocks", None, "heads"),
}


def global_pool(arrays, place):
    def put(array):
        return jax.make_array_from_callback(
            array.shape, place, lambda index: jax.numpy.array(array[index])
        )

    return jax.tree.map(put, arrays)


def check(pool, shadow):
    """Compare the shards of this process."""
    for mine, leaf in zip(shadow.leaves, jax.tree.leaves(pool), strict=True):
        assert len(leaf.addressable_shards) == 2
        assert not leaf.is_fully_addressable
        for shard in leaf.addressable_shards:
            assert (bits(shard.data) == bits(mine[shard.index])).all(), shard.device


def round_trips(mesh_shape, spec, mode):
    devices = np.array(jax.devices()).reshape(mesh_shape)
    mesh = jax.sharding.Mesh(devices, ("blocks", "heads"))
    place = jax.sharding.NamedSharding(mesh, spec)
    rng = np.random.default_rng(0)  # The same in all processes, and so are the calls.
    shape = (NUM_BLOCKS, 2, HEADS, 4)
    arrays = [random_array(rng, shape, dtype) for dtype in ("bfloat16", "int8")]
    pool, shadow = global_pool(arrays, place), Shadow(arrays)
    num_shards = mesh.shape["blocks"] if "blocks" in spec else 1
    # Each shard has room for all blocks, since they are dealt at random.
    room = NUM_HOST_BLOCKS * num_shards
    engine = TransferEngine(pool, room, mode=mode, layer_groups=2)
    shard_blocks = NUM_BLOCKS // num_shards
    shard_of = {}
    for _ in range(3):
        device_ids = rng.permutation(NUM_BLOCKS)[:12]
        host_ids = rng.permutation(NUM_HOST_BLOCKS)[:12]
        # Of several saves in flight, some may be over in one process before another.
        for part in np.split(np.arange(12), 3):
            engine.save(pool, device_ids[part], host_ids[part])
        shadow.save(device_ids, host_ids)
        shards = (device_ids // shard_blocks).tolist()
        shard_of.update(zip(host_ids.tolist(), shards, strict=True))
        pool, done = engine.drain(pool)
        assert [each.error for each in done] == [None] * 3
        pairs = []
        for device_id in rng.permutation(NUM_BLOCKS).tolist():
            here = [h for h in shard_of if shard_of[h] == device_id // shard_blocks]
            if here:
                pairs.append((int(rng.choice(here)), device_id))
        host_ids, device_ids = zip(*pairs, strict=True)
        pool, _ = engine.load(pool, host_ids, device_ids)
        shadow.load(host_ids, device_ids)
        pool, [done] = engine.drain(pool)
        assert done.error is None, done.error
        check(pool, shadow)
    # Each process allocates memory for its own shards.
    small = TransferEngine(pool, host_bytes=1 << 20, mode=mode)
    assert 0 < small.host_bytes <= 1 << 20
    engine._table.check()
    assert engine.bytes_in_flight == engine._table.num_pins == 0


def compressed(mode):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("blocks", "heads"))
    place = jax.sharding.NamedSharding(mesh, P("blocks", None, "heads"))
    values = np.random.default_rng(1).standard_normal((NUM_BLOCKS, 2, HEADS, 4))
    values = values.astype(np.float32)
    pool = global_pool(values, place)
    engine = TransferEngine(pool, 16, mode=mode, compression=Compression("int8"))
    engine.save(pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool, _ = engine.drain(pool)
    empty = global_pool(values * 0, place)
    pool, _ = engine.load(empty, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool, [done] = engine.drain(pool)
    assert done.error is None, done.error
    bound = np.abs(values).max() / 253
    for shard in pool.addressable_shards:
        assert (np.abs(np.array(shard.data) - values[shard.index]) <= bound).all()


# Each spec once, and both modes for shards of both axes.
CASES = [
    ("fused", "by blocks"),
    ("staged", "by heads"),
    ("fused", "by both"),
    ("staged", "by both"),
    ("staged", "int8"),
]


def main(address, num_processes, process):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, int(num_processes), int(process))
    assert len(jax.devices()) == 2 * len(jax.local_devices()) == 4
    shapes = {"by blocks": (4, 1), "by heads": (1, 4), "by both": (2, 2)}
    for mode, name in CASES:
        if name == "int8":
            compressed(mode)
        else:
            round_trips(shapes[name], SPECS[name], mode)
        print(f"{mode}, {name}: as it should be", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
