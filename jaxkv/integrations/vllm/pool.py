"""vLLM's block pool, as far as `OffloadScheduler` needs it.

Blocks have numbers here. If all groups of layers share one pool, these are vLLM's ids.
If tpu-inference has a second pool for states, an id names a block in both pools, and a
state's id names one in each group of states. The numbers are unique, in the order of
`jaxkv.transfer.MultiPoolEngine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.tiers.base import BlockIds
from jaxkv.types import BlockKey

_GROUP_BYTES = 4

# The mark at the end of the keys of blocks that an adapter computed.
MARK_BYTES = 32
# The longest key without a mark: a SHA-256 and the group.
_MAX_PLAIN_BYTES = 32 + _GROUP_BYTES

PRIVATE_END = bytes(16)
"""The end of a mark that is valid only in this process."""


def key_in_group(block_hash: bytes, group: int) -> BlockKey:
    """Return the key of a block in a group, as vLLM's prefix cache makes it."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "big")


def split_key(key: BlockKey) -> tuple[bytes, int]:
    """Return the block hash and the group of a key from `key_in_group`."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


def plain_key(key: BlockKey) -> BlockKey:
    """Return a key without the adapter's mark."""
    return key[:-MARK_BYTES] if len(key) > _MAX_PLAIN_BYTES else key


def is_private(key: BlockKey) -> bool:
    """Whether a block must not leave the process."""
    return len(key) > _MAX_PLAIN_BYTES and key.endswith(PRIVATE_END)


