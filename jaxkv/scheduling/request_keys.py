"""Requests' keys, looked through and laid out once and not in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.scheduling.protocol import Request
from jaxkv.types import KEY_WORDS, BlockKey

_FEW_KEYS = 256
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
        name, current = request.request_id, self.by_request.get(request.request_id)
        if self._num_groups == 1:
            own = request.block_keys
            if current is None:
                current = self.by_request[name] = [_Growing(own)]
            elif (now := current[0].updated(own)) is not current[0]:
                current = self.by_request[name] = [now]
            return current
        keys = keys_by_group(request, self._num_groups)
        if current is None:
            current = list(map(_Growing, keys))
        else:
            current = list(map(_Growing.updated, current, keys))
        self.by_request[name] = current
        return current

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self.by_request.pop(request_id, None)


class _Growing(PackedKeys):
    """The keys of one group of a request, with room for more."""

    __slots__ = ("_mark", "_room")

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        names, words, some_foreign = lay_out(keys)
        super().__init__(names, words, has_foreign=some_foreign)
        num = len(names)
        self._mark = KeyMark.of(names, num)
        self._room = words
        if num > _FEW_KEYS:  # Else the first key to be added would copy all of them.
            self._make_room(num + num // 8)

    def updated(self, keys: Sequence[BlockKey]) -> _Growing:
        """Append what a request has more now; a new list if its keys were rewritten."""
        if not self._mark.is_in(keys):
            return _Growing(keys)
        num, total = len(self), len(keys)
        if num < total:
            added, words, some_foreign = lay_out(keys[num:])
            if total > len(self._room):
                self._make_room(2 * total)
            self._room[num:total] = words
            self.extend(added)
            self.has_foreign |= some_foreign
            self.words = self._room[:total]
            self.words.flags.writeable = False
            self._mark = KeyMark.of(keys, total)
        return self

    def _make_room(self, num: int) -> None:
        room = np.empty((num, KEY_WORDS), np.uint32)
        room[: len(self)] = self.words
        self._room = room
