"""What the scheduler asks of a store, without one; the test answers for the worker."""

import dataclasses

import pytest

from jaxkv.scheduling.boundary import TierBelow
from jaxkv.scheduling.protocol import ConnectorOutput, TierReport
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Rig,
    make_keys,
    make_request,
)


class StoreRig(Rig):
    """Keeps what is asked of the store until it is answered."""

    def __init__(self, **options):
        super().__init__(
            **{"num_storage_blocks": 16, "storage_write": "through"} | options
        )
        self.asked = []
        self.written = []

    def step(self, *args, **blocks):
        meta = super().step(*args, **blocks)
        self.asked += meta.below
        return meta

    def answer(self, ok=True):
        """Report all that was asked as over."""
        for moves in self.asked:
            told = [
                tuple((batch.event, (ok,) * len(batch.keys)) for batch in batches)
                for batches in (moves.fetches, moves.writes)
            ]
            for batch in moves.fetches:
                pairs = zip(batch.keys, batch.upper_blocks, strict=True)
                self.host |= {row: [key] for key, row in pairs}
            self.written += [key for batch in moves.writes for key in batch.keys]
            self.report(TierReport(*told))
        self.asked.clear()

    def report(self, report):
        self.scheduler.update_connector_output(ConnectorOutput(below=(report,)))

    def serve(self, name, *path):
        """Serve a request, and write what is to be written."""
        self.run(make_request(name, *path))
        for _ in range(20):
            self.answer()
            self.step()
        assert not self.scheduler.has_pending_stores()


@pytest.mark.parametrize("write", ["through", "on_reuse", "on_evict"])
def test_private_blocks_are_not_written(write):
    secret = set(make_keys(7, 8))
    rig = StoreRig(is_private=secret.__contains__, storage_write=write, host_blocks=16)
    # What is evicted next is looked at when the host is full.
    num_others = 12 if write == "on_evict" else 0
    others = range(100, 100 + num_others)
    for name in "abc":
        rig.serve(f"{name}'", 7, 8)
        rig.serve(name, 1, 2)
        rig.forget_device()
    for other in others:
        rig.serve(f"{other}", other)
    assert set(rig.written) >= set(make_keys(1, 2))
    assert not secret & set(rig.written)
    assert rig.hit(7, 8) == 2, "the host has them all the same"
    assert rig.scheduler.stats.num_storage_dropped == 0


def test_blocks_that_are_not_written_are_counted_by_reason_and_in_all():
    stats = OffloadStats(
        num_storage_dropped_slow=1,
        num_storage_dropped_evicted=2,
        num_storage_dropped_failed=4,
        num_storage_dropped_reset=8,
    )
    assert stats.num_storage_dropped == 15


def test_fetched_blocks_are_there_when_every_worker_has_reported_them():
    rig = StoreRig(world_size=2)
    rig.report(TierReport(found=tuple(make_keys(1, 2))))
    request = make_request("a", 1, 2, 3)
    assert rig.offer(request) == (None, False)
    rig.step()
    asked = list(rig.asked)
    assert len(asked) == 1
    rig.answer()
    assert rig.offer(request) == (None, False)
    assert rig.scheduler.has_pending_loads()
    rig.asked = asked
    rig.answer()
    assert rig.offer(request) == (2 * BLOCK_SIZE, True)


def test_a_store_that_was_left_is_asked_nothing_any_more():
    rig = StoreRig()
    rig.serve("a", 1, 2)
    assert rig.written == make_keys(1, 2)
    rig.report(TierReport(found=tuple(make_keys(3, 4))))
    assert rig.scheduler.num_storage_blocks_held == 4
    assert rig.scheduler.reset()
    rig.forget_device()
    rig.scheduler.disable_storage()
    assert rig.scheduler.has_pending_stores(), "the worker is to be told"
    assert rig.step().below[0].is_last
    assert not rig.scheduler.has_pending_stores()
    rig.report(TierReport(found=tuple(make_keys(1, 2))))
    assert rig.scheduler.num_storage_blocks_held == 0
    assert rig.hit(1, 2) == 0
    rig.scheduler.disable_storage()
    rig.serve("b", 1, 2)
    assert rig.written == make_keys(1, 2)
    assert not rig.step().below
    assert rig.hit(1, 2) == 2


def test_a_write_that_ends_after_its_store_was_left_changes_nothing():
    rig = StoreRig()
    rig.run(make_request("a", 1, 2))
    assert rig.asked[0].writes
    assert rig.scheduler.reset()
    rig.scheduler.disable_storage()
    rig.answer()
    assert rig.scheduler.num_storage_blocks_held == 0
    rig.step()
    assert not rig.scheduler.has_pending_stores()


