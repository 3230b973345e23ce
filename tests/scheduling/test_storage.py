"""What the scheduler asks of a store, without one; the test answers for the worker."""

import pytest

from jaxkv.scheduling.protocol import ConnectorOutput, StorageReport
from tests.rigs.offload_rig import BLOCK_SIZE, Rig, make_keys, make_request


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
        if meta.storage is not None:
            self.asked.append(meta.storage)
        return meta

    def answer(self, ok=True):
        """Report all that was asked as over."""
        for moves in self.asked:
            told = [
                tuple((batch.event, (ok,) * len(batch.keys)) for batch in batches)
                for batches in (moves.fetches, moves.writes)
            ]
            for batch in moves.fetches:
                pairs = zip(batch.keys, batch.host_blocks, strict=True)
                self.host |= {row: [key] for key, row in pairs}
            self.written += [key for batch in moves.writes for key in batch.keys]
            self.report(StorageReport(*told))
        self.asked.clear()

    def report(self, report):
        self.scheduler.update_connector_output(ConnectorOutput(storage=(report,)))

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


def test_a_store_that_was_left_is_asked_nothing_any_more():
    rig = StoreRig()
    rig.serve("a", 1, 2)
    assert rig.written == make_keys(1, 2)
    rig.report(StorageReport(found=tuple(make_keys(3, 4))))
    assert rig.scheduler.num_storage_blocks_held == 4
    assert rig.scheduler.reset()
    rig.forget_device()
    rig.scheduler.leave_storage()
    assert rig.scheduler.has_pending_stores(), "the worker is to be told"
    assert rig.step().storage.is_last
    assert not rig.scheduler.has_pending_stores()
    rig.report(StorageReport(found=tuple(make_keys(1, 2))))
    assert rig.scheduler.num_storage_blocks_held == 0
    assert rig.hit(1, 2) == 0
    rig.scheduler.leave_storage()
    rig.serve("b", 1, 2)
    assert rig.written == make_keys(1, 2)
    assert rig.step().storage is None
    assert rig.hit(1, 2) == 2


def test_a_write_that_ends_after_its_store_was_left_changes_nothing():
    rig = StoreRig()
    rig.run(make_request("a", 1, 2))
    assert rig.asked[0].writes
    assert rig.scheduler.reset()
    rig.scheduler.leave_storage()
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
    rig.scheduler.leave_storage()
    moves = rig.step().storage
    assert moves.is_last
    assert not moves.writes
    assert not rig.scheduler.has_pending_stores()


def test_without_a_store_there_is_none_to_leave():
    rig = Rig()
    rig.scheduler.leave_storage()
    assert rig.step().storage is None
    assert rig.scheduler.num_fetched_tokens("a") == 0


def test_tokens_that_came_from_the_store_are_counted_for_who_waited():
    rig = StoreRig()
    rig.serve("a", 1)
    rig.forget_device()
    rig.report(StorageReport(found=tuple(make_keys(1, 2, 3))))
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
    rig.report(StorageReport(found=tuple(make_keys(1, 2))))
    request = make_request("a", 1, 2)
    assert rig.admit(request) is None
    rig.step()
    rig.answer(ok=False)
    assert rig.admit(request) == 0
    assert rig.scheduler.num_fetched_tokens("a") == 0
