"""A tier whose policy declines blocks: what is counted and left alone."""

import jax.numpy as jnp
import pytest

from jaxkv.policies import make_lru
from jaxkv.tiers.host import OffloadingManager

NUM_BLOCKS = 40


def one_off(manager, number, now_ms):
    """Serve a prompt of 20 blocks that never comes back; return how many it stored."""
    keys = [b"one-off %d %d" % (number, i) for i in range(20)]
    mark = manager.begin_request(keys, 320, now_ms)
    stored = manager.prepare_store(keys)
    manager.complete_store(stored.block_hashes_to_store)
    manager.finish_request(keys, mark, now_ms, 100)
    return len(stored.block_hashes_to_store)


def returning(manager, now_ms):
    """Serve a prompt that comes back; return how many of its blocks were found."""
    keys = [b"system %d" % i for i in range(20)]
    mark = manager.begin_request(keys, 320, now_ms)
    num_found = manager.lookup(keys)
    manager.touch(keys)
    manager.complete_store(manager.prepare_store(keys).block_hashes_to_store)
    manager.finish_request(keys, mark, now_ms, 100)
    return num_found


def test_one_off_prompts_do_not_evict_a_prompt_that_comes_back():
    found = {}
    for policy in ("lru", "hazard"):
        manager = OffloadingManager(16, NUM_BLOCKS, policy)
        found[policy] = num_stored = 0
        for step in range(400):
            now_ms = 20_000 * step
            if step % 4 == 0:
                found[policy] += returning(manager, now_ms) * (step > 200)
            elif step > 200:
                num_stored += one_off(manager, step, now_ms)
            else:
                one_off(manager, step, now_ms)
        if policy == "lru":
            assert (num_stored, manager.num_declined) == (20 * 150, 0)
        else:
            # Room for one of them is left, which they give to one another.
            assert num_stored <= 20 * 75
            assert manager.num_declined >= 20 * 75
    assert found["lru"] == 0
    assert found["hazard"] >= 20 * 45


def test_without_notifications_nothing_is_declined():
    manager = OffloadingManager(16, NUM_BLOCKS, "hazard")
    for number in range(100):
        keys = [b"%d %d" % (number, i) for i in range(20)]
        stored = manager.prepare_store(keys).block_hashes_to_store
        assert len(stored) == 20
        manager.complete_store(stored)
    assert manager.num_declined == 0


def make_declining(executor):
    """Make a full manager that declines every block."""
    if executor == "xla":
        lru = make_lru(NUM_BLOCKS)
        policy = lru._replace(native=None, admit=lambda *args: jnp.zeros_like(args[2]))
        manager = OffloadingManager(16, NUM_BLOCKS, policy)
        one_off(manager, 0, 0)
        one_off(manager, 1, 0)
        return manager
    manager = OffloadingManager(16, NUM_BLOCKS, "hazard")
    for step in range(400):
        returning(manager, 1000 * step)
        one_off(manager, step, 1000 * step)
    return manager


@pytest.mark.parametrize("executor", ["native", "xla"])
def test_a_block_fetched_from_a_store_is_not_declined(executor):
    """The request that waits for it would wait for nothing."""
    manager = make_declining(executor)
    keys = [b"fetched %d" % i for i in range(4)]
    assert not manager.place(keys).keys
    assert manager.num_declined >= 4
    before = manager.num_declined
    assert manager.has_room(keys)
    placed = manager.place(keys, filtered=False)
    assert list(placed.keys) == keys
    assert manager.num_declined == before
