"""An engine's own block pool, with its free list, counts and prefix cache."""

from collections import OrderedDict

import numpy as np

from jaxkv import BorrowedPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK


class OwnPool(BorrowedPool):
    """A pool such as vLLM's, in the place of a `DeviceBlockPool`."""

    num_pending_free = 0

    def __init__(self, num_blocks, **named):
        self.counts = [0] * num_blocks
        self.free_blocks = OrderedDict.fromkeys(range(1, num_blocks))
        self.keys, self.by_key = {}, {}
        super().__init__(
            num_blocks,
            num_free=lambda: len(self.free_blocks),
            hold=self.touch,
            release=self.free,
            content_of=self.content_of,
            count_of=self.counts.__getitem__,
        )

    def content_of(self, block):
        return block == NULL_BLOCK or self.keys.get(block)

    def allocate(self, num):
        if num > len(self.free_blocks):
            raise ValueError(f"{num=} blocks wanted of {len(self.free_blocks)}.")
        blocks = [self.free_blocks.popitem(last=False)[0] for _ in range(num)]
        for block in blocks:
            self.counts[block] = 1
            key = self.keys.pop(block, None)
            if self.by_key.get(key) == block:
                del self.by_key[key]
        self.unwritten.difference_update(blocks)
        return blocks

    def touch(self, blocks):
        for block in blocks:
            if block != NULL_BLOCK:
                self.free_blocks.pop(block, None)
                self.counts[block] += 1

    def free(self, blocks):
        for block in blocks:
            if block != NULL_BLOCK:
                self.counts[block] -= 1
                assert self.counts[block] >= 0, block
                if not self.counts[block]:
                    self.free_blocks[block] = None

    def cache(self, blocks, keys):
        for block, key in zip(blocks, keys, strict=True):
            if block != NULL_BLOCK and block not in self.unwritten:
                self.keys[block] = key
                self.by_key.setdefault(key, block)
        return super().cache(blocks, keys)

    def find(self, keys):
        return np.array([self.by_key.get(key, NO_BLOCK) for key in keys], np.int32)
