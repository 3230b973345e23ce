"""The scheduler's storage requests, without a store: the test answers as the worker."""

import dataclasses

import pytest

from jaxkv.scheduling.boundary import TierBelow
from jaxkv.scheduling.protocol import ConnectorOutput, TierReport
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    HYBRID,
    NUM_BLOCKS,
    Rig,
    StoreRig,
    make_keys,
    make_request,
)


def test_blocks_that_are_not_written_are_counted_by_reason_and_in_all():
    reasons = {"slow": 1, "evicted": 2, "failed": 4, "reset": 8}
    fields = {f"num_storage_dropped_{name}": num for name, num in reasons.items()}
    assert OffloadStats(**fields).num_storage_dropped == 15


def leave(rig):
    """Disable the store; return the message to the worker."""
    rig.scheduler.disable_storage()
    assert rig.scheduler.has_pending_stores(), "the worker is to be told"
    (moves,) = rig.step().below
    assert (moves.is_last, moves.writes, moves.deletes) == (True, (), ())


def test_a_store_that_is_down_costs_only_its_hits():
    """The index keeps its blocks, so that they are hits once it is up again."""
    rig = StoreRig(world_size=2)
    first, second = make_request("a", 1, 2, 3), make_request("b", 5, 6)
    rig.has(*first.block_keys, *second.block_keys)
    assert rig.offer(first)[0] is None
    (batch,) = rig.fetches()
    rig.unanswered.clear()
    fetched = ((batch.event, (False,) * 3),)
    rig.report(below=(TierReport(fetched=fetched, num_down=1), TierReport(num_down=1)))
    assert rig.offer(first)[0] is None, "one worker has not reported its part"
    rig.report_below(fetched=fetched)
    rig.report_below(num_down=-1)
    for request in (first, second):
        assert rig.offer(request) == (0, False), "the other worker's part is down"
    assert rig.fetches() == []
    assert rig.scheduler.num_storage_blocks_held == 5
    rig.report_below(num_down=-1)
    assert [rig.offer(request)[0] for request in (first, second)] == [None] * 2
    assert sum(len(batch.keys) for batch in rig.fetches()) == 5


def test_what_a_store_that_is_down_would_have_got_is_counted():
    rig = StoreRig()
    rig.report_below(num_down=1)
    rig.run(make_request("a", 1, 2))
    assert not rig.scheduler.has_pending_stores()
    assert rig.scheduler.stats.num_storage_dropped_failed == 2
    rig.report_below(num_down=-1)
    rig.run(make_request("b", 3, 4))
    rig.answer()
    assert rig.written == make_keys(3, 4)


def test_of_blocks_about_to_be_evicted_heads_are_written_first():
    """The tail of a prefix goes first, and is worth nothing without its head."""
    rig = StoreRig(storage_write="on_evict", max_storage_blocks=1, host_blocks=8)
    rig.run(make_request("a", *range(8)))
    for _ in range(12):
        rig.step()
        rig.answer()
    tail = make_keys(*range(8))[4:]
    assert [key for key in rig.written if key in tail] == tail


def test_a_disabled_store_gets_no_more_tasks():
    rig = StoreRig()
    rig.serve("a", 1, 2)
    assert rig.written == make_keys(1, 2)
    rig.has(*make_keys(3, 4))
    assert rig.scheduler.num_storage_blocks_held == 4
    assert rig.scheduler.reset()
    rig.forget_device()
    leave(rig)
    assert not rig.scheduler.has_pending_stores()
    rig.has(*make_keys(1, 2))
    assert rig.scheduler.num_storage_blocks_held == 0
    assert rig.hit(1, 2) == 0
    rig.scheduler.disable_storage()
    rig.serve("b", 1, 2)
    assert rig.written == make_keys(1, 2)
    assert not rig.step().below
    assert rig.hit(1, 2) == 2


def test_tasks_of_a_store_are_dropped_when_it_is_disabled():
    written = StoreRig()
    written.run(make_request("a", 1, 2))
    assert written.unanswered[0].writes
    assert written.scheduler.reset()
    waits = StoreRig(max_storage_blocks=1)
    waits.run(make_request("a", 1, 2, 3, 4))
    waits.answer(ok=False)
    key, *deleted_keys = make_keys(1, 2, 3)
    deleted = StoreRig()
    deleted.report_below(found=(key, *deleted_keys), listed=True, bound=(2, 3))
    deleted.report_below(gone=tuple(deleted_keys))
    for rig in (written, waits, deleted):
        assert rig.scheduler.has_pending_stores()
        leave(rig)
        rig.answer()
        assert rig.scheduler.num_storage_blocks_held == 0
        assert not rig.scheduler.has_pending_stores()


