"""Requests' keys, looked through and laid out once and not in every step."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.scheduling.checks import check_count
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.rules import NO_LIMIT, OffloadRules
from jaxkv.search.groups import GroupSpec
from jaxkv.search.tiers import check_keys, check_keys_by_group
from jaxkv.types import KEY_WORDS, BlockKey

_FEW_KEYS = 256
_MAX_TOKENS = (1 << 31) - 1  # What policies can be told of a request.
_REQUIRED = attrgetter("request_id", "num_tokens", "num_computed_tokens")


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
    """Checks requests, and packs their keys as they grow.

    Args:
        groups: The groups of the model's layers.
        rules: What the engine chose.
        may_lag: Whether a request may come without the keys of its last full blocks.

    Attributes:
        by_request: What is kept of each request, for each group.
    """

    _NOT_STATE = ("_has_keys",)

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        rules: OffloadRules,
        *,
        may_lag: bool = False,
    ) -> None:
        self._groups = groups
        self._num_groups = len(groups)
        self._prompt_only = rules.prompt_only
        self._max_offload_tokens = rules.max_offload_tokens or NO_LIMIT
        self._may_lag = may_lag
        self.by_request: dict[str, list[_Growing]] = {}
        # Whether a class has `block_keys`: a property may be slow.
        self._has_keys: dict[type, bool] = {}

    def check(self, request: Request) -> str:
        """Refuse what is not a `Request`, before anything changes; return its id.

        What only look-ups or only stores read is for `check_lookup` or `check_stores`.

        Raises:
            TypeError: An attribute is missing, or has another type.
            ValueError: A number is negative or too large.
        """
        has_keys = self._has_keys.get(type(request))
        if has_keys is None:
            has_keys = self._num_groups > 1 or hasattr(type(request), "block_keys")
            self._has_keys[type(request)] = has_keys
        try:
            name, num_tokens, num_computed = _REQUIRED(request)
        except AttributeError:
            raise self._lacks(request) from None
        if not has_keys and not hasattr(request, "block_keys"):
            raise self._lacks(request)
        if type(name) is not str and not isinstance(name, str):
            raise TypeError(f"request_id={shown(name)} must be a str.")
        if type(num_tokens) is not int or not 0 <= num_tokens <= _MAX_TOKENS:
            check_count("num_tokens", num_tokens, name, _MAX_TOKENS)
        if type(num_computed) is not int or num_computed < 0:
            check_count("num_computed_tokens", num_computed, name)
        return name

    def check_lookup(self, request: Request) -> None:
        """Do as `check` does, for a call that looks for a request's prefix."""
        name = self.check(request)
        most = getattr(request, "max_load_tokens", None)
        if most is not None and (type(most) is not int or most < 0):
            check_count("max_load_tokens", most, name)
        is_remote = getattr(request, "remote_prefill", None)
        if not (is_remote is None or isinstance(is_remote, bool | np.bool_)):
            raise TypeError(
                f"remote_prefill={shown(is_remote)} of request {shown(name)} must be "
                "True, False or None."
            )

    def check_stores(self, request: Request) -> tuple[int, int]:
        """Do as `check` does, for a call after which a request's blocks are stored.

        Returns:
            How many of its tokens are computed for certain; and how many may be stored,
            from its first.
        """
        name = self.check(request)
        num_ahead = getattr(request, "num_output_placeholders", 0)
        if type(num_ahead) is not int or num_ahead < 0:
            check_count("num_output_placeholders", num_ahead, name)
        most = self._max_offload_tokens
        own = getattr(request, "max_offload_tokens", None)
        if own is not None:
            if type(own) is not int or own < 0:
                check_count("max_offload_tokens", own, name)
            most = min(most, own)
        num_prompt = getattr(request, "num_prompt_tokens", None)
        if num_prompt is not None:
            if type(num_prompt) is not int or num_prompt < 0:
                check_count("num_prompt_tokens", num_prompt, name)
            if self._prompt_only:
                most = min(most, num_prompt)
        elif self._prompt_only:
            raise TypeError(
                f"request {shown(name)} lacks num_prompt_tokens, which "
                "prompt_only=True needs: it stores the blocks of prompts alone."
            )
        return request.num_computed_tokens - num_ahead, most

    def checked(
        self, request: Request, *, is_admission: bool = True
    ) -> Sequence[PackedKeys]:
        """Return a request's keys, for each group, if they are right.

        On errors nothing is kept of a request that is new.

        Args:
            request: The request, whose attributes have been checked.
            is_admission: Whether it asks for a prefix or has got its blocks. Then its
                keys must be as many as its full blocks, where it comes for the first
                time, or none; and never more.

        Raises:
            TypeError: There is not a list of keys for each group, or a key is not of
                bytes.
            ValueError: The keys are not of blocks of the groups' sizes.
        """
        name = request.request_id
        is_new = name not in self.by_request
        try:
            if is_new or not self._has_keys[type(request)]:  # No property to call.
                self._check_lists(request)
            keys = self.of(request)
            if is_admission:
                for group, spec in enumerate(self._groups):
                    num, most = len(keys[group]), request.num_tokens // spec.block_size
                    if num != most and (num > most or is_new):
                        self._check_number(request, group, num, most)
        except Exception as error:
            if is_new:  # Nobody might ever say that it has ended.
                self.forget(name)
            elif not isinstance(error, ValueError):
                self._check_lists(request)
            raise
        return keys

    def _check_lists(self, request: Request) -> None:
        """Refuse keys that are not a list of keys for each group."""
        if self._num_groups == 1:
            name = "block_keys"
            check_keys(self._groups[0], request.block_keys, name, request.request_id)
        else:
            name = "block_keys_by_group"
            keys = getattr(request, name, ())
            check_keys_by_group(self._groups, keys, name, request.request_id)

    def _check_number(self, request: Request, group: int, num: int, most: int) -> None:
        """Refuse keys of a group that are not those of its full blocks, or none."""
        if num <= most and (not num or self._may_lag):
            return
        size = self._groups[group].block_size
        raise ValueError(
            f"request {shown(request.request_id)} of {request.num_tokens} tokens has "
            f"{num} keys in group {group}, whose blocks have {size} tokens, so that "
            f"{most} are full: make the keys, and the groups of OffloadScheduler, with "
            "the block size of the pool, and give a new request the keys of all its "
            "full blocks, or none."
        )

    def _lacks(self, request: object) -> TypeError:
        """Make an error that names the attributes that a request lacks."""
        names = ["request_id", "block_keys", "num_tokens", "num_computed_tokens"]
        if self._num_groups > 1:
            names.remove("block_keys")  # There another one counts: `keys_by_group`.
        missing = [name for name in names if not hasattr(request, name)]
        return TypeError(
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
    _NOT_DIGESTED = True  # Whatever reads a request may make it up to date.

    def __reduce__(self) -> tuple[Any, ...]:
        return _Growing, (list(self),)

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
