"""The offload scheduler's contract, one call at a time."""

import itertools

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
from jaxkv.scheduling.protocol import NO_EVENT, SchedulerOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention
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

# What is offered and stored.


def test_a_block_is_findable_only_after_its_bytes_arrived():
    rig = Rig()
    rig.admit(make_request("one", 1, 2))
    rig.step(one=2)
    rig.finish("one")
    rig.step()
    rig.forget_device()  # except the blocks being stored
    early = make_request("early", 1, 2, 3)
    assert rig.query(early, 2 * BLOCK_SIZE) == (0, False)
    rig.store_arrives()
    rig.forget_device()
    assert rig.query(make_request("late", 1, 2, 3)) == (2 * BLOCK_SIZE, True)


def test_a_failed_store_is_not_findable():
    rig = Rig()
    rig.admit(make_request("one", 1, 2))
    rig.step(one=2)
    rig.finish("one")
    rig.step()
    rig.store_arrives(ok=False)
    assert rig.scheduler.stats.num_dropped_failed == 2
    rig.forget_device()
    assert rig.admit(make_request("two", 1, 2, 3)) == 0
    rig.step(two=3)
    rig.end()


def test_what_was_offered_stays_until_it_is_loaded():
    """vLLM 0.19.1 could evict a hit between the query and the allocation."""
    rig = Rig(host_blocks=2)
    rig.store(1, 2)
    waiting = make_request("two", 1, 2, 3)
    assert rig.query(waiting) == (8, True)
    rig.run(make_request("other", 7, 8))  # finds no room on the host
    assert rig.scheduler.stats.num_store_refusals > 0
    assert rig.scheduler.stats.num_dropped_full == 2
    assert rig.admit(waiting) == 2 * BLOCK_SIZE
    rig.step()
    rig.load_arrives()  # which checks what was in the blocks


def test_a_host_without_room_for_all_victims_takes_the_half_that_goes_first():
    rig = make_rig("lazy", host_blocks=2)
    rig.run(make_request("one", 1, 2, 3, 4))
    assert rig.scheduler.stats.num_store_refusals > 0
    # The tail is evicted first.
    assert on_host(rig) == set(make_keys(1, 2, 3, 4)[2:])


def test_storing_a_block_evicts_tails_before_heads():
    """vLLM 0.19.1 evicted block 0 of a prefix first, and lost all of it."""
    rig = Rig(host_blocks=4)
    rig.run(make_request("one", 1, 2, 3, 4))
    rig.store(9)
    assert rig.admit(make_request("two", 1, 2, 3, 4, 5)) == 3 * BLOCK_SIZE


def test_tokens_that_are_only_scheduled_are_not_stored():
    rig = make_rig()
    request = rig.request("one", 1, 2, 3)
    rig.admit(request)
    rig.step(one=3)
    request.num_output_placeholders = BLOCK_SIZE + 1
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 1
    request.num_output_placeholders = 0
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 2


def test_a_request_that_declines_and_stays_in_the_queue_is_counted_when_it_begins():
    rig = Rig()
    rig.store(1, 2)
    request = make_request("two", 1, 2, 3)
    before = rig.scheduler.stats
    for _ in range(2):
        assert rig.offer(request)[0] == 2 * BLOCK_SIZE
        rig.take(request, [], 0)
    assert rig.scheduler.stats == before
    assert rig.admit(request) == 2 * BLOCK_SIZE
    after = rig.scheduler.stats
    assert after.num_host_query_tokens - before.num_host_query_tokens == 13
    assert after.num_host_hit_tokens - before.num_host_hit_tokens == 2 * BLOCK_SIZE