def test_a_query_that_is_refused_for_its_keys_leaves_no_trace():
    """The explorer found it: the next query took nothing from the store."""
    rig = StoreRig(groups=HYBRID)
    request = rig.request("a", 1, 2)
    rig.has(*(key for group in request.block_keys_by_group for key in group))
    keyless = dataclasses.replace(request, block_keys_by_group=[])
    with pytest.raises(ValueError, match="a list for each of the 2 groups"):
        rig.query(keyless)
    assert rig.query(request) == (None, False)
    rig.step()
    rig.answer()
    assert rig.query(request) == (2 * BLOCK_SIZE, True)
    # Nor does it take back what has been offered.
    with pytest.raises(ValueError, match="a list for each of the 2 groups"):
        rig.query(keyless)
    assert rig.scheduler.in_transit.host_blocks_read > 0


def test_disabling_a_missing_store_is_refused():
    rig = Rig()
    rig.scheduler.disable_storage()
    assert not rig.step().below
    assert rig.scheduler.num_fetched_tokens("a") == 0


def test_tokens_that_came_from_the_store_are_counted_for_who_waited():
    rig = StoreRig()
    rig.serve("a", 1)
    rig.forget_device()
    rig.has(*make_keys(1, 2, 3))
    request = make_request("b", 1, 2, 3)
    assert rig.admit(request) is None
    rig.step()
    rig.answer()
    assert rig.scheduler.num_fetched_tokens("b") == 0, "it does not have them yet"
    assert rig.admit(request) == 3 * BLOCK_SIZE
    # The first block was on the host.
    assert rig.scheduler.num_fetched_tokens("b") == 2 * BLOCK_SIZE
    rig.step()
    rig.load_arrives()
    rig.finish("b")
    assert rig.scheduler.num_fetched_tokens("b") == 0
    # What did not come is not counted.
    rig.has(*make_keys(8, 9))
    request = make_request("c", 8, 9)
    assert rig.admit(request) is None
    rig.step()
    rig.answer(ok=False)
    assert rig.admit(request) == 0
    assert rig.scheduler.num_fetched_tokens("c") == 0


def make_tiers(num):
    tiers = [BlockIndex(BLOCK_SIZE, NUM_BLOCKS, medium=f"TIER {n}") for n in range(num)]
    keys = make_keys(1, 2)
    tiers[-1].publish(tiers[-1].place(keys).block_ids, keys)
    scheduler = OffloadScheduler(
        BLOCK_SIZE,
        NUM_BLOCKS,
        rules=OffloadRules(skip_slow_loads=True, block_bytes=1000),
        tiers_below=[TierBelow(tier) for tier in tiers],
    )
    scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    return scheduler


def test_rates_decide_about_loads_from_every_tier_below():
    for num, rates, is_slow in (
        (1, 1.0, True),
        (1, 1e9, False),
        (2, 1.0, True),
        (2, (1e9, 1.0), True),
        (2, (1.0, 1e9), False),
        (2, (1.0, 0.0), False),
    ):
        scheduler = make_tiers(num)
        scheduler.set_rates(1e9, 1e3, rates)
        answer = scheduler.get_num_new_matched_tokens(make_request("a", 1, 2), 0)
        assert answer == ((0, False) if is_slow else (None, False)), (num, rates)


def test_a_tier_whose_reads_take_longer_than_prefill_is_not_asked():
    """However many bytes per second it has: the prefill of 8 tokens takes 8 ms."""
    for read_s in (0.005, 0.02):
        scheduler = make_tiers(1)
        scheduler.set_rates(1e9, 1e3, 1e9)
        report = TierReport(latencies_s=(read_s, 0.0))
        scheduler.update_connector_output(ConnectorOutput(below=(report,)))
        answer = scheduler.get_num_new_matched_tokens(make_request("a", 1, 2), 0)[0]
        assert answer == (None if read_s < 0.008 else 0)
        assert scheduler.stats.num_fetches_declined == (read_s > 0.008)


def test_wrong_rates_of_tiers_below_are_refused_and_change_nothing():
    scheduler = make_tiers(2)
    scheduler.set_rates(1e9, 1e3, (1e9, 1.0))
    for rates, message in (
        ((1.0,), "has 1 rates for 2 tiers"),
        ((1e9, -1.0), "at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.set_rates(1e9, 1e3, rates)
    assert scheduler.get_num_new_matched_tokens(make_request("a", 1, 2), 0)[0] == 0
