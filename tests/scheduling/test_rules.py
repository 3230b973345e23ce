"""The effect of each rule of the offload scheduler, and the rules that are refused."""

import itertools

import numpy as np
import pytest

from jaxkv import OffloadScheduler
from jaxkv.scheduling.protocol import NO_EVENT
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.types import NO_BLOCK
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    HYBRID,
    Rig,
    make_keys,
    make_rig,
    modes,
    on_host,
)
from tests.rigs.traffic import Traffic


def stored(meta):
    return len(meta.store_device_blocks)


def test_host_blocks_of_several_device_blocks():
    rig = make_rig(blocks_per_host_block=2)
    rig.run(rig.request("one", *range(5)))
    keys = make_keys(*range(4))
    assert on_host(rig) == {(keys[0], keys[1]), (keys[2], keys[3])}
    rig.pool.evict(rig.pool.find(make_keys(*range(5))[1:]))
    # The first block is on the device, and the last one is another.
    request = rig.request("two", *range(4), extra_tokens=0)
    assert rig.admit(request) == 2 * BLOCK_SIZE
    ids = request.block_ids
    meta = rig.step()
    assert meta.load_device_blocks == (NO_BLOCK, ids[1], ids[2], NO_BLOCK)
    assert len(meta.load_host_blocks) == 2
    rig.load_arrives()
    rig.step(two=1)
    rig.end()
    # Of a part of an offer too.
    rig.forget_device()
    request = rig.request("three", *range(5))
    assert rig.admit(request, take=3 * BLOCK_SIZE) == 3 * BLOCK_SIZE
    ids = request.block_ids
    assert rig.step().load_device_blocks == (*ids[:3], NO_BLOCK)
    rig.load_arrives()
    rig.step(three=2)
    rig.end()


def test_limits_on_the_stored_tokens_of_a_request():
    limit = "max_offload_tokens"
    for rules, of_request, num_stored in (
        ({}, None, 4),
        ({"prompt_only": True}, None, 2),
        ({limit: 3 * BLOCK_SIZE + 1}, None, 3),
        ({limit: BLOCK_SIZE, "prompt_only": True}, None, 1),
        ({limit: 3 * BLOCK_SIZE}, 2 * BLOCK_SIZE + 1, 2),
        ({limit: 3 * BLOCK_SIZE}, 0, 0),
    ):
        rig = make_rig(**rules)
        request = rig.request("one", 1, 2, 3, 4)
        request.num_prompt_tokens = 2 * BLOCK_SIZE + 1
        request.max_offload_tokens = of_request
        rig.run(request)
        assert on_host(rig) == set(make_keys(1, 2, 3, 4)[:num_stored]), rules
        assert rig.scheduler.stats.num_dropped_full == 0


@pytest.mark.parametrize(
    ("rules", "of_request", "is_blamed"),
    [({"prompt_only": True}, None, False), ({}, 0, False), ({}, None, True)],
    ids=str,
)
def test_an_engine_is_not_blamed_for_blocks_that_may_not_be_stored(
    caplog, rules, of_request, is_blamed
):
    rig = make_rig(**rules)
    for number in range(100):
        request = rig.request(f"request {number}", number)
        request.num_prompt_tokens, request.max_offload_tokens = 1, of_request
        rig.admit(request)
        request.num_computed_tokens = request.num_tokens  # But no step names it.
        rig.finish(request.request_id)
    assert ("no block was offered to the host" in caplog.text) == is_blamed


def test_a_request_is_offered_no_more_than_it_may_load():
    limits = (None, 4), (5 * BLOCK_SIZE, 4), (2 * BLOCK_SIZE + 1, 2), (0, 0)
    for groups, (limit, num) in itertools.product((BLOCK_SIZE, HYBRID), limits):
        rig = make_rig(groups=groups)
        rig.store(1, 2, 3, 4)
        request = rig.request("two", 1, 2, 3, 4)
        request.max_load_tokens = limit
        assert rig.query(request)[0] == num * BLOCK_SIZE, (groups, limit)
        explained = rig.scheduler.explain(request)
        assert explained.num_offered_tokens == num * BLOCK_SIZE, (groups, limit)
    # It counts beyond what the device has.
    rig = make_rig()
    rig.run(rig.request("one", 1, 2, 3, 4))
    request = rig.request("two", 1, 2, 3, 4)
    request.max_load_tokens = BLOCK_SIZE
    assert rig.query(request, 2 * BLOCK_SIZE)[0] == BLOCK_SIZE


