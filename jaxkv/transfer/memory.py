"""Where the bytes of a pool lie: its layout, and the memories it may move to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.types import PyTree

HOST_KIND = "pinned_host"
"""The one memory kind that host blocks live in."""

# XLA:CPU rewrites every op on a float type that it lacks into float32, one pass per
# type. For a scatter that means the whole pool, there and back: the time grows with
# the pool instead of the update, and signalling NaNs come back quietened. Moving bytes
# needs no arithmetic, so the transfer programs switch these passes off.
_NORMALISED_FLOATS = (
    "bf16",
    "f8e3m4",
    "f8e4m3",
    "f8e4m3b11fnuz",
    "f8e4m3fn",
    "f8e4m3fnuz",
    "f8e5m2",
    "f8e5m2fnuz",
    "f8e8m0fnu",
)

_HOST_MEMORY_LIMITS = {
    "gpu": "raise XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (64 unless set)",
    "tpu": "raise TPU_PREMAPPED_BUFFER_SIZE (bytes; 4 GiB unless set)",
}


def memory_kinds(device: jax.Device) -> tuple[str, ...]:
    """Name the memories that `device` can address, its own first."""
    default = device.default_memory().kind
    others = sorted({memory.kind for memory in device.addressable_memories()})
    return (default, *(kind for kind in others if kind != default))


def host_sharding(
    device: jax.Device, kind: str = HOST_KIND
) -> jax.sharding.SingleDeviceSharding:
    """Place arrays in the host memory that `device` copies to and from.

    Raises:
        ValueError: `kind` is not one that bytes survive in, or `device` lacks it.
    """
    if kind != HOST_KIND:
        raise ValueError(
            f"{kind=} must be {HOST_KIND!r}: copies through unpinned_host have "
            "corrupted bfloat16 on TPU, and XLA:CPU ignores a move to it inside jit."
        )
    kinds = memory_kinds(device)
    if kind not in kinds:
        raise ValueError(
            f"{device} has the memories {kinds}, not {kind!r}: it has no host memory "
            "that it could copy blocks to in the background."
        )
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def compiler_options(platform: str) -> dict[str, str] | None:
    """Give the options that keep transfer programs cheap and bit-exact."""
    if platform != "cpu":
        return None
    passes = (f"float-normalization-{name}" for name in _NORMALISED_FLOATS)
    return {"xla_disable_hlo_passes": ",".join(passes)}


def array_spec(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding | None = None,
) -> jax.ShapeDtypeStruct:
    """Describe an array, for compiling."""
    return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        shape, dtype, sharding=sharding
    )


def host_memory_error(num_blocks: int, num_bytes: int, platform: str) -> MemoryError:
    """Explain a failure to allocate host blocks, and what to do about it."""
    remedy = _HOST_MEMORY_LIMITS.get(platform)
    return MemoryError(
        f"Could not allocate {num_blocks} host blocks, {num_bytes} bytes "
        f"({num_bytes / 2**30:.2f} GiB) of {HOST_KIND} memory: lower num_host_blocks"
        + (f" or {remedy} before jax is imported." if remedy else ".")
    )


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """What a device pool looks like: everything about it but its bytes.

    A pool is any pytree of arrays that hold one block per entry of their first
    axis. Leaves may differ in block shape and dtype, not in the number of blocks.

    Attributes:
        treedef: How the leaves hang together.
        names: The leaves' paths, for messages.
        block_shapes: One block's shape in each leaf; the leaf's shape less axis 0.
        dtypes: One per leaf.
        shardings: One per leaf; all on `device`.
        num_blocks: The size of axis 0 of every leaf.
        device: Where the pool lives.
    """

    treedef: jax.tree_util.PyTreeDef
    names: tuple[str, ...]
    block_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    shardings: tuple[jax.sharding.Sharding, ...]
    num_blocks: int
    device: jax.Device

    @classmethod
    def of(cls, pool: PyTree) -> PoolLayout:
        """Read the layout off `pool`.

        Raises:
            ValueError: `pool` has no leaves, or one that is not an array of whole
                bytes with the block axis first, in the default memory of one device.
        """
        paths, treedef = jax.tree.flatten_with_path(pool)
        if not paths:
            raise ValueError("pool has no leaves; it must have at least one array.")
        names = tuple(f"pool{jax.tree_util.keystr(path)}" for path, _ in paths)
        leaves = [leaf for _, leaf in paths]
        for name, leaf in zip(names, leaves, strict=True):
            _check_leaf(name, leaf)
        num_blocks, device = leaves[0].shape[0], _device_of(leaves[0])
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.shape[0] != num_blocks:
                raise ValueError(
                    f"{name} has {leaf.shape[0]} blocks and {names[0]} {num_blocks}; "
                    "axis 0 of every leaf must be the same block axis."
                )
            if _device_of(leaf) != device:
                raise ValueError(
                    f"{name} is on {_device_of(leaf)} and {names[0]} on {device}; "
                    "all leaves must be on one device."
                )
        return cls(
            treedef=treedef,
            names=names,
            block_shapes=tuple(leaf.shape[1:] for leaf in leaves),
            dtypes=tuple(leaf.dtype for leaf in leaves),
            shardings=tuple(leaf.sharding for leaf in leaves),
            num_blocks=num_blocks,
            device=device,
        )

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all leaves."""
        return sum(
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(self.block_shapes, self.dtypes, strict=True)
        )

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Leaf indices, grouped by equal block shape and dtype."""
        groups: dict[tuple[tuple[int, ...], np.dtype], list[int]] = {}
        for index, key in enumerate(zip(self.block_shapes, self.dtypes, strict=True)):
            groups.setdefault(key, []).append(index)
        return tuple(tuple(indices) for indices in groups.values())

    def pool_specs(self) -> list[jax.ShapeDtypeStruct]:
        """Describe the leaves, for compiling."""
        # Not `self.shardings`: a trace needs no mesh axes when there is one device.
        sharding = jax.sharding.SingleDeviceSharding(self.device)
        return [
            array_spec((self.num_blocks, *shape), dtype, sharding)
            for shape, dtype in zip(self.block_shapes, self.dtypes, strict=True)
        ]

    def block_specs(
        self, sharding: jax.sharding.Sharding
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Describe one block outside the pool: ``[leaves, *block]`` per group."""
        return tuple(
            array_spec(
                (len(group), *self.block_shapes[group[0]]),
                self.dtypes[group[0]],
                sharding,
            )
            for group in self.groups
        )

    def flatten(self, pool: PyTree) -> list[jax.Array]:
        """Take `pool` apart, if it has this layout.

        Raises:
            ValueError: It has another layout.
            RuntimeError: Its arrays have been deleted or donated.
        """
        leaves, treedef = jax.tree.flatten(pool)
        if treedef != self.treedef:
            raise ValueError(
                f"pool must have the structure {self.treedef}, not {treedef}."
            )
        for index, leaf in enumerate(leaves):
            name = self.names[index]
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
                raise ValueError(
                    f"{name} must be a jax.Array outside jit, not {type(leaf)}."
                )
            shape = (self.num_blocks, *self.block_shapes[index])
            if leaf.shape != shape or leaf.dtype != self.dtypes[index]:
                raise ValueError(
                    f"{name} must be {self.dtypes[index]}{list(shape)}, "
                    f"not {leaf.dtype}{list(leaf.shape)}."
                )
            if leaf.is_deleted():
                raise RuntimeError(
                    f"{name} has been deleted or donated: pass the pool that the last "
                    "load (or the last step that donates it) returned."
                )
            # The first question is cheap, the second one settles it.
            if leaf.sharding != self.shardings[index] and not _is_in_memory_of(
                self.device, leaf.sharding
            ):
                raise ValueError(
                    f"{name} must be in the memory of {self.device}, not on "
                    f"{leaf.sharding}."
                )
        return leaves

    def unflatten(self, leaves: list[jax.Array]) -> PyTree:
        """Put a pool together from its leaves."""
        return jax.tree.unflatten(self.treedef, leaves)


