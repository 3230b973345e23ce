"""Requests' keys, looked through and laid out once and not in every step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.scheduling.protocol import Request
from jaxkv.types import KEY_WORDS, BlockKey

_NO_WORDS: NDArray[np.uint32] = np.empty((0, KEY_WORDS), np.uint32)
_NO_KEYS = PackedKeys([], _NO_WORDS)
_ATTRIBUTES = ("request_id", "block_keys", "num_tokens", "num_computed_tokens")


def keys_by_group(request: Request, num_groups: int) -> Sequence[Sequence[BlockKey]]:
    """Give a request's keys as one list for each group of layers."""
    if num_groups == 1:
        return (request.block_keys,)
    keys: Sequence[Sequence[BlockKey]]
    keys = getattr(request, "block_keys_by_group", ())
    if len(keys) != num_groups:
        raise ValueError(
            f"request {shown(request.request_id)} must have block_keys_by_group, with "
            f"a list for each of the {num_groups} groups."
        )
    return keys


class RequestKeys:
    """Packs the keys of requests as they grow.

    Args:
        num_groups: Groups of the model's layers.

    Attributes:
        by_request: What is kept of each request, for each group.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self.by_request: dict[str, list[_Growing]] = {}
        # What requests of a class must have that it has not: a property may be slow.
        self._beside: dict[type, list[str]] = {}

    def check(self, request: object) -> None:
        """Refuse what is no `Request`, before anything changes.

        Raises:
            TypeError: It lacks an attribute.
        """
        names = self._beside.get(type(request))
        if names is None:
            cls = type(request)
            names = [name for name in _ATTRIBUTES if not hasattr(cls, name)]
            self._beside[cls] = names
        for name in names:
            if not hasattr(request, name):
                break
        else:
            return
        missing = [name for name in names if not hasattr(request, name)]
        if self._num_groups > 1:
            # There another one counts: `keys_by_group`.
            missing = [name for name in missing if name != "block_keys"]
        if missing:
            raise TypeError(
                f"request={shown(request)} must have the attributes of "
                f"jaxkv.scheduling.protocol.Request; it lacks {', '.join(missing)}."
            )

    def of(self, request: Request) -> list[list[bytes]]:
        """Give a request's keys, for each group; foreign ones as they are."""
        keys: Sequence[Sequence[BlockKey]] = ()
        if self._num_groups > 1:
            keys = keys_by_group(request, self._num_groups)
        packed = self.by_request.get(request.request_id)
        if packed is None:
            packed = [_Growing() for _ in range(self._num_groups)]
            self.by_request[request.request_id] = packed
        if not keys:
            return [packed[0].up_to_date(request.block_keys)]
        return [own.up_to_date(now) for own, now in zip(packed, keys, strict=True)]

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self.by_request.pop(request_id, None)


class _Growing:
    """The keys of one group of a request, with room for more."""

    def __init__(self) -> None:
        self._room = _NO_WORDS
        self._keys = _NO_KEYS
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
        added, words, has_foreign = lay_out(keys[num:] if num else keys)
        if has_foreign:
            return list(keys)  # Events name them as they were given.
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
