"""Pure functions that write, gather and scatter the rows of an extent.

Each sees the part of the pool and of the extent that is on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxkv.transfer.extents import Extent, ExtentLayout


def write_rows(
    extents: ExtentLayout,
    leaves: list[jax.Array],
    lists: jax.Array,
    carry: Sequence[Extent],
    spare: Extent,
) -> Extent:
    """Write listed blocks, and listed rows of `carry`, into `spare`.

    Args:
        extents: Layout of an extent.
        leaves: The pool's.
        lists: i32[3 * rows + 2], see `SavePlan.row_lists`.
        carry: The extent to carry rows over from, or none.
        spare: The memory to write to.

    Returns:
        The new extent, in the memory of `spare`.
    """
    ids, rows, carried = jnp.split(lists[:-2], 3)

    # One row per iteration: a short save costs little, nothing is padded, and rows go
    # straight into the result, without a temporary as large as the extent.
    def write(n: jax.Array, extent: Extent) -> Extent:
        blocks = _encoded(
            extents,
            lambda leaf, axis: jax.lax.dynamic_slice_in_dim(leaf, ids[n], 1, axis),
            leaves,
        )
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                array, block, rows[n], extents.axis(bundle)
            )
            for bundle, array, block in zip(
                extents.bundles, extent, blocks, strict=True
            )
        )

    def carry_over(n: jax.Array, extent: Extent) -> Extent:
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(
                array,
                jax.lax.dynamic_slice_in_dim(old, carried[n], 1, extents.axis(bundle)),
                carried[n],
                extents.axis(bundle),
            )
            for bundle, array, old in zip(
                extents.bundles, extent, carry[0], strict=True
            )
        )

    extent: Extent = jax.lax.fori_loop(0, lists[-2], write, spare)
    if carry:
        extent = jax.lax.fori_loop(0, lists[-1], carry_over, extent)
    return extent


def gather_rows(
    extents: ExtentLayout,
    leaves: list[jax.Array],
    sources: jax.Array,
    carry: Sequence[Extent],
) -> Extent:
    """Gather the rows of a new extent from the pool, carried rows from `carry`.

    Args:
        extents: Layout of an extent.
        leaves: The pool's.
        sources: i32[2 * rows], see `SavePlan.row_sources`.
        carry: The extent to carry rows over from, on the device, or none.

    Returns:
        The new extent, on the device.
    """
    ids, carried = jnp.split(sources, 2)

    def gather(leaf: jax.Array, axis: int) -> jax.Array:
        index = (slice(None),) * axis + (ids,)
        return leaf.at[index].get(mode="promise_in_bounds")

    gathered = _encoded(extents, gather, leaves)
    if not carry:
        return gathered
    merged = []
    for bundle, new, old in zip(extents.bundles, gathered, carry[0], strict=True):
        shape = [1] * new.ndim
        shape[extents.axis(bundle)] = extents.rows
        old_row = jnp.broadcast_to(carried.reshape(shape) > 0, new.shape)
        merged.append(jnp.where(old_row, old, new))
    return tuple(merged)


def _encoded(
    extents: ExtentLayout,
    read: Callable[[jax.Array, int], jax.Array],
    leaves: list[jax.Array],
) -> Extent:
    """Read blocks of every leaf and encode them into the arrays of an extent."""
    written = [
        codec.encode(read(array, leaf.block_axis))
        for codec, array, leaf in zip(
            extents.codecs, leaves, extents.pool.leaves, strict=True
        )
    ]
    return tuple(
        extents.stack([written[leaf][bundle.part] for leaf in bundle.leaves])
        for bundle in extents.bundles
    )


def scatter_rows(
    extents: ExtentLayout,
    layer_group: int,
    leaves: list[jax.Array],
    targets: jax.Array,
    arrays: Extent,
) -> list[jax.Array]:
    """Write the rows of an extent into the leaves of a layer group.

    Args:
        extents: Layout of an extent.
        layer_group: The group of the leaves and arrays.
        leaves: The pool's, of this group.
        targets: i32[rows]. Distinct, not negative; those out of range are dropped.
        arrays: The extent's, of this group.

    Returns:
        The leaves afterwards.
    """
    first = extents.leaves_of(layer_group).start
    parts: dict[int, list[jax.Array]] = {}
    for bundle, array in zip(extents.layer_groups[layer_group], arrays, strict=True):
        for leaf, part in zip(bundle.leaves, extents.unstack(array), strict=True):
            parts.setdefault(leaf, []).append(part)
    leaves = list(leaves)
    for leaf, written in parts.items():
        index = (slice(None),) * extents.pool.leaves[leaf].block_axis + (targets,)
        blocks = extents.codecs[leaf].decode(tuple(written))
        leaves[leaf - first] = (
            leaves[leaf - first].at[index].set(blocks, mode="drop", unique_indices=True)
        )
    return leaves


def copy_blocks(
    leaves: list[jax.Array], axes: list[int], sources: jax.Array, targets: jax.Array
) -> list[jax.Array]:
    """Copy blocks within a pool.

    Args:
        leaves: The pool's.
        axes: The block axis of each.
        sources: i32[n]. The blocks to read.
        targets: i32[n]. Where each goes. Distinct, not negative; those out of range
            are dropped.

    Returns:
        The leaves afterwards.
    """
    copied = []
    for leaf, axis in zip(leaves, axes, strict=True):
        along = (slice(None),) * axis
        blocks = leaf.at[(*along, sources)].get(mode="promise_in_bounds")
        copied.append(
            leaf.at[(*along, targets)].set(blocks, mode="drop", unique_indices=True)
        )
    return copied
