"""The compiled programs that move a fixed number of blocks, and their two modes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer import memory

Mode: TypeAlias = Literal["fused", "staged"]
MODES: tuple[Mode, ...] = get_args(Mode)

Block: TypeAlias = tuple[jax.Array, ...]
"""One block outside the pool: an array ``[leaves, *block]`` per group of leaves."""

BlockIdsLike: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

# A transfer is cut greedily into programs of these sizes, so each direction compiles
# at most three and pads nothing. Sets with 64 move blocks no faster (16 MiB of
# temporaries are faulted in anew each time) and compile for seconds.
PROGRAM_SIZES = (16, 4, 1)


def chunks(num_blocks: int) -> Iterator[slice]:
    """Cut `num_blocks` into runs of `PROGRAM_SIZES`, the largest first."""
    start = 0
    for size in PROGRAM_SIZES:
        while num_blocks - start >= size:
            yield slice(start, start + size)
            start += size


def block_ids(name: str, ids: BlockIdsLike, num_blocks: int) -> NDArray[np.int32]:
    """Check ids and copy them.

    The copy is ours: XLA may read NumPy memory in place and late, so a caller who
    changes his array after the call would otherwise redirect the transfer.

    Raises:
        ValueError: They are not a flat sequence of ints in [0, num_blocks).
    """
    array = np.array(ids)
    if array.size == 0:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a flat sequence of ints, not {array.dtype}"
            f"{list(array.shape)}."
        )
    outside = array[(array < 0) | (array >= num_blocks)]
    if outside.size:
        raise ValueError(
            f"{name} has {outside.tolist()}; ids must be in [0, {num_blocks})."
        )
    return array.astype(np.int32)


def check_distinct(name: str, ids: NDArray[np.int32]) -> None:
    """Refuse ids that occur more than once.

    Raises:
        ValueError: Some do.
    """
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        raise ValueError(
            f"{name} has {values[counts > 1].tolist()} more than once; they must be "
            "distinct."
        )


class Mover:
    """Moves blocks between the leaves of one pool layout and host blocks.

    In the mode ``"fused"`` one program does it all: a save writes its rows straight
    into the host memory of the blocks that it replaces (donated), a load copies to
    the device and scatters. In the mode ``"staged"`` the programs stay on the device
    and `jax.device_put` crosses over, in one call. Fused is the faster on CPU;
    elsewhere a program that crosses over holds up the compute stream until the copy
    is done, so staged hides the copy behind the next step.

    Programs are compiled on first use, ahead of time: an array that is committed to
    its device and one that is not then share the same program.
    """

    def __init__(self, layout: memory.PoolLayout, mode: Mode):
        self.mode = mode
        self._layout = layout
        self._device = jax.sharding.SingleDeviceSharding(layout.device)
        self._host = memory.host_sharding(layout.device)
        self._options = memory.compiler_options(layout.device.platform)
        self.save_program = functools.cache(self._compile_save)
        self.load_program = functools.cache(self._compile_load)

    def save(
        self, leaves: list[jax.Array], ids: NDArray[np.int32], old: list[Block]
    ) -> tuple[list[Block], list[jax.Array]]:
        """Copy device blocks to the host.

        Args:
            leaves: The pool's; only read.
            ids: i32[n]. Device blocks; n is one of `PROGRAM_SIZES`.
            old: The n host blocks that are replaced. Emptied.

        Returns:
            The n new host blocks, and arrays that are ready when the copies are.
        """
        program = self.save_program(len(ids))
        if self.mode == "fused":
            blocks, token = program(leaves, ids, old)
            old.clear()
            return blocks, [token]
        staged, _ = program(leaves, ids)
        # Let go of the old memory first, and the allocator hands it out again, warm.
        old.clear()
        blocks = jax.device_put(staged, self._host)
        return blocks, jax.tree.leaves(blocks)

    def load(
        self, leaves: list[jax.Array], ids: NDArray[np.int32], blocks: list[Block]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Copy host blocks to the device.

        Args:
            leaves: The pool's. Donated.
            ids: i32[n]. Device blocks, distinct; n is one of `PROGRAM_SIZES`.
            blocks: The n host blocks; only read.

        Returns:
            The new leaves, and arrays that are ready when the copies are.
        """
        if self.mode == "staged":
            blocks = jax.device_put(blocks, self._device)
        leaves, token = self.load_program(len(ids))(leaves, ids, blocks)
        return leaves, [token]

    # Both programs return a token besides: a scalar that nobody donates, so that it
    # can be asked whether the program is done while the pool has long moved on. No
    # other value is a scalar, hence no donated buffer can be reused for it.

    def _compile_save(self, size: int) -> jax.stages.Compiled:
        fused = self.mode == "fused"

        def save(
            leaves: list[jax.Array], ids: jax.Array, *old: list[Block]
        ) -> tuple[list[Block], jax.Array]:
            del old  # Only lends its memory to the result.
            return gather(leaves, ids, self._layout.groups), ids[0]

        # Donate inside one memory kind only: XLA:CPU aborts the process on a device
        # buffer donated to a host result. The pool is never donated: it is only read.
        program = jax.jit(
            save,
            donate_argnums=(2,) if fused else (),
            keep_unused=True,
            out_shardings=(self._host if fused else self._device, self._device),
            compiler_options=self._options,
        )
        old = [self._block_specs(size)] if fused else []
        return program.lower(*self._pool_and_ids(size), *old).compile()

    def _compile_load(self, size: int) -> jax.stages.Compiled:
        def load(
            leaves: list[jax.Array], ids: jax.Array, blocks: list[Block]
        ) -> tuple[list[jax.Array], jax.Array]:
            if self.mode == "fused":
                blocks = jax.device_put(blocks, jax.memory.Space.Device)
            return scatter(leaves, ids, blocks, self._layout.groups), ids[0]

        program = jax.jit(
            load,
            donate_argnums=0,
            out_shardings=(list(self._layout.shardings), self._device),
            compiler_options=self._options,
        )
        blocks = self._block_specs(size)
        return program.lower(*self._pool_and_ids(size), blocks).compile()

    def _pool_and_ids(
        self, size: int
    ) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        ids = memory.array_spec((size,), np.dtype(np.int32))
        return self._layout.pool_specs(), ids

    def _block_specs(self, size: int) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
        """Describe the blocks that a program takes in."""
        sharding = self._host if self.mode == "fused" else self._device
        return [self._layout.block_specs(sharding)] * size


