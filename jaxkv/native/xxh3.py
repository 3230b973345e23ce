"""XXH3-64 of data of more than 240 bytes: a fast checksum that is the same everywhere.

It is the function of https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md, "XXH3"),
with its default secret and no seed. There is another branch for shorter data, which is
not here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

from jaxkv.native.compiling import compiled_without_lock

LEAST_BYTES = 241
STRIPE_BYTES = 64
STRIPES_PER_BLOCK = 16
BLOCK_BYTES = STRIPE_BYTES * STRIPES_PER_BLOCK
NUM_LANES = 8

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = np.array(
    (
        0x00000000C2B2AE3D,
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x0000000085EBCA77,
        0x27D4EB2F165667C5,
        0x000000009E3779B1,
    ),
    np.uint64,
)
_PRIME_32 = 0x9E3779B1
_AVALANCHE = np.uint64(0x165667919E3779F9)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_37 = np.uint64(37)


def _words_of_secret(offset: int, num: int) -> NDArray[np.uint64]:
    return np.frombuffer(_SECRET, np.uint64, num, offset).copy()


_STRIPE_SECRET = _words_of_secret(0, 24)
_LAST_SECRET = _words_of_secret(121, 8)
_MERGE_SECRET = _words_of_secret(11, 8)


def xxh3_64(data: NDArray[np.uint8]) -> int:
    """Compute the XXH3-64 of some bytes; other threads may run meanwhile.

    Args:
        data: u8[n]. At least `LEAST_BYTES`, contiguous.

    Example:
        >>> hex(xxh3_64(np.arange(256, dtype=np.uint8)))
        '0x9408a4433b952d71'
    """
    assert len(data) >= LEAST_BYTES
    if data.flags.writeable:  # Else it would be compiled for both.
        data = data.view()
        data.flags.writeable = False
    return int(_sum_of(data))


@compiled_without_lock
def _sum_of(data: Any) -> Any:
    lanes = np.empty(NUM_LANES, np.uint64)
    begin(lanes)
    num_added = add_blocks(lanes, data, 0, len(data), 0)
    return finish(lanes, data, 0, len(data), num_added)


@compiled_without_lock
def begin(lanes: Any) -> None:
    """Begin a sum.

    Args:
        lanes: u64[8]. Written.
    """
    for lane in range(NUM_LANES):
        lanes[lane] = _START[lane]


@compiled_without_lock
def add_blocks(lanes: Any, data: Any, start: int, end: int, num_added: int) -> int:
    """Add all of some data that can be added before its end is known.

    Args:
        lanes: u64[8]. The sum so far. Written.
        data: u8[...].
        start: Where what is summed begins.
        end: Up to where it is there.
        num_added: Blocks of `BLOCK_BYTES` that were added before.

    Returns:
        Blocks that have been added now.
    """
    # The last block is special, even if it is whole.
    num_blocks = (end - start - 1) // BLOCK_BYTES
    for block in range(num_added, num_blocks):
        _add_stripes(
            lanes, data, start + block * BLOCK_BYTES, _STRIPE_SECRET, STRIPES_PER_BLOCK
        )
    return max(num_added, num_blocks)


@compiled_without_lock
def finish(lanes: Any, data: Any, start: int, end: int, num_added: int) -> Any:
    """Add what `add_blocks` has left, and end a sum.

    Args:
        lanes: u64[8]. Written.
        data: u8[...].
        start: Where what is summed begins.
        end: Where it ends; `LEAST_BYTES` after that, or more.
        num_added: Blocks that were added.

    Returns:
        u64. The XXH3-64.
    """
    done = start + num_added * BLOCK_BYTES
    for stripe in range((end - 1 - done) // STRIPE_BYTES):
        secret = _STRIPE_SECRET[stripe : stripe + NUM_LANES]
        _add_stripes(lanes, data, done + stripe * STRIPE_BYTES, secret, 1)
    _add_stripes(lanes, data, end - STRIPE_BYTES, _LAST_SECRET, 1)
    total = np.uint64(end - start) * _START[1]
    for pair in range(0, NUM_LANES, 2):
        a = lanes[pair] ^ _MERGE_SECRET[pair]
        b = lanes[pair + 1] ^ _MERGE_SECRET[pair + 1]
        # The 128 bits of the product, one half upon the other.
        low, middle = (a & _LOW) * (b & _LOW), (a >> _32) * (b & _LOW)
        cross = (low >> _32) + (middle & _LOW) + (a & _LOW) * (b >> _32)
        high = (middle >> _32) + (cross >> _32) + (a >> _32) * (b >> _32)
        total += high ^ ((cross << _32) | (low & _LOW))
    total = (total ^ (total >> _37)) * _AVALANCHE
    return total ^ (total >> _32)


@intrinsic
def _add_stripes(
    typing_context: Any, lanes: Any, data: Any, at: Any, secret: Any, num: Any
) -> Any:
    """Add stripes of 64 bytes to the lanes; a whole block of them mixes the lanes.

    The eight lanes are one vector: written lane by lane, a compiler keeps them in
    memory, and takes four times as long.

    Args:
        typing_context: Of Numba; callers do not give it.
        lanes: u64[8]. Written.
        data: u8[...].
        at: i64. Where in it they begin.
        secret: u64[7 + num], of a block u64[24].
        num: How many, as a literal: 1, or 16 for a block.
    """
    num_stripes = getattr(num, "literal_value", None)
    if num_stripes is None:
        return None
    wide = ir.IntType(64)
    vector = ir.VectorType(wide, NUM_LANES)
    swap = ir.Constant(
        ir.VectorType(ir.IntType(32), NUM_LANES), [1, 0, 3, 2, 5, 4, 7, 6]
    )

    def all_lanes(value: int) -> Any:
        return ir.Constant(vector, [value] * NUM_LANES)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointer(number: int) -> Any:
            return make_array(signature.args[number])(
                context, builder, args[number]
            ).data

        def load(start: Any, offset: Any, align: int) -> Any:
            place = builder.gep(start, [offset])
            return builder.load(
                builder.bitcast(place, vector.as_pointer()), align=align
            )

        data_start, secret_start = pointer(1), pointer(3)
        lanes_start = builder.bitcast(pointer(0), vector.as_pointer())
        total = builder.load(lanes_start, align=8)
        for stripe in range(num_stripes):
            offset = builder.add(args[2], wide(stripe * STRIPE_BYTES))
            words = load(data_start, offset, 1)
            keyed = builder.xor(words, load(secret_start, wide(stripe), 8))
            product = builder.mul(
                builder.and_(keyed, all_lanes(0xFFFFFFFF)),
                builder.lshr(keyed, all_lanes(32)),
            )
            total = builder.add(total, builder.shuffle_vector(words, words, swap))
            total = builder.add(total, product)
        if num_stripes == STRIPES_PER_BLOCK:
            total = builder.xor(total, builder.lshr(total, all_lanes(47)))
            total = builder.xor(total, load(secret_start, wide(STRIPES_PER_BLOCK), 8))
            total = builder.mul(total, all_lanes(_PRIME_32))
        builder.store(total, lanes_start, align=8)
        return context.get_dummy_value()

    return types.void(lanes, data, types.int64, secret, num), generate
