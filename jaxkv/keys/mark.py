"""A mark in a request's keys, which shows a holder of a copy if they were rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from jaxkv.types import BlockKey


class KeyMark(NamedTuple):
    """The first keys of a list: their number, and the last of them.

    A key stands for all tokens up to the end of its block, so that the last one alone
    needs to be compared.
    """

    num: int = 0
    last: BlockKey = b""  # b"" for no keys.

    @classmethod
    def of(cls, keys: Sequence[BlockKey], num: int) -> Self:
        """Mark the first keys of a list, or all if there are fewer than `num`."""
        num = min(num, len(keys))
        return cls(num, keys[num - 1]) if num else cls()

    def is_in(self, keys: Sequence[BlockKey]) -> bool:
        """Whether a list still begins with the marked keys."""
        num = self.num
        return not num or (num <= len(keys) and keys[num - 1] == self.last)
