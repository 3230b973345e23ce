"""Extents: arrays of several host blocks, which move in one piece."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jaxkv.transfer import memory
from jaxkv.transfer.codecs import Codec, Compression, Part, codecs_of
from jaxkv.transfer.layout import PoolLayout
from jaxkv.transfer.tiling import padded_bytes

Extent: TypeAlias = tuple[jax.Array, ...]
"""The arrays of an extent, one for each bundle of its layout."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Leaves that share an array of an extent, stacked along a new first axis."""

    leaves: tuple[int, ...]  # Their indices in the layout of the pool.
    part: int  # Index of the part of their codecs that the array holds.


@dataclasses.dataclass(frozen=True, eq=False)
class ExtentLayout:
    """The layout of an extent: a small pool, which may be compressed."""

    pool: PoolLayout  # Of the pool that the blocks come from.
    rows: int  # Device blocks per extent and shard.
    stacked: bool  # Whether bundles stack leaves; if not, each is a single leaf.
    codecs: tuple[Codec, ...]  # For each leaf.
    layer_groups: tuple[tuple[Bundle, ...], ...]  # Groups are loaded in turn.

    @classmethod
    def of(
        cls,
        pool: PoolLayout,
        rows: int,
        *,
        stacked: bool,
        num_layer_groups: int = 1,
        compression: Compression | None = None,
    ) -> ExtentLayout:
        """Lay out extents of `rows` blocks, whose leaves are split into groups.

        If `stacked`, equal leaves share an array: fewer arrays are copied faster, but
        on CPU, a program that unstacks an array copies it. ValueError if there are
        fewer leaves than groups.
        """
        num_leaves = len(pool.leaves)
        if not 1 <= num_layer_groups <= num_leaves:
            raise ValueError(
                f"layer_groups={num_layer_groups} must be in [1, {num_leaves}]: the "
                f"pool has {num_leaves} leaves, and a leaf is not split."
            )
        codecs = tuple(codecs_of(pool, compression))
        bounds = [num_leaves * n // num_layer_groups for n in range(num_layer_groups)]
        layer_groups = []
        for start, stop in itertools.pairwise([*bounds, num_leaves]):
            alike: dict[object, list[int]] = {}
            for index in range(start, stop):
                leaf = pool.leaves[index]
                look = (leaf.shape, leaf.dtype, leaf.spec, leaf.block_axis, leaf.layout)
                # A codec also depends on the head axis, which its parts' shapes show.
                key = (look, codecs[index].parts) if stacked else index
                alike.setdefault(key, []).append(index)
            layer_groups.append(
                tuple(
                    Bundle(tuple(indices), part)
                    for indices in alike.values()
                    for part in range(len(codecs[indices[0]].parts))
                )
            )
        return cls(pool, rows, stacked, codecs, tuple(layer_groups))

    @functools.cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """Bundles of all groups, in the order of an extent's arrays."""
        return tuple(itertools.chain.from_iterable(self.layer_groups))

    def arrays_of(self, layer_group: int) -> slice:
        """Return the range of an extent's arrays in a layer group."""
        return self._ranges[layer_group][0]

    def leaves_of(self, layer_group: int) -> slice:
        """Return the range of the pool's leaves in a layer group."""
        return self._ranges[layer_group][1]

    @functools.cached_property
    def _ranges(self) -> list[tuple[slice, slice]]:
        """The ranges of arrays and leaves of each layer group."""
        ranges = []
        start = 0
        for group in self.layer_groups:
            leaves = [leaf for bundle in group for leaf in bundle.leaves]
            arrays = slice(start, start + len(group))
            ranges.append((arrays, slice(min(leaves), max(leaves) + 1)))
            start += len(group)
        return ranges

    def axis(self, bundle: Bundle) -> int:
        """Return the block axis of a bundle's array."""
        return self.stacked + self.pool.leaves[bundle.leaves[0]].block_axis

    def specs(self, kind: str | None) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Describe an extent's arrays in memory `kind`; None for the device's own."""
        return tuple(
            memory.array_spec(self._shape(b), self._part(b).dtype, sharding)
            for b, sharding in zip(self.bundles, self.shardings(kind), strict=True)
        )

    def shardings(self, kind: str | None) -> tuple[jax.sharding.Sharding, ...]:
        """Shard an extent's arrays as their leaves are, in memory `kind`."""
        if self.pool.mesh is None:
            single = jax.sharding.SingleDeviceSharding
            return (single(self.pool.device, memory_kind=kind),) * len(self.bundles)
        return tuple(
            jax.sharding.NamedSharding(self.pool.mesh, spec, memory_kind=kind)
            for spec in self.partition_specs()
        )

    def partition_specs(self) -> tuple[jax.sharding.PartitionSpec, ...]:
        """Return how each array is spread over the mesh."""
        leaves, stack = self.pool.leaves, (None,) * self.stacked
        return tuple(
            memory.partition_spec(*stack, *leaves[bundle.leaves[0]].spec)
            for bundle in self.bundles
        )

    def stack(self, arrays: list[jax.Array]) -> jax.Array:
        """Make a bundle's array from the arrays of its leaves."""
        return jnp.stack(arrays) if self.stacked else arrays[0]

    def unstack(self, array: jax.Array) -> list[jax.Array]:
        """Undo `stack`."""
        return list(array) if self.stacked else [array]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of one extent in this process, replicas included."""
        return sum(self.group_bytes)

    @functools.cached_property
    def host_bytes(self) -> int:
        """Bytes that an extent takes on the host in this process, with padding."""
        return sum(
            padded_bytes(
                spec.sharding.shard_shape(spec.shape),
                spec.dtype,
                memory.default_layout(spec.shape, spec.dtype, spec.sharding),
            )
            * len(spec.sharding.addressable_devices)
            for spec in self.specs(memory.HOST_KIND)
        )

    @functools.cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """The bytes of each layer group."""
        num_bytes = [
            math.prod(spec.sharding.shard_shape(spec.shape))
            * spec.dtype.itemsize
            * len(spec.sharding.addressable_devices)
            for spec in self.specs(None)
        ]
        groups = range(len(self.layer_groups))
        return tuple(sum(num_bytes[self.arrays_of(group)]) for group in groups)

    def _part(self, bundle: Bundle) -> Part:
        return self.codecs[bundle.leaves[0]].parts[bundle.part]

    def _shape(self, bundle: Bundle) -> tuple[int, ...]:
        shape = [len(bundle.leaves)] * self.stacked + list(self._part(bundle).shape)
        shape[self.axis(bundle)] = self.rows * self.pool.num_shards
        return tuple(shape)