@modes
def test_what_the_host_has_comes_back_and_is_not_stored_again(mode):
    rig = make_rig(mode)
    rig.run(rig.request("one", 1, 2))
    rig.store(1, 2, 3)
    assert on_host(rig) == set(make_keys(1, 2, 3))
    again = rig.request("two", 1, 2, 3, 4)
    assert rig.admit(again) == 3 * BLOCK_SIZE
    assert rig.step().load_device_blocks == tuple(again.block_ids[:3])
    rig.load_arrives()
    rig.step(two=1)
    rig.end()
    assert on_host(rig) == set(make_keys(1, 2, 3, 4))
    assert rig.scheduler.num_host_blocks_held == 4
    # Nor is it loaded where the device has it.
    rig.pool.evict(rig.pool.find(make_keys(1, 2, 3)[1:]))
    request = rig.request("three", 1, 2, 3, 9)
    assert rig.admit(request) == 2 * BLOCK_SIZE
    assert request.num_computed_tokens == BLOCK_SIZE
    assert rig.step().load_device_blocks == tuple(request.block_ids[1:3])
    rig.load_arrives()
    rig.end()


@modes
def test_blocks_being_stored_are_not_reused_on_the_device(mode):
    rig = make_rig(mode)
    request = rig.request("one", 1, 2)
    rig.admit(request)
    rig.step(one=2)
    read = request.block_ids[:2]
    if mode == "lazy":
        rig.finish("one")
    meta = rig.step(tokens={"one": 1} if mode == "eager" else None)
    assert set(meta.store_device_blocks) == set(read)
    if mode == "eager":
        rig.finish("one")
    allocated = rig.pool.allocate(rig.pool.num_free)
    assert not set(allocated) & set(read)
    rig.pool.free(allocated)
    rig.store_arrives()
    rig.end()
    rig.forget_device()
    assert rig.hit(1, 2, 3) == 2


def test_a_request_without_keys_is_served_and_keys_may_lag_while_it_runs():
    rig = Rig()
    keyless = make_request("keyless", extra_tokens=3 * BLOCK_SIZE)
    assert rig.offer(keyless) == (0, False)
    request = make_request("one", 1, 2)
    rig.admit(request)
    request.num_tokens += 3 * BLOCK_SIZE
    rig.take(request, [*request.block_ids, *rig.pool.allocate(3)], 0)
    rig.scheduler.explain(request)
    rig.scheduler.request_preempted(request)
    assert rig.query(request) == (0, False)


def test_request_finished_all_groups_takes_the_tables_as_they_are_then():
    for groups in (BLOCK_SIZE, HYBRID):
        rig = make_rig(groups=groups)
        request = rig.request("one", 1, 2)
        rig.admit(request)
        rig.take(request, [table[:1] for table in request.tables], 0)
        rig.step(one=2)
        finished = rig.scheduler.request_finished_all_groups
        assert finished(request, request.tables) == (False, None)
        stored = [block for table in request.tables for block in table[:2]]
        assert sorted(rig.step().store_device_blocks) == sorted(stored)
        rig.requests.clear()
        rig.free(request)
        rig.end()
        for table in ([], (), [[] for _ in rig.groups]):
            request = make_request("without blocks", groups=rig.groups)
            rig.query(request)
            assert finished(request, table) == (False, None)
        rig.end()


def test_a_block_table_may_be_any_array_of_ints():
    for make_table, num in itertools.product(
        (
            *(list, tuple, np.array, lambda ids: np.array(ids, np.uint8)),
            *(lambda ids: np.array([ids]), lambda ids: [np.array(ids)]),
            *(lambda ids: list(np.array(ids)), jnp.asarray),
            *(lambda ids: [jnp.asarray(ids)], lambda ids: list(jnp.asarray(ids))),
        ),
        (1, 3),
    ):
        rig = Rig()
        request = make_request("one", *range(num), extra_tokens=0)
        blocks = rig.pool.allocate(num)
        rig.query(request)
        table = make_table(blocks)
        answer = rig.take(request, table, 0)
        assert answer == [blocks], table
        assert {type(block) for block in answer[0]} == {int}
        rig.pool.touch(jnp.asarray(blocks))
        rig.pool.free(jnp.asarray(blocks))
        step = SchedulerOutput({"one": 1}, new_block_ids={"one": table})
        rig.scheduler.build_connector_meta(step)
        assert rig.scheduler.request_finished(request, table) == (False, None)
    rig = Rig(groups=HYBRID)
    request = rig.request("one", 1, 2)
    rig.query(request)
    tables = np.array(rig.pool.allocate(6)).reshape(2, 3)
    assert rig.take(request, jnp.asarray(tables), 0) == tables.tolist()


