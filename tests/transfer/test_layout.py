"""Layouts of pools, and the pools that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.transfer import PoolLayout, TransferEngine, memory

CPU = jax.devices("cpu")[0]


def zeros(shape, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), CPU)


def mesh_of(num_devices, axis="x"):
    return jax.make_mesh(
        (num_devices,),
        (axis,),
        (jax.sharding.AxisType.Explicit,),
        devices=jax.devices("cpu")[:num_devices],
    )


def test_layout_describes_a_mixed_pool():
    pool = {
        "kv": [zeros((6, 4, 2), jnp.bfloat16), zeros((6, 4, 2), jnp.bfloat16)],
        "scale": zeros((6,)),
        "q": zeros((6, 4, 2), jnp.int8),
    }
    layout = PoolLayout.of(pool)
    assert layout.num_blocks == 6
    assert layout.block_bytes == 2 * 16 + 4 + 8
    assert [leaf.name for leaf in layout.leaves] == [
        "pool['kv'][0]",
        "pool['kv'][1]",
        "pool['q']",
        "pool['scale']",
    ]
    assert hash(layout) == hash(PoolLayout.of(pool))
    leaves = layout.flatten(pool)
    assert jax.tree.structure(layout.unflatten(leaves)) == jax.tree.structure(pool)


def test_layout_accepts_any_sharding_over_one_device():
    mesh = mesh_of(1)
    pool = jax.device_put(zeros((6, 4)), NamedSharding(mesh, PartitionSpec("x")))
    layout = PoolLayout.of(pool)
    assert layout.flatten(pool)[0] is pool
    layout.flatten(zeros((6, 4)))


def test_a_described_pool_has_the_layout_of_its_arrays():
    """So that programs can be compiled for devices that are not there."""
    pool = [zeros((6, 4, 2), jnp.bfloat16), zeros((3, 6))]
    axes = [0, 1]
    specs = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for leaf in pool
    ]
    assert PoolLayout.of(specs, axes) == PoolLayout.of(pool, axes)
    # One description may stand for several arrays, as it has no memory.
    same = PoolLayout.of([specs[0]] * 2)
    assert [leaf.shape for leaf in same.leaves] == [(6, 4, 2)] * 2
    assert same.device == CPU


def test_devices_may_stand_in_for_those_of_another_platform():
    pool = [zeros((6, 4))]
    assert PoolLayout.of(pool).platform == "cpu"
    assert PoolLayout.of(pool, compiled_for="gpu").platform == "gpu"


def test_a_pool_described_without_a_sharding_is_refused():
    spec = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    with pytest.raises(ValueError, match=r"pool\[0\] is described without a sharding"):
        PoolLayout.of([spec])


def spread(mesh_axis, block_axis):
    """An array over two devices, whose blocks are spread over `block_axis`."""
    sharding = NamedSharding(mesh_of(2, mesh_axis), PartitionSpec(block_axis))
    return jax.device_put(np.zeros((4, 2), np.float32), sharding)


@pytest.mark.parametrize(
    ("make_pool", "message"),
    [
        (lambda: {}, "pool has no leaves"),
        (lambda: [np.zeros((4, 2))], r"pool\[0\] must be a jax.Array outside jit"),
        (lambda: [zeros(())], r"pool\[0\] has shape \(\); it must have a block axis"),
        (lambda: [zeros((0, 4))], "at least one element"),
        (lambda: [zeros((4, 0))], "at least one element"),
        (lambda: [zeros((4, 2), jnp.int4)], "int4, less than a byte per element"),
        (lambda: [jax.random.split(jax.random.key(0), 4)], "must hold plain data"),
        (lambda: [zeros((4, 2)), zeros((5, 2))], r"pool\[1\] has 5 blocks and pool"),
        (
            lambda: [zeros((4,)), jax.device_put(zeros((4,)), jax.devices("cpu")[1])],
            r"pool\[1\] is on .* all leaves must be on the same devices",
        ),
        (
            lambda: jax.device_put(zeros((4, 2)), memory.host_sharding(CPU)),
            "pool is in 'pinned_host'; a pool must be in the device's default memory",
        ),
        (
            lambda: [spread("x", "x"), spread("y", "y")],
            r"pool\[1\] and pool\[0\] are sharded over two meshes",
        ),
        (
            lambda: [spread("x", "x"), spread("x", None)],
            r"block axis of pool\[1\] is sharded over nothing and .* \('x',\)",
        ),
    ],
)
def test_a_pool_that_cannot_be_offloaded_is_refused(make_pool, message):
    with pytest.raises(ValueError, match=message):
        TransferEngine(make_pool(), 4)


@pytest.mark.parametrize(
    ("block_axis", "message"),
    [
        (2, r"block_axis 2 of pool\['k'\] must be an int in \[-2, 2\): .* \[6, 4\]"),
        ({"k": 0, "v": 1.0}, r"block_axis 1.0 of pool\['v'\] must be an int"),
        ({"k": 0}, "must be an int, or a tree of ints shaped like the top of the pool"),
        (
            {"k": 0, "v": 1},
            r"pool\['v'\] has 4 blocks and pool\['k'\] 6; .* \(here 1 of",
        ),
    ],
)
def test_a_wrong_block_axis_is_refused(block_axis, message):
    pool = {"k": zeros((6, 4)), "v": zeros((6, 4))}
    with pytest.raises(ValueError, match=message):
        TransferEngine(pool, 4, block_axis=block_axis)


def test_leaves_may_have_different_block_axes():
    pool = {"kv": [zeros((3, 6, 4)), zeros((4, 6, 3))], "scale": zeros((6,))}
    layout = PoolLayout.of(pool, {"kv": -2, "scale": 0})
    assert [leaf.block_axis for leaf in layout.leaves] == [1, 1, 0]
    assert layout.num_blocks == 6
    assert layout.block_bytes == 4 * (12 + 12 + 1)


def test_a_pool_is_refused_inside_jit():
    with pytest.raises(ValueError, match="outside jit"):
        jax.jit(lambda pool: TransferEngine(pool, 4))(zeros((4, 2)))


@pytest.mark.parametrize(
    ("make_pool", "message"),
    [
        (lambda: zeros((4, 2)), "must have the structure"),
        (lambda: [zeros((4, 2)), np.zeros((4,), np.int8)], "must be a jax.Array"),
        (lambda: [zeros((5, 2)), zeros((4,), jnp.int8)], r"float32\[4, 2\], not float"),
        (lambda: [zeros((4, 2)), zeros((4,), jnp.uint8)], r"int8\[4\], not uint8"),
        (
            lambda: jax.device_put(
                [zeros((4, 2)), zeros((4,), jnp.int8)], jax.devices("cpu")[1]
            ),
            "must be placed as .*, not as .*id=1",
        ),
        (
            lambda: jax.device_put(
                [zeros((4, 2)), zeros((4,), jnp.int8)], memory.host_sharding(CPU)
            ),
            "must be placed as .*, not as .*pinned_host",
        ),
    ],
)
def test_a_pool_of_another_layout_is_refused(make_pool, message):
    pool = [zeros((4, 2)), zeros((4,), jnp.int8)]
    layout = PoolLayout.of(pool)
    for _ in range(2):  # Also after one that fits, which is remembered.
        with pytest.raises(ValueError, match=message):
            layout.flatten(make_pool())
        assert layout.flatten(pool) == pool


def test_a_deleted_pool_is_refused():
    pool = [zeros((4, 2))]
    layout = PoolLayout.of(pool)
    layout.flatten(pool)
    pool[0].delete()
    with pytest.raises(RuntimeError, match="pass the pool that the last load"):
        layout.flatten(pool)
    with pytest.raises(RuntimeError, match="deleted or donated"):
        PoolLayout.of(pool)


def test_a_pool_that_has_an_array_twice_is_refused():
    leaf, other = zeros((4, 2)), zeros((4, 2))
    message = r"pool\[0\] and pool\[2\] are the same array"
    with pytest.raises(ValueError, match=message):
        PoolLayout.of([leaf, other, leaf])
    layout = PoolLayout.of([leaf, other, zeros((4, 2))])
    layout.flatten([leaf, other, zeros((4, 2))])
    with pytest.raises(ValueError, match=message):
        layout.flatten([leaf, other, leaf])
