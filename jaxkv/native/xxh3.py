"""XXH3-64 of data of more than 240 bytes: a fast checksum that is the same everywhere.

It is the function of https://github.com/Cyan4973/xxHash (doc/xxhash_spec.md, "XXH3"),
with its default secret and no seed. There is another branch for shorter data, which is
not here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.native.compiling import compiled_without_lock

LEAST_BYTES = 241
STRIPE_BYTES = 64

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0x00000000C2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x0000000085EBCA77,
    0x27D4EB2F165667C5,
    0x000000009E3779B1,
)
_PRIME_32 = np.uint64(0x9E3779B1)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_47 = np.uint64(47)
_WORD = (1 << 64) - 1


def _words_of_secret(offset: int, num: int) -> NDArray[np.uint64]:
    return np.frombuffer(_SECRET, np.uint64, num, offset)


_STRIPE_SECRET = _words_of_secret(0, 24)
_LAST_SECRET = _words_of_secret(121, 8)
_MERGE_SECRET = tuple(map(int, _words_of_secret(11, 8)))


def xxh3_64(data: NDArray[np.uint8]) -> int:
    """Compute the XXH3-64 of some bytes; other threads may run meanwhile.

    Args:
        data: u8[n]. At least `LEAST_BYTES`, contiguous.

    Example:
        >>> hex(xxh3_64(np.arange(256, dtype=np.uint8)))
        '0x9408a4433b952d71'
    """
    num_bytes = len(data)
    assert num_bytes >= LEAST_BYTES
    words = np.frombuffer(data, np.uint64, num_bytes // 8)
    last = np.frombuffer(data[-STRIPE_BYTES:].tobytes(), np.uint64)
    if not words.flags.aligned:
        words = words.copy()
    words.flags.writeable = False
    lanes = np.array(_START, np.uint64)
    accumulate(words, (num_bytes - 1) // STRIPE_BYTES, _STRIPE_SECRET, lanes)
    accumulate(last, 1, _LAST_SECRET, lanes)
    total = num_bytes * _START[1]
    mixed = [int(lane) ^ word for lane, word in zip(lanes, _MERGE_SECRET, strict=True)]
    for first, second in zip(mixed[::2], mixed[1::2], strict=True):
        product = first * second
        total += (product & _WORD) ^ (product >> 64)
    total &= _WORD
    total = (total ^ total >> 37) * 0x165667919E3779F9 & _WORD
    return total ^ total >> 32


@compiled_without_lock
def accumulate(words: Any, num_stripes: int, secret: Any, lanes: Any) -> None:
    """Add stripes of 64 bytes to the eight lanes of the sum.

    Args:
        words: u64[8 * num_stripes or more].
        num_stripes: How many there are.
        secret: u64[24], or u64[8] for a single stripe.
        lanes: u64[8]. Written.
    """
    for stripe in range(num_stripes):
        place = stripe % 16
        start = stripe * 8
        for lane in range(8):
            word = words[start + lane]
            keyed = word ^ secret[place + lane]
            lanes[lane ^ 1] += word
            lanes[lane] += (keyed & _LOW) * (keyed >> _32)
        if place == 15:
            for lane in range(8):
                value = lanes[lane]
                value ^= value >> _47
                value ^= secret[16 + lane]
                lanes[lane] = value * _PRIME_32
