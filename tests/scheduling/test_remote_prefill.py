"""A request waits for what another engine computes for it and writes to the store."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.scheduling.protocol import TierBatch, TierMoves, TierReport
from jaxkv.scheduling.storage_worker import StorageWorker
from jaxkv.transfer.storage import MemoryStore, ObjectFormat, StorageIO
from tests.rigs.offload_rig import BLOCK_SIZE, HYBRID, make_keys, make_request
from tests.scheduling.test_storage import StoreRig
from tests.scheduling.test_storage_probes import Engine, ProbedRig

AWAIT_S = 1.0


def expecting(request):
    request.remote_prefill = True
    return request


# What the scheduler asks; the test answers for the worker.


def test_a_request_reads_what_nobody_has_told_of():
    rig = ProbedRig()
    request = expecting(make_request("a", 1, 2, 3, 4))
    assert rig.offer(request) == (None, False)
    ((batch,),) = [moves.fetches for moves in rig.step().below]
    assert batch.keys == tuple(make_keys(1, 2, 3, 4))
    assert batch.is_awaited
    assert rig.probes() == []
    assert rig.offer(request) == (None, False)
    assert rig.scheduler.explain(request).deferral == "storage"
    rig.answer()
    assert rig.offer(request) == (4 * BLOCK_SIZE, True)
    assert rig.scheduler.num_fetched_tokens("a") == 4 * BLOCK_SIZE


def test_what_does_not_come_is_computed_and_expected_no_more():
    rig = ProbedRig()
    request = expecting(make_request("a", 1, 2, 3))
    rig.offer(request)
    ((batch,),) = [moves.fetches for moves in rig.step().below]
    rig.report(TierReport(((batch.event, (True, False, False)),)))
    rig.asked.clear()
    rig.host[batch.upper_blocks[0]] = [batch.keys[0]]
    for _ in range(2):  # As where there is no room for it yet.
        assert rig.found(request) == (1, 0)
        assert rig.asked == []
    told = rig.scheduler.explain(request)
    assert [block.reason for block in told.blocks[1:]] == ["absent"] * 2
    # Nor does the index say to others that they are there.
    assert rig.scheduler.num_storage_blocks_held == 1
    assert rig.found(make_request("b", 1, 2, 3)) == (1, 1)


def test_only_what_is_neither_on_the_device_nor_on_the_host_is_awaited():
    rig = StoreRig()
    rig.serve("a", 1, 2)
    rig.forget_device()
    request = expecting(make_request("b", 1, 2, 3))
    rig.offer(request)
    ((batch,),) = [moves.fetches for moves in rig.step().below if moves.fetches]
    assert batch.keys == tuple(make_keys(1, 2, 3)[2:])


def test_requests_with_one_prompt_await_it_together():
    rig = ProbedRig()
    one, two = (expecting(make_request(name, 1, 2)) for name in "ab")
    assert rig.offer(one) == rig.offer(two) == (None, False)
    rig.step()
    assert [len(moves.fetches) for moves in rig.asked] == [1]
    rig.answer(ok=False)
    assert rig.found(one) == rig.found(two) == (0, 0)


def test_where_not_all_is_read_a_part_of_what_is_awaited_is_no_prefix():
    rig = ProbedRig(groups=HYBRID)
    request = expecting(rig.request("a", 1, 2, 3, 4, 5))
    full, windows = request.block_keys_by_group
    rig.offer(request)
    ((batch,),) = [moves.fetches for moves in rig.step().below]
    assert set(batch.keys) == {*full, *windows[3:]}
    rig.asked.clear()
    oks = tuple(key != windows[4] for key in batch.keys)
    rig.report(TierReport(((batch.event, oks),)))
    rig.host |= dict(
        zip(batch.upper_blocks, ([key] for key in batch.keys), strict=True)
    )
    num, num_probes = rig.found(request)
    assert (num < 5, num_probes) == (True, 0)


@pytest.mark.parametrize("storage", ["none", "left"])
def test_without_a_store_nothing_is_awaited(storage):
    rig = StoreRig(**({"num_storage_blocks": 0} if storage == "none" else {}))
    if storage == "left":
        rig.scheduler.disable_storage()
        rig.step()
    assert rig.offer(expecting(make_request("a", 1, 2))) == (0, False)


def test_the_host_can_be_cleared_when_a_store_is_left_after_a_wait_in_vain():
    rig = StoreRig()
    rig.offer(expecting(make_request("a", 1, 2)))
    rig.step()
    rig.answer(ok=False)
    rig.scheduler.disable_storage()
    rig.step()
    assert rig.scheduler.reset()


def test_what_is_never_written_is_not_awaited():
    private = make_keys(1, 2, 3)[1:]
    rig = StoreRig(is_private=private.__contains__)
    rig.offer(expecting(make_request("a", 1, 2, 3)))
    ((batch,),) = [moves.fetches for moves in rig.step().below]
    assert batch.keys == (make_keys(1)[0],)


def test_where_the_index_has_no_room_nothing_is_awaited():
    rig = StoreRig(num_storage_blocks=4)
    rig.report(TierReport(found=tuple(make_keys(50, 51, 52, 53))))
    rig.scheduler.below[0].tier.pin(range(2))
    assert rig.offer(expecting(make_request("a", 1, 2, 3))) == (0, False)
    assert rig.offer(expecting(make_request("b", 1, 2))) == (None, False)


def test_where_the_host_has_no_room_the_index_does_not_say_that_they_are_there():
    rig = StoreRig(host_blocks=4)
    rig.scheduler._manager.place(make_keys(5, 6, 7, 8))
    assert rig.offer(expecting(make_request("a", 1, 2))) == (0, False)
    assert rig.scheduler.num_storage_blocks_held == 0


# What the worker reads, with a clock of its own.


class Store:
    """A worker over a store that another engine writes to."""

    def __init__(self):
        self.inner = MemoryStore()
        self.now_s = 100.0
        self.objects = ObjectFormat(b"m", "u8", 4)
        storage_io = StorageIO(self.inner, self.objects, clock=lambda: self.now_s)
        done = SimpleNamespace(is_over=True, error=None)
        engine = SimpleNamespace(
            host_payload_bytes=4,
            advance_host=lambda run: None,
            write_host=lambda blocks, payloads: done,
        )
        self.worker = StorageWorker(
            *(engine, storage_io),
            await_s=AWAIT_S,
            list_every_s=0.0,
            clock=lambda: self.now_s,
        )
        self.worker.take_reports()

    def write(self, *keys):
        self.inner.put(
            [
                (self.objects.name(key), self.objects.encode(key, [b"kv__"]))
                for key in keys
            ]
        )

    def fetch(self, keys, is_awaited=True):
        ids = tuple(range(len(keys)))
        batch = TierBatch(0, tuple(keys), ids, ids, is_awaited)
        self.worker.start(TierMoves((batch,)))

    def oks(self):
        """What has come of the fetch; None if it is not over."""
        end_s = time.monotonic() + 60
        while self.worker._read_of:  # The store answers in threads.
            assert time.monotonic() < end_s
            time.sleep(1e-4)
            self.worker.advance()
        ended = [each for own in self.worker.take_reports() for each in own.fetched]
        return ended[0][1] if ended else None

    def wait(self, wait_s):
        self.now_s += wait_s
        self.worker.advance()

    @property
    def num_read(self):
        stats = self.worker.storage_io.stats
        return stats.num_read + stats.num_missing


@pytest.fixture
def store():
    own = Store()
    yield own
    own.worker.close()


def test_blocks_are_read_until_the_last_has_come(store):
    run = make_keys(*range(4))
    store.fetch(run)
    for number in range(4):
        assert store.oks() is None
        store.write(run[number])
        store.wait(0.9 * AWAIT_S)  # Each may take as long.
    assert store.oks() == (True,) * 4
    assert store.worker.num_in_flight == 0


def test_a_writer_that_is_gone_is_waited_for_once(store):
    run = make_keys(*range(3))
    store.write(run[0])
    store.fetch(run)
    assert store.oks() is None
    store.wait(0.99 * AWAIT_S)
    assert store.oks() is None
    store.wait(0.02 * AWAIT_S + 0.08)
    assert store.oks() == (True, False, False)


def test_a_writer_that_is_slow_is_waited_for_until_the_deadline(store):
    run = make_keys(*range(9))
    store.fetch(run)
    for number in range(6):
        assert store.oks() is None
        store.write(run[number])
        store.wait(0.9 * AWAIT_S)
    assert store.oks() == (True,) * 5 + (False,) * 4


def test_the_longer_nothing_comes_the_less_often_it_is_looked_for(store):
    store.fetch(make_keys(1))
    nums = []
    for _ in range(40):
        store.oks()
        nums.append(store.num_read)
        store.wait(0.01)
    assert nums[4] >= 3
    assert nums[-1] <= 10


def test_what_nobody_writes_is_missing_at_once(store):
    store.fetch(make_keys(1), is_awaited=False)
    assert store.oks() == (False,)


# Two engines on one store.


def test_a_consumer_gets_all_blocks_that_are_written_while_it_waits(tmp_path):
    keys = {"storage_deadline_s": 60.0, "storage_await_s": 60.0}
    producer, consumer = (Engine(str(tmp_path), **keys) for _ in range(2))
    path = range(1, 25)
    blocks = make_keys(*path)
    parts = [blocks[:5], blocks[5:20], blocks[20:]]

    def write():
        if parts:
            producer.write(parts.pop(0))
        time.sleep(1e-3)

    request = expecting(make_request("prompt", *path))
    assert consumer.num_found(request, write) == 24
    assert not parts
    found = consumer.scheduler._manager.find(blocks)
    fetched = consumer.engine.read_host(found.tolist())
    payload = np.empty(consumer.engine.host_payload_bytes, np.uint8)
    pools = np.asarray(producer.pool[0])
    rows = [*range(1, 6), *range(1, 16), *range(1, 5)]  # Each part from block 1 on.
    for index, row in enumerate(rows):
        fetched.copy(index, payload)
        assert payload.tobytes() == pools[row].tobytes()
    fetched.close()
    producer.close()
    consumer.close()


def test_a_producer_that_dies_costs_computing(tmp_path):
    consumer = Engine(str(tmp_path), storage_await_s=0.05)
    request = expecting(make_request("prompt", 1, 2, 3))
    assert consumer.num_found(request) == 0
    consumer.close()
