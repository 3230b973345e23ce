"""The checksum of payloads, against accidents."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from jaxkv.transfer.storage.store import Piece

# XXH3 is another function below: stores written so far have these padded.
_LEAST_BYTES = 241
_PADDED_BYTES = 256


def checksum(pieces: Sequence[Piece]) -> int:
    """Compute the XXH3-64 of a payload; up to 240 bytes are padded with zeros to 256.

    Other threads may run meanwhile.

    Args:
        pieces: Its bytes.

    Example:
        >>> checksum([bytes(100), bytes(156)]) == checksum([bytes(256)])
        True
    """
    total = xxhash.xxh3_64()
    for piece in pieces:
        total.update(piece)
    num_bytes = sum(map(len, pieces))
    if num_bytes < _LEAST_BYTES:
        total.update(bytes(_PADDED_BYTES - num_bytes))
    return total.intdigest()
