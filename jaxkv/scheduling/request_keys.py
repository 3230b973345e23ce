"""Requests' keys, looked through and laid out once and not in every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.scheduling.protocol import Request, keys_by_group
from jaxkv.types import KEY_WORDS


class RequestKeys:
    """Packs the keys of requests as they grow.

    Args:
        num_groups: Groups of the model's layers.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._packed: dict[str, list[_Growing]] = {}

    def of(self, request: Request) -> list[list[bytes]]:
        """Give a request's keys, for each group; foreign ones as they are."""
        keys = keys_by_group(request, self._num_groups)
        packed = self._packed.get(request.request_id)
        if packed is None:
            packed = [_Growing() for _ in range(self._num_groups)]
            self._packed[request.request_id] = packed
        return [own.up_to_date(now) for own, now in zip(packed, keys, strict=True)]

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._packed.pop(request_id, None)


class _Growing:
    """The keys of one group of a request, with room for more."""

    def __init__(self) -> None:
        self._room: NDArray[np.uint32] = np.empty((0, KEY_WORDS), np.uint32)
        self._keys = PackedKeys([], self._room)
        self._last = b""

    def up_to_date(self, keys: Sequence[bytes]) -> list[bytes]:
        """Take note of the keys as they are now."""
        num, total = len(self._keys), len(keys)
        # A key stands for all tokens up to its block: where the last one that was
        # packed is in its place, those before it are.
        if num > total or (num and keys[num - 1] != self._last):
            num = 0
        elif num == total:
            return self._keys
        added, words, has_foreign = lay_out(keys[num:])
        if has_foreign:
            return list(keys)  # Events are to tell them as they were given.
        if num == 0:
            self._room = words  # Others may still read the old one.
            self._keys = PackedKeys(added, words)
        else:
            if total > len(self._room):
                room = np.empty((2 * total, KEY_WORDS), np.uint32)
                room[:num] = self._room[:num]
                self._room = room
            self._room[num:total] = words
            names = itertools.chain(itertools.islice(self._keys, num), added)
            self._keys = PackedKeys(names, self._room[:total])
        self._last = keys[-1] if total else b""
        return self._keys
