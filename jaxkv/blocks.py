"""The device tier: who holds which KV block in HBM, and which prefix is still there.

The rules are those of vLLM's `BlockPool`: a block that nobody holds keeps its contents
and its key until it is needed for something else, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jaxkv.types import BlockKey

NULL_BLOCK = 0
"""Never handed out: engines point unused entries of block tables at it."""


class DeviceBlockPool:
    """Reference counts and prefix cache of the device's block pool.

    Args:
        num_blocks: Blocks in the pool, the null block among them.

    Raises:
        ValueError: If there is no block besides the null block.

    Example:
        >>> pool = DeviceBlockPool(num_blocks=3)
        >>> pool.allocate(2)
        [1, 2]
        >>> pool.cache([1, 2], [b"head", b"tail"])
        >>> pool.free([2, 1])
        >>> pool.find_prefix([b"head", b"tail", b"other"])
        [1, 2]
        >>> pool.allocate(1)  # freed first, so given up first
        [2]
        >>> pool.find_prefix([b"head", b"tail"])
        [1]
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"{num_blocks=} must be at least 2: the null block and one to use."
            )
        self.num_blocks = num_blocks
        self._ref_cnt = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        # Blocks that nobody holds, the next to be given up first.
        self._free = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        # Two requests may compute the same block at the same time, so that a key can
        # have several blocks. They stay apart; the first one serves.
        self._by_key: dict[BlockKey, OrderedDict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free)

    def ref_cnt(self, block_id: int) -> int:
        """Count the holders of a block."""
        return self._ref_cnt[block_id]

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[int]:
        """List the blocks of the longest run of keys, from the first on, that is here.

        Args:
            keys: Keys of a prefix, in its order.

        Returns:
            Their blocks. They are not held until `touch` is called.
        """
        block_ids = []
        for key in keys:
            blocks = self._by_key.get(key)
            if not blocks:
                break
            block_ids.append(next(iter(blocks)))
        return block_ids

    def allocate(self, num: int) -> list[int]:
        """Take blocks, giving up what they cached.

        Args:
            num: How many.

        Returns:
            Their ids, each held once.

        Raises:
            ValueError: If fewer are free; then none is taken.
        """
        if num > self.num_free:
            raise ValueError(
                f"{num=} blocks wanted, but only {self.num_free} of "
                f"{self.num_blocks} are free."
            )
        block_ids = [self._free.popitem(last=False)[0] for _ in range(num)]
        for block_id in block_ids:
            self._forget(block_id)
            self._ref_cnt[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks once more, so that they are not given up."""
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0:
                del self._free[block_id]
            self._ref_cnt[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Let go of blocks that were allocated or touched.

        Args:
            block_ids: Which. Of those that nobody holds any more the first is given up
                first, so that a prefix is to be passed tail first.

        Raises:
            ValueError: If a block is not held as often; then none is let go.
        """
        for index, block_id in enumerate(block_ids):
            self._ref_cnt[block_id] -= 1
            if self._ref_cnt[block_id] < 0:
                for undo in block_ids[: index + 1]:
                    self._ref_cnt[undo] += 1
                raise ValueError(f"{block_id=} is freed more often than it is held.")
        for block_id in block_ids:
            if self._ref_cnt[block_id] == 0:
                self._free[block_id] = None

    def cache(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Make full, computed blocks findable.

        Args:
            block_ids: Blocks that somebody holds.
            keys: What each of them contains. A block that has its key is left alone.

        Raises:
            ValueError: If a block is known under another key.
        """
        for block_id, key in zip(block_ids, keys, strict=True):
            if self._keys[block_id] not in (None, key):
                raise ValueError(
                    f"{block_id=} is cached as {self._keys[block_id]!r}, not {key!r}."
                )
        for block_id, key in zip(block_ids, keys, strict=True):
            self._keys[block_id] = key
            self._by_key.setdefault(key, OrderedDict())[block_id] = None

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            self._keys[block_id] = None
            del self._by_key[key][block_id]
            if not self._by_key[key]:
                del self._by_key[key]
