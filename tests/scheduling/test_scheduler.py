"""The offload scheduler's contract, one call at a time."""

import numpy as np
import pytest

from jaxkv.scheduling.protocol import NO_EVENT, SchedulerOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Rig,
    make_keys,
    make_request,
)


def make_rig_with_five_free_blocks():
    rig = Rig()
    rig.pool.allocate(rig.pool.num_free - 5)
    return rig


def test_a_second_turn_is_loaded_from_the_host():
    rig = Rig()
    rig.run(make_request("one", 1, 2, 3))
    rig.forget_device()
    again = make_request("two", 1, 2, 3, 4)
    assert rig.admit(again) == 3 * BLOCK_SIZE
    meta = rig.step()
    assert meta.load_event == 0
    assert meta.load_device_blocks == tuple(again.block_ids[:3])
    assert meta.load_event_to_reqs == {0: ("two",)}
    rig.load_arrives()
    assert again.num_computed_tokens == 3 * BLOCK_SIZE
    rig.step(two=1)
    rig.finish("two")
    rig.check_nothing_leaked()


def test_the_last_token_is_always_computed():
    rig = Rig()
    rig.run(make_request("one", 1, 2, 3))
    rig.forget_device()
    whole_blocks = make_request("two", 1, 2, 3, extra_tokens=0)
    assert rig.admit(whole_blocks) == 2 * BLOCK_SIZE


def test_with_a_threshold_only_what_came_back_is_stored():
    rig = Rig(store_threshold=2)
    for name, *path in (("one", 1, 2, 3), ("two", 1, 2, 4)):
        request = make_request(name, *path)
        rig.run(request)
        rig.forget_device()
    assert {key for (key,) in rig.host.values()} == set(make_keys(1, 2))
    assert rig.admit(make_request("three", 1, 2, 3, 5)) == 2 * BLOCK_SIZE


def test_blocks_are_stored_in_the_step_after_they_were_computed():
    rig = Rig()
    rig.admit(make_request("one", 1, 2, 3))
    assert rig.step(one=2).store_event == NO_EVENT
    meta = rig.step(one=1)
    assert len(meta.store_device_blocks) == 2
    assert rig.scheduler.has_pending_stores()


def test_the_last_full_blocks_of_a_finishing_request_are_stored():
    rig = Rig()
    rig.admit(make_request("one", 1, 2, 3))
    rig.step(one=3)
    rig.finish("one")  # in the step in which they were computed
    assert len(rig.step().store_device_blocks) == 3
    rig.store_arrives()
    rig.forget_device()
    assert rig.admit(make_request("two", 1, 2, 3, 4)) == 3 * BLOCK_SIZE


def test_a_block_is_findable_only_after_its_bytes_arrived():
    rig = Rig()
    rig.admit(make_request("one", 1, 2))
    rig.step(one=2)
    rig.finish("one")
    rig.step()
    rig.forget_device()  # but for what is being stored
    query = rig.scheduler.get_num_new_matched_tokens
    assert query(make_request("early", 1, 2, 3), 2 * BLOCK_SIZE) == (0, False)
    rig.store_arrives()
    rig.forget_device()
    assert query(make_request("late", 1, 2, 3), 0) == (2 * BLOCK_SIZE, True)


def test_blocks_in_flight_are_not_stored_twice():
    rig = Rig()
    rig.admit(make_request("one", 1, 2))
    rig.admit(make_request("two", 1, 2))  # at the same time, so computed twice
    rig.step(one=2, two=2)
    meta = rig.step(one=0, two=0)
    assert meta.store_event == NO_EVENT  # nothing scheduled, nothing offered
    rig.finish("one")
    rig.finish("two")
    assert len(rig.step().store_device_blocks) == 2
    rig.check_nothing_leaked()


def test_blocks_being_stored_are_not_reused_on_the_device():
    rig = make_rig_with_five_free_blocks()
    request = make_request("one", 1, 2)
    rig.admit(request)
    rig.step(one=2)
    stored = request.block_ids[:2]
    rig.finish("one")
    rig.step()
    assert rig.pool.num_free == 3
    assert not set(rig.pool.allocate(3)) & set(stored)
    rig.store_arrives()
    assert rig.pool.num_free == 2


def test_a_failed_store_is_not_findable():
    rig = Rig()
    rig.admit(make_request("one", 1, 2))
    rig.step(one=2)
    rig.finish("one")
    rig.step()
    rig.store_arrives(ok=False)
    rig.forget_device()
    assert rig.admit(make_request("two", 1, 2, 3)) == 0
    rig.step(two=3)
    rig.finish("two")
    rig.check_nothing_leaked()


