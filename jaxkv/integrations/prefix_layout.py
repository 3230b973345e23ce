"""The layout of the KV of one prompt, whole and cut into blocks.

An engine with a contiguous cache holds the KV of a prompt as a pytree of arrays, padded
along their sequence axes. If it is cut along that axis, an array is a pool of blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.transfer import memory
from jaxkv.transfer.layout import Leaf, PoolLayout
from jaxkv.types import PyTree


@dataclasses.dataclass(frozen=True)
class PrefixLayout:
    """The layout of the KV of a prompt, whole and cut into blocks."""

    whole: PoolLayout  # At the greatest length, with one token per block.
    names: tuple[str, ...]  # The paths of the leaves.
    block_size: int  # Tokens per block.

    @classmethod
    def of(
        cls, kv_like: PyTree, sequence_axis: PyTree, block_size: int
    ) -> PrefixLayout:
        """Read the layout of KV of the greatest length, of arrays or their shapes.

        ValueError or TypeError if it cannot be cut along `sequence_axis`, an int or a
        pytree of ints that is a prefix of `kv_like`.
        """
        described = describe(kv_like)
        try:
            whole = PoolLayout.of(described, sequence_axis)
        except ValueError as error:
            raise ValueError(
                "the KV of a prompt must be a pool with one token per block and "
                f"sequence_axis as its block_axis: {error}"
            ) from error
        names = tuple(path or "kv" for path, _ in leaf_paths(kv_like))
        if whole.shard_axes:
            raise ValueError(
                f"the tokens of {names[0]!r}, axis {whole.leaves[0].block_axis}, are "
                f"sharded over {whole.shard_axes}; a block must not be split, so shard "
                "another axis."
            )
        if whole.num_blocks < block_size:
            raise ValueError(
                f"the KV has room for {whole.num_blocks} tokens, which is less than a "
                f"block: {block_size=}."
            )
        return cls(whole, names, block_size)

    @property
    def max_tokens(self) -> int:
        """Tokens that the arrays have room for."""
        return self.whole.num_blocks

    @property
    def num_blocks(self) -> int:
        """Full blocks that the arrays have room for."""
        return self.max_tokens // self.block_size

    @property
    def axes(self) -> list[int]:
        """The sequence axis of each leaf, which is the block axis of its pool."""
        return [leaf.block_axis for leaf in self.whole.leaves]

    def check(self, kv: PyTree) -> tuple[list[jax.Array], int]:
        """Return the leaves of a prompt's KV, and the tokens they have room for.

        The leaves are placed as in the layout. An error is raised for KV of another
        layout; its length may differ.
        """
        arrays, leaves = arrays_of("kv", kv, self.whole.treedef), self.whole.leaves
        has_axis = arrays[0].ndim == len(leaves[0].shape)
        length = arrays[0].shape[leaves[0].block_axis] if has_axis else 0
        for name, array, leaf in zip(self.names, arrays, leaves, strict=True):
            if array.dtype != leaf.dtype or array.shape != _resized(leaf, length):
                raise ValueError(
                    f"{name!r} must be {leaf.dtype}{list(leaf.shape)}, perhaps with "
                    f"another length of axis {leaf.block_axis}, the same in all "
                    f"leaves; not {array.dtype}{list(array.shape)}."
                )
        if length > self.max_tokens:
            raise ValueError(
                f"kv has room for {length} tokens, and the template for "
                f"{self.max_tokens}; make the store for the greatest length."
            )
        for n, (array, leaf) in enumerate(zip(arrays, leaves, strict=True)):
            if not array.sharding.is_equivalent_to(leaf.sharding, array.ndim):
                arrays[n] = jax.device_put(array, leaf.sharding)
        return arrays, length

    def cut(self, leaves: list[jax.Array], length: int) -> list[jax.Array]:
        """Copy the KV of a prompt, with room for `length` tokens, into blocks."""
        pool: list[jax.Array] = self._programs("cut", length)(leaves)
        return pool

    def join(self, pool: list[jax.Array], length: int) -> PyTree:
        """Copy blocks into the KV of a prompt, with room for `length` tokens."""
        return self.whole.unflatten(self._programs("join", length)(pool))

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

        leaves = self.whole.leaves
        whole = [
            memory.array_spec(_resized(leaf, length), leaf.dtype, leaf.sharding)
            for leaf in leaves
        ]
        sizes = self.num_blocks, self.block_size
        blocks = [
            memory.array_spec(
                _resized(leaf, *sizes), leaf.dtype, _sharding_of_blocks(leaf)
            )
            for leaf in leaves
        ]
        kinds: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Any]]] = {
            "cut": (cut_all, (whole,), blocks),
            "join": (join_all, (blocks,), whole),
            "zeros": (zeros, (), blocks),
        }
        function, args, results = kinds[name]
        program = jax.jit(
            function,
            out_shardings=[result.sharding for result in results],
            compiler_options=memory.compiler_options(self.whole.platform),
        )
        return program.lower(*args).compile()


def leaf_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths, joined by slashes."""
    return [(_text(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def _text(path: Sequence[Any]) -> str:
    text: str = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return text


def cut(array: jax.Array, axis: int, block_size: int, num_blocks: int) -> jax.Array:
    """Cut ``[..., tokens, ...]`` into ``[..., num_blocks, block_size, ...]``.

    Tokens beyond these blocks are dropped; missing tokens are zero. May be traced.

    >>> cut(jnp.arange(5), 0, 2, 3).tolist()
    [[0, 1], [2, 3], [4, 0]]
    """
    array = _resize(array, axis, num_blocks * block_size)
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    return array.reshape(*before, num_blocks, block_size, *after)


def join(blocks: jax.Array, axis: int, length: int) -> jax.Array:
    """Join ``[..., num_blocks, block_size, ...]`` into ``[..., length, ...]``.

    Missing tokens are zero. May be traced.

    >>> join(jnp.array([[0, 1], [2, 3]]), 0, 5).tolist()
    [0, 1, 2, 3, 0]
    """
    before, after = blocks.shape[:axis], blocks.shape[axis + 2 :]
    num_tokens = blocks.shape[axis] * blocks.shape[axis + 1]
    return _resize(blocks.reshape(*before, num_tokens, *after), axis, length)


def _resize(array: jax.Array, axis: int, length: int) -> jax.Array:
    padding = [(0, 0, 0)] * array.ndim
    padding[axis] = 0, length - array.shape[axis], 0  # Negative to drop tokens.
    return jax.lax.pad(array, jnp.zeros((), array.dtype), padding)


def arrays_of(
    name: str, tree: PyTree, treedef: jax.tree_util.PyTreeDef
) -> list[jax.Array]:
    """Return the leaves of a pytree; raise unless they are live arrays outside jit."""
    arrays, structure = jax.tree.flatten(tree)
    if treedef != structure:
        raise ValueError(f"{name} must have the structure {treedef}, not {structure}.")
    for n, array in enumerate(arrays):
        if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
            raise TypeError(
                f"{name}: leaf {leaf_paths(tree)[n][0]!r} must be a jax.Array outside "
                f"jit, not {type(array)}."
            )
        if array.is_deleted():
            leaf = leaf_paths(tree)[n][0]
            raise RuntimeError(f"{name}: leaf {leaf!r} has been deleted or donated.")
    return arrays


def describe(tree: PyTree) -> PyTree:
    """Return the shapes and shardings of arrays, or of their shapes."""
    return jax.tree.map_with_path(_describe, tree)


def _describe(path: Sequence[Any], leaf: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        raise TypeError(
            f"{_text(path)!r} must be a jax.Array or a jax.ShapeDtypeStruct, not "
            f"{type(leaf)}."
        )
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return memory.array_spec(leaf.shape, leaf.dtype, leaf.sharding or default)


def _resized(leaf: Leaf, *sizes: int) -> tuple[int, ...]:
    """Return the shape of a leaf with other sizes in place of its sequence axis."""
    return *leaf.shape[: leaf.block_axis], *sizes, *leaf.shape[leaf.block_axis + 1 :]


def _sharding_of_blocks(leaf: Leaf) -> jax.sharding.Sharding:
    """Return the sharding of a leaf cut into blocks, which has one axis more."""
    if not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        return leaf.sharding
    spec = list(leaf.spec)
    spec.insert(leaf.block_axis, None)
    return jax.sharding.NamedSharding(leaf.sharding.mesh, memory.partition_spec(*spec))
