"""A pool that the engine owns, and what the scheduler refuses without ours."""

import random

import pytest

from jaxkv import BorrowedPool, OffloadRules, OffloadScheduler
from tests.rigs.own_pool import OwnPool


def scheduler(**rules):
    return OffloadScheduler(4, num_host_blocks=8, rules=OffloadRules(**rules))


def test_blocks_hold_the_keys_that_the_engine_has_for_them():
    """Random calls of an engine, beside what its prefix cache says."""
    rng, pool, tables = random.Random(3), OwnPool(12), []
    for step in range(600):
        num = rng.randint(1, 4)
        if rng.random() < 0.5 and num <= pool.num_free:
            blocks = pool.allocate(num)
            pool.cache(blocks, [b"%d" % rng.randrange(step + 1) for _ in blocks])
            tables.append(blocks)
        elif tables:
            pool.free(tables.pop(rng.randrange(len(tables)))[::-1])
        pinned = rng.sample(range(12), 3)
        num_free = pool.num_free
        pool.pin(pinned)
        ids = list(range(1, 12))
        held = {block for table in tables for block in table}
        assert [b for b in ids if not pool.are_free([b])[0]] == sorted(held)
        assert pool.num_free == num_free - len(set(pinned) - held - {0})
        pool.unpin(pinned)
        expected_keys = [pool.engine_pool.hashes.get(block, b"none") for block in ids]
        expected = [block in pool.engine_pool.hashes for block in ids]
        assert pool.holds(ids, expected_keys).tolist() == expected
        assert not pool.holds(ids, [b"other"] * len(ids)).any()
    assert sum(expected) > 5


def test_released_blocks_are_allocated_from_the_last_to_the_first():
    pool = OwnPool(6)
    blocks = pool.allocate(3)
    pool.pin(blocks)
    pool.free(blocks)
    pool.unpin(blocks)
    assert pool.allocate(5) == [4, 5, 3, 2, 1]


def test_without_the_engines_names_blocks_hold_their_key_until_they_are_forgotten():
    calls = {"num_free": lambda: 0, "hold": id, "release": id}
    pool = BorrowedPool(4, **calls)
    assert pool.cache([1, 0, 2], [b"a", b"b", b"c"]) == []
    pool.unwritten.add(3)
    assert pool.cache([3], [b"d"]) == [3]
    assert pool.holds([1, 0, 2, 3], [b"a", b"b", b"c", b"d"]).tolist() == [
        *(True, False, True, False)
    ]
    pool.forget([2, 3])
    assert pool.holds([1, 2], [b"a", b"c"]).tolist() == [True, False]
    assert pool.unwritten == set()


def test_a_pool_refuses_ids_of_no_block_and_keys_without_one():
    pool = OwnPool(4)
    with pytest.raises(ValueError, match=r"block_id=4 must be in \[0, 4\)"):
        pool.pin([4])
    with pytest.raises(ValueError, match="must be 2, one for each key"):
        BorrowedPool.cache(pool, [1], [b"a", b"b"])
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        OwnPool(1)
    assert not pool.has_cached


def test_a_scheduler_refuses_what_is_no_pool_and_what_this_pool_cannot_tell():
    with pytest.raises(TypeError, match="it lacks unwritten, num_free, holds, pin"):
        scheduler().bind_device_block_pool(type("Pool", (), {"num_blocks": 4})())
    with pytest.raises(ValueError, match=r"mode='lazy' needs.* not a OwnPool"):
        scheduler(mode="lazy").bind_device_block_pool(OwnPool(4))
    eager = scheduler()
    eager.bind_device_block_pool(OwnPool(4))
    request = type("Request", (), {"request_id": "r", "block_keys": [b"k"]})
    request.num_tokens, request.num_computed_tokens = 5, 0
    with pytest.raises(ValueError, match="num_computed_tokens=None must be a number"):
        eager.explain(request)
    assert eager.explain(request, 0).num_computed_tokens == 0
