"""Faults that the offload scheduler once had, each with a test of its own."""

import types

import pytest

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.tiers.device import DeviceBlockPool
from tests.rigs.offload_rig import Rig

BLOCK_SIZE = 4
IDLE = SchedulerOutput({})


def make_keys(*path):
    return [repr(path[: i + 1]).encode().ljust(32, b".") for i in range(len(path))]


def make_request(name, *path):
    """A request of so many full blocks and one token more, none of them computed."""
    return types.SimpleNamespace(
        request_id=name,
        block_keys=make_keys(*path),
        num_tokens=len(path) * BLOCK_SIZE + 1,
        num_computed_tokens=0,
    )


def make_scheduler(num_device_blocks, **rules):
    pool = DeviceBlockPool(num_device_blocks)
    scheduler = OffloadScheduler(BLOCK_SIZE, 16, rules=OffloadRules(**rules))
    scheduler.bind_device_block_pool(pool)
    return scheduler, pool


def run_alone(scheduler, pool, *path):
    """Have a request computed, stored and over; its blocks are left on both tiers."""
    request = make_request("before", *path)
    scheduler.get_num_new_matched_tokens(request, 0)
    blocks = pool.allocate(len(path))
    scheduler.update_state_after_alloc(request, blocks, 0)
    request.num_computed_tokens = len(path) * BLOCK_SIZE
    pool.cache(blocks, request.block_keys)
    scheduler.request_finished(request)
    pool.free(blocks[::-1])
    event = scheduler.build_connector_meta(IDLE).store_event
    if event != NO_EVENT:
        report = ConnectorOutput(completed_store_events=(event,))
        scheduler.update_connector_output(report)
    return blocks


def test_a_part_of_an_offer_that_is_all_copies_is_reported_too():
    """The request waits for a report, as it was told to when it was offered a load."""
    scheduler, pool = make_scheduler(12)
    blocks = run_alone(scheduler, pool, 1, 2, 3)
    pool.evict([blocks[2]])
    request = make_request("one", 1, 2, 3)
    # The engine does not make use of what the device has: two copies, then a load.
    assert scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
    scheduler.update_state_after_alloc(request, pool.allocate(4), 8)
    meta = scheduler.build_connector_meta(IDLE)
    assert meta.copy_from_blocks == tuple(blocks[:2])
    assert meta.load_event_to_reqs == {meta.load_event: ("one",)}
    assert not meta.load_device_blocks
    report = ConnectorOutput(finished_recving=("one",))
    assert scheduler.update_connector_output(report) == report
    assert not scheduler.has_pending_loads()


def test_delaying_shared_loads_keeps_no_book_of_what_is_over():
    scheduler, pool = make_scheduler(12, delay_shared_loads=True)
    run_alone(scheduler, pool, 1, 2, 3)
    pool.free(pool.allocate(11))
    scheduler.get_num_new_matched_tokens(make_request("one", 1, 2, 3), 0)
    assert scheduler.in_transit.host_blocks_read == 3
    scheduler.request_finished(make_request("one", 1, 2, 3))
    assert scheduler.in_transit.host_blocks_read == 0


def test_an_offer_does_not_hold_what_it_takes_to_accept_it():
    """Eleven blocks: nine for the request, and seven that are to be copied to them."""
    scheduler, pool = make_scheduler(12)
    path = range(8)
    blocks = run_alone(scheduler, pool, *path)
    pool.evict([blocks[0]])
    request = make_request("one", *path)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (32, True)
    assert pool.num_free == 11
    table = pool.allocate(9)
    scheduler.update_state_after_alloc(request, table, 32)
    meta = scheduler.build_connector_meta(IDLE)
    assert meta.load_device_blocks == tuple(table[:8])
    assert not meta.copy_from_blocks


def test_lazy_stores_do_not_pass_over_what_a_load_copied():
    scheduler, pool = make_scheduler(12, mode="lazy", max_num_batched_tokens=8)
    blocks = pool.allocate(2)
    keys = make_keys(1, 2)
    pool.cache(blocks, keys)
    pool.free(blocks[::-1])
    pool.free(pool.allocate(9))  # the two are the next to go
    request = make_request("one", 1, 2)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (8, False)
    scheduler.update_state_after_alloc(request, pool.allocate(3), 8)
    meta = scheduler.build_connector_meta(IDLE)
    assert meta.copy_from_blocks == tuple(blocks)
    assert sorted(meta.store_device_blocks) == blocks


def test_lazy_stores_do_not_pass_over_what_an_offer_held():
    scheduler, pool = make_scheduler(12, mode="lazy", max_num_batched_tokens=8)
    blocks = pool.allocate(2)
    pool.cache(blocks, make_keys(1, 2))
    pool.free(blocks[::-1])
    pool.free(pool.allocate(9))
    request = make_request("one", 1, 2)
    scheduler.get_num_new_matched_tokens(request, 0)
    assert scheduler.build_connector_meta(IDLE).store_event == NO_EVENT
    scheduler.request_finished(request)  # which was never admitted
    meta = scheduler.build_connector_meta(IDLE)
    assert sorted(meta.store_device_blocks) == blocks


