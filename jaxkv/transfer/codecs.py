"""In which form blocks lie in host memory: as they are, or compressed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.transfer.layout import Leaf, PoolLayout
from jaxkv.types import PyTree

Quantised: TypeAlias = Literal["int8", "fp8"]

_QUANTISED: dict[str, tuple[type, float]] = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
}


@dataclasses.dataclass(frozen=True)
class Compression:
    """Store floating-point blocks on the host in one byte an element.

    Each block has a float32 scale for each head (and for each shard of it): its
    largest magnitude lands on the largest value of the type, as in the KV-cache
    quantisation of vLLM and TensorRT-LLM. Leaves of integers, and of one byte an
    element, are stored as they are.
    Values come back rounded, once: what came back comes back the same from then on.
    Infinities come back as the largest finite magnitude, NaNs as 0 from int8.

    Attributes:
        dtype: ``"int8"`` (error at most 1/254 of the largest magnitude of a block and
            head) or ``"fp8"`` (float8_e4m3fn; at most 1/16 of each value); and that of
            rounding to the dtype of the leaf.
        head_axis: Which axis of a leaf counts the heads, or anything else that has a
            range of its own: an int, or a pytree of ints that is a prefix of the pool.
            None for leaves that are to stay as they are, such as scales.
    """

    dtype: Quantised = "int8"
    head_axis: PyTree = -2

    def __post_init__(self) -> None:
        if self.dtype not in _QUANTISED:
            raise ValueError(
                f"compression dtype={self.dtype!r} must be one of "
                f"{get_args(Quantised)}."
            )


class Part(NamedTuple):
    """One array that a codec makes of a leaf; its axes are those of the leaf.

    Attributes:
        shape: As of the whole leaf.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype


class Codec(NamedTuple):
    """How blocks of one leaf are written down on the host.

    Attributes:
        parts: What is written.
        encode: The leaf's blocks ``dtype[..., rows, ...]`` -> the parts of these rows.
        decode: The reverse.
    """

    parts: tuple[Part, ...]
    encode: Callable[[jax.Array], tuple[jax.Array, ...]]
    decode: Callable[[tuple[jax.Array, ...]], jax.Array]


def codecs_of(layout: PoolLayout, compression: Compression | None) -> list[Codec]:
    """Choose a codec for every leaf.

    Raises:
        ValueError: A leaf has no such head axis.
    """
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
            f"compression: head_axis={compression.head_axis!r} must be an int, or a "
            "tree of ints shaped like the top of the pool."
        ) from error
    codecs = []
    for leaf, axis in zip(layout.leaves, axes, strict=True):
        is_floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if axis is None or not is_floating or leaf.dtype.itemsize == 1:
            codecs.append(_raw(leaf))
            continue
        ndim = len(leaf.shape)
        is_axis = isinstance(axis, int) and -ndim <= axis < ndim
        if not is_axis or axis % ndim == leaf.block_axis:
            raise ValueError(
                f"compression: head_axis {axis} of {leaf.name} must be an axis of "
                f"{list(leaf.shape)} other than the block axis {leaf.block_axis}."
            )
        codecs.append(_quantised(leaf, axis % ndim, compression.dtype, layout))
    return codecs


def _raw(leaf: Leaf) -> Codec:
    """Write blocks down bit by bit."""
    return Codec(
        parts=(Part(leaf.shape, leaf.dtype),),
        encode=lambda rows: (rows,),
        decode=lambda parts: parts[0],
    )


def _quantised(
    leaf: Leaf, head_axis: int, dtype: Quantised, layout: PoolLayout
) -> Codec:
    """Write blocks down as small numbers and a scale per block, head and shard."""
    stored, largest = _QUANTISED[dtype]
    kept = (leaf.block_axis, head_axis)
    reduced = tuple(axis for axis in range(len(leaf.shape)) if axis not in kept)
    # Every shard scales its own part: the largest of all would need a collective.
    scale_shape = tuple(
        size if axis in kept else _num_shards(leaf, axis, layout)
        for axis, size in enumerate(leaf.shape)
    )

    # A scale of 16 bits, times a value of the type, is exact in float32: so what came
    # back has that scale again, and does not drift from one save to the next.
    def encode(rows: jax.Array) -> tuple[jax.Array, ...]:
        values = rows.astype(jnp.float32)
        magnitudes = jnp.where(jnp.isfinite(values), jnp.abs(values), 0.0)
        peak = jnp.max(magnitudes, axis=reduced, keepdims=True)
        # XLA:CPU takes what is smaller than `tiny` for zero, and 0 / 0 is a NaN.
        scale = jnp.maximum(peak / largest, np.finfo(np.float32).tiny)
        scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=15)
        scaled = values / scale
        if dtype == "int8":
            scaled = jnp.round(scaled)
        return jnp.clip(scaled, -largest, largest).astype(stored), scale

    def decode(parts: tuple[jax.Array, ...]) -> jax.Array:
        values, scale = parts
        return (values.astype(jnp.float32) * scale).astype(leaf.dtype)

    return Codec(
        parts=(
            Part(leaf.shape, np.dtype(stored)),
            Part(scale_shape, np.dtype(np.float32)),
        ),
        encode=encode,
        decode=decode,
    )


def _num_shards(leaf: Leaf, axis: int, layout: PoolLayout) -> int:
    entry = leaf.spec[axis]
    if entry is None or layout.mesh is None:
        return 1
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(layout.mesh.shape[name] for name in names)
