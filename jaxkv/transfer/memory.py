"""Memory kinds of devices, and options that keep transfer programs bit-exact."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format, Layout

_copy_arrays: Any
try:
    # What `jax.device_put` ends in, after some 25 us of Python for a single array.
    from jax._src.config import explicit_device_put_scope
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    _copy_arrays = xla_client.batched_copy_array_to_devices_with_sharding
    _SEMANTICS = xla_client.ArrayCopySemantics.REUSE_INPUT
except (ImportError, AttributeError):  # It is not promised to stay.
    _copy_arrays = None

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
            lists = [
                getattr(sharding, "_internal_device_list", None)
                for sharding in self.shardings
                if sharding.is_fully_addressable
            ]
            self._devices = [each.addressable_device_list for each in lists if each]

    def copy(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Start to copy; as `jax.device_put` with these shardings."""
        if len(self._devices) == len(arrays):
            semantics = [_SEMANTICS] * len(arrays)
            try:
                with explicit_device_put_scope():
                    return tuple(
                        _copy_arrays(
                            list(arrays), self._devices, list(self.shardings), semantics
                        )
                    )
            except TypeError:  # A version of jax that takes other arguments.
                self._devices = []
        copied: tuple[jax.Array, ...] = jax.device_put(arrays, self.shardings)
        return copied


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
