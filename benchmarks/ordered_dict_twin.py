"""The Python that `OffloadingManager` stands in for, as the baseline of `policy.py`.

Dictionaries, one object a block and the same passes over the keys as vLLM 0.19.1's
manager and policies make, written anew for this comparison; its results are checked
against jaxkv's while they are timed. Not an oracle: `tests/reference` has that.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


class Block(ctypes.Structure):
    """A block's reference count, -1 until its bytes have arrived, and its id."""

    _fields_ = [("ref_cnt", ctypes.c_int32), ("block_id", ctypes.c_int64)]

    @property
    def is_ready(self) -> bool:
        """Whether it can be read."""
        return self.ref_cnt >= 0


Blocks = OrderedDict[bytes, Block]
Victims = list[tuple[bytes, Block]]


class LRU:
    """One dictionary, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        del num_blocks
        self.blocks: Blocks = OrderedDict()
        self.get = self.blocks.get

    def insert(self, key: bytes, block: Block) -> None:
        self.blocks[key] = block

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def evict(self, num: int, protected: set[bytes]) -> Victims | None:
        victims: Victims = []
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


class ARC:
    """Two dictionaries of blocks and two of ghosts, the oldest first.

    Goes on in a list where it chose its last victim. vLLM 0.19.1 starts from the
    front for every victim, which `RescanningARC` does too.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.t1: Blocks = OrderedDict()
        self.t2: Blocks = OrderedDict()
        self.b1: OrderedDict[bytes, None] = OrderedDict()
        self.b2: OrderedDict[bytes, None] = OrderedDict()
        self.target = 0.0

    def get(self, key: bytes) -> Block | None:
        return self.t1.get(key) or self.t2.get(key)

    def insert(self, key: bytes, block: Block) -> None:
        self.t1[key] = block
        self.b1.pop(key, None)
        self.b2.pop(key, None)

    def touch(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.t1:
                block = self.t1.pop(key)
                (self.t2 if block.is_ready else self.t1)[key] = block
            elif key in self.t2:
                self.t2.move_to_end(key)
            elif key in self.b1:
                step = max(1, len(self.b2) / len(self.b1))
                self.target = min(self.target + step, self.num_blocks)
                self.b1.move_to_end(key)
            elif key in self.b2:
                step = max(1, len(self.b1) / len(self.b2))
                self.target = max(self.target - step, 0)
                self.b2.move_to_end(key)

    def evict(self, num: int, protected: set[bytes]) -> Victims | None:
        self.chosen: set[bytes] = set()
        self.start(protected)
        size, victims = len(self.t1), []
        for _ in range(num):
            victim = self.next_of(self.t1) if size >= int(self.target) else None
            if victim is not None:
                size -= 1
                ghosts = self.b1
            else:
                victim = self.next_of(self.t2)
                ghosts = self.b2
            if victim is None:
                return None
            self.chosen.add(victim[0])
            victims.append((victim, ghosts))
        for (key, _), ghosts in victims:
            del (self.t1 if ghosts is self.b1 else self.t2)[key]
            ghosts[key] = None
        for ghosts in (self.b1, self.b2):
            while len(ghosts) > self.num_blocks:
                ghosts.popitem(last=False)
        return [victim for victim, _ in victims]

    def start(self, protected: set[bytes]) -> None:
        self.protected = protected
        self.left = {
            id(blocks): self.candidates(blocks) for blocks in (self.t1, self.t2)
        }

    def next_of(self, blocks: Blocks) -> tuple[bytes, Block] | None:
        return next(self.left[id(blocks)], None)

    def candidates(self, blocks: Blocks) -> Iterator[tuple[bytes, Block]]:
        for key, block in blocks.items():
            if (
                block.ref_cnt == 0
                and key not in self.protected
                and key not in self.chosen
            ):
                yield key, block


class RescanningARC(ARC):
    """Looks for every victim from the front of its list."""

    def next_of(self, blocks: Blocks) -> tuple[bytes, Block] | None:
        return next(self.candidates(blocks), None)


class Manager:
    """Reference counts and block ids over a policy."""

    def __init__(
        self, num_blocks: int, make_policy: type[LRU] | type[ARC] = LRU
    ) -> None:
        self.num_blocks = num_blocks
        self.num_allocated = 0
        self.freed: list[int] = []
        self.policy = make_policy(num_blocks)

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
