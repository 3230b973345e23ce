"""Memory kinds, compiler options, and running out of host memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxkv.transfer import TransferEngine, host_memory, memory, memory_kinds

CPU = jax.devices("cpu")[0]


def zeros(shape, dtype=jnp.float32):
    return jax.device_put(jnp.zeros(shape, dtype), CPU)


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


def _called_otherwise(arrays):
    raise AssertionError("it takes one argument only")


@pytest.mark.parametrize("jax_has", ["it", "moved it", "changed how it is called"])
def test_arrays_are_carried_as_by_device_put(jax_has, monkeypatch):
    if jax_has != "it":
        other = None if jax_has == "moved it" else _called_otherwise
        monkeypatch.setattr(memory, "_copy_arrays", other)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    spec = jax.sharding.PartitionSpec("x")
    here, there = (
        [
            jax.sharding.NamedSharding(mesh, spec, memory_kind=kind),
            jax.sharding.SingleDeviceSharding(CPU, memory_kind=kind),
        ]
        for kind in ("device", "pinned_host")
    )
    arrays = jax.device_put((jnp.arange(8), jnp.arange(3)), tuple(here))
    with jax.transfer_guard("disallow"):
        carried = memory.Carrier(there).copy(arrays)
        back = memory.Carrier(here).copy(carried)
    assert [array.sharding for array in carried] == there
    assert [array.sharding for array in back] == here
    assert [array.tolist() for array in back] == [list(range(8)), [0, 1, 2]]


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


def lowered():
    return jax.jit(lambda array: array + 1).lower(jnp.zeros(3, jnp.int32))


def test_a_program_is_compiled_without_an_option_that_its_compiler_lacks(monkeypatch):
    # The option for TPU is none that XLA:CPU knows.
    [option] = memory._OPTIONAL["tpu"]
    refusal = f"No such compile option: '{option}'"
    with pytest.raises(jax.errors.JaxRuntimeError, match=refusal):
        lowered().compile(memory._OPTIONAL["tpu"])
    monkeypatch.setitem(memory._OPTIONAL, "cpu", memory._OPTIONAL["tpu"])
    program = memory.compile_program(lowered(), "cpu")
    assert program(jnp.zeros(3, jnp.int32)).tolist() == [1, 1, 1]


def test_a_compiler_that_refuses_for_another_reason_is_heard(monkeypatch):
    monkeypatch.setattr(memory, "compiler_options", lambda platform: {"xla_odd": "1"})
    monkeypatch.setitem(memory._OPTIONAL, "cpu", memory._OPTIONAL["tpu"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_odd"):
        memory.compile_program(lowered(), "cpu")


def exhausted(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")


def test_construction_without_enough_host_memory_is_explained(monkeypatch):
    monkeypatch.setattr(host_memory.jax, "block_until_ready", exhausted)
    with pytest.raises(
        MemoryError, match=r"allocate 48 bytes .* lower num_host_blocks"
    ):
        TransferEngine([zeros((4, 2))], 5)


def test_construction_raises_other_errors_as_they_are(monkeypatch):
    def broken(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(host_memory.jax, "block_until_ready", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        TransferEngine([zeros((4, 2))], 5)