# What is reported.


def test_blocks_on_the_host_are_not_counted_as_dropped():
    rig = make_rig()
    rig.fill_host(NUM_BLOCKS - 3)
    rig.run(rig.request("one", 1, 2, 3))
    # The host is full, and all of it is being loaded from.
    held = rig.host_tier.find([key for [key] in rig.host.values()])
    rig.host_tier.pin(held)
    before = rig.scheduler.stats
    rig.run(rig.request("two", 1, 2, 3, 4))
    assert rig.scheduler.stats.num_dropped_full == 1
    assert before.num_dropped_full == 0, "as it was when it was asked for"
    rig.host_tier.unpin(held)
    rig.end()


@modes
def test_reset_forgets_the_host_but_not_under_a_load(mode):
    rig = make_rig(mode)
    rig.store(1, 2)
    rig.admit(rig.request("two", 1, 2, 3))
    for _ in range(2):
        before = state_of(rig)
        assert not rig.scheduler.reset()
        assert state_of(rig) == before
        rig.step()
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    rig.step()  # Its store is in flight now.
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
    rig.store(1, 2, 3)
    assert rig.hit(1, 2, 3, 4) == 3
    rig.end()


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
    rig.end()


def test_one_warning_says_that_a_hundred_requests_have_offered_nothing(caplog):
    def end_requests(rig, num):
        """Finish requests of one block each that the scheduler never saw."""
        for number in range(num):
            request = make_request(f"r{number}", number)
            request.num_computed_tokens = request.num_tokens
            rig.scheduler.request_finished(request)

    for mode in ("eager", "lazy"):
        rig = Rig(mode=mode)
        rig.run(make_request("one", 1, 2, 3))
        end_requests(rig, 100)
    rig = Rig()
    end_requests(rig, 99)
    assert not caplog.records
    end_requests(rig, 150)
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "JAXKV_STRICT=1 to find the missing call" in warning.getMessage()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "as vLLM does"])
def test_a_conversation_that_outgrows_the_host_keeps_its_head(policy, is_kept):
    rig = Rig(device_blocks=65, host_blocks=16, policy=policy, keep_heads=is_kept)
    for num in range(10, 40, 3):
        request = rig.request(f"turn {num}", *range(num))
        rig.admit(request)
        if request.loading_tokens:
            rig.step()
            rig.load_arrives()
        while request.num_computed_tokens < request.num_tokens:
            rig.step(tokens={request.request_id: 2 * BLOCK_SIZE})
            while rig.stores:
                rig.store_arrives()
        rig.finish(request.request_id)
        rig.settle()
        rig.forget_device()
    assert (rig.hit(*range(60)) == 16) == is_kept
    other = rig.request("another", *range(100, 112))
    rig.run(other)
    rig.forget_device()
    assert rig.hit(*range(100, 112)) == 12, "others may evict it"


def test_a_prompt_that_is_larger_than_the_host_is_stored_as_far_as_it_fits():
    rigs = [
        Rig(device_blocks=65, host_blocks=16, keep_heads=is_kept)
        for is_kept in (True, False)
    ]
    for rig in rigs:
        rig.store(*range(18))
    assert [rig.hit(*range(18)) for rig in rigs] == [16, 9]


# What is refused.


