"""Places: which entries of block tables still name what their request left there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.types import NULL_BLOCK

_NEVER = np.iinfo(np.int64).max
_FEW = 8  # Up to so many entries, a Python loop is faster than NumPy.


class Places:
    """The versions of the device's blocks, and those that each request's tables name.

    An entry of a block table is a place: a block, and the time at which its request got
    it. Whoever gets the block later voids the entry for good, even if the block is then
    given to a request with the same prefix. Times count calls of `give`.
    """

    # Times only grow: states that differ in nothing else are equal.
    _NOT_DIGESTED = True

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self._now = num_blocks, 0
        # i64[B]. The last time at which each block was given to a request.
        self._given = np.zeros(num_blocks, np.int64)
        self._given[NULL_BLOCK] = _NEVER  # The null block holds nothing.
        # By request and group: the time of each entry of its table.
        self._times: dict[str, list[list[int]]] = {}

    def give(self, blocks: Sequence[int]) -> int:
        """Void all entries of blocks; return the time of the entries that follow."""
        self._now += 1
        given = self._given
        if len(blocks) <= _FEW:
            for block in blocks:
                given[block] = self._now
        else:
            given[np.frombuffer(array("q", blocks), np.int64)] = self._now
        given[NULL_BLOCK] = _NEVER
        return self._now

    def admit(
        self, name: str, tables: Sequence[list[int]], num_found: Sequence[int]
    ) -> list[int]:
        """Give blocks to a request, except those found cached; return the blocks."""
        pairs = zip(tables, num_found, strict=True)
        given = [block for table, num in pairs for block in table[num:]]
        now = self.give(given)
        self._times[name] = [[now] * len(table) for table in tables]
        return given

    def extend(self, name: str, tables: Sequence[list[int]]) -> list[int]:
        """Give more blocks to a request, for each group; return the blocks."""
        given = [block for table in tables for block in table]
        now = self.give(given)
        for times, table in zip(self._times[name], tables, strict=True):
            times += [now] * len(table)
        return given

    def replace(
        self, name: str, tables: Sequence[list[int]], new_tables: Sequence[list[int]]
    ) -> list[int]:
        """Replace a request's tables; return the blocks that were given to it.

        An entry that stays keeps its time, which may have voided it.
        """
        given, pairs = [], zip(tables, new_tables, strict=True)
        for times, (table, new) in zip(self._times[name], pairs, strict=True):
            num = min(len(table), len(new))
            changed = list(range(num, len(new)))
            if table[:num] != new[:num]:
                changed += [i for i in range(num) if table[i] != new[i]]
            now = self.give([new[index] for index in changed]) if changed else 0
            times[num:] = [now] * (len(new) - num)
            for index in changed:
                times[index] = now
            given += [new[index] for index in changed]
        return given

    def rewind(self, name: str, group: int, first: int, blocks: Sequence[int]) -> None:
        """Give a request its own blocks from an index on, which it overwrites."""
        now = self.give(blocks)
        times = self._times[name][group]
        times[first:] = [now] * len(blocks)

    def are_valid(
        self, name: str, group: int, first: int, blocks: Sequence[int]
    ) -> NDArray[np.bool_] | None:
        """Return bool[n]: which entries from `first` on are valid; None if all are."""
        times, given = self._times[name][group], self._given
        if len(blocks) <= _FEW and all(
            given[block] <= times[first + row] for row, block in enumerate(blocks)
        ):
            return None
        ids = np.frombuffer(array("q", blocks), np.int64)
        bounds = np.frombuffer(array("q", times[first : first + len(blocks)]), np.int64)
        valid: NDArray[np.bool_] = given[ids] <= bounds
        return None if valid.all() else valid

    def forget(self, name: str) -> None:
        """Forget the tables of a request that has left."""
        self._times.pop(name, None)