def test_a_failed_load_is_recomputed():
    rig = Rig()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    request = make_request("two", 1, 2, 3)
    rig.admit(request)
    rig.step()
    rig.load_arrives(ok=False)
    assert request.num_computed_tokens == 0
    rig.step(two=3)
    rig.finish("two")
    rig.check_nothing_leaked()


def test_what_was_offered_stays_until_it_is_loaded():
    """vLLM 0.19.1 could evict a hit between the query and the allocation."""
    rig = Rig(host_blocks=2)
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    waiting = make_request("two", 1, 2, 3)
    assert rig.scheduler.get_num_new_matched_tokens(waiting, 0) == (8, True)
    rig.run(make_request("other", 7, 8))  # finds no room on the host
    assert rig.scheduler.stats.num_store_refusals > 0
    assert rig.admit(waiting) == 2 * BLOCK_SIZE
    rig.step()
    rig.load_arrives()  # which checks what was in the blocks


def test_part_of_an_offer_can_be_taken():
    rig = Rig()
    rig.run(make_request("one", 1, 2, 3))
    rig.forget_device()
    for take in (0, 1, 2):
        name, num_tokens = f"take-{take}", take * BLOCK_SIZE
        request = make_request(name, 1, 2, 3, 4)
        assert rig.admit(request, take=num_tokens) == num_tokens
        assert len(rig.step().load_device_blocks) == take
        if take:
            rig.load_arrives()
        rig.finish(name)
        rig.forget_device()
    rig.check_nothing_leaked()


def test_storing_a_block_evicts_tails_before_heads():
    """vLLM 0.19.1 evicted block 0 of a prefix first, and lost all of it."""
    rig = Rig(host_blocks=4)
    rig.run(make_request("one", 1, 2, 3, 4))
    rig.run(make_request("other", 9))
    rig.forget_device()
    assert rig.admit(make_request("two", 1, 2, 3, 4, 5)) == 3 * BLOCK_SIZE


def test_device_blocks_are_given_up_tail_first_after_a_store():
    rig = make_rig_with_five_free_blocks()
    request = make_request("one", 1, 2, 3, extra_tokens=0)
    rig.admit(request)
    rig.step(one=3)
    head = request.block_ids[:2]
    rig.finish("one")
    rig.settle()
    rig.pool.allocate(3)  # the two fresh ones and one that is cached
    assert rig.pool.find_prefix(request.block_keys) == head


def test_an_abort_before_the_load_is_issued_leaks_nothing():
    rig = Rig()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    rig.admit(make_request("two", 1, 2, 3))
    rig.finish("two")
    assert rig.step().load_event == NO_EVENT
    rig.check_nothing_leaked()


def test_an_abort_during_a_load_keeps_its_blocks_until_it_arrived():
    rig = make_rig_with_five_free_blocks()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    request = make_request("two", 1, 2, 3)
    rig.admit(request)
    rig.step()
    loading = request.block_ids[:2]
    rig.finish("two")
    assert not set(rig.pool.allocate(3)) & set(loading)
    assert rig.scheduler.has_pending_loads()
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.load_arrives()
    assert rig.pool.num_free == 2


def test_preemption_asks_for_a_flush_if_that_is_wanted():
    rig = Rig(flush_on_preemption=True)
    output = SchedulerOutput({}, preempted_req_ids=("one",))
    assert rig.scheduler.build_connector_meta(output).need_flush
    assert not rig.scheduler.build_connector_meta(SchedulerOutput({})).need_flush


def test_blocks_allocated_later_are_stored_too():
    rig = Rig()
    request = make_request("one", 1, 2, extra_tokens=0)
    rig.admit(request)
    request.block_keys_by_group = [make_keys(1, 2, 3)]
    request.num_tokens += BLOCK_SIZE
    (new,) = rig.pool.allocate(1)
    request.block_ids.append(new)
    output = SchedulerOutput({"one": 1}, new_block_ids={"one": [new]})
    rig.scheduler.build_connector_meta(output)
    rig.compute(request, 3 * BLOCK_SIZE)
    meta = rig.step(one=0)
    assert meta.store_event == NO_EVENT
    assert new in rig.step(one=1).store_device_blocks