def test_a_block_table_with_a_wrong_id_is_refused_and_changes_nothing():
    rig = Rig()
    rig.store(1, 2, 3)
    request = make_request("two", 1, 2, 3, 4)
    assert rig.query(request) == (12, True)
    blocks = rig.pool.allocate(4)
    for table, num_tokens, what in (
        (blocks, 3, "num_external_tokens=3 of req"),
        (blocks, 16, "num_external_tokens=16 of req.*up to 12, the offer"),
        (blocks, -4, "num_external_tokens=-4 of req"),
        ([1, 2, NUM_BLOCKS], 12, "16 in the block table of request 'two' must"),
        ([1, -1, 3], 12, r"-1 in the block table .* an int in \[0, 16\)"),
        ([1, 2.5, 3], 12, "2.5 in the block table"),
        ([1, "2", 3], 12, "'2' in the block table"),
        ([1, 2, 2**70], 12, "in the block table"),
        ([[1, 2], [3]], 12, "the model has one group"),
        ([1, 1, 3], 12, "block 1 is more than once in the block table of requ"),
        (blocks[:2], 12, "block 2 of group 0.*of 2 blocks"),
        ([blocks[0], NULL_BLOCK, *blocks[2:]], 12, "block 1 of group 0"),
    ):
        check_refused(rig, what, rig.take, request, table, num_tokens)
    for table in ("12", "", b"\x01\x02", b"", {1: 2}, 7, jnp.ones(3)):
        what = r"the block table .* must be a list"
        check_refused(rig, what, rig.take, request, table, 0, error=TypeError)
    # The offer is there as before, and a right table is taken, once.
    rig.take(request, blocks, 12)
    check_refused(rig, "it has taken an offer", rig.take, request, blocks, 4)
    rig.take(request, blocks, 0)  # which only replaces the table
    assert rig.step().load_device_blocks == tuple(blocks[:3])


def test_a_hybrid_takes_all_of_an_offer_or_nothing():
    rig = make_rig(groups=HYBRID)
    rig.store(1, 2, 3)
    request = rig.request("two", 1, 2, 3, 4)
    assert rig.offer(request) == (3 * BLOCK_SIZE, True)
    table = [rig.pool.allocate(5), [NULL_BLOCK] * 2 + rig.pool.allocate(3)]
    check_refused(rig, "multiple of 12 up to 12", rig.take, request, table, 8)
    short = [table[0], table[1][:2]]
    check_refused(rig, "block 2 of group 1", rig.take, request, short, 12)
    rig.take(request, table, 0)
    assert rig.step().load_event == NO_EVENT
    rig.scheduler.request_finished_all_groups(request, table)
    for blocks in table:
        rig.pool.free(blocks)
    rig.end()


def test_a_wrong_id_in_a_step_or_at_the_end_is_refused_and_the_request_goes_on():
    rig = Rig()
    request = make_request("one", 1, 2)
    rig.admit(request)
    wrong = SchedulerOutput(
        {"one": 1}, {"one": [NUM_BLOCKS]}, preempted_req_ids=["one"]
    )
    plan, finish = rig.scheduler.build_connector_meta, rig.scheduler.request_finished
    check_refused(rig, "16 in the block table of request 'one'", plan, wrong)
    rig.step(one=2)
    check_refused(rig, "-3 in the block table of request 'one'", finish, request, [-3])
    # It counts as known, and not as preempted: its blocks are stored.
    assert len(rig.step(one=1).store_device_blocks) == 2
    rig.end()


def test_tokens_at_hand_that_are_no_whole_blocks_are_refused():
    rig = Rig()
    rig.store(1, 2)
    request = make_request("two", 1, 2, 3)
    for num in (-4, 3, 5, 4.5):
        what = f"num_computed_tokens={num} of request 'two' must be whole blocks"
        check_refused(rig, what, rig.query, request, num)
        check_refused(rig, what, rig.scheduler.explain, request, num)
    # It does not count as having asked.
    rig.take(request, rig.pool.allocate(3), 0)
    assert rig.scheduler.stats.num_device_query_tokens == 9


