"""Memory for reads, reused once it is released."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Buffers:
    """Lends memory, and takes it back when the last view of it is deleted.

    At most `max_bytes` are kept while unused. New memory costs a page fault per 4 KiB,
    which takes longer than reading them from the page cache.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        # Each operation on them is atomic: a view may be deleted in any thread, and
        # during any call here.
        self._kept: collections.deque[NDArray[np.uint8]] = collections.deque()
        self._lent: dict[int, tuple[weakref.ref[Any], NDArray[np.uint8]]] = {}

    def take(self, num_bytes: int) -> memoryview:
        """Return uninitialized memory: u8[num_bytes]."""
        try:
            whole = self._kept.pop()  # The latest may still be in the caches.
        except IndexError:
            whole = self._make(num_bytes)
        if len(whole) != num_bytes:
            # The objects of a store have one size, so other buffers are useless.
            self._drop(whole)
            whole = self._make(num_bytes)
        lease = whole[:]
        number = id(lease)
        self._lent[number] = (
            weakref.ref(lease, lambda _: self._take_back(number)),
            whole,
        )
        return lease.data

    def _make(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.empty(num_bytes, np.uint8)

    def _drop(self, whole: NDArray[np.uint8]) -> None:
        pass

    def _take_back(self, number: int) -> None:
        _, whole = self._lent.pop(number)
        if (len(self._kept) + 1) * len(whole) <= self._max_bytes:
            self._kept.append(whole)
