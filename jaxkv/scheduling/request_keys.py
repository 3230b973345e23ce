"""Requests' keys, looked through and laid out once and not in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.scheduling.protocol import Request
from jaxkv.types import KEY_WORDS, BlockKey

_SPARE_KEYS = 16
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

    def of(self, request: Request) -> Sequence[PackedKeys]:
        """Return a request's keys, for each group, as they are now.

        A list grows with the request. If the engine has rewritten keys, it is a new
        list, and the one before stays as it was.
        """
        keys: Sequence[Sequence[BlockKey]] = ()
        if self._num_groups > 1:
            keys = keys_by_group(request, self._num_groups)
        else:
            keys = (request.block_keys,)
        packed = self.by_request.get(request.request_id)
        if packed is None:
            packed = [_Growing(()) for _ in keys]
        current = [was.updated(now) for was, now in zip(packed, keys, strict=True)]
        self.by_request[request.request_id] = current
        return current

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self.by_request.pop(request_id, None)


class _Growing(PackedKeys):
    """The keys of one group of a request, with room for more."""

    __slots__ = ("_room",)

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        names, words, some_foreign = lay_out(keys)
        num = len(names)
        # With room, so that the first key to be added does not copy all of them.
        self._room = np.empty((num + num // 8 + _SPARE_KEYS, KEY_WORDS), np.uint32)
        self._room[:num] = words
        super().__init__(names, self._room[:num], has_foreign=some_foreign)

    def updated(self, keys: Sequence[BlockKey]) -> _Growing:
        """Append what a request has more now; a new list if its keys were rewritten."""
        num, total = len(self), len(keys)
        if not KeyMark.of(self, num).is_in(keys) or (total and not num):
            return _Growing(keys)
        if num < total:
            added, words, some_foreign = lay_out(keys[num:])
            if total > len(self._room):
                room = np.empty((2 * total, KEY_WORDS), np.uint32)
                room[:num] = self._room[:num]
                self._room = room
            self._room[num:total] = words
            self.extend(added)
            self.has_foreign |= some_foreign
            self.words = self._room[:total]
            self.words.flags.writeable = False
        return self
