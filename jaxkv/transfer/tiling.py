"""Costs of an array's layout in memory: padding, and blocks that lie apart.

XLA:TPU stores arrays in tiles of 128 elements along the minor axis and some along the
next, and orders the axes so that little is padded. If the last dimension of an array is
not a multiple of 128, its blocks may lie along the minor axis, each spread over all
tiles: then a save or load of some blocks moves every block of the leaf, and back. Along
the next axis each tile has several blocks, which no asynchronous copy can cut out: then
XLA copies them, and moves many times their bytes.
"""

from __future__ import annotations

import math
import warnings

import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout

from jaxkv.transfer.layout import Leaf, PoolLayout

LANES = 128
"""Elements along the minor axis of a tile on TPU."""

# One leaf of scales may have any layout, but not one leaf for each layer: XLA copies
# each in three or four programs, which together take longer than the blocks.
_NEGLIGIBLE_BYTES = 1 << 20
_FEW_LEAVES = 4
# The floats of Mosaic. To pass others, or a bool, as integers, XLA would convert whole
# leaves.
_FLOATS = ("float32", "bfloat16", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e5m2")


class CostlyLayoutWarning(UserWarning):
    """A pool lies in memory so that moving a block means moving many others."""


def padded_bytes(shape: tuple[int, ...], dtype: np.dtype, layout: Layout) -> int:
    """Return the bytes that an array takes in memory; `shape` is of one device."""
    sizes = [shape[axis] for axis in layout.major_to_minor]
    tile = layout.tiling[0] if layout.tiling else ()
    # A tile of more axes than the array has is one of 1s in front.
    tile = tile[max(0, len(tile) - len(sizes)) :]
    for axis, length in enumerate(tile, start=len(sizes) - len(tile)):
        sizes[axis] = -(-sizes[axis] // length) * length
    return math.prod(sizes) * dtype.itemsize


def lane_padding(length: int) -> float:
    """Return the factor by which tiles on TPU pad a last dimension of some length."""
    return -(-length // LANES) * LANES / length


def blocks_lie_apart(leaf: Leaf) -> bool:
    """Whether a block is spread over the whole leaf: its axis is the minor one."""
    return leaf.num_blocks > 1 and leaf.order[-1] == leaf.block_axis


def blocks_share_tiles(leaf: Leaf) -> bool:
    """Whether tiles on TPU have several blocks: their axis is the second-minor one."""
    return leaf.num_blocks > 1 and leaf.order[-2:-1] == (leaf.block_axis,)


def is_copied(dtype: np.dtype) -> bool:
    """Whether the asynchronous copies of TPUs have a dtype."""
    is_integer = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 4
    return bool(is_integer or dtype.name in _FLOATS)


def pads_rows(pool: PoolLayout) -> bool:
    """Whether a pool on TPU was given a layout that pads rows to whole tiles.

    XLA lays out an extent of 128 rows or more of it in another way, along its rows.
    """
    return pool.platform == "tpu" and any(
        leaf.layout is not None and leaf.shape[leaf.order[-1]] % LANES
        for leaf in pool.leaves
    )


def costly_leaves(pool: PoolLayout) -> list[Leaf]:
    """Return the leaves whose saves and loads move more than the wanted blocks.

    Only leaves that XLA:TPU or the caller gave a layout: blocks of other leaves lie in
    the order of the axes.
    """
    return [leaf for leaf in _refused_leaves(pool) if not _is_small(leaf)]


def _refused_leaves(pool: PoolLayout) -> list[Leaf]:
    is_tpu = pool.platform == "tpu"
    return [
        leaf
        for leaf in pool.leaves
        if (leaf.layout is not None or is_tpu)
        and (blocks_lie_apart(leaf) or (is_tpu and blocks_share_tiles(leaf)))
    ]


def _is_small(leaf: Leaf) -> bool:
    return leaf.num_blocks * leaf.block_bytes < _NEGLIGIBLE_BYTES


def warn_of_costly_layouts(pool: PoolLayout, rows: int, padding: float) -> None:
    """Warn of leaves whose saves and loads move more than the wanted blocks.

    `rows` are the blocks per extent and shard; `padding` is the bytes that an extent
    takes on the host over the bytes of its blocks.
    """
    if pool.platform == "tpu":
        _warn_of_scales([leaf for leaf in _refused_leaves(pool) if _is_small(leaf)])
        _warn_of_dtypes([leaf for leaf in pool.leaves if not is_copied(leaf.dtype)])
    costly = costly_leaves(pool)
    if not costly:
        return
    leaf, names = costly[0], f"{costly[0].name}{_more(costly)}"
    if not blocks_lie_apart(leaf):
        warnings.warn(
            f"{names} has its blocks along the second-minor axis in memory "
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
        f"{names} has its blocks along the minor axis in memory (order "
        f"{leaf.order} of {list(leaf.shape)}), so that a copy of {rows} blocks moves "
        f"all {pool.shard_blocks}: about {factor} times the bytes. Extents take "
        f"{padding:.2f} times their bytes on the host. {advice} See "
        "docs/performance.md, Layouts on TPU.",
        CostlyLayoutWarning,
        stacklevel=3,
    )


def _warn_of_scales(leaves: list[Leaf]) -> None:
    """Warn of many small leaves, such as the scales of each layer."""
    if len(leaves) <= _FEW_LEAVES:
        return
    size = sum(leaf.block_bytes // leaf.dtype.itemsize for leaf in leaves)
    rows = -(-size // LANES)
    warnings.warn(
        f"{leaves[0].name}{_more(leaves)} are small leaves that XLA copies one by one, "
        "in programs that together take longer than the large leaves: with scales "
        "beside 32 layers of int8, saves move 3.3 and loads 7.4 times the bytes, by "
        "what compilers for TPU show, and 1.0 times with one leaf of all scales. Make "
        f"one leaf of all layers' values of a block, as [blocks, {rows}, {LANES}]. See "
        "docs/performance.md, Layouts on TPU.",
        CostlyLayoutWarning,
        stacklevel=4,
    )


def _warn_of_dtypes(leaves: list[Leaf]) -> None:
    """Warn of large leaves whose dtype the kernels do not support."""
    large = [leaf for leaf in leaves if not _is_small(leaf)]
    if not large:
        return
    warnings.warn(
        f"{large[0].name}{_more(large)} has the dtype {large[0].dtype}, which the "
        "asynchronous copies of TPUs lack: XLA copies its blocks, and moves 2.5 to 4 "
        "times their bytes, by what compilers for TPU show of float16. Make the pool "
        "bfloat16, or keep its bits in a pool of uint16.",
        CostlyLayoutWarning,
        stacklevel=4,
    )


def _more(leaves: list[Leaf]) -> str:
    return f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
