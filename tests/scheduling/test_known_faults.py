"""Faults of vLLM 0.19.1's offload scheduler, and of jaxkv's own, that are no more."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.types import NO_BLOCK
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    HYBRID,
    NUM_BLOCKS,
    Rig,
    make_keys,
    make_rig,
    on_host,
)

# Eager stores.


def test_a_block_in_flight_is_not_stored_again_and_equal_ones_of_a_step_once():
    rig = Rig()
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    rig.step(tokens={"one": 1})
    rig.admit(rig.request("two", 1, 2))  # which has the same device blocks
    for _ in range(2):
        assert rig.step(tokens={"two": 1}).store_event == NO_EVENT
    rig.end()
    for name in ("three", "four"):
        rig.admit(rig.request(name, 7, 8))
    rig.step(three=2, four=2)
    meta = rig.step(tokens={"three": 1, "four": 1})
    assert len(meta.store_device_blocks) == 2
    rig.end()


def test_the_last_blocks_of_a_request_are_stored_and_what_it_had_when_preempted():
    for is_preempted in (False, True):
        rig = Rig()
        rig.admit(rig.request("one", 1, 2, 3))
        rig.step(one=3)
        (rig.preempt if is_preempted else rig.finish)("one")
        rig.step(preempted=("one",) * is_preempted)
        rig.settle()
        rig.forget_device()
        assert rig.hit(1, 2, 3, 4) == 3, is_preempted


def test_a_block_that_the_host_evicts_mid_request_is_stored_again():
    rig = Rig()
    rig.admit(rig.request("long", 1, 2, 3))
    rig.step(long=2)
    rig.step(tokens={"long": 1})
    rig.store_arrives()
    rig.fill_host(20)
    assert rig.hit(1, 2, 3) == 2  # on the device, for the request still has them
    assert not set(make_keys(1, 2)) & on_host(rig)
    rig.step(long=1)
    rig.step(tokens={"long": 1})
    rig.end()
    rig.forget_device()
    assert rig.hit(1, 2, 3, 4) == 3


def test_a_request_that_resumes_is_stored_from_its_first_block_on():
    rig = Rig()
    request = rig.request("one", 1, 2, 3)
    rig.admit(request)
    rig.step(one=2)
    rig.step(tokens={"one": 1})
    rig.preempt("one", silently=True)
    rig.step(preempted=("one",))
    rig.store_arrives(ok=False)
    rig.forget_device()
    assert rig.admit(request) == 0
    rig.step(one=3)
    meta = rig.step(tokens={"one": 1})
    assert meta.store_device_blocks == tuple(request.block_ids[:3])
    rig.end()


def test_a_block_that_gets_its_key_after_it_was_offered_is_stored_at_the_end():
    rig = Rig()
    request = rig.request("one", 1, 2)
    rig.admit(request)
    rig.step(one=2)
    rig.pool.evict(request.block_ids)
    assert rig.step(tokens={"one": 1}).store_event == NO_EVENT
    # Now both have their keys; one of them loses it again.
    first, second, _ = request.block_ids
    rig.pool.evict([second])
    rig.finish("one")
    # What the pool does not know under its key is not certain, and not stored.
    assert rig.step().store_device_blocks == (first,)


def test_a_block_that_may_be_stored_after_it_was_offered_is_stored_at_the_end():
    rig = Rig(store_threshold=2)
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    assert rig.step(tokens={"one": 1}).store_event == NO_EVENT
    rig.admit(rig.request("two", 1, 2))
    rig.finish("one")
    assert len(rig.step().store_device_blocks) == 2


def test_a_store_that_ends_after_its_request_has_the_device_evict_the_tail_first():
    rig = Rig()
    request = rig.request("one", 1, 2, 3, extra_tokens=2)
    rig.admit(request)
    rig.step(one=3)
    rig.step(tokens={"one": 1})
    rig.finish("one")
    rig.store_arrives()
    rig.pool.allocate(NUM_BLOCKS - 1 - 3 + 1)  # all that hold nothing, and one more
    assert len(rig.pool.find_prefix(request.block_keys)) == 2


def test_blocks_found_when_an_offer_was_declined_are_stored_if_computed_after_all():
    """They counted as offered, and were stored at the end of the request only."""
    rig = Rig(host_blocks=4)
    rig.run(rig.request("before", 1, 2, 3))
    rig.pool.evict(rig.pool.find(make_keys(1, 2, 3)[2:]))
    request = rig.request("one", 1, 2, 3)
    assert rig.query(request, 8) == (4, True)
    rig.take(request, [], 0)
    rig.store(*range(10, 14))  # Both tiers evict all of it.
    assert rig.admit(request) == 0
    rig.step(one=3)
    meta = rig.step(tokens={"one": 1})
    assert meta.store_device_blocks == tuple(request.block_ids[:3])


def test_a_request_that_asks_often_counts_as_one_use():
    """vLLM's other connector counted each question as a use, and so did a threshold."""
    states = []
    for num_questions in (1, 4):
        rig = Rig(store_threshold=2)
        rig.store(1, 2)
        assert not rig.host
        rig.store(1, 2, name="again")
        request = rig.request("two", 1, 2, 3)
        for _ in range(num_questions):
            rig.offer(request)
        rig.admit(request)
        if num_questions > 1:
            rig.preempt("two")
            rig.step(preempted=("two",))
            rig.admit(request)
        states.append(rig.host_tier.snapshot())
        # Nor has its last block, which no other request has, met the threshold.
        rig.step()
        rig.load_arrives()
        rig.step(two=1)
        rig.end()
        assert on_host(rig) == set(make_keys(1, 2))
    assert states[0] == states[1]


