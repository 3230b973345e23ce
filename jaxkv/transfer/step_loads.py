"""Loads that the caller's own program writes into the pool, layer by layer."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.extents import Extent
from jaxkv.transfer.kernels import Copier
from jaxkv.types import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepLoads:
    """Blocks on the host that a step of the model writes into the pool itself.

    `TransferEngine.take_step_loads` makes it. It is a pytree: pass it to the jitted
    step with the pool, and call `write` inside for each group of layers, right before
    they run::

        for group, layers in enumerate(groups_of_layers):
            pool = loads.write(pool, group, after=x)
            x, pool = layers(x, pool)

    The copies of all groups can begin at once. The step waits for a group where its
    layers begin, so that its bytes arrive while the layers before it run.

    Attributes:
        extents: The extents that blocks come from, in host memory; they may repeat.
        targets: For each of them i32[shards, rows], the device block of each row,
            counted within its shard; NOTHING for rows that are not wanted.
        copier: It has the layouts, and is part of the tree's structure, so that the
            programs of one engine are traced once for each number of extents.
    """

    extents: tuple[Extent, ...]
    targets: tuple[NDArray[np.int32] | jax.Array, ...]
    copier: Copier = dataclasses.field(metadata={"static": True})

    def write(
        self, pool: PyTree, layer_group: int | None = None, after: PyTree = ()
    ) -> PyTree:
        """Write the blocks into a pool. Inside jit.

        Args:
            pool: The pool, with the layout of the engine's.
            layer_group: Which run of the pool's leaves, see the `layer_groups` of
                `TransferEngine`; the leaves of others stay as they are. None for all.
            after: Arrays that are computed before the step waits for the bytes, such
                as the output of the layers before. Without it XLA first waits for the
                bytes of all groups.

        Returns:
            The pool to run those layers on.

        Raises:
            ValueError: There is no such group, or the pool has another structure.
        """
        leaves, structure = jax.tree.flatten(pool)
        if structure != self.copier.extents.pool.treedef:
            raise ValueError(
                f"pool must have the structure {self.copier.extents.pool.treedef}, not "
                f"{structure}."
            )
        num_groups = self.copier.num_layer_groups
        if layer_group is not None and not 0 <= layer_group < num_groups:
            raise ValueError(f"{layer_group=} must be in [0, {num_groups}).")
        groups = range(num_groups) if layer_group is None else [layer_group]
        for group in groups:
            indices = self.copier.extents.leaves_of(group)
            arrays = self.copier.extents.arrays_of(group)
            for extent, targets in zip(self.extents, self.targets, strict=True):
                leaves[indices] = self.copier.write_group(
                    leaves[indices], targets, extent[arrays], group, after
                )
        return jax.tree.unflatten(structure, leaves)
