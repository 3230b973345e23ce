"""The checksum of payloads, against accidents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxkv.native.xxh3 import LEAST_BYTES, xxh3_64
from jaxkv.transfer.storage.store import Piece

_PADDED_BYTES = 256


def checksum(pieces: Sequence[Piece]) -> int:
    """Compute the XXH3-64 of a payload; less than 256 bytes are padded with zeros.

    Args:
        pieces: Its bytes. Several pieces are joined first, which copies them.

    Example:
        >>> checksum([bytes(100), bytes(156)]) == checksum([bytes(256)])
        True
    """
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) < LEAST_BYTES:
        data = bytes(data).ljust(_PADDED_BYTES, b"\0")
    return _fastest()(data)


@functools.cache
def _fastest() -> Callable[[Piece], int]:
    """Return the function of the package xxhash, if it is installed, else our own."""
    try:
        import xxhash
    except ImportError:
        own(bytes(_PADDED_BYTES))  # Compiles it, or reads what was compiled.
        return own
    function: Callable[[Piece], int] = xxhash.xxh3_64_intdigest
    return function


def own(data: Piece) -> int:
    """Compute the XXH3-64 of at least `LEAST_BYTES`, without the package."""
    return xxh3_64(np.frombuffer(data, np.uint8))


def prepare() -> None:
    """Make the checksum ready, which may take a second."""
    _fastest()