def test_the_in_flight_limit_holds_and_loads_come_first():
    rig = make_rig(max_blocks_in_flight=3)
    rig.run(rig.request("old", 1, 2, 3, 4))
    rig.run(rig.request("older", 21, 22))
    assert len(rig.host) == 6
    rig.forget_device()
    rig.admit(rig.request("new", 11, 12, 13, 14, 15))
    rig.step(new=5)
    # The second finds no room.
    assert [stored(rig.step(tokens={"new": 1})) for _ in range(2)] == [3, 0]
    rig.admit(rig.request("two", 1, 2, 3, 4, 5))
    rig.admit(rig.request("three", 21, 22))
    # The first load is as large as all that is in flight and more; none overtakes it.
    assert rig.step().load_event == NO_EVENT
    rig.store_arrives()
    meta = rig.step()
    assert meta.load_event_to_reqs == {0: ("two",)}
    assert meta.store_event == NO_EVENT
    rig.load_arrives()
    meta = rig.step()
    assert meta.load_event_to_reqs == {1: ("three",)}
    assert stored(meta) == 1
    rig.load_arrives()
    assert stored(rig.step()) == 1
    rig.end()


def make_waiting(num_blocks, **rules):
    """An engine where a request of 9 blocks has some that wait to be stored."""
    rules = {"store_batch_blocks": 4, "store_max_wait_steps": 5} | rules
    rig = make_rig(**rules)
    rig.admit(rig.request("one", *range(9)))
    rig.step(one=num_blocks)
    assert rig.step(tokens={"one": 1}).store_event == NO_EVENT
    return rig


def test_blocks_wait_until_there_are_enough_to_store_together():
    rig = make_waiting(2)
    request = rig.requests["one"]
    assert [stored(rig.step(one=1)) for _ in range(2)] == [0, 0]
    meta = rig.step(tokens={"one": 1})
    assert meta.store_device_blocks == tuple(request.block_ids[:4])
    assert rig.scheduler.in_transit[:2] == (0, 4)
    rig.store_arrives()
    assert on_host(rig) == set(make_keys(*range(4)))
    # The next ones have all their time again, and no block waits longer.
    rig.step(one=1)
    sizes = [stored(rig.step(tokens={"one": 1})) for _ in range(6)]
    assert sizes == [0, 0, 0, 0, 2, 0]
    rig.end()


def test_a_request_that_is_left_out_of_a_step_is_stored_with_the_others():
    rig = make_waiting(2, device_blocks=40)
    rig.admit(rig.request("two", *range(10, 14)))
    assert stored(rig.step(two=2)) == 0
    assert stored(rig.step(tokens={"one": 0, "two": 1})) == 4
    rig.end()


def test_blocks_that_are_loaded_count_towards_a_batch():
    rig = make_rig(device_blocks=40, store_batch_blocks=4, store_max_wait_steps=5)
    rig.store(*range(20, 25))
    rig.admit(rig.request("one", *range(9)))
    rig.step(one=1)
    assert stored(rig.step(tokens={"one": 1})) == 0
    assert rig.admit(rig.request("again", *range(20, 25))) == 5 * BLOCK_SIZE
    assert stored(rig.step(tokens={"one": 1})) == 1
    rig.load_arrives()
    rig.end()


def test_blocks_wait_no_longer_where_few_are_free_or_a_request_ends_or_a_step_idles():
    rig = make_waiting(2, device_blocks=40)
    blocks = rig.pool.allocate(rig.pool.num_free - 3)
    assert stored(rig.step(tokens={"one": 1})) >= 2
    rig.pool.free(blocks)
    rig.end()
    rig = make_waiting(2, device_blocks=40)
    rig.admit(rig.request("two", 11))
    assert stored(rig.step(two=1)) == 0
    rig.finish("two")
    assert stored(rig.step(tokens={"one": 1})) >= 2
    rig.end()
    rig = make_waiting(2)
    assert stored(rig.step()) == 2, "a step without a model"
    rig.end()
    rig = make_waiting(2, flush_on_preemption=True)
    rig.admit(rig.request("two", 11))
    rig.preempt("two")
    meta = rig.step(["two"], tokens={"one": 1})
    assert meta.need_flush
    assert stored(meta) == 2
    rig.end()


