"""The pool of examples/toy_engine.py, in the place of a `DeviceBlockPool`."""

import sys
from pathlib import Path

import numpy as np

from jaxkv import BorrowedPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK

# The examples are files to be run, not a package.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import toy_engine


class OwnPool(BorrowedPool):
    num_pending_free = 0

    def __init__(self, num_blocks, **named):
        self.engine_pool = pool = toy_engine.Pool(num_blocks)
        super().__init__(
            num_blocks,
            num_free=lambda: len(pool.free_blocks),
            hold=self.touch,
            release=self.free,
            content_of=lambda block: block == NULL_BLOCK or pool.hashes.get(block),
            count_of=pool.counts.__getitem__,
        )

    def allocate(self, num):
        if num > self.num_free:
            raise ValueError(f"{num=} blocks wanted of {self.num_free}.")
        blocks = self.engine_pool.allocate(num)
        self.unwritten.difference_update(blocks)
        return blocks

    def touch(self, blocks):
        self.engine_pool.touch([block for block in blocks if block != NULL_BLOCK])

    def free(self, blocks):
        self.engine_pool.release([block for block in blocks if block != NULL_BLOCK])
        assert min(self.engine_pool.counts) >= 0

    def cache(self, blocks, keys):
        for block, key in zip(blocks, keys, strict=True):
            if block != NULL_BLOCK and block not in self.unwritten:
                self.engine_pool.cache([block], [key])
        return super().cache(blocks, keys)

    def find(self, keys):
        blocks = self.engine_pool.by_hash
        return np.array([blocks.get(key, NO_BLOCK) for key in keys], np.int32)
