"""Plans: which device block goes into which row of an extent."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.extent_table import Placement

NOTHING = -1
"""In a plan, a row that is neither written nor read."""


class SavePlan(NamedTuple):
    """Which block goes into which row of an extent."""

    # i32[shards, 2 * rows]. The device block of each row, counted within its shard,
    # NOTHING for a row that is free or carried over; then for each row whether it is
    # carried over from an extent: 0 or 1.
    row_sources: NDArray[np.int32]

    @property
    def sources(self) -> NDArray[np.int32]:
        """The first half of `row_sources`: i32[shards, rows]."""
        return self.row_sources[:, : self.row_sources.shape[1] // 2]

    @property
    def carried(self) -> NDArray[np.bool_]:
        """Whether each row is carried over: bool[shards, rows]."""
        is_carried: NDArray[np.bool_] = (
            self.row_sources[:, self.row_sources.shape[1] // 2 :] > 0
        )
        return is_carried

    def row_lists(self) -> NDArray[np.int32]:
        """Return the plan as lists: i32[shards, 3 * rows + 2].

        The blocks to read, the rows to write them to, the rows to carry over, then the
        number of rows to write and of rows to carry over.
        """
        sources, is_carried = self.sources, self.carried
        num_shards, num_rows = sources.shape
        lists = np.zeros((num_shards, 3 * num_rows + 2), np.int32)
        for shard in range(num_shards):
            (rows,) = np.nonzero(sources[shard] != NOTHING)
            (carried,) = np.nonzero(is_carried[shard])
            lists[shard, : len(rows)] = sources[shard, rows]
            lists[shard, num_rows : num_rows + len(rows)] = rows
            lists[shard, 2 * num_rows : 2 * num_rows + len(carried)] = carried
            lists[shard, -2:] = len(rows), len(carried)
        return lists


class Cut(NamedTuple):
    """The blocks that a load takes out of one extent at a time."""

    extent: int
    rows: NDArray[np.intp]  # int[k]. Indices of the call's blocks, in distinct places.
    transfers: list[int]  # The call's transfers that they belong to, ascending.


def cut_load(
    extents: NDArray[np.int32], places: NDArray[np.int32], owners: NDArray[np.intp]
) -> list[Cut]:
    """Cut a load by extents, in the order of their first blocks.

    Blocks, which may repeat, are at `places` i32[n] of `extents` i32[n], and belong to
    the transfers `owners` int[n].
    """
    if len(set(extents.tolist())) == 1 and _are_distinct(places):
        rows = np.arange(len(extents))
        return [Cut(int(extents[0]), rows, sorted(set(owners.tolist())))]
    order = np.argsort(extents, kind="stable")
    starts = (np.diff(extents[order], prepend=-1).nonzero()[0]).tolist()
    split = [order[a:b] for a, b in itertools.pairwise([*starts, len(order)])]
    cuts = []
    for rows in sorted(split, key=operator.itemgetter(0)):
        while rows.size:
            picked, rows = rows, rows[:0]
            if not _are_distinct(places[picked]):
                _, once = np.unique(places[picked], return_index=True)
                picked, rows = picked[once], np.delete(picked, once)
            owned_by = sorted(set(owners[picked].tolist()))
            cuts.append(Cut(int(extents[picked[0]]), picked, owned_by))
    return cuts


def _are_distinct(values: NDArray[np.integer[Any]]) -> bool:
    return len(set(values.tolist())) == len(values)


def shortest_first(cuts: list[Cut], num_transfers: int) -> Iterator[Cut]:
    """Order a load's cuts so that a transfer does not wait for a longer one.

    Yields for each transfer, in the order of their numbers of cuts, the cuts that no
    transfer before it has.
    """
    of_each: list[list[int]] = [[] for _ in range(num_transfers)]
    for number, cut in enumerate(cuts):
        for transfer in cut.transfers:
            of_each[transfer].append(number)
    is_done = np.zeros(len(cuts), np.bool_)
    for numbers in sorted(of_each, key=len):
        for number in numbers:
            if not is_done[number]:
                is_done[number] = True
                yield cuts[number]


class Plans(NamedTuple):
    """Turns block ids into rows of extents.

    A host block is `blocks_per_host_block` consecutive rows of an extent, in one shard;
    a row holds one device block.
    """

    num_shards: int  # Shards of the block axis.
    shard_blocks: int  # Device blocks per shard.
    extent_blocks: int  # Host blocks per extent and shard.
    blocks_per_host_block: int

    @property
    def num_rows(self) -> int:
        """Rows per extent and shard."""
        return self.extent_blocks * self.blocks_per_host_block

    def shards(self, device_ids: NDArray[np.int32]) -> NDArray[np.intp]:
        """Return the shard of each host block's device blocks i32[n, m], int[n].

        ValueError if the device blocks of a host block are in several shards.
        """
        if self.num_shards == 1:
            return np.zeros(len(device_ids), np.intp)
        shards = (device_ids // self.shard_blocks).astype(np.intp)
        first: NDArray[np.intp] = shards.max(axis=1)  # NOTHING has a negative one.
        apart = np.flatnonzero(
            ((shards != first[:, None]) & (device_ids != NOTHING)).any(axis=1)
        )
        if apart.size:
            raise ValueError(
                f"device_block_ids {device_ids[apart].tolist()} are of several shards: "
                f"the block axis is sharded in runs of {self.shard_blocks}, and the "
                "blocks of a host block must be in one of them."
            )
        return first

    def check_shards(
        self, device_ids: NDArray[np.int32], places: NDArray[np.int32]
    ) -> None:
        """Refuse to load blocks into another shard than they were saved from.

        They go from the places i32[n] of their extents to the device blocks i32[n, m].
        """
        shards, saved = self.shards(device_ids), places // self.extent_blocks
        wrong = np.flatnonzero(shards != saved)
        if wrong.size:
            raise ValueError(
                f"device_block_ids {device_ids[wrong].tolist()} are of the shards "
                f"{shards[wrong].tolist()} of the block axis, but their host blocks "
                f"are from {saved[wrong].tolist()}: a block stays on its devices."
            )

    def save(self, device_ids: NDArray[np.int32], placement: Placement) -> SavePlan:
        """Plan a piece of a save, whose placed blocks are `device_ids` i32[n, m]."""
        plan = np.full((self.num_shards, 2 * self.num_rows), NOTHING, np.int32)
        self._enter(plan, placement.places, device_ids)
        is_carried = plan[:, self.num_rows :]
        is_carried[:] = 0
        if placement.carried_places.size:
            is_carried[self._rows(placement.carried_places)] = 1
        return SavePlan(plan)

    def load(
        self, device_ids: NDArray[np.int32], places: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Plan the load of blocks i32[n, m] from distinct places int[n] of an extent.

        Returns the device block for each row, i32[shards, rows], NOTHING for none.
        """
        targets = np.full((self.num_shards, self.num_rows), NOTHING, np.int32)
        self._enter(targets, places, device_ids)
        return targets

    def leave_out(
        self, targets: NDArray[np.int32], device_ids: NDArray[np.int32]
    ) -> None:
        """Remove device blocks i32[n, m] from the plan of a load, in place."""
        starts = np.arange(self.num_shards, dtype=np.int32) * self.shard_blocks
        is_target = targets != NOTHING
        is_out = np.isin(targets + starts[:, None], device_ids[device_ids != NOTHING])
        targets[is_target & is_out] = NOTHING

    def _enter(
        self,
        plan: NDArray[np.int32],
        places: NDArray[np.integer[Any]],
        device_ids: NDArray[np.int32],
    ) -> None:
        """Write device blocks i32[n, m] into the rows of places int[n] of a plan."""
        if self.num_shards == self.blocks_per_host_block == 1:
            plan[0, places] = device_ids[:, 0]
            return
        shards, rows = self._rows(places)
        plan[shards, rows] = self._within_shard(device_ids, shards)

    def _rows(
        self, places: NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        """Return the shards int[n, 1] and rows int[n, m] of places int[n]."""
        shards, place = np.divmod(places[:, None], self.extent_blocks)
        m = self.blocks_per_host_block
        return shards, place * m + np.arange(m)

    def _within_shard(
        self, device_ids: NDArray[np.int32], shards: NDArray[np.integer[Any]]
    ) -> NDArray[np.int32]:
        inside = device_ids - shards * self.shard_blocks
        return np.where(device_ids == NOTHING, NOTHING, inside).astype(np.int32)
