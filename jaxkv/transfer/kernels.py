"""Compiled programs that copy the blocks of one extent, in two modes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer import memory, probe, rows
from jaxkv.transfer.extents import Extent, ExtentLayout
from jaxkv.transfer.plans import NOTHING, SavePlan
from jaxkv.types import PyTree

_DEVICE = jax.memory.Space.Device
_SMALLEST_COPY = 16

SaveKind: TypeAlias = Literal["gather", "write", "merge"]
"""Programs of a save: all rows of an extent, some, or some beside carried rows."""

Mode: TypeAlias = Literal["fused", "staged"]
MODES: tuple[Mode, ...] = get_args(Mode)

SAVE_KINDS: dict[Mode, tuple[SaveKind, ...]] = {
    "fused": ("gather", "write", "merge"),
    "staged": ("gather", "merge"),
}


class Copier:
    """Copies blocks between the leaves of one pool layout and extents on the host.

    An extent is written once and never changed: where only some rows are new, the
    others are carried over from another extent into a new one. So a failed save does
    not damage older blocks.

    In the mode ``"fused"`` one program does all the work: a save writes its rows
    directly into the host memory of a free extent (donated), a load copies to the
    device and scatters. In the mode ``"staged"`` the programs stay on the device, and
    one call of `jax.device_put` copies to or from the host. Fused is faster on CPU;
    elsewhere a program that accesses the host blocks the compute stream until its copy
    is done, so staged hides the copy behind the next step.

    If the pool is spread over devices, every program runs on each shard separately with
    ids that count within the shard; no program contains a collective.

    Programs are compiled ahead of time, on first use, so that arrays committed to a
    device and uncommitted ones share a program.
    """

    def __init__(self, extents: ExtentLayout, mode: Mode):
        self.mode = mode
        self.extents = extents
        self._pool = extents.pool
        self._plan = self._pool.plan_sharding()
        self._options = memory.compiler_options(self._pool.device.platform)
        self._host = extents.shardings(memory.HOST_KIND)
        self._device = extents.shardings(None)
        self.save_program = functools.cache(self._compile_save)
        self.load_program = functools.cache(self._compile_load)
        self.copy_program = functools.cache(self._compile_copy)

    @property
    def num_layer_groups(self) -> int:
        """Number of programs that load an extent."""
        return len(self.extents.layer_groups)

    def warm_up(self) -> None:
        """Compile every program, of the copies only the smallest."""
        for kind in SAVE_KINDS[self.mode]:
            self.save_program(kind)
        for group in range(self.num_layer_groups):
            self.load_program(group)
        if self._pool.num_shards == 1:
            self.copy_program(_SMALLEST_COPY)

    def new_extent(self) -> Callable[[], Extent]:
        """Compile a program that allocates an extent of zeros on the host."""
        specs = self.extents.specs(memory.HOST_KIND)
        zeros = jax.jit(
            lambda: tuple(jnp.zeros(spec.shape, spec.dtype) for spec in specs),
            out_shardings=self._host,
            compiler_options=self._options,
        )
        return zeros.lower().compile()

    def save(
        self,
        leaves: list[jax.Array],
        plan: SavePlan,
        carry: Extent | None,
        spare: Extent | None,
    ) -> tuple[Extent, list[jax.Array]]:
        """Copy device blocks into a new extent on the host.

        Args:
            leaves: The pool's; only read.
            plan: Which block goes where.
            carry: The extent that rows are carried over from; only read. None if the
                plan carries none.
            spare: The memory to write to in the mode ``"fused"``. Donated.

        Returns:
            The new extent, and arrays that are ready when the copies are done.
        """
        kind: SaveKind
        args: tuple[Any, ...]
        if self.mode == "fused":
            if carry is not None:
                kind, args = "merge", (plan.row_lists(), carry, spare)
            elif (plan.sources != NOTHING).all():
                kind, args = "gather", (plan.row_sources(), spare)
            else:
                kind, args = "write", (plan.row_lists(), spare)
            extent, token = self._run(self.save_program(kind), leaves, *args)
            return extent, [token]
        if carry is not None:
            on_device = jax.device_put(carry, self._device)
            kind, args = "merge", (plan.row_sources(), on_device)
        else:
            kind, args = "gather", (plan.row_sources(),)
        staged, _ = self._run(self.save_program(kind), leaves, *args)
        extent = jax.device_put(staged, self._host)
        return extent, list(extent)

    def stage(self, extent: Extent, layer_group: int) -> Extent:
        """Copy the arrays of a layer group to the device, in one call."""
        arrays = self.extents.arrays_of(layer_group)
        staged: Extent = jax.device_put(extent[arrays], self._device[arrays])
        return staged

    def load(
        self,
        leaves: list[jax.Array],
        targets: NDArray[np.int32],
        arrays: Extent,
        layer_group: int,
    ) -> jax.Array:
        """Copy blocks of an extent into the leaves of a layer group.

        Args:
            leaves: All of the pool's. Those of the layer group are donated, and
                replaced in the list.
            targets: i32[shards, rows]. The device block for each row, counted within
                its shard; NOTHING for rows that are not wanted.
            arrays: The extent's arrays of this group: on the device, from `stage`, in
                the mode ``"staged"``; on the host in the mode ``"fused"``.
            layer_group: The index of the group.

        Returns:
            An array that is ready when the copies are done.
        """
        own = self.extents.leaves_of(layer_group)
        program = self.load_program(layer_group)
        token: jax.Array
        leaves[own], token = self._run(
            program, leaves[own], self._rows_to_write(targets), arrays
        )
        return token

    def write_group(
        self,
        leaves: list[jax.Array],
        targets: NDArray[np.int32] | jax.Array,
        arrays: Extent,
        layer_group: int,
        after: PyTree,
    ) -> list[jax.Array]:
        """Write blocks of an extent into the leaves of a layer group. Inside jit.

        Args:
            leaves: Those of the layer group.
            targets: What `step_targets` makes.
            arrays: The extent's arrays of this group, on the host.
            layer_group: The index of the group.
            after: What is computed before the copy is waited for.

        Returns:
            The leaves afterwards.
        """

        def scatter(
            leaves: list[jax.Array], targets: jax.Array, arrays: Extent
        ) -> list[jax.Array]:
            return rows.scatter_rows(
                self.extents, layer_group, leaves, targets[0], arrays
            )

        own = self._leaf_specs()[self.extents.leaves_of(layer_group)]
        extent = self.extents.partition_specs()[self.extents.arrays_of(layer_group)]
        # Nothing else would keep XLA from waiting for all groups before the first.
        arrived, _ = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
            (jax.device_put(arrays, _DEVICE), after)
        )
        written: list[jax.Array] = self._per_shard(
            scatter, in_specs=(own, self._shard_spec(), extent), out_specs=own
        )(leaves, targets, arrived)
        return written

    def step_targets(self, targets: NDArray[np.int32]) -> NDArray[np.int32] | jax.Array:
        """Make what `write_group` takes of i32[shards, rows], NOTHING for no block."""
        return self._placed(self._rows_to_write(targets))

    def _rows_to_write(self, targets: NDArray[np.int32]) -> NDArray[np.int32]:
        # Rows that are not wanted get distinct ids past the end, which are dropped:
        # -1 would wrap around, and ids must be distinct.
        past = self._pool.shard_blocks + np.arange(targets.shape[1], dtype=np.int32)
        return np.where(targets == NOTHING, past, targets)

    def copy(
        self,
        leaves: list[jax.Array],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
    ) -> None:
        """Copy blocks within a pool whose block axis is not sharded.

        Args:
            leaves: The pool's. Donated, and replaced in the list.
            sources: i32[n]. The blocks to read.
            targets: i32[n]. Where each goes; distinct, and none is a source.
        """
        size = _SMALLEST_COPY
        while size < len(sources):
            size *= 4
        # Padding goes past the end, as in `load`.
        plan = np.zeros((1, 2 * size), np.int32)
        plan[0, size:] = self._pool.shard_blocks + np.arange(size)
        plan[0, : len(sources)] = sources
        plan[0, size : size + len(targets)] = targets
        leaves[:], _ = self._run(self.copy_program(size), leaves, plan)

    def _run(
        self,
        program: jax.stages.Compiled,
        leaves: list[jax.Array],
        plan: NDArray[np.int32],
        *extents: Extent | None,
    ) -> Any:
        """Run a program with a plan that nothing changes: XLA may read it late."""
        # Transfer guards refuse implicit transfers; the plan's is intended, and costs
        # less than a `device_put`.
        with (
            jax.transfer_guard_host_to_device("allow"),
            # Bytes are only moved: a NaN among them is no error.
            jax.debug_nans(False),
            jax.debug_infs(False),
        ):
            return program(leaves, self._placed(plan), *extents)

    def _placed(self, plan: NDArray[np.int32]) -> NDArray[np.int32] | jax.Array:
        """Spread a plan over the devices of the pool, if they are several."""
        if not isinstance(self._plan, jax.sharding.NamedSharding):
            return plan
        # With several processes `device_put` would compare the replicas first.
        return jax.make_array_from_callback(
            plan.shape, self._plan, lambda index: plan[index]
        )

    def _compile_save(self, kind: SaveKind) -> jax.stages.Compiled:
        fused, merges = self.mode == "fused", kind == "merge"
        # For all rows a gather is faster, since XLA:CPU uses several threads; for a few
        # rows a loop is, since it leaves the others unwritten.
        in_lists = fused and kind != "gather"

        def write(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[Extent, jax.Array]:
            *carry, spare = extents
            written = rows.write_rows(self.extents, leaves, plan[0], carry, spare)
            return written, _token(plan)

        def gather(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[Extent, jax.Array]:
            carry = extents[:1] if merges else ()
            gathered = rows.gather_rows(self.extents, leaves, plan[0], carry)
            return gathered, _token(plan)

        def program(
            leaves: list[jax.Array], plan: jax.Array, *extents: Extent
        ) -> tuple[Extent, jax.Array]:
            extents = jax.device_put(extents, _DEVICE) if fused else extents
            specs = (self._leaf_specs(), self._shard_spec())
            extent = self.extents.partition_specs()
            result: tuple[Extent, jax.Array] = self._per_shard(
                write if in_lists else gather,
                in_specs=(*specs, *[extent] * len(extents)),
                out_specs=(extent, self._shard_spec()),
            )(leaves, plan, *extents)
            return result

        # Donate within one memory kind only: XLA:CPU aborts the process if a device
        # buffer is donated to a host result. The pool is only read, never donated.
        memory_kind = memory.HOST_KIND if fused else None
        extents = [self.extents.specs(memory_kind)] * (merges + fused)
        compiled = jax.jit(
            program,
            donate_argnums=(1 + len(extents),) if fused else (),
            keep_unused=True,
            out_shardings=(self._host if fused else self._device, self._plan),
            compiler_options=self._options,
        )
        num_rows = self.extents.rows
        plan = self._plan_spec(3 * num_rows + 2 if in_lists else 2 * num_rows)
        return compiled.lower(self._pool.pool_specs(), plan, *extents).compile()

    def _compile_load(self, layer_group: int) -> jax.stages.Compiled:
        fused = self.mode == "fused"
        own = self.extents.leaves_of(layer_group)
        arrays = self.extents.arrays_of(layer_group)

        def scatter(
            leaves: list[jax.Array], plan: jax.Array, extent: Extent
        ) -> tuple[list[jax.Array], jax.Array]:
            found = rows.scatter_rows(
                self.extents, layer_group, leaves, plan[0], extent
            )
            return found, _token(plan)

        def program(
            leaves: list[jax.Array], plan: jax.Array, extent: Extent
        ) -> tuple[list[jax.Array], jax.Array]:
            extent = jax.device_put(extent, _DEVICE) if fused else extent
            specs = (self._leaf_specs()[own], self._shard_spec())
            result: tuple[list[jax.Array], jax.Array] = self._per_shard(
                scatter,
                in_specs=(*specs, self.extents.partition_specs()[arrays]),
                out_specs=specs,
            )(leaves, plan, extent)
            return result

        shardings = [leaf.sharding for leaf in self._pool.leaves[own]]
        compiled = jax.jit(
            program,
            donate_argnums=0,
            out_shardings=(shardings, self._plan),
            compiler_options=self._options,
        )
        return compiled.lower(
            self._pool.pool_specs()[own],
            self._plan_spec(self.extents.rows),
            self.extents.specs(memory.HOST_KIND if fused else None)[arrays],
        ).compile()

    def _compile_copy(self, size: int) -> jax.stages.Compiled:
        def copy(
            leaves: list[jax.Array], plan: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            axes = [leaf.block_axis for leaf in self._pool.leaves]
            return rows.copy_blocks(leaves, axes, *jnp.split(plan[0], 2)), _token(plan)

        specs = (self._leaf_specs(), self._shard_spec())
        compiled = jax.jit(
            self._per_shard(copy, in_specs=specs, out_specs=specs),
            donate_argnums=0,
            out_shardings=([leaf.sharding for leaf in self._pool.leaves], self._plan),
            compiler_options=self._options,
        )
        plan = self._plan_spec(2 * size)
        return compiled.lower(self._pool.pool_specs(), plan).compile()

    def _per_shard(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Run `function` on each shard separately."""
        if self._pool.mesh is None:
            return function
        # check_vma proves that replicas are equal, which holds here by construction.
        return jax.shard_map(
            function,
            mesh=self._pool.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def _leaf_specs(self) -> list[jax.sharding.PartitionSpec]:
        return [memory.partition_spec(*leaf.spec) for leaf in self._pool.leaves]

    def _shard_spec(self) -> jax.sharding.PartitionSpec:
        return memory.partition_spec(self._pool.shard_axes or None)

    def _plan_spec(self, size: int) -> jax.ShapeDtypeStruct:
        shape = (self._pool.num_shards, size)
        return memory.array_spec(shape, np.dtype(np.int32), self._plan)


def _token(plan: jax.Array) -> jax.Array:
    """Make f32[1, 1] that is ready when the program is done and is never donated.

    It tells whether the program is done after the pool has been donated again. Its
    arithmetic is on purpose: XLA:CPU runs a program with less than a thousand
    floating-point operations in the calling thread, however many bytes it moves, and
    any other in the background.
    """
    ramp = jnp.arange(1024, dtype=jnp.float32)[None]
    return jnp.sum(ramp * plan[:, :1].astype(jnp.float32), axis=1, keepdims=True)


def choose_mode(mode: Mode | None, platform: str) -> Mode:
    """Check a mode, or choose one.

    Args:
        mode: The requested mode; None for the best on the platform.
        platform: The platform of the pool's devices.

    Raises:
        ValueError: There is no such mode, or it does not work here.
    """
    if mode is None:
        return "fused" if platform == "cpu" else "staged"
    if mode not in MODES:
        raise ValueError(f"{mode=} must be one of {MODES} or None.")
    if mode == "fused" and platform != "cpu":
        result = probe.probe_fused(platform)
        if not result.ok:
            raise ValueError(f"{mode=} cannot be used here: {result.reason}")
    return mode
