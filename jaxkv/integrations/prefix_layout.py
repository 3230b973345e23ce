"""The layout of the KV of one prompt, whole and cut into blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._util import shown
from jaxkv.integrations.prefix_blocks import cut, join, leaf_paths
from jaxkv.transfer import memory
from jaxkv.types import PyTree


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a prompt's KV.

    Attributes:
        name: Its path, for messages.
        shape: Its shape at the greatest length.
        dtype: Type of its elements.
        sharding: Its devices.
        axis: The axis that counts tokens; not negative.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    axis: int

    @property
    def num_tokens(self) -> int:
        """Tokens that it has room for."""
        return self.shape[self.axis]

    def with_length(self, length: int) -> tuple[int, ...]:
        """Return the shape with another number of tokens."""
        return (*self.shape[: self.axis], length, *self.shape[self.axis + 1 :])

    def pool_sharding(self) -> jax.sharding.Sharding:
        """Return the sharding of the array cut into blocks, with one axis more."""
        if not isinstance(self.sharding, jax.sharding.NamedSharding):
            return self.sharding
        spec = list(self.sharding.spec)
        if len(spec) > self.axis:
            spec.insert(self.axis, None)
        return jax.sharding.NamedSharding(
            self.sharding.mesh, memory.partition_spec(*spec)
        )


@dataclasses.dataclass(frozen=True)
class PrefixLayout:
    """The layout of the KV of a prompt, whole and cut into blocks.

    Attributes:
        treedef: The structure of the pytree.
        leaves: A description of each leaf.
        block_size: Tokens per block.
    """

    treedef: jax.tree_util.PyTreeDef
    leaves: tuple[Leaf, ...]
    block_size: int

    @classmethod
    def of(
        cls, kv_like: PyTree, sequence_axis: PyTree, block_size: int
    ) -> PrefixLayout:
        """Read the layout of the KV of a prompt, or of its shapes.

        Args:
            kv_like: Arrays or `jax.ShapeDtypeStruct`s of the greatest length.
            sequence_axis: The axis that counts tokens: an int, or a pytree of ints
                that is a prefix of `kv_like`.
            block_size: Tokens per block.

        Raises:
            ValueError: A leaf has no such axis, its tokens are sharded, or it has room
                for less than a block or for other tokens than the first leaf.
            TypeError: A leaf is neither an array nor its shape.
        """
        pairs = leaf_paths(kv_like)
        if not pairs:
            raise ValueError("kv has no leaves; it must have at least one array.")
        try:
            axes = jax.tree.leaves(jax.tree.broadcast(sequence_axis, kv_like))
        except ValueError as error:
            raise ValueError(
                f"sequence_axis={shown(sequence_axis)} must be an int, or a "
                "tree of ints shaped like the top of the KV."
            ) from error
        leaves = tuple(
            _leaf(path or "kv", like, axis)
            for (path, like), axis in zip(pairs, axes, strict=True)
        )
        for leaf in leaves:
            if leaf.num_tokens != leaves[0].num_tokens:
                raise ValueError(
                    f"{leaf.name!r} has room for {leaf.num_tokens} tokens along axis "
                    f"{leaf.axis} and {leaves[0].name!r} for {leaves[0].num_tokens} "
                    f"along axis {leaves[0].axis}; all leaves must have the same."
                )
        if leaves[0].num_tokens < block_size:
            raise ValueError(
                f"the KV has room for {leaves[0].num_tokens} tokens, which is less "
                f"than a block: {block_size=}."
            )
        return cls(jax.tree.structure(kv_like), leaves, block_size)

    @property
    def max_tokens(self) -> int:
        """Tokens that the arrays have room for."""
        return self.leaves[0].num_tokens

    @property
    def num_blocks(self) -> int:
        """Full blocks that the arrays have room for."""
        return self.max_tokens // self.block_size

    @property
    def axes(self) -> list[int]:
        """The sequence axis of each leaf, which is the block axis of its pool."""
        return [leaf.axis for leaf in self.leaves]

    def check(self, kv: PyTree) -> tuple[list[jax.Array], int]:
        """Return the leaves of a prompt's KV, which has this layout at any length.

        Returns:
            The leaves, placed as the layout says, and the tokens they have room for.

        Raises:
            ValueError: It has another layout.
            TypeError: A leaf is not a `jax.Array`.
            RuntimeError: An array has been deleted or donated.
        """
        arrays, treedef = jax.tree.flatten(kv)
        if treedef != self.treedef:
            raise ValueError(
                f"kv must have the structure {self.treedef}, not {treedef}."
            )
        length = 0
        for n, (array, leaf) in enumerate(zip(arrays, self.leaves, strict=True)):
            if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
                raise TypeError(
                    f"{leaf.name!r} must be a jax.Array outside jit, not {type(array)}."
                )
            if array.is_deleted():
                raise RuntimeError(f"{leaf.name!r} has been deleted or donated.")
            if n == 0 and array.ndim == len(leaf.shape):
                length = array.shape[leaf.axis]
            if array.dtype != leaf.dtype or array.shape != leaf.with_length(length):
                raise ValueError(
                    f"{leaf.name!r} must be {leaf.dtype}{list(leaf.shape)}, perhaps "
                    f"with another length of axis {leaf.axis}, the same in all leaves; "
                    f"not {array.dtype}{list(array.shape)}."
                )
        if length > self.max_tokens:
            raise ValueError(
                f"kv has room for {length} tokens, and the template for "
                f"{self.max_tokens}; make the store for the greatest length."
            )
        for n, (array, leaf) in enumerate(zip(arrays, self.leaves, strict=True)):
            if not array.sharding.is_equivalent_to(leaf.sharding, array.ndim):
                arrays[n] = jax.device_put(array, leaf.sharding)
        return arrays, length

    def cut(self, leaves: list[jax.Array], length: int) -> list[jax.Array]:
        """Copy the KV of a prompt, with room for `length` tokens, into blocks."""
        pool: list[jax.Array] = self._programs("cut", length)(leaves)
        return pool

    def join(self, pool: list[jax.Array], length: int) -> PyTree:
        """Copy blocks into the KV of a prompt, with room for `length` tokens."""
        return jax.tree.unflatten(self.treedef, self._programs("join", length)(pool))

    def new_pool(self) -> list[jax.Array]:
        """Make a pool of zeros."""
        pool: list[jax.Array] = self._programs("zeros", 0)()
        return pool

    @functools.cached_property
    def _programs(self) -> Callable[[str, int], jax.stages.Compiled]:
        # Ahead of time, so that committed and uncommitted arrays share a program.
        return functools.cache(self._compile)

    def _compile(self, name: str, length: int) -> jax.stages.Compiled:
        def cut_all(leaves: list[jax.Array]) -> list[jax.Array]:
            return [
                cut(array, axis, self.block_size, self.num_blocks)
                for array, axis in zip(leaves, self.axes, strict=True)
            ]

        def join_all(pool: list[jax.Array]) -> list[jax.Array]:
            return [
                join(blocks, axis, length)
                for blocks, axis in zip(pool, self.axes, strict=True)
            ]

        def zeros() -> list[jax.Array]:
            return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in blocks]

        whole = [
            memory.array_spec(leaf.with_length(length), leaf.dtype, leaf.sharding)
            for leaf in self.leaves
        ]
        blocks = [
            memory.array_spec(
                (
                    *leaf.shape[: leaf.axis],
                    self.num_blocks,
                    self.block_size,
                    *leaf.shape[leaf.axis + 1 :],
                ),
                leaf.dtype,
                leaf.pool_sharding(),
            )
            for leaf in self.leaves
        ]
        kinds: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] = {
            "cut": (cut_all, (whole,), blocks),
            "join": (join_all, (blocks,), whole),
            "zeros": (zeros, (), blocks),
        }
        function, args, results = kinds[name]
        devices: list[jax.Device] = list(self.leaves[0].sharding.device_set)
        program = jax.jit(
            function,
            out_shardings=[each.sharding for each in results],
            compiler_options=memory.compiler_options(devices[0].platform),
        )
        return program.lower(*args).compile()


def _leaf(name: str, like: Any, axis: object) -> Leaf:
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{name!r} must be a jax.Array or a jax.ShapeDtypeStruct, not {type(like)}."
        )
    shape = tuple(like.shape)
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"sequence_axis {axis!r} of {name!r} must be an int in "
            f"[{-len(shape)}, {len(shape)}): the array is {list(shape)}."
        )
    axis %= len(shape)
    sharding = like.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = tuple(sharding.spec)
        if len(spec) > axis and spec[axis] is not None:
            raise ValueError(
                f"the tokens of {name!r}, axis {axis}, are sharded over "
                f"{spec[axis]!r}; a block must not be split, so shard another axis."
            )
    elif len(sharding.device_set) > 1:
        raise ValueError(
            f"{name!r} is spread over {len(sharding.device_set)} devices by "
            f"{sharding}; it must be by a jax.sharding.NamedSharding."
        )
    return Leaf(name, shape, np.dtype(like.dtype), sharding, axis)
