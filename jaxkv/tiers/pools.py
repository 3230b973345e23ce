"""The device's blocks as `OffloadScheduler` sees them, for any allocator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_type, check_whole
from jaxkv.tiers.base import BlockIds, as_ids, refuse_outside
from jaxkv.types import NULL_BLOCK, BlockKey

_NOTHING = None, None


class DevicePool(Protocol):
    """The device blocks of an engine. Block 0 is the null block.

    `DeviceBlockPool` is the engine's allocator and prefix cache as well, and what lazy
    stores need. With any other pool the engine keeps its own.
    """

    num_blocks: int
    """Blocks of the pool, the null block among them; ids are below."""
    unwritten: set[int]
    """Blocks of a table whose tokens were neither computed nor loaded, as the next
    token does not read them: they hold no key. The scheduler adds and removes them."""

    @property
    def num_free(self) -> int:
        """Blocks that the engine could allocate now."""

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Whether each of n blocks still has the content of its key: bool[n]."""

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks from being allocated, also free ones, until they are unpinned.

        A block may be pinned several times. Its content can still be found.
        """

    def unpin(self, block_ids: BlockIds) -> None:
        """Undo `pin`. The last block that becomes free must be allocated first."""

    def warm_up(self) -> None:
        """Compile or load what other calls run."""


class BorrowedPool:
    """The blocks of a pool that an engine owns: free list, counts and prefix cache.

    `OffloadScheduler` records which blocks its requests have computed, and forgets a
    block once it is given to a request. The engine need not call `cache` or `forget`.

    Args:
        num_blocks: Blocks of the pool, the null block 0 among them.
        num_free: Returns how many blocks the engine could allocate now.
        hold: Takes a list of block ids, each held once more from now on: it adds one to
            the block's reference count, and takes it out of the free list if it was
            there. The engine's prefix cache still finds the block.
        release: Takes a list of block ids, each held once less. Those that become free
            go to the end of the free list in this order.
        content_of: Returns what the engine's prefix cache calls a block's content, such
            as its hash; None if the block has none. A block that the scheduler does not
            see allocated loses its key if this changes. None if there are no such
            blocks, or the engine calls `forget` for them.
        count_of: Returns a block's reference count, for strict mode, which then names
            blocks that are used though they are free; None to leave that out.

    Raises:
        ValueError: If there is no block besides the null block, or there are too many.

    Example:
        >>> counts, free = [1, 0, 0], [1, 2]
        >>> def hold(block_ids):
        ...     for block_id in block_ids:
        ...         free.remove(block_id) if not counts[block_id] else None
        ...         counts[block_id] += 1
        >>> def release(block_ids):
        ...     for block_id in block_ids:
        ...         counts[block_id] -= 1
        ...         free.append(block_id) if not counts[block_id] else None
        >>> calls = {"hold": hold, "release": release}
        >>> pool = BorrowedPool(3, num_free=lambda: len(free), **calls)
        >>> pool.cache([1], [b"head"])
        []
        >>> pool.pin([1])
        >>> pool.num_free, pool.holds([1, 2], [b"head", b"tail"]).tolist()
        (1, [True, False])
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        num_free: Callable[[], int],
        hold: Callable[[list[int]], object],
        release: Callable[[list[int]], object],
        content_of: Callable[[int], Hashable] | None = None,
        count_of: Callable[[int], int] | None = None,
    ) -> None:
        check_whole(2, (1 << 31) - 1, num_blocks=num_blocks)
        needed = {"num_free": num_free, "hold": hold, "release": release}
        check_type(Callable, "a function", **needed)
        optional: dict[str, object] = {"content_of": content_of, "count_of": count_of}
        check_type(Callable | None, "a function or None", **optional)
        self.num_blocks = num_blocks
        self.unwritten: set[int] = set()
        self.count_of = count_of
        self._num_free, self._hold, self._release = num_free, hold, release
        self.has_contents = content_of is not None
        self._content_of = content_of or (lambda block_id: True)
        # The key of each block, and what the engine called its content then.
        self._cached: dict[int, tuple[BlockKey, Hashable]] = {}
        self._pins: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that the engine could allocate now."""
        return self._num_free()

    @property
    def has_cached(self) -> bool:
        """Whether a block holds a key."""
        return bool(self._cached)

    def cache(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
        """Record the keys of n full, computed blocks that the scheduler cannot know.

        Such as blocks outside a window, which the prefix cache found for a request. The
        null block is passed over. Returned are the blocks that were skipped: they
        are `unwritten`, or without content in the engine's prefix cache.

        Raises:
            ValueError: If there is not a key for each block, or an id is no block's.
                Then nothing changes.
        """
        skipped = []
        for block_id, key in self._pairs(block_ids, keys):
            content = self._content_of(block_id)
            if block_id in self.unwritten or content is None:
                skipped.append(block_id)
            elif block_id != NULL_BLOCK:
                self._cached[block_id] = key, content
        return skipped

    def record(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> None:
        """Record the keys of blocks that a request has computed, except null blocks.

        `OffloadScheduler` calls it.
        """
        for block_id, key in self._pairs(block_ids, keys):
            if block_id != NULL_BLOCK and block_id not in self.unwritten:
                self._cached[block_id] = key, self._content_of(block_id)

    def forget(self, block_ids: BlockIds) -> None:
        """Record that blocks lose their content.

        Call it for blocks allocated for anything but requests of the scheduler.
        """
        for block_id in self._ids(block_ids):
            self._cached.pop(block_id, None)
            self.unwritten.discard(block_id)

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Whether each of n blocks still has the content of its key: bool[n]."""
        held = []
        for block_id, key in self._pairs(block_ids, keys):
            known_key, content = self._cached.get(block_id, _NOTHING)
            is_held = known_key == key
            if is_held and content != (now := self._content_of(block_id)):
                is_held = content is None  # The prefix cache names it now, for good.
                self._cached[block_id] = key, now if is_held else content
            held.append(is_held)
        return np.array(held, np.bool_)

    def are_free(self, block_ids: BlockIds) -> NDArray[np.bool_]:
        """Whether each of n blocks has no holders except pins: bool[n]."""
        if self.count_of is None:
            return np.zeros(len(block_ids), np.bool_)
        ids = self._ids(block_ids)
        counts = [self.count_of(block_id) - self._pins[block_id] for block_id in ids]
        return np.equal(counts, 0)

    def pin(self, block_ids: BlockIds) -> None:
        """Hold blocks in the engine, except the null block."""
        if ids := [block_id for block_id in self._ids(block_ids) if block_id]:
            self._hold(ids)
            self._pins.update(ids)

    def unpin(self, block_ids: BlockIds) -> None:
        """Release blocks from the last to the first, which is thus kept longest."""
        if ids := [block_id for block_id in self._ids(block_ids) if block_id]:
            self._pins.subtract(ids)
            self._release(ids[::-1])

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def _ids(self, block_ids: BlockIds) -> list[int]:
        ids = as_ids(block_ids)
        refuse_outside(ids, self.num_blocks)
        return cast(list[int], ids.tolist())

    def _pairs(
        self, block_ids: BlockIds, keys: Sequence[BlockKey]
    ) -> Iterator[tuple[int, BlockKey]]:
        ids = self._ids(block_ids)
        if len(ids) != len(keys):
            raise ValueError(f"{len(ids)=} must be {len(keys)}, one for each key.")
        return zip(ids, keys, strict=True)