class VllmBlockPool:
    """Holds blocks of a pool that vLLM owns.

    vLLM's pool has no pins: a block that is free when its transfer ends moves to the
    end of vLLM's eviction order.
    """

    def __init__(self, pool: Any, num_groups: int) -> None:
        self._pool = pool
        # With several groups, the keys end with it already.
        self._suffix = key_in_group(b"", 0) if num_groups == 1 else b""
        self._all_blocks = pool.blocks
        # Pinned blocks and their numbers of pins, by the blocks' identity.
        self._pinned: dict[int, Any] = {}
        self._num_pins: dict[int, int] = {}
        # Pins that `release` has undone.
        self._num_void_pins: Counter[int] = Counter()
        # Identities of blocks that may have KV of old weights.
        self.old: set[int] = set()
        # The adapters that have written blocks, by the blocks' identity.
        self._marks: dict[int, bytes] = {}
        self.num_blocks = len(pool.blocks)  # Numbers of blocks.
        self.num_states = 0  # Blocks of states that requests can have.
        # Always empty: vLLM's tables have the null block for skipped tokens.
        self.unwritten: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may allocate."""
        num: int = self._pool.get_num_free_blocks()
        return num

    @property
    def pools(self) -> Sequence[Any]:
        """The pools of vLLM; each may be reset alone."""
        return (self._pool,)

    def numbered(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the numbers of a request's blocks, from vLLM's ids, for each group."""
        return block_ids

    def holds(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """Return bool[n]: which of n blocks hold their keys in vLLM's pool."""
        blocks, held = self._all_blocks, []
        for block, key in zip(np.asarray(block_ids).tolist(), keys, strict=True):
            plain = key if len(key) <= _MAX_PLAIN_BYTES else plain_key(key)
            held.append(blocks[block].block_hash == self._hash_of(plain))
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
        if self._num_void_pins:
            blocks = [block for block in blocks if not self._was_released(block)]
        for block in blocks:
            pins[id(block)] -= 1
            if not pins[id(block)]:
                del pins[id(block)], self._pinned[id(block)]
        self._pool.free_blocks(blocks)

    def release(self) -> None:
        """Free all pinned blocks and void their pins: their content is not needed."""
        for number, block in self._pinned.items():
            num_pins = self._num_pins[number]
            self._num_void_pins[number] += num_pins
            for _ in range(num_pins):
                self._pool.free_blocks([block])
        self._pinned.clear()
        self._num_pins.clear()

    def _was_released(self, block: Any) -> bool:
        """Consume a void pin of a block, if it has one."""
        num_pins = self._num_void_pins.get(id(block), 0)
        if num_pins > 1:
            self._num_void_pins[id(block)] = num_pins - 1
        elif num_pins:
            del self._num_void_pins[id(block)]
        return num_pins > 0

    def mark_old(self) -> None:
        """Remember the blocks with KV: those in use and those with a hash."""
        self.old.update(
            id(block)
            for block in self._all_blocks
            if not block.is_null and (block.ref_cnt or block.block_hash is not None)
        )

    def record_written(
        self, block_ids: BlockIds, *, is_old: bool, mark: bytes = b""
    ) -> None:
        """Record who writes blocks: its adapter, and whether it continues old KV."""
        written = [id(block) for block in self._blocks(block_ids)]
        if is_old:
            self.old.update(written)
        else:
            self.old.difference_update(written)
        if mark:
            self._marks.update(dict.fromkeys(written, mark))

    def has_old(self, block_ids: BlockIds, mark: bytes = b"") -> bool:
        """Whether any hit may have other weights' KV than the adapter of `mark`."""
        hits = [id(block) for block in self._blocks(block_ids)]
        if mark and any(self._marks.get(number) != mark for number in hits):
            return True
        return not self.old.isdisjoint(hits)

    def has_only_pinned(self) -> bool:
        """Whether only pins hold some block, so that it is free without them."""
        pinned = self._pinned
        return any(pinned[n].ref_cnt == pins for n, pins in self._num_pins.items())

    def warm_up(self) -> None:
        """Compile nothing: this is vLLM's pool."""

    def _blocks(self, block_ids: BlockIds) -> list[Any]:
        all_blocks = self._all_blocks
        blocks = [all_blocks[number] for number in np.asarray(block_ids).tolist()]
        return [block for block in blocks if not block.is_null]

    def _hash_of(self, key: BlockKey) -> BlockKey:
        """Return the hash in vLLM's pool for a key without an adapter."""
        return key + self._suffix


class StatesBlockPool(VllmBlockPool):
    """Holds blocks of tpu-inference's two pools, one for attention and one for states.

    All groups of states have the same ids, of the same blocks, whose hashes name the
    first group of states. ValueError if `pool` is not a `TPUDualBlockPool`.
    """

    def __init__(self, pool: Any, state_groups: Sequence[int]) -> None:
        if not hasattr(pool, "attention_pool") or not hasattr(pool, "mamba_pool"):
            raise ValueError(
                f"{type(pool).__name__} is not tpu-inference's pool for states: serve "
                "the model with --mamba-cache-mode align."
            )
        super().__init__(pool, num_groups=1 + len(state_groups))
        attention, states = pool.attention_pool.blocks, pool.mamba_pool.blocks
        self._attention_pool, self._state_pool = pool.attention_pool, pool.mamba_pool
        self.num_states = len(states) - 1  # Without the null block.
        self._all_blocks = [*attention, *list(states) * len(state_groups)]
        self.num_blocks = len(self._all_blocks)
        # Added to the ids of each group of states.
        self._offsets = {
            group: len(attention) + number * len(states)
            for number, group in enumerate(state_groups)
        }
        first = key_in_group(b"", state_groups[0])
        self._suffixes = {key_in_group(b"", group): first for group in state_groups}

    @property
    def num_free(self) -> int:
        """Blocks that vLLM may allocate in the pool that has fewer."""
        num_states: int = self._state_pool.get_num_free_blocks()
        return min(super().num_free, num_states)

    @property
    def pools(self) -> Sequence[Any]:
        """The pools of vLLM; each may be reset alone."""
        return (self._pool, self._attention_pool, self._state_pool)

    def numbered(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the numbers of a request's blocks; the null block's is 0."""
        numbers = list(block_ids)
        for group, offset in self._offsets.items():
            numbers[group] = [n and n + offset for n in block_ids[group]]
        return numbers

    def _hash_of(self, key: BlockKey) -> BlockKey:
        """Return the hash for a key, which names the first group of states."""
        suffix = key[-_GROUP_BYTES:]
        return key[:-_GROUP_BYTES] + self._suffixes.get(suffix, suffix)
