"""The rows of an extent, written, gathered and scattered by XLA.

The functions are the `RowCopier` of `kernels`, and `write_rows` for the mode "fused".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxkv.transfer.extents import Bundle, Extent, ExtentLayout
from jaxkv.transfer.plans import NOTHING

# XLA:TPU gathers wider rows from a copy of the whole leaf.
_WIDE_ROW_BYTES = 256 << 10


def write_rows(
    extents: ExtentLayout,
    leaves: list[jax.Array],
    lists: jax.Array,
    carry: Sequence[Extent],
    spare: Extent,
) -> Extent:
    """Write listed blocks, and listed rows of `carry`, into the memory of `spare`.

    `lists` are the `SavePlan.row_lists` of a shard, i32[3 * rows + 2]; `carry` is the
    extent to carry rows over from, or empty.
    """
    ids, rows, carried = jnp.split(lists[:-2], 3)

    # One row per iteration: a short save costs little, nothing is padded, and rows go
    # straight into the result, without a temporary as large as the extent.
    def write(n: jax.Array, extent: Extent) -> Extent:
        blocks = _encoded(
            extents,
            extents.bundles,
            dict(enumerate(leaves)),
            lambda leaf, axis: jax.lax.dynamic_slice_in_dim(leaf, ids[n], 1, axis),
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
    bundles: Sequence[Bundle],
    leaves: Mapping[int, jax.Array],
    sources: jax.Array,
    carry: Extent | None,
) -> Extent:
    """Gather the rows of a new extent from the pool, carried rows from `carry`."""
    ids, carried = jnp.split(sources, 2)

    def gather(leaf: jax.Array, axis: int) -> jax.Array:
        return _read(leaf, axis, ids, extents.pool.platform)

    gathered = _encoded(extents, bundles, leaves, gather)
    if carry is None:
        return gathered
    merged = []
    for bundle, new, old in zip(bundles, gathered, carry, strict=True):
        shape = [1] * new.ndim
        shape[extents.axis(bundle)] = extents.rows
        old_row = jnp.broadcast_to(carried.reshape(shape) > 0, new.shape)
        merged.append(jnp.where(old_row, old, new))
    return tuple(merged)


def _encoded(
    extents: ExtentLayout,
    bundles: Sequence[Bundle],
    leaves: Mapping[int, jax.Array],
    read: Callable[[jax.Array, int], jax.Array],
) -> Extent:
    """Read blocks of the leaves of bundles and encode them into their arrays."""
    written = {
        leaf: extents.codecs[leaf].encode(
            read(leaves[leaf], extents.pool.leaves[leaf].block_axis)
        )
        for leaf in sorted({leaf for bundle in bundles for leaf in bundle.leaves})
    }
    return tuple(
        extents.stack([written[leaf][bundle.part] for leaf in bundle.leaves])
        for bundle in bundles
    )


def scatter_rows(
    extents: ExtentLayout,
    bundles: Sequence[Bundle],
    leaves: Mapping[int, jax.Array],
    targets: jax.Array,
    arrays: Extent,
) -> dict[int, jax.Array]:
    """Write the rows of an extent into leaves."""
    encoded: dict[int, list[jax.Array]] = {}
    for bundle, array in zip(bundles, arrays, strict=True):
        for index, part in zip(bundle.leaves, extents.unstack(array), strict=True):
            encoded.setdefault(index, []).append(part)
    platform = extents.pool.platform
    written = {}
    for index in sorted(encoded):
        axis = extents.pool.leaves[index].block_axis
        blocks = extents.codecs[index].decode(tuple(encoded[index]))
        written[index] = _write(leaves[index], axis, targets, blocks, platform)
    return written


def _read(leaf: jax.Array, axis: int, sources: jax.Array, platform: str) -> jax.Array:
    """Read blocks of a leaf; any block for NOTHING."""
    ids = jnp.maximum(sources, 0)  # Every row has to read a block in range.
    if not _is_wide(leaf, axis, platform):
        index = (slice(None),) * axis + (ids,)
        return leaf.at[index].get(mode="promise_in_bounds")

    def read(n: jax.Array, blocks: jax.Array) -> jax.Array:
        block = jax.lax.dynamic_slice_in_dim(leaf, ids[n], 1, axis)
        return jax.lax.dynamic_update_slice_in_dim(blocks, block, n, axis)

    shape = (*leaf.shape[:axis], ids.size, *leaf.shape[axis + 1 :])
    blocks: jax.Array = jax.lax.fori_loop(
        0, ids.size, read, jnp.zeros(shape, leaf.dtype)
    )
    return blocks


def _write(
    leaf: jax.Array, axis: int, targets: jax.Array, blocks: jax.Array, platform: str
) -> jax.Array:
    """Write blocks to distinct places in a leaf; those for NOTHING nowhere."""
    if not _is_wide(leaf, axis, platform):
        ids = _past_the_end(targets, leaf.shape[axis])
        index = (slice(None),) * axis + (ids,)
        return leaf.at[index].set(blocks, mode="drop", unique_indices=True)

    def write(n: jax.Array, leaf: jax.Array) -> jax.Array:
        new = jax.lax.dynamic_slice_in_dim(blocks, n, 1, axis)
        old = jax.lax.dynamic_slice_in_dim(leaf, targets[n], 1, axis)
        block = jnp.where(targets[n] == NOTHING, old, new)
        return jax.lax.dynamic_update_slice_in_dim(leaf, block, targets[n], axis)

    written: jax.Array = jax.lax.fori_loop(0, targets.size, write, leaf)
    return written


def _is_wide(leaf: jax.Array, axis: int, platform: str) -> bool:
    """Whether to copy blocks one by one."""
    return platform == "tpu" and leaf.nbytes // leaf.shape[axis] > _WIDE_ROW_BYTES


def _past_the_end(targets: jax.Array, num_blocks: int) -> jax.Array:
    """Replace each NOTHING by a distinct id that a scatter drops; -1 would wrap."""
    past = num_blocks + jnp.arange(targets.size, dtype=targets.dtype)
    return jnp.where(targets == NOTHING, past, targets)
