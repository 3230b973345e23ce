"""vLLM's block pool, as far as `OffloadScheduler` needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.tiers.base import BlockIds
from jaxkv.types import BlockKey

_GROUP_BYTES = 4

# What follows in keys of blocks that an adapter computed, where there is a store.
ADAPTER_BYTES = 32
# The longest key without: a SHA-256 and the group.
_MOST_PLAIN_BYTES = 32 + _GROUP_BYTES

PRIVATE = bytes(ADAPTER_BYTES)
"""What follows if it is not known which weights the adapter has."""


def key_in_group(block_hash: bytes, group: int) -> BlockKey:
    r"""Return the key of a block in a group, as vLLM's prefix cache makes it.

    Example:
        >>> key_in_group(b"hash", 1)
        b'hash\x00\x00\x00\x01'
    """
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


def split_key(key: BlockKey) -> tuple[bytes, int]:
    """Return the block hash and the group of a key from `key_in_group`."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def plain_key(key: BlockKey) -> BlockKey:
    """Return a key without what is known of the adapter.

    >>> plain_key(b"k" * 32 + PRIVATE) == plain_key(b"k" * 32) == b"k" * 32
    True
    """
    return key[:-ADAPTER_BYTES] if len(key) > _MOST_PLAIN_BYTES else key


def is_private(key: BlockKey) -> bool:
    """Whether a block must not leave the process."""
    return len(key) > _MOST_PLAIN_BYTES and key.endswith(PRIVATE)


class VllmBlockPool:
    """Holds blocks of a pool that vLLM owns.

    It replaces a `DeviceBlockPool` if nothing is copied on the device
    (`OffloadRules.copy_on_device`). One difference: vLLM's pool has no pins, so a block
    that is free when its transfer ends is evicted last in vLLM's order, whatever its
    place was before.

    Args:
        pool: vLLM's `BlockPool`.
        num_groups: Groups of the model's layers.

    Attributes:
        unwritten: See `DeviceBlockPool`. It stays empty: vLLM's tables have the null
            block for skipped tokens, which vLLM does not cache.
    """

    def __init__(self, pool: Any, num_groups: int) -> None:
        self._pool = pool
        # Of several groups the keys have it.
        self._suffix = key_in_group(b"", 0) if num_groups == 1 else b""
        self._num_pins: dict[int, int] = {}
        self.num_blocks = len(pool.blocks)
        self.unwritten: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may allocate."""
        num: int = self._pool.get_num_free_blocks()
        return num

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Return which blocks hold their keys in vLLM's pool.

        Args:
            block_ids: n blocks.
            keys: n keys: vLLM's hashes, with their group if there are several, and
                perhaps an adapter.

        Returns:
            bool[n].
        """
        blocks, held = self._pool.blocks, []
        for block, key in zip(np.asarray(block_ids).tolist(), keys, strict=True):
            name = key if len(key) <= _MOST_PLAIN_BYTES else plain_key(key)
            held.append(blocks[block].block_hash == name + self._suffix)
        return np.array(held, np.bool_)

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks from being allocated."""
        blocks, pins = self._blocks(block_ids), self._num_pins
        for block in blocks:
            pins[block.block_id] = pins.get(block.block_id, 0) + 1
        self._pool.touch(blocks)

    def unpin(self, block_ids: BlockIds) -> None:
        """Undo `pin`; the last block is allocated first."""
        blocks, pins = self._blocks(block_ids)[::-1], self._num_pins
        for block in blocks:
            pins[block.block_id] -= 1
            if not pins[block.block_id]:
                del pins[block.block_id]
        self._pool.free_blocks(blocks)

    def has_only_pinned(self) -> bool:
        """Whether a block is kept by pins alone, so that it is free without them."""
        blocks = self._pool.blocks
        return any(blocks[n].ref_cnt == pins for n, pins in self._num_pins.items())

    def warm_up(self) -> None:
        """Do nothing: vLLM's pool is not compiled."""

    def _blocks(self, block_ids: BlockIds) -> list[Any]:
        own, all_blocks = [], self._pool.blocks
        for number in np.asarray(block_ids).tolist():
            block = all_blocks[number]
            if not block.is_null:
                own.append(block)
        return own