def test_the_tail_of_a_request_does_not_take_the_place_of_its_head():
    """At its end only the missing blocks were offered, and the others not protected."""
    pool = DeviceBlockPool(12)
    scheduler = OffloadScheduler(BLOCK_SIZE, 4)
    scheduler.bind_device_block_pool(pool)
    request = make_request("one", 1, 2, 3, 4)
    blocks = pool.allocate(5)
    scheduler.update_state_after_alloc(request, blocks, 0)
    request.num_computed_tokens = 2 * BLOCK_SIZE
    pool.cache(blocks[:2], request.block_keys[:2])
    step = SchedulerOutput({"one": 2 * BLOCK_SIZE})
    event = scheduler.build_connector_meta(step).store_event
    report = ConnectorOutput(completed_store_events=(event,))
    scheduler.update_connector_output(report)
    run_alone(scheduler, pool, 8, 9)  # the host is full, and these are the newest
    request.num_computed_tokens = 4 * BLOCK_SIZE
    pool.cache(blocks[2:4], request.block_keys[2:4])
    scheduler.request_finished(request)
    assert len(scheduler.build_connector_meta(IDLE).store_host_blocks) == 2
    pool.evict(blocks[:2])
    asks = make_request("two", 1, 2, 3)
    assert scheduler.get_num_new_matched_tokens(asks, 0) == (12, True)


def test_blocks_found_when_an_offer_was_declined_are_stored_if_computed_after_all():
    """They counted as offered, and were stored at the end of the request only."""
    scheduler, pool = make_scheduler(12)
    blocks = run_alone(scheduler, pool, 1, 2, 3)
    pool.evict([blocks[2]])
    request = make_request("one", 1, 2, 3)
    assert scheduler.get_num_new_matched_tokens(request, 8) == (4, True)
    scheduler.update_state_after_alloc(request, [], 0)
    for path in (range(10, 18), range(20, 28)):  # Both tiers evict all of it.
        run_alone(scheduler, pool, *path)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    table = pool.allocate(4)
    scheduler.update_state_after_alloc(request, table, 0)
    request.num_computed_tokens = 12
    pool.cache(table[:3], request.block_keys)
    meta = scheduler.build_connector_meta(SchedulerOutput({"one": 1}))
    assert meta.store_device_blocks == tuple(table[:3])


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_a_request_preempted_and_admitted_between_two_steps_gets_its_load(mode):
    """The step that named it as preempted dropped what it had taken since."""
    rig = Rig(mode=mode)
    rig.fill_host(8)
    rig.run(rig.request("a", 1, 2))
    rig.forget_device()
    rig.settle()
    request = rig.request("b", 1, 2)
    assert rig.admit(request) == 2 * BLOCK_SIZE
    rig.preempt("b")
    assert rig.admit(request) == 2 * BLOCK_SIZE
    assert rig.step(preempted=["b"]).load_event_to_reqs == {0: ("b",)}
    rig.load_arrives()
    rig.step(tokens={"b": 1})
    rig.finish("b")
    rig.check_nothing_leaked()


def test_a_request_that_a_step_preempts_gets_no_load():
    rig = Rig()
    rig.run(rig.request("a", 1, 2))
    rig.forget_device()
    request = rig.request("b", 1, 2)
    assert rig.admit(request) == 2 * BLOCK_SIZE
    rig.free(request)
    assert rig.step(preempted=["b"]).load_event == NO_EVENT
    rig.finish("b")
    rig.check_nothing_leaked()


def test_a_request_preempted_and_admitted_between_two_steps_is_stored():
    rig = Rig()
    request = rig.request("a", 1, 2)
    rig.admit(request)
    rig.preempt("a")
    rig.admit(request)
    rig.step(preempted=["a"], tokens={"a": request.num_tokens})
    rig.finish("a")
    rig.settle()
    assert len(rig.host) == 2
    rig.check_nothing_leaked()


def test_a_refused_offer_leaves_no_keys_behind():
    rig = Rig()
    stranger = rig.request("stranger", 1, 2)
    with pytest.raises(ValueError, match="num_external_tokens"):
        rig.scheduler.update_state_after_alloc(stranger, [], BLOCK_SIZE)
    assert not rig.scheduler._keys.by_request


def test_what_the_pool_does_not_know_under_its_key_is_not_stored():
    """Such as a block that the engine has not cached: what it holds is not certain."""
    scheduler, pool = make_scheduler(12)
    request = make_request("one", 1, 2)
    scheduler.get_num_new_matched_tokens(request, 0)
    blocks = pool.allocate(2)
    scheduler.update_state_after_alloc(request, blocks, 0)
    request.num_computed_tokens = 2 * BLOCK_SIZE
    pool.cache(blocks[:1], request.block_keys[:1])
    scheduler.request_finished(request)
    meta = scheduler.build_connector_meta(IDLE)
    assert meta.store_device_blocks == (blocks[0],)


def test_what_is_computed_after_a_failed_load_is_stored_again_at_once():
    scheduler, pool = make_scheduler(12)
    pool.evict(run_alone(scheduler, pool, 1, 2, 3))
    request = make_request("one", 1, 2, 3)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (12, True)
    blocks = pool.allocate(4)
    scheduler.update_state_after_alloc(request, blocks, 12)
    scheduler.build_connector_meta(IDLE)
    scheduler.update_connector_output(ConnectorOutput(failed_recving=("one",)))
    request.num_computed_tokens = 12
    pool.cache(blocks[:3], request.block_keys)
    meta = scheduler.build_connector_meta(SchedulerOutput({"one": 1}))
    assert meta.store_device_blocks == tuple(blocks[:3])
