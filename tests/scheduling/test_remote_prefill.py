"""A request waits for blocks that another engine prefills and writes to the store."""

import time

import numpy as np
import pytest

from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    HYBRID,
    StoredEngine,
    StoreRig,
    make_keys,
    make_request,
)
from tests.rigs.waiting import wait_for
from tests.scheduling.test_storage_probes import Store, probed

AWAIT_S = 1.0


def expecting(request):
    request.remote_prefill = True
    return request


# What the scheduler asks; the test answers for the worker.


def test_a_request_loads_blocks_that_no_listing_has_reported():
    rig = probed()
    request = expecting(make_request("a", 1, 2, 3, 4))
    assert rig.offer(request) == (None, False)
    (batch,) = rig.fetches()
    assert batch.keys == tuple(make_keys(1, 2, 3, 4))
    assert batch.is_awaited
    assert rig.probes() == []
    assert rig.offer(request) == (None, False)
    assert rig.scheduler.explain(request).deferral == "storage"
    rig.answer()
    assert rig.offer(request) == (4 * BLOCK_SIZE, True)
    assert rig.scheduler.num_fetched_tokens("a") == 4 * BLOCK_SIZE


def test_a_missing_remote_block_is_computed_and_not_awaited_again():
    rig = probed()
    request = expecting(make_request("a", 1, 2, 3))
    rig.offer(request)
    (batch,) = rig.fetches()
    rig.report_below(fetched=((batch.event, (True, False, False)),))
    rig.unanswered.clear()
    rig.host[batch.upper_blocks[0]] = [batch.keys[0]]
    for _ in range(2):  # As where there is no room for it yet.
        assert rig.found(request) == (1, 0)
        assert rig.unanswered == []
    explained = rig.scheduler.explain(request)
    assert [block.verdict for block in explained.blocks[1:]] == ["none"] * 2
    # Nor does the index say to others that they are there.
    assert rig.scheduler.num_storage_blocks_held == 1
    assert rig.found(make_request("b", 1, 2, 3)) == (1, 1)


def test_only_what_is_neither_on_the_device_nor_on_the_host_is_awaited():
    rig = StoreRig()
    rig.serve("a", 1, 2)
    rig.forget_device()
    request = expecting(make_request("b", 1, 2, 3))
    rig.offer(request)
    (batch,) = rig.fetches()
    assert batch.keys == tuple(make_keys(1, 2, 3)[2:])


def test_requests_with_one_prompt_await_it_together():
    rig = probed()
    first, second = (expecting(make_request(name, 1, 2)) for name in "ab")
    assert rig.offer(first) == rig.offer(second) == (None, False)
    rig.step()
    assert [len(moves.fetches) for moves in rig.unanswered] == [1]
    rig.answer(ok=False)
    assert rig.found(first) == rig.found(second) == (0, 0)


def test_where_not_all_is_read_a_part_of_what_is_awaited_is_no_prefix():
    rig = probed(groups=HYBRID)
    request = expecting(rig.request("a", 1, 2, 3, 4, 5))
    full, windows = request.block_keys_by_group
    rig.offer(request)
    (batch,) = rig.fetches()
    assert set(batch.keys) == {*full, *windows[3:]}
    rig.unanswered.clear()
    oks = tuple(key != windows[4] for key in batch.keys)
    rig.report_below(fetched=((batch.event, oks),))
    rig.host |= dict(
        zip(batch.upper_blocks, ([key] for key in batch.keys), strict=True)
    )
    num, num_probes = rig.found(request)
    assert (num < 5, num_probes) == (True, 0)


def test_without_a_store_nothing_is_awaited():
    never, left = StoreRig(num_storage_blocks=0), StoreRig()
    left.offer(expecting(make_request("in vain", 1, 2)))
    left.step()
    left.answer(ok=False)
    left.scheduler.disable_storage()
    left.step()
    assert left.scheduler.reset()
    for rig in (never, left):
        assert rig.offer(expecting(make_request("a", 1, 2))) == (0, False)


