"""What the layout of an array in memory costs: padding, and blocks that lie apart.

XLA:TPU stores arrays in tiles of 128 elements along the minor axis and some along the
next, and orders the axes so that little is padded. An array whose last dimension is no
multiple of 128 may so get its blocks along the minor axis, each spread over all tiles:
then a save or load of some blocks moves every block of the leaf, and back. Along the
next axis each tile has several blocks, which no asynchronous copy can cut out: then XLA
copies them, and moves many times their bytes.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from jax.experimental.layout import Layout

from jaxkv.transfer.layout import Leaf, PoolLayout

LANES = 128
"""Elements along the minor axis of a tile on TPU."""

# A leaf of scales may lie as it likes.
_NEGLIGIBLE_BYTES = 1 << 20


class CostlyLayoutWarning(UserWarning):
    """A pool lies in memory so that moving a block means moving many others."""


def padded_bytes(shape: tuple[int, ...], dtype: np.dtype, layout: Layout) -> int:
    """Return the bytes that an array takes in memory.

    Args:
        shape: Its shape on one device.
        dtype: Type of its elements.
        layout: How it lies in memory.
    """
    sizes = [shape[axis] for axis in layout.major_to_minor]
    tile = layout.tiling[0] if layout.tiling else ()
    # A tile of more axes than the array has is one of 1s in front.
    tile = tile[max(0, len(tile) - len(sizes)) :]
    for axis, length in enumerate(tile, start=len(sizes) - len(tile)):
        sizes[axis] = -(-sizes[axis] // length) * length
    return math.prod(sizes) * dtype.itemsize


def lane_padding(length: int) -> float:
    """Return by what factor tiles on TPU pad a last dimension of some length.

    >>> lane_padding(64), lane_padding(128)
    (2.0, 1.0)
    """
    return -(-length // LANES) * LANES / length


def blocks_lie_apart(leaf: Leaf) -> bool:
    """Whether a block is spread over the whole leaf: its axis is the minor one."""
    return leaf.num_blocks > 1 and leaf.order[-1] == leaf.block_axis


def blocks_share_tiles(leaf: Leaf) -> bool:
    """Whether tiles on TPU have several blocks: their axis is the second-minor one."""
    return leaf.num_blocks > 1 and leaf.order[-2:-1] == (leaf.block_axis,)


def costly_leaves(pool: PoolLayout) -> list[Leaf]:
    """Return the leaves of which each save and load moves more than its blocks.

    Only leaves that were given a layout, by XLA:TPU or the caller: elsewhere the blocks
    of a leaf lie where its axes say.
    """
    is_tpu = pool.platform == "tpu"
    return [
        leaf
        for leaf in pool.leaves
        if (leaf.layout is not None or is_tpu)
        and leaf.num_blocks * leaf.block_bytes >= _NEGLIGIBLE_BYTES
        and (blocks_lie_apart(leaf) or (is_tpu and blocks_share_tiles(leaf)))
    ]


def warn_of_costly_layouts(pool: PoolLayout, rows: int, padding: float) -> None:
    """Warn of leaves of which each save and load moves more than its blocks.

    Args:
        pool: The layout of the pool.
        rows: Blocks per extent and shard.
        padding: Bytes that an extent takes on the host, over what it holds.
    """
    costly = costly_leaves(pool)
    if not costly:
        return
    leaf = costly[0]
    more = f" and {len(costly) - 1} more" if len(costly) > 1 else ""
    if not blocks_lie_apart(leaf):
        warnings.warn(
            f"{leaf.name}{more} has its blocks along the second-minor axis in memory "
            f"(order {leaf.order} of {list(leaf.shape)}), where tiles have several "
            "blocks: saves and loads move 7 to 190 times the bytes, by what compilers "
            "for TPU show. Give each block two axes of more than one element, the last "
            f"one a multiple of {LANES}: K and V in one leaf, as [blocks, 2, {LANES}], "
            f"or a flat block of n elements as [blocks, n // {LANES}, {LANES}]. See "
            "docs/performance.md, Layouts on TPU.",
            CostlyLayoutWarning,
            stacklevel=3,
        )
        return
    # Each block is read and written twice: into a better layout, and in there.
    factor = max(1, 2 * pool.shard_blocks // rows)
    if leaf.block_axis == len(leaf.shape) - 1:
        advice = "Count the blocks along another axis than the last."
    else:
        advice = (
            f"Make the last dimension, {leaf.shape[-1]}, a multiple of {LANES}, by "
            "packing two heads into one row or by padding, or give the pool a "
            "row-major layout by jax.experimental.layout."
        )
    warnings.warn(
        f"{leaf.name}{more} has its blocks along the minor axis in memory (order "
        f"{leaf.order} of {list(leaf.shape)}), so that a copy of {rows} blocks moves "
        f"all {pool.shard_blocks}: about {factor} times the bytes. Extents take "
        f"{padding:.2f} times their bytes on the host. {advice} See "
        "docs/performance.md, Layouts on TPU.",
        CostlyLayoutWarning,
        stacklevel=3,
    )
