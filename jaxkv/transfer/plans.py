"""Which block goes where within an extent, in the terms of the programs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.transfer.hoststore import Placement

NOTHING = -1
"""In a plan: a row that is neither written nor read."""


class SavePlan(NamedTuple):
    """Which block goes into which row of an extent.

    Attributes:
        sources: i32[lanes, rows]. The device block, counted within its lane; NOTHING
            for a row that is free or carried over.
        carried: bool[lanes, rows]. Whether the row is taken over from another extent.
    """

    sources: NDArray[np.int32]
    carried: NDArray[np.bool_]

    def row_lists(self) -> NDArray[np.int32]:
        """Write the plan as lists: i32[lanes, 3 * rows + 2].

        The blocks to read, the rows to write them to, the rows to carry over, and how
        many there are of both.
        """
        num_lanes, num_rows = self.sources.shape
        lists = np.zeros((num_lanes, 3 * num_rows + 2), np.int32)
        for lane in range(num_lanes):
            (rows,) = np.nonzero(self.sources[lane] != NOTHING)
            (carried,) = np.nonzero(self.carried[lane])
            lists[lane, : len(rows)] = self.sources[lane, rows]
            lists[lane, num_rows : num_rows + len(rows)] = rows
            lists[lane, 2 * num_rows : 2 * num_rows + len(carried)] = carried
            lists[lane, -2:] = len(rows), len(carried)
        return lists

    def row_sources(self) -> NDArray[np.int32]:
        """Write the plan row by row: i32[lanes, 2 * rows], blocks, whether carried."""
        # A row without a block reads some other: the gather must stay in range.
        blocks = np.maximum(self.sources, 0)
        return np.concatenate([blocks, self.carried.astype(np.int32)], axis=1)


class Plans(NamedTuple):
    """Turns block ids into rows of extents.

    A host block is `blocks_per_host_block` rows of an extent, one after the other, in
    one lane; a row is a block of the device.

    Attributes:
        num_lanes: Shards of the block axis.
        lane_blocks: Device blocks of a lane.
        extent_blocks: Host blocks per extent and lane.
        blocks_per_host_block: Device blocks that a host block holds.
    """

    num_lanes: int
    lane_blocks: int
    extent_blocks: int
    blocks_per_host_block: int

    @property
    def num_rows(self) -> int:
        """Rows of an extent, in each lane."""
        return self.extent_blocks * self.blocks_per_host_block

    def lanes(self, device_ids: NDArray[np.int32]) -> NDArray[np.intp]:
        """Say in which lane each host block's blocks are.

        Args:
            device_ids: i32[n, m]. NOTHING for none.

        Returns:
            int[n].

        Raises:
            ValueError: The blocks of one host block are in several.
        """
        if self.num_lanes == 1:
            return np.zeros(len(device_ids), np.intp)
        lanes = (device_ids // self.lane_blocks).astype(np.intp)
        first: NDArray[np.intp] = lanes.max(axis=1)  # That of NOTHING is negative.
        apart = np.flatnonzero(
            ((lanes != first[:, None]) & (device_ids != NOTHING)).any(axis=1)
        )
        if apart.size:
            raise ValueError(
                f"device_block_ids {device_ids[apart].tolist()} are of several shards: "
                f"the block axis is sharded in runs of {self.lane_blocks}, and the "
                "blocks of a host block must be in one of them."
            )
        return first

    def check_lanes(
        self, device_ids: NDArray[np.int32], places: NDArray[np.int32]
    ) -> None:
        """Refuse to load blocks into another shard than they were saved from.

        Raises:
            ValueError: Some would have to.
        """
        lanes, saved = self.lanes(device_ids), places // self.extent_blocks
        wrong = np.flatnonzero(lanes != saved)
        if wrong.size:
            raise ValueError(
                f"device_block_ids {device_ids[wrong].tolist()} are of the shards "
                f"{lanes[wrong].tolist()} of the block axis, and what they are to hold "
                f"was saved from {saved[wrong].tolist()}: a block stays on its devices."
            )

    def save(self, device_ids: NDArray[np.int32], placement: Placement) -> SavePlan:
        """Plan the piece of a store.

        Args:
            device_ids: i32[n, m]. The blocks that were placed.
            placement: Where they go.
        """
        shape = (self.num_lanes, self.num_rows)
        sources = np.full(shape, NOTHING, np.int32)
        lanes, rows = self._rows(placement.places)
        sources[lanes, rows] = self._within_lane(device_ids, lanes)
        carried = np.zeros(shape, np.bool_)
        carried[self._rows(placement.carried_places)] = True
        return SavePlan(sources, carried)

    def load(
        self, device_ids: NDArray[np.int32], places: NDArray[np.int32]
    ) -> list[NDArray[np.int32]]:
        """Plan the loads from one extent.

        Args:
            device_ids: i32[n, m]. Where its blocks go.
            places: int[n]. Which they are. One may come up more than once: each time
                takes a plan of its own.

        Returns:
            i32[lanes, rows] each: the device block for each row, NOTHING for none.
        """
        plans = []
        while len(places):
            _, once = np.unique(places, return_index=True)
            targets = np.full((self.num_lanes, self.num_rows), NOTHING, np.int32)
            lanes, rows = self._rows(places[once])
            targets[lanes, rows] = self._within_lane(device_ids[once], lanes)
            plans.append(targets)
            device_ids = np.delete(device_ids, once, axis=0)
            places = np.delete(places, once)
        return plans

    def _rows(
        self, places: NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
        """Give lanes int[n, 1] and rows int[n, m] of places."""
        lanes, place = np.divmod(places[:, None], self.extent_blocks)
        m = self.blocks_per_host_block
        return lanes, place * m + np.arange(m)

    def _within_lane(
        self, device_ids: NDArray[np.int32], lanes: NDArray[np.integer[Any]]
    ) -> NDArray[np.int32]:
        inside = device_ids - lanes * self.lane_blocks
        return np.where(device_ids == NOTHING, NOTHING, inside).astype(np.int32)
