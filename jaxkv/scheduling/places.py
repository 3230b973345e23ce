"""Places: which entries of block tables still name what their request left there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxkv.tiers.base import as_ids
from jaxkv.types import NULL_BLOCK

_NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(eq=False)
class Table:
    """A request's block table for one group: its first `num` entries are in use.

    An entry is a place: a block, and the time at which the request got it.
    """

    ids: NDArray[np.int64]
    times: NDArray[np.int64]
    num: int

    def __len__(self) -> int:
        return self.num


class Places:
    """The versions of the device's blocks: when each was last given to a request.

    Whoever gets a block voids all older entries of tables for good, even if the block
    is then given to a request with the same prefix. Times count calls of `_give`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self._now = num_blocks, 0
        self._given = np.zeros(num_blocks, np.int64)  # i64[B]
        self._given[NULL_BLOCK] = _NEVER  # The null block holds nothing.

    def _give(self, ids: NDArray[np.int64]) -> int:
        """Void all entries of blocks; return the time of the entries that follow."""
        self._now += 1
        self._given[ids] = self._now
        self._given[NULL_BLOCK] = _NEVER
        return self._now

    def give(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Give blocks to a request without tables; return them."""
        ids = as_ids(blocks)
        self._give(ids)
        return ids

    def admit(self, blocks: Sequence[int], num_found: int) -> Table:
        """Give blocks to a request, except the first ones, which were found cached."""
        ids = as_ids(blocks)
        now = self._give(ids[num_found:])
        return Table(ids, np.full(len(ids), now), len(ids))

    def extend(self, table: Table, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Give more blocks to a request; return them."""
        ids, first, end = as_ids(blocks), table.num, table.num + len(blocks)
        now = self._give(ids)
        if end > len(table.ids):
            room = np.zeros(end, np.int64)
            table.ids = np.concatenate([table.ids[:first], room])
            table.times = np.concatenate([table.times[:first], room])
        table.ids[first:end], table.times[first:end] = ids, now
        table.num = end
        return ids

    def replace(self, table: Table, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Replace the blocks of a table; return those that were given to the request.

        An entry that stays keeps its time, which may have voided it.
        """
        ids = as_ids(blocks)
        num = min(len(ids), table.num)
        is_new = np.ones(len(ids), np.bool_)
        is_new[:num] = ids[:num] != table.ids[:num]
        given = ids[is_new]
        times = np.zeros(len(ids), np.int64)
        times[:num] = table.times[:num]
        if len(given):
            times[is_new] = self._give(given)
        table.ids, table.times, table.num = ids, times, len(ids)
        return given

    def rewind(self, table: Table, first: int) -> NDArray[np.int64]:
        """Give a request its own blocks from an index on, which it overwrites."""
        ids = table.ids[first : table.num]
        table.times[first : table.num] = self._give(ids)
        return ids

    def read(self, table: Table, first: int, end: int) -> NDArray[np.int64]:
        """Return the block ids of entries [first, end), or null where they are void."""
        ids = table.ids[first:end]
        is_valid = self._given[ids] <= table.times[first:end]
        return ids if is_valid.all() else np.where(is_valid, ids, NULL_BLOCK)
