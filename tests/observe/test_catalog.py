"""The catalogue: which blocks it keeps, how long, and its bound."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from jaxkv.keys.hashing import KeyChain, Namespace
from jaxkv.observe.catalog import BlockCatalog
from jaxkv.tiers.base import (
    DEVICE_MEDIUM,
    HOST_MEDIUM,
    OffloadingEvent,
)
from jaxkv.tiers.storage import STORAGE_MEDIUM
from tests.rigs.listening import removed, stored

SPACE = Namespace("model", "weights", "float32", "NHD", 2)


def test_blocks_on_a_tier_stay_known_however_many_are_recorded():
    catalog = BlockCatalog(max_spare=3)
    held = KeyChain(SPACE, record=catalog.record).extend(range(4))
    catalog.note(stored(*held))
    for n in range(20):
        KeyChain(SPACE, record=catalog.record).extend([n, n])
    assert len(catalog) == 2 + 3
    assert [catalog.find(key).key for key in held] == held
    assert catalog.num_held(HOST_MEDIUM) == 2
    assert catalog.num_held(DEVICE_MEDIUM) == 0


def test_a_block_removed_from_every_tier_becomes_the_newest_spare():
    catalog = BlockCatalog(max_spare=1)
    (key,) = KeyChain(SPACE, record=catalog.record).extend([1, 2])
    catalog.note(stored(key))
    catalog.note(stored(key, medium=DEVICE_MEDIUM))
    (other,) = KeyChain(SPACE, record=catalog.record).extend([3, 4])
    catalog.note(removed(key))
    assert catalog.find(key), "the device still has it"
    catalog.note(removed(key, medium=DEVICE_MEDIUM))
    assert catalog.find(key), "its request may compute it again"
    assert catalog.find(other) is None
    (another,) = KeyChain(SPACE, record=catalog.record).extend([5, 6])
    assert catalog.find(key) is None
    assert catalog.find(another)


def test_recording_a_block_again_makes_it_the_newest():
    catalog = BlockCatalog(max_spare=2)
    one, _, again, _ = [
        KeyChain(SPACE, record=catalog.record).extend(tokens)[0]
        for tokens in ([1, 1], [2, 2], [1, 1], [3, 3])
    ]
    assert one == again
    assert catalog.find(one)
    assert len(catalog) == 2
    with pytest.raises(ValueError, match="max_spare=-1 must be at least 0"):
        BlockCatalog(max_spare=-1)


def test_a_host_block_is_removed_with_the_parts_it_was_stored_with():
    """A host block has two device blocks, and the key of the second."""
    catalog = BlockCatalog()
    later = []
    keys = KeyChain(SPACE, record=later.append).extend(range(8))
    for block in later[:2]:
        catalog.record(block)
    events = [
        dataclasses.replace(event, block_size=4)
        for event in (
            stored(keys[1], keys[3]),
            removed(keys[3]),
            removed(keys[1], b"?"),
            stored(keys[3]),
        )
    ]
    assert catalog.parts(events[0]) == [keys[0], keys[1], keys[3]]
    catalog.note(events[0])
    for block in later:  # Now the second host block is known to have a third block.
        catalog.record(block)
    assert catalog.parts(events[1]) == [keys[3]]
    catalog.note(events[1])
    assert catalog.parts(events[2]) == [keys[0], keys[1], b"?"]
    catalog.note(events[2])
    assert catalog.num_held(HOST_MEDIUM) == 0
    assert catalog.parts(events[3]) == [keys[2], keys[3]]
    assert catalog.parts(stored(keys[3])) == [keys[3]]
    assert catalog.parts(dataclasses.replace(events[3], block_size=5)) == [keys[3]]
    assert catalog.parts(stored(keys[3], medium=DEVICE_MEDIUM)) == [keys[3]]


def test_the_catalogue_agrees_with_a_model_and_stays_bounded():
    rng = np.random.default_rng(0)
    catalog = BlockCatalog(max_spare=5)
    held = {HOST_MEDIUM: Counter(), DEVICE_MEDIUM: Counter()}
    known, recorded = {}, []
    for step in range(1500):
        medium = (HOST_MEDIUM, DEVICE_MEDIUM)[rng.integers(2)]
        copies = held[medium]
        match rng.integers(9):
            case 0 | 1 | 2:
                tokens = rng.integers(2, size=6)
                keys = KeyChain(SPACE, record=recorded.append).extend(tokens)
                for block in recorded:
                    catalog.record(block)
                    known[block.key] = block
                recorded.clear()
                if step % 3:
                    catalog.note(stored(*keys, medium=medium))
                    copies.update(keys)
            case 3:
                catalog.note(removed(medium=medium))
                copies.clear()
            case _ if copies:
                keys = [key for key in copies.elements() if rng.integers(2)]
                if keys:  # Without any it would be a tier that was cleared.
                    catalog.note(removed(*keys, medium=medium))
                copies.subtract(keys)
                held[medium] = +copies
        for medium, copies in held.items():
            assert catalog.held(medium) == copies
            for key in copies:
                assert catalog.find(key) == known[key]
    assert len(catalog) <= len(held[HOST_MEDIUM] | held[DEVICE_MEDIUM]) + 5
    assert any(held.values())


def test_the_parts_of_a_block_in_the_store_outlast_those_on_the_host():
    catalog = BlockCatalog()
    keys = KeyChain(SPACE, record=catalog.record).extend(range(4))
    both = [
        OffloadingEvent([keys[1]], 4, medium, removed=False)
        for medium in (HOST_MEDIUM, STORAGE_MEDIUM)
    ]
    for event in both:
        assert catalog.parts(event) == keys
        catalog.note(event)
    gone = [dataclasses.replace(event, removed=True) for event in both]
    catalog.note(gone[0])
    assert catalog.parts(gone[1]) == keys
    assert (catalog.num_held(HOST_MEDIUM), catalog.num_held(STORAGE_MEDIUM)) == (0, 2)
    catalog.note(OffloadingEvent([], 4, STORAGE_MEDIUM, removed=True))
    assert catalog.parts(gone[1]) == [keys[1]]
