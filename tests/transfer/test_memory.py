"""Memory kinds, compiler options, and running out of host memory."""

import inspect
import types

import jax
import jax.numpy as jnp
import pytest
from jaxlib import xla_client

from jaxkv.transfer import (
    TransferEngine,
    host_memory,
    jax_internals,
    memory,
    memory_kinds,
)
from tests.rigs.device_cases import mesh_of, only_on_cpu
from tests.transfer.numbered import DEVICE


def _called_otherwise(arrays):
    raise AssertionError("it takes one argument only")


@pytest.mark.parametrize("jax_has", ["it", "moved it", "changed how it is called"])
def test_arrays_are_carried_as_by_device_put(jax_has, monkeypatch):
    if jax_has != "it":
        replacement = None if jax_has == "moved it" else _called_otherwise
        monkeypatch.setattr(jax_internals, "_copy_arrays", replacement)
    mesh, spec = mesh_of(2), jax.sharding.PartitionSpec("x")
    on_device, on_host = (
        [
            jax.sharding.NamedSharding(mesh, spec, memory_kind=kind),
            jax.sharding.SingleDeviceSharding(DEVICE, memory_kind=kind),
        ]
        for kind in ("device", "pinned_host")
    )
    arrays = jax.device_put((jnp.arange(8), jnp.arange(3)), tuple(on_device))
    if jax_has == "it":  # Then the public way, which is slower, is not taken.
        monkeypatch.setattr(jax, "device_put", _called_otherwise)
    with jax.transfer_guard("disallow"):
        carried = jax_internals.Carrier(on_host).copy(arrays)
        back = jax_internals.Carrier(on_device).copy(carried)
    assert [array.sharding for array in carried] == on_host
    assert [array.sharding for array in back] == on_device
    assert [array.tolist() for array in back] == [list(range(8)), [0, 1, 2]]


def test_memory_kinds_start_with_the_default_of_the_device():
    kinds = memory_kinds(DEVICE)
    assert kinds[0] == DEVICE.default_memory().kind
    assert "pinned_host" in kinds
    assert len(set(kinds)) == len(kinds)


def test_host_memory_is_pinned_and_any_other_is_refused():
    assert memory.host_sharding(DEVICE).memory_kind == "pinned_host"
    kind = types.SimpleNamespace(kind="device")
    odd = types.SimpleNamespace(
        default_memory=lambda: kind, addressable_memories=lambda: [kind]
    )
    with pytest.raises(ValueError, match=r"has the memories \('device',\)"):
        memory.host_sharding(odd)


def test_compiler_options_are_for_the_cpu_only():
    options = memory.compiler_options("cpu")
    assert "float-normalization-bf16," in options["xla_disable_hlo_passes"]
    assert memory.compiler_options("gpu") is memory.compiler_options("tpu") is None


def lowered():
    return jax.jit(lambda array: array + 1).lower(jnp.zeros(3, jnp.int32))


@only_on_cpu
def test_a_program_is_compiled_without_an_option_that_its_compiler_lacks(monkeypatch):
    # The option for TPU is none that XLA:CPU knows.
    [option] = memory._OPTIONAL["tpu"]
    refusal = f"No such compile option: '{option}'"
    with pytest.raises(jax.errors.JaxRuntimeError, match=refusal):
        lowered().compile(memory._OPTIONAL["tpu"])
    monkeypatch.setitem(memory._OPTIONAL, "cpu", memory._OPTIONAL["tpu"])
    program = memory.compile_program(lowered(), "cpu")
    assert program(jnp.zeros(3, jnp.int32)).tolist() == [1, 1, 1]
    monkeypatch.setattr(memory, "compiler_options", lambda platform: {"xla_odd": "1"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_odd"):
        memory.compile_program(lowered(), "cpu")


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        ("RESOURCE_EXHAUSTED: out", MemoryError, "48 bytes .* lower num_host_blocks"),
        ("INTERNAL: odd", jax.errors.JaxRuntimeError, "odd"),
    ],
)
def test_only_a_lack_of_host_memory_is_explained(raised, error, message, monkeypatch):
    def fail(*args):
        raise jax.errors.JaxRuntimeError(raised)

    monkeypatch.setattr(host_memory.jax, "block_until_ready", fail)
    with pytest.raises(error, match=message):
        TransferEngine([jnp.zeros((4, 2))], 5, mode="fused")


TFRT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def test_the_client_with_one_stream_is_refused(monkeypatch):
    message = f"{TFRT}=.* makes XLA .* unset it, or set"
    for value in ("1", " 1 ", "2", "true", "True", "yes"):
        with pytest.raises(ValueError, match=message):
            memory.check_client("gpu", {TFRT: value})
        memory.check_client("cpu", {TFRT: value})
        memory.check_client("tpu", {TFRT: value})
    for environ in ({}, {TFRT: "0"}, {TFRT: "false"}, {TFRT: ""}):
        memory.check_client("gpu", environ)
    monkeypatch.setenv(TFRT, "1")
    with pytest.raises(ValueError, match=f"{TFRT}='1'"):
        memory.check_client("gpu")


def test_jaxlib_still_has_the_variable_and_its_default(monkeypatch):
    options = xla_client.generate_pjrt_gpu_plugin_options
    assert TFRT in inspect.getsource(options)
    monkeypatch.delenv(TFRT, raising=False)
    assert options()["use_tfrt_gpu_client"] is False
