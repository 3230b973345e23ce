"""The layout of a device pool, and how its blocks are spread over devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from jaxkv._util import shown
from jaxkv.transfer.jax_internals import sharding_of
from jaxkv.transfer.memory import array_spec, default_layout, layout_of, partition_spec
from jaxkv.types import PyTree

# Called by `map`, which takes less time for each array than a loop does.
_aval_of = operator.attrgetter("aval")
_is_deleted = operator.methodcaller("is_deleted")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A description of one array of a pool."""

    name: str  # Its path in the pool, for messages.
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    block_axis: int  # The axis that counts the blocks; not negative.
    layout: Layout | None = None  # In memory; None for the compiler's default.

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The axes in their order in memory, the major one first."""
        layout = self.layout or default_layout(self.shape, self.dtype, self.sharding)
        return tuple(layout.major_to_minor)

    def placed(self, sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | Format:
        """Return `sharding`, with the leaf's layout if it has one."""
        return sharding if self.layout is None else Format(self.layout, sharding)

    @property
    def num_blocks(self) -> int:
        """The size of the block axis."""
        return self.shape[self.block_axis]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return math.prod(self.shape) // self.num_blocks * self.dtype.itemsize

    @property
    def spec(self) -> tuple[object, ...]:
        """The sharding of each dimension: a mesh axis, a tuple of them, or None."""
        if not isinstance(self.sharding, jax.sharding.NamedSharding):
            return (None,) * len(self.shape)
        spec = tuple(self.sharding.spec)
        return spec + (None,) * (len(self.shape) - len(spec))

    def mesh_axes(self, axis: int) -> tuple[str, ...]:
        """Return the mesh axes over which an axis is sharded."""
        entry = self.spec[axis]
        if entry is None:
            return ()
        return entry if isinstance(entry, tuple) else (str(entry),)

    @property
    def block_mesh_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the block axis is sharded."""
        return self.mesh_axes(self.block_axis)


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """The structure, shapes, dtypes and shardings of a device pool.

    A pool is any pytree of arrays with the same number of blocks along their block
    axes. Leaves may differ otherwise in shape, dtype and sharding. A block never leaves
    its shard of the block axis, so no program has to move bytes between devices.
    """

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]
    mesh: jax.sharding.Mesh | None  # None for a pool on one device.
    # The platform that programs are compiled for, if other devices stand in for it.
    compiled_for: str | None = None

    @classmethod
    def of(
        cls, pool: PyTree, block_axis: PyTree = 0, *, compiled_for: str | None = None
    ) -> PoolLayout:
        """Read the layout of `pool`; ValueError if it cannot be offloaded.

        Its leaves are arrays, or `jax.ShapeDtypeStruct` with shardings, which describe
        them for compiling, on devices that need not be present. `block_axis`, which may
        be negative, is an int, or a pytree of ints that is a prefix of `pool`.
        RuntimeError if the pool has been deleted or donated.
        """
        paths, treedef = jax.tree.flatten_with_path(pool)
        if not paths:
            raise ValueError("pool has no leaves; it must have at least one array.")
        try:
            axes = jax.tree.leaves(jax.tree.broadcast(block_axis, pool))
        except ValueError as error:
            raise ValueError(
                f"block_axis={shown(block_axis)} must be an int, or a tree of "
                "ints shaped like the top of the pool."
            ) from error
        leaves = tuple(
            _leaf(f"pool{jax.tree_util.keystr(path)}", array, axis)
            for (path, array), axis in zip(paths, axes, strict=True)
        )
        first = leaves[0]
        for leaf in leaves:
            if leaf.num_blocks != first.num_blocks:
                raise ValueError(
                    f"{leaf.name} has {leaf.num_blocks} blocks and {first.name} "
                    f"{first.num_blocks}; the block axes of all leaves must be equally "
                    f"long (here {leaf.block_axis} of {list(leaf.shape)} and "
                    f"{first.block_axis} of {list(first.shape)}; see block_axis)."
                )
            if leaf.sharding.device_set != first.sharding.device_set:
                raise ValueError(
                    f"{leaf.name} is on {_devices(leaf)} and {first.name} on "
                    f"{_devices(first)}; all leaves must be on the same devices."
                )
        _check_distinct([array for _, array in paths], leaves)
        return cls(treedef, leaves, _mesh_of(leaves), compiled_for)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool."""
        return self.leaves[0].num_blocks

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block in all leaves."""
        return sum(leaf.block_bytes for leaf in self.leaves)

    @functools.cached_property
    def device(self) -> jax.Device:
        """One of the pool's devices that this process can address."""
        return _first_device(self.leaves[0].sharding)

    @property
    def platform(self) -> str:
        """The platform that programs are compiled for."""
        return self.compiled_for or str(self.device.platform)

    @functools.cached_property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the block axis is sharded."""
        return self.leaves[0].block_mesh_axes if self.mesh else ()

    @functools.cached_property
    def num_shards(self) -> int:
        """Shards of the block axis."""
        return self.num_shards_of(self.leaves[0], self.leaves[0].block_axis)

    def num_shards_of(self, leaf: Leaf, axis: int) -> int:
        """Return the number of shards of an axis of a leaf."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in leaf.mesh_axes(axis))

    @property
    def shard_blocks(self) -> int:
        """Number of blocks per shard."""
        return self.num_blocks // self.num_shards

    def plan_sharding(self) -> jax.sharding.Sharding:
        """Return the sharding of an array ``[shards, ...]``, a row for each shard."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.device)
        spec = partition_spec(self.shard_axes or None)
        return jax.sharding.NamedSharding(self.mesh, spec)

    def pool_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Describe the leaves, for compiling."""
        # On one device not the leaf's sharding, so that a trace needs no mesh axes.
        single = None if self.mesh else jax.sharding.SingleDeviceSharding(self.device)
        return [
            array_spec(leaf.shape, leaf.dtype, leaf.placed(single or leaf.sharding))
            for leaf in self.leaves
        ]

    def flatten(self, pool: PyTree) -> list[jax.Array]:
        """Return the leaves of `pool`; raise for another layout, or deleted arrays."""
        arrays: list[jax.Array]
        try:
            arrays = self.treedef.flatten_up_to(pool)
            if self._look_as_before(arrays):
                return arrays
        except (TypeError, ValueError):  # Another structure; refused below.
            pass
        arrays, treedef = jax.tree.flatten(pool)
        if treedef != self.treedef:
            raise ValueError(
                f"pool must have the structure {self.treedef}, not {treedef}."
            )
        for array, leaf in zip(arrays, self.leaves, strict=True):
            if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
                raise ValueError(
                    f"{leaf.name} must be a jax.Array outside jit, not {type(array)}."
                )
            if array.shape != leaf.shape or array.dtype != leaf.dtype:
                raise ValueError(
                    f"{leaf.name} must be {leaf.dtype}{list(leaf.shape)}, "
                    f"not {array.dtype}{list(array.shape)}."
                )
            if array.is_deleted():
                raise RuntimeError(
                    f"{leaf.name} has been deleted or donated: pass the pool that the "
                    "last load, advance or drain (or the last step that donates it) "
                    "returned."
                )
            # The first comparison is cheap; the second decides.
            if array.sharding != leaf.sharding and not _same_place(array, leaf):
                raise ValueError(
                    f"{leaf.name} must be placed as {leaf.sharding}, not as "
                    f"{array.sharding}."
                )
            # An array in another layout would be copied into this one at every call.
            if leaf.layout is not None and layout_of(array) != leaf.layout:
                raise ValueError(
                    f"{leaf.name} must lie in memory as {leaf.layout}, not as "
                    f"{layout_of(array)}: compile the programs that return it with "
                    "the layout of the pool that the engine was made for."
                )
        _check_distinct(arrays, self.leaves)
        # Their memory is not kept.
        self._accepted[:] = [
            (
                list(map(type, arrays)),
                list(map(_aval_of, arrays)),
                list(map(sharding_of, arrays)),
            )
        ]
        return arrays

    @functools.cached_property
    def _accepted(self) -> list[tuple[list[Any], ...]]:
        """Types, avals and shardings of the arrays that `flatten` checked last."""
        return []

    @functools.cached_property
    def _has_layouts(self) -> bool:
        return any(leaf.layout is not None for leaf in self.leaves)

    def _look_as_before(self, arrays: list[Any]) -> bool:
        """Whether arrays are known to have this layout, without a look at each."""
        if not self._accepted:
            return False
        types, avals, shardings = self._accepted[0]
        return (
            list(map(type, arrays)) == types
            and list(map(_aval_of, arrays)) == avals
            and list(map(sharding_of, arrays)) == shardings
            and not any(map(_is_deleted, arrays))
            and len(set(map(id, arrays))) == len(arrays)
            and (
                not self._has_layouts
                or all(
                    leaf.layout is None or layout_of(array) == leaf.layout
                    for array, leaf in zip(arrays, self.leaves, strict=True)
                )
            )
        )

    def unflatten(self, arrays: list[jax.Array]) -> PyTree:
        """Make a pool from its leaves."""
        return jax.tree.unflatten(self.treedef, arrays)


