"""A mark in a request's keys, which detects that the keys were rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from jaxkv.types import BlockKey


class KeyMark(NamedTuple):
    """The number of leading keys of a list, and the last of these keys.

    A key covers all tokens up to the end of its block, so comparing the last suffices.
    """

    num: int = 0
    last: BlockKey = b""  # b"" if `num` is 0.

    @classmethod
    def of(cls, keys: Sequence[BlockKey], num: int) -> Self:
        """Mark the first `num` keys of a list, or all if there are fewer."""
        num = min(num, len(keys))
        return cls(num, keys[num - 1]) if num else cls()

    def is_in(self, keys: Sequence[BlockKey]) -> bool:
        """Return whether a list begins with the marked keys."""
        num = self.num
        return not num or (num <= len(keys) and keys[num - 1] == self.last)
