"""The bytes of a pool's blocks, as strict parts look at them and spoil them.

All of it is done by NumPy, on copies: it compiles nothing, keeps every bit, and takes
no array away from the caller. It is made for the small pools of tests.
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

# What integers are filled with, byte by byte.
_GARBAGE_BYTE = 0xA5


class StrictError(ValueError):
    """An engine does not do what docs/lifecycle.md says; names the call."""


class PoolBlocks:
    """Looks at blocks of pools of one layout, and fills them.

    Where several processes serve one model, each looks at its own shards.

    Args:
        layout: The layout.

    Attributes:
        num_blocks: How many blocks there are.
    """

    def __init__(self, layout: PoolLayout) -> None:
        self._layout = layout
        self.num_blocks = layout.num_blocks

    def sums(self, pool: PyTree, block_ids: Sequence[int]) -> dict[int, int] | None:
        """Make a checksum of each block.

        Args:
            pool: The pool; waits for it.
            block_ids: Which; those that are no block's, and the null block, are passed
                over.

        Returns:
            Checksums by block; None if the pool is lost, as after a fault.
        """
        ids = sorted({block for block in block_ids if block > NULL_BLOCK})
        sums = [0] * len(ids)
        if not ids:
            return {}
        try:
            for leaf, axis in self._leaves(pool):
                for shard in leaf.addressable_shards:
                    rows = np.moveaxis(np.asarray(shard.data), axis, 0)[ids]
                    own = np.ascontiguousarray(rows).reshape(len(ids), -1)
                    for place, row in enumerate(own):
                        sums[place] = zlib.crc32(row.tobytes(), sums[place])
        except RuntimeError:  # From jax: the program that computes it has failed.
            return None
        return dict(zip(ids, sums, strict=True))

    def copied(self, pool: PyTree) -> PyTree:
        """Copy a pool, so that the caller's is not donated."""
        return self._rewritten(pool, lambda rows: None, [])

    def spoiled(self, pool: PyTree, block_ids: Sequence[int]) -> PyTree:
        """Copy a pool, and fill blocks of the copy with garbage: NaN where there is."""
        ids = [block for block in block_ids if block > NULL_BLOCK]
        return self._rewritten(pool, _garbage, ids)

    def _leaves(self, pool: PyTree) -> list[tuple[jax.Array, int]]:
        """List the arrays of a pool, and which axis counts the blocks of each."""
        axes = [leaf.block_axis for leaf in self._layout.leaves]
        return list(zip(self._layout.flatten(pool), axes, strict=True))

    def _rewritten(
        self,
        pool: PyTree,
        content: Callable[[np.dtype[Any]], Any],
        block_ids: list[int],
    ) -> PyTree:
        try:
            leaves = [
                _rebuilt(leaf, axis, block_ids, content(leaf.dtype))
                for leaf, axis in self._leaves(pool)
            ]
        except RuntimeError:
            return pool  # It is lost.
        return self._layout.unflatten(leaves)


def _rebuilt(
    leaf: jax.Array, axis: int, block_ids: list[int], content: Any
) -> jax.Array:
    """Copy an array, with something else in some of its blocks."""
    parts = []
    for shard in leaf.addressable_shards:
        rows: NDArray[Any] = np.array(shard.data)
        if block_ids:
            np.moveaxis(rows, axis, 0)[block_ids] = content
        place = shard.data.format
        parts.append(jax.device_put(rows, place, may_alias=False))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


def _garbage(dtype: np.dtype[Any]) -> Any:
    """Make a number that shows in whatever is computed from it."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        if dtype == np.bool_:
            return True
        return np.full(dtype.itemsize, _GARBAGE_BYTE, np.uint8).view(dtype)[0]
    nan = np.array(np.nan).astype(dtype)
    if jnp.issubdtype(dtype, jnp.floating) and not np.isnan(nan.astype(np.float32)):
        return np.array(6.0).astype(dtype)  # There is none, as in float4_e2m1fn.
    return nan