def _is_in_memory_of(device: jax.Device, sharding: jax.sharding.Sharding) -> bool:
    kinds = (device.default_memory().kind, None)
    return sharding.device_set == {device} and sharding.memory_kind in kinds


def _device_of(leaf: jax.Array) -> jax.Device:
    (device,) = leaf.sharding.device_set
    return device


def _check_leaf(name: str, leaf: object) -> None:
    """Refuse a leaf that cannot be part of any pool."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        raise ValueError(f"{name} must be a jax.Array outside jit, not {type(leaf)}.")
    if leaf.is_deleted():
        raise RuntimeError(f"{name} has been deleted or donated.")
    if leaf.ndim < 1 or leaf.size == 0:
        raise ValueError(
            f"{name} has shape {leaf.shape}; it must have the block axis first and "
            "at least one element."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(f"{name} has the dtype {leaf.dtype}; it must hold plain data.")
    if jax.dtypes.itemsize_bits(leaf.dtype) % 8:
        raise ValueError(
            f"{name} has the dtype {leaf.dtype}, less than a byte an element; pack it "
            "into uint8 first."
        )
    if len(leaf.sharding.device_set) != 1:
        raise ValueError(
            f"{name} is sharded over {len(leaf.sharding.device_set)} devices: that is "
            "not supported yet; make one pool and one engine per device."
        )
    device = _device_of(leaf)
    if not _is_in_memory_of(device, leaf.sharding):
        raise ValueError(
            f"{name} is in {leaf.sharding.memory_kind!r}; a pool must be in the "
            f"device's own memory, {device.default_memory().kind!r}."
        )
