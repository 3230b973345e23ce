"""Memory kinds and runtimes of devices; options that keep transfer programs exact."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

# Copies through unpinned_host have corrupted bfloat16 on TPU, and XLA:CPU ignores a
# move to it inside jit.
HOST_KIND = "pinned_host"
"""The one memory kind that host blocks live in."""

# XLA:CPU rewrites every op on an unsupported float type into float32, one pass per
# type. For a scatter that means the whole pool, there and back: the time grows with
# the pool instead of the update, and signalling NaNs come back quietened. Moving bytes
# needs no arithmetic, so the transfer programs switch these passes off.
_NORMALISED_FLOATS = (
    "bf16",
    "f8e3m4",
    "f8e4m3",
    "f8e4m3b11fnuz",
    "f8e4m3fn",
    "f8e4m3fnuz",
    "f8e5m2",
    "f8e5m2fnuz",
    "f8e8m0fnu",
)

_TFRT_CLIENT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def check_client(platform: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a runtime that runs everything on one stream; `environ` started it.

    ValueError if no copy could overlap with a computation.
    """
    value = environ.get(_TFRT_CLIENT, "0").strip()
    # jaxlib accepts ints only; a word may have been set after jaxlib read the variable,
    # with the intent to have this client.
    if platform == "gpu" and value.lower() not in ("", "0", "false", "no", "off"):
        raise ValueError(
            f"{_TFRT_CLIENT}={value!r} makes XLA use a client with one stream for "
            "computations and copies alike, so that no transfer can overlap with the "
            "model: unset it, or set it to 0, before jax is imported."
        )


def check_jit() -> None:
    """Raise ValueError if `JAX_DISABLE_JIT` is set."""
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "JAX_DISABLE_JIT is set, but transfers are compiled programs: unset it."
        )


def memory_kinds(device: jax.Device) -> tuple[str, ...]:
    """Return the memory kinds that `device` can address, its default first."""
    default = device.default_memory().kind
    kinds = {memory.kind for memory in device.addressable_memories()}
    return (default, *sorted(kinds - {default}))


def host_sharding(device: jax.Device) -> jax.sharding.SingleDeviceSharding:
    """Return the sharding of arrays in the host memory of `device`.

    ValueError if `device` has no such memory.
    """
    kinds = memory_kinds(device)
    if HOST_KIND not in kinds:
        raise ValueError(
            f"{device} has the memories {kinds}, not {HOST_KIND!r}: it has no host "
            "memory to copy blocks to in the background."
        )
    return jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_KIND)


# Before each program XLA:TPU copies an operand to VMEM that the program will read: for
# a save a whole leaf, though the save reads a few rows. A compiler refuses unknown
# options, and this one is not promised to stay.
_OPTIONAL = {"tpu": {"xla_max_cross_program_prefetches": "0"}}


def compiler_options(platform: str) -> dict[str, str] | None:
    """Return the options that keep transfer programs cheap and bit-exact."""
    if platform != "cpu":
        return None
    passes = (f"float-normalization-{name}" for name in _NORMALISED_FLOATS)
    return {
        "xla_disable_hlo_passes": ",".join(passes),
        # With less, such as `jax_disable_most_optimizations` asks for, LLVM quietens
        # signalling NaNs too.
        "xla_backend_optimization_level": "3",
    }


def compile_program(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compile a transfer program for devices of a platform."""
    options: dict[str, str | bool] = {**(compiler_options(platform) or {})}
    optional = _OPTIONAL.get(platform, {})
    try:
        return lowered.compile({**options, **optional})
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if not any(f"No such compile option: '{name}'" in text for name in optional):
            raise
        return lowered.compile(options)


def is_guarded() -> bool:
    """Whether a transfer guard of jax is set, which refuses implicit transfers."""
    config: Any = jax.config
    return (
        config.jax_transfer_guard_host_to_device is not None
        or config.jax_transfer_guard_device_to_device is not None
        or config.jax_transfer_guard_device_to_host is not None
    )


def wait_for(arrays: object) -> None:
    """Wait until a pytree of arrays is ready; raise the error of one that failed."""
    jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]


def partition_spec(*entries: object) -> jax.sharding.PartitionSpec:
    """Make the spec of an array, an entry for each dimension."""
    return jax.sharding.PartitionSpec(*entries)  # type: ignore[no-untyped-call]


def array_spec(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | Format | None = None,
) -> jax.ShapeDtypeStruct:
    """Describe an array, for compiling."""
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        shape, dtype, sharding=sharding
    )


@functools.cache
def default_layout(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding
) -> Layout:
    """Return the layout that the compiler gives an array by default."""
    device: jax.Device = next(iter(sharding.device_set))
    if device.platform != "tpu":
        return Layout(tuple(range(len(shape))))
    spec = array_spec(shape, dtype, sharding)
    program = jax.jit(lambda array: array, out_shardings=sharding)
    compiled = program.lower(spec).compile()
    (placed,), _ = compiled.input_formats
    layout: Layout = placed.layout
    return layout


def layout_of(array: jax.Array | jax.ShapeDtypeStruct) -> Layout | None:
    """Return the layout of an array in memory; None if the backend has none."""
    layout: Layout | None = array.format.layout  # type: ignore[union-attr]
    return layout
