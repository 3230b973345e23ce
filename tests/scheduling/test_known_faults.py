"""What vLLM 0.19.1's offload scheduler does wrong, and jaxkv's does not.

That its twin has the faults is in `test_twin.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadWorker, TransferEngine
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.types import NO_BLOCK
from tests.rigs.offload_rig import BLOCK_SIZE, HYBRID, NUM_BLOCKS, Rig, make_keys, modes


def test_a_block_in_flight_is_not_stored_again():
    rig = Rig()
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    rig.step(tokens={"one": 1})
    rig.admit(rig.request("two", 1, 2))  # which has the same device blocks
    meta = rig.step(tokens={"two": 1})
    assert meta.store_event == NO_EVENT
    assert rig.step(tokens={"two": 1}).store_event == NO_EVENT


def test_equal_blocks_of_one_step_are_stored_once():
    rig = Rig()
    for name in ("one", "two"):
        rig.admit(rig.request(name, 1, 2))
    rig.step(one=2, two=2)
    meta = rig.step(tokens={"one": 1, "two": 1})
    assert len(meta.store_device_blocks) == 2
    rig.finish("one")
    rig.finish("two")
    rig.check_nothing_leaked()


def test_the_last_blocks_of_a_request_are_stored():
    rig = Rig()
    rig.admit(rig.request("one", 1, 2, 3))
    rig.step(one=3)
    rig.finish("one")
    rig.settle()
    rig.forget_device()
    assert rig.hit(1, 2, 3, 4) == 3


def test_a_block_that_the_host_evicts_mid_request_is_stored_again():
    rig = Rig()
    rig.admit(rig.request("long", 1, 2, 3))
    rig.step(long=2)
    rig.step(tokens={"long": 1})
    rig.store_arrives()
    rig.fill_host(20)
    assert rig.hit(1, 2, 3) == 2  # on the device, for the request still has them
    assert not set(make_keys(1, 2)) & {key for [key] in rig.host.values()}
    rig.step(long=1)
    rig.step(tokens={"long": 1})
    rig.finish("long")
    rig.settle()
    rig.forget_device()
    assert rig.hit(1, 2, 3, 4) == 3


def test_a_block_that_gets_its_key_after_it_was_offered_is_stored_at_the_end():
    rig = Rig()
    one = rig.request("one", 1, 2)
    rig.admit(one)
    rig.step(one=2)
    rig.pool.evict(one.block_ids)
    assert rig.step(tokens={"one": 1}).store_event == NO_EVENT
    rig.pool.cache(one.block_ids[:2], one.block_keys)
    rig.finish("one")
    assert len(rig.step().store_device_blocks) == 2


def test_a_block_that_may_be_stored_after_it_was_offered_is_stored_at_the_end():
    rig = Rig(store_threshold=2)
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    assert rig.step(tokens={"one": 1}).store_event == NO_EVENT
    rig.admit(rig.request("two", 1, 2))
    rig.finish("one")
    assert len(rig.step().store_device_blocks) == 2


@pytest.mark.parametrize("host_has", [1, 2])
def test_a_hole_in_the_devices_prefix_is_filled_from_the_host(host_has):
    """The first `host_has` blocks are on the host, all but the second on the device."""
    rig = Rig()
    rig.run(rig.request("head", *range(1, host_has + 1)))
    rig.admit(rig.request("all", 1, 2, 3, 4))
    rig.step(all=4)
    rig.step(tokens={"all": 1})
    rig.finish("all")
    rig.store_arrives(ok=False)
    (second,) = rig.pool.find(make_keys(1, 2)[1:])
    rig.pool.evict([int(second)])
    request = rig.request("next", 1, 2, 3, 4, 5)
    taken = rig.admit(request)
    assert taken == BLOCK_SIZE * (0 if host_has == 1 else 3)
    if taken:
        meta = rig.step()
        assert meta.load_device_blocks == (request.block_ids[1],)
        assert meta.copy_to_blocks == tuple(request.block_ids[2:4])
        rig.load_arrives()
    rig.step(next=5)  # which looks at the bytes
    rig.finish("next")
    rig.check_nothing_leaked()


def test_blocks_that_only_the_device_has_are_copied_and_there_in_the_same_step():
    rig = Rig()
    for name in ("one", "two"):
        rig.admit(rig.request(name, 1, 2, 3))
    rig.step(one=3, two=3)
    rig.finish("one")
    rig.finish("two")
    rig.step()
    rig.store_arrives(ok=False)
    assert not rig.host
    # The engine's own search ends where its first block is another's.
    request = rig.request("next", 1, 2, 3, 4)
    num_tokens, tables = rig.find(request)
    assert num_tokens == 3 * BLOCK_SIZE
    answer = rig.scheduler.get_num_new_matched_tokens(request, BLOCK_SIZE)
    assert answer == (2 * BLOCK_SIZE, False)
    rig.pool.touch(tables[0][:1])
    table = tables[0][:1] + rig.pool.allocate(4)
    rig.scheduler.update_state_after_alloc(request, table, 2 * BLOCK_SIZE)
    meta = rig.scheduler.build_connector_meta(SchedulerOutput({}))
    assert meta.load_event == NO_EVENT
    assert meta.copy_from_blocks == tuple(tables[0][1:])
    assert meta.copy_to_blocks == tuple(table[1:3])
    assert not rig.scheduler.has_pending_loads()
    rig.scheduler.request_finished(request)
    rig.pool.free(table[::-1])
    rig.check_nothing_leaked()


@pytest.mark.parametrize("host_has", [True, False])
def test_what_a_request_is_to_copy_leaves_it_no_room(host_has):
    """It could ask for ever, for what was offered to it kept its own blocks from it."""
    rig = Rig()
    path = range(NUM_BLOCKS - 2)
    request = rig.request("one", *path)
    rig.admit(request)
    rig.step(one=len(path))
    rig.finish("one")
    rig.step()
    rig.store_arrives(ok=host_has)
    rig.pool.evict(rig.pool.find(make_keys(0)))
    if not host_has:
        # All but the first, which alone the host has.
        rig.run(rig.request("head", 0))
        rig.pool.evict(rig.pool.find(make_keys(0)))
    again = rig.request("two", *path)
    num_from_host = len(path) if host_has else 1
    assert rig.admit(again) == num_from_host * BLOCK_SIZE
    meta = rig.step()
    assert len(meta.load_host_blocks) == num_from_host
    assert not meta.copy_from_blocks
    rig.load_arrives()
    rig.step(two=len(path))
    rig.finish("two")
    rig.check_nothing_leaked()


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


def test_lazy_stores_leave_no_block_out():
    rig = Rig(mode="lazy", max_num_batched_tokens=BLOCK_SIZE)
    rig.pool.allocate(NUM_BLOCKS - 1 - 6)  # Others have them.
    rig.admit(rig.request("one", 1, 2, 3, 4, 5))
    rig.step(one=5)
    rig.finish("one")
    # First the block that is not full, which contains nothing.
    assert [key is None for key in rig.pool.next_free(6)[1]] == [True] + [False] * 5
    for _ in range(3):
        rig.step()
    while rig.stores:
        rig.store_arrives()
    for _ in range(3):
        rig.settle()
    _, keys = rig.pool.next_free(2)
    cached = [key for key in keys if key]
    assert cached
    assert all([key] in rig.host.values() for key in cached)


@pytest.mark.parametrize("way", ["evicted", "forgotten", "new pool"])
def test_lazy_stores_offer_again_what_the_host_has_lost(way):
    rig = Rig(mode="lazy", device_blocks=6, max_num_batched_tokens=4 * BLOCK_SIZE)
    rig.run(rig.request("one", 1, 2))
    rig.settle()
    keys, host = make_keys(1, 2), rig.scheduler._manager
    assert host.contains(keys).all()
    rig.step()
    assert (rig.pool.next_victims(9).copies != NO_BLOCK).all()
    if way == "evicted":
        host.place(make_keys(*range(3, NUM_BLOCKS + 3)))
    elif way == "forgotten":
        host.discard(keys)
    else:
        rig.scheduler = OffloadScheduler(rig.groups, 4, rules=rig.rules)
        rig.scheduler.bind_device_block_pool(rig.pool)
        host = rig.scheduler._manager
    assert not host.contains(keys).any()
    if way == "evicted":
        host.complete_store(make_keys(*range(3, NUM_BLOCKS + 3)))
    rig.pool.free(rig.pool.allocate(1))  # So that it looks again.
    assert len(rig.step().store_device_blocks) == 2


def test_lazy_stores_evict_nothing_that_the_device_is_about_to_evict():
    rig = Rig(
        mode="lazy", host_blocks=2, max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE
    )
    for name, *path in (("one", 1, 2), ("two", 3, 4)):
        rig.run(rig.request(name, *path))
        rig.settle()
    assert rig.scheduler._manager.num_evicted == 0
    assert rig.hit(1, 2, 5) == 2


def test_what_a_preempted_request_has_computed_is_stored():
    rig = Rig()
    rig.admit(rig.request("one", 1, 2, 3))
    rig.step(one=2)
    rig.preempt("one")
    rig.step(preempted=("one",))
    rig.settle()
    rig.forget_device()
    assert rig.hit(1, 2, 3) == 2


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
    rig.finish("one")
    rig.check_nothing_leaked()


def test_a_preempted_request_asks_again_until_its_old_load_is_over():
    rig = Rig()
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    rig.step()
    written = request.block_ids[:2]
    rig.preempt("two")
    rig.step(preempted=("two",))
    assert rig.admit(request) is None
    free = rig.pool.allocate(rig.pool.num_free)
    assert not set(free) & set(written)  # for they are still being written
    rig.pool.free(free)
    (names, _) = rig.loads.popleft()
    # Nobody waits for that load any more, so the engine does not hear of it.
    heard = rig.scheduler.update_connector_output(ConnectorOutput(names))
    assert heard == ConnectorOutput()
    assert rig.admit(request) == 2 * BLOCK_SIZE
    rig.step()
    rig.load_arrives()
    rig.step(two=1)
    rig.finish("two")
    rig.check_nothing_leaked()


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_flush_leaves_copies_that_wait_their_turn(mode):
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


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_load_that_ends_in_a_step_without_loads_is_reported(mode):
    pool = jnp.arange(NUM_BLOCKS, dtype=jnp.int32)
    engine = TransferEngine(pool, NUM_BLOCKS, mode=mode)
    engine.save(pool, range(NUM_BLOCKS), range(NUM_BLOCKS))
    pool, _ = engine.drain(pool)
    worker = OffloadWorker(engine)
    rig = Rig()
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    rig.admit(request)
    pool = worker.start(rig.step(), pool)
    idle = rig.step()
    assert idle.load_event == NO_EVENT
    heard = []
    for _ in range(100_000):
        pool = worker.start(idle, pool)
        heard += worker.poll().finished_recving
        if heard:
            break
    assert heard == ["two"]
    rig.load_arrives()
    assert rig.requests["two"].num_computed_tokens == 2 * BLOCK_SIZE


def test_requests_that_share_a_prefix_do_not_wait_for_one_anothers_load():
    rig = Rig()
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    for name, last in (("two", 3), ("three", 4)):
        assert rig.admit(rig.request(name, 1, 2, last)) == 2 * BLOCK_SIZE
    meta = rig.step()
    assert meta.load_event_to_reqs == {0: ("two", "three")}
    assert len(set(meta.load_device_blocks)) == 4
    rig.load_arrives()
    rig.step(two=1, three=1)


def test_requests_that_share_a_prefix_wait_if_that_is_wanted():
    rig = Rig(delay_shared_loads=True)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    rig.admit(rig.request("two", 1, 2, 3))
    later = rig.request("three", 1, 2, 4)
    assert rig.admit(later) is None
    assert rig.admit(rig.request("other", 8)) == 0
    rig.step()
    assert rig.admit(later) is None
    rig.load_arrives()
    assert rig.admit(later) == 0  # as all of it is on the device now
    assert later.num_computed_tokens == 2 * BLOCK_SIZE
    for name in ("two", "three", "other"):
        rig.finish(name)
    rig.check_nothing_leaked()


def test_an_offer_that_waits_for_room_holds_up_nobody_who_shares_its_blocks():
    rig = Rig(delay_shared_loads=True)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    waiting, other = rig.request("two", 1, 2, 3), rig.request("three", 1, 2, 4)
    assert rig.offer(waiting) == (2 * BLOCK_SIZE, True)
    assert rig.scheduler.explain(other).deferral is None
    assert rig.admit(other) == 2 * BLOCK_SIZE
    assert rig.scheduler.explain(waiting).deferral == "shared"
    assert rig.offer(waiting) == (None, False)
    rig.step()
    rig.load_arrives()
    rig.finish("three")
    rig.scheduler.request_finished(waiting)
    rig.check_nothing_leaked()


@modes
@pytest.mark.parametrize("moment", ["offered", "taken", "loading"])
@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_an_abort_during_a_load_leaks_nothing(mode, moment, end):
    rig = Rig(mode=mode, max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE)
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    request = rig.request("two", 1, 2, 3)
    if moment == "offered":
        assert rig.offer(request) == (2 * BLOCK_SIZE, True)
        rig.scheduler.request_finished(request)
    else:
        rig.admit(request)
        if moment == "loading":
            rig.step()
        if end == "abort":
            rig.finish("two")
        else:
            rig.preempt("two")
        assert bool(rig.loads) == (moment == "loading")
    rig.check_nothing_leaked()


@pytest.mark.parametrize("groups", [BLOCK_SIZE, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("has_copies", [False, True])
def test_a_failed_load_is_computed_again_on_both_tiers(groups, has_copies):
    rig = Rig(groups=groups)
    rig.run(rig.request("one", 1, 2, 3))
    if has_copies:
        lost = [keys[1] for keys in rig.request("?", 1, 2).block_keys_by_group]
        rig.pool.evict(rig.pool.find(lost))
    else:
        rig.forget_device()
    num_held = rig.scheduler.num_host_blocks_held
    request = rig.request("two", 1, 2, 3, 4)
    local, _ = rig.find(request)
    assert local == BLOCK_SIZE * has_copies
    assert rig.admit(request) == 3 * BLOCK_SIZE - local
    meta = rig.step()
    num_loaded = len(meta.load_host_blocks)
    assert num_loaded > 0
    assert bool(meta.copy_to_blocks) == has_copies
    rig.load_arrives(ok=False)
    assert request.num_computed_tokens == local
    # What could not be read is forgotten, whatever else was held stays.
    assert rig.scheduler.num_host_blocks_held == num_held - num_loaded
    targets = set(meta.load_device_blocks)
    for keys in request.block_keys_by_group:
        assert not targets & set(rig.pool.find(keys).tolist())
    rig.step(two=4)
    rig.finish("two")
    rig.settle()
    rig.forget_device()
    assert rig.hit(1, 2, 3, 4, 5) == 4
    rig.check_nothing_leaked()


def test_a_sliding_window_has_a_block_at_several_positions():
    """vLLM stored it as often as its table has it, and let go of it as often."""
    rig = Rig(groups=HYBRID)
    request = rig.request("one", 1, 2, 3, 4)
    rig.admit(request)
    full, window = request.tables
    rig.step(one=2)
    assert sorted(rig.step(tokens={"one": 1}).store_device_blocks) == sorted(
        full[:2] + window[:2]
    )
    rig.store_arrives()
    # What has left the window takes what comes into it.
    rig.pool.free([window[3], window[2]])
    rig.pool.evict(window[:2])
    window[2:4] = window[:2]
    rig.scheduler.update_state_after_alloc(request, request.tables, 0)
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
    rig.finish("again")
    rig.check_nothing_leaked()


@modes
def test_an_idle_engine_sees_that_stores_are_pending(mode):
    rig = Rig(mode=mode, max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE)
    rig.admit(rig.request("one", 1, 2))
    rig.step(one=2)
    assert not rig.scheduler.has_pending_stores()
    rig.finish("one")
    # Eager blocks wait for a step; lazy ones are looked for in it.
    assert rig.scheduler.has_pending_stores() == (mode == "eager")
    assert rig.step().store_event == 0
    assert rig.scheduler.has_pending_stores()
    rig.store_arrives()
    assert not rig.scheduler.has_pending_stores()
    rig.forget_device()
    assert rig.hit(1, 2, 3) == 2


def test_a_request_that_asks_often_counts_as_one_use():
    """vLLM's other connector counted each question as a use, and so did a threshold."""
    states = []
    for num_questions in (1, 4):
        rig = Rig(store_threshold=2)
        for name in ("one", "again"):
            rig.run(rig.request(name, 1, 2))
            rig.forget_device()
        request = rig.request("two", 1, 2, 3)
        for _ in range(num_questions):
            rig.offer(request)
        rig.admit(request)
        if num_questions > 1:
            rig.preempt("two")
            rig.step(preempted=("two",))
            rig.admit(request)
        states.append(jax.tree.map(np.array, rig.scheduler._manager.executor.state))
        # Nor has anything that it alone wants been wanted often enough.
        rig.step()
        rig.load_arrives()
        rig.step(two=1)
        rig.finish("two")
        rig.settle()
        assert len(rig.host) == 2
    jax.tree.map(np.testing.assert_array_equal, *states)