def test_what_waits_to_be_written_is_not_once_its_store_was_left():
    rig = StoreRig(max_storage_blocks=1)
    rig.run(make_request("a", 1, 2, 3, 4))
    rig.answer(ok=False)
    assert rig.scheduler.num_storage_blocks_held == 0
    assert rig.scheduler.has_pending_stores(), "the others wait"
    rig.scheduler.disable_storage()
    (moves,) = rig.step().below
    assert moves.is_last
    assert not moves.writes
    assert not rig.scheduler.has_pending_stores()


def test_what_waits_to_be_deleted_is_not_once_its_store_was_left():
    rig = StoreRig()
    one, *others = make_keys(1, 2, 3)
    rig.report(TierReport(found=(one, *others), listed=True, bound=(2, 3)))
    rig.report(TierReport(gone=tuple(others)))
    assert rig.scheduler.num_storage_blocks_held == 0
    assert rig.scheduler.has_pending_stores(), "one is to be deleted"
    rig.scheduler.disable_storage()
    (moves,) = rig.step().below
    assert moves.is_last
    assert moves.deletes == ()


def test_a_query_that_is_refused_for_its_keys_leaves_no_trace():
    """The explorer found it: the next query took nothing from the store."""
    groups = FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE)
    rig = StoreRig(groups=groups)
    request = rig.request("a", 1, 2)
    found = tuple(key for own in request.block_keys_by_group for key in own)
    rig.report(TierReport(found=found))
    keyless = dataclasses.replace(request, block_keys_by_group=[])
    with pytest.raises(ValueError, match="a list for each of the 2 groups"):
        rig.scheduler.get_num_new_matched_tokens(keyless, 0)
    assert rig.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    rig.step()
    rig.answer()
    offer = rig.scheduler.get_num_new_matched_tokens(request, 0)
    assert offer == (2 * BLOCK_SIZE, True)
    # Nor does it take back what has been offered.
    with pytest.raises(ValueError, match="a list for each of the 2 groups"):
        rig.scheduler.get_num_new_matched_tokens(keyless, 0)
    assert rig.scheduler.in_transit.host_blocks_read > 0


def test_without_a_store_there_is_none_to_leave():
    rig = Rig()
    rig.scheduler.disable_storage()
    assert not rig.step().below
    assert rig.scheduler.num_fetched_tokens("a") == 0


def test_tokens_that_came_from_the_store_are_counted_for_who_waited():
    rig = StoreRig()
    rig.serve("a", 1)
    rig.forget_device()
    rig.report(TierReport(found=tuple(make_keys(1, 2, 3))))
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


def test_tokens_that_did_not_come_are_not_counted():
    rig = StoreRig()
    rig.report(TierReport(found=tuple(make_keys(1, 2))))
    request = make_request("a", 1, 2)
    assert rig.admit(request) is None
    rig.step()
    rig.answer(ok=False)
    assert rig.admit(request) == 0
    assert rig.scheduler.num_fetched_tokens("a") == 0


def make_tiers(num):
    """A scheduler with some tiers below the host, the last of which has two blocks."""
    rules = OffloadRules(skip_slow_loads=True, block_bytes=1000)
    tiers = [BlockIndex(BLOCK_SIZE, NUM_BLOCKS, medium=f"TIER {n}") for n in range(num)]
    keys = make_keys(1, 2)
    if tiers:
        tiers[-1].publish(tiers[-1].place(keys).block_ids, keys)
    scheduler = OffloadScheduler(
        BLOCK_SIZE,
        NUM_BLOCKS,
        rules=rules,
        tiers_below=[TierBelow(tier) for tier in tiers],
    )
    scheduler.bind_device_block_pool(DeviceBlockPool(NUM_BLOCKS))
    return scheduler


@pytest.mark.parametrize(
    ("num", "rates", "is_slow"),
    [
        (1, 1.0, True),
        (1, 1e9, False),
        (2, 1.0, True),
        (2, (1e9, 1.0), True),
        (2, (1.0, 1e9), False),
        (2, (1.0, 0.0), False),
    ],
)
def test_note_rates_reaches_tiers_below_without_a_store(num, rates, is_slow):
    scheduler = make_tiers(num)
    scheduler.note_rates(1e9, 1e3, rates)
    answer = scheduler.get_num_new_matched_tokens(make_request("a", 1, 2), 0)
    assert answer == ((0, False) if is_slow else (None, False))


def test_note_rates_refuses_wrong_rates_of_tiers_and_changes_nothing():
    scheduler = make_tiers(2)
    scheduler.note_rates(1e9, 1e3, (1e9, 1.0))
    for rates, message in (
        ((1.0,), "has 1 rates, and there are 2 tiers"),
        ((1e9, -1.0), "at least 0"),
        (float("nan"), "at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.note_rates(1e9, 1e3, rates)
    with pytest.raises(ValueError, match="at least 0"):
        scheduler.note_rates(-1.0, 1e3, 1e9)
    assert scheduler.get_num_new_matched_tokens(make_request("a", 1, 2), 0)[0] == 0
