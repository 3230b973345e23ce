"""Layouts, memory kinds and the refusals that go with them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv.transfer import PoolLayout, TransferEngine, hoststore, memory, memory_kinds

CPU = jax.devices("cpu")[0]


def zeros(shape, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), CPU)


def mesh_of(num_devices):
    return jax.make_mesh(
        (num_devices,),
        ("x",),
        (jax.sharding.AxisType.Explicit,),
        devices=jax.devices("cpu")[:num_devices],
    )


class _Device:
    """A device as some platforms have it: without pinned memory."""

    class _Memory:
        kind = "device"

    def default_memory(self):
        return self._Memory()

    def addressable_memories(self):
        return [self._Memory()]

    def __str__(self):
        return "odd:0"


def test_memory_kinds_start_with_the_devices_own():
    kinds = memory_kinds(CPU)
    assert kinds[0] == CPU.default_memory().kind
    assert "pinned_host" in kinds
    assert len(set(kinds)) == len(kinds)


def test_host_sharding_is_pinned():
    assert memory.host_sharding(CPU).memory_kind == "pinned_host"


def test_unpinned_host_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="unpinned_host have corrupted bfloat16"):
        memory.host_sharding(CPU, "unpinned_host")


def test_a_device_without_pinned_memory_is_refused():
    with pytest.raises(ValueError, match=r"odd:0 has the memories \('device',\)"):
        memory.host_sharding(_Device())


def test_compiler_options_are_for_the_cpu_only():
    options = memory.compiler_options("cpu")
    assert "float-normalization-bf16," in options["xla_disable_hlo_passes"]
    assert memory.compiler_options("gpu") is None
    assert memory.compiler_options("tpu") is None


def test_layout_of_a_mixed_pool():
    pool = {
        "kv": [zeros((6, 4, 2), jnp.bfloat16), zeros((6, 4, 2), jnp.bfloat16)],
        "scale": zeros((6,)),
        "q": zeros((6, 4, 2), jnp.int8),
    }
    layout = PoolLayout.of(pool)
    assert layout.num_blocks == 6
    assert layout.block_bytes == 2 * 16 + 4 + 8
    assert layout.names == (
        "pool['kv'][0]",
        "pool['kv'][1]",
        "pool['q']",
        "pool['scale']",
    )
    assert layout.groups == ((0, 1), (2,), (3,))
    assert hash(layout) == hash(PoolLayout.of(pool))
    leaves = layout.flatten(pool)
    assert jax.tree.structure(layout.unflatten(leaves)) == jax.tree.structure(pool)


def test_layout_accepts_any_sharding_over_one_device():
    mesh = mesh_of(1)
    pool = jax.device_put(zeros((6, 4)), NamedSharding(mesh, PartitionSpec("x")))
    layout = PoolLayout.of(pool)
    assert layout.flatten(pool)[0] is pool
    layout.flatten(zeros((6, 4)))


@pytest.mark.parametrize(
    ("make_pool", "message"),
    [
        (lambda: {}, "pool has no leaves"),
        (lambda: [np.zeros((4, 2))], r"pool\[0\] must be a jax.Array outside jit"),
        (lambda: [zeros(())], r"pool\[0\] has shape \(\); it must have the block axis"),
        (lambda: [zeros((0, 4))], "at least one element"),
        (lambda: [zeros((4, 0))], "at least one element"),
        (lambda: [zeros((4, 2), jnp.int4)], "int4, less than a byte an element"),
        (lambda: [jax.random.split(jax.random.key(0), 4)], "must hold plain data"),
        (lambda: [zeros((4, 2)), zeros((5, 2))], r"pool\[1\] has 5 blocks and pool"),
        (
            lambda: [zeros((4,)), jax.device_put(zeros((4,)), jax.devices("cpu")[1])],
            r"pool\[1\] is on .* all leaves must be on one device",
        ),
        (
            lambda: jax.device_put(zeros((4, 2)), memory.host_sharding(CPU)),
            "pool is in 'pinned_host'; a pool must be in the device's own memory",
        ),
        (
            lambda: jax.device_put(
                zeros((4, 2)), NamedSharding(mesh_of(2), PartitionSpec("x"))
            ),
            "sharded over 2 devices: that is not supported yet",
        ),
    ],
)
def test_a_pool_that_cannot_be_offloaded_is_refused(make_pool, message):
    with pytest.raises(ValueError, match=message):
        TransferEngine(make_pool(), 4)


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
            "must be in the memory of .* not on",
        ),
        (
            lambda: jax.device_put(
                [zeros((4, 2)), zeros((4,), jnp.int8)], memory.host_sharding(CPU)
            ),
            "must be in the memory of .* not on .*pinned_host",
        ),
    ],
)
def test_a_pool_of_another_layout_is_refused(make_pool, message):
    layout = PoolLayout.of([zeros((4, 2)), zeros((4,), jnp.int8)])
    with pytest.raises(ValueError, match=message):
        layout.flatten(make_pool())


def test_a_deleted_pool_is_refused():
    pool = [zeros((4, 2))]
    layout = PoolLayout.of(pool)
    pool[0].delete()
    with pytest.raises(RuntimeError, match="pass the pool that the last load"):
        layout.flatten(pool)
    with pytest.raises(RuntimeError, match="deleted or donated"):
        PoolLayout.of(pool)


@pytest.mark.parametrize(
    ("platform", "remedy"),
    [
        ("gpu", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"),
        ("tpu", "TPU_PREMAPPED_BUFFER_SIZE"),
        ("cpu", "lower num_host_blocks."),
    ],
)
def test_host_memory_error_says_what_to_do(platform, remedy):
    error = memory.host_memory_error(3, 3 << 30, platform)
    assert "3221225472 bytes (3.00 GiB)" in str(error)
    assert remedy in str(error)


def exhausted(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")


def test_construction_without_enough_host_memory(monkeypatch):
    monkeypatch.setattr(hoststore.jax, "block_until_ready", exhausted)
    with pytest.raises(MemoryError, match=r"5 host blocks, 40 bytes .* lower"):
        TransferEngine([zeros((4, 2))], 5)


def test_construction_raises_other_errors_as_they_are(monkeypatch):
    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(hoststore.jax, "block_until_ready", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        TransferEngine([zeros((4, 2))], 5)
