"""What a listing has found, by when it was last used, and what a store's bound is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.storage.store import BlobStore, TimedStore, answers_of
from jaxkv.types import KEY_BYTES, BlockKey

_MOST_ORDER_BYTES = 1 << 28  # Of eight million blocks.
_NEWEST = (1 << 63) - 1


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
    """What a listing has found, by when the store says that it was last used.

    Where a store does not say that, the order in which its blocks go is kept in an
    object of its own.

    Args:
        store: Whose blocks they are.
        order_name: The name of that object.
    """

    def __init__(self, store: BlobStore, order_name: str) -> None:
        self._store = store
        self._order_name = order_name
        self._keys: list[bytes] = []
        self._times: list[NDArray[np.int64]] = []
        self._has_times = isinstance(store, TimedStore)
        self._ranks: dict[BlockKey, int] | None = None
        self._order = b""

    def add_page(self, keys: Sequence[BlockKey], names: Sequence[str]) -> None:
        """Add the blocks of a page, and the names of their objects."""
        times = None
        if isinstance(self._store, TimedStore) and names:
            times = self._store.times(names)
        if times is None:
            self._has_times &= not names
            ranks = self._recorded()
            times = [ranks.get(key, len(ranks)) for key in keys]
        self._add(keys, times)

    def oldest_first(self, fresh: Sequence[BlockKey] = ()) -> list[BlockKey]:
        """Give all keys by their times, and by themselves where those are equal.

        Args:
            fresh: Keys that were written meanwhile, which come last.
        """
        self._add(fresh, [_NEWEST] * len(fresh))
        raw = b"".join(self._keys)
        words = np.frombuffer(raw, ">u8").reshape(-1, KEY_BYTES // 8)
        times = np.concatenate(self._times)
        rows = np.lexsort((times, *words.T[::-1]))
        words = words[rows]
        # A block that comes more than once has its latest time.
        is_last = np.ones(len(rows), np.bool_)
        is_last[:-1] = (words[1:] != words[:-1]).any(axis=1)
        rows = rows[is_last]
        rows = rows[np.argsort(times[rows], kind="stable")]
        return _keys_in(raw, rows.tolist())

    def record(self, keys: Sequence[BlockKey]) -> None:
        """Record the order of what is left, if the store has no times."""
        order = b"".join(keys)
        if not self._has_times and order != self._order:
            answers_of(self._store.put([(self._order_name, [order])]))

    def _add(self, keys: Sequence[BlockKey], times: Sequence[int]) -> None:
        self._keys.append(b"".join(keys))
        self._times.append(np.array(times, np.int64))

    def _recorded(self) -> dict[BlockKey, int]:
        if self._ranks is None:
            [found] = answers_of(self._store.get([self._order_name], _MOST_ORDER_BYTES))
            raw = self._order = bytes(found or b"")
            keys = _keys_in(raw, range(len(raw) // KEY_BYTES))
            self._ranks = {key: rank for rank, key in enumerate(keys)}
        return self._ranks


def _keys_in(raw: bytes, rows: Iterable[int]) -> list[BlockKey]:
    return [raw[row * KEY_BYTES : (row + 1) * KEY_BYTES] for row in rows]
