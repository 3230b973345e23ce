"""What a listing has found, by when it was last used, and what a store's bound is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.types import KEY_BYTES, BlockKey


class Bound(NamedTuple):
    """How many blocks a store may hold, as an engine says or a store has recorded.

    Attributes:
        num_blocks: So many.
        is_owners: Whether the owner says it, whose bound holds whatever others say.
    """

    num_blocks: int
    is_owners: bool = False


def agreed_bound(own: Bound, recorded: Sequence[Bound]) -> Bound:
    """Give the bound that holds: the owner's, or else the largest.

    Example:
        >>> agreed_bound(Bound(16), [Bound(1000)]).num_blocks
        1000
        >>> agreed_bound(Bound(16), [Bound(1000), Bound(50, True)]).num_blocks
        50
        >>> agreed_bound(Bound(16, True), [Bound(1000), Bound(50, True)]).num_blocks
        16
    """
    if own.is_owners:
        return own
    owners = [each for each in recorded if each.is_owners]
    return max(owners or [own, *recorded])


class Census:
    """The blocks of a listing, with the times that they were last used at."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._times: list[NDArray[np.int64]] = []

    def add(self, keys: Sequence[BlockKey], times: Sequence[int]) -> None:
        """Add blocks; one that comes twice has its later time."""
        self._keys.append(b"".join(keys))
        self._times.append(np.array(times, np.int64))

    def oldest_first(self) -> list[BlockKey]:
        """Give all keys by their times, and by themselves where those are equal."""
        raw = b"".join(self._keys)
        words = np.frombuffer(raw, ">u8").reshape(-1, KEY_BYTES // 8)
        times = np.concatenate([*self._times, np.zeros(0, np.int64)])
        rows = np.lexsort((times, *words.T[::-1]))
        words = words[rows]
        is_last = np.ones(len(rows), np.bool_)
        is_last[:-1] = (words[1:] != words[:-1]).any(axis=1)
        rows = rows[is_last]
        rows = rows[np.argsort(times[rows], kind="stable")]
        return [raw[row * KEY_BYTES : (row + 1) * KEY_BYTES] for row in rows.tolist()]
