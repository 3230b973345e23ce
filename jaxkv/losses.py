"""Which blocks the host tier lost or never got, and why: the last of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, TypeAlias

from jaxkv.keys import keys_from_foreign
from jaxkv.types import BlockKey

Loss: TypeAlias = Literal["evicted", "full", "slow", "store failed", "load failed"]
"""What became of a block: the host gave it up for others; it was never stored, as the
host had no room, or as too much was on its way; its store failed; its load failed."""


class Losses:
    """Remembers the last blocks that were lost, each with the last reason.

    Args:
        max_size: Keys to remember; 0 for none. Beyond it the one that was lost longest
            ago goes.

    Example:
        >>> losses = Losses(max_size=2)
        >>> losses.note([b"a", b"b"], "evicted")
        >>> losses.note([b"c"], "slow")
        >>> [losses.reason_of(key) for key in (b"a", b"b", b"c")]
        [None, 'evicted', 'slow']
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        # What was lost longest ago comes first.
        self._reasons: OrderedDict[BlockKey, Loss] = OrderedDict()

    def note(self, keys: Iterable[bytes], reason: Loss) -> None:
        """Record that blocks are not on the host, in the order of their keys."""
        if not self._max_size:
            return
        for key in keys_from_foreign(keys):
            self._reasons[key] = reason
            self._reasons.move_to_end(key)
            if len(self._reasons) > self._max_size:
                self._reasons.popitem(last=False)

    def reason_of(self, key: bytes) -> Loss | None:
        """Tell why a block is not on the host; None if that is not remembered."""
        (own,) = keys_from_foreign([key])
        return self._reasons.get(own)

    def clear(self) -> None:
        """Forget all of it."""
        self._reasons.clear()
