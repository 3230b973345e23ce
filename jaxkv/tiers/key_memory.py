"""Bounded memory of keys that need not be in any tier.

`ReuseFilter` counts look-ups, so that only keys that are asked for again are stored.
`RetentionNotes` has the priorities of blocks that are not stored yet. `DropReasons`
knows why blocks are not on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, TypeAlias

from jaxkv.tiers.retention import Retention
from jaxkv.types import BlockKey

MAX_TRACKED = 64_000
"""Keys whose look-ups are counted, unless more or fewer are asked for."""

DropReason: TypeAlias = Literal[
    "evicted", "full", "slow", "paused", "store failed", "load failed"
]
"""Why a block is not on the host: it was evicted for others; it was never stored, as
the host had no room, as too much was on its way, or as stores were paused; its store
failed; its load failed."""


class ReuseFilter:
    """Counts how often keys are looked up, and passes those that are often.

    The rules follow vLLM 0.19.1's `FilterReusedOffloadingManager`, and one more: of the
    keys of a look-up that were never looked up before, the first `max_unseen` pass, the
    others only when they are looked up again. So the tail of a long prompt that never
    comes back takes no room, while its head does, which other prompts may share.

    Beyond `max_size` keys, the key whose last look-up is oldest is forgotten, and
    starts from 0 if it comes back. As many keys that may not pass are remembered in
    addition, for requests that outlast the look-ups of others.

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
        # Keys that were looked up once, beyond those that may pass; the oldest first.
        self._held_back: OrderedDict[BlockKey, None] = OrderedDict()
        # The key whose last look-up is oldest comes first.
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def count(self, keys: Iterable[BlockKey]) -> None:
        """Record a look-up of each key, in their order."""
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
        """Whether each key was looked up often enough."""
        return [
            self._counts.get(key, 0) >= self.threshold and key not in self._held_back
            for key in keys
        ]


class RetentionNotes:
    """Remembers how long to keep keys, for when their blocks are stored.

    Beyond `max_size` keys, the one that was noted longest ago is forgotten.

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
        # What was noted longest ago comes first.
        self._notes: OrderedDict[BlockKey, tuple[Retention, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def note(
        self, keys: Iterable[BlockKey], retention: Retention, given_ms: int
    ) -> None:
        """Record the retention of keys from a time on, in place of an earlier one."""
        for key in keys:
            self._notes[key] = retention, given_ms
            self._notes.move_to_end(key)
            if len(self._notes) > self._max_size:
                self._notes.popitem(last=False)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """Forget keys."""
        for key in keys:
            self._notes.pop(key, None)

    def groups(
        self, keys: Iterable[BlockKey], now_ms: int
    ) -> list[tuple[tuple[Retention, int], list[BlockKey]]]:
        """Group keys by retention and its time; forget those that have ended."""
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


class DropReasons:
    """Remembers the last blocks that were dropped, each with the last reason.

    Beyond `max_size` keys, the one that was dropped longest ago is forgotten; 0 for
    none.

    Example:
        >>> drops = DropReasons(max_size=2)
        >>> drops.note([b"a", b"b"], "evicted")
        >>> drops.note([b"c"], "slow")
        >>> [drops.reason_of(key) for key in (b"a", b"b", b"c")]
        [None, 'evicted', 'slow']
    """

    def __init__(self, max_size: int) -> None:
        self.is_kept = max_size > 0
        self._max_size = max_size
        # What was dropped longest ago comes first.
        self._reasons: OrderedDict[BlockKey, DropReason] = OrderedDict()

    def note(self, keys: Iterable[BlockKey], reason: DropReason) -> None:
        """Record why blocks are not on the host, in the order of their keys."""
        if not self.is_kept:
            return
        for key in keys:
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > self._max_size:
                self._reasons.popitem(last=False)

    def reason_of(self, key: BlockKey) -> DropReason | None:
        """Return why a block is not on the host; None if unknown."""
        return self._reasons.get(key)

    def clear(self) -> None:
        """Forget all keys."""
        self._reasons.clear()
