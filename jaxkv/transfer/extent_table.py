"""The extent table: which extent holds each host block, and which are readable."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_EXTENT = -1
NO_BLOCK = -1


class Placement(NamedTuple):
    """Where the piece of a save goes that writes one extent.

    Attributes:
        extent: The extent to write; it is empty.
        carry: The extent whose blocks are carried over into it, or NO_EXTENT.
        picked: int[n]. Indices of the placed blocks among those asked for.
        ids: i32[n]. These blocks.
        places: int[n]. Where in the extent: ``shard * extent_blocks + offset``.
        carried_ids: int[m]. The host blocks that are carried over.
        carried_places: int[m]. Their places, the same in both extents.
    """

    extent: int
    carry: int
    picked: NDArray[np.intp]
    ids: NDArray[np.int32]
    places: NDArray[np.intp]
    carried_ids: NDArray[np.int32]
    carried_places: NDArray[np.intp]


class SharedMemory:
    """Host memory that the extents of several tables share.

    A table that has taken its part carries blocks over, to need no more. One that has
    no extent with room takes memory all the same: what others hold half empty would
    keep it from ever storing anything.

    Attributes:
        num_bytes: Bytes that the extents are to take, of all tables together.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._tables: list[tuple[ExtentTable, int]] = []

    def join(self, table: ExtentTable, num_extents: int, extent_bytes: int) -> None:
        """Let a table share it; it is large enough for each of them alone."""
        self._tables.append((table, extent_bytes))
        self.num_bytes = max(self.num_bytes, num_extents * extent_bytes)

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the extents that are not free."""
        return sum(size * table.num_used_extents for table, size in self._tables)

    def num_left(self, table: ExtentTable) -> int:
        """Tell how many more extents a table may take."""
        (size,) = [size for own, size in self._tables if own is table]
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
    called; the ticket number of that save is its generation.

    Attributes:
        num_freed: Counts what may have made room: where `place` found none, it finds
            none until this changes.
        shared: The memory that other tables have extents in, too; None for its own.
    """

    def __init__(
        self,
        num_blocks: int,
        num_extents: int,
        extent_blocks: int,
        num_shards: int = 1,
        blocks_per_host_block: int = 1,
    ):
        """Start empty.

        Args:
            num_blocks: Number of host blocks.
            num_extents: Extents; more than the blocks fill.
            extent_blocks: Host blocks per extent and shard.
            num_shards: Shards of the block axis.
            blocks_per_host_block: Device blocks that a host block holds.
        """
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
        self._parts = np.ones((num_blocks, blocks_per_host_block), np.bool_)
        # The block at each place of each extent, and how many places are taken.
        self._owner = np.full(
            (num_extents, num_shards * extent_blocks), NO_BLOCK, np.int32
        )
        self._used = np.zeros((num_extents, num_shards), np.int32)
        self._pins = np.zeros(num_extents, np.int32)
        self._held = np.zeros(num_extents, np.bool_)
        # What keeps each extent from being free: its blocks, its pins, and a hold.
        self._claims = np.zeros(num_extents, np.int64)
        self.num_freed = 0
        self.shared: SharedMemory | None = None
        # Of each call, what it would have to make anew.
        self._places = np.arange(num_shards * extent_blocks)
        self._no_ids = np.zeros(0, np.int32)

    @property
    def num_free_extents(self) -> int:
        """Extents that are empty, and neither pinned nor held."""
        return len(self._free())

    @property
    def num_used_extents(self) -> int:
        """The others, which have memory."""
        return int(np.count_nonzero(self._claims))

    @property
    def num_pins(self) -> int:
        """Pins on extents: one for each extent that a read in flight needs."""
        return int(self._pins.sum())

    def claim(
        self,
        ids: NDArray[np.int32],
        writer: int,
        parts: NDArray[np.bool_] | bool = True,
    ) -> None:
        """Make blocks unreadable for a save.

        They keep their places until `place` finds new ones: an earlier load may still
        have to read them.

        Args:
            ids: i32[n]. The blocks.
            writer: The number of the save.
            parts: bool[n, m]. Which of their device blocks it writes.
        """
        if self._parts.shape[1] > 1:  # Else a block is saved as a whole.
            self._parts[ids] = parts
        self._writer[ids] = writer
        self._readable[ids] = False

    def is_claimed(self, ids: NDArray[np.int32], writer: int) -> NDArray[np.bool_]:
        """Tell which blocks (i32[n]) were not claimed after a save: bool[n]."""
        is_own: NDArray[np.bool_] = self._writer[ids] == writer
        return is_own

    def place(
        self, ids: NDArray[np.int32], shards: NDArray[np.intp]
    ) -> Placement | None:
        """Choose an extent for some of the blocks; `settle` must follow.

        Args:
            ids: i32[n]. Claimed blocks; their old places are freed.
            shards: int[n]. The shard of each.

        Returns:
            The placement of the blocks that fit; None if every extent with room is in
            use.
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
            # The most room; of equals, the fewest blocks to carry over.
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
        """Complete a placement.

        Args:
            placement: What `place` returned.
            ok: Whether the bytes arrived. If not, the placed blocks lose their places,
                and those to carry over keep theirs.
        """
        new, old = placement.extent, placement.carry
        self._hold(new, False)
        if not ok:
            # A later save may have claimed and moved some of them.
            here = self._owner[new, placement.places] == placement.ids
            self._vacate(placement.ids[here])
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
        own = ids[self._writer[ids] == writer]
        self._readable[own] = ok
        if not ok:
            # In a pinned extent, blocks keep their places until they are replaced, so
            # that `place` does not take it for emptier than it is.
            self._vacate(own[self._pins[self._extent[own]] == 0])

    def forget(self, ids: NDArray[np.int32], writer: int) -> NDArray[np.int32]:
        """Empty blocks; return those that keep their places, in pinned extents."""
        self.claim(ids, writer)
        self.finish(ids, writer, False)
        held: NDArray[np.int32] = ids[self._extent[ids] != NO_EXTENT]
        return held

    def find(
        self, ids: NDArray[np.int32], parts: NDArray[np.bool_] | bool = True
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the extent of each block and its place there, i32[n] each.

        Args:
            ids: i32[n]. The blocks.
            parts: bool[n, m]. Which of their device blocks are wanted.

        Raises:
            ValueError: A block holds no bytes, or lacks a wanted device block.
        """
        missing = ids[~self._readable[ids]]
        if missing.size:
            raise ValueError(
                f"host blocks {missing.tolist()} have no bytes to load: a save into "
                "them must have been reported as completed without an error."
            )
        if self._parts.shape[1] == 1:
            return self._extent[ids], self._place[ids]
        lacking = ids[(parts & ~self._parts[ids]).any(axis=1)]
        if lacking.size:
            raise ValueError(
                f"host blocks {lacking.tolist()} lack device blocks that are wanted: "
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

    def check(self) -> None:
        """Check that the arrays of the table agree; for tests and debugging.

        Raises:
            AssertionError: They do not.
        """
        (placed,) = np.nonzero(self._extent != NO_EXTENT)
        owner = self._owner[self._extent[placed], self._place[placed]]
        assert (owner == placed).all(), "a block is not where it should be"
        assert (self._owner != NO_BLOCK).sum() == len(placed), "a place is leaked"
        by_shard = self._owner.reshape(len(self._pins), self._num_shards, -1)
        assert ((by_shard != NO_BLOCK).sum(axis=2) == self._used).all(), "miscounted"
        assert self._readable[placed].sum() == self._readable.sum(), "nothing to read"
        assert (self._pins >= 0).all(), "unpinned too often"
        claims = self._used.sum(axis=1) + self._pins + self._held
        assert (self._claims == claims).all(), "miscounted what keeps an extent"

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
