"""The storage tier's index, and what the host says it would evict next.

`test_host_differential.py` drives the calls that it has from the host's index.
"""

import random

import numpy as np
import pytest

from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.storage import STORAGE_MEDIUM, StorageTier
from jaxkv.types import NO_BLOCK

NUM_BLOCKS = 16


def keys_of(numbers):
    return [f"key {n}".encode().ljust(32) for n in numbers]


def test_what_a_listing_finds_takes_free_places_only():
    tier = StorageTier(4, 4, enable_events=True)
    names = keys_of(range(8))
    tier.place(names[:2])
    tier.add_found(names[1:7])
    # One is being written, two have found room.
    assert tier.contains(names).tolist() == [True] * 4 + [False] * 4
    assert (tier.find(names[:4]) != NO_BLOCK).tolist() == [False, False, True, True]
    assert tier.num_found == 2
    (event,) = tier.take_events()
    assert (event.medium, event.removed) == (STORAGE_MEDIUM, False)
    assert event.block_hashes == names[2:4]
    assert tier.record_bound(bound=9, num_resident=7) == []
    assert tier.num_unindexed == 3
    tier.add_found(names)
    assert tier.num_held_blocks == 4


def test_the_host_evicts_what_it_says_it_would():
    rng = random.Random(0)
    host = BlockIndex(4, NUM_BLOCKS)
    names = keys_of(range(60))
    num_checked = 0
    for _ in range(400):
        keys = rng.sample(names, rng.randint(1, 6))
        resident = host.find(keys)
        pinned = resident[resident != NO_BLOCK][:2]
        host.pin(pinned)
        if rng.random() < 0.5:
            host.touch(keys)
        else:
            new = [key for key in keys if not host.contains([key])[0]]
            foretold = host.next_victims(len(new))
            placed = host.place(new)
            if placed is not None:
                assert list(placed.evicted_keys) == foretold
                num_checked += len(foretold)
                host.complete_store(placed.keys)
        host.unpin(pinned)
    assert num_checked > 100


def test_a_policy_that_does_not_tell_its_victims_is_refused():
    host = BlockIndex(4, NUM_BLOCKS, "arc")
    assert not host.can_list_victims
    with pytest.raises(ValueError, match="needs cache_policy='lru'"):
        host.next_victims(3)
    assert not np.asarray(host.executor.state.ref_cnt).any()


def test_an_index_for_which_there_is_no_room_names_the_setting(monkeypatch):
    with pytest.raises(ValueError, match=r"num_blocks=2147483648 .* set storage_bytes"):
        StorageTier(16, 1 << 31)

    def make_executor(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    monkeypatch.setattr("jaxkv.tiers.index.make_executor", make_executor)
    with pytest.raises(MemoryError, match=r"num_blocks=1048576 .* 130 MiB, .*to less"):
        StorageTier(16, 1 << 20)


def write(tier, numbers, ok=True):
    placed = tier.place(keys_of(numbers))
    deleted = tier.choose_deletions(placed.evicted_keys)
    tier.complete_store(placed.keys, ok)
    return deleted


def test_a_full_store_loses_the_least_recently_used_block_for_each_that_had_no_room():
    tier = StorageTier(4, 100)
    assert tier.record_full(3) == []  # Whose blocks they are is not known yet.
    tier.record_bound(bound=100, num_resident=0)
    assert tier.record_full(3) == []  # Others have filled it.
    tier.record_bound(bound=100, num_resident=0)
    write(tier, range(40))
    tier.touch(keys_of([0]))
    assert tier.record_full(3) == keys_of([1, 2, 3])
    # From now on one goes for each that comes, and no more.
    assert write(tier, [40, 41]) == keys_of([4, 5])
    assert write(tier, [42], ok=False) == keys_of([6])
    assert write(tier, [43]) == []
    assert write(tier, [44]) == keys_of([7])
    assert tier.num_held_blocks == 40 - 3


@pytest.mark.parametrize("is_listed_again", [True, False])
def test_a_store_that_was_full_is_filled_again_later(is_listed_again):
    tier = StorageTier(4, 100)
    tier.record_bound(bound=100, num_resident=0)
    write(tier, range(40))
    tier.record_full(1)
    if is_listed_again:
        tier.record_bound(bound=100, num_resident=39)
    else:
        deleted = [key for n in range(40, 81) for key in write(tier, [n])]
        assert len(deleted) == 39  # As many as it held, once over.
    for number in range(100, 140):
        assert write(tier, [number]) == []
    assert tier.num_held_blocks >= 79