def test_the_device_evicts_nothing_that_lazy_stores_have_not_looked_at():
    rig = Rig(
        mode="lazy",
        device_blocks=40,
        host_blocks=200,
        max_num_batched_tokens=3 * BLOCK_SIZE,
        store_batch_blocks=5,
    )
    sizes = []
    for number in range(30):
        name = f"r{number}"
        rig.admit(rig.request(name, *range(3 * number, 3 * number + 3)))
        sizes.append(stored(rig.step(**{name: 3})))
        while rig.stores:
            rig.store_arrives()
        rig.finish(name)
    paths = [range(3 * number, 3 * number + 3) for number in range(30)]
    keys = [key for path in paths for key in make_keys(*path)]
    on_device = rig.pool.find(keys) != NO_BLOCK
    assert set(itertools.compress(keys, ~on_device)) <= on_host(rig)
    assert np.count_nonzero(~on_device) > 40
    assert sizes.count(0) > 10
    assert max(sizes) > 5
    rig.end()


def test_a_batch_has_32_mib_of_blocks_unless_another_size_is_given():
    def batch(**rules):
        return OffloadRules(**rules).store_batch

    assert batch() == 0  # It is not known what a block has.
    assert batch(block_bytes=2 << 20) == 16
    assert batch(block_bytes=1 << 10) == 64
    assert batch(block_bytes=20 << 20) == 0
    assert batch(block_bytes=2 << 20, store_batch_blocks=3) == 3
    assert batch(block_bytes=2 << 20, store_batch_blocks=0) == 0


def test_stores_pause_while_nothing_stored_is_asked_for(caplog):
    caplog.set_level("INFO", logger="jaxkv.scheduling.stores")
    rig = make_rig(host_blocks=8, pause_unused_stores=True)
    scheduler = rig.scheduler

    def run(*path):
        before = scheduler.stats.num_stored
        rig.store(*path)
        return scheduler.stats.num_stored - before

    assert scheduler.is_storing_paused is False
    # Twice the host's blocks, none of which is asked for.
    assert [run(n, n + 100) for n in range(8)] == [2] * 8
    assert scheduler.stats.num_paused == 0
    numbers = range(1000, 1060)
    sizes = {n: run(n, n + 100, n + 200) for n in numbers}
    assert scheduler.is_storing_paused
    assert set(sizes.values()) == {0, 3}
    sampled = [n for n in numbers if sizes[n]]
    assert 1 <= len(sampled) <= 9
    assert scheduler.stats.num_paused == 3 * (len(numbers) - len(sampled))
    left_out = next(n for n in numbers if not sizes[n])
    path = left_out, left_out + 100, left_out + 200
    # The first that finds something ends it for those who come after it.
    n = sampled[-1]
    assert run(n, n + 100, n + 200) == 0
    assert scheduler.stats.num_host_hit_tokens
    assert run(*path) == 3
    assert not scheduler.is_storing_paused
    # It takes as many again to pause once more.
    assert [run(n, n + 100, n + 200) for n in range(2000, 2004)] == [3] * 4
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "16 blocks were stored without a hit on the host",
        "all requests are stored again after a hit on the host",
    ]
    rig.end()


def make_paused(**rules):
    """An engine that has stored twice its host's blocks, and pauses."""
    rig = make_rig(host_blocks=8, device_blocks=40, pause_unused_stores=True, **rules)
    for n in range(9):
        rig.store(n, n + 100)
    return rig


def test_device_blocks_are_counted_before_stores_pause():
    rules = {"blocks_per_host_block": 2, "pause_unused_stores": True}
    rig = make_rig(host_blocks=8, device_blocks=40, **rules)
    for n in range(9):
        before = rig.scheduler.stats.num_stored
        rig.store(*range(10 * n, 10 * n + 4))
        assert rig.scheduler.stats.num_stored - before == 4 * (n < 8)
    assert rig.scheduler.is_storing_paused


def test_a_paused_store_is_not_caught_up_after_a_reset():
    rig = make_paused()
    rig.admit(rig.request("left out", 1000, 1100))
    rig.step(**{"left out": 2})
    assert rig.scheduler.is_storing_paused
    assert rig.scheduler.reset()
    assert rig.step(tokens={"left out": 1}).store_event == NO_EVENT
    rig.end()


