"""The twins of vLLM's block pool and hit search, which other tests take as oracles.

`tests/integrations/test_vllm_twins.py` has them, and the twin of its scheduler, beside
vLLM's own.
"""

import random
from math import lcm

import pytest

from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from tests.reference.block_pool import BlockPool, PoolEvent
from tests.reference.hit_search import find_longest_cache_hit
from tests.reference.longest import first_read, longest_prefix

FULL = FullAttention(4)


def test_the_pool_gives_up_what_was_freed_first_and_serves_what_was_first_cached():
    pool = BlockPool(4, enable_events=True)
    a, b, c = pool.get_new_blocks(3)
    for block in (b, a, c):
        pool.cache_block(block, b"k")
    with pytest.raises(ValueError, match="0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks([b, c])
    assert pool.get_cached_block(b"k") is b
    assert pool.get_new_blocks(1) == [b]
    assert pool.get_cached_block(b"k") is a
    pool.evict_blocks([a.block_id])
    assert pool.get_cached_block(b"k") is c
    assert pool.take_events()[3:] == 2 * [PoolEvent((b"k",), "GPU", removed=True)]
    pool.touch([c])
    assert (pool.num_free, pool.reset_prefix_cache()) == (0, False)
    pool.touch([pool.null_block])
    pool.free_blocks([a, pool.null_block, b, c])
    assert (pool.num_free, pool.reset_prefix_cache()) == (3, True)
    assert pool.get_cached_block(b"k") is None


EQUAL = [FULL, SlidingWindow(4, 2), SlidingWindow(4, 14), Mamba(4), ChunkedLocal(4, 12)]
MIXED = [FULL, FullAttention(2), SlidingWindow(2, 9), SlidingWindow(8, 10), Mamba(6)]


def test_the_search_finds_the_longest_common_hit():
    for seed in range(1000):
        rng = random.Random(seed)
        kinds, share = rng.choice([EQUAL, MIXED]), rng.choice([0.6, 0.9])
        specs = rng.choices(kinds, k=rng.choice([1, 2, 2, 2, 3, 4]))
        keys = [
            [(g, i) for i in range(99 // spec.block_size)]
            for g, spec in enumerate(specs)
        ]
        cached = {key: key for row in keys for key in row if rng.random() < share}
        limit = rng.randint(0, 96)
        length, blocks = find_longest_cache_hit(specs, keys, cached.get, limit)
        counts, step = map(len, keys), lcm(*(spec.block_size for spec in specs))
        has = lambda g, i: (g, i) in cached  # noqa: E731, B023
        longest = longest_prefix(specs, list(counts), has, limit, step)
        assert length == longest, seed
        for g, spec in enumerate(specs):
            assert len(blocks[g]) == length // spec.block_size, seed
            assert cached.keys() >= set(blocks[g]) - {None}, seed
            first = first_read(spec, length)
            read = [(g, i) for i in range(first, len(blocks[g]))]
            assert blocks[g][first:] == read, seed
