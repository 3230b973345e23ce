"""What is remembered of keys that need not be in any tier.

`ReuseFilter` counts look-ups, so that only what is asked for again is stored.
`DropReasons` says why blocks are not on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from jaxkv.types import BlockKey

DropReason: TypeAlias = Literal[
    "evicted", "full", "slow", "store failed", "load failed"
]
"""Why a block is not on the host: it was evicted for others; it was never stored, as
the host had no room, or as too much was on its way; its store failed; its load
failed."""


class ReuseFilter:
    """Counts how often keys are looked up, and passes those that are often.

    The rules are those of vLLM 0.19.1's `FilterReusedOffloadingManager`.

    Args:
        threshold: Look-ups from which on a key passes.
        max_size: Keys to remember. Beyond it, the key whose last look-up is oldest
            is forgotten, and starts from 0 if it comes back.

    Example:
        >>> reuse = ReuseFilter(threshold=2, max_size=1000)
        >>> reuse.count([b"shared", b"mine"])
        >>> reuse.count([b"shared", b"yours"])
        >>> reuse.passes([b"shared", b"mine", b"yours"])
        [True, False, False]
    """

    def __init__(self, threshold: int, max_size: int) -> None:
        self.threshold = threshold
        self.max_size = max_size
        # The key whose last look-up is oldest comes first.
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def count(self, keys: Iterable[BlockKey]) -> None:
        """Record a look-up of each key, in their order."""
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1
            self._counts.move_to_end(key)
            if len(self._counts) > self.max_size:
                self._counts.popitem(last=False)

    def passes(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tell for each key whether it was looked up often enough."""
        return [self._counts.get(key, 0) >= self.threshold for key in keys]


class DropReasons:
    """Remembers the last blocks that were dropped, each with the last reason.

    Args:
        max_size: Keys to remember; 0 for none. Beyond it the one that was dropped
            longest ago is forgotten.

    Example:
        >>> drops = DropReasons(max_size=2)
        >>> drops.note([b"a", b"b"], "evicted")
        >>> drops.note([b"c"], "slow")
        >>> [drops.reason_of(key) for key in (b"a", b"b", b"c")]
        [None, 'evicted', 'slow']
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        # What was dropped longest ago comes first.
        self._reasons: OrderedDict[BlockKey, DropReason] = OrderedDict()

    def note(self, keys: Iterable[BlockKey], reason: DropReason) -> None:
        """Record that blocks are not on the host, in the order of their keys."""
        if not self._max_size:
            return
        for key in keys:
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > self._max_size:
                self._reasons.popitem(last=False)

    def reason_of(self, key: BlockKey) -> DropReason | None:
        """Tell why a block is not on the host; None if that is not remembered."""
        return self._reasons.get(key)

    def clear(self) -> None:
        """Forget all of it."""
        self._reasons.clear()
