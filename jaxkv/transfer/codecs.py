"""Codecs: the form of blocks in host memory, raw or compressed."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._util import shown
from jaxkv.transfer.layout import Leaf, PoolLayout
from jaxkv.types import PyTree

Quantised: TypeAlias = Literal["int8", "int4"]

# Steps between the limits of a value; for int8 an even number, so that 0 is one.
_STEPS: dict[Quantised, int] = {"int8": 254, "int4": 15}
# Tokens that share the limits of their channels.
_RUN = 16


@dataclasses.dataclass(frozen=True)
class Compression:
    """Keep floating-point blocks on the host in one byte, or half a byte, per element.

    Up to 16 tokens of a block and head share limits for each channel, and each token
    has its own, so that neither an outlying channel nor an outlying token costs the
    others precision. Leaves of integers, or of one byte per element, are kept as they
    are. Values are rounded once: saving and loading them again changes nothing more.
    NaNs, and infinities from int4, come back as 0 or the value next to it; infinities
    from int8 as the limit of their token and channel.

    Attributes:
        dtype: ``"int8"`` (error at most 1/126 of the largest magnitude of 16 tokens of
            a head) or ``"int4"`` (at most 1/15 of the range of a channel, plus 1/240 of
            that magnitude), plus the rounding to the dtype of the leaf, for magnitudes
            from 1e-31 (float16: 0.016).
        head_axis: The axis of a leaf that counts heads, or whatever else has separate
            ranges, or a frozenset of several such axes: for all leaves, or as a pytree
            that is a prefix of the pool. The first of the other axes counts tokens, the
            last channels; a single one counts channels. None for leaves to keep as they
            are, such as scales.
    """

    dtype: Quantised = "int8"
    head_axis: PyTree = -2

    def __post_init__(self) -> None:
        if self.dtype not in _STEPS:
            raise ValueError(
                f"compression dtype={shown(self.dtype)} must be one of "
                f"{get_args(Quantised)}."
            )


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
        if not kept or leaf.block_axis in kept or len(kept) == ndim - 1:
            raise ValueError(
                f"compression: head_axis {shown(axis)} of {leaf.name} must be an axis "
                f"of {list(leaf.shape)} other than the block axis {leaf.block_axis}, "
                "or a frozenset of such axes, and leave an axis of channels."
            )
        *tokens, channels = [
            n for n in range(ndim) if n not in {*kept, leaf.block_axis}
        ]
        codecs.append(_quantised(leaf, channels, tokens, compression.dtype, layout))
    return codecs


def compressed_bytes(dtype: Quantised, tokens: int, channels: int) -> int:
    """Return the bytes of a compressed block of one head."""
    runs = 1 if tokens % _RUN else tokens // _RUN
    if dtype == "int8":
        return tokens * (channels + 1) + runs * (-(-channels // 4) + 1)
    return -(-tokens // 2) * channels + tokens + runs * (2 * channels + 1)


def _raw(leaf: Leaf) -> Codec:
    """Keep every bit."""
    return Codec(
        parts=(Part(leaf.shape, leaf.dtype),),
        encode=lambda rows: (rows,),
        decode=lambda encoded: encoded[0],
    )


def _quantised(
    leaf: Leaf, channels: int, tokens: list[int], dtype: Quantised, layout: PoolLayout
) -> Codec:
    """Encode values as steps between the limits of their channel and their token.

    The peak of a run of tokens is 128 to 256 units, a power of two. Limits are whole
    units, which every dtype holds exactly. If a value is beyond the limit before the
    next, so is what it is rounded to: loaded values have the same limits again, and do
    not drift from save to save.
    """
    steps, is_int8 = _STEPS[dtype], dtype == "int8"
    shards = [layout.num_shards_of(leaf, axis) for axis in range(len(leaf.shape))]
    sizes = [size // n for size, n in zip(leaf.shape, shards, strict=True)]
    num_tokens = sizes[tokens[0]] if tokens else 1
    run = num_tokens if num_tokens % _RUN else _RUN
    # With the tokens of a run along an axis of their own.
    along, across = tokens[0] + 1 if tokens else channels, channels + 1
    packed = along - 1 if tokens else channels
    info: Any = jnp.finfo(leaf.dtype)  # type: ignore[no-untyped-call]
    # Exponents of units, as float32 has them; no dtype flushes their multiples to 0.
    min_exponent = 113 if leaf.dtype == np.float16 else 17

    def part(kind: type, *changed: tuple[int, int]) -> Part:
        """Describe an array with other sizes along some axes, in each shard."""
        local = sizes.copy()
        for axis, size in changed:
            local[axis] = size
        shape = tuple(n * size for n, size in zip(shards, local, strict=True))
        return Part(shape, np.dtype(kind))

    runs = (along - 1, num_tokens // run) if tokens else (channels, sizes[channels])
    if is_int8:
        values = part(np.uint8)
        limits = [part(np.uint8, runs, (channels, -(-sizes[channels] // 4)))]
    else:
        values = part(np.uint8, (packed, -(-sizes[packed] // 2)))
        limits = [part(np.int8, runs)] * 2
    last = (channels, 1)
    parts = (values, part(np.uint8, last), part(np.uint8, runs, last), *limits)

    def split(rows: jax.Array) -> jax.Array:
        if not tokens:
            return jnp.expand_dims(rows, along)
        return rows.reshape(*rows.shape[: along - 1], -1, run, *rows.shape[along:])

    def bounds(token: jax.Array, *codes: jax.Array) -> tuple[jax.Array, ...]:
        """Return the limits, and those before them of tokens and of channels."""
        if is_int8:
            high = 256 * 2.0 ** -codes[0]
            low, before_high = -high, jnp.where(high > 32, high / 2, 256)
            before_low = -before_high
        else:
            low, high = map(_limit, codes)
            before_low, before_high = _limit(codes[0] + 1), _limit(codes[1] - 1)
        before = jnp.where(token > 1, token - 1, 256)
        low, high = jnp.maximum(low, -token), jnp.minimum(high, token)
        return low, high, before, before_low, before_high

    def value(step: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        inner = (low * (steps - step) + high * step) * (1 / steps)  # Exact but for 1/n.
        return jnp.where(step == 0, low, jnp.where(step == steps, high, inner))

    def encode(rows: jax.Array) -> tuple[jax.Array, ...]:
        raw = split(rows).astype(jnp.float32)
        finite = jnp.where(jnp.isfinite(raw), raw, 0.0)
        peaks = jnp.max(jnp.abs(finite), axis=across, keepdims=True)
        largest = jnp.max(finite, axis=along, keepdims=True)
        least = jnp.min(finite, axis=along, keepdims=True)
        peak = jnp.max(peaks, axis=along, keepdims=True)
        # Of the least power of two that is no less, by a carry out of the mantissa.
        exponent = (jax.lax.bitcast_convert_type(peak, jnp.int32) + 0x7FFFFF) >> 23
        exponent = jnp.clip(exponent - 8, min_exponent, 247)
        scale = _power_of_two(254 - exponent)
        token = jnp.clip(jnp.ceil(peaks * scale), 1, 256)
        if is_int8:
            most = jnp.maximum(largest, -least) * scale
            halvings = ((most <= n).astype(jnp.float32) for n in (128, 64, 32))
            codes = [functools.reduce(operator.add, halvings)]
            stored_codes = [_pack(codes[0].astype(jnp.uint8), across, 4)]
        else:
            codes = [_code(least * scale, jnp.floor), _code(largest * scale, jnp.ceil)]
            stored_codes = [code.astype(jnp.int8) for code in codes]

        low, high, *before = bounds(token, *codes)
        # In int4 an infinity may not be within both of its limits.
        inside = jnp.where(jnp.isnan(raw), 0.0, raw) if is_int8 else finite
        inside = jnp.clip(inside * scale, low, high)
        step = jnp.round((inside - low) * (steps / jnp.maximum(high - low, 1)))
        # As a load rounds it. XLA may leave out a cast to the dtype and back.
        rounded = value(step, low, high)
        rounded = jax.lax.reduce_precision(rounded, 8, min(info.nmant, 23))
        is_below = [(inside > b) & (rounded <= b) for b in (before[0], before[2])]
        is_above = [(inside < b) & (rounded >= b) for b in (-before[0], before[1])]
        step += (is_below[0] | is_below[1]).astype(jnp.float32)
        step -= (is_above[0] | is_above[1]).astype(jnp.float32)
        stored = step.astype(jnp.uint8).reshape(rows.shape)
        stored = stored if is_int8 else _pack(stored, packed, 2)
        stored_token = (token - 1).astype(jnp.uint8)
        stored_token = stored_token.reshape(
            *rows.shape[:channels], 1, *rows.shape[across:]
        )
        of_runs = [exponent.astype(jnp.uint8), *stored_codes]
        return stored, stored_token, *(jnp.squeeze(code, along) for code in of_runs)

    def decode(encoded: tuple[jax.Array, ...]) -> jax.Array:
        stored, token, *of_runs = encoded
        exponent, *codes = (jnp.expand_dims(code, along) for code in of_runs)
        if is_int8:
            codes = [_unpack(codes[0], across, 4, sizes[channels])]
        else:
            stored = _unpack(stored, packed, 2, sizes[packed])
        codes = [code.astype(jnp.float32) for code in codes]
        low, high, *_ = bounds(split(token).astype(jnp.float32) + 1, *codes)
        units = value(split(stored).astype(jnp.float32), low, high)
        largest = float(info.max)
        loaded = units * _power_of_two(exponent.astype(jnp.int32))
        loaded = jnp.clip(loaded, -largest, largest).astype(leaf.dtype)
        return loaded.reshape(stored.shape)

    return Codec(parts, encode, decode)


# Limits of int4 are whole units up to 80, where most channels are, then fourth ones.
def _limit(code: jax.Array) -> jax.Array:
    """Return the limit that has a code, which is a whole number."""
    return jnp.where(jnp.abs(code) <= 80, code, 4 * code - 240 * jnp.sign(code))


def _code(limit: jax.Array, to_whole: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return the code of the next limit below, or above, as `to_whole` rounds."""
    fourth = to_whole(limit / 4) + 60 * jnp.sign(limit)
    return jnp.where(jnp.abs(limit) <= 80, to_whole(limit), fourth)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return the float32 with this biased exponent."""
    power: jax.Array = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return power


def _pack(values: jax.Array, axis: int, number: int) -> jax.Array:
    """Put as many equal slices of an axis into each byte, the first one lowest."""
    padding = [(0, 0)] * values.ndim
    padding[axis] = (0, -values.shape[axis] % number)
    slices = jnp.split(jnp.pad(values, padding), number, axis=axis)
    shifted = [part << jnp.uint8(8 // number * n) for n, part in enumerate(slices)]
    packed: jax.Array = functools.reduce(jnp.bitwise_or, shifted)
    return packed


def _unpack(packed: jax.Array, axis: int, number: int, size: int) -> jax.Array:
    """Undo `_pack`."""
    bits = 8 // number
    mask = jnp.uint8(2**bits - 1)
    parts = [(packed >> jnp.uint8(bits * n)) & mask for n in range(number)]
    whole: list[jax.Array] = jnp.split(jnp.concatenate(parts, axis), [size], axis=axis)
    return whole[0]