# Lazy stores.


def test_lazy_stores_offer_again_what_the_host_has_lost():
    for way in ("evicted", "forgotten", "new pool"):
        rig = Rig(mode="lazy", device_blocks=6, max_num_batched_tokens=4 * BLOCK_SIZE)
        rig.run(rig.request("one", 1, 2))
        rig.settle()
        keys, host = make_keys(1, 2), rig.host_tier
        assert host.contains(keys).all()
        rig.step()
        assert (rig.pool.next_victims(9).copies != NO_BLOCK).all()
        if way == "evicted":
            new_keys = make_keys(*range(3, NUM_BLOCKS + 3))
            host.place(new_keys)
            host.complete_store(new_keys)
        elif way == "forgotten":
            host.discard(keys)
        else:
            rig.scheduler = OffloadScheduler(rig.groups, 4, rules=rig.rules)
            rig.scheduler.bind_device_block_pool(rig.pool)
        assert not rig.host_tier.contains(keys).any()
        rig.pool.free(rig.pool.allocate(1))  # So that it looks again.
        assert len(rig.step().store_device_blocks) == 2, way


def test_lazy_stores_evict_nothing_that_the_device_is_about_to_evict():
    rig = make_rig("lazy", host_blocks=2)
    for name, *path in (("one", 1, 2), ("two", 3, 4)):
        rig.run(rig.request(name, *path))
        rig.settle()
    assert rig.scheduler.stats.num_evicted == 0
    assert rig.hit(1, 2, 5) == 2


# Loads.


