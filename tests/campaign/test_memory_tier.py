"""A tier between the host and the store, attacked as the others are."""

import collections
import dataclasses
import random

import pytest

from jaxkv._util.settings import keys_of
from tests.campaign.memory_tier import MemoryConfig
from tests.campaign.paged import PagedEngine, new_history
from tests.campaign.storage import await_listing, busy_setup

STEPS = 200


def four_tiers(rng, folder):
    """Choose an engine of four tiers whose moves to and from memory fail."""

    class Faulty(MemoryConfig):
        fails = staticmethod(lambda: rng.random() < 0.2)

    setup = busy_setup(rng, str(folder), storage_blocks=4000, write="through")
    values = setup.config.to_dict() | {
        "enable_events": True,
        # Of the clock on the wall, which the worker has here: steps are faster.
        "storage_await_s": 0.05,
        "memory_blocks": 2 * setup.config.num_host_blocks,
    }
    return dataclasses.replace(setup, config=Faulty(**values))


def has_tried_everything(counts):
    both_ways = [
        counts[f"{name}: {way}"]
        for name in ("memory", "storage")
        for way in ("stored", "loaded")
    ]
    failures = counts["memory: dropped_failed"] + counts["memory: failed"]
    return all(both_ways) and failures > 0


def test_a_fourth_tier_changes_no_byte(tmp_path):
    rng, counts, history = random.Random(2), collections.Counter(), new_history()
    setup, last = four_tiers(rng, tmp_path), None
    # The second finds in the store what the first has written; how much that is depends
    # on the disk.
    for life in range(10):
        if life >= 2 and has_tried_everything(counts):
            break
        engine = PagedEngine(setup, rng, counts, history.append)
        if last is not None:
            engine.follow(last)
        await_listing(engine)
        try:
            engine.run(STEPS)
        except BaseException:
            print("\n".join(history))
            raise
        finally:
            engine.storage.close()
        for boundary in engine.scheduler.below:
            for name, num in vars(boundary.counts).items():
                counts[f"{boundary.name}: {name}"] += num
        last = engine
    assert [boundary.name for boundary in last.scheduler.below] == ["memory", "storage"]
    assert counts["block reads compared"] > 100
    assert has_tried_everything(counts), counts


def test_its_key_is_a_setting_like_any_other():
    assert "memory_blocks" in keys_of(MemoryConfig)
    with pytest.raises(ValueError, match="memory_blocks=0 must be a whole number"):
        MemoryConfig(num_host_blocks=4, memory_blocks=0)