def _same_place(array: jax.Array, leaf: Leaf) -> bool:
    ours, its = leaf.sharding, array.sharding
    if its.memory_kind not in (ours.memory_kind, None):
        return False
    return its.is_equivalent_to(ours, array.ndim)


def _check_distinct(arrays: list[jax.Array], leaves: tuple[Leaf, ...]) -> None:
    """Refuse a pool if two leaves are the same array: it could not be donated."""
    if len({id(array) for array in arrays}) == len(arrays):
        return
    names: dict[int, str] = {}
    for array, leaf in zip(arrays, leaves, strict=True):
        if not isinstance(array, jax.Array):
            continue  # a description, which has no memory
        if id(array) in names:
            raise ValueError(
                f"{names[id(array)]} and {leaf.name} are the same array; every leaf "
                "must have its own memory, since loads write into it."
            )
        names[id(array)] = leaf.name


def _devices(leaf: Leaf) -> str:
    return ", ".join(sorted(str(device) for device in leaf.sharding.device_set))


def _first_device(sharding: jax.sharding.Sharding) -> jax.Device:
    # No process can address the devices of a described topology.
    devices: list[jax.Device] = list(
        sharding.addressable_devices or sharding.device_set
    )
    return min(devices, key=lambda device: device.id)


def _mesh_of(leaves: tuple[Leaf, ...]) -> jax.sharding.Mesh | None:
    """Return the mesh that all leaves are spread over; None for one device."""
    first = leaves[0]
    if len(first.sharding.device_set) == 1:
        return None
    meshes = []
    for leaf in leaves:
        sharding = leaf.sharding
        if not isinstance(sharding, jax.sharding.NamedSharding):
            raise ValueError(
                f"{leaf.name} is spread over {len(sharding.device_set)} devices by "
                f"{sharding}; it must be by a jax.sharding.NamedSharding."
            )
        meshes.append(sharding.mesh)
        if sharding.mesh != meshes[0]:
            raise ValueError(
                f"{leaf.name} and {first.name} are sharded over two meshes; all leaves "
                "must be sharded over the same one."
            )
        if leaf.block_mesh_axes != first.block_mesh_axes:
            raise ValueError(
                f"the block axis of {leaf.name} is sharded over "
                f"{leaf.block_mesh_axes or 'nothing'} and that of {first.name} over "
                f"{first.block_mesh_axes or 'nothing'}; it must be sharded alike in "
                "all leaves, so that a block is on the same devices in each."
            )
    assert isinstance(meshes[0], jax.sharding.Mesh)
    return meshes[0]


