"""The blocks of a listing by age, and the bound of a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.storage.store import BlobStore, TimedStore, answers_of
from jaxkv.types import KEY_BYTES, BlockKey

_MAX_ORDER_BYTES = 1 << 28  # Eight million blocks
_NEWEST = (1 << 63) - 1


class Bound(NamedTuple):
    """The number of blocks that a store may hold, from an engine or a record."""

    num_blocks: int
    is_owners: bool = False  # The owner's bound overrides all others.


def agreed_bound(bound: Bound, recorded: Sequence[Bound]) -> Bound:
    """Return the bound that applies: the owner's, otherwise the largest."""
    if bound.is_owners:
        return bound
    owners = [record for record in recorded if record.is_owners]
    return max(owners or [bound, *recorded])


class Census:
    """The blocks of a listing, by the store's times of use.

    For a store without times, the object `order_name` records the order of eviction.
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
        """Return all keys by time, then by key; `fresh` ones, just written, last."""
        self._add(fresh, [_NEWEST] * len(fresh))
        raw = b"".join(self._keys)
        words = np.frombuffer(raw, ">u8").reshape(-1, KEY_BYTES // 8)
        times = np.concatenate(self._times)
        rows = np.lexsort((times, *words.T[::-1]))
        words = words[rows]
        # A repeated block has its latest time.
        is_last = np.ones(len(rows), np.bool_)
        is_last[:-1] = (words[1:] != words[:-1]).any(axis=1)
        rows = rows[is_last]
        rows = rows[np.argsort(times[rows], kind="stable")]
        return _keys_in(raw, rows.tolist())

    def record(self, keys: Sequence[BlockKey]) -> None:
        """Record the order of the remaining blocks, if the store has no times."""
        order = b"".join(keys)
        if not self._has_times and order != self._order:
            answers_of(self._store.put([(self._order_name, [order])]))

    def _add(self, keys: Sequence[BlockKey], times: Sequence[int]) -> None:
        self._keys.append(b"".join(keys))
        self._times.append(np.array(times, np.int64))

    def _recorded(self) -> dict[BlockKey, int]:
        if self._ranks is None:
            [blob] = answers_of(self._store.get([self._order_name], _MAX_ORDER_BYTES))
            raw = self._order = bytes(blob or b"")
            keys = _keys_in(raw, range(len(raw) // KEY_BYTES))
            self._ranks = {key: rank for rank, key in enumerate(keys)}
        return self._ranks


def _keys_in(raw: bytes, rows: Iterable[int]) -> list[BlockKey]:
    return [raw[row * KEY_BYTES : (row + 1) * KEY_BYTES] for row in rows]
