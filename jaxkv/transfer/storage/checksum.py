"""The checksum of payloads, against accidents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv.native.xxh3 import LEAST_BYTES, xxh3_64
from jaxkv.transfer.storage.store import Piece

_PADDED_BYTES = 256


def checksum(pieces: Sequence[Piece]) -> int:
    """Compute the XXH3-64 of a payload; up to 240 bytes are padded with zeros to 256.

    Args:
        pieces: Its bytes. Several pieces are joined first, which copies them.

    Example:
        >>> checksum([bytes(100), bytes(156)]) == checksum([bytes(256)])
        True
    """
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if len(data) < LEAST_BYTES:
        data = bytes(data).ljust(_PADDED_BYTES, b"\0")
    return xxh3_64(np.frombuffer(data, np.uint8))


def prepare() -> None:
    """Make the checksum ready, which may take a second."""
    checksum([b""])
