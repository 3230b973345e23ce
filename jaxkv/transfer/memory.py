"""Memory kinds and runtimes of devices; options that keep transfer programs exact."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from numpy.typing import NDArray

_copy_arrays: Any
_put_shards: Any
try:
    # What `jax.device_put` ends in, after some 25 us of Python for a single array.
    from jax._src.config import explicit_device_put_scope
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    _copy_arrays = xla_client.batched_copy_array_to_devices_with_sharding
    _put_shards = xla_client.batched_device_put
    _SEMANTICS = xla_client.ArrayCopySemantics.REUSE_INPUT
except (ImportError, AttributeError):  # It is not promised to stay.
    _copy_arrays = _put_shards = None

_NO_SCOPE = contextlib.nullcontext()

HOST_KIND = "pinned_host"
"""The one memory kind that host blocks live in."""

# XLA:CPU rewrites every op on a float type that it lacks into float32, one pass per
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
    others = sorted({memory.kind for memory in device.addressable_memories()})
    return (default, *(kind for kind in others if kind != default))


def host_sharding(
    device: jax.Device, kind: str = HOST_KIND
) -> jax.sharding.SingleDeviceSharding:
    """Return the sharding of arrays in the host memory of `device`.

    Raises:
        ValueError: `kind` does not preserve all bits, or `device` lacks it.
    """
    if kind != HOST_KIND:
        raise ValueError(
            f"{kind=} must be {HOST_KIND!r}: copies through unpinned_host have "
            "corrupted bfloat16 on TPU, and XLA:CPU ignores a move to it inside jit."
        )
    kinds = memory_kinds(device)
    if kind not in kinds:
        raise ValueError(
            f"{device} has the memories {kinds}, not {kind!r}: it has no host memory "
            "to copy blocks to in the background."
        )
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


# Before each program XLA:TPU copies an operand to VMEM that the program will read. Of a
# save that is a whole leaf, of which it wants a few rows. A compiler refuses options
# that it does not know, and this one is not promised to stay.
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
    more = _OPTIONAL.get(platform, {})
    try:
        return lowered.compile({**options, **more})
    except jax.errors.JaxRuntimeError as error:
        if not any(f"No such compile option: '{name}'" in str(error) for name in more):
            raise
        return lowered.compile(options)


class Carrier:
    """Copies arrays to another memory of their devices.

    Args:
        shardings: Where each goes: as it is sharded, but in another memory.
    """

    def __init__(self, shardings: Sequence[jax.sharding.Sharding]) -> None:
        self.shardings = tuple(shardings)
        self._devices: list[Any] = []
        if _copy_arrays is not None:
            # Those of several processes, `device_put` has to see to.
            lists: list[Any] = [
                getattr(sharding, "_internal_device_list", None)
                for sharding in self.shardings
                if sharding.is_fully_addressable
            ]
            if all(lists) and len(lists) == len(self.shardings):
                self._devices = [each.addressable_device_list for each in lists]

    def copy(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Start to copy arrays as `jax.device_put` does, one for each sharding.

        There may be more, which then take the shardings from the first one on again.
        """
        number = len(arrays) // len(self.shardings)
        shardings = self.shardings * number
        if self._devices:
            scope = (
                explicit_device_put_scope if is_guarded() else contextlib.nullcontext
            )
            try:
                with scope():
                    return tuple(
                        _copy_arrays(
                            list(arrays),
                            self._devices * number,
                            list(shardings),
                            [_SEMANTICS] * len(arrays),
                        )
                    )
            except TypeError:  # A version of jax that takes other arguments.
                self._devices = []
        copied: tuple[jax.Array, ...] = jax.device_put(arrays, shardings)
        return copied


class Putter:
    """Puts rows of NumPy arrays onto the devices of a mesh.

    Args:
        sharding: How a row for each shard is spread.
    """

    def __init__(self, sharding: jax.sharding.Sharding) -> None:
        self._sharding = sharding
        # For each shape: what jax knows of such an array, and the devices with the
        # rows that each gets.
        self._known: dict[tuple[int, ...], tuple[Any, list[jax.Device], list[Any]]] = {}

    def put(self, array: NDArray[Any]) -> jax.Array:
        """Start to put an array, which nothing may change afterwards."""
        known = self._known.get(array.shape)
        if known is not None:
            aval, devices, indices = known
            rows = [array[index] for index in indices]
            put: jax.Array = _put_shards(aval, self._sharding, rows, devices)
            return put
        # With several processes `device_put` would compare the replicas first.
        placed = jax.make_array_from_callback(
            array.shape, self._sharding, lambda index: array[index]
        )
        if _put_shards is not None:
            indices_of = self._sharding.addressable_devices_indices_map(array.shape)
            self._known[array.shape] = (
                placed.aval,
                [*indices_of],
                [*indices_of.values()],
            )
        return placed


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
    """Return how the compiler lays out an array unless told otherwise."""
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
    """Return how an array lies in memory; None if the backend does not tell."""
    layout: Layout | None = array.format.layout  # type: ignore[union-attr]
    return layout
