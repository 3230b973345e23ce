"""Keys of others, and keys as the array side has them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxkv.types import KEY_BYTES, KEY_LANES, BlockKey

# What is hashed begins with its domain. No two of them are alike in their first
# bytes, nor like the encoding of a block (`jaxkv.hashing`), which begins with a 1.
_INT_DOMAIN = b"jaxkv int 1:"
_FOREIGN_DOMAIN = b"jaxkv foreign 1:"


def key_from_int(value: int) -> BlockKey:
    """Make a key of a number, such as a trace's block id.

    Args:
        value: In [0, 2**64).

    Example:
        >>> key_from_int(0).hex()[:16]
        '6428223f5b8d8030'
    """
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value=} must be in [0, 2**64).")
    return hashlib.sha256(_INT_DOMAIN + value.to_bytes(8, "little")).digest()


def key_from_foreign(raw: bytes) -> BlockKey:
    """Make a key of another system's, such as vLLM's BlockHash.

    Args:
        raw: 32 bytes are taken to be a good hash and pass through unchanged; any
            other length is hashed, under a domain of its own.

    Example:
        >>> key_from_foreign(bytes(32)) == bytes(32)
        True
        >>> len(key_from_foreign(b"8 bytes."))
        32
    """
    if not isinstance(raw, bytes):
        raise TypeError(f"{raw=} must be of type bytes.")
    if len(raw) == KEY_BYTES:
        return raw
    return hashlib.sha256(_FOREIGN_DOMAIN + raw).digest()


class PackedKeys(list[bytes]):
    """Keys that are asked about again and again, with what the array side reads.

    To look through thousands of keys and to lay them out costs Python longer than the
    array side takes to find them. A list of this kind has that done once. It is not to
    be changed; a slice of it is of the same kind.

    Args:
        keys: n keys of `KEY_BYTES`.
        lanes: u32[n, 8]. The same, as `keys_to_lanes` has them.

    Example:
        >>> keys = [b"k" * 32, b"l" * 32]
        >>> PackedKeys(keys, keys_to_lanes(keys))[1:].lanes.shape
        (1, 8)
    """

    __slots__ = ("lanes",)

    def __init__(self, keys: Iterable[BlockKey], lanes: NDArray[np.uint32]) -> None:
        super().__init__(keys)
        self.lanes = lanes

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice, /) -> PackedKeys: ...
    def __getitem__(self, index: SupportsIndex | slice, /) -> BlockKey | PackedKeys:
        if isinstance(index, slice):
            return PackedKeys(super().__getitem__(index), self.lanes[index])
        return super().__getitem__(index)


def join_keys(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Put lists of keys in a row; packed ones stay packed."""
    if len(parts) == 1 and isinstance(parts[0], list):
        return parts[0]
    names = itertools.chain.from_iterable(parts)
    packed = [part for part in parts if isinstance(part, PackedKeys)]
    if packed and len(packed) == len(parts):
        return PackedKeys(names, np.concatenate([part.lanes for part in packed]))
    return list(names)


def keys_from_foreign(names: Iterable[bytes]) -> list[BlockKey]:
    """Make keys of many of another system's; the same list if these are keys."""
    if isinstance(names, PackedKeys):
        return names
    names = names if isinstance(names, list) else list(names)
    # The common case in two passes that Python does fast.
    if set(map(type, names)) <= {bytes} and set(map(len, names)) <= {KEY_BYTES}:
        return names
    return list(map(key_from_foreign, names))


def keys_to_lanes(keys: Sequence[BlockKey]) -> NDArray[np.uint32]:
    """Turn keys into what the array side works with.

    Args:
        keys: n keys of `KEY_BYTES`.

    Returns:
        u32[n, 8]. Read-only; lane i is bytes 4i to 4i+3, little-endian.

    Example:
        >>> lanes = keys_to_lanes([bytes(range(32))])
        >>> lanes.shape, hex(lanes[0, 1])
        ((1, 8), '0x7060504')
    """
    lengths = set(map(len, keys))
    if not lengths <= {KEY_BYTES}:
        raise ValueError(f"{sorted(lengths)=} of the keys must all be {KEY_BYTES}.")
    lanes = np.frombuffer(b"".join(keys), "<u4").reshape(-1, KEY_LANES)
    return lanes.astype(np.uint32, copy=False)


def lanes_to_keys(lanes: ArrayLike) -> list[BlockKey]:
    """Turn lanes back into keys.

    Args:
        lanes: u32[n, 8]. What `keys_to_lanes` gives.

    Example:
        >>> lanes_to_keys(keys_to_lanes([b"k" * 32]))
        [b'kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk']
    """
    lanes = np.asarray(lanes)
    if lanes.dtype != np.uint32 or lanes.shape[1:] != (KEY_LANES,):
        raise ValueError(
            f"{lanes.dtype=}, {lanes.shape=} must be uint32, (n, {KEY_LANES})."
        )
    data = lanes.astype("<u4", copy=False).tobytes()
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]
