"""Which blocks are asked for again: only those are worth a place on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxkv.types import BlockKey


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
