"""The host blocks: which extent holds the bytes of which, and which may be read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_EXTENT = -1
NOBODY = -1


class Placement(NamedTuple):
    """Where a save goes that fills (part of) one extent.

    Attributes:
        extent: The one that is written; it held nothing.
        carry: The one whose blocks are taken over into it, or NO_EXTENT.
        picked: int[n]. Which of the blocks that were to be placed are.
        ids: i32[n]. These blocks.
        places: int[n]. Where in the extent, ``lane * blocks + place in the lane``.
        carried_ids: int[m]. The host blocks that are taken over.
        carried_places: int[m]. Where they lie, in the old extent and the new one.
    """

    extent: int
    carry: int
    picked: NDArray[np.intp]
    ids: NDArray[np.int32]
    places: NDArray[np.intp]
    carried_ids: NDArray[np.int32]
    carried_places: NDArray[np.intp]


class HostStore:
    """The books of the host memory, without its bytes.

    Host block ids come from the caller in any order; where the bytes of a block lie is
    decided anew by every save, so that the blocks of a transfer lie together: log
    structured, as Rosenblum and Ousterhout's file system. An extent is written once,
    into one that held nothing. While there are free extents beyond the reserve, a save
    takes one; then it takes over what an extent with few blocks still holds into a
    free one, beside its own blocks, which makes the old one free.

    There is one extent at least besides what the blocks fill, so a place is always
    found in the end: as soon as the saves in flight are over.

    An extent is pinned while a transfer reads it, and held while a save reads or
    writes it. A block is readable from the completion of its save to the issue of the
    next one, whose ticket number is its generation.
    """

    def __init__(
        self,
        num_blocks: int,
        num_extents: int,
        extent_blocks: int,
        num_lanes: int = 1,
        blocks_per_host_block: int = 1,
    ):
        """Start empty.

        Args:
            num_blocks: Ids of host blocks.
            num_extents: Extents; more than the blocks fill.
            extent_blocks: Host blocks per extent and lane.
            num_lanes: Shards of the block axis.
            blocks_per_host_block: Device blocks that a host block holds.
        """
        self.num_blocks = num_blocks
        self._extent_blocks = extent_blocks
        self._num_lanes = num_lanes
        full = -(-num_blocks // (extent_blocks * num_lanes))
        # One for the liveness of saves; more let several take blocks over at a time.
        self._reserve = max(1, (num_extents - full) // 8)
        self._extent = np.full(num_blocks, NO_EXTENT, np.int32)
        self._place = np.zeros(num_blocks, np.int32)
        self._writer = np.full(num_blocks, NOBODY, np.int64)
        self._readable = np.zeros(num_blocks, np.bool_)
        # Which of a block's device blocks were saved, if it is readable.
        self._parts = np.ones((num_blocks, blocks_per_host_block), np.bool_)
        # Which block has each place of each extent, and how many places are taken.
        self._owner = np.full(
            (num_extents, num_lanes * extent_blocks), NOBODY, np.int32
        )
        self._used = np.zeros((num_extents, num_lanes), np.int32)
        self._pins = np.zeros(num_extents, np.int32)
        self._held = np.zeros(num_extents, np.bool_)

    @property
    def num_free_extents(self) -> int:
        """Extents that hold nothing and are not in use."""
        return len(self._free())

    @property
    def num_pins(self) -> int:
        """Reads in flight, one for each extent that they read."""
        return int(self._pins.sum())

    def claim(
        self,
        ids: NDArray[np.int32],
        writer: int,
        parts: NDArray[np.bool_] | bool = True,
    ) -> None:
        """Make blocks unreadable, for a save.

        They keep their places until `place` finds new ones: a load that was called
        before may still have to read them.

        Args:
            ids: i32[n]. The blocks.
            writer: The save's number.
            parts: bool[n, m]. Which of their device blocks it brings.
        """
        self._parts[ids] = parts
        self._writer[ids] = writer
        self._readable[ids] = False

    def place(
        self, ids: NDArray[np.int32], lanes: NDArray[np.intp]
    ) -> Placement | None:
        """Find an extent for some of the blocks; `settle` must follow.

        Args:
            ids: i32[n]. Blocks that were claimed. They give up the places they have.
            lanes: int[n]. The lane of each.

        Returns:
            Where as many as possible go, None if every extent with room is in use.
        """
        self._vacate(ids)
        wanted = np.bincount(lanes, minlength=self._num_lanes)
        free = self._free()
        if not free.size:
            return None
        extent, carry = int(free[0]), NO_EXTENT
        if free.size <= self._reserve:
            room = np.minimum(self._extent_blocks - self._used, wanted).sum(axis=1)
            used = self._used.sum(axis=1)
            room[self._held | (used == 0)] = 0
            # The most room; of equals, the fewest blocks to take over.
            size = self._owner.shape[1]
            carry = int(np.argmax(room * (size + 1) + size - used))
            if not room[carry]:
                # One free extent has to stay, or nothing could ever be taken over.
                if free.size == 1:
                    return None
                carry = NO_EXTENT
        picked, places = self._assign(lanes, carry)
        carried_ids = np.zeros(0, np.int32)
        carried_places = np.zeros(0, np.intp)
        if carry != NO_EXTENT:
            (carried_places,) = np.nonzero(self._owner[carry] != NOBODY)
            carried_ids = self._owner[carry, carried_places]
            self._held[carry] = True
        self._held[extent] = True
        self._enter(ids[picked], extent, places)
        return Placement(
            extent, carry, picked, ids[picked], places, carried_ids, carried_places
        )

    def settle(self, placement: Placement, ok: bool) -> None:
        """End what `place` began.

        Args:
            placement: What it gave.
            ok: Whether the bytes arrived. If not, the blocks lose their places, and
                those that were to be taken over keep theirs.
        """
        new, old = placement.extent, placement.carry
        self._held[new] = False
        if not ok:
            # Some may have been claimed by a later save, and have moved on.
            here = self._owner[new, placement.places] == placement.ids
            self._vacate(placement.ids[here])
        if old == NO_EXTENT:
            return
        self._held[old] = False
        if ok:
            moved, places = placement.carried_ids, placement.carried_places
            # A block that was saved anew in the meantime is not taken over.
            same = self._owner[old, places] == moved
            self._vacate(moved[same])
            self._enter(moved[same], new, places[same])

    def finish(self, ids: NDArray[np.int32], writer: int, ok: bool) -> None:
        """End a save: its blocks become readable, or give up their places."""
        own = ids[self._writer[ids] == writer]
        self._readable[own] = ok
        if not ok:
            # Where somebody still reads, what was there stays until it is replaced:
            # an extent is then no emptier than it looks to `place`.
            self._vacate(own[self._pins[self._extent[own]] == 0])

    def find(
        self, ids: NDArray[np.int32], parts: NDArray[np.bool_] | bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Say in which extents blocks lie, and where in them.

        Args:
            ids: i32[n]. The blocks.
            parts: bool[n, m]. Which of their device blocks are wanted.

        Raises:
            ValueError: One of them holds no bytes, or not those.
        """
        missing = ids[~self._readable[ids]]
        if missing.size:
            raise ValueError(
                f"host blocks {missing.tolist()} have no bytes to load: a save into "
                "them must have been reported as completed without an error."
            )
        lacking = ids[(parts & ~self._parts[ids]).any(axis=1)]
        if lacking.size and self._parts.shape[1] > 1:
            raise ValueError(
                f"host blocks {lacking.tolist()} lack device blocks that are wanted of "
                "them: the save had -1 there."
            )
        return self._extent[ids], self._place[ids]

    def pin(self, extent: int) -> None:
        """Keep an extent from being written until `unpin`."""
        self._pins[extent] += 1

    def unpin(self, extent: int) -> None:
        """Undo one `pin`."""
        self._pins[extent] -= 1

    def check(self) -> None:
        """Verify the books; for tests and debugging.

        Raises:
            AssertionError: They do not agree.
        """
        (placed,) = np.nonzero(self._extent != NO_EXTENT)
        owner = self._owner[self._extent[placed], self._place[placed]]
        assert (owner == placed).all(), "a block is not where it should be"
        assert (self._owner != NOBODY).sum() == len(placed), "a place is leaked"
        by_lane = self._owner.reshape(len(self._pins), self._num_lanes, -1)
        assert ((by_lane != NOBODY).sum(axis=2) == self._used).all(), "miscounted"
        assert self._readable[placed].sum() == self._readable.sum(), "nothing to read"
        assert (self._pins >= 0).all(), "unpinned too often"

    def _free(self) -> NDArray[np.intp]:
        taken = (self._used.sum(axis=1) > 0) | (self._pins > 0) | self._held
        (free,) = np.nonzero(~taken)
        return free

    def _assign(
        self, lanes: NDArray[np.intp], carry: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Choose blocks and their places: those that `carry` has free, or all."""
        picked, places = [], []
        for lane in range(self._num_lanes):
            start = lane * self._extent_blocks
            free = np.arange(start, start + self._extent_blocks)
            if carry != NO_EXTENT:
                free = free[self._owner[carry, free] == NOBODY]
            (wanted,) = np.nonzero(lanes == lane)
            num = min(len(free), len(wanted))
            picked.append(wanted[:num])
            places.append(free[:num])
        return np.concatenate(picked), np.concatenate(places)

    def _enter(
        self, ids: NDArray[np.int32], extent: int, places: NDArray[np.intp]
    ) -> None:
        self._extent[ids], self._place[ids] = extent, places
        self._owner[extent, places] = ids
        lanes = places // self._extent_blocks
        self._used[extent] += np.bincount(lanes, minlength=self._num_lanes)

    def _vacate(self, ids: NDArray[np.int32]) -> None:
        ids = ids[self._extent[ids] != NO_EXTENT]
        extents, places = self._extent[ids], self._place[ids]
        self._owner[extents, places] = NOBODY
        np.subtract.at(self._used, (extents, places // self._extent_blocks), 1)
        self._extent[ids] = NO_EXTENT