def test_what_is_never_written_is_not_awaited():
    private = make_keys(1, 2, 3)[1:]
    rig = StoreRig(is_private=private.__contains__)
    rig.offer(expecting(make_request("a", 1, 2, 3)))
    (batch,) = rig.fetches()
    assert batch.keys == (make_keys(1)[0],)


def test_where_the_index_has_no_room_nothing_is_awaited():
    rig = StoreRig(num_storage_blocks=4)
    rig.has(*make_keys(50, 51, 52, 53))
    rig.scheduler.below[0].tier.pin(range(2))
    assert rig.offer(expecting(make_request("a", 1, 2, 3))) == (0, False)
    assert rig.offer(expecting(make_request("b", 1, 2))) == (None, False)


def test_where_the_host_has_no_room_the_index_does_not_say_that_they_are_there():
    rig = StoreRig(host_blocks=4)
    rig.host_tier.place(make_keys(5, 6, 7, 8))
    assert rig.offer(expecting(make_request("a", 1, 2))) == (0, False)
    assert rig.scheduler.num_storage_blocks_held == 0


# What the worker reads, with a clock of its own.


@pytest.fixture
def store():
    with Store(await_s=AWAIT_S) as made:
        yield made


def oks(store):
    wait_for(lambda: not store.worker._task_of or store.worker.advance())
    ended = [f for report in store.worker.take_reports() for f in report.fetched]
    return ended[0][1] if ended else None


def wait(store, wait_s):
    store.now_s += wait_s
    store.worker.advance()


def test_blocks_are_read_until_the_last_has_come_or_the_deadline():
    for num, num_found in ((4, 4), (9, 5)):
        run = make_keys(*range(num))
        with Store(await_s=AWAIT_S) as store:
            store.fetch(run, is_awaited=True)
            for number in range(num_found + num // 9):
                assert oks(store) is None
                store.write(run[number])
                wait(store, 0.9 * AWAIT_S)  # Each may take as long.
            assert oks(store) == (True,) * num_found + (False,) * (num - num_found)
            assert store.worker.num_in_flight == 0


def test_a_writer_that_is_gone_is_waited_for_once():
    run = make_keys(*range(3))
    for num_written in (0, 1):
        with Store(await_s=AWAIT_S) as store:
            store.write(*run[:num_written])
            store.fetch(run, is_awaited=True)
            assert oks(store) is None
            wait(store, 0.99 * AWAIT_S)
            assert oks(store) is None
            wait(store, 0.02 * AWAIT_S + 0.08)
            assert oks(store) == (True,) * num_written + (False,) * (3 - num_written)


def test_polling_for_awaited_blocks_backs_off(store):
    store.fetch(make_keys(1), is_awaited=True)
    nums = []
    for _ in range(40):
        oks(store)
        stats = store.worker.storage_io.stats
        nums.append(stats.num_read + stats.num_missing)
        wait(store, 0.01)
    assert nums[4] >= 3
    assert nums[-1] <= 10


def test_blocks_without_a_writer_are_missing_at_once(store):
    store.fetch(make_keys(1), is_awaited=False)
    assert oks(store) == (False,)


# Two engines on one store.


def test_a_consumer_gets_all_blocks_that_are_written_while_it_waits(tmp_path):
    options = {
        "storage_list_s": 0.0,
        "storage_deadline_s": 60.0,
        "storage_await_s": 60.0,
    }
    path = range(1, 25)
    keys = make_keys(*path)
    batches = [keys[:5], keys[5:20], keys[20:]]
    with (
        StoredEngine(tmp_path, **options) as producer,
        StoredEngine(tmp_path, **options) as consumer,
    ):

        def write():
            if batches:
                producer.write(batches.pop(0))
            time.sleep(1e-3)

        request = expecting(make_request("prompt", *path))
        assert consumer.num_found(request, write) == 24
        assert not batches
        pools = np.asarray(producer.pool[0])
        rows = [*range(1, 6), *range(1, 16), *range(1, 5)]  # Each part from block 1 on.
        assert consumer.bytes_of(keys) == [pools[row].tobytes() for row in rows]
