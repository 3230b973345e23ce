"""Probes for blocks that no tier is known to have, because other engines wrote them."""

import contextlib
import functools
import itertools
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.scheduling.protocol import (
    TierBatch,
    TierMoves,
    TierProbe,
    TierReport,
)
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.transfer.storage import LocalStore, MemoryStore, ObjectFormat, StorageIO
from jaxkv.transfer.storage.run_search import RunSearch
from tests.rigs.faulty_store import FaultyStore
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    HYBRID,
    StoredEngine,
    StoreRig,
    make_keys,
    make_request,
)
from tests.rigs.servers import mooncake_master
from tests.rigs.waiting import wait_for

PROBE_S = 0.005


# What the scheduler asks; the test answers for the worker.


def probed(*there, **options):
    return StoreRig(*there, **{"storage_probe_s": PROBE_S} | options)


def runs_asked(rig, *requests):
    """Offer requests, run a step, and return the runs of keys of each probe."""
    for request in requests:
        assert rig.offer(request) == (None, False)
    rig.step()
    return [probe.runs for probe in rig.probes()]


def test_a_request_finds_what_another_engine_has_just_written():
    keys = make_keys(1, 2, 3, 4)
    rig = probed(*keys[:3])
    request = make_request("a", 1, 2, 3, 4)
    assert rig.offer(request) == (None, False)
    explained = rig.scheduler.explain(request)
    assert (explained.num_offered_tokens, explained.deferral) == (None, "asked")
    assert "answered a probe for blocks" in str(explained)
    rig.step()
    assert rig.probes() == [TierProbe(0, (tuple(keys),), PROBE_S)]
    assert rig.scheduler.has_pending_loads(), "so the engine goes on stepping"
    assert rig.offer(request) == (None, False)
    assert rig.step().below == (), "it is asked once"
    assert rig.found(request) == (3, 0)
    assert rig.scheduler.stats.num_storage_found == 3
    explained = rig.scheduler.explain(request)
    assert [block.verdict for block in explained.blocks] == ["host"] * 3 + ["none"]


def test_only_unknown_blocks_are_probed():
    rig = probed()
    assert rig.found(make_request("a", 1, 2)) == (0, 1)
    rig.serve("a", 1, 2)
    rig.forget_device()
    rig.has(*make_keys(1, 2, 3))
    request = make_request("b", 1, 2, 3, 4, 5)
    assert runs_asked(rig, request) == [(tuple(make_keys(1, 2, 3, 4, 5)[3:]),)]
    # What is known comes when the answer is there.
    assert rig.found(request) == (3, 0)
    assert rig.offer(make_request("c", 1, 2, 3)) == (3 * BLOCK_SIZE, True)


def test_requests_of_one_moment_share_a_probe_and_ask_for_their_tails_beside_it():
    keys = make_keys(1, 2, 3)
    rig = probed(*keys)
    requests = [
        make_request(name, *path)
        for name, *path in (("a", 1, 2, 3), ("b", 1, 2, 7), ("c", 1, 2, 3))
    ]
    runs = runs_asked(rig, *requests)
    assert runs == [(tuple(keys),), (tuple(make_keys(1, 2, 7)[2:]),)]
    answers = [rig.found(request) for request in requests]
    assert answers == [(3, 0), (2, 0), (3, 0)]


def test_a_request_in_the_queue_is_asked_for_once_and_the_next_one_again():
    rig = probed()
    request = make_request("a", 1, 2)
    assert rig.found(request) == (0, 1)
    rig.there = set(make_keys(1, 2))
    assert rig.found(request) == (0, 0)
    rig.scheduler.update_state_after_alloc(request, [1, 2, 3], 0)
    rig.scheduler.request_finished(request)
    assert rig.found(make_request("b", 1, 2)) == (2, 1)


def test_what_was_asked_before_a_reset_or_the_stores_end_changes_nothing():
    for is_left, is_sent in itertools.product([False, True], repeat=2):
        rig = probed(*make_keys(1, 2))
        request = make_request("a", 1, 2)
        rig.offer(request)
        if is_sent:
            rig.step()
        boundary = rig.scheduler.below[0]
        (boundary.disable if is_left else boundary.reset)()
        rig.answer()
        assert rig.scheduler.num_storage_blocks_held == 0
        assert not rig.scheduler.has_pending_loads()
        assert rig.found(request) == ((0, 0) if is_left else (2, 1)), is_sent