def _of_keys(num_tokens, *sizes):
    """A request of some tokens, with the keys of all blocks of these sizes."""
    numbers = [range(num_tokens // size) for size in sizes]
    keys = [make_keys(*blocks, group=group) for group, blocks in enumerate(numbers)]
    return FakeRequest("one", keys, num_tokens, num_tokens)


def test_keys_of_another_block_size_are_refused_when_a_request_comes():
    rig = Rig()
    sizes = BLOCK_SIZE // 2, 2 * BLOCK_SIZE, 3 * BLOCK_SIZE
    for num_tokens, size in itertools.product((8, 9, 31, 400), sizes):
        request = _of_keys(num_tokens, size)
        if not request.block_keys:
            continue  # Without keys nothing is shared.
        what = f"keys in group 0, but {num_tokens // BLOCK_SIZE} full blocks of 4 tok"
        check_refused(rig, what, rig.offer, request)
        check_refused(rig, what, rig.take, request, [1], 0)
        if size < BLOCK_SIZE:  # What is explained may lag behind.
            check_refused(rig, what, rig.scheduler.explain, request)
    rig = Rig(groups=HYBRID)
    request = _of_keys(24, BLOCK_SIZE, 2 * BLOCK_SIZE)
    check_refused(rig, "has 3 keys in group 1", rig.offer, request)


def test_a_chain_of_another_block_size_is_refused_even_if_it_has_as_many_keys():
    rig = Rig()
    chain = KeyChain(Namespace("m", "0", "int8", "flat", BLOCK_SIZE + 1))
    chain.extend(range(2 * BLOCK_SIZE + 2))
    request = FakeRequest("one", [chain.keys], 2 * BLOCK_SIZE + 2, 0)
    what = "block_keys of request 'one' has keys of blocks of 5 tokens"
    check_refused(rig, what, rig.query, request)
    with pytest.raises(ValueError, match=r"keys_by_group\[0\] has keys of blocks of 5"):
        find_cached_prefix(rig.pool, rig.groups, [chain.keys], 9)


def test_a_pool_that_is_not_that_of_the_arrays_or_groups_is_refused():
    """Their block axis may be another: blocks would be taken from other places."""
    pool = jnp.zeros((2, NUM_BLOCKS, 1))  # Its blocks are along the second axis.
    config = OffloadConfig(num_host_blocks=4)
    _, scheduler, _ = config.connect(pool, BLOCK_SIZE)
    with pytest.raises(ValueError, match=r"num_blocks=16 .* must be 2.*block_axis"):
        scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    _, scheduler, _ = config.connect(pool, BLOCK_SIZE, block_axis=1)
    for num_blocks in (NUM_BLOCKS - 1, NUM_BLOCKS + 1):
        with pytest.raises(ValueError, match=f"num_blocks={num_blocks} .* must be 16"):
            scheduler.bind_device_block_pool(DeviceBlockPool(num_blocks))
    scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    larger = DeviceBlockPool(NUM_BLOCKS, block_size=2 * BLOCK_SIZE)
    what = "block_size=8 of the DeviceBlockPool must be the block_size"
    with pytest.raises(ValueError, match=what):
        OffloadScheduler(BLOCK_SIZE, 4).bind_device_block_pool(larger)
    with pytest.raises(ValueError, match=what):
        find_cached_prefix(larger, (FullAttention(BLOCK_SIZE),), [make_keys(1)], 8)
    unbound = OffloadScheduler(BLOCK_SIZE, 4)
    with pytest.raises(RuntimeError, match="bind_device_block_pool"):
        unbound.update_state_after_alloc(make_request("one", 1), [1, 2], 0)


def test_more_blocks_than_ids_are_refused_before_memory_is_asked_for():
    for num_blocks in (1 << 31, 1 << 40):
        for make in (DeviceBlockPool, lambda num: OffloadScheduler(4, num)):
            what = f"num_blocks={num_blocks} must be below"
            with pytest.raises(ValueError, match=what):
                make(num_blocks)
