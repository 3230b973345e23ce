"""The layout of the KV of one prompt, whole and cut into blocks.

An engine with a contiguous cache holds the KV of a prompt as a pytree of arrays, padded
along their sequence axes. If it is cut along that axis, an array is a pool of blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.transfer import memory
from jaxkv.transfer.layout import PoolLayout
from jaxkv.types import PyTree


@dataclasses.dataclass(frozen=True)
class PrefixLayout:
    """The layout of the KV of a prompt, whole and cut into blocks.

    Tokens beyond the blocks are dropped, and missing tokens are zero.
    """

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
    def axes(self) -> list[int]:
        """The sequence axis of each leaf, which is the block axis of its pool."""
        return [leaf.block_axis for leaf in self.whole.leaves]

    def check(self, kv: PyTree) -> tuple[list[jax.Array], int]:
        """Return the leaves of a prompt's KV, and the tokens they have room for.

        The leaves are placed as in the layout. An error is raised for KV of another
        layout; its length may differ.
        """
        arrays, treedef = jax.tree.flatten(kv)
        leaves = self.whole.leaves
        if treedef != self.whole.treedef:
            raise ValueError(
                f"kv must have the structure {self.whole.treedef}, not {treedef}."
            )
        for name, array in zip(self.names, arrays, strict=True):
            if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
                raise TypeError(
                    f"kv: leaf {name!r} must be a jax.Array outside jit, not "
                    f"{type(array)}."
                )
            if array.is_deleted():
                raise RuntimeError(f"kv: leaf {name!r} has been deleted or donated.")
        has_axis = arrays[0].ndim == len(leaves[0].shape)
        length = arrays[0].shape[leaves[0].block_axis] if has_axis else 0
        specs = self._specs(length)
        for name, array, leaf, spec in zip(
            self.names, arrays, leaves, specs, strict=True
        ):
            if (array.dtype, array.shape) != (spec.dtype, spec.shape):
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
        pool: list[jax.Array] = self._programs("cut", length)(*leaves)
        return pool

    def join(self, pool: list[jax.Array], length: int) -> PyTree:
        """Copy blocks into the KV of a prompt, with room for `length` tokens."""
        return self.whole.unflatten(self._programs("join", length)(*pool))

    def new_pool(self) -> list[jax.Array]:
        """Make a pool of zeros."""
        pool: list[jax.Array] = self._programs("zeros", 0)()
        return pool

    @functools.cached_property
    def _programs(self) -> Callable[[str, int], jax.stages.Compiled]:
        # Ahead of time, so that committed and uncommitted arrays share a program.
        return functools.cache(self._compile)

    def _compile(self, name: str, length: int) -> jax.stages.Compiled:
        size, num_blocks = self.block_size, self.max_tokens // self.block_size
        whole, blocks = self._specs(length), self._specs(num_blocks, size)

        def cut(array: jax.Array, axis: int) -> jax.Array:
            array = _resized(array, axis, num_blocks * size)
            before, after = array.shape[:axis], array.shape[axis + 1 :]
            return array.reshape(*before, num_blocks, size, *after)

        def join(array: jax.Array, axis: int) -> jax.Array:
            before, after = array.shape[:axis], array.shape[axis + 2 :]
            array = array.reshape(*before, num_blocks * size, *after)
            return _resized(array, axis, length)

        kinds: dict[str, tuple[Callable[..., Any], list[Any], list[Any]]] = {
            "cut": (lambda *leaves: list(map(cut, leaves, self.axes)), whole, blocks),
            "join": (lambda *pool: list(map(join, pool, self.axes)), blocks, whole),
            "zeros": (lambda: list(map(jnp.zeros_like, blocks)), [], blocks),
        }
        function, args, results = kinds[name]
        program = jax.jit(
            function,
            out_shardings=[result.sharding for result in results],
            compiler_options=memory.compiler_options(self.whole.platform),
        )
        return program.lower(*args).compile()

    def _specs(self, *sizes: int) -> list[jax.ShapeDtypeStruct]:
        """Describe the leaves with other sizes in place of their sequence axis."""
        specs = []
        for leaf in self.whole.leaves:
            axis, sharding = leaf.block_axis, leaf.sharding
            if isinstance(sharding, jax.sharding.NamedSharding):
                names = list(leaf.spec)
                names[axis : axis + 1] = [None] * len(sizes)
                spec = memory.partition_spec(*names)
                sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
            shape = *leaf.shape[:axis], *sizes, *leaf.shape[axis + 1 :]
            specs.append(memory.array_spec(shape, leaf.dtype, sharding))
        return specs


def leaf_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Return the leaves of a pytree with their paths, joined by slashes."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def describe(tree: PyTree) -> PyTree:
    """Return the shapes and shardings of arrays, or of their shapes."""
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    specs = []
    for path, leaf in leaf_paths(tree):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise TypeError(
                f"{path!r} must be a jax.Array or a jax.ShapeDtypeStruct, not "
                f"{type(leaf)}."
            )
        sharding = leaf.sharding or default
        specs.append(memory.array_spec(leaf.shape, leaf.dtype, sharding))
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


def _resized(array: jax.Array, axis: int, length: int) -> jax.Array:
    padding = [(0, 0, 0)] * array.ndim
    padding[axis] = 0, length - array.shape[axis], 0  # Negative to drop tokens.
    return jax.lax.pad(array, jnp.zeros((), array.dtype), padding)
