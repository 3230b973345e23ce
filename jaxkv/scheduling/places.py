"""Places: which entries of block tables still name what their request left there."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.types import NULL_BLOCK

_NEVER = np.iinfo(np.int64).max


@dataclasses.dataclass(eq=False)
class Table:
    """A request's block table for one group, with the time of each entry.

    An entry is a place: a block, and when the request got it.
    """

    ids: NDArray[np.int64]  # i64[n]
    times: NDArray[np.int64]  # i64[n]
    num: int  # The first `num` entries are in use.

    def __len__(self) -> int:
        return self.num


class Places:
    """The versions of the device's blocks: when each was last given to a request.

    Once a block is given away, all older entries are void for good, even if a request
    with the same prefix gets the block again. Times count calls of `give`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self._now = num_blocks, 0
        self._last_given = np.zeros(num_blocks, np.int64)  # i64[B]
        self._last_given[NULL_BLOCK] = _NEVER  # The null block holds nothing.

    def give(self, ids: NDArray[np.int64]) -> int:
        """Void all entries of blocks; return the time of the entries that follow."""
        self._now += 1
        self._last_given[ids] = self._now
        self._last_given[NULL_BLOCK] = _NEVER
        return self._now

    def admit(self, ids: NDArray[np.int64], num_found: int) -> Table:
        """Make a request's table; its first `num_found` blocks were found cached."""
        now = self.give(ids[num_found:])
        return Table(ids, np.full(len(ids), now), len(ids))

    def extend(self, table: Table, ids: NDArray[np.int64]) -> None:
        """Append blocks to a table."""
        first, end = table.num, table.num + len(ids)
        if end > len(table.ids):
            room = np.zeros(end, np.int64)
            table.ids = np.concatenate([table.ids[:first], room])
            table.times = np.concatenate([table.times[:first], room])
        table.ids[first:end], table.times[first:end] = ids, self.give(ids)
        table.num = end

    def replace(self, table: Table, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Replace the blocks of a table; return those that are new at their place.

        An entry that stays keeps its time, which may have voided it.
        """
        num = min(len(ids), table.num)
        is_new = np.ones(len(ids), np.bool_)
        np.not_equal(ids[:num], table.ids[:num], out=is_new[:num])
        new_ids = ids[is_new]
        if len(new_ids) or len(ids) != table.num:
            times = np.zeros(len(ids), np.int64)
            times[:num] = table.times[:num]
            times[is_new] = self.give(new_ids)
            table.ids, table.times, table.num = ids, times, len(ids)
        return new_ids

    def rewind(self, table: Table, first: int) -> NDArray[np.int64]:
        """Renew the entries from an index on, whose blocks the request overwrites."""
        ids = table.ids[first : table.num]
        table.times[first : table.num] = self.give(ids)
        return ids

    def read(self, table: Table, first: int, end: int) -> NDArray[np.int64]:
        """Return the block ids of entries [first, end), or null where they are void."""
        ids = table.ids[first:end]
        is_valid = self._last_given[ids] <= table.times[first:end]
        return ids if is_valid.all() else np.where(is_valid, ids, NULL_BLOCK)
