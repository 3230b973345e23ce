"""The state of each request, such as its packed keys, until it has finished.

Keys are checked and packed once, not in every step. A cache policy that listens is
notified when a request begins and finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import PackedKeys, lay_out
from jaxkv.policies.facts import check_kind
from jaxkv.scheduling.checks import check_count
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.rules import NO_LIMIT, OffloadRules
from jaxkv.search.groups import GroupSpec
from jaxkv.search.tiers import check_keys, check_keys_by_group
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.retention import Retention
from jaxkv.types import KEY_WORDS, STOPS, BlockKey, Stop

_FEW_KEYS = 256
_MAX_TOKENS = (1 << 31) - 1  # Policies count tokens in 32 bits.
_REQUIRED = attrgetter("request_id", "num_tokens", "num_computed_tokens")


class Rows(NamedTuple):
    """n host blocks of a request, of m device blocks each, in token order."""

    keys: Sequence[BlockKey]  # [n]; a row has the key of its last device block.
    device_keys: Sequence[BlockKey]  # [n * m]
    device_blocks: NDArray[np.int64]  # [n * m]
    groups: NDArray[np.intp] | None  # [n], the group of each row; None for one group.


def rows_of(
    groups: tuple[GroupSpec, ...],
    keys: Sequence[Sequence[BlockKey]],
    blocks: Sequence[NDArray[np.int64]],
    first: Sequence[int],
    end: Sequence[int],
    factor: int,
) -> Rows:
    """Return `blocks`, those [first[g], end[g]) of all groups g, as rows by token.

    A row has `factor` blocks; all of `first` and `end` are multiples of it.
    """
    if len(groups) == 1:
        device_keys = keys[0]
        if first[0] or end[0] < len(device_keys):
            device_keys = device_keys[first[0] : end[0]]
        row_keys = device_keys if factor == 1 else device_keys[factor - 1 :: factor]
        return Rows(row_keys, device_keys, blocks[0], None)
    # With several groups, a row is one block (`check_groups`).
    spans = [slice(*ends) for ends in zip(first, end, strict=True)]
    end_tokens = [
        (np.arange(span.start, max(span.start, span.stop)) + 1) * spec.block_size
        for spec, span in zip(groups, spans, strict=True)
    ]
    order = np.argsort(np.concatenate(end_tokens), kind="stable")
    row_groups = np.repeat(np.arange(len(groups)), list(map(len, end_tokens)))[order]
    all_keys = [key for ks, span in zip(keys, spans, strict=True) for key in ks[span]]
    ordered_keys = [all_keys[row] for row in order.tolist()]
    return Rows(ordered_keys, ordered_keys, np.concatenate(blocks)[order], row_groups)


def keys_by_group(request: Request, num_groups: int) -> Sequence[Sequence[BlockKey]]:
    """Return a request's keys as one list for each group of layers."""
    if num_groups == 1:
        return (request.block_keys,)
    keys: Sequence[Sequence[BlockKey]]
    keys = getattr(request, "block_keys_by_group", ())
    if len(keys) != num_groups:
        raise ValueError(
            f"request {shown(request.request_id)} must have block_keys_by_group, a "
            f"list for each of the {num_groups} groups."
        )
    return keys


