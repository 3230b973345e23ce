"""The extent table: which extent holds each host block, and which are readable."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_EXTENT = -1
NO_BLOCK = -1


class Placement(NamedTuple):
    """The place of a piece of a save, which writes one extent."""

    extent: int  # The extent to write; it is empty.
    carry: int  # The extent whose blocks are carried over into it, or NO_EXTENT.
    picked: NDArray[np.intp]  # int[n]. Indices of the placed blocks in the argument.
    ids: NDArray[np.int32]  # i32[n]. The placed blocks.
    places: NDArray[np.intp]  # int[n]. In the extent: shard * extent_blocks + offset.
    carried_ids: NDArray[np.int32]  # i32[m]. The host blocks that are carried over.
    carried_places: NDArray[np.intp]  # int[m]. The same in both extents.


class SharedMemory:
    """Host memory that the extents of several tables share.

    A table that has used up the memory carries blocks over, to need no more. If it has
    no extent with room, it takes memory all the same: the half-empty extents of other
    tables would keep it from ever storing anything.
    """

    def __init__(self) -> None:
        self.num_bytes = 0  # For the extents of all tables together.
        self._tables: list[tuple[ExtentTable, int]] = []

    def join(self, table: ExtentTable, num_extents: int, extent_bytes: int) -> None:
        """Add a table; the memory is large enough for each of them alone."""
        self._tables.append((table, extent_bytes))
        self.num_bytes = max(self.num_bytes, num_extents * extent_bytes)

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the extents that are not free."""
        return sum(size * table.num_used_extents for table, size in self._tables)

    def num_left(self, table: ExtentTable) -> int:
        """Return how many more extents a table may take."""
        (size,) = [size for joined, size in self._tables if joined is table]
        return max(self.num_bytes - self.num_used_bytes, 0) // size


