"""The hosts of an engine, and the part of the KV caches on each host.

A host moves its own shards, in programs for only its devices. A program for the devices
of all hosts must start in the same order on each host, and a host starts a transfer
when it sees bytes arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxkv._util import shown
from jaxkv.transfer.memory import partition_spec
from jaxkv.types import PyTree

# Ray's name of a chip in the resources of an executor.
_CHIP = "TPU"

_Bounds: TypeAlias = tuple[tuple[int, int], ...]


def num_hosts(parallel_config: Any) -> int:
    """Return how many hosts, each with one worker, serve the model.

    ValueError if vLLM's executor has no such number.
    """
    group = getattr(parallel_config, "placement_group", None)
    if group is not None:
        # A bundle without chips has no worker.
        return sum(bundle.get(_CHIP, 0) > 0 for bundle in group.bundle_specs)
    executor = getattr(parallel_config, "distributed_executor_backend", None)
    executor = getattr(executor, "__name__", executor)
    if executor not in (None, "uni", "UniProcExecutor"):
        raise ValueError(
            f"distributed_executor_backend={shown(executor)} must be 'uni', which "
            "TPU_MULTIHOST_BACKEND= chooses, or Ray's, which TPU_MULTIHOST_BACKEND=ray "
            "chooses: with other executors the number of hosts is unknown."
        )
    return 1


def check_processes(num_hosts: int) -> None:
    """Raise ValueError unless one worker on each of the hosts makes up the mesh."""
    processes = jax.process_count()
    if processes != num_hosts:
        raise ValueError(
            f"{processes} processes share the mesh, and vLLM's executor has workers on "
            f"{num_hosts} hosts: each process must be one of these workers, as with "
            "TPU_MULTIHOST_BACKEND=ray."
        )


def local_part(cache: jax.Array) -> jax.Array:
    """Return the shards of this host as an array, which shares their memory."""
    if cache.is_fully_addressable:
        return cache
    shape, sharding = _local_layout(cache.shape, cache.sharding)
    shards = [shard.data for shard in cache.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def with_part(cache: jax.Array, part: jax.Array) -> jax.Array:
    """Return the array of all hosts with another part of this host."""
    if cache.is_fully_addressable:
        return part
    shards = [shard.data for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(cache.shape, cache.sharding, shards)


def placement(caches: PyTree) -> bytes:
    """Return which shards each host has of the caches, the same text on all hosts."""
    shards = [
        sorted(
            (device.process_index, _bounds(index, cache.shape))
            for device, index in cache.sharding.devices_indices_map(cache.shape).items()
        )
        for cache in jax.tree.leaves(caches)
    ]
    return repr(shards).encode()


@functools.cache
def _local_layout(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> tuple[tuple[int, ...], jax.sharding.Sharding]:
    """Return the shape and the sharding of a host's part: its shards in a row."""
    devices_of: dict[_Bounds, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices_of.setdefault(_bounds(index, shape), []).append(device)
    shards = sorted(devices_of)
    axes = [n for n in range(len(shape)) if len({part[n] for part in shards}) > 1]
    has_all_blocks = {part[0] for part in shards} == {(0, shape[0])}
    has_copies_of_each = len({len(devices) for devices in devices_of.values()}) == 1
    if len(axes) > 1 or not (has_all_blocks and has_copies_of_each):
        raise ValueError(
            f"this host has the shards {shards} of a KV cache {list(shape)}: with "
            "several hosts, only one axis may be sharded, which is not the block axis, "
            "and all chips of a host must have equal shares."
        )
    # Each row has a part, on as many devices as have a copy of it.
    devices = np.array([devices_of[part] for part in shards])
    local_shape = list(sharding.shard_shape(shape))
    names: list[str | None] = [None] * len(shape)
    for axis in axes:
        local_shape[axis] *= len(shards)
        names[axis] = "part"
    mesh = jax.sharding.Mesh(devices, ("part", "copy"))
    return tuple(local_shape), jax.sharding.NamedSharding(mesh, partition_spec(*names))


def _bounds(index: Sequence[slice] | None, shape: tuple[int, ...]) -> _Bounds:
    """Return where a shard begins and ends along each axis."""
    return tuple(
        (bounds.indices(size)[0], bounds.indices(size)[1])
        for bounds, size in zip(index or (), shape, strict=True)
    )
