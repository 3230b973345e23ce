"""Sizes as people write them."""

from __future__ import annotations

import fractions
import operator
import re
from typing import SupportsIndex

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
}


def parse_bytes(size: str | SupportsIndex) -> int:
    """Read a size such as ``64MiB``, ``1.5 GB`` or ``4096``.

    Args:
        size: A number, with a unit (of 1024 as in ``MiB`` or of 1000 as in ``MB``) or
            without one, for bytes; or bytes as an int.

    Returns:
        Bytes, at least 1. A fraction of a byte is dropped.

    Raises:
        ValueError: `size` is not a size, or less than one byte.

    >>> parse_bytes("64MiB")
    67108864
    >>> parse_bytes(4096)
    4096
    """
    num_bytes = _parse_text(size) if isinstance(size, str) else _parse_int(size)
    if num_bytes < 1:
        raise ValueError(
            f"{size!r} must be a size such as 64MiB, 1GiB or a number of bytes"
        )
    return num_bytes


def gib(num_bytes: int) -> str:
    """Write bytes in GiB, for messages.

    >>> gib(3 << 29)
    '1.50 GiB'
    """
    return f"{num_bytes / 2**30:.2f} GiB"


def _parse_text(text: str) -> int:
    """Read a size; 0 if it is none."""
    match = re.fullmatch(
        r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", text.strip().lower()
    )
    if not match or match[2] not in _UNITS:
        return 0
    # Not a float: it would round sizes of more than 53 bits.
    return int(fractions.Fraction(match[1]) * _UNITS[match[2]])


def _parse_int(number: SupportsIndex) -> int:
    """Read an int of any kind; 0 if it is none."""
    try:
        return 0 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return 0
