"""A mark in a request's keys: a copy of them sees by it that they were rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from jaxkv.types import BlockKey


class KeyMark(NamedTuple):
    """The first keys of a list: their number, and the last of them.

    A key stands for all tokens up to the end of its block. Therefore, if the last one
    is in its place, those before it are, too: no other key is compared.

    Attributes:
        num: How many keys.
        last: The last of them; b"" for none.
    """

    num: int = 0
    last: BlockKey = b""

    @classmethod
    def of(cls, keys: Sequence[BlockKey], num: int) -> Self:
        """Mark the first keys of a list, or all if there are fewer than `num`."""
        num = min(num, len(keys))
        return cls(num, keys[num - 1]) if num else cls()

    def is_in(self, keys: Sequence[BlockKey]) -> bool:
        """Whether a list still begins with the marked keys."""
        num = self.num
        return not num or (num <= len(keys) and keys[num - 1] == self.last)
