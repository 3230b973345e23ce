"""The catalogue: which blocks it keeps, how long, and its bound."""

import dataclasses
from collections import Counter
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.keys.hashing import KeyChain, Namespace
from jaxkv.observe.catalog import BlockCatalog, join_extra_keys
from jaxkv.tiers.base import DEVICE_MEDIUM, HOST_MEDIUM, OffloadingEvent
from jaxkv.tiers.storage import STORAGE_MEDIUM
from tests.rigs.listening import removed, stored

SPACE = Namespace("model", "weights", "float32", "NHD", 2)


def test_the_catalogue_knows_held_blocks_and_the_newest_spare_ones():
    rng = np.random.default_rng(0)
    catalog = BlockCatalog(max_spare=5)
    held = {HOST_MEDIUM: Counter(), DEVICE_MEDIUM: Counter()}
    blocks, spare, seen = {}, {}, set()

    def release(key):
        if not any(key in copies for copies in held.values()):
            spare.pop(key, None)
            spare[key] = None
            if len(spare) > 5:
                oldest = next(iter(spare))
                del spare[oldest], blocks[oldest]

    for step in range(1500):
        medium = (HOST_MEDIUM, DEVICE_MEDIUM)[rng.integers(2)]
        copies = held[medium]
        match rng.integers(9):
            case 0 | 1 | 2:
                recorded = []
                tokens = rng.integers(2, size=6)
                keys = KeyChain(SPACE, record=recorded.append).extend(tokens)
                for block in recorded:
                    catalog.record(block)
                    blocks[block.key] = block
                    release(block.key)
                if step % 3:
                    catalog.note(stored(*keys, medium=medium))
                    copies.update(keys)
                    for key in keys:
                        spare.pop(key, None)
                seen.update(keys)
            case 3:
                keys = list(catalog.held(medium))
                catalog.note(removed(medium=medium))
                copies.clear()
                for key in keys:
                    release(key)
            case _ if copies:
                keys = [key for key in copies.elements() if rng.integers(2)]
                if keys:  # Without any it would be a tier that was cleared.
                    catalog.note(removed(*keys, medium=medium))
                for key in keys:
                    copies[key] -= 1
                    if not copies[key]:
                        del copies[key]
                        release(key)
        for medium, copies in held.items():
            assert catalog.held(medium) == copies
        assert {key: catalog.find(key) for key in seen if catalog.find(key)} == blocks
        assert len(catalog) == len(blocks)
    assert any(held.values())
    assert len(seen) > len(blocks)
    with pytest.raises(ValueError, match="max_spare=-1 must be at least 0"):
        BlockCatalog(max_spare=-1)


def test_a_block_of_several_is_known_if_all_its_device_blocks_are():
    """A block of the host or the store has two device blocks, and the second's key."""
    catalog, later = BlockCatalog(max_spare=0), []
    keys = KeyChain(SPACE, record=later.append).extend(range(6))
    event = OffloadingEvent(keys[1::2], 4, HOST_MEDIUM, removed=False)
    below = dataclasses.replace(event, medium=STORAGE_MEDIUM)
    assert catalog.blocks_of(keys[1], event) == ()
    catalog.note(stored(*keys[:2], medium=DEVICE_MEDIUM))
    catalog.record(later[1])
    assert catalog.blocks_of(keys[1], event) == ()
    catalog.record(later[0])
    for stored_event in (event, below):
        assert catalog.blocks_of(keys[1], stored_event) == (later[0], later[1])
        catalog.note(stored_event)
    assert catalog.blocks_of(keys[1], dataclasses.replace(event, block_size=4))
    # The other tiers keep the first device block, which the device has lost.
    catalog.note(removed(*keys[:2], medium=DEVICE_MEDIUM))
    assert catalog.find(keys[0]) is None
    assert catalog.blocks_of(keys[1], event) == (later[0], later[1])
    catalog.note(dataclasses.replace(event, removed=True))
    assert catalog.blocks_of(keys[1], event) == ()
    assert catalog.blocks_of(keys[1], below) == (later[0], later[1])
    catalog.note(OffloadingEvent([], 4, STORAGE_MEDIUM, removed=True))
    assert [len(catalog.held(e.medium)) for e in (event, below)] == [0, 0]
    assert len(catalog) == 0
    # A block of another number of tokens is not made of whole device blocks.
    catalog = BlockCatalog()
    for block in later:
        catalog.record(block)
    assert catalog.blocks_of(keys[1], dataclasses.replace(event, block_size=5)) == ()
    assert catalog.blocks_of(keys[1], stored(keys[1], medium=DEVICE_MEDIUM)) == (
        later[1],
    )


def test_extra_keys_of_older_vllms_are_joined_too():
    """A salt is a pair there, and its second part no offset."""
    pairs = ("cache_salt", "ab"), ("lora", "one")
    row = [SimpleNamespace(tokens=bytes(16), keys=keys) for keys in (pairs, None)]
    assert join_extra_keys(row, attrgetter("keys")) == pairs
    row = [SimpleNamespace(tokens=bytes(16), keys=(("ab", -1), "s")) for _ in range(2)]
    assert join_extra_keys(row, attrgetter("keys")) == (("ab", -1), "s", ("ab", 3))
