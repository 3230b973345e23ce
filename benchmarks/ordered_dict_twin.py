"""The Python that `jaxkv.manager` stands in for, as the baseline of `policy.py`.

Dictionaries, one object a block and the same passes over the keys as vLLM 0.19.1's
manager makes, written anew for this comparison; its results are checked against
jaxkv's while they are timed. Not an oracle: `tests/reference` has that.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray


class Block(ctypes.Structure):
    """A block's reference count, -1 until its bytes have arrived, and its id."""

    _fields_ = [("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int64)]

    @property
    def is_ready(self) -> bool:
        """Whether it can be read."""
        return self.ref_cnt >= 0


class LRU:
    """One dictionary, the least recently used first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[bytes, Block] = OrderedDict()
        self.get = self.blocks.get

    def insert(self, key: bytes, block: Block) -> None:
        self.blocks[key] = block

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def evict(
        self, num: int, protected: set[bytes]
    ) -> list[tuple[bytes, Block]] | None:
        victims = []
        for key, block in self.blocks.items():
            if block.ref_cnt == 0 and key not in protected:
                victims.append((key, block))
                if len(victims) == num:
                    break
        else:
            return None
        for key, _ in victims:
            del self.blocks[key]
        return victims


class Manager:
    """Reference counts and block ids over a policy."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_allocated = 0
        self.freed: list[int] = []
        self.policy = LRU()

    def lookup(self, keys: list[bytes]) -> int:
        hits = 0
        for key in keys:
            block = self.policy.get(key)
            if block is None or not block.is_ready:
                break
            hits += 1
        return hits

    def touch(self, keys: list[bytes]) -> None:
        self.policy.touch(keys)

    def prepare_load(self, keys: list[bytes]) -> NDArray[np.int64]:
        blocks = []
        for key in keys:
            block = self.policy.get(key)
            assert block is not None
            assert block.is_ready
            block.ref_cnt += 1
            blocks.append(block)
        return np.array([block.block_id for block in blocks], np.int64)

    def complete_load(self, keys: list[bytes]) -> None:
        for key in keys:
            block = self.policy.get(key)
            assert block is not None
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def prepare_store(
        self, keys: list[bytes]
    ) -> tuple[list[bytes], NDArray[np.int64], list[bytes]] | None:
        to_store = [key for key in keys if self.policy.get(key) is None]
        num_free = len(self.freed) + self.num_blocks - self.num_allocated
        evicted = []
        if len(to_store) > num_free:
            victims = self.policy.evict(len(to_store) - num_free, set(keys))
            if victims is None:
                return None
            for key, block in victims:
                self.freed.append(block.block_id)
                evicted.append(key)
        blocks = []
        for _ in range(min(len(to_store), self.num_blocks - self.num_allocated)):
            blocks.append(Block(-1, self.num_allocated))
            self.num_allocated += 1
        while len(blocks) < len(to_store):
            blocks.append(Block(-1, self.freed.pop()))
        for key, block in zip(to_store, blocks, strict=True):
            self.policy.insert(key, block)
        ids = np.array([block.block_id for block in blocks], np.int64)
        return to_store, ids, evicted

    def complete_store(self, keys: list[bytes]) -> None:
        stored = []
        for key in keys:
            block = self.policy.get(key)
            if block is not None and not block.is_ready:
                block.ref_cnt = 0
                stored.append(key)
