"""vLLM's block pool, as far as `OffloadScheduler` needs it.

Blocks have numbers here. Where all groups of layers share one pool, these are vLLM's
ids. Where tpu-inference gives states a pool of their own, an id has a block in either,
and a state's id one in each group of states; the numbers tell them apart, in the order
of `jaxkv.transfer.MultiPoolEngine`.
"""

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
        num_blocks: How many numbers of blocks there are.
        num_states: Blocks of states that requests can have; 0 if there are none.
        unwritten: See `DeviceBlockPool`. It stays empty: vLLM's tables have the null
            block for skipped tokens, which vLLM does not cache.
    """

    def __init__(self, pool: Any, num_groups: int) -> None:
        self._pool = pool
        # Of several groups the keys have it.
        self._suffix = key_in_group(b"", 0) if num_groups == 1 else b""
        self._all_blocks = pool.blocks
        # Blocks that are pinned, by their identity, and how often.
        self._pinned: dict[int, Any] = {}
        self._num_pins: dict[int, int] = {}
        self.num_blocks = len(pool.blocks)
        self.num_states = 0
        self.unwritten: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may allocate."""
        num: int = self._pool.get_num_free_blocks()
        return num

    def numbered(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the numbers of a request's blocks, from vLLM's ids, for each group."""
        return block_ids

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Return which blocks hold their keys in vLLM's pool.

        Args:
            block_ids: n blocks.
            keys: n keys: vLLM's hashes, with their group if there are several, and
                perhaps an adapter.

        Returns:
            bool[n].
        """
        blocks, held = self._all_blocks, []
        for block, key in zip(np.asarray(block_ids).tolist(), keys, strict=True):
            name = key if len(key) <= _MOST_PLAIN_BYTES else plain_key(key)
            held.append(blocks[block].block_hash == self._name_of(name))
        return np.array(held, np.bool_)

    def pin(self, block_ids: BlockIds) -> None:
        """Keep blocks from being allocated."""
        blocks, pins = self._blocks(block_ids), self._num_pins
        for block in blocks:
            self._pinned[id(block)] = block
            pins[id(block)] = pins.get(id(block), 0) + 1
        self._pool.touch(blocks)

    def unpin(self, block_ids: BlockIds) -> None:
        """Undo `pin`; the last block is allocated first."""
        blocks, pins = self._blocks(block_ids)[::-1], self._num_pins
        for block in blocks:
            pins[id(block)] -= 1
            if not pins[id(block)]:
                del pins[id(block)], self._pinned[id(block)]
        self._pool.free_blocks(blocks)

    def has_only_pinned(self) -> bool:
        """Whether a block is kept by pins alone, so that it is free without them."""
        pinned = self._pinned
        return any(pinned[n].ref_cnt == pins for n, pins in self._num_pins.items())

    def warm_up(self) -> None:
        """Do nothing: vLLM's pool is not compiled."""

    def _blocks(self, block_ids: BlockIds) -> list[Any]:
        own, all_blocks = [], self._all_blocks
        for number in np.asarray(block_ids).tolist():
            block = all_blocks[number]
            if not block.is_null:
                own.append(block)
        return own

    def _name_of(self, key: BlockKey) -> BlockKey:
        """Return the hash that vLLM's pool has for a key without an adapter."""
        return key + self._suffix


class StatesBlockPool(VllmBlockPool):
    """Holds blocks of tpu-inference's two pools, one for attention and one for states.

    All groups of states have the same ids, of the same blocks, whose hashes name the
    first of these groups.

    Args:
        pool: tpu-inference's `TPUDualBlockPool`.
        state_groups: Which groups of the model's layers have states.

    Raises:
        ValueError: It is another pool.
    """

    def __init__(self, pool: Any, state_groups: Sequence[int]) -> None:
        if not hasattr(pool, "attention_pool") or not hasattr(pool, "mamba_pool"):
            raise ValueError(
                f"{type(pool).__name__} is not tpu-inference's pool for states: serve "
                "the model with --mamba-cache-mode align."
            )
        super().__init__(pool, num_groups=1 + len(state_groups))
        attention, states = pool.attention_pool.blocks, pool.mamba_pool.blocks
        self._state_pool = pool.mamba_pool
        self.num_states = len(states) - 1  # One is the null block's.
        self._all_blocks = [*attention, *list(states) * len(state_groups)]
        self.num_blocks = len(self._all_blocks)
        # What is added to the ids of each group of states.
        self._offsets = {
            group: len(attention) + number * len(states)
            for number, group in enumerate(state_groups)
        }
        first = key_in_group(b"", state_groups[0])
        self._suffixes = {key_in_group(b"", group): first for group in state_groups}

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may allocate, of the pool that has fewer."""
        num_states: int = self._state_pool.get_num_free_blocks()
        return min(super().num_free, num_states)

    def numbered(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the numbers of a request's blocks; the null block's is 0."""
        numbers = list(block_ids)
        for group, offset in self._offsets.items():
            numbers[group] = [n and n + offset for n in block_ids[group]]
        return numbers

    def _name_of(self, key: BlockKey) -> BlockKey:
        """Return the hash that a block has for a key: the first group's of states."""
        suffix = key[-_GROUP_BYTES:]
        return key[:-_GROUP_BYTES] + self._suffixes.get(suffix, suffix)
