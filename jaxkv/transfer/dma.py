"""The rows of an extent, gathered and scattered by asynchronous copies of a TPU.

The functions are the `RowCopier` of `kernels` for the leaves that `accepts` allows.
These Pallas kernels read and write only the wanted rows: XLA's gathers and scatters
read a row several times, and copy whole leaves where rows are wide. A row goes from HBM
to HBM without passing through a core, several at a time.

Mosaic, the compiler of these kernels, addresses an array by its order in memory. So
each array is first transposed into that order, which moves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxkv.transfer.extents import Bundle, Extent, ExtentLayout
from jaxkv.transfer.layout import Leaf
from jaxkv.transfer.memory import array_spec, default_layout
from jaxkv.transfer.plans import NOTHING
from jaxkv.transfer.tiling import is_copied, padded_bytes

# Enough to hide the latency of copies of some KiB each, such as a few heads of a
# sharded pool: 4 MiB take two to five microseconds of the bandwidth.
_COPIES_IN_FLIGHT = 512
_MAX_ROWS_IN_FLIGHT = 64
# How the kernels run where there is no TPU.
_INTERPRETER: Any = True
_Array: TypeAlias = jax.Array | jax.ShapeDtypeStruct


class _Rows(NamedTuple):
    """The rows of a leaf in one of several arrays, in their order in memory."""

    array: int  # Index of the array.
    layer: tuple[int, ...]  # The index in a stack of leaves, its first axis; or empty.
    axis: int  # The axis of the rows, without the axis of the stack.

    def at(self, refs: Sequence[Any], position: Any) -> Any:
        """Return a reference to one row."""
        return refs[self.array].at[(*self.layer, *(slice(None),) * self.axis, position)]


def accepts(leaf: Leaf) -> bool:
    """Whether the kernels can copy blocks of a leaf: a copy cannot cut a tile."""
    return is_copied(leaf.dtype) and _axis(leaf) < len(leaf.shape) - 2


def gather_rows(
    extents: ExtentLayout,
    bundles: Sequence[Bundle],
    leaves: Mapping[int, jax.Array],
    sources: jax.Array,
    carry: Extent | None,
) -> Extent:
    """Gather the rows of a new extent from the pool, in place into `carry` if given."""
    indices, in_pool, in_extent = _pair(extents, bundles)
    pool = [_as_it_lies(leaves[n], extents.pool.leaves[n]) for n in indices]
    orders = [_order(extents, bundle) for bundle in bundles]
    targets: list[_Array]
    if carry is None:
        targets = [
            _new_array(extents, bundle, pool[indices.index(bundle.leaves[0])])
            for bundle in bundles
        ]
    else:
        targets = [array.transpose(o) for array, o in zip(carry, orders, strict=True)]
    arrays = _copy_rows(
        sources,
        pool,
        targets,
        list(zip(in_pool, in_extent, strict=True)),
        lambda plan, row: (plan[row], row),
        extents.rows,
        _row_bytes(extents.pool.leaves[n] for n in indices),
        extents.pool.platform,
    )
    return tuple(
        a.transpose(np.argsort(o)) for a, o in zip(arrays, orders, strict=True)
    )


def scatter_rows(
    extents: ExtentLayout,
    bundles: Sequence[Bundle],
    leaves: Mapping[int, jax.Array],
    targets: jax.Array,
    arrays: Extent,
) -> dict[int, jax.Array]:
    """Write the rows of an extent into leaves, in place; read only the wanted rows."""
    indices, in_pool, in_extent = _pair(extents, bundles)
    written = _copy_rows(
        targets,
        [a.transpose(_order(extents, b)) for a, b in zip(arrays, bundles, strict=True)],
        [_as_it_lies(leaves[n], extents.pool.leaves[n]) for n in indices],
        list(zip(in_extent, in_pool, strict=True)),
        lambda plan, row: (row, plan[row]),
        extents.rows,
        _row_bytes(extents.pool.leaves[n] for n in indices),
        extents.pool.platform,
    )
    return {
        n: leaf.transpose(np.argsort(extents.pool.leaves[n].order))
        for n, leaf in zip(indices, written, strict=True)
    }


def _copy_rows(
    plan: jax.Array,  # i32[...]. NOTHING in its first `num_rows` for unwanted rows.
    inputs: Sequence[jax.Array],  # Arrays to read.
    targets: Sequence[_Array],  # Arrays to write in place, or specs of new ones.
    pairs: Sequence[tuple[_Rows, _Rows]],  # The copies of a row: input, target.
    # The plan and a row -> its positions in the inputs and in the targets.
    positions: Callable[[Any, Any], tuple[Any, Any]],
    num_rows: int,
    row_bytes: int,  # Bytes moved for each row.
    platform: str,
) -> Sequence[jax.Array]:
    """Copy rows from arrays to arrays, several at a time; return the targets."""
    # Imported here, since it takes a while and only a TPU needs it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    is_tpu = platform == "tpu"
    in_place = [target for target in targets if isinstance(target, jax.Array)]
    # At least two rows, so that one moves during the wait for another.
    rows_in_flight = min(
        num_rows, _MAX_ROWS_IN_FLIGHT, max(2, _COPIES_IN_FLIGHT // len(pairs))
    )

    def kernel(plan: Any, *refs: Any) -> None:
        semaphores = refs[-1]
        written = refs[-1 - len(targets) : -1]
        read = refs[: len(inputs)]

        # Each row has a semaphore: a wait ends after some number of bytes, which other
        # copies could deliver.
        def each_copy(row: Any, act: Callable[[Any], None]) -> None:
            @pl.when(plan[row] != NOTHING)
            def _() -> None:
                semaphore = semaphores.at[row % rows_in_flight]
                position, new_position = positions(plan, row)
                for source, target in pairs:
                    origin = source.at(read, position)
                    place = target.at(written, new_position)
                    act(pltpu.make_async_copy(origin, place, semaphore))

        def start(row: Any, _: None) -> None:
            each_copy(row, lambda copy: copy.start())

        def wait(row: Any, _: None) -> None:
            each_copy(row, lambda copy: copy.wait())

        def wait_and_start(row: Any, _: None) -> None:
            wait(row - rows_in_flight, None)
            start(row, None)

        jax.lax.fori_loop(0, rows_in_flight, start, None)
        jax.lax.fori_loop(rows_in_flight, num_rows, wait_and_start, None)
        jax.lax.fori_loop(num_rows - rows_in_flight, num_rows, wait, None)

    # XLA cannot see what a kernel reads and writes, and would count nothing.
    cost = pl.CostEstimate(
        flops=0, transcendentals=0, bytes_accessed=2 * num_rows * row_bytes
    )
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    operands = [*inputs, *in_place]
    if is_tpu:  # Where an operand fits into VMEM, XLA would copy it there as a whole.
        operands = [
            pltpu.with_memory_space_constraint(operand, pltpu.HBM)
            for operand in operands
        ]
    written: Sequence[jax.Array] = pl.pallas_call(
        kernel,
        out_shape=[array_spec(t.shape, np.dtype(t.dtype)) for t in targets],
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[hbm] * len(operands)],
        out_specs=[hbm] * len(targets),
        input_output_aliases={1 + len(inputs) + n: n for n in range(len(in_place))},
        scratch_shapes=[pltpu.SemaphoreType.DMA((rows_in_flight,))],
        cost_estimate=cost,
        interpret=False if is_tpu else _INTERPRETER,
        name="jaxkv_copy_rows",
    )(plan, *operands)
    return written


def _row_bytes(leaves: Iterable[Leaf]) -> int:
    """Return the bytes that a row of all leaves takes on a device, padding included."""
    return sum(
        padded_bytes(
            shape := leaf.sharding.shard_shape(leaf.shape),
            leaf.dtype,
            leaf.layout or default_layout(leaf.shape, leaf.dtype, leaf.sharding),
        )
        // shape[leaf.block_axis]
        for leaf in leaves
    )


def _pair(
    extents: ExtentLayout, bundles: Sequence[Bundle]
) -> tuple[list[int], list[_Rows], list[_Rows]]:
    """List the leaves of bundles: indices, rows in the leaves, rows in the arrays."""
    indices: list[int] = []
    in_pool, in_extent = [], []
    for array, bundle in enumerate(bundles):
        for layer, n in enumerate(bundle.leaves):
            axis = _axis(extents.pool.leaves[n])
            in_pool.append(_Rows(len(indices), (), axis))
            in_extent.append(_Rows(array, (layer,) * extents.stacked, axis))
            indices.append(n)
    return indices, in_pool, in_extent


def _new_array(
    extents: ExtentLayout, bundle: Bundle, leaf: jax.Array
) -> jax.ShapeDtypeStruct:
    """Describe a bundle's array for rows of `leaf`, with its axes in memory order."""
    axis = _axis(extents.pool.leaves[bundle.leaves[0]])
    shape = (*leaf.shape[:axis], extents.rows, *leaf.shape[axis + 1 :])
    stack = (len(bundle.leaves),) * extents.stacked
    return array_spec((*stack, *shape), leaf.dtype)


def _as_it_lies(array: jax.Array, leaf: Leaf) -> jax.Array:
    return array.transpose(leaf.order)


def _axis(leaf: Leaf) -> int:
    """Return the axis of a leaf, as it lies in memory, that counts its blocks."""
    return leaf.order.index(leaf.block_axis)


def _order(extents: ExtentLayout, bundle: Bundle) -> tuple[int, ...]:
    """Return the axes of a bundle's array, ordered as its leaves lie in memory."""
    order = extents.pool.leaves[bundle.leaves[0]].order
    return (0, *(1 + axis for axis in order)) if extents.stacked else order
