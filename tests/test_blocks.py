"""The device tier against the rules that it keeps, on random operations."""

import random

import pytest

from jaxkv.blocks import NULL_BLOCK, DeviceBlockPool


def test_duplicates_of_a_key_stay_apart():
    pool = DeviceBlockPool(4)
    first, second = pool.allocate(2)
    pool.cache([first], [b"k"])
    pool.cache([second], [b"k"])
    assert pool.find_prefix([b"k"]) == [first]
    pool.free([first, second])
    pool.allocate(2)  # the fresh one, then `first`
    assert pool.find_prefix([b"k"]) == [second]


def test_a_prefix_ends_at_the_first_hole():
    pool = DeviceBlockPool(5)
    ids = pool.allocate(3)
    pool.cache(ids, [b"0", b"1", b"2"])
    pool.free(ids[1:2])
    pool.free(ids[::2])
    pool.allocate(2)  # the fresh one and block 1
    assert pool.find_prefix([b"0", b"1", b"2"]) == ids[:1]


def test_refusals_change_nothing():
    pool = DeviceBlockPool(4)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="num=2 blocks wanted, but only 1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1
    with pytest.raises(ValueError, match=f"block_id={held[0]} is freed more often"):
        pool.free([held[1], held[0], held[0]])
    assert [pool.ref_cnt(b) for b in held] == [1, 1]
    pool.cache(held[:1], [b"a"])
    with pytest.raises(ValueError, match="is cached as b'a', not b'c'"):
        pool.cache([held[1], held[0]], [b"b", b"c"])
    assert pool.find_prefix([b"b"]) == []
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        DeviceBlockPool(1)


def test_invariants_hold_over_random_operations():
    seed = 7
    rng = random.Random(seed)
    print(f"seed {seed}")
    pool = DeviceBlockPool(12)
    held = []
    for number in range(5000):
        action = rng.random()
        if action < 0.4 and pool.num_free:
            ids = pool.allocate(rng.randint(1, pool.num_free))
            assert NULL_BLOCK not in ids
            assert not set(ids) & set(held)
            pool.cache(ids, [b"%d" % (number * 100 + i) for i in range(len(ids))])
            held += ids
        elif action < 0.5:
            key = b"%d" % (rng.randrange(number + 1) * 100)
            found = pool.find_prefix([key])
            pool.touch(found)
            held += found
        elif held:
            rng.shuffle(held)
            gone = [held.pop() for _ in range(rng.randint(1, len(held)))]
            pool.free(gone)
        assert [pool.ref_cnt(b) for b in range(12)] == [
            held.count(b) for b in range(12)
        ]
        assert pool.num_free == 11 - len(set(held))