class Requests:
    """The requests that a scheduler knows.

    `clock` returns seconds, for the policy. With `may_lag`, a new request may lack the
    keys of its last full blocks.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        rules: OffloadRules,
        host: BlockIndex,
        clock: Callable[[], float] = time.perf_counter,
        *,
        may_lag: bool = False,
    ) -> None:
        self._groups, self._host, self._clock = groups, host, clock
        self._num_groups = len(groups)
        self._factor = rules.blocks_per_host_block
        self._prompt_only = rules.prompt_only
        self._max_offload_tokens = rules.max_offload_tokens or NO_LIMIT
        self._may_lag = may_lag
        # Each request's packed keys, for each group.
        self.by_request: dict[str, list[_Growing]] = {}
        # The tokens that each request's last lookup found on the device.
        self.num_local: dict[str, int] = {}
        # The maximum of computed tokens that count, by request: those before its load,
        # until it has arrived, or those whose keys have not changed since.
        self.caps: dict[str, int] = {}
        # Requests that use their blocks, and what the policy returned at their begin.
        self.begun: set[str] = set()
        self._policy_marks: dict[str, int] = {}
        # The keys of each request's last lookup, if there are tiers below the host.
        self._lookup_marks: dict[str, list[KeyMark]] = {}
        # Whether each class of requests has `block_keys`, perhaps as a slow property.
        self._has_keys: dict[type, bool] = {}

    def check(self, request: Request) -> str:
        """Check the attributes that every call reads; return the request's id."""
        has_keys = self._has_keys.get(type(request))
        if has_keys is None:
            has_keys = self._num_groups > 1 or hasattr(type(request), "block_keys")
            self._has_keys[type(request)] = has_keys
        try:
            name, num_tokens, num_computed = _REQUIRED(request)
        except AttributeError:
            raise self._missing_error(request) from None
        if not has_keys and not hasattr(request, "block_keys"):
            raise self._missing_error(request)
        if type(name) is not str and not isinstance(name, str):
            raise TypeError(f"request_id={shown(name)} must be a str.")
        if type(num_tokens) is not int or not 0 <= num_tokens <= _MAX_TOKENS:
            check_count("num_tokens", num_tokens, name, _MAX_TOKENS)
        if type(num_computed) is not int or num_computed < 0:
            check_count("num_computed_tokens", num_computed, name)
        return name

    def check_lookup(self, request: Request) -> None:
        """Check the attributes that a lookup reads."""
        name = self.check(request)
        max_tokens = getattr(request, "max_load_tokens", None)
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 0):
            check_count("max_load_tokens", max_tokens, name)
        is_remote = getattr(request, "remote_prefill", None)
        if not (is_remote is None or isinstance(is_remote, bool | np.bool_)):
            raise TypeError(
                f"remote_prefill={shown(is_remote)} of request {shown(name)} must be "
                "True, False or None."
            )

    def check_stores(self, request: Request) -> tuple[int, int]:
        """Return how many first tokens are certainly computed, and may be stored."""
        name = self.check(request)
        num_ahead = getattr(request, "num_output_placeholders", 0)
        if type(num_ahead) is not int or num_ahead < 0:
            check_count("num_output_placeholders", num_ahead, name)
        max_tokens = self._max_offload_tokens
        max_of_request = getattr(request, "max_offload_tokens", None)
        if max_of_request is not None:
            if type(max_of_request) is not int or max_of_request < 0:
                check_count("max_offload_tokens", max_of_request, name)
            max_tokens = min(max_tokens, max_of_request)
        num_prompt = getattr(request, "num_prompt_tokens", None)
        if num_prompt is not None:
            if type(num_prompt) is not int or num_prompt < 0:
                check_count("num_prompt_tokens", num_prompt, name)
            if self._prompt_only:
                max_tokens = min(max_tokens, num_prompt)
        elif self._prompt_only:
            raise TypeError(
                f"request {shown(name)} lacks num_prompt_tokens, which "
                "prompt_only=True needs to store only the blocks of prompts."
            )
        num_computed = request.num_computed_tokens - num_ahead
        if self.caps and name in self.caps:
            num_computed = min(num_computed, self.caps[name])
        return num_computed, max_tokens

    def check_known_keys(self, request: Request) -> None:
        """Check the keys of a known request before they are read."""
        if request.request_id in self.by_request:
            self.checked(request, is_admission=False)

    def checked(
        self, request: Request, *, is_admission: bool = True
    ) -> Sequence[PackedKeys]:
        """Check the keys of a checked request; return them for each group.

        At a lookup or an allocation (`is_admission`), a new request must have the keys
        of all its full blocks or none, and no request may have more. A new request
        whose keys are refused is forgotten.
        """
        name = request.request_id
        is_new = name not in self.by_request
        try:
            if is_new or not self._has_keys[type(request)]:  # Avoids slow properties.
                self._check_lists(request)
            keys = self.of(request)
            if is_admission:
                for group, spec in enumerate(self._groups):
                    num_full = request.num_tokens // spec.block_size
                    num = len(keys[group])
                    if num != num_full and (num > num_full or is_new):
                        self._check_number(request, group, num, num_full)
        except Exception as error:
            if is_new:  # The engine may never finish it.
                self.by_request.pop(name, None)
            elif not isinstance(error, ValueError):
                self._check_lists(request)
            raise
        return keys

    def _check_lists(self, request: Request) -> None:
        """Check that the keys are one list of keys per group."""
        if self._num_groups == 1:
            name = "block_keys"
            check_keys(self._groups[0], request.block_keys, name, request.request_id)
        else:
            name = "block_keys_by_group"
            keys = getattr(request, name, ())
            check_keys_by_group(self._groups, keys, name, request.request_id)

    def _check_number(
        self, request: Request, group: int, num: int, num_full: int
    ) -> None:
        """Raise unless a group has the keys of all its full blocks, or none."""
        if num <= num_full and (not num or self._may_lag):
            return
        size = self._groups[group].block_size
        raise ValueError(
            f"request {shown(request.request_id)} of {request.num_tokens} tokens has "
            f"{num} keys in group {group}, but {num_full} full blocks of {size} "
            "tokens: use the pool's block size for the keys and for the groups of "
            "OffloadScheduler, and give a new request the keys of all its full blocks, "
            "or none."
        )

    def _missing_error(self, request: object) -> TypeError:
        """Return an error that names the missing attributes of a request."""
        names = ["request_id", "block_keys", "num_tokens", "num_computed_tokens"]
        if self._num_groups > 1:
            names.remove("block_keys")  # `block_keys_by_group` replaces it.
        missing = [name for name in names if not hasattr(request, name)]
        return TypeError(
            f"request={shown(request)} must have the attributes of "
            f"jaxkv.scheduling.protocol.Request; it lacks {', '.join(missing)}."
        )

    def of(self, request: Request) -> Sequence[PackedKeys]:
        """Return a request's current keys for each group.

        A list grows with the request. If the engine has rewritten keys, a new list
        replaces the old one, which stays unchanged.
        """
        name, current = request.request_id, self.by_request.get(request.request_id)
        if self._num_groups == 1:
            keys = request.block_keys
            if current is None:
                current = self.by_request[name] = [_Growing(keys)]
            elif (updated := current[0].updated(keys)) is not current[0]:
                current = self.by_request[name] = [updated]
            return current
        all_keys = keys_by_group(request, self._num_groups)
        if current is None:
            current = list(map(_Growing, all_keys))
        else:
            current = list(map(_Growing.updated, current, all_keys))
        self.by_request[name] = current
        return current

    def row_keys(self, keys: Sequence[Sequence[BlockKey]]) -> Sequence[BlockKey]:
        """Return the keys of a request's host blocks in token order."""
        if self._num_groups == self._factor == 1:
            return keys[0]
        first, end = [0] * len(keys), list(map(len, keys))
        no_blocks = [np.zeros(num, np.int64) for num in end]
        return rows_of(self._groups, keys, no_blocks, first, end, self._factor).keys

    def record_lookup(self, request: Request) -> bool:
        """Record a lookup; return whether keys were rewritten since the last one."""
        keys = self.by_request[request.request_id]
        last_marks = self._lookup_marks.get(request.request_id)
        self._lookup_marks[request.request_id] = [
            KeyMark.of(group_keys, len(group_keys)) for group_keys in keys
        ]
        return last_marks is not None and not all(map(KeyMark.is_in, last_marks, keys))

    def end_lookup(self, request_id: str) -> int | None:
        """Forget a lookup; return its device hits in tokens, None without a lookup."""
        if self._lookup_marks:
            self._lookup_marks.pop(request_id, None)
        return self.num_local.pop(request_id, None)

    def begin(self, request: Request, keys: Sequence[Sequence[BlockKey]]) -> None:
        """Record that a request uses its blocks from now on; notify the policy."""
        self.begun.add(request.request_id)
        if self._host.listens:
            rows, positions = self._rows_by_group(keys)
            now_ms = self.now_ms()
            self._policy_marks[request.request_id] = self._host.begin_request(
                rows, request.num_tokens, now_ms, positions, kind_of(request)
            )
            self._retain(request, keys, now_ms)

    def finish(
        self, request: Request, keys: Sequence[Sequence[BlockKey]], stop: Stop | None
    ) -> None:
        """Notify a policy that listens that a request has finished."""
        mark = self._policy_marks.pop(request.request_id)
        rows, positions = self._rows_by_group(keys)
        num_output, now_ms = output_tokens_of(request), self.now_ms()
        self._host.finish_request(rows, mark, now_ms, num_output, stop, positions)
        self._retain(request, keys, now_ms)

    def forget(self, request_id: str) -> None:
        """Forget a request that has finished."""
        self.begun.discard(request_id)
        self.by_request.pop(request_id, None)
        self.caps.pop(request_id, None)

    def now_ms(self) -> int:
        """Return the time by the policy's clock."""
        return int(1000 * self._clock())

    def _retain(
        self, request: Request, keys: Sequence[Sequence[BlockKey]], now_ms: int
    ) -> None:
        """Set the priority of a request's blocks, if it has a `retention`."""
        retention = retention_of(request) if self._host.retains else None
        if retention is not None:
            if retention.num_tokens is not None:
                keys = [
                    group_keys[: retention.num_tokens // spec.block_size]
                    for group_keys, spec in zip(keys, self._groups, strict=True)
                ]
            self._host.retain(self._rows_by_group(keys)[0], retention, now_ms)

    def _rows_by_group(
        self, keys: Sequence[Sequence[BlockKey]]
    ) -> tuple[Sequence[BlockKey], list[int]]:
        """Return host blocks' keys, group by group, and their indices in the group."""
        if self._num_groups == self._factor == 1:
            return keys[0], list(range(len(keys[0])))
        rows = [group_keys[self._factor - 1 :: self._factor] for group_keys in keys]
        positions = [index for group_rows in rows for index in range(len(group_rows))]
        return [key for group_rows in rows for key in group_rows], positions


class _Growing(PackedKeys):
    """The keys of one group of a request, with room to append more."""

    __slots__ = ("_mark", "_room")

    def __reduce__(self) -> tuple[Any, ...]:
        return _Growing, (list(self),)

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        packed, words, has_foreign = lay_out(keys)
        super().__init__(packed, words, has_foreign=has_foreign)
        num = len(packed)
        self._mark = KeyMark.of(packed, num)
        self._room = words
        if num > _FEW_KEYS:  # Else the first appended key copies all keys.
            self._make_room(num + num // 8)

    def updated(self, keys: Sequence[BlockKey]) -> _Growing:
        """Append a request's new keys; return a new list if keys were rewritten."""
        if not self._mark.is_in(keys):
            return _Growing(keys)
        num, total = len(self), len(keys)
        if num < total:
            added, words, has_foreign = lay_out(keys[num:])
            if total > len(self._room):
                self._make_room(2 * total)
            self._room[num:total] = words
            self.extend(added)
            self.has_foreign |= has_foreign
            self.words = self._room[:total]
            self.words.flags.writeable = False
            self._mark = KeyMark.of(keys, total)
        return self

    def _make_room(self, num: int) -> None:
        room = np.empty((num, KEY_WORDS), np.uint32)
        room[: len(self)] = self.words
        self._room = room


def output_tokens_of(request: Request) -> int | None:
    """Return the number of tokens that a request has generated; None if unknown."""
    num_prompt: int | None = getattr(request, "num_prompt_tokens", None)
    return None if num_prompt is None else max(request.num_tokens - num_prompt, 0)


def stop_of(request: Request) -> Stop | None:
    """Return why a request stopped; None if unknown; raise ValueError if invalid."""
    stop: Stop | None = getattr(request, "stop", None)
    if stop is not None and (not isinstance(stop, str) or stop not in STOPS):
        raise ValueError(
            f"stop={shown(stop)} of request {shown(request.request_id)} must be one of "
            f"{STOPS}."
        )
    return stop


def kind_of(request: Request) -> int | None:
    """Return a request's `kind`; None if unset; raise ValueError if invalid."""
    try:
        return check_kind(getattr(request, "kind", None))
    except ValueError as error:
        raise ValueError(f"request {shown(request.request_id)}: {error}") from None


def retention_of(request: Request) -> Retention | None:
    """Return a request's `retention`; None if unset; raise ValueError if invalid."""
    retention: Retention | None = getattr(request, "retention", None)
    if retention is not None and not isinstance(retention, Retention):
        raise ValueError(
            f"retention={shown(retention)} of request {request.request_id!r} must be a "
            "jaxkv.Retention or None."
        )
    return retention
