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
_MIN_DELETED_BLOCKS = 16  # At least this many before a full store may grow again.


class StorageTier(BlockIndex):
    """The index of a store's blocks; chooses what to delete when the store is full.

    Block ids only count the blocks in the store, which addresses them by key. The least
    recently used blocks are deleted first.

    The index may be out of date, because other engines write to the store and delete
    from it. A failed read reveals a deleted block (`discard`); a listing (`add_found`)
    or a probe (`record_resident`) reveals blocks that others have written.

    Raises a ValueError for more blocks than ids, and a MemoryError if the index does
    not fit.

    Example:
        >>> tier = StorageTier(block_size=16, num_blocks=2)
        >>> tier.add_found([b"a", b"b", b"c"])
        >>> tier.record_bound(bound=3, num_resident=3)
        []
        >>> tier.contains([b"a", b"b", b"c"]).tolist(), tier.num_unindexed
        ([True, True, False], 1)
        >>> tier.choose_deletions(tier.place([b"d"]).evicted_keys)
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
                f"{num_blocks=} of the store need an index of about "
                f"{num_blocks * _BYTES_PER_BLOCK >> 20} MiB, which does not fit into "
                "memory: set storage_bytes to less."
            ) from error
        # Max blocks in the store; None until a listing has returned it.
        self.bound: int | None = None
        # The lower bound of a store that was full, and the blocks deleted since then.
        self._full_bound: int | None = None
        self._num_deleted = 0
        self._is_listed = False

    @property
    def is_listed(self) -> bool:
        """Whether the index has all of the store, except later writes by others."""
        return self._is_listed

    def record_listing(
        self,
        present: Sequence[BlockKey],
        absent: Sequence[BlockKey],
        listed: bool | None,
        bound: tuple[int, int] | None,
    ) -> list[BlockKey]:
        """Apply a listing of the store; return the keys to delete."""
        if present:
            self.add_found(present)
        self._is_listed |= bool(listed)
        if absent:
            self.discard(absent)
        if bound is not None:
            return self.record_bound(*bound)
        if listed is False:
            self.record_unlisted()
        return []

    def clear(self) -> None:
        """Clear the index; the store keeps its blocks."""
        super().clear()
        self._is_listed = False

    def add_found(self, keys: Sequence[BlockKey]) -> None:
        """Add blocks that a listing has found, as far as there is room."""
        new = list(compress(keys, (~self.contains(keys)).tolist()))
        new = new[: max(self.num_blocks - self.num_held_blocks, 0)]
        if not new:
            return
        placed = self.place(new)
        if placed is not None:
            self.num_found += len(placed.keys)
            self.complete_store(placed.keys)

    def record_resident(self, keys: Sequence[BlockKey]) -> None:
        """Add blocks that a request needs now and the store has, evicting others."""
        new = list(compress(keys, (~self.contains(keys)).tolist()))
        placed = self.place(keys) if new else None  # `place` evicts none of `keys`.
        if placed is None:  # No key is new, or too many blocks are in flight.
            self.add_found(new)
            return
        num_new = len(placed.keys)
        self.num_found += num_new
        # The new blocks count as indexed now; the evicted ones no longer do.
        self.num_unindexed = max(self.num_unindexed - num_new, 0)
        self.num_unindexed += len(placed.evicted_keys)
        self.complete_store(placed.keys)

    def record_bound(self, bound: int, num_resident: int) -> list[BlockKey]:
        """Set the store's max blocks, and the number of blocks that a listing counted.

        Returns the keys to delete, if too many blocks have been written meanwhile.
        """
        self.bound, self._full_bound = bound, None
        self.num_unindexed = max(0, num_resident - self.num_held_blocks)
        return self._shrink()

    def record_unlisted(self) -> None:
        """Apply a failed listing: set a bound, unless it found blocks of others."""
        if self.bound is None and not self.num_found:
            self.bound = self.num_blocks

    def record_full(self, num: int) -> list[BlockKey]:
        """Make room in a store that refused `num` blocks, although below its bound.

        Its present size is its bound until the next listing, or until as many blocks
        have been deleted. Returns the keys to delete, the least recently used first;
        none before the first listing has ended.
        """
        if self.bound is None:
            return []
        self._full_bound = max(0, self.num_held_blocks + self.num_unindexed - num)
        self._num_deleted = 0
        return self._shrink()

    def choose_deletions(self, evicted: Sequence[BlockKey]) -> list[BlockKey]:
        """Choose the keys to delete from the store after `place` evicted some of them.

        Only blocks beyond the store's bound are deleted, and none before a listing has
        returned the bound. Other evicted keys stay in the store, unindexed.
        """
        if self.bound is None:
            self.num_unindexed += len(evicted)
            return []
        deleted = list(evicted[: self._count_excess(len(evicted))])
        self.num_unindexed += len(evicted) - len(deleted)
        return deleted + self._shrink()

    def _shrink(self) -> list[BlockKey]:
        """Discard the least recently used blocks beyond the store's bound."""
        num = self._count_excess()
        if not num or not self.can_list_victims:
            return []
        victims = self.next_victims(num + self.num_blocks - self.num_held_blocks)
        self.discard(victims)
        self.num_evicted += len(victims)
        self._num_deleted += len(victims)
        if self._num_deleted > max(self._full_bound or 0, _MIN_DELETED_BLOCKS):
            self._full_bound = None
        return victims

    def _count_excess(self, num_evicted: int = 0) -> int:
        """Count the store's blocks beyond its bound, including `num_evicted` more."""
        assert self.bound is not None
        bound = self.bound
        if self._full_bound is not None:
            bound = min(bound, self._full_bound)
        return max(0, self.num_held_blocks + self.num_unindexed + num_evicted - bound)