@pytest.mark.parametrize("groups", [BLOCK_SIZE, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("has_gap", [False, True])
def test_a_failed_load_is_computed_again_on_both_tiers(groups, has_gap):
    rig = Rig(groups=groups)
    rig.run(rig.request("one", 1, 2, 3))
    if has_gap:
        evicted = [keys[1] for keys in rig.request("?", 1, 2).block_keys_by_group]
        rig.pool.evict(rig.pool.find(evicted))
    else:
        rig.forget_device()
    num_held = rig.scheduler.num_host_blocks_held
    request = rig.request("two", 1, 2, 3, 4)
    local, _ = rig.find(request)
    assert local == BLOCK_SIZE * has_gap
    assert rig.admit(request) == 3 * BLOCK_SIZE - local
    meta = rig.step()
    num_loaded = len(meta.load_host_blocks)
    assert num_loaded > 0
    rig.load_arrives(ok=False)
    assert request.num_computed_tokens == local
    # What could not be read is forgotten, whatever else was held stays.
    assert rig.scheduler.num_host_blocks_held == num_held - num_loaded
    targets = set(meta.load_device_blocks)
    for keys in request.block_keys_by_group:
        assert not targets & set(rig.pool.find(keys).tolist())
    rig.step(two=4)
    # They are stored again at once, not when the request ends.
    assert targets <= set(rig.step(tokens={"two": 1}).store_device_blocks)
    rig.end()
    rig.forget_device()
    assert rig.hit(1, 2, 3, 4, 5) == 4


def test_a_request_that_a_step_preempts_gets_no_load():
    rig = Rig()
    rig.store(1, 2)
    request = rig.request("b", 1, 2)
    assert rig.admit(request) == 2 * BLOCK_SIZE
    rig.free(request)
    assert rig.step(preempted=["b"]).load_event == NO_EVENT
    rig.end()


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_flush_leaves_no_copy_to_wait_for_its_turn(mode):
    values = np.arange(2 * NUM_BLOCKS, dtype=np.int32).reshape(NUM_BLOCKS, 2)
    pool = jnp.array(values)
    engine = TransferEngine(
        pool, NUM_BLOCKS, mode=mode, extent_bytes=16, staging_bytes=16
    )
    worker = OffloadWorker(engine)
    rig = Rig(flush_on_preemption=True)
    rig.admit(rig.request("one", *range(1, 9)))
    rig.step(one=8)
    pool = worker.start(rig.step(tokens={"one": 1}), pool)
    assert engine.num_waiting
    rig.preempt("one")
    meta = rig.step(preempted=("one",))
    assert meta.need_flush
    pool = worker.start(meta, pool)
    assert engine.num_waiting == engine.num_in_flight == 0
    assert worker.poll() == ConnectorOutput(completed_store_events=(0,))
    assert not rig.step().need_flush


def test_an_offer_that_waits_for_room_holds_up_nobody_who_shares_its_blocks():
    rig = Rig(delay_shared_loads=True)
    rig.store(1, 2)
    waiting, sharing = rig.request("two", 1, 2, 3), rig.request("three", 1, 2, 4)
    assert rig.offer(waiting) == (2 * BLOCK_SIZE, True)
    assert rig.scheduler.explain(sharing).deferral is None
    assert rig.admit(sharing) == 2 * BLOCK_SIZE
    assert rig.scheduler.explain(waiting).deferral == "shared"
    assert rig.offer(waiting) == (None, False)
    rig.step()
    rig.load_arrives()
    rig.finish("three")
    rig.scheduler.request_finished(waiting)
    rig.end()


def test_a_sliding_window_has_a_block_at_several_positions():
    """vLLM stored and released it once per place in the table."""
    rig = Rig(groups=HYBRID)
    request = rig.request("one", 1, 2, 3, 4)
    rig.admit(request)
    full, window = request.tables
    rig.step(one=2)
    stored = rig.step(tokens={"one": 1}).store_device_blocks
    assert sorted(stored) == sorted(full[:2] + window[:2])
    rig.store_arrives()
    # What has left the window takes what comes into it.
    rig.pool.free([window[3], window[2]])
    rig.pool.evict(window[:2])
    window[2:4] = window[:2]
    rig.take(request, request.tables, 0)
    rig.step(tokens={"one": 2 * BLOCK_SIZE - 1})
    stored = rig.step(tokens={"one": 1}).store_device_blocks
    assert sorted(stored) == sorted(full[2:4] + window[2:4])
    rig.requests.pop("one")
    rig.scheduler.request_finished(request)
    rig.pool.free([*full, *window[:2], *window[4:]])
    rig.settle()
    rig.forget_device()
    assert rig.admit(rig.request("again", 1, 2, 3, 4)) == 4 * BLOCK_SIZE
    rig.step()
    rig.load_arrives()
    rig.end()


@pytest.mark.parametrize("keep_heads", [False, True])
def test_blocks_of_the_host_without_their_heads_are_counted(keep_heads):
    """They were stored, and no counter showed that none of them could be found."""
    rig = make_rig(host_blocks=6, keep_heads=keep_heads)
    request = rig.request("long", *range(9))
    rig.admit(request)
    for _ in range(5):
        rig.step(long=2)
        while rig.stores:
            rig.store_arrives()
    rig.finish("long")
    rig.settle()
    rig.forget_device()
    again = rig.request("again", *range(9))
    is_held = [rig.host_tier.find([key])[0] != NO_BLOCK for key in again.block_keys]
    assert any(is_held)
    num_found = is_held.index(False)
    rig.run(again)
    assert rig.scheduler.stats.num_headless == sum(is_held[num_found:])
    assert (sum(is_held[num_found:]) == 0) == keep_heads
