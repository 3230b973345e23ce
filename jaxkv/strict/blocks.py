"""Checksums of a pool's blocks, and copies of a pool with garbage in some blocks.

NumPy works on copies, so that nothing is compiled, every bit is kept and no array of
the caller is donated. Intended for the small pools of tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.layout import PoolLayout
from jaxkv.types import NULL_BLOCK, PyTree

UNWRITTEN = -1
"""The checksum of a block that nothing wrote since it was allocated."""

_GARBAGE_BYTE = 0xA5  # Of integers.


class StrictError(ValueError):
    """An engine violates docs/lifecycle.md; the message names the call."""


class PoolBlocks:
    """Reads and fills blocks of pools with one layout, in this process's shards."""

    def __init__(self, layout: PoolLayout) -> None:
        self._layout = layout
        self.num_blocks = layout.num_blocks

    def sums(self, pool: PyTree, block_ids: Sequence[int]) -> dict[int, int] | None:
        """Return a checksum by block; None if the pool is lost, such as after an error.

        The checksum is `UNWRITTEN` for a block as `unwritten` leaves it. Waits for the
        pool. Skips the null block and negative ids.
        """
        ids = sorted({block for block in block_ids if block > NULL_BLOCK})
        sums, unwritten = [0] * len(ids), 0
        if not ids:
            return {}
        try:
            for leaf, axis in self._leaves(pool):
                for shard in leaf.addressable_shards:
                    rows = np.moveaxis(np.asarray(shard.data), axis, 0)[ids]
                    rows = np.ascontiguousarray(rows).reshape(len(ids), -1)
                    for index, row in enumerate(rows):
                        sums[index] = zlib.crc32(row.tobytes(), sums[index])
                    row = np.resize(_unwritten(leaf.dtype), rows.shape[1:])
                    unwritten = zlib.crc32(row.tobytes(), unwritten)
        except RuntimeError:  # From JAX: the program that computes the pool failed.
            return None
        sums = [UNWRITTEN if crc == unwritten else crc for crc in sums]
        return dict(zip(ids, sums, strict=True))

    def copied(self, pool: PyTree) -> PyTree:
        """Copy a pool, so that the caller's pool is not donated."""
        return self.spoiled(pool, [])

    def spoiled(self, pool: PyTree, block_ids: Sequence[int]) -> PyTree:
        """Copy a pool, with garbage (NaN if possible) in some blocks of the copy."""
        return self._filled(pool, block_ids, _garbage)

    def unwritten(self, pool: PyTree, block_ids: Sequence[int]) -> PyTree:
        """Copy a pool, with the content of unwritten blocks in some blocks."""
        return self._filled(pool, block_ids, _unwritten)

    def _filled(
        self, pool: PyTree, block_ids: Sequence[int], value_of: Callable[[Any], Any]
    ) -> PyTree:
        ids = [block for block in block_ids if block > NULL_BLOCK]
        try:
            leaves = [
                _rebuilt(leaf, axis, ids, value_of(leaf.dtype))
                for leaf, axis in self._leaves(pool)
            ]
        except RuntimeError:
            return pool  # The pool is lost.
        return self._layout.unflatten(leaves)

    def _leaves(self, pool: PyTree) -> list[tuple[jax.Array, int]]:
        """List the arrays of a pool, each with its block axis."""
        axes = [leaf.block_axis for leaf in self._layout.leaves]
        return list(zip(self._layout.flatten(pool), axes, strict=True))


def _rebuilt(leaf: jax.Array, axis: int, block_ids: list[int], value: Any) -> jax.Array:
    """Copy an array, with a value, or values in turn, in some of its blocks."""
    shards = []
    for shard in leaf.addressable_shards:
        rows: NDArray[Any] = np.array(shard.data)
        if block_ids:
            blocks = np.moveaxis(rows, axis, 0)
            blocks[block_ids] = np.resize(value, blocks.shape[1:])
        shards.append(jax.device_put(rows, shard.data.format, may_alias=False))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _unwritten(dtype: np.dtype[Any]) -> Any:
    """Return the values of unwritten blocks, finite for engines that mask by 0."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.array([6.0, 1.5, 3.0]).astype(dtype)
    if dtype == np.bool_:
        return np.array([True, False, False])
    return np.repeat(np.array([0xA5, 0x5A, 0x66], np.uint8), dtype.itemsize).view(dtype)


def _garbage(dtype: np.dtype[Any]) -> Any:
    """Return a value that corrupts any result computed from it."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        if dtype == np.bool_:
            return True
        return np.full(dtype.itemsize, _GARBAGE_BYTE, np.uint8).view(dtype)[0]
    nan = np.array(np.nan).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and not np.isnan(nan.astype(np.float32)):
        return np.array(6.0).astype(dtype)  # A dtype without NaN, as float4_e2m1fn.
    return nan
