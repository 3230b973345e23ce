"""Layouts of pools, as they are described, and pools that do not fit them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import PoolLayout, memory
from tests.rigs.device_cases import devices, mesh_of
from tests.transfer.numbered import DEVICE


def zeros(shape, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), DEVICE)


def test_layout_describes_a_mixed_pool():
    pool = {
        "kv": [zeros((6, 4, 2), jnp.bfloat16), zeros((6, 4, 2), jnp.bfloat16)],
        "scale": zeros((6,)),
        "q": zeros((6, 4, 2), jnp.int8),
    }
    layout = PoolLayout.of(pool)
    assert layout.num_blocks == 6
    assert layout.block_bytes == 2 * 16 + 4 + 8
    names = ["pool['kv'][0]", "pool['kv'][1]", "pool['q']", "pool['scale']"]
    assert [leaf.name for leaf in layout.leaves] == names
    assert hash(layout) == hash(PoolLayout.of(pool))
    leaves = layout.flatten(pool)
    assert jax.tree.structure(layout.unflatten(leaves)) == jax.tree.structure(pool)
    assert layout.platform == DEVICE.platform
    assert PoolLayout.of(pool, compiled_for="tpu").platform == "tpu"


def test_leaves_may_have_different_block_axes_and_any_sharding_over_one_device():
    pool = {"kv": [zeros((3, 6, 4)), zeros((4, 6, 3))], "scale": zeros((6,))}
    layout = PoolLayout.of(pool, {"kv": -2, "scale": 0})
    assert [leaf.block_axis for leaf in layout.leaves] == [1, 1, 0]
    assert layout.num_blocks == 6
    assert layout.block_bytes == 4 * (12 + 12 + 1)
    # One device, as a mesh.
    place = jax.sharding.NamedSharding(mesh_of(1), jax.sharding.PartitionSpec("x"))
    layout = PoolLayout.of(jax.device_put(zeros((6, 4)), place))
    layout.flatten(zeros((6, 4)))


def test_a_described_pool_has_the_layout_of_its_arrays():
    """So that programs can be compiled for devices that are not there."""
    pool = [zeros((6, 4, 2), jnp.bfloat16), zeros((3, 6))]
    specs = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for leaf in pool
    ]
    assert PoolLayout.of(specs, [0, 1]) == PoolLayout.of(pool, [0, 1])
    # One description may stand for several arrays, as it has no memory.
    same = PoolLayout.of([specs[0]] * 2)
    assert [leaf.shape for leaf in same.leaves] == [(6, 4, 2)] * 2
    assert same.device == DEVICE
    with pytest.raises(ValueError, match=r"pool\[0\] is described without a sharding"):
        PoolLayout.of([jax.ShapeDtypeStruct((6, 4), jnp.float32)])


OTHERS = [
    ("must have the structure", lambda: zeros((4, 2))),
    ("must be a jax.Array", lambda: [zeros((4, 2)), np.zeros((4,), np.int8)]),
    (r"float32\[4, 2\], not float", lambda: [zeros((5, 2)), zeros((4,), jnp.int8)]),
    (r"int8\[4\], not uint8", lambda: [zeros((4, 2)), zeros((4,), jnp.uint8)]),
    (
        "must be placed as .*, not as .*pinned_host",
        lambda: jax.device_put(small_pool(), memory.host_sharding(DEVICE)),
    ),
    (
        "must be placed as .*, not as .*id=1",
        lambda: jax.device_put(small_pool(), devices(2)[1]),
    ),
]


def small_pool():
    return [zeros((4, 2)), zeros((4,), jnp.int8)]


@pytest.mark.parametrize(("message", "make_pool"), OTHERS)
def test_a_pool_of_another_layout_is_refused(message, make_pool):
    pool = small_pool()
    layout = PoolLayout.of(pool)
    for _ in range(2):  # Also after one that fits, which is remembered.
        with pytest.raises(ValueError, match=message):
            layout.flatten(make_pool())
        assert layout.flatten(pool) == pool


def test_a_deleted_pool_has_no_layout():
    pool = [zeros((4, 2))]
    pool[0].delete()
    with pytest.raises(RuntimeError, match="deleted or donated"):
        PoolLayout.of(pool)


def test_a_pool_that_has_an_array_twice_is_refused():
    leaf, leaf_2 = zeros((4, 2)), zeros((4, 2))
    message = r"pool\[0\] and pool\[2\] are the same array"
    with pytest.raises(ValueError, match=message):
        PoolLayout.of([leaf, leaf_2, leaf])
    layout = PoolLayout.of([leaf, leaf_2, zeros((4, 2))])
    layout.flatten([leaf, leaf_2, zeros((4, 2))])
    with pytest.raises(ValueError, match=message):
        layout.flatten([leaf, leaf_2, leaf])