def gather(
    leaves: list[jax.Array], ids: jax.Array, groups: tuple[tuple[int, ...], ...]
) -> list[Block]:
    """Read blocks out of a pool.

    Args:
        leaves: The pool's; block axis first.
        ids: i32[n]. In range and not negative.
        groups: Which leaves share an array of the result.

    Returns:
        n blocks.
    """
    # Row by row, not one gather a leaf: the rows then go straight into the result,
    # without a temporary as large as the transfer.
    return [
        tuple(
            jnp.stack(
                [
                    jax.lax.dynamic_index_in_dim(leaves[leaf], ids[n], keepdims=False)
                    for leaf in group
                ]
            )
            for group in groups
        )
        for n in range(len(ids))
    ]


def scatter(
    leaves: list[jax.Array],
    ids: jax.Array,
    blocks: list[Block],
    groups: tuple[tuple[int, ...], ...],
) -> list[jax.Array]:
    """Write blocks into a pool.

    Args:
        leaves: The pool's; block axis first.
        ids: i32[n]. Distinct, in range and not negative: -1 would wrap around.
        blocks: n blocks.
        groups: Which leaves share an array of a block.

    Returns:
        The leaves afterwards.
    """
    leaves = list(leaves)
    for array, group in enumerate(groups):
        for row, leaf in enumerate(group):
            rows = jnp.stack([block[array][row] for block in blocks])
            # One scatter a leaf. Updates one after another would run 1.5 times as
            # fast, but compile 15 times as long (4.4 s for 16 blocks of 16 leaves).
            leaves[leaf] = (
                leaves[leaf].at[ids].set(rows, mode="drop", unique_indices=True)
            )
    return leaves
