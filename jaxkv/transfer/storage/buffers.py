"""Memory that is read into, used again once it is released."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Buffers:
    """Hands out memory, and takes it back when the last view of it is gone.

    To let the system have it and ask for other costs a page fault for each 4 KiB, which
    takes longer than to read them from a file that the system has in memory.

    Args:
        kept_bytes: How much is kept at most while it is not used.

    Example:
        >>> buffers = Buffers(1 << 20)
        >>> view = buffers.take(4096)
        >>> address = view.obj.ctypes.data
        >>> del view
        >>> buffers.take(4096).obj.ctypes.data == address
        True
    """

    def __init__(self, kept_bytes: int) -> None:
        self._most_bytes = kept_bytes
        # Each call on them is one step of the interpreter: a view may end in any
        # thread, and in the midst of any call here.
        self._kept: collections.deque[NDArray[np.uint8]] = collections.deque()
        self._lent: dict[int, tuple[weakref.ref[Any], NDArray[np.uint8]]] = {}

    def take(self, num_bytes: int) -> memoryview:
        """Hand out memory, with whatever is in it: u8[num_bytes]."""
        try:
            whole = self._kept.pop()  # The latest: caches may still have it.
        except IndexError:
            whole = self._make(num_bytes)
        if len(whole) != num_bytes:
            # Objects of one store have one size: what is kept is of no use any more.
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
        if (len(self._kept) + 1) * len(whole) <= self._most_bytes:
            self._kept.append(whole)
