"""Private parts of jax: faster ways to public results, and one that has no public name.

They may change with any release. If one is missing, the public ways are taken.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import jax
from numpy.typing import NDArray

from jaxkv.transfer.memory import is_guarded

_copy_arrays: Any
_put_shards: Any
try:
    # `jax.device_put` ends in these, after some 25 us of Python for a single array.
    from jax._src.array import ArrayImpl
    from jax._src.config import explicit_device_put_scope
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    _copy_arrays = xla_client.batched_copy_array_to_devices_with_sharding
    _put_shards = xla_client.batched_device_put
    _SEMANTICS = xla_client.ArrayCopySemantics.REUSE_INPUT
    # `sharding` is a property in Python, which takes twice as long for each array.
    _SHARDING = "_sharding" if hasattr(ArrayImpl, "_sharding") else "sharding"
except (ImportError, AttributeError):
    _copy_arrays = _put_shards = None
    _SHARDING = "sharding"

sharding_of = operator.attrgetter(_SHARDING)
"""The sharding of an array."""


class Carrier:
    """Copies arrays to `shardings` that differ from theirs only in the memory kind."""

    def __init__(self, shardings: Sequence[jax.sharding.Sharding]) -> None:
        self.shardings = tuple(shardings)
        self._devices: list[Any] = []
        if _copy_arrays is not None:
            # Arrays of several processes need `device_put`.
            lists: list[Any] = [
                getattr(sharding, "_internal_device_list", None)
                for sharding in self.shardings
                if sharding.is_fully_addressable
            ]
            if all(lists) and len(lists) == len(self.shardings):
                self._devices = [devices.addressable_device_list for devices in lists]

    def copy(self, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Start to copy arrays as `jax.device_put` does, one for each sharding.

        If there are more, they take the shardings from the first one on again.
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
    """Puts NumPy arrays onto the devices of a mesh, spread by `sharding`."""

    def __init__(self, sharding: jax.sharding.Sharding) -> None:
        self._sharding = sharding
        # By shape: the aval of such an array, the devices, and the index of each.
        self._plans: dict[tuple[int, ...], tuple[Any, list[jax.Device], list[Any]]] = {}

    def put(self, array: NDArray[Any]) -> jax.Array:
        """Start to put an array, which nothing may change afterwards."""
        plan = self._plans.get(array.shape)
        if plan is not None:
            aval, devices, indices = plan
            rows = [array[index] for index in indices]
            put: jax.Array = _put_shards(aval, self._sharding, rows, devices)
            return put
        # With several processes `device_put` would compare the replicas first.
        placed = jax.make_array_from_callback(
            array.shape, self._sharding, lambda index: array[index]
        )
        if _put_shards is not None:
            indices_of = self._sharding.addressable_devices_indices_map(array.shape)
            self._plans[array.shape] = (
                placed.aval,
                [*indices_of],
                [*indices_of.values()],
            )
        return placed


def coordination_client() -> Any:
    """Return the client of jax's coordination service; None if there is none."""
    from jax._src import distributed

    return distributed.global_state.client