def test_where_not_all_is_read_a_shorter_prefix_is_asked_for_too():
    rig = probed(groups=HYBRID)
    request = rig.request("a", 1, 2, 3, 4, 5)
    full, windows = request.block_keys_by_group
    # Another engine had three of its blocks, and has gone on in another way.
    rig.there = {*full[:3], *windows[:3]}
    assert runs_asked(rig, request) == [(tuple(full), tuple(windows[3:]))]
    assert rig.probes()[0].wait_s == PROBE_S / 2
    assert rig.found(request) == (3, 1)
    # Nor is it asked more often, whatever it says.
    rig.there.clear()
    assert rig.found(rig.request("b", 7, 8, 9)) == (0, 1)


def test_the_gate_says_how_long_to_wait_and_whether_at_all():
    for rates, latencies_s, wait_s in (
        # Unknown rates; a tenth of the 0.4 s of prefill; a fetch that is slower.
        ((0.0, 0.0, 0.0), None, [PROBE_S]),
        ((1e9, 20.0, 1e9), None, [0.04]),
        ((1e9, 20.0, 1.0), None, []),
        # A store whose answers to a read and a probe take as long as prefill, or not.
        ((1e9, 20.0, 1e9), (0.3, 0.05), [0.04]),
        ((1e9, 20.0, 1e9), (0.3, 0.2), []),
        ((0.0, 20.0, 0.0), (0.0, 0.5), []),
    ):
        rig = probed(skip_slow_loads=True, block_bytes=10)
        rig.scheduler.set_rates(*rates)
        rig.report_below(latencies_s=latencies_s)
        assert rig.offer(make_request("a", 1, 2))[0] == (None if wait_s else 0)
        rig.step()
        assert [probe.wait_s for probe in rig.probes()] == wait_s
        assert rig.scheduler.stats.num_fetches_declined == (not wait_s)


def test_what_is_never_written_is_not_asked_for_and_all_of_a_long_prompt_is():
    private = make_keys(1, 2, 3)[1:]
    rig = probed(is_private=private.__contains__)
    assert runs_asked(rig, make_request("a", 1, 2, 3)) == [((make_keys(1)[0],),)]
    long = make_request("long", *range(300))
    assert runs_asked(probed(), long) == [(tuple(make_keys(*range(300))),)]


def test_outstanding_probes_are_limited():
    rig = probed(device_blocks=200)
    offers = [rig.offer(make_request(f"r{n}", 100 + n)) for n in range(65)]
    assert offers == [(None, False)] * 64 + [(0, False)]


def test_a_full_index_makes_room_for_what_is_asked_for():
    rig = probed(*make_keys(1, 2, 3), num_storage_blocks=4)
    listed = tuple(make_keys(*range(50, 56)))
    rig.report_below(found=listed, listed=True, bound=(10, 9))
    assert rig.scheduler.num_storage_blocks_left_out == 5
    assert rig.found(make_request("a", 1, 2, 3)) == (3, 1)
    assert rig.scheduler.num_storage_blocks_held == 4
    # Three that were left out are in the index, and three others are not.
    assert rig.scheduler.num_storage_blocks_left_out == 5


def test_a_request_does_not_ask_without_end_where_the_index_has_no_room():
    rig = probed(*make_keys(1, 2, 3), num_storage_blocks=4)
    rig.has(*make_keys(50, 51, 52, 53))
    rig.scheduler.below[0].tier.pin(range(4))
    assert rig.found(make_request("a", 1, 2, 3)) == (0, 1)


# What the worker asks, with a clock of its own.


