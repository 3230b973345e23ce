"""The storage tier: the blocks of a store that outlives the process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.index import BlockIndex
from jaxkv.types import BlockKey

STORAGE_MEDIUM = "STORAGE"
"""The medium in events of the storage tier."""

_MAX_BLOCKS = (1 << 31) - 1
_BYTES_PER_BLOCK = 130
_MIN_DELETED = 16  # Until a store that was full is filled again.


class StorageTier(BlockIndex):
    """Keeps track of the blocks of a store, and chooses what to delete when it is full.

    Each place is room for one block in the store, which knows blocks by their keys
    alone. The least recently used go first.

    Its knowledge may be wrong, as others may write to the store and delete from it: a
    block that is no longer there is missing when it is read (`discard`), and a block
    that others have written is known once the store was listed (`add_found`) or asked
    for it (`note_there`).

    Too many blocks to number raise a ValueError, and a MemoryError if their index does
    not fit.

    Example:
        >>> tier = StorageTier(block_size=16, num_blocks=2)
        >>> tier.add_found([b"a", b"b", b"c"])
        >>> tier.note_bound(bound=3, num_there=3)
        []
        >>> tier.contains([b"a", b"b", b"c"]).tolist(), tier.num_left_out
        ([True, True, False], 1)
        >>> tier.room_for(tier.place([b"d"]).evicted_keys)
        [b'a']
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        enable_events: bool = False,
        *,
        executor: ExecutorName = "native",
    ) -> None:
        if num_blocks > _MAX_BLOCKS:
            raise ValueError(
                f"{num_blocks=} of the store must be at most {_MAX_BLOCKS}: set "
                "storage_bytes to less."
            )
        try:
            super().__init__(
                block_size,
                num_blocks,
                enable_events=enable_events,
                executor=executor,
                medium=STORAGE_MEDIUM,
            )
        except (MemoryError, RuntimeError) as error:  # XLA's is one of these.
            raise MemoryError(
                f"{num_blocks=} of the store need an index of some "
                f"{num_blocks * _BYTES_PER_BLOCK >> 20} MiB, which is more than there "
                "is: set storage_bytes to less."
            ) from error
        # How many blocks the store may hold; None until a listing has returned it.
        self.bound: int | None = None
        # What fits into a store that was full, and what was deleted since.
        self._full_bound: int | None = None
        self._num_deleted = 0
        self._is_listed = False

    @property
    def is_listed(self) -> bool:
        """Whether all blocks of the store are known, except later writes by others."""
        return self._is_listed

    def note_listing(
        self,
        present: Sequence[BlockKey],
        absent: Sequence[BlockKey],
        listed: bool | None,
        bound: tuple[int, int] | None,
    ) -> list[BlockKey]:
        """Apply the results of a listing; as of `BlockIndex`."""
        if present:
            self.add_found(present)
        self._is_listed |= bool(listed)
        if absent:
            self.discard(absent)
        if bound is not None:
            return self.note_bound(*bound)
        if listed is False:
            self.note_unlisted()
        return []

    def clear(self) -> None:
        """Forget everything at once; the store keeps its blocks."""
        super().clear()
        self._is_listed = False

    def add_found(self, keys: Sequence[BlockKey]) -> None:
        """Record blocks that a listing has found; nothing is evicted for them."""
        new = list(compress(keys, (~self.contains(keys)).tolist()))
        room = self.num_blocks - self.num_held_blocks
        new = new[: max(room, 0)]
        if not new:
            return
        placed = self.place(new)
        if placed is not None:
            self.num_found += len(placed.keys)
            self.complete_store(placed.keys)

    def note_there(self, keys: Sequence[BlockKey]) -> None:
        """Record blocks that the store has; for a request, so room is made."""
        new = list(compress(keys, (~self.contains(keys)).tolist()))
        placed = self.place(keys) if new else None  # None of them makes room.
        if placed is None:  # Unless too much of it is being read or written.
            self.add_found(new)
            return
        num_new = len(placed.keys)
        self.num_found += num_new
        # What was left out is in the index now, and what had to leave is left out.
        self.num_left_out = max(self.num_left_out - num_new, 0)
        self.num_left_out += len(placed.evicted_keys)
        self.complete_store(placed.keys)

    def note_bound(self, bound: int, num_there: int) -> list[BlockKey]:
        """Apply the end of a listing: blocks that the store may hold, and that it has.

        The answer is keys to delete, as meanwhile too much was written.
        """
        self.bound, self._full_bound = bound, None
        self.num_left_out = max(0, num_there - self.num_held_blocks)
        return self._shrink()

    def note_unlisted(self) -> None:
        """Apply a failed listing: blocks that it has found may be others'."""
        if self.bound is None and not self.num_found:
            self.bound = self.num_blocks

    def note_full(self, num: int) -> list[BlockKey]:
        """Make room in a store that had none for `num` blocks, though below its bound.

        It counts as full at its present size until it is listed again, or as much has
        been deleted as it holds. The answer is keys to delete, the least recently used;
        none before the first listing has ended.
        """
        if self.bound is None:
            return []
        self._full_bound = max(0, self.num_held_blocks + self.num_left_out - num)
        self._num_deleted = 0
        return self._shrink()

    def room_for(self, evicted: Sequence[BlockKey]) -> list[BlockKey]:
        """Choose what to delete in the store after the index has made room in itself.

        Only blocks beyond the store's bound are deleted, and none before a listing has
        returned the bound. The other evicted keys stay in the store, and are left out
        here.
        """
        if self.bound is None:
            self.num_left_out += len(evicted)
            return []
        deleted = list(evicted[: self._num_beyond(len(evicted))])
        self.num_left_out += len(evicted) - len(deleted)
        return deleted + self._shrink()

    def _shrink(self) -> list[BlockKey]:
        """Forget the least recently used blocks that are beyond the store's bound."""
        num = self._num_beyond()
        if not num or not self.tells_victims:
            return []
        victims = self.next_victims(num + self.num_blocks - self.num_held_blocks)
        self.discard(victims)
        self.num_evicted += len(victims)
        self._num_deleted += len(victims)
        if self._num_deleted > max(self._full_bound or 0, _MIN_DELETED):
            self._full_bound = None
        return victims

    def _num_beyond(self, num_evicted: int = 0) -> int:
        """Count the blocks in the store that are beyond what it may hold."""
        assert self.bound is not None
        bound = self.bound
        if self._full_bound is not None:
            bound = min(bound, self._full_bound)
        return max(0, self.num_held_blocks + self.num_left_out + num_evicted - bound)
