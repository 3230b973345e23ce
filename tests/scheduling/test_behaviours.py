"""What the offload scheduler does, hook by hook and rule by rule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import (
    DeviceBlockPool,
    OffloadScheduler,
    OffloadWorker,
    TransferEngine,
)
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search.groups import FullAttention, Mamba, SlidingWindow
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, Rig, make_keys

HYBRID = (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE))

modes = pytest.mark.parametrize("mode", ["eager", "lazy"])


def make_rig(mode="eager", **more):
    """In lazy mode every step looks at all that the device could evict."""
    return Rig(mode=mode, max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE, **more)


def state_of(rig):
    """All that the two tiers know."""
    states = rig.pool.state, rig.scheduler._manager.executor.state
    return jax.tree.map(np.array, states), rig.scheduler.stats


def on_host(rig):
    """The keys in host memory; of rows of blocks, the rows."""
    rows = [row[0] if len(row) == 1 else tuple(row) for row in rig.host.values()]
    assert len(set(rows)) == len(rows)
    return set(rows)


def check_refused(rig, match, function, *arguments):
    before = state_of(rig)
    with pytest.raises(ValueError, match=match):
        function(*arguments)
    jax.tree.map(np.testing.assert_array_equal, before[0], state_of(rig)[0])
    assert before[1] == rig.scheduler.stats


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
def test_a_request_may_finish_during_its_load(mode):
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
def test_a_request_may_finish_during_its_store(mode):
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


def test_a_part_of_an_offer_is_loaded():
    rig = make_rig()
    rig.run(rig.request("one", 1, 2, 3))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3, 4)
    assert rig.admit(request, take=BLOCK_SIZE) == BLOCK_SIZE
    assert rig.step().load_device_blocks == tuple(request.block_ids[:1])
    rig.load_arrives()
    rig.step(two=3)
    rig.finish("two")
    rig.check_nothing_leaked()


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
    rig.finish("two")
    rig.check_nothing_leaked()
    # Of a part of an offer too.
    rig.forget_device()
    request = rig.request("three", *range(5))
    assert rig.admit(request, take=3 * BLOCK_SIZE) == 3 * BLOCK_SIZE
    ids = request.block_ids
    assert rig.step().load_device_blocks == (*ids[:3], NO_BLOCK)
    rig.load_arrives()
    rig.step(three=2)
    rig.finish("three")
    rig.check_nothing_leaked()


@pytest.mark.parametrize(
    ("rules", "num_stored"),
    [
        ({}, 4),
        ({"prompt_only": True}, 2),
        ({"max_offload_tokens": 3 * BLOCK_SIZE + 1}, 3),
        ({"max_offload_tokens": BLOCK_SIZE, "prompt_only": True}, 1),
    ],
)
def test_what_of_a_request_is_stored(rules, num_stored):
    rig = make_rig(**rules)
    request = rig.request("one", 1, 2, 3, 4)
    request.num_prompt_tokens = 2 * BLOCK_SIZE + 1
    rig.run(request)
    assert on_host(rig) == set(make_keys(1, 2, 3, 4)[:num_stored])
    assert rig.scheduler.stats.num_dropped_full == 0


def test_what_few_requests_ask_for_is_not_stored():
    rig = make_rig(store_threshold=2)
    for name, last in (("one", 3), ("two", 4)):
        rig.run(rig.request(name, 1, 2, last))
        rig.forget_device()
    assert on_host(rig) == set(make_keys(1, 2))


def test_tokens_that_are_only_scheduled_are_not_stored():
    rig = make_rig()
    request = rig.request("one", 1, 2, 3)
    rig.admit(request)
    rig.step(one=3)
    request.num_output_placeholders = BLOCK_SIZE + 1
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 1
    request.num_output_placeholders = 0
    assert len(rig.step(tokens={"one": 1}).store_device_blocks) == 2


def test_so_many_blocks_may_be_in_flight_and_loads_come_first():
    rig = make_rig(max_blocks_in_flight=3)
    rig.run(rig.request("old", 1, 2, 3, 4))
    rig.run(rig.request("older", 21, 22))
    assert len(rig.host) == 6
    rig.forget_device()
    rig.admit(rig.request("new", 11, 12, 13, 14, 15))
    rig.step(new=5)
    sizes = []
    for _ in range(2):  # The second finds no room.
        sizes.append(len(rig.step(tokens={"new": 1}).store_device_blocks))
    assert sizes == [3, 0]
    rig.admit(rig.request("two", 1, 2, 3, 4, 5))
    rig.admit(rig.request("three", 21, 22))
    meta = rig.step()
    # The first load is as large as all that is in flight and more; none overtakes it.
    assert meta.load_event == NO_EVENT
    rig.store_arrives()
    meta = rig.step()
    assert meta.load_event_to_reqs == {0: ("two",)}
    assert meta.store_event == NO_EVENT
    rig.load_arrives()
    meta = rig.step()
    assert meta.load_event_to_reqs == {1: ("three",)}
    assert len(meta.store_device_blocks) == 1
    rig.load_arrives()
    assert len(rig.step().store_device_blocks) == 1
    for name in ("two", "three", "new"):
        rig.finish(name)
    rig.check_nothing_leaked()


@modes
def test_no_more_is_in_flight_than_may_be(mode):
    rig = make_rig(mode, max_blocks_in_flight=3)
    rng = np.random.default_rng(0)
    for number in range(60):
        name = f"r{number}"
        path = rng.integers(0, 2, rng.integers(1, 5)).tolist()
        if rig.pool.num_free > len(path):
            rig.admit(rig.request(name, *path))
        ready = [n for n, r in rig.requests.items() if not r.loading_tokens]
        rig.step(**dict.fromkeys(ready, 1))
        loads = [len(copies) for _, copies in rig.loads]
        stores = [len(copies) for _, copies in rig.stores]
        total = sum(loads) + sum(stores)
        assert total <= 3 or (len(loads) == 1 and not stores)
        if rig.stores and rng.random() < 0.3:
            rig.store_arrives()
        if rig.loads and rng.random() < 0.3:
            rig.load_arrives()
        if ready and rng.random() < 0.6:
            rig.finish(ready[0])
        if number % 7 == 0:
            rig.forget_device()
    for name in list(rig.requests):
        rig.finish(name)
    rig.check_nothing_leaked()


def test_the_gate_declines_what_is_sooner_computed_and_tries_every_32nd():
    rig = make_rig(skip_slow_loads=True, block_bytes=1000)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    # Without rates everything is loaded; and so with one of them.
    for rates in ((0, 0), (1e6, 0), (0, 1e6)):
        rig.scheduler.note_rates(*rates)
        assert rig.offer(request) == (8, True)
    rig.scheduler.note_rates(2000.0, 8.0)  # one second either way
    assert rig.offer(request) == (8, True)
    rig.scheduler.note_rates(2000.0, 8.1)
    offers = [rig.offer(request) for _ in range(64)]
    assert [n for n, offer in enumerate(offers) if offer == (8, True)] == [31, 63]
    assert offers.count((0, False)) == 62 == rig.scheduler.stats.num_loads_declined
    for wrong in ((-1.0, 1.0), (1.0, float("inf")), (float("nan"), 1.0)):
        check_refused(rig, "at least 0", rig.scheduler.note_rates, *wrong)
    # What is on its way already comes first.
    rig.scheduler.note_rates(2000.0, 8.0)
    rig.admit(rig.request("three", 1, 2, 4))
    rig.step()
    assert rig.offer(request) == (0, False)
    rig.load_arrives()
    rig.finish("three")
    rig.scheduler.request_finished(request)
    rig.check_nothing_leaked()


def test_copies_on_the_device_pass_the_gate():
    rig = make_rig(skip_slow_loads=True, block_bytes=1000)
    rig.scheduler.note_rates(1.0, 1e9)
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    query = rig.scheduler.get_num_new_matched_tokens
    assert query(rig.request("two", 1, 2, 3), 0) == (2 * BLOCK_SIZE, False)


def test_stats_say_why_blocks_did_not_get_to_the_host():
    rig = make_rig(host_blocks=NUM_BLOCKS, device_blocks=NUM_BLOCKS)
    # All of the host is being loaded from.
    rig.fill_host(NUM_BLOCKS)
    held = [key for [key] in rig.host.values()]
    rig.scheduler._manager.prepare_load(held)
    rig.run(rig.request("full", 1, 2, 3))
    stats = rig.scheduler.stats
    assert stats.num_dropped_full == 3
    assert stats.num_store_refusals > 0
    rig.scheduler._manager.complete_load(held)
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
    rig.scheduler._manager.prepare_load(held)
    rig.run(rig.request("two", 1, 2, 3, 4))
    assert rig.scheduler.stats.num_dropped_full == 1
    rig.scheduler._manager.complete_load(held)
    rig.check_nothing_leaked()


def test_stats_are_of_the_moment_they_were_asked_for():
    rig = make_rig()
    before = rig.scheduler.stats
    rig.run(rig.request("one", 1, 2))
    assert (before.num_stored, rig.scheduler.stats.num_stored) == (0, 2)


def test_stats_count_what_was_too_much_at_once():
    rig = make_rig(max_blocks_in_flight=1)
    rig.admit(rig.request("one", 1, 2, 3))
    rig.step(one=3)
    rig.finish("one")
    rig.admit(rig.request("two", 7, 8))
    rig.step(two=2)
    rig.finish("two")
    assert rig.scheduler.stats.num_dropped_slow == 2
    rig.check_nothing_leaked()
    assert len(rig.host) == 3


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


def test_two_workers_report_what_one_scheduler_waits_for():
    """As with a model that is spread over two devices, each with its own pool."""
    rig = Rig(world_size=2)
    pools = [jnp.arange(NUM_BLOCKS, dtype=jnp.int32) + 100 * n for n in range(2)]
    workers = [OffloadWorker(TransferEngine(p, NUM_BLOCKS)) for p in pools]

    def move(meta):
        outputs = []
        for number, worker in enumerate(workers):
            pools[number] = worker.start(meta, pools[number])
            pools[number], output = worker.drain(pools[number])
            outputs.append(output)
        return outputs

    def tell(*outputs):
        return rig.scheduler.update_connector_output(ConnectorOutput.aggregate(outputs))

    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    stored = list(rig.requests["one"].block_ids[:2])
    rig.finish("one")
    outputs = move(rig.step())
    # One of them is a step behind.
    assert tell(outputs[0]) == ConnectorOutput()
    assert rig.scheduler.has_pending_stores()
    assert tell(outputs[1]).completed_store_events == (0,)
    rig.host |= rig.stores.popleft()[1]
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    assert tell(*move(rig.step())).finished_recving == ("two",)
    assert not rig.scheduler.has_pending_loads()
    for number, pool in enumerate(pools):
        loaded = np.array(pool)[request.block_ids[:2]]
        np.testing.assert_array_equal(loaded, np.array(stored) + 100 * number)


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


@pytest.mark.parametrize(
    ("groups", "rules", "why"),
    [
        (HYBRID, {"blocks_per_host_block": 2}, "one group, of full attention"),
        (SlidingWindow(4, 8), {"blocks_per_host_block": 2}, "of full attention"),
        (4, {"blocks_per_host_block": 2, "mode": "lazy"}, "exclude one another"),
        (4, {"prompt_only": True, "mode": "lazy"}, "prompt_only=True and mode"),
        (4, {"max_offload_tokens": 8, "mode": "lazy"}, "max_offload_tokens=8 and"),
    ],
)
def test_rules_that_do_not_go_together_are_refused(groups, rules, why):
    with pytest.raises(ValueError, match=why):
        OffloadScheduler(groups, 8, rules=OffloadRules(**rules))


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"mode": "later"}, "mode='later' must be"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"blocks_per_host_block": 0}, "blocks_per_host_block=0"),
        ({"store_threshold": -1}, "store_threshold=-1"),
        ({"max_offload_tokens": 0}, "max_offload_tokens=0"),
        ({"store_threshold": None}, "store_threshold=None must be a whole number"),
        ({"max_unseen_blocks": 4.0}, "max_unseen_blocks=4.0 must be a whole number"),
        ({"max_blocks_in_flight": 0}, "max_blocks_in_flight=0"),
        ({"block_bytes": -1}, "block_bytes=-1"),
        ({"skip_slow_loads": True}, "needs block_bytes"),
        ({"prompt_only": "no"}, "prompt_only='no' must be a bool"),
        ({"retention": 1}, "retention=1 must be a bool"),
        ({"world_size": None}, "world_size=None must be a whole number from 1 on"),
        ({"store_threshold": True}, "store_threshold=True must be a whole number"),
        ({"max_num_batched_tokens": "5"}, "max_num_batched_tokens='5' must be a whole"),
    ],
)
def test_wrong_rules_are_refused(rules, why):
    with pytest.raises(ValueError, match=why):
        OffloadRules(**rules)
    assert OffloadRules(max_unseen_blocks=np.int32(2)).max_unseen_blocks == 2


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


def test_rules_are_values():
    rules = OffloadRules(store_threshold=2)
    assert rules == OffloadRules(store_threshold=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.mode = "lazy"