@pytest.mark.parametrize("num_tokens", [3, 12, -4])
def test_taking_what_was_not_offered_is_refused(num_tokens):
    rig = Rig()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    request = make_request("two", 1, 2, 3)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    with pytest.raises(ValueError, match=f"num_external_tokens={num_tokens} of req"):
        rig.scheduler.update_state_after_alloc(request, [1, 2, 3], num_tokens)


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ([1, 2, NUM_BLOCKS], f"{NUM_BLOCKS} in the block table of request 'two' must"),
        ([1, -1, 3], r"-1 in the block table .* an int in \[0, 16\)"),
        ([1, 2.5, 3], "2.5 in the block table"),
        ([1, "2", 3], "'2' in the block table"),
        ([1, 2, 2**70], "in the block table"),
        ([[1, 2], [3]], "the model has one group"),
        (
            [1, 1, 3],
            "block 1 stands more than once in the block table of request 'two'",
        ),
    ],
)
def test_a_block_table_with_a_wrong_id_is_refused_and_changes_nothing(table, what):
    rig = Rig()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    request = make_request("two", 1, 2, 3)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    before = rig.scheduler.in_transit
    with pytest.raises(ValueError, match=what):
        rig.scheduler.update_state_after_alloc(request, table, 8)
    assert rig.scheduler.in_transit == before
    assert not rig.pool.counts(range(1, NUM_BLOCKS)).any()
    # The offer is there as before, and a right table is taken.
    assert rig.admit(request) == 8
    rig.step()
    rig.load_arrives()
    rig.finish("two")
    rig.check_nothing_leaked()


def test_new_blocks_with_a_wrong_id_are_refused_and_change_nothing():
    rig = Rig()
    rig.admit(make_request("one", 1, 2))
    wrong = SchedulerOutput(
        {"one": 1}, {"one": [NUM_BLOCKS]}, preempted_req_ids=["one"]
    )
    with pytest.raises(ValueError, match="16 in the block table of request 'one'"):
        rig.scheduler.build_connector_meta(wrong)
    rig.step(one=2)
    # It counts as known, and not as preempted: its blocks are stored.
    assert len(rig.step(one=1).store_device_blocks) == 2
    rig.finish("one")
    rig.check_nothing_leaked()


def test_a_wrong_table_at_the_end_is_refused_and_the_request_goes_on():
    rig = Rig()
    request = make_request("one", 1, 2)
    rig.admit(request)
    rig.step(one=2)
    with pytest.raises(ValueError, match="-3 in the block table of request 'one'"):
        rig.scheduler.request_finished(request, [-3])
    assert len(rig.step(one=1).store_device_blocks) == 2
    rig.finish("one")
    rig.check_nothing_leaked()


@pytest.mark.parametrize("num_tokens", [-4, 3, 5, 4.5])
def test_tokens_at_hand_that_are_no_whole_blocks_are_refused(num_tokens):
    rig = Rig()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    request = make_request("two", 1, 2, 3)
    what = f"num_computed_tokens={num_tokens} of request 'two' must be of whole blocks"
    with pytest.raises(ValueError, match=what):
        rig.scheduler.get_num_new_matched_tokens(request, num_tokens)
    with pytest.raises(ValueError, match=what):
        rig.scheduler.explain(request, num_tokens)
    # It does not count as having asked.
    rig.scheduler.update_state_after_alloc(request, [], 0)
    assert rig.scheduler.stats.num_device_query_tokens == 9


@pytest.mark.parametrize("make_table", [list, np.array, lambda ids: [np.array(ids)]])
def test_a_block_table_may_be_of_numpy_even_of_one_block(make_table):
    rig = Rig()
    request = make_request("one", 1, extra_tokens=0)
    (block,) = rig.pool.allocate(1)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    table = make_table([block])
    assert rig.scheduler.update_state_after_alloc(request, table, 0) == [[block]]
    assert rig.scheduler.request_finished(request, table) == (False, None)


@pytest.mark.parametrize("table", [[], (), [[]]])
def test_a_request_without_blocks_may_end(table):
    rig = Rig()
    request = make_request("one", 1)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    answer = rig.scheduler.request_finished_all_groups(request, table)
    assert answer == (False, None)
    rig.check_nothing_leaked()


def test_needs_a_device_pool():
    scheduler = OffloadScheduler(BLOCK_SIZE, 4)
    request = make_request("one", 1)
    with pytest.raises(RuntimeError, match="bind_device_block_pool"):
        scheduler.update_state_after_alloc(request, [1, 2], 0)


def test_events_tell_what_the_host_holds():
    rig = Rig(host_blocks=3)
    held = set()
    for number in range(6):
        rig.run(make_request(f"r{number}", number, number + 1))
        for event in rig.scheduler.take_events():
            if event.removed:
                held -= set(event.block_hashes)
            else:
                held |= set(event.block_hashes)
    assert held == {key for (key,) in rig.host.values()}
