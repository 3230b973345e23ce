"""Bounded memory of keys, resident or not.

`ReuseFilter` counts look-ups, so that only reused keys are stored. `RetentionNotes`
keeps the priorities of blocks until they are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from jaxkv.tiers.retention import Retention
from jaxkv.types import BlockKey

MAX_TRACKED = 64_000
"""The default number of keys whose look-ups are counted."""


class ReuseFilter:
    """An admission filter: a key passes after `threshold` look-ups.

    The rules follow vLLM 0.19.1's `FilterReusedOffloadingManager`, with one addition:
    of a look-up's never-seen keys, only the first `max_unseen` pass; the others pass
    when they are looked up again. So the tail of a long prompt that never comes back
    takes no room, but its head, which other prompts may share, is stored.

    Beyond `max_size` keys, the least recently looked-up key is forgotten, and its count
    restarts from 0. Keys beyond `max_unseen` are kept in a second list of `max_size`
    keys, so that they do not pass while their request runs, however many keys other
    requests look up.

    Example:
        >>> reuse = ReuseFilter(threshold=2, max_size=1000)
        >>> reuse.count([b"shared", b"mine"])
        >>> reuse.count([b"shared", b"yours"])
        >>> reuse.passes([b"shared", b"mine", b"yours"])
        [True, False, False]
        >>> scans = ReuseFilter(threshold=0, max_size=1000, max_unseen=1)
        >>> scans.count([b"head", b"tail"])
        >>> scans.passes([b"head", b"tail", b"generated"])
        [True, False, True]
    """

    def __init__(
        self, threshold: int, max_size: int, max_unseen: int | None = None
    ) -> None:
        self.threshold = threshold
        self.max_size = max_size
        self.max_unseen = max_unseen
        # Keys beyond `max_unseen`, looked up only once; the oldest first.
        self._held_back: OrderedDict[BlockKey, None] = OrderedDict()
        # Look-ups of each key, the least recently looked-up key first.
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def count(self, keys: Iterable[BlockKey]) -> None:
        """Count a look-up of each key."""
        if self.max_unseen is not None:
            keys = list(keys)
            unseen = dict.fromkeys(key for key in keys if key not in self._counts)
            for key in keys:
                self._held_back.pop(key, None)
            self._held_back.update(islice(unseen.items(), self.max_unseen, None))
            while len(self._held_back) > self.max_size:
                self._held_back.popitem(last=False)
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._counts.move_to_end(key)
            if len(self._counts) > self.max_size:
                self._counts.popitem(last=False)

    def passes(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each key passes the filter."""
        return [
            self._counts.get(key, 0) >= self.threshold and key not in self._held_back
            for key in keys
        ]


class RetentionNotes:
    """The priorities of absent keys, until their blocks are stored.

    Beyond `max_size` keys, the oldest priority is forgotten.

    Example:
        >>> notes = RetentionNotes(max_size=2)
        >>> minute = Retention(ttl_s=60)
        >>> notes.note([b"a", b"b", b"c"], minute, given_ms=0)
        >>> [keys for _, keys in notes.groups([b"a", b"b", b"c"], now_ms=59_999)]
        [[b'b', b'c']]
        >>> notes.groups([b"b"], now_ms=60_000)
        []
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        # Priority and start time of each key, the oldest first.
        self._notes: OrderedDict[BlockKey, tuple[Retention, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def note(
        self, keys: Iterable[BlockKey], retention: Retention, given_ms: int
    ) -> None:
        """Record the priority of keys from a time on, replacing an earlier one."""
        for key in keys:
            self._notes[key] = retention, given_ms
            self._notes.move_to_end(key)
            if len(self._notes) > self._max_size:
                self._notes.popitem(last=False)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget the priorities of keys."""
        for key in keys:
            self._notes.pop(key, None)

    def groups(
        self, keys: Iterable[BlockKey], now_ms: int
    ) -> list[tuple[tuple[Retention, int], list[BlockKey]]]:
        """Group keys by priority and start time; forget priorities that have ended."""
        groups: dict[tuple[Retention, int], list[BlockKey]] = {}
        for key in keys:
            entry = self._notes.get(key)
            if entry is None:
                continue
            retention, given_ms = entry
            if now_ms - given_ms >= retention.lifetime_ms:
                del self._notes[key]
            else:
                groups.setdefault(entry, []).append(key)
        return list(groups.items())

    def clear(self) -> None:
        """Forget all keys."""
        self._notes.clear()
