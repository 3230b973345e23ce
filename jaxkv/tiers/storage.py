"""The storage tier: which blocks a store has that outlives the process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from jaxkv.tiers.base import STORAGE_MEDIUM
from jaxkv.tiers.executors import ExecutorName
from jaxkv.tiers.host import OffloadingManager
from jaxkv.types import BlockKey

_MOST_BLOCKS = (1 << 31) - 1
_BYTES_PER_BLOCK = 130


class StorageTier(OffloadingManager):
    """Keeps track of which blocks a store has, and which to delete when it is full.

    It is the host tier's index over places of its own: each is room for one block in
    the store, which knows blocks by their keys alone. The least recently used go first.

    What it knows may be wrong, as others may write to the store and delete from it: a
    block that is not there any more is found missing when it is read (`discard`), and
    one that others have written is known once the store was listed (`add_found`).

    Args:
        block_size: Tokens in a block; only repeated in events.
        num_blocks: Blocks that the store may hold.
        enable_events: Whether to keep events for `take_events`.
        executor: As of `OffloadingManager`.

    Raises:
        ValueError: There are more blocks than can be numbered.
        MemoryError: There is no memory for the index of so many.

    Attributes:
        num_found: Blocks that listings have added.
        num_left_out: Blocks that they have not, as there was no room.

    Example:
        >>> tier = StorageTier(block_size=16, num_blocks=2)
        >>> tier.add_found([b"a", b"b", b"c"])
        >>> tier.contains([b"a", b"b", b"c"]).tolist(), tier.num_left_out
        ([True, True, False], 1)
        >>> tier.prepare_store([b"d"]).block_hashes_evicted
        [b'a']
    """

    medium = STORAGE_MEDIUM

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        enable_events: bool = False,
        *,
        executor: ExecutorName = "native",
    ) -> None:
        if num_blocks > _MOST_BLOCKS:
            raise ValueError(
                f"{num_blocks=} of the store must be at most {_MOST_BLOCKS}: set "
                "storage_bytes to less."
            )
        try:
            super().__init__(
                block_size, num_blocks, "lru", enable_events, executor=executor
            )
        except (MemoryError, RuntimeError) as error:  # XLA's is one of these.
            raise MemoryError(
                f"{num_blocks=} of the store need an index of some "
                f"{num_blocks * _BYTES_PER_BLOCK >> 20} MiB, which is more than there "
                "is: set storage_bytes to less."
            ) from error
        self.num_found = 0
        self.num_left_out = 0

    def add_found(self, keys: Sequence[BlockKey]) -> None:
        """Take note of blocks that a listing has found; nothing is evicted for them."""
        new = list(compress(keys, (~self.contains(keys)).tolist()))
        room = self.num_blocks - self.num_held_blocks
        self.num_left_out += max(0, len(new) - room)
        new = new[: max(room, 0)]
        if not new:
            return
        answer = self.prepare_store(new)
        if answer is not None:
            self.num_found += len(answer.block_hashes_to_store)
            self.complete_store(answer.block_hashes_to_store)