class Store:
    """A worker over a store that others write to."""

    def __init__(self, num_shards=1, **options):
        self.inner = MemoryStore()
        self.faulty = FaultyStore(self.inner, 0)
        self.now_s = 100.0
        self.objects = ObjectFormat(b"m", "u8", 4, num_shards=num_shards)
        storage_io = StorageIO(self.faulty, self.objects, clock=lambda: self.now_s)
        written = SimpleNamespace(is_over=True, error=None)
        engine = SimpleNamespace(
            host_payload_bytes=4,
            advance_host=lambda run: None,
            write_host=lambda blocks, payloads: written,
        )
        self.worker = StorageWorker(
            *(engine, storage_io),
            list_every_s=0.0,
            clock=lambda: self.now_s,
            **options,
        )
        self.num_asked = 0
        assert self.worker.take_reports() == (TierReport(listed=False),)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.faulty.let_go()
        self.worker.close()

    def write(self, *keys):
        encode = self.objects.encode
        names = map(self.objects.name, keys)
        blobs = (encode(key, [b"kv__"]) for key in keys)
        self.inner.put(list(zip(names, blobs, strict=True)))

    def fetch(self, keys, *, is_awaited):
        ids = tuple(range(len(keys)))
        batch = TierBatch(0, tuple(keys), ids, ids, is_awaited)
        self.worker.start(TierMoves((batch,)))

    def probe(self, *runs):
        probe = TierProbe(self.num_asked, tuple(map(tuple, runs)), PROBE_S)
        self.num_asked += 1
        self.worker.start(TierMoves(probes=(probe,)))

    def reports(self):
        """Wait until there are reports; the store answers in threads."""

        def take():
            self.worker.advance()
            return self.worker.take_reports()

        return wait_for(take)

    def oks(self, *runs):
        """Return how many leading blocks of each run the store reports to have."""
        self.probe(*runs)
        ((event, oks),) = [a for report in self.reports() for a in report.probed]
        assert event == self.num_asked - 1
        nums = []
        for run in runs:
            of_run, oks = oks[: len(run)], oks[len(run) :]
            assert of_run == (True,) * sum(of_run) + (False,) * (len(run) - sum(of_run))
            nums.append(sum(of_run))
        return nums

    @property
    def num_requests(self):
        return self.worker.storage_io.stats.num_probed

    def wait_until_hanging(self, num):
        """Wait until calls hang: what is answered before, hangs no more."""

        def hang():
            self.worker.advance()
            return self.faulty.num_hanging >= num

        wait_for(hang)

    def finish_probes(self):
        """Wait for the answers of all probes."""
        while self.worker._probes or self.worker._num_unanswered:
            self.worker.advance()


@pytest.fixture
def store():
    with Store() as made:
        yield made


def test_a_probe_finds_many_blocks_with_few_store_calls():
    for num in (0, 1, 77, 200):
        with Store() as store:
            run = make_keys(*range(200))
            store.write(*run[:num])
            search = RunSearch(200)
            num_requests = 0
            while indices := search.next_indices():
                num_requests += len(indices)
                search.note(indices, [index < num for index in indices])
            assert store.oks(run, run[:1]) == [num, min(num, 1)]
            assert store.num_requests == num_requests + 1 <= 25
            assert store.worker.num_probes["found" if num else "missing"] == 1
            assert sum(store.worker.latencies["probe"].counts) == 2


def test_reports_have_moving_means_of_latencies(store):
    store.write(*make_keys(1, 2))
    for latency_s, mean_s in ((0.4, 0.4), (0.8, 0.8 - 0.4 * (15 / 16) ** 2)):
        store.faulty.faults.hang = 1.0
        store.fetch(make_keys(1, 2), is_awaited=False)
        store.wait_until_hanging(2)
        store.now_s += latency_s
        store.faulty.faults.hang = 0.0
        store.faulty.let_go()
        (report,) = store.reports()
        assert report.latencies_s == (pytest.approx(mean_s), 0.0)


def test_what_was_not_there_is_not_asked_for_again_for_half_a_second(store):
    run = make_keys(1, 2, 3)
    store.write(run[0])
    assert store.oks(run) == [1]
    num = store.num_requests
    store.write(*run)
    # Asking again does not make it last longer.
    for _ in range(2):
        store.now_s += 0.24
        assert store.oks(run[1:]) == [0]
    assert store.num_requests == num
    assert store.oks(run) == [1]
    store.now_s += 0.03
    assert store.oks(run) == [3]


def test_a_refused_block_is_not_asked_for_again_for_half_a_second(store):
    """Its deletion may take a while, and nothing deletes what others have written."""
    run = make_keys(1, 2)
    store.inner.put([(store.objects.name(key), [b"others' bytes"]) for key in run])
    store.worker.start(TierMoves(fetches=(TierBatch(0, tuple(run), (0, 1), (0, 1)),)))
    assert store.reports() == (TierReport(fetched=((0, (False, False)),)),)
    assert store.oks(run) == [0]
    assert store.num_requests == 0
    store.now_s += 0.51
    assert store.oks(run) == [2]


def test_a_late_answer_keeps_nobody_waiting_and_is_found_by_the_next(store):
    run = make_keys(1, 2, 3)
    store.write(*run)
    store.faulty.faults.hang = 1.0
    store.probe(run)
    store.worker.advance()
    assert store.worker.take_reports() == ()
    assert store.worker.num_in_flight == 1
    store.wait_until_hanging(3)
    store.now_s += PROBE_S
    (report,) = store.reports()
    assert report.probed == ((0, (False,) * 3),)
    assert store.worker.num_probes["late"] == 1
    assert store.worker.num_in_flight == 0
    store.faulty.faults.hang = 0.0
    assert store.faulty.let_go() == 3
    (report,) = store.reports()
    assert report.found == tuple(run)


