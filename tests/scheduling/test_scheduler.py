"""The offload scheduler's contract, one call at a time."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import (
    DeviceBlockPool,
    KeyChain,
    Namespace,
    OffloadConfig,
    find_cached_prefix,
)
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, Mamba
from jaxkv.tiers.base import HOST_MEDIUM
from jaxkv.types import NULL_BLOCK
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    HYBRID,
    NUM_BLOCKS,
    FakeRequest,
    Rig,
    check_refused,
    make_keys,
    make_request,
    make_rig,
    modes,
    on_host,
    state_of,
)


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


def test_a_host_without_room_for_all_victims_takes_the_half_that_goes_first():
    rig = make_rig("lazy", host_blocks=2)
    rig.run(make_request("one", 1, 2, 3, 4))
    assert rig.scheduler.stats.num_store_refusals > 0
    # The tail is evicted first.
    assert on_host(rig) == set(make_keys(1, 2, 3, 4)[2:])


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
    rig.scheduler.update_state_after_alloc(request, rig.pool.allocate(3), 0)
    assert rig.scheduler.stats.num_device_query_tokens == 9


def test_a_request_that_declines_and_stays_in_the_queue_is_counted_when_it_begins():
    rig = Rig()
    rig.run(make_request("one", 1, 2))
    rig.forget_device()
    request = make_request("two", 1, 2, 3)
    before = rig.scheduler.stats
    for _ in range(2):
        assert rig.offer(request)[0] == 2 * BLOCK_SIZE
        rig.scheduler.update_state_after_alloc(request, [], 0)
    assert rig.scheduler.stats == before
    assert rig.admit(request) == 2 * BLOCK_SIZE
    after = rig.scheduler.stats
    assert after.num_host_query_tokens - before.num_host_query_tokens == 13
    assert after.num_host_hit_tokens - before.num_host_hit_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize(
    "make_table",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, np.uint8),
        lambda ids: np.array([ids]),
        lambda ids: [np.array(ids)],
        lambda ids: list(np.array(ids)),
        jnp.asarray,
        lambda ids: [jnp.asarray(ids)],
        lambda ids: list(jnp.asarray(ids)),
    ],
)
@pytest.mark.parametrize("num", [1, 3])
def test_a_block_table_may_be_any_array_of_ints(make_table, num):
    rig = Rig()
    request = make_request("one", *range(num), extra_tokens=0)
    blocks = rig.pool.allocate(num)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    table = make_table(blocks)
    answer = rig.scheduler.update_state_after_alloc(request, table, 0)
    assert answer == [blocks]
    assert {type(block) for block in answer[0]} == {int}
    rig.pool.touch(jnp.asarray(blocks))
    rig.pool.free(jnp.asarray(blocks))
    step = SchedulerOutput({"one": 1}, new_block_ids={"one": table})
    rig.scheduler.build_connector_meta(step)
    assert rig.scheduler.request_finished(request, table) == (False, None)


def test_block_tables_of_groups_may_be_an_array_with_a_row_for_each():
    rig = Rig(groups=HYBRID)
    request = rig.request("one", 1, 2)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    tables = np.array(rig.pool.allocate(6)).reshape(2, 3)
    answer = rig.scheduler.update_state_after_alloc(request, jnp.asarray(tables), 0)
    assert answer == tables.tolist()


@pytest.mark.parametrize("table", ["12", "", b"\x01\x02", b"", {1: 2}, 7, jnp.ones(3)])
def test_text_where_a_block_table_is_due_is_refused(table):
    rig = Rig()
    request = make_request("one", 1)
    rig.scheduler.get_num_new_matched_tokens(request, 0)
    with pytest.raises(TypeError, match=r"the block table .* must be a list"):
        rig.scheduler.update_state_after_alloc(request, table, 0)


def _of_keys(num_tokens, *sizes):
    """A request of some tokens, with the keys of all blocks of these sizes."""
    numbers = [range(num_tokens // size) for size in sizes]
    keys = [make_keys(*own, group=group) for group, own in enumerate(numbers)]
    return FakeRequest("one", keys, num_tokens, num_tokens)


@pytest.mark.parametrize("num_tokens", [8, 9, 31, 400])
@pytest.mark.parametrize("size", [BLOCK_SIZE // 2, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE])
@pytest.mark.parametrize("call", ["get_num_new_matched_tokens", "explain", "alloc"])
def test_keys_of_another_block_size_are_refused_when_a_request_comes(
    call, size, num_tokens
):
    rig = Rig()
    request = _of_keys(num_tokens, size)
    if not request.block_keys or (call == "explain" and size > BLOCK_SIZE):
        return  # Without keys nothing is shared; what is explained may lag behind.
    what = f"has {num_tokens // size} keys in group 0, whose blocks have 4 tokens"
    calls = {
        "get_num_new_matched_tokens": lambda: rig.offer(request),
        "explain": lambda: rig.scheduler.explain(request),
        "alloc": lambda: rig.scheduler.update_state_after_alloc(request, [1], 0),
    }
    check_refused(rig, what, calls[call])
    assert not rig.scheduler._keys.by_request


def test_keys_of_another_block_size_in_one_group_are_refused():
    rig = Rig(groups=HYBRID)
    request = _of_keys(24, BLOCK_SIZE, 2 * BLOCK_SIZE)
    check_refused(rig, "has 3 keys in group 1", rig.offer, request)


def test_a_chain_of_another_block_size_is_refused_even_if_it_has_as_many_keys():
    rig = Rig()
    chain = KeyChain(Namespace("m", "0", "int8", "flat", BLOCK_SIZE + 1))
    chain.extend(range(2 * BLOCK_SIZE + 2))
    request = FakeRequest("one", [chain.keys], 2 * BLOCK_SIZE + 2, 0)
    what = "block_keys of request 'one' has keys of blocks of 5 tokens"
    query = rig.scheduler.get_num_new_matched_tokens
    check_refused(rig, what, query, request, 0)
    with pytest.raises(ValueError, match=r"keys_by_group\[0\] has keys of blocks of 5"):
        find_cached_prefix(rig.pool, rig.groups, [chain.keys], 9)


def test_a_request_without_keys_is_served_and_keys_may_lag_while_it_runs():
    rig = Rig()
    keyless = make_request("keyless", extra_tokens=3 * BLOCK_SIZE)
    assert rig.offer(keyless) == (0, False)
    request = make_request("one", 1, 2)
    rig.admit(request)
    request.num_tokens += 3 * BLOCK_SIZE
    table = [*request.block_ids, *rig.pool.allocate(3)]
    rig.scheduler.update_state_after_alloc(request, table, 0)
    rig.scheduler.explain(request)
    rig.scheduler.request_preempted(request)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_keys_for_one_group_in_place_of_a_list_for_each_are_refused():
    keys, pool = make_keys(1, 2), DeviceBlockPool(4)
    for groups in (FullAttention(BLOCK_SIZE),), HYBRID:
        with pytest.raises((TypeError, ValueError), match=r"keys_by_group.*a list"):
            find_cached_prefix(pool, groups, keys, 8)


def test_a_pool_of_another_size_than_the_arrays_is_refused_when_it_is_bound():
    """Their block axis may be another: blocks would be taken from other places."""
    pool = jnp.zeros((2, NUM_BLOCKS, 1))  # Its blocks are along the second axis.
    _, scheduler, _ = OffloadConfig(num_host_blocks=4).connect(pool, BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"num_blocks=16 .* must be 2.*block_axis"):
        scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    config = OffloadConfig(num_host_blocks=4)
    _, scheduler, _ = config.connect(pool, BLOCK_SIZE, block_axis=1)
    for num_blocks in (NUM_BLOCKS - 1, NUM_BLOCKS + 1):
        with pytest.raises(ValueError, match=f"num_blocks={num_blocks} .* must be 16"):
            scheduler.bind_device_block_pool(DeviceBlockPool(num_blocks))
    scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))


def test_a_pool_of_another_block_size_than_the_groups_is_refused():
    pool = DeviceBlockPool(NUM_BLOCKS, block_size=2 * BLOCK_SIZE)
    what = "block_size=8 of the DeviceBlockPool must be that of"
    with pytest.raises(ValueError, match=what):
        OffloadScheduler(BLOCK_SIZE, 4).bind_device_block_pool(pool)
    with pytest.raises(ValueError, match=what):
        find_cached_prefix(pool, (FullAttention(BLOCK_SIZE),), [make_keys(1)], 8)


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
            assert event.medium == HOST_MEDIUM
            if event.removed:
                held -= set(event.block_hashes)
            else:
                held |= set(event.block_hashes)
    assert held == {key for (key,) in rig.host.values()}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("get_num_new_matched_tokens", (0,)),
        ("explain", ()),
        ("update_state_after_alloc", ([1], 0)),
        ("request_preempted", ()),
        ("request_finished", ()),
    ],
)
def test_a_request_without_attributes_is_refused_with_what_it_lacks(call, arguments):
    rig = Rig()
    before = rig.scheduler.in_transit, rig.scheduler.stats
    request = types.SimpleNamespace(request_id="a", num_tokens=5)
    with pytest.raises(TypeError, match="it lacks block_keys, num_computed_tokens"):
        getattr(rig.scheduler, call)(request, *arguments)
    with pytest.raises(TypeError, match="request=None must have the attributes of"):
        getattr(rig.scheduler, call)(None, *arguments)
    assert (rig.scheduler.in_transit, rig.scheduler.stats) == before


@modes
def test_blocks_go_to_the_host_and_come_back(mode):
    rig = make_rig(mode)
    rig.run(rig.request("one", 1, 2, 3))
    assert on_host(rig) == set(make_keys(1, 2, 3))
    rig.forget_device()
    again = rig.request("two", 1, 2, 3, 4)
    assert rig.admit(again) == 3 * BLOCK_SIZE
    meta = rig.step()
    assert meta.load_device_blocks == tuple(again.block_ids[:3])
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    rig.check_nothing_leaked()


@modes
def test_what_the_host_has_is_not_stored_again(mode):
    rig = make_rig(mode)
    rig.run(rig.request("one", 1, 2))
    for forget in (False, True):
        if forget:
            rig.forget_device()
        rig.run(rig.request(f"again-{forget}", 1, 2, 3))
    assert on_host(rig) == set(make_keys(1, 2, 3))
    assert rig.scheduler.num_host_blocks_held == 3


@modes
def test_the_host_gives_up_what_was_used_least_recently(mode):
    rig = make_rig(mode)
    for number in range(4):
        rig.run(rig.request(f"r{number}", *range(10 * number, 10 * number + 4)))
        rig.forget_device()
    assert rig.scheduler.num_host_blocks_held == NUM_BLOCKS
    # The first is used again, and what is being loaded stays in any case.
    rig.run(rig.request("again", 0, 1, 2, 3))
    rig.forget_device()
    rig.admit(rig.request("loading", *range(10, 14), 99))
    rig.step()
    rig.run(rig.request("new", *range(50, 54)))
    rig.pool.evict(range(NUM_BLOCKS))
    hits = [rig.hit(*range(n, n + 4), 99) for n in (0, 10, 20, 30, 50)]
    # In lazy mode the last one's blocks are stored in the order of eviction.
    assert hits[:4] == [4, 4, 0, 4]
    assert hits[4] == 4
    rig.finish("loading")
    rig.check_nothing_leaked()


@modes
def test_blocks_being_loaded_are_not_reused_when_their_request_ends(mode):
    rig = make_rig(mode)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    written = request.block_ids[:2]
    rig.step()
    rig.finish("two")
    assert rig.scheduler.has_pending_loads()
    taken = rig.pool.allocate(rig.pool.num_free)
    assert not set(taken) & set(written)
    rig.pool.free(taken)
    rig.load_arrives()
    rig.check_nothing_leaked()
    assert rig.hit(1, 2, 3) == 2


@modes
def test_blocks_being_stored_are_not_reused_on_the_device(mode):
    rig = make_rig(mode)
    request = rig.request("one", 1, 2)
    rig.admit(request)
    rig.step(one=2)
    read = request.block_ids[:2]
    if mode == "lazy":
        rig.finish("one")
    assert set(
        rig.step(tokens={"one": 1} if mode == "eager" else None).store_device_blocks
    ) == set(read)
    if mode == "eager":
        rig.finish("one")
    taken = rig.pool.allocate(rig.pool.num_free)
    assert not set(taken) & set(read)
    rig.pool.free(taken)
    rig.store_arrives()
    rig.check_nothing_leaked()
    rig.forget_device()
    assert rig.hit(1, 2, 3) == 2


@modes
def test_the_null_block_never_moves(mode):
    rig = make_rig(mode, groups=HYBRID)
    rig.run(rig.request("one", 1, 2, 3))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3, 4)
    assert rig.admit(request) == 3 * BLOCK_SIZE
    full, window = request.tables
    assert window[0] == NULL_BLOCK
    meta = rig.step()
    assert meta.load_device_blocks == (*full[:3], *window[1:3])
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    stored = rig.step().store_device_blocks
    assert stored
    assert NULL_BLOCK not in (*stored, *meta.load_device_blocks)
    rig.check_nothing_leaked()


def test_a_prompt_in_parts_is_stored_part_by_part():
    rig = make_rig()
    request = rig.request("one", 1, 2, 3, 4)
    rig.admit(request)
    stored = []
    for num_tokens in (6, 6, 1, 3, 1):
        meta = rig.step(tokens={"one": num_tokens})
        stored.append(list(meta.store_device_blocks))
    ids = request.block_ids
    assert stored == [[], ids[:1], ids[1:3], [], ids[3:4]]
    rig.finish("one")
    rig.check_nothing_leaked()


@modes
def test_a_load_goes_behind_what_the_device_has(mode):
    rig = make_rig(mode)
    rig.run(rig.request("one", 1, 2, 3, 4))
    rig.pool.evict(rig.pool.find(make_keys(1, 2, 3, 4)[2:]))
    request = rig.request("two", 1, 2, 3, 4, 5)
    assert rig.admit(request) == 2 * BLOCK_SIZE
    assert request.num_computed_tokens == 2 * BLOCK_SIZE
    assert rig.step().load_device_blocks == tuple(request.block_ids[2:4])
    rig.load_arrives()
    rig.step(two=1)


def test_a_hybrid_takes_all_of_an_offer_or_nothing():
    rig = make_rig(groups=HYBRID)
    rig.run(rig.request("one", 1, 2, 3))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3, 4)
    assert rig.offer(request) == (3 * BLOCK_SIZE, True)
    table = [rig.pool.allocate(5), [NULL_BLOCK] * 2 + rig.pool.allocate(3)]
    update = rig.scheduler.update_state_after_alloc
    check_refused(rig, "multiple of 12 up to 12", update, request, table, 8)
    short = [table[0], table[1][:2]]
    check_refused(rig, "block 2 of group 1", update, request, short, 12)
    update(request, table, 0)
    assert rig.step().load_event == NO_EVENT
    rig.scheduler.request_finished_all_groups(request, table)
    for own in table:
        rig.pool.free(own)
    rig.check_nothing_leaked()


def test_a_table_without_a_block_where_one_is_loaded_is_refused():
    rig = make_rig()
    rig.run(rig.request("one", 1, 2, 3))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3, 4)
    rig.offer(request)
    table = rig.pool.allocate(4)
    update = rig.scheduler.update_state_after_alloc
    check_refused(
        rig, "block 2 of group 0.*of 2 blocks", update, request, table[:2], 12
    )
    null = [table[0], NULL_BLOCK, *table[2:]]
    check_refused(rig, "block 1 of group 0", update, request, null, 12)
    check_refused(rig, "up to 12, the offer", update, request, table, 16)
    update(request, table, 12)
    check_refused(rig, "it has taken an offer", update, request, table, 4)
    update(request, table, 0)  # which only replaces the table
    assert rig.step().load_device_blocks == tuple(table[:3])


def test_request_finished_all_groups_takes_the_tables_as_they_are_then():
    for groups in (BLOCK_SIZE, HYBRID):
        rig = make_rig(groups=groups)
        request = rig.request("one", 1, 2)
        rig.admit(request)
        scheduler = rig.scheduler
        scheduler.update_state_after_alloc(request, [t[:1] for t in request.tables], 0)
        rig.step(one=2)
        answer = scheduler.request_finished_all_groups(request, request.tables)
        assert answer == (False, None)
        meta = rig.step()
        stored = [block for table in request.tables for block in table[:2]]
        assert sorted(meta.store_device_blocks) == sorted(stored)
        rig.requests.clear()
        rig.free(request)
        rig.check_nothing_leaked()


def test_tokens_that_are_only_scheduled_are_not_stored():
    rig = make_rig()
    request = rig.request("one", 1, 2, 3)
    rig.admit(request)
    rig.step(one=3)
    request.num_output_placeholders = BLOCK_SIZE + 1
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 1
    request.num_output_placeholders = 0
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 2


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_transfer_is_over_when_all_workers_have_reported_it(failing):
    rig = make_rig(world_size=2)
    update = rig.scheduler.update_connector_output
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    rig.finish("one")
    rig.step()
    free = rig.pool.num_free
    event, copies = rig.stores.popleft()
    each = [
        ConnectorOutput(failed_store_events=(event,))
        if worker == failing
        else ConnectorOutput(completed_store_events=(event,))
        for worker in range(2)
    ]
    assert update(each[0]) == ConnectorOutput()
    assert rig.pool.num_free == free
    expected = (
        "failed_store_events" if failing is not None else "completed_store_events"
    )
    assert update(each[1]) == ConnectorOutput(**{expected: (event,)})
    assert rig.pool.num_free == free + 2
    assert rig.scheduler.num_host_blocks_held == (2 if failing is None else 0)
    if failing is None:
        rig.host |= copies
    else:
        rig.run(rig.request("again", 1, 2))
    rig.forget_device()
    rig.admit(rig.request("two", 1, 2, 3))
    rig.step()
    [(_, copies)] = rig.loads
    each = [
        ConnectorOutput(failed_recving=("two",))
        if worker == failing
        else ConnectorOutput(finished_recving=("two",))
        for worker in range(2)
    ]
    assert update(each[0]) == ConnectorOutput()
    assert rig.scheduler.has_pending_loads()
    expected = "failed_recving" if failing is not None else "finished_recving"
    assert update(each[1]) == ConnectorOutput(**{expected: ("two",)})
    rig.loads.clear()
    rig.finish("two")
    rig.check_nothing_leaked()


@pytest.mark.parametrize("num_reported", [0, 1])
def test_reports_of_what_is_not_in_flight_are_refused(num_reported):
    rig = make_rig(world_size=2)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    rig.admit(rig.request("two", 1, 2, 3))
    rig.admit(rig.request("not issued", 1, 2, 3, 4))
    rig.finish("not issued")
    rig.admit(rig.request("stores", 8))
    rig.step(stores=1)
    rig.admit(rig.request("later", 1, 2, 3))
    (store,) = [rig.step(tokens={"stores": 1}).store_event]
    good = ConnectorOutput(("two",), (), (store,))
    update = rig.scheduler.update_connector_output
    for _ in range(num_reported):
        update(good)
    for finished, failed, completed, lost in (
        (("two",), (), (store, store + 1), ()),
        (("two",), (), (), (-1,)),
        (("two",), (), (store, store), (store,)),
        (("two", "two"), ("two",), (store,), ()),
        (("one",), (), (store,), ()),
        ((), ("not issued",), (store,), ()),
    ):
        bad = ConnectorOutput(finished, failed, completed, lost)
        check_refused(rig, "report", update, bad)
    for _ in range(1 - num_reported):
        assert update(good) == ConnectorOutput()
    assert update(good) == good
    check_refused(rig, "report", update, ConnectorOutput(("two",)))
    check_refused(rig, "report", update, ConnectorOutput((), (), (store,)))


@modes
def test_reset_forgets_the_host_but_not_under_a_load(mode):
    rig = make_rig(mode)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    for _ in range(2):
        before = state_of(rig)
        assert not rig.scheduler.reset()
        jax.tree.map(np.testing.assert_array_equal, before, state_of(rig))
        rig.step()
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    rig.step()  # of which the store is in flight now
    assert rig.stores
    list(rig.scheduler.take_events())
    assert rig.scheduler.reset()
    [event] = rig.scheduler.take_events()
    assert (event.removed, event.block_hashes) == (True, [])
    assert rig.scheduler.num_host_blocks_held == 0
    assert rig.scheduler.has_pending_stores()
    rig.store_arrives()  # without a trace
    assert rig.scheduler.num_host_blocks_held == 0
    assert not rig.scheduler.has_pending_stores()
    rig.host.clear()
    rig.forget_device()
    assert rig.hit(1, 2, 3) == 0
    rig.run(rig.request("three", 1, 2, 3))
    rig.forget_device()
    assert rig.hit(1, 2, 3, 4) == 3
    rig.check_nothing_leaked()


def test_a_request_that_outlives_a_reset_is_stored_anew():
    rig = make_rig()
    rig.admit(rig.request("one", 1, 2, 3))
    rig.step(one=2)
    rig.step(tokens={"one": 1})
    rig.store_arrives()
    assert rig.scheduler.reset()
    rig.host.clear()
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 2
    rig.store_arrives()
    rig.finish("one")
    rig.check_nothing_leaked()


def test_stats_say_why_blocks_did_not_get_to_the_host():
    rig = make_rig(host_blocks=NUM_BLOCKS, device_blocks=NUM_BLOCKS)
    # All of the host is being loaded from.
    rig.fill_host(NUM_BLOCKS)
    held = [key for [key] in rig.host.values()]
    host = rig.scheduler._manager
    host.pin(host.find(held))
    rig.run(rig.request("full", 1, 2, 3))
    stats = rig.scheduler.stats
    assert stats.num_dropped_full == 3
    assert stats.num_store_refusals > 0
    host.unpin(host.find(held))
    rig.admit(rig.request("failed", 1, 2))
    rig.step(failed=2)
    rig.finish("failed")
    rig.step()
    rig.store_arrives(ok=False)
    stats = rig.scheduler.stats
    assert (stats.num_dropped_failed, stats.num_dropped_slow) == (2, 0)
    rig.check_nothing_leaked()


def test_stats_do_not_call_dropped_what_the_host_has():
    rig = make_rig()
    rig.fill_host(NUM_BLOCKS - 3)
    rig.run(rig.request("one", 1, 2, 3))
    # The host is full, and all of it is being loaded from.
    held = [key for [key] in rig.host.values()]
    host = rig.scheduler._manager
    host.pin(host.find(held))
    rig.run(rig.request("two", 1, 2, 3, 4))
    assert rig.scheduler.stats.num_dropped_full == 1
    host.unpin(host.find(held))
    rig.check_nothing_leaked()


def test_stats_are_of_the_moment_they_were_asked_for():
    rig = make_rig()
    before = rig.scheduler.stats
    rig.run(rig.request("one", 1, 2))
    assert (before.num_stored, rig.scheduler.stats.num_stored) == (0, 2)


def test_a_mamba_group_moves_its_last_state_alone():
    groups = (FullAttention(BLOCK_SIZE), Mamba(2 * BLOCK_SIZE))
    rig = make_rig(groups=groups)
    rig.run(rig.request("one", 1, 2, 3, 4, 5))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3, 4, 6)
    assert rig.admit(request) == 4 * BLOCK_SIZE
    meta = rig.step()
    assert meta.load_device_blocks == (*request.tables[0][:4], request.tables[1][1])
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    rig.check_nothing_leaked()


@pytest.mark.parametrize("num_blocks", [1 << 31, 1 << 40])
def test_more_blocks_than_ids_are_refused_before_memory_is_asked_for(num_blocks):
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} must be below"):
        OffloadScheduler(4, num_blocks)
    with pytest.raises(ValueError, match=f"num_blocks={num_blocks} must be below"):
        DeviceBlockPool(num_blocks)


def end_requests(rig, num):
    """End requests of which the scheduler was told nothing, each with a full block."""
    for number in range(num):
        request = make_request(f"r{number}", number)
        request.num_computed_tokens = request.num_tokens
        rig.scheduler.request_finished(request)


def test_one_warning_says_that_a_hundred_requests_have_offered_nothing(caplog):
    rig = Rig()
    end_requests(rig, 99)
    assert not caplog.records
    end_requests(rig, 150)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "JAXKV_STRICT=1 says which" in warning.getMessage()


@modes
def test_there_is_no_such_warning_of_an_engine_that_stores(caplog, mode):
    rig = Rig(mode=mode)
    rig.run(make_request("one", 1, 2, 3))
    end_requests(rig, 100)
    assert not caplog.records
