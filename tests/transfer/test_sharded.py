"""Pools that are spread over 4 and 8 devices, in every way a block may be cut."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression
from tests.transfer.numbered import Moves, check_at_rest, programs_of
from tests.transfer.shadow import Shadow, bits, random_array

P = jax.sharding.PartitionSpec
COLLECTIVES = re.compile(
    r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
)
NUM_BLOCKS, HEADS = 16, 4
# Devices -> the mesh's axes "blocks" and "heads".
MESHES = {1: (1, 1), 4: (2, 2), 8: (4, 2)}
SPECS = {
    "by heads": P(None, None, "heads"),
    "by blocks": P("blocks"),
    "by both": P("blocks", None, "heads"),
    "by both at once": P(("heads", "blocks")),
    "replicated": P(),
}
AXIS_TYPES = ["Auto", "Explicit"]
BOTH_MODES = pytest.mark.parametrize("mode", ["fused", "staged"])


def mesh_of(num_devices, axis_type="Auto"):
    devices = np.array(jax.devices()[:num_devices]).reshape(MESHES[num_devices])
    types = (getattr(jax.sharding.AxisType, axis_type),) * 2
    return jax.sharding.Mesh(devices, ("blocks", "heads"), axis_types=types)


def random_arrays(rng, dtype="bfloat16"):
    """Two layers, and a leaf with other axes."""
    kv = [random_array(rng, (NUM_BLOCKS, 2, HEADS, 8), dtype) for _ in range(2)]
    return {"kv": kv, "scale": random_array(rng, (HEADS, NUM_BLOCKS), "int32")}


BLOCK_AXIS = {"kv": 0, "scale": 1}


def shardings(mesh, spec):
    entries = (*spec, *[None] * 3)[:3]
    of_scale = P(entries[2], entries[0])
    kv = jax.sharding.NamedSharding(mesh, spec)
    return {"kv": [kv, kv], "scale": jax.sharding.NamedSharding(mesh, of_scale)}


def to_devices(arrays, places):
    """Each shard in its own memory: NumPy's could not be donated."""

    def put(array, place):
        return jax.make_array_from_callback(
            array.shape, place, lambda index: jnp.array(array[index])
        )

    return jax.tree.map(put, arrays, places)


def shards_of(mesh, spec):
    entry = spec[0] if len(spec) else None
    names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def pointers(arrays):
    return {
        shard.data.unsafe_buffer_pointer()
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
    }


def extents(engine):
    return [extent for extent in engine._queue._memory._extents if extent is not None]


def check_extents(engine, mesh):
    """Extents are in pinned memory, spread over the devices as the pool is."""
    layout = engine._copier.extents
    assert extents(engine)
    for extent in extents(engine):
        for bundle, array in zip(layout.bundles, extent, strict=True):
            leaf = layout.pool.leaves[bundle.leaves[0]]
            spec = P(*[None] * layout.stacked, *leaf.spec)
            wanted = jax.sharding.NamedSharding(mesh, spec, memory_kind="pinned_host")
            assert array.sharding.memory_kind == "pinned_host"
            assert array.sharding.is_equivalent_to(wanted, array.ndim), array.sharding


def deal(rng, num_shards, n, m):
    """Device blocks i32[n, m], each row in one shard, and the shards of the rows."""
    shard_blocks = NUM_BLOCKS // num_shards
    rows = np.stack([rng.permutation(shard_blocks) for _ in range(num_shards)])
    rows = (rows + shard_blocks * np.arange(num_shards)[:, None]).reshape(-1, m)
    rows = rng.permutation(rows)[:n]
    return rows, rows[:, 0] // shard_blocks


def check_no_collectives(*programs):
    for program in programs:
        assert not COLLECTIVES.findall(program.as_text())


