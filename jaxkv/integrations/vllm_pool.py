"""vLLM's block pool, as far as `OffloadScheduler` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.blocks import BlockIds
from jaxkv.types import BlockKey

_GROUP_BYTES = 4


def key_in_group(block_hash: bytes, group: int) -> BlockKey:
    r"""Name a block of one of several groups, as vLLM's own prefix cache does.

    Example:
        >>> key_in_group(b"hash", 1)
        b'hash\x00\x00\x00\x01'
    """
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


def split_key(key: BlockKey) -> tuple[bytes, int]:
    """Tell the block hash and the group in a name of `key_in_group`."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class VllmBlockPool:
    """Holds blocks of a pool that vLLM owns.

    It stands in for a `DeviceBlockPool` where nothing is copied on the device
    (`OffloadRules.copy_on_device`). What it cannot do: vLLM's pool has no pins, so a
    block that was free when its transfer ended comes last in vLLM's order of eviction,
    whatever its place was before.

    Args:
        pool: vLLM's `BlockPool`.
        num_groups: Groups of the model's layers.

    Attributes:
        unwritten: See `DeviceBlockPool`. Nobody reads it, and it stays empty: where
            tokens are skipped, vLLM's tables have the null block, which vLLM does not
            cache.
    """

    def __init__(self, pool: Any, num_groups: int) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self.unwritten: set[int] = set()

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Tell which blocks vLLM knows to contain what a key stands for.

        Args:
            block_ids: n blocks.
            keys: n keys: vLLM's hashes, with their group where there are several.

        Returns:
            bool[n].
        """
        blocks = self._pool.blocks
        names = keys
        if self._num_groups == 1:
            names = [key_in_group(key, 0) for key in keys]
        pairs = zip(np.asarray(block_ids).tolist(), names, strict=True)
        held = [blocks[block].block_hash == name for block, name in pairs]
        return np.array(held, np.bool_)

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks from being allocated."""
        self._pool.touch(self._blocks(block_ids))

    def unpin(self, block_ids: BlockIds) -> None:
        """Take pins back; the last of the blocks is given up first."""
        self._pool.free_blocks(self._blocks(block_ids)[::-1])

    def warm_up(self, max_blocks: int) -> None:
        """Compile nothing: all of it is vLLM's Python."""

    def _blocks(self, block_ids: BlockIds) -> list[Any]:
        blocks = (self._pool.blocks[block] for block in np.asarray(block_ids).tolist())
        return [block for block in blocks if not block.is_null]