def _leaf(name: str, array: object, axis: object) -> Leaf:
    """Describe an array, or raise if it cannot be offloaded."""
    if isinstance(array, jax.ShapeDtypeStruct):
        if array.sharding is None:
            raise ValueError(f"{name} is described without a sharding: {array}.")
    elif not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise ValueError(f"{name} must be a jax.Array outside jit, not {type(array)}.")
    elif array.is_deleted():
        raise RuntimeError(f"{name} has been deleted or donated.")
    if array.ndim < 1 or array.size == 0:
        raise ValueError(
            f"{name} has shape {array.shape}; it must have a block axis and at least "
            "one element."
        )
    if (
        not isinstance(axis, int)
        or isinstance(axis, bool)
        or not -array.ndim <= axis < array.ndim
    ):
        raise ValueError(
            f"block_axis {shown(axis)} of {name} must be an int in "
            f"[{-array.ndim}, {array.ndim}): the array is {list(array.shape)}."
        )
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise ValueError(
            f"{name} has the dtype {array.dtype}; it must hold plain data."
        )
    if jax.dtypes.itemsize_bits(array.dtype) % 8:
        raise ValueError(
            f"{name} has the dtype {array.dtype}, less than a byte per element; pack "
            "it into uint8 first."
        )
    default = _first_device(array.sharding).default_memory().kind
    if array.sharding.memory_kind not in (default, None):
        raise ValueError(
            f"{name} is in {array.sharding.memory_kind!r}; a pool must be in the "
            f"device's default memory, {default!r}."
        )
    layout = layout_of(array)
    return Leaf(
        name,
        array.shape,
        array.dtype,
        array.sharding,
        axis % array.ndim,
        None if _is_dense(layout) else layout,
    )


def _is_dense(layout: Layout | None) -> bool:
    """Whether a layout is what compilers take by default on CPU and GPU."""
    if layout is None:
        return True
    order = layout.major_to_minor
    return not layout.tiling and order == tuple(range(len(order)))
