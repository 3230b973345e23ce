"""The storage tier's index, and what the host says it would evict next.

The twin of the index is a dict in the order of use.
"""

import random
from collections import OrderedDict

import numpy as np
import pytest

from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.storage import STORAGE_MEDIUM, StorageTier
from jaxkv.types import NO_BLOCK

NUM_BLOCKS = 16


class Twin:
    """Plain Python: keys in the order of use, with their pins."""

    def __init__(self):
        self.pins = OrderedDict()

    def prepare(self, keys):
        """Keys that get a place, and those that leave; None if there is no room."""
        new = [key for key in dict.fromkeys(keys) if key not in self.pins]
        num_out = len(new) - (NUM_BLOCKS - len(self.pins))
        free = [k for k, pins in self.pins.items() if pins == 0 and k not in keys]
        if num_out > len(free):
            return None
        out = free[: max(num_out, 0)]
        for key in out:
            del self.pins[key]
        self.pins.update(dict.fromkeys(new, -1))  # Until it is written.
        return new, out

    def complete(self, keys, ok):
        for key in keys:
            if ok:
                self.pins[key] = 0
            else:
                del self.pins[key]

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.pins:
                self.pins.move_to_end(key)

    def find(self, keys):
        return [key in self.pins and self.pins[key] >= 0 for key in keys]


@pytest.mark.parametrize("seed", range(4))
def test_the_index_does_what_a_dict_in_the_order_of_use_does(seed):
    rng = random.Random(seed)
    tier, twin = StorageTier(4, NUM_BLOCKS, enable_events=True), Twin()
    names = [f"key {n}".encode().ljust(32) for n in range(40)]
    writing, reading, told = [], [], set()
    for _ in range(600):
        keys = rng.sample(names, rng.randint(1, 5))
        match rng.randrange(6):
            case 0 | 1:
                placed, expected = tier.place(keys), twin.prepare(keys)
                if expected is None:
                    assert placed is None
                    continue
                assert (placed.keys, list(placed.evicted_keys)) == expected
                writing += expected[0]
            case 2 if writing:
                num, ok = rng.randint(1, len(writing)), rng.random() < 0.8
                done, writing = writing[:num], writing[num:]
                tier.complete_store(done, ok)
                twin.complete(done, ok)
            case 3:
                tier.touch(keys)
                twin.touch(keys)
            case 4:
                there = [
                    k for k, is_in in zip(keys, twin.find(keys), strict=True) if is_in
                ]
                tier.pin(tier.find(there))
                reading.append((there, tier.find(there)))
                for key in there:
                    twin.pins[key] += 1
            case 5 if reading:
                there, places = reading.pop()
                tier.unpin(places)
                for key in there:
                    twin.pins[key] -= 1
            case _:
                gone = [k for k in keys if twin.pins.get(k) == 0]
                tier.discard(gone)
                for key in gone:
                    del twin.pins[key]
        assert (tier.find(names) != NO_BLOCK).tolist() == twin.find(names)
        assert tier.num_held_blocks == len(twin.pins)
        for event in tier.take_events():
            assert event.medium == STORAGE_MEDIUM
            told = told.difference(event.block_hashes)
            if not event.removed:
                told = told.union(event.block_hashes)
        assert told == {
            k for k, is_in in zip(names, twin.find(names), strict=True) if is_in
        }


def test_what_a_listing_finds_takes_free_places_only():
    tier = StorageTier(4, 4)
    names = [f"key {n}".encode().ljust(32) for n in range(8)]
    tier.place(names[:2])
    tier.add_found(names[1:7])
    # One is being written, two have found room.
    assert tier.contains(names).tolist() == [True] * 4 + [False] * 4
    assert (tier.find(names[:4]) != NO_BLOCK).tolist() == [False, False, True, True]
    assert tier.num_found == 2
    assert tier.note_bound(bound=9, num_there=7) == []
    assert tier.num_left_out == 3
    tier.add_found(names)
    assert tier.num_held_blocks == 4


@pytest.mark.parametrize("seed", range(3))
def test_the_host_evicts_what_it_says_it_would(seed):
    rng = random.Random(seed)
    host = BlockIndex(4, NUM_BLOCKS)
    names = [f"key {n}".encode().ljust(32) for n in range(60)]
    num_checked = 0
    for _ in range(400):
        keys = rng.sample(names, rng.randint(1, 6))
        found = host.find(keys)
        pinned = found[found != NO_BLOCK][:2]
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
    assert not host.tells_victims
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


def keys_of(numbers):
    return [f"key {n}".encode().ljust(32) for n in numbers]


def write(tier, numbers, ok=True):
    """Write blocks; return what to delete."""
    placed = tier.place(keys_of(numbers))
    gone = tier.room_for(placed.evicted_keys)
    tier.complete_store(placed.keys, ok)
    return gone


def test_a_full_store_loses_the_least_recently_used_block_for_each_that_had_no_room():
    tier = StorageTier(4, 100)
    assert tier.note_full(3) == []  # Whose blocks they are is not known yet.
    tier.note_bound(bound=100, num_there=0)
    assert tier.note_full(3) == []  # Others have filled it.
    tier.note_bound(bound=100, num_there=0)
    write(tier, range(40))
    tier.touch(keys_of([0]))
    assert tier.note_full(3) == keys_of([1, 2, 3])
    # From now on one goes for each that comes, and no more.
    assert write(tier, [40, 41]) == keys_of([4, 5])
    assert write(tier, [42], ok=False) == keys_of([6])
    assert write(tier, [43]) == []
    assert write(tier, [44]) == keys_of([7])
    assert tier.num_held_blocks == 40 - 3


@pytest.mark.parametrize("is_listed_again", [True, False])
def test_a_store_that_was_full_is_filled_again_later(is_listed_again):
    tier = StorageTier(4, 100)
    tier.note_bound(bound=100, num_there=0)
    write(tier, range(40))
    tier.note_full(1)
    if is_listed_again:
        tier.note_bound(bound=100, num_there=39)
    else:
        gone = [key for n in range(40, 81) for key in write(tier, [n])]
        assert len(gone) == 39  # As many as it held, once over.
    for number in range(100, 140):
        assert write(tier, [number]) == []
    assert tier.num_held_blocks >= 79
