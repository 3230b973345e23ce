"""A tier whose policy declines blocks: what is counted and left alone."""

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