class ExtentTable:
    """Maps host blocks to places in extents; holds no bytes.

    The table is log-structured, like Rosenblum and Ousterhout's file system: each save
    places its blocks together, wherever they were before, and an extent is only written
    while it is empty. As long as more extents are free than the reserve, a save takes a
    free one. After that it also carries over the blocks of an extent that holds few,
    which frees that extent.

    There is at least one extent more than all blocks fill, so every save finds a place
    once the saves in flight have finished.

    An extent is pinned while a transfer reads it, and held while a save reads or writes
    it. A block is readable from the completion of its save until the next save of it is
    called; the ticket number of the save is the block's generation.
    """

    def __init__(
        self,
        num_blocks: int,
        num_extents: int,  # More than the blocks fill.
        extent_blocks: int,  # Host blocks per extent and shard.
        num_shards: int = 1,
        blocks_per_host_block: int = 1,
    ):
        self.num_blocks = num_blocks
        self._extent_blocks = extent_blocks
        self._num_shards = num_shards
        full = -(-num_blocks // (extent_blocks * num_shards))
        # One lets every save finish; with more, several carry blocks over at a time.
        self._reserve = max(1, (num_extents - full) // 8)
        self._extent = np.full(num_blocks, NO_EXTENT, np.int32)
        self._place = np.zeros(num_blocks, np.int32)
        self._writer = np.full(num_blocks, -1, np.int64)
        self._readable = np.zeros(num_blocks, np.bool_)
        # Which of a readable block's device blocks were saved.
        self._is_saved = np.ones((num_blocks, blocks_per_host_block), np.bool_)
        # The block at each place of each extent, and how many places are taken.
        self._owner = np.full(
            (num_extents, num_shards * extent_blocks), NO_BLOCK, np.int32
        )
        self._used = np.zeros((num_extents, num_shards), np.int32)
        self._pins = np.zeros(num_extents, np.int32)
        self._held = np.zeros(num_extents, np.bool_)
        # The reasons why each extent is not free: its blocks, its pins, and a hold.
        self._claims = np.zeros(num_extents, np.int64)
        self.num_freed = 0
        """Counts what may have made room: `place` fails again until this changes."""
        self.shared: SharedMemory | None = None
        """The memory shared with other tables' extents; None for its own."""
        # Made once, for all calls.
        self._places = np.arange(num_shards * extent_blocks)
        self._no_ids = np.zeros(0, np.int32)

    @property
    def num_used_extents(self) -> int:
        """Extents that hold blocks, or are pinned or held."""
        return int(np.count_nonzero(self._claims))

    @property
    def num_pins(self) -> int:
        """Pins on extents: one for each extent that a read in flight needs."""
        return int(self._pins.sum())

    def claim(
        self,
        ids: NDArray[np.int32],
        writer: int,
        is_saved: NDArray[np.bool_] | bool = True,
    ) -> None:
        """Make blocks i32[n] unreadable for the save of number `writer`.

        They keep their places until `place` finds new ones: an earlier load may still
        have to read them. `is_saved`, bool[n, m]: the device blocks that it writes.
        """
        if self._is_saved.shape[1] > 1:  # Else a block is saved as a whole.
            self._is_saved[ids] = is_saved
        self._writer[ids] = writer
        self._readable[ids] = False

    def is_claimed(self, ids: NDArray[np.int32], writer: int) -> NDArray[np.bool_]:
        """Return which blocks (i32[n]) no later save has claimed: bool[n]."""
        is_claimed: NDArray[np.bool_] = self._writer[ids] == writer
        return is_claimed

    def place(
        self, ids: NDArray[np.int32], shards: NDArray[np.intp]
    ) -> Placement | None:
        """Choose an extent for some of the claimed blocks i32[n]; `settle` must follow.

        Their old places are freed. Returns the placement of the blocks that fit; None
        if every extent with room is in use.
        """
        self._vacate(ids)
        free = self._free()
        if not free.size:
            return None
        extent, carry = int(free[0]), NO_EXTENT
        num_left = free.size if self.shared is None else self.shared.num_left(self)
        if min(free.size, num_left) <= self._reserve:
            wanted = np.bincount(shards, minlength=self._num_shards)
            room = np.minimum(self._extent_blocks - self._used, wanted).sum(axis=1)
            used = self._used.sum(axis=1)
            room[self._held | (used == 0)] = 0
            # Maximum room; among equals, fewest blocks to carry over.
            size = self._owner.shape[1]
            carry = int(np.argmax(room * (size + 1) + size - used))
            if not room[carry]:
                # One free extent must stay, or nothing could ever be carried over.
                if free.size == 1:
                    return None
                carry = NO_EXTENT
        picked, places = self._assign(shards, carry)
        carried_ids, carried_places = self._no_ids, self._places[:0]
        if carry != NO_EXTENT:
            (carried_places,) = np.nonzero(self._owner[carry] != NO_BLOCK)
            carried_ids = self._owner[carry, carried_places]
            self._hold(carry, True)
        self._hold(extent, True)
        placed = ids[picked]
        self._enter(placed, extent, places)
        return Placement(
            extent, carry, picked, placed, places, carried_ids, carried_places
        )

    def settle(self, placement: Placement, ok: bool) -> None:
        """Complete a placement, whose bytes have arrived if `ok`.

        If not, the placed blocks lose their places, and the others keep theirs.
        """
        new, old = placement.extent, placement.carry
        self._hold(new, False)
        if not ok:
            # A later save may have claimed and moved some of them.
            is_there = self._owner[new, placement.places] == placement.ids
            self._vacate(placement.ids[is_there])
        if old == NO_EXTENT:
            return
        self._hold(old, False)
        if ok:
            moved, places = placement.carried_ids, placement.carried_places
            # A block that was saved again in the meantime is not carried over.
            same = self._owner[old, places] == moved
            self._vacate(moved[same])
            self._enter(moved[same], new, places[same])

    def finish(self, ids: NDArray[np.int32], writer: int, ok: bool) -> None:
        """Finish a save: its blocks become readable, or lose their places."""
        ids = ids[self.is_claimed(ids, writer)]
        self._readable[ids] = ok
        if not ok:
            # In a pinned extent, blocks keep their places until they are replaced, so
            # that `place` does not count their room.
            self._vacate(ids[self._pins[self._extent[ids]] == 0])

    def forget(self, ids: NDArray[np.int32], writer: int) -> NDArray[np.int32]:
        """Empty blocks; return those that keep their places, in pinned extents."""
        self.claim(ids, writer)
        self.finish(ids, writer, False)
        held: NDArray[np.int32] = ids[self._extent[ids] != NO_EXTENT]
        return held

    def find(
        self, ids: NDArray[np.int32], is_read: NDArray[np.bool_] | bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the extent of each block i32[n] and its place there, i32[n] each.

        ValueError if a block holds no bytes, or its save left out a device block of
        `is_read`, bool[n, m].
        """
        missing = ids[~self._readable[ids]]
        if missing.size:
            raise ValueError(
                f"host blocks {missing.tolist()} have no bytes to load: a save into "
                "them must have been reported as completed without an error."
            )
        if self._is_saved.shape[1] == 1:
            return self._extent[ids], self._place[ids]
        partial = ids[(is_read & ~self._is_saved[ids]).any(axis=1)]
        if partial.size:
            raise ValueError(
                f"host blocks {partial.tolist()} lack device blocks that are wanted: "
                "the save had -1 there."
            )
        return self._extent[ids], self._place[ids]

    def pin(self, extent: int) -> None:
        """Keep an extent from being reused until `unpin`."""
        self._pins[extent] += 1
        self._claims[extent] += 1

    def unpin(self, extent: int) -> None:
        """Undo one `pin`."""
        self._pins[extent] -= 1
        self._claims[extent] -= 1
        self.num_freed += 1

    def _free(self) -> NDArray[np.intp]:
        free: NDArray[np.intp] = (self._claims == 0).nonzero()[0]
        return free

    def _hold(self, extent: int, is_held: bool) -> None:
        self._held[extent] = is_held
        self._claims[extent] += 1 if is_held else -1
        self.num_freed += not is_held

    def _assign(
        self, shards: NDArray[np.intp], carry: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Choose blocks and places: those that are free in `carry`, or any."""
        if self._num_shards == 1 and carry == NO_EXTENT:
            first = self._places[: len(shards)]
            return first, first
        picked, places = [], []
        for shard in range(self._num_shards):
            start = shard * self._extent_blocks
            free = np.arange(start, start + self._extent_blocks)
            if carry != NO_EXTENT:
                free = free[self._owner[carry, free] == NO_BLOCK]
            (wanted,) = np.nonzero(shards == shard)
            num = min(len(free), len(wanted))
            picked.append(wanted[:num])
            places.append(free[:num])
        return np.concatenate(picked), np.concatenate(places)

    def _enter(
        self, ids: NDArray[np.int32], extent: int, places: NDArray[np.intp]
    ) -> None:
        self._extent[ids], self._place[ids] = extent, places
        self._owner[extent, places] = ids
        self._claims[extent] += len(ids)
        if self._num_shards == 1:
            self._used[extent, 0] += len(ids)
            return
        shards = places // self._extent_blocks
        self._used[extent] += np.bincount(shards, minlength=self._num_shards)

    def _vacate(self, ids: NDArray[np.int32]) -> None:
        extents = self._extent[ids]
        if extents.max(initial=NO_EXTENT) == NO_EXTENT:
            return
        of_each = collections.Counter(extents.tolist())
        self.num_freed += 1
        if of_each.pop(NO_EXTENT, 0):
            is_placed = extents != NO_EXTENT
            ids, extents = ids[is_placed], extents[is_placed]
        places = self._place[ids]
        self._owner[extents, places] = NO_BLOCK
        if self._num_shards == 1:
            for extent, number in of_each.items():
                self._used[extent, 0] -= number
                self._claims[extent] -= number
        else:
            np.subtract.at(self._used, (extents, places // self._extent_blocks), 1)
            np.subtract.at(self._claims, extents, 1)
        self._extent[ids] = NO_EXTENT