def test_a_request_that_ends_after_a_pause_is_stored():
    rig = make_paused()
    names = [f"waits {n}" for n in range(1000, 1006)]
    for n, name in enumerate(names, 1000):
        rig.admit(rig.request(name, n, n + 100))
        rig.step(**{name: 2})
    assert rig.scheduler.is_storing_paused
    before = rig.scheduler.stats.num_stored
    rig.run(rig.request("finds something", 7, 107))
    rig.run(rig.request("ends it", 7777))
    assert not rig.scheduler.is_storing_paused
    for name in names:
        rig.finish(name)
        rig.settle()
    assert rig.scheduler.stats.num_stored == before + 1 + 2 * len(names)
    rig.end()


@modes
def test_the_in_flight_limit_holds_for_random_requests(mode):
    limits = {"max_blocks_in_flight": 3, "max_num_batched_tokens": 64}
    traffic = Traffic(0, mode=mode, **limits)
    rig, max_in_flight = traffic.rig, 0
    for _ in range(600):
        traffic.act()
        loads = [len(copies) for _, copies in rig.loads]
        stores = [len(copies) for _, copies in rig.stores]
        assert sum(loads + stores) <= 3 or (len(loads) == 1 and not stores)
        max_in_flight = max(max_in_flight, sum(loads + stores))
    assert max_in_flight >= 3
    rig.settle()
    rig.end()


def test_the_gate_declines_slow_loads_and_tries_every_32nd():
    rig = make_rig(skip_slow_loads=True, block_bytes=1000)
    rig.store(1, 2)
    request = rig.request("two", 1, 2, 3)
    # Without rates everything is loaded; and so with one of them.
    for rates in ((0, 0), (1e6, 0), (0, 1e6), (2000.0, 8.0)):  # one second either way
        rig.scheduler.set_rates(*rates)
        assert rig.offer(request) == (8, True)
    rig.scheduler.set_rates(2000.0, 8.1)
    offers = [rig.offer(request) for _ in range(64)]
    assert [n for n, offer in enumerate(offers) if offer == (8, True)] == [31, 63]
    assert offers.count((0, False)) == 62 == rig.scheduler.stats.num_loads_declined
    # What is on its way already comes first.
    rig.scheduler.set_rates(2000.0, 8.0)
    rig.admit(rig.request("three", 1, 2, 4))
    rig.step()
    assert rig.offer(request) == (0, False)
    rig.load_arrives()
    rig.finish("three")
    rig.scheduler.request_finished(request)
    rig.end()


def test_rules_that_do_not_go_together_are_refused():
    for groups, rules, why in (
        (HYBRID, {"blocks_per_host_block": 2}, "single group of full-attention"),
        (SlidingWindow(4, 8), {"blocks_per_host_block": 2}, "full-attention layers"),
        (4, {"blocks_per_host_block": 2, "mode": "lazy"}, "exclude one another"),
        (4, {"prompt_only": True, "mode": "lazy"}, "prompt_only=True and mode"),
        (4, {"max_offload_tokens": 8, "mode": "lazy"}, "max_offload_tokens=8 and"),
        (4, {"max_offload_tokens": 3}, "max_offload_tokens=3 must be at least 4"),
        (
            4,
            {"max_offload_tokens": 7, "blocks_per_host_block": 2},
            "max_offload_tokens=7 must be at least 8",
        ),
        (
            (FullAttention(4), SlidingWindow(6, 12)),
            {"max_offload_tokens": 11},
            "max_offload_tokens=11 must be at least 12, the tokens of the shortest",
        ),
    ):
        with pytest.raises(ValueError, match=why):
            OffloadScheduler(groups, 8, rules=OffloadRules(**rules))


def test_wrong_rules_are_refused():
    for rules, why in (
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"blocks_per_host_block": 0}, "blocks_per_host_block=0"),
        ({"max_offload_tokens": 0}, "max_offload_tokens=0"),
        ({"store_threshold": None}, "store_threshold=None must be a whole number"),
        ({"max_unseen_blocks": 4.0}, "max_unseen_blocks=4.0 must be a whole number"),
        ({"max_blocks_in_flight": 0}, "max_blocks_in_flight=0"),
        ({"store_batch_blocks": -1}, "store_batch_blocks=-1"),
        ({"store_max_wait_steps": 0}, "store_max_wait_steps=0"),
        ({"block_bytes": -1}, "block_bytes=-1"),
        ({"skip_slow_loads": True}, "needs block_bytes"),
        ({"retention": 1}, "retention=1 must be true or false"),
    ):
        with pytest.raises(ValueError, match=why):
            OffloadRules(**rules)
    assert OffloadRules(max_unseen_blocks=np.int32(2)).max_unseen_blocks == 2
