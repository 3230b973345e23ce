"""Extents: arrays of several host blocks, which move in one piece."""

from __future__ import annotations

import dataclasses
import functools
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
    bundles: tuple[Bundle, ...]  # In the order of an extent's arrays.

    @classmethod
    def of(
        cls,
        pool: PoolLayout,
        rows: int,
        *,
        stacked: bool,
        compression: Compression | None = None,
    ) -> ExtentLayout:
        """Lay out extents of `rows` blocks.

        If `stacked`, equal leaves share an array: fewer arrays are copied faster, but
        on CPU, a program that unstacks an array copies it.
        """
        codecs = tuple(codecs_of(pool, compression))
        alike: dict[object, list[int]] = {}
        for index, leaf in enumerate(pool.leaves):
            look = (leaf.shape, leaf.dtype, leaf.spec, leaf.block_axis, leaf.layout)
            # A codec also depends on the head axis, which its parts' shapes show.
            key = (look, codecs[index].parts) if stacked else index
            alike.setdefault(key, []).append(index)
        bundles = tuple(
            Bundle(tuple(indices), part)
            for indices in alike.values()
            for part in range(len(codecs[indices[0]].parts))
        )
        return cls(pool, rows, stacked, codecs, bundles)

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
        return sum(
            math.prod(spec.sharding.shard_shape(spec.shape))
            * spec.dtype.itemsize
            * len(spec.sharding.addressable_devices)
            for spec in self.specs(None)
        )

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

    def _part(self, bundle: Bundle) -> Part:
        return self.codecs[bundle.leaves[0]].parts[bundle.part]

    def _shape(self, bundle: Bundle) -> tuple[int, ...]:
        shape = [len(bundle.leaves)] * self.stacked + list(self._part(bundle).shape)
        shape[self.axis(bundle)] = self.rows * self.pool.num_shards
        return tuple(shape)
