"""Codecs: the form of blocks in host memory, raw or compressed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._util import shown
from jaxkv.transfer.layout import Leaf, PoolLayout
from jaxkv.types import PyTree

Quantised: TypeAlias = Literal["int8"]

_LARGEST = 127.0


@dataclasses.dataclass(frozen=True)
class Compression:
    """Keep floating-point blocks on the host in one byte per element.

    Each block has a float32 scale per head and shard, which maps its largest magnitude
    to 127, as in the KV-cache quantisation of vLLM and TensorRT-LLM. Leaves of
    integers, or of one byte per element, are kept as they are. Values are rounded once:
    saving and loading them again changes nothing more. Infinities come back as the
    largest finite magnitude, and NaNs as 0.

    Attributes:
        dtype: ``"int8"``: errs by at most 1/254 of the largest magnitude of a block and
            head, if that is 1e-36 or more, plus the rounding to the dtype of the leaf.
        head_axis: The axis of a leaf that counts heads, or a frozenset of all axes with
            scales of their own, such as of heads and tokens: for all leaves, or as a
            pytree that is a prefix of the pool. None keeps a leaf as it is.
    """

    dtype: Quantised = "int8"
    head_axis: PyTree = -2

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Quantised):
            raise ValueError(f"compression dtype={shown(self.dtype)} must be 'int8'.")


class Part(NamedTuple):
    """One array that a codec makes from a leaf, with the axes of the leaf."""

    shape: tuple[int, ...]  # For all blocks of the leaf.
    dtype: np.dtype


class Codec(NamedTuple):
    """The encoding of one leaf's blocks on the host, dtype[..., rows, ...]."""

    parts: tuple[Part, ...]  # The arrays of the encoded leaf.
    encode: Callable[[jax.Array], tuple[jax.Array, ...]]  # Blocks -> their parts.
    decode: Callable[[tuple[jax.Array, ...]], jax.Array]

    def keeps(self, leaf: Leaf) -> bool:
        """Whether the blocks of `leaf` are stored as they are."""
        return self.parts == (Part(leaf.shape, leaf.dtype),)


def codecs_of(layout: PoolLayout, compression: Compression | None) -> list[Codec]:
    """Choose a codec for every leaf; ValueError if a leaf has no such head axis."""
    if compression is None:
        return [_raw(leaf) for leaf in layout.leaves]
    skeleton = jax.tree.unflatten(layout.treedef, layout.leaves)
    try:
        axes = jax.tree.leaves(
            jax.tree.broadcast(
                compression.head_axis,
                skeleton,
                is_leaf=lambda node: node is None or isinstance(node, Leaf),
            ),
            is_leaf=lambda node: node is None,
        )
    except ValueError as error:
        raise ValueError(
            f"compression: head_axis={shown(compression.head_axis)} must be an int, a "
            "frozenset of ints, or a tree of these shaped like the top of the pool."
        ) from error
    codecs = []
    for leaf, axis in zip(layout.leaves, axes, strict=True):
        is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if axis is None or not is_floating or leaf.dtype.itemsize == 1:
            codecs.append(_raw(leaf))
            continue
        ndim = len(leaf.shape)
        heads = axis if isinstance(axis, frozenset) else {axis}
        are_axes = all(isinstance(head, int) and -ndim <= head < ndim for head in heads)
        kept = {head % ndim for head in heads} if are_axes else set()
        if not kept or leaf.block_axis in kept:
            raise ValueError(
                f"compression: head_axis {shown(axis)} of {leaf.name} must be an axis "
                f"of {list(leaf.shape)} other than the block axis {leaf.block_axis}, "
                "or a frozenset of such axes."
            )
        kept.add(leaf.block_axis)
        codecs.append(_quantised(leaf, kept, layout))
    return codecs


def _raw(leaf: Leaf) -> Codec:
    """Keep every bit."""
    return Codec(
        parts=(Part(leaf.shape, leaf.dtype),),
        encode=lambda rows: (rows,),
        decode=lambda encoded: encoded[0],
    )


def _quantised(leaf: Leaf, kept: set[int], layout: PoolLayout) -> Codec:
    """Encode blocks as one-byte values, with scales along some axes and per shard."""
    reduced = tuple(axis for axis in range(len(leaf.shape)) if axis not in kept)
    # Each shard has its own scale: a maximum over shards would need a collective.
    scale_shape = tuple(
        size if axis in kept else layout.num_shards_of(leaf, axis)
        for axis, size in enumerate(leaf.shape)
    )

    # A scale with 15 bits of mantissa times a value of the type is exact in float32, so
    # loaded values have the same scale again and do not drift from save to save.
    def encode(rows: jax.Array) -> tuple[jax.Array, ...]:
        values = rows.astype(jnp.float32)
        magnitudes = jnp.where(jnp.isfinite(values), jnp.abs(values), 0.0)
        peak = jnp.max(magnitudes, axis=reduced, keepdims=True)
        # XLA:CPU flushes values below `tiny` to zero, and 0 / 0 is a NaN.
        scale = jnp.maximum(peak / _LARGEST, np.finfo(np.float32).tiny)
        scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=15)
        scaled = jnp.round(values / scale)
        return jnp.clip(scaled, -_LARGEST, _LARGEST).astype(jnp.int8), scale

    def decode(encoded: tuple[jax.Array, ...]) -> jax.Array:
        values, scale = encoded
        return (values.astype(jnp.float32) * scale).astype(leaf.dtype)

    return Codec(
        parts=(
            Part(leaf.shape, np.dtype(np.int8)),
            Part(scale_shape, np.dtype(np.float32)),
        ),
        encode=encode,
        decode=decode,
    )
