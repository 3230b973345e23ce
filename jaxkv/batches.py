"""Batches as compiled programs take them, and answers as they give them.

A batch is padded to one of a few sizes, so that a program is compiled once per size
and process. To hand an array to a program and to take one back costs microseconds,
however small, so that an answer comes back as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jaxkv.keys import PackedKeys
from jaxkv.types import KEY_BYTES, KEY_LANES, BlockKey

SMALLEST_BATCH = 16
_BATCH_STEP = 4


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """An answer as one array.

    Attributes:
        words: i32[n]. The arrays of the answer, one after the other; None if there
            are none, so that nobody waits.
        layout: The structure of the answer, and the shape and type of each array.
    """

    words: Array | None
    layout: tuple[Any, tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]]


def bucket(size: int, smallest: int = SMALLEST_BATCH) -> int:
    """Round up to a size that programs are compiled for."""
    rounded = smallest
    while rounded < size:
        rounded *= _BATCH_STEP
    return rounded


def buckets(most: int, smallest: int = SMALLEST_BATCH) -> Iterator[int]:
    """List the buckets from the smallest to that of `most`; none for 0."""
    size = smallest
    while most and size <= bucket(most, smallest):
        yield size
        size *= _BATCH_STEP


def pad_keys(keys: Sequence[BlockKey], size: int) -> NDArray[np.uint32]:
    """Lay keys out as u32[size, 8]; as `keys_to_lanes`, but padded and trusting."""
    if isinstance(keys, PackedKeys):
        padded = np.zeros((size, KEY_LANES), np.uint32)
        padded[: len(keys)] = keys.lanes
        return padded
    data = b"".join(keys).ljust(size * KEY_BYTES, b"\0")
    lanes = np.frombuffer(data, "<u4").reshape(size, KEY_LANES)
    return lanes.astype(np.uint32, copy=False)


def pack(answer: Any) -> Packed:
    """Put the arrays of an answer, of 32 bits or bool, in one."""
    leaves, structure = jax.tree.flatten(answer)
    layout = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    words = [
        x.astype(jnp.int32) if x.dtype == bool else x.view(jnp.int32) for x in leaves
    ]
    if not words:
        return Packed(None, layout)
    return Packed(jnp.concatenate([x.reshape(-1) for x in words]), layout)


def unpack(packed: Packed) -> Any:
    """Bring an answer to the host: NumPy arrays, and scalars of no dimension."""
    structure, shapes = packed.layout
    words = np.asarray(packed.words)
    leaves, at = [], 0
    for shape, dtype in shapes:
        length = math.prod(shape)
        own = words[at : at + length]
        own = own.astype(dtype) if dtype.kind == "b" else own.view(dtype)
        leaves.append(own.reshape(shape))
        at += length
    return structure.unflatten(leaves)


def cpu_device() -> jax.Device:
    """Choose the CPU backend; where it is switched off, whatever there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