def test_a_silent_store_gets_no_more_probes(store):
    store.faulty.faults.hang = 1.0
    for number in range(16):
        store.probe(make_keys(number))
    store.wait_until_hanging(16)
    store.now_s += PROBE_S
    assert len(store.reports()[0].probed) == 16
    num = store.num_requests
    assert store.oks(make_keys(100)) == [0], "at once"
    assert store.num_requests == num
    # At the store's deadline it counts as down, until it answers.
    store.now_s += 5.0
    store.write(*make_keys(200))
    store.worker.advance()
    assert store.worker.storage_io.stats.errors["probe late"] == 16
    assert store.worker.storage_io.is_down
    assert [report.num_down for report in store.worker.take_reports()] == [1]
    store.faulty.faults.hang = 0.0
    assert store.faulty.let_go() >= 16
    wait_for(lambda: not store.worker.storage_io.is_down)
    assert [report.num_down for report in store.worker.take_reports()] == [-1]
    assert store.oks(make_keys(200)) == [1]
    assert store.worker.storage_io.is_up


def test_a_store_that_fails_says_so_at_once(store):
    store.faulty.faults.error = 1.0
    assert store.oks(make_keys(1, 2)) == [0]
    assert store.worker.num_probes["failed"] == 1
    store.faulty.faults.error = 0.0
    store.write(*make_keys(1, 2))
    assert store.oks(make_keys(1, 2)) == [2], "it did not say that they are not there"


def test_of_several_shards_each_process_asks_for_its_own():
    run = make_keys(1, 2)
    with Store(num_shards=2) as store:
        store.write(*run)
        assert store.oks(run) == [2]
        # What one of them finds later is not there in all of them.
        store.faulty.faults.hang = 1.0
        store.probe(run)
        store.wait_until_hanging(2)
        store.now_s += PROBE_S
        assert store.reports()[0].probed
        store.faulty.faults.hang = 0.0
        assert store.faulty.let_go() == 2
        store.finish_probes()
        assert store.worker.take_reports() == ()


# Two engines on one store.


def test_a_second_engine_finds_all_that_the_first_has_written_without_a_listing(
    tmp_path,
):
    now_s = [0.0]  # No answer is late.
    options = {"storage_list_s": 0.0, "storage_probe_s": 5.0, "clock": lambda: now_s[0]}
    with (
        StoredEngine(tmp_path, **options) as first,
        StoredEngine(tmp_path, **options) as second,
    ):
        path = range(1, 25)
        keys = make_keys(*path)
        assert second.num_found(make_request("early", *path)) == 0
        first.write(keys)
        now_s[0] += 0.6  # Until what was not there is asked for again.
        assert second.num_found(make_request("late", *path)) == 24
        assert second.num_found(make_request("shorter", *path[:9], 77)) == 9
        assert first.storage.num_probes["found"] == 0
        blocks = np.asarray(first.pool[0])[1:25]
        assert second.bytes_of(keys) == [block.tobytes() for block in blocks]


def check_delay(url, before=lambda: None, is_asked_before=False):
    """Check that a store that does not answer delays a request by its deadline."""
    now_s = [0.0]

    def pass_time():
        now_s[0] += 0.001

    with StoredEngine(
        url, clock=lambda: now_s[0], storage_list_s=0.0, storage_probe_s=0.005
    ) as engine:
        if is_asked_before:
            assert engine.num_found(make_request("before", 4, 5, 6)) == 0
        before()
        request = make_request("a", 1, 2, 3)
        start_s = now_s[0]
        assert engine.num_found(request, pass_time) == 0
        assert 0.004 < now_s[0] - start_s < 0.007
        assert engine.storage.num_probes["late"] == 1
        assert engine.scheduler.explain(request).num_offered_tokens == 0


def test_a_dead_store_delays_a_request_by_its_deadline_and_no_more(
    tmp_path, monkeypatch
):
    is_over = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(is_over.set)
        # As of a file server that is gone.
        monkeypatch.setattr(LocalStore, "exists", lambda *_: is_over.wait())
        check_delay(tmp_path)


def test_a_master_of_mooncake_that_hangs_delays_a_request_by_its_deadline():
    with mooncake_master() as (url, master), contextlib.ExitStack() as stack:
        stack.callback(master.send_signal, signal.SIGCONT)
        stop = functools.partial(master.send_signal, signal.SIGSTOP)
        check_delay(url, stop, is_asked_before=True)