def round_trips(num_devices, spec, axis_type, mode, m=1, rounds=4, **options):
    mesh = mesh_of(num_devices, axis_type)
    rng = np.random.default_rng(num_devices)
    arrays, places = random_arrays(rng), shardings(mesh, spec)
    pool, shadow = to_devices(arrays, places), Shadow(arrays, BLOCK_AXIS)
    num_shards = shards_of(mesh, spec)
    options |= {"blocks_per_host_block": m, "block_axis": BLOCK_AXIS}
    moves = Moves(mode, pool, 32 // m, **options)
    engine = moves.engine
    assert engine.kernel == options.get("kernel", "xla")
    check_no_collectives(*programs_of(engine))
    pool_memory, host_memory = pointers(pool), pointers(extents(engine))
    shard_of = {}
    for _ in range(rounds):
        device_ids, shards = deal(rng, num_shards, int(rng.integers(1, 12 // m)), m)
        host_ids = rng.permutation(32 // m)[: len(device_ids)]
        # Of several saves, some may be over in one process before another.
        for part in np.array_split(np.arange(len(host_ids)), 3):
            moves.save(device_ids[part], host_ids[part])
        shadow.save(device_ids, host_ids)
        shard_of.update(zip(host_ids.tolist(), shards.tolist(), strict=True))
        assert [completion.error for completion in moves.drain()] == [None] * 3
        device_ids, shards = deal(rng, num_shards, NUM_BLOCKS // m, m)
        pairs = []
        for row, shard in zip(device_ids, shards, strict=True):
            in_shard = [h for h in shard_of if shard_of[h] == shard]
            if in_shard and rng.random() < 0.7:
                pairs.append((int(rng.choice(in_shard)), row))
        host_ids = [host_id for host_id, _ in pairs]
        device_ids = np.array([row for _, row in pairs], int).reshape(-1, m)
        moves.load_now(host_ids, device_ids)
        shadow.load(host_ids, device_ids)
        pool = moves.pool
        for leaf, place in zip(*map(jax.tree.leaves, (pool, places)), strict=True):
            assert leaf.sharding.is_equivalent_to(place, leaf.ndim), leaf.sharding
            assert leaf.sharding.memory_kind == place.memory_kind
        check_every_copy(pool, shadow)
        if num_devices > 1:
            check_extents(engine, mesh)
        assert pointers(pool) == pool_memory, "the pool has moved"
        if mode == "fused":
            assert pointers(extents(engine)) == host_memory, "extents have moved"
    check_at_rest(engine)


def check_every_copy(pool, shadow):
    """Compare the bytes on each device, since replicas of a shard could differ."""
    leaves = jax.tree.leaves(pool)
    for mine, leaf, axis in zip(shadow.leaves, leaves, shadow.axes, strict=True):
        whole = np.moveaxis(mine, 0, axis)
        assert leaf.dtype == whole.dtype
        for shard in leaf.addressable_shards:
            assert (bits(shard.data) == bits(whole[shard.index])).all(), shard.device


def compressed(num_devices, spec, mode):
    mesh = mesh_of(num_devices)
    rng = np.random.default_rng(3)
    values = rng.standard_normal((NUM_BLOCKS, 2, HEADS, 8)).astype(np.float32)
    # Shards of a block have different ranges.
    values *= 10.0 ** rng.integers(-3, 4, (1, 1, HEADS, 1)).astype(np.float32)
    place = jax.sharding.NamedSharding(mesh, spec)
    pool = to_devices(values, place)
    moves = Moves(mode, pool, compression=Compression("int8"))
    check_no_collectives(*programs_of(moves.engine))
    ids = np.arange(NUM_BLOCKS)
    moves.save_now(ids, ids + 5)
    moves.pool = to_devices(values * 0, place)
    moves.load_now(ids + 5, ids)
    assert moves.pool.sharding.is_equivalent_to(place, pool.ndim)
    peak = np.broadcast_to(np.abs(values).max((1, 3), keepdims=True), values.shape)
    for shard in moves.pool.addressable_shards:
        error = np.abs(np.array(shard.data) - values[shard.index])
        assert (error <= peak[shard.index] / 253).all()


@BOTH_MODES
@pytest.mark.parametrize("number", range(len(SPECS)), ids=SPECS)
def test_blocks_spread_in_any_way_keep_every_bit(number, mode):
    # Each spec on both meshes, one in each mode; each mesh in both modes, and with both
    # types.
    is_staged, spec = mode == "staged", [*SPECS.values()][number]
    axis_type = AXIS_TYPES[(number // 2 + is_staged) % 2]
    round_trips((4, 8)[(number + is_staged) % 2], spec, axis_type, mode)


@BOTH_MODES
@pytest.mark.parametrize(
    ("num_devices", "axis_type", "options"),
    [
        (1, "Auto", {}),
        (4, "Auto", {"m": 2}),
    ],
)
def test_blocks_spread_by_both_axes_keep_every_bit(
    num_devices, axis_type, options, mode
):
    round_trips(num_devices, SPECS["by both"], axis_type, mode, **options)


def test_asynchronous_copies_keep_every_bit_of_shards():
    # They are interpreted, which takes a while to compile: here for one extent at once.
    options = {"rounds": 2, "kernel": "dma", "staging_bytes": 2200}
    round_trips(4, SPECS["by both"], "Explicit", "staged", **options)


@pytest.mark.parametrize(
    ("num_devices", "spec", "mode"),
    [
        (8, SPECS["by both"], "fused"),
        (8, SPECS["by both"], "staged"),
        (4, P("blocks", "heads"), "fused"),
    ],
)
def test_shards_are_compressed_each_by_its_own_range(num_devices, spec, mode):
    compressed(num_devices, spec, mode)


def pool_by_blocks():
    place = jax.sharding.NamedSharding(mesh_of(4), P("blocks"))
    values = np.arange(NUM_BLOCKS * 8, dtype=np.float32).reshape(NUM_BLOCKS, 8)
    return values, to_devices(values, place)


def test_blocks_of_other_shards_are_refused(make):
    values, pool = pool_by_blocks()
    moves, pairs = make(pool, 8), make(pool, 8, blocks_per_host_block=2)
    moves.save_now([1, 9], [0, 1])

    def refuse(message, function, *args):
        with pytest.raises(ValueError, match=message):
            function(*args)

    refuse(r"\[8\]\] are of the shards \[1\]", moves.load, [1, 0], [9, 8])
    assert (np.array(pool) == values).all()
    message = r"\[\[7, 8\]\] are of several shards: .* in runs of 8"
    refuse(message, pairs.save, [[0, 1], [7, 8]], [0, 1])
    pairs.save_now([[0, 1], [8, 9]], [0, 1])
    refuse(message, pairs.load, [0, 1], [[0, 1], [7, 8]])
    refuse("of the shards", pairs.load, [0, 1], [[0, 1], [-1, 7]])


@pytest.mark.parametrize("others_wait", [False, True])
def test_a_shard_that_is_full_fails_the_save_and_loses_nothing(make, others_wait):
    values, pool = pool_by_blocks()
    moves = make(pool, 8)
    moves.save_now([0, 8], [6, 7])
    # Of the host's eight blocks, half are meant for the first shard.
    failing = moves.save([1, 2, 3, 4, 5, 6], range(6))
    after = [moves.save([9], [0])] if others_wait else []
    done = moves.drain()
    assert [completion.ticket for completion in done] == [failing, *after], done
    assert isinstance(done[0].error, MemoryError), done
    message = "the extents of the shards [0] are full; make the host tier larger, or"
    assert message in str(done[0].error)
    assert [completion.error for completion in done[1:]] == [None] * len(after)
    check_at_rest(moves.engine)
    # Older blocks are intact, and there is as much room as before.
    moves.save_now([1, 2, 3, 9, 10, 11], range(6))
    moves.load_now([6, 7, 0, 3], [4, 12, 5, 13])
    values[[4, 12, 5, 13]] = values[[0, 8, 1, 9]]
    assert (np.array(moves.pool) == values).all()


@pytest.mark.parametrize("axis_type", AXIS_TYPES)
def test_a_gather_by_ids_of_all_shards_has_a_collective(axis_type):
    """Otherwise the search for collectives above would prove nothing."""
    mesh = mesh_of(4, axis_type)
    place = jax.sharding.NamedSharding(mesh, P("blocks"))
    everywhere = jax.sharding.NamedSharding(mesh, P())
    pool = jax.ShapeDtypeStruct((NUM_BLOCKS, 8), jnp.float32, sharding=place)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=everywhere)

    def gather(pool, ids):
        return pool.at[ids].get(out_sharding=everywhere)

    if axis_type == "Auto":
        gather = jax.jit(lambda pool, ids: pool[ids], out_shardings=everywhere)
    text = jax.jit(gather).lower(pool, ids).compile().as_text()
    assert COLLECTIVES.search(text), text
