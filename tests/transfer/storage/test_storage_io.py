"""Reads and writes in the background: right bytes, every ticket ends once."""

import collections
import dataclasses
import gc
import itertools
import operator
import random
import threading
import time
import weakref

import numpy as np
import pytest

from jaxkv.transfer.storage import (
    LocalStore,
    MemoryStore,
    ObjectFormat,
    StorageIO,
    StoreError,
)
from jaxkv.transfer.storage.census import Bound
from jaxkv.transfer.storage.storage_io import Listed, Rate
from jaxkv.transfer.storage.store import Lanes
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.refused_threads import refused_threads
from tests.rigs.waiting import wait_for
from tests.transfer.storage.calls import exists, get, put

FOREVER = float("inf")
SIZE = 100
OBJECT = SIZE + 192
BLOCKS = ObjectFormat(b"model", "u8[100]", SIZE)


def key(n):
    return n.to_bytes(32, "big")


def payload(n):
    return random.Random(n).randbytes(SIZE)


def writes(*numbers):
    return [(key(n), [payload(n)]) for n in numbers]


def wait_all(storage, num):
    done = []
    while len(done) < num:
        completions = storage.wait(60)
        assert completions, f"{len(done)} of {num} completed"
        done += completions
    assert len(done) == num
    return done


def write_all(storage, *numbers):
    storage.submit_writes(writes(*numbers))
    return wait_all(storage, len(numbers))


def read_all(storage, *numbers):
    """Read; outcomes and payloads in the order of the numbers."""
    tickets = storage.submit_reads(map(key, numbers), FOREVER)
    done = {c.ticket: c for c in wait_all(storage, len(numbers))}
    return [done[ticket] for ticket in tickets]


def outcomes(storage, *numbers):
    return [c.outcome for c in read_all(storage, *numbers)]


def check_reads(storage, *numbers):
    """Read blocks, and check that each has its own bytes."""
    for n, completion in zip(numbers, read_all(storage, *numbers), strict=True):
        assert (completion.key, completion.outcome) == (key(n), "done")
        assert bytes(completion.payload) == payload(n)


@pytest.fixture
def clock():
    class Clock:
        now_s = 100.0

        def __call__(self):
            return self.now_s

    return Clock()


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else LocalStore(str(tmp_path))


@pytest.fixture
def faulty():
    """A store in memory whose faults a test switches on."""
    faulty = FaultyStore(MemoryStore(), seed=1)
    yield faulty
    faulty.let_go()


@pytest.fixture
def storage(store):
    with StorageIO(store, BLOCKS) as storage:
        yield storage


@pytest.fixture
def faulty_storage(faulty, clock):
    with StorageIO(faulty, BLOCKS, num_in_flight=1, clock=clock) as storage:
        yield storage
        faulty.let_go()


def test_blocks_come_back_as_they_went_until_they_are_deleted(storage):
    tickets = storage.submit_writes(writes(*range(200)))
    done = wait_all(storage, 200)
    assert {c.ticket for c in done} == set(tickets)
    assert {(c.kind, c.outcome) for c in done} == {("write", "done")}
    check_reads(storage, *range(200))
    assert outcomes(storage, 200) == ["missing"]
    stats = storage.stats
    assert (stats.num_written, stats.num_read, stats.num_missing) == (200, 200, 1)
    assert stats.bytes_written == stats.bytes_read == 200 * OBJECT
    assert stats.open_read_bytes == stats.queued_write_bytes == 0
    storage.delete([key(1), key(300)])
    wait_for(lambda: storage.stats.num_deleted == 2)
    assert outcomes(storage, 1, 2) == ["missing", "done"]
    write_all(storage, 1)
    check_reads(storage, 1)


def test_arrays_are_written_without_another_copy_and_let_go_afterwards(storage):
    array = np.arange(50, dtype=np.uint16)
    array_ref, expected = weakref.ref(array), array.tobytes()
    storage.submit_writes([(key(1), [array[:10], array[10:].reshape(4, 10)])])
    wait_all(storage, 1)
    del array
    gc.collect()
    wait_for(lambda: array_ref() is None)
    (read,) = read_all(storage, 1)
    assert bytes(read.payload) == expected


@pytest.mark.parametrize("seed", range(4))
def test_whatever_goes_wrong_no_wrong_byte_arrives_and_each_ticket_ends_once(
    seed, clock
):
    rng = random.Random(seed)
    chosen = rng.sample([field.name for field in dataclasses.fields(Faults)], 6)
    faults = {name: rng.choice([0.05, 0.2]) for name in chosen if name != "late_s"}
    store = FaultyStore(MemoryStore(), seed, Faults(**faults))
    max_bytes = 40 * OBJECT
    open_tickets: dict[int, str] = {}
    outcomes = collections.Counter()
    with StorageIO(
        store,
        BLOCKS,
        write_bytes=max_bytes,
        read_bytes=max_bytes,
        num_in_flight=4,
        clock=clock,
    ) as storage:

        def take(completions):
            for completion in completions:
                assert open_tickets.pop(completion.ticket) == completion.kind
                outcomes[completion.kind, completion.outcome] += 1
                if completion.payload is not None:
                    number = int.from_bytes(completion.key, "big")
                    assert bytes(completion.payload) == payload(number)

        for _ in range(1500):
            numbers = [rng.randrange(60) for _ in range(rng.randrange(5))]
            match rng.randrange(8):
                case 0 | 1 | 2:
                    tickets, kind = storage.submit_writes(writes(*numbers)), "write"
                case 3 | 4:
                    until_s = clock.now_s + rng.choice([0.0, 5.0, FOREVER])
                    tickets = storage.submit_reads(map(key, numbers), until_s)
                    kind = "read"
                case 5:
                    runs = [list(map(key, numbers))] if numbers else []
                    tickets = storage.submit_probes(runs, clock.now_s + 9)
                    kind = "probe"
                case 6:
                    storage.delete(map(key, numbers))
                    tickets = []
                case _:
                    cancelled = [t for t in open_tickets if rng.random() < 0.1]
                    storage.cancel(cancelled)
                    for ticket in cancelled:
                        del open_tickets[ticket]
                    tickets = []
            open_tickets |= {t: kind for t in tickets if t is not None}
            assert storage.stats.queued_write_bytes <= max_bytes
            assert storage.stats.open_read_bytes <= max_bytes
            if rng.random() < 0.02:
                store.let_go()
            if storage.is_down and rng.random() < 0.1:
                wait_for(lambda: store.let_go() * 0 or not storage.is_down)
            clock.now_s += rng.random() / 4
            take(storage.wait(0.001) if rng.random() < 0.3 else storage.poll())
        store.faults = Faults()
        clock.now_s += 100

        def is_over():
            store.let_go()
            take(storage.poll())
            stats = storage.stats
            return not (stats.queued_write_bytes or stats.open_read_bytes)

        wait_for(is_over)
        take(storage.poll())
        assert not open_tickets
    assert outcomes["read", "done"] > 20
    assert outcomes["write", "done"] > 100
    assert sum(store.num_faults.values()) > 50


@pytest.mark.parametrize(("num_in_flight", "at_once"), [(16, 3), (2, 2)])
def test_a_store_is_called_by_the_threads_and_for_the_bytes_of_its_lanes(
    num_in_flight, at_once
):
    calls = []

    class Recording(MemoryStore):
        lanes = Lanes(readers=1, writers=1, call_bytes=3 * OBJECT + 7)

        def get(self, names, max_bytes):
            calls.append((threading.current_thread(), len(names)))
            return super().get(names, max_bytes)

    with StorageIO(Recording(), BLOCKS, num_in_flight=num_in_flight) as storage:
        write_all(storage, *range(20))
        check_reads(storage, *range(20))
    threads, sizes = zip(*calls, strict=True)
    assert len(set(threads)) == 1
    assert sizes == (at_once,) * (20 // at_once) + (20 % at_once,) * bool(20 % at_once)


def test_a_store_that_gives_another_number_of_answers_has_failed_for_all(clock):
    store = MemoryStore()
    store.get = lambda names, max_bytes: [None] * (len(names) + 1)
    with StorageIO(store, BLOCKS, clock=clock) as storage:
        read = read_all(storage, 1, 2)
        assert {(c.outcome, c.reason) for c in read} == {("failed", "other")}
        assert "answers for" in storage.stats.last_error


def test_writes_that_do_not_fit_are_dropped_and_counted(faulty):
    faulty.faults.hang = 1.0
    with StorageIO(faulty, BLOCKS, write_bytes=5 * OBJECT + 7) as storage:
        tickets = storage.submit_writes(writes(*range(8)))
        assert [ticket is None for ticket in tickets] == [False] * 5 + [True] * 3
        assert storage.stats.num_dropped == 3
        assert storage.stats.queued_write_bytes == 5 * OBJECT
        wait_for(lambda: faulty.num_faults["hang"])
        faulty.faults.hang = 0.0
        while storage.stats.queued_write_bytes:
            faulty.let_go()
        assert len(storage.poll()) == 5
        assert len(write_all(storage, 9)) == 1
    with StorageIO(faulty, BLOCKS, write_bytes=1, read_bytes=1) as storage:
        write_all(storage, 1)  # One block fits a queue that is smaller.
        check_reads(storage, 1)


def test_reads_end_at_their_deadline_and_a_late_answer_is_thrown_away(faulty, clock):
    with StorageIO(faulty, BLOCKS, read_bytes=3 * OBJECT, clock=clock) as storage:
        write_all(storage, 1, 2)
        faulty.faults.hang = 1.0
        tickets = storage.submit_reads([key(1), key(2)], clock.now_s + 5)
        wait_for(lambda: faulty.num_faults["hang"] == 2)
        clock.now_s += 4.9
        assert storage.poll() == []
        clock.now_s += 0.1
        done = storage.poll()
        assert [c.ticket for c in done] == tickets
        assert {(c.outcome, c.payload) for c in done} == {("late", None)}
        assert storage.stats.num_late == 2
        # Their memory is the store's until it answers.
        assert storage.stats.open_read_bytes == 2 * OBJECT
        faulty.faults.hang = 0.0
        faulty.let_go()
        # The late answers are thrown away by other threads.
        wait_for(lambda: storage.stats.open_read_bytes == 0)
        assert storage.stats.num_read == 0


def test_reads_beyond_the_queues_room_are_busy(faulty, clock):
    with StorageIO(faulty, BLOCKS, read_bytes=1 * OBJECT, clock=clock) as storage:
        write_all(storage, 1, 2)
        faulty.faults.hang = 1.0
        tickets = storage.submit_reads([key(1), key(2)], FOREVER)
        (busy,) = storage.poll()
        assert busy.ticket == tickets[1]
        assert (busy.outcome, busy.reason) == ("failed", "busy")
        wait_for(lambda: faulty.num_faults["hang"] == 1)
        faulty.let_go()
        (done,) = wait_all(storage, 1)
        assert bytes(done.payload) == payload(1)


def test_a_store_that_hangs_is_asked_by_one_call_and_all_else_fails_at_once(
    faulty, clock
):
    faulty.faults.hang = 1.0
    with StorageIO(faulty, BLOCKS, num_in_flight=2, clock=clock) as storage:
        storage.submit_reads([key(9)], FOREVER)
        wait_for(lambda: faulty.num_hanging == 1)
        for number in range(500):
            storage.submit_reads(map(key, range(4)), clock.now_s + 1)
            storage.submit_probes([list(map(key, range(4)))], clock.now_s + 1)
            (written,) = storage.submit_writes(writes(1))
            assert (written is None) == (number > 0)
            clock.now_s += 1
            storage.poll()
        assert storage.is_down
        assert storage.stats.open_read_bytes <= 2 * OBJECT
        assert not any(storage._queues.values())
        assert storage.stats.num_late == 4
        assert storage.stats.failed == {
            **{"probe late": 1, "probe down": 499, "read down": 1996}
        }
        storage.list_all()
        assert storage.take_pages(1)[1] == Listed(False)
        faulty.faults.hang = 0.0
        assert storage.is_down, "no call has been answered"
        faulty.let_go()
        wait_for(lambda: not storage.is_down)
        write_all(storage, 1)
        storage.submit_reads([key(1)], FOREVER)
        (done,) = wait_all(storage, 1)
        assert bytes(done.payload) == payload(1)


def test_a_store_that_cannot_be_reached_is_tried_again_less_and_less_often(faulty):
    calls_s = []

    def exists(names):
        calls_s.append(time.monotonic())
        if len(calls_s) < 4:
            raise StoreError("unreachable", "refused")
        return [False] * len(names)

    def get(names, max_bytes):
        raise StoreError("unreachable", "refused")

    faulty.exists, faulty.get = exists, get
    with StorageIO(faulty, BLOCKS) as storage:
        storage.submit_reads([key(1), key(2)], FOREVER)
        assert [done.reason for done in wait_all(storage, 2)] in (
            ["unreachable"] * 2,
            ["unreachable", "down"],
        )
        wait_for(lambda: len(calls_s) == 4 and not storage.is_down)
        pauses_s = [after - before for before, after in itertools.pairwise(calls_s)]
        assert all(map(operator.ge, pauses_s, (0.1, 0.2, 0.4)))


def test_the_end_of_one_queued_read_does_not_scan_the_queue(faulty, faulty_storage):
    faulty.faults.hang = 1.0
    tickets = faulty_storage.submit_reads(map(key, range(30)), FOREVER)
    wait_for(lambda: faulty.num_faults["hang"] == 1)
    queue = faulty_storage._queues["read"]
    faulty_storage.cancel(tickets[-1:])
    assert faulty_storage._queues["read"] is queue


def test_reads_do_not_wait_for_writes_that_hang(faulty):
    with StorageIO(faulty, BLOCKS, num_in_flight=4) as storage:
        write_all(storage, 1)
        faulty.faults.hang = 1.0
        storage.submit_writes(writes(*range(2, 200)))
        wait_for(lambda: faulty.num_faults["hang"] >= 4)
        faulty.faults.hang = 0.0
        check_reads(storage, 1)


def test_what_was_cancelled_is_not_reported(faulty, faulty_storage):
    storage = faulty_storage
    write_all(storage, *range(4))
    (done,) = storage.submit_reads([key(0)], FOREVER)
    wait_for(lambda: storage.stats.num_read == 1)
    faulty.faults.hang = 1.0
    in_flight, queued, kept = storage.submit_reads(map(key, (1, 2, 3)), FOREVER)
    (dropped,) = storage.submit_writes(writes(9))
    wait_for(lambda: faulty.num_faults["hang"] == 2)
    storage.cancel([done, in_flight, queued, dropped, 12345])
    assert storage.stats.open_read_bytes == 2 * OBJECT
    assert storage.poll() == []
    faulty.faults.hang = 0.0
    faulty.let_go()
    (read,) = wait_all(storage, 1)
    assert read.ticket == kept
    assert bytes(read.payload) == payload(3)
    assert storage.stats.open_read_bytes == 0


def replace(store, number, change):
    name = BLOCKS.name(key(number))
    [data] = get(store, name)
    put(store, {name: change(data)})


DAMAGES = [
    (lambda data: data[:-1], "torn"),
    (lambda data: b"", "torn"),
    (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
    (lambda data: b"something else", "foreign"),
    (lambda data: bytes(len(data)), "foreign"),
    (lambda data: bytes(1 << 20), "foreign"),
    (lambda data: data.replace(key(1), key(2)), "key"),
]


def test_what_is_not_right_is_refused_and_deleted_unless_it_is_foreign(store, storage):
    refused, num_deleted = collections.Counter(), 0
    for damage, reason in DAMAGES:
        write_all(storage, 1)
        replace(store, 1, damage)
        (read,) = read_all(storage, 1)
        assert (read.outcome, read.reason, read.payload) == ("refused", reason, None)
        assert read.num_bytes <= OBJECT, "it reads no further than a block goes"
        refused[reason] += 1
        if reason == "foreign":
            assert outcomes(storage, 1) == ["refused"]
            refused[reason] += 1
        else:
            num_deleted += 1
            wait_for(lambda num=num_deleted: storage.stats.num_deleted == num)
            assert outcomes(storage, 1) == ["missing"]
        assert storage.stats.refused == refused
        assert storage.stats.num_deleted == num_deleted
        write_all(storage, 1)
        check_reads(storage, 1)
    replace(store, 1, lambda data: data + bytes(1 << 20))
    check_reads(storage, 1)


def test_a_write_takes_back_a_delete_that_waits_before_it(faulty, faulty_storage):
    storage = faulty_storage
    write_all(storage, 1)
    faulty.faults.hang = 1.0
    storage.delete([key(5)])
    wait_for(lambda: faulty.num_faults["hang"])
    storage.delete([key(1)])
    faulty.faults.hang = 0.0
    write_all(storage, 1)
    faulty.let_go()
    wait_for(lambda: storage.stats.num_deleted)
    check_reads(storage, 1)
    assert storage.stats.num_deleted == 1


def test_deletes_beyond_the_queues_room_are_forgotten(
    faulty, faulty_storage, monkeypatch
):
    monkeypatch.setattr("jaxkv.transfer.storage.storage_io._MAX_DELETES", 2)
    storage = faulty_storage
    write_all(storage, *range(5))
    faulty.faults.hang = 1.0
    storage.delete([key(0)])
    wait_for(lambda: faulty.num_faults["hang"])
    storage.delete(map(key, range(1, 5)))
    faulty.faults.hang = 0.0
    faulty.let_go()
    wait_for(lambda: storage.stats.num_deleted == 3)
    assert outcomes(storage, *range(5)) == ["missing"] * 3 + ["done"] * 2


def test_a_probe_counts_stored_blocks_of_a_run_and_a_listing_has_every_shard(store):
    shards = [ObjectFormat(b"m", "u8", SIZE, shard=n, num_shards=2) for n in range(2)]
    run = list(map(key, range(100)))
    with StorageIO(store, shards[0]) as storage, StorageIO(store, shards[1]) as shard_1:
        write_all(storage, *range(77))
        write_all(shard_1, 77)  # Shard 0 has nothing of block 77.
        runs = [run, run[60:], run[77:], run[:1]]
        tickets = storage.submit_probes(runs, FOREVER)
        probes = {probe.ticket: probe for probe in wait_all(storage, 4)}
        assert [probes[ticket].num_found for ticket in tickets] == [77, 17, 0, 1]
        outcomes = [probes[ticket].outcome for ticket in tickets]
        assert outcomes == ["done", "done", "missing", "done"]
        assert {probe.kind for probe in probes.values()} == {"probe"}
        assert storage.stats.num_probed < 60
        shard_1.list_all()
        listed = [(key(n), 0) for n in range(77)] + [(key(77), 1)]
        assert take_all_pages(shard_1) == listed
        with pytest.raises(ValueError, match="no keys"):
            storage.submit_probes([run, []], FOREVER)


def take_all_pages(storage):
    pages, ended = [], None
    while ended is None:
        new_pages, ended = storage.take_pages(100)
        pages += new_pages
    return sorted(
        pair for page in pages for pair in zip(page.keys, page.shards, strict=True)
    )


def test_a_new_process_finds_all_blocks_and_nothing_else(store, storage):
    foreign = ObjectFormat(b"another", "u8[100]", SIZE)
    write_all(storage, *range(300))
    folder, name = BLOCKS.folder, BLOCKS.name(key(7))
    strange = [
        f"{folder}/00/notes.txt",
        f"{folder}/README",
        foreign.name(key(7)),
        name.replace("/00/", "/01/"),
        f"{name}0",
        name.replace("7.", "g."),
        name.replace("07.", "07.0"),
    ]
    put(store, dict.fromkeys(strange, b"?"))
    for _ in range(2):
        storage.list_all()
        assert take_all_pages(storage) == [(key(n), 0) for n in range(300)]
    assert all(exists(store, *strange))


def test_a_listing_that_fails_ends_and_is_counted(faulty, faulty_storage):
    storage = faulty_storage
    write_all(storage, 1)
    faulty.faults.error = 1.0
    storage.list_all()
    with pytest.raises(RuntimeError, match="listed already"):
        storage.list_all()
    assert take_all_pages(storage) == []
    assert storage.stats.failed == {"list other": 1}
    faulty.faults.error = 0.0
    storage.list_all()
    assert take_all_pages(storage) == [(key(1), 0)]


@pytest.mark.parametrize("fault", ["error", "raising"])
def test_failures_of_the_store_are_reported_and_counted(faulty, faulty_storage, fault):
    setattr(faulty.faults, fault, 1.0)
    storage = faulty_storage
    done = [*write_all(storage, 1), *read_all(storage, 1)]
    storage.submit_probes([[key(1)]], FOREVER)
    for completion in (*done, *wait_all(storage, 1)):
        assert (completion.outcome, completion.reason) == ("failed", "other")
    storage.delete([key(1)])
    wait_for(lambda: len(storage.stats.failed) == 4)
    kinds = ("delete", "probe", "read", "write")
    assert storage.stats.failed == {f"{kind} other": 1 for kind in kinds}
    assert "injected" in storage.stats.last_error
    assert storage.stats.queued_write_bytes == storage.stats.open_read_bytes == 0


@pytest.mark.parametrize("what", ["written", "deleted"])
def test_close_waits_for_what_is_open_if_it_is_given_the_time(faulty, what):
    faulty.faults.hang = 1.0
    storage = StorageIO(faulty, BLOCKS)
    if what == "written":
        storage.submit_writes(writes(*range(100)))
    else:
        storage.delete(map(key, range(100)))
    wait_for(lambda: faulty.num_faults["hang"])
    faulty.faults.hang = 0.0
    timer = threading.Timer(0.1, faulty.let_go)
    timer.start()
    storage.close(60.0)
    assert getattr(storage.stats, f"num_{what}") == 100
    assert storage.stats.num_dropped == 0
    timer.join()


def test_close_does_not_wait_for_a_store_that_hangs(faulty):
    faulty.faults.hang = 1.0
    storage = StorageIO(faulty, BLOCKS, num_in_flight=2)
    storage.submit_writes(writes(*range(10)))
    storage.submit_reads(map(key, range(10)), FOREVER)
    wait_for(lambda: faulty.num_faults["hang"] == 4)
    storage.close(0.05)
    storage.close()
    assert storage.stats.num_dropped == 10 - 2
    done = storage.poll()
    assert len(done) == 10 - 2 + 10 - 2
    assert {(c.outcome, c.reason) for c in done} == {("failed", "closed")}
    faulty.let_go()
    wait_all(storage, 4)
    # Nothing begins any more.
    assert storage.submit_writes(writes(1)) == [None]
    storage.submit_reads([key(1), key(2)], FOREVER)
    storage.delete([key(1)])
    done = [(c.outcome, c.reason) for c in storage.poll()]
    assert done == [("failed", "busy")] * 2
    assert storage.stats.failed == {"read busy": 2}
    assert storage.wait() == []


def test_wrong_payloads_keys_and_sizes_are_refused_with_all_beside_them():
    with StorageIO(MemoryStore(), BLOCKS) as storage:
        for num_bytes in (SIZE - 1, SIZE + 1, 0):
            wrong = f"payload of {num_bytes} bytes must have"
            with pytest.raises(ValueError, match=wrong):
                storage.submit_writes([*writes(1), (key(2), [bytes(num_bytes)])])
        with pytest.raises(ValueError, match="must have 32 bytes"):
            storage.submit_reads([key(1), b"short"], FOREVER)
        assert storage.stats.queued_write_bytes == storage.stats.open_read_bytes == 0
        assert storage.wait() == []
    for name in ("write_bytes", "read_bytes", "num_in_flight"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            StorageIO(MemoryStore(), BLOCKS, **{name: 0})


def test_a_rate_counts_the_recent_time_in_which_something_is_in_flight():
    rate = Rate()
    assert rate.bytes_per_s == 0
    rate.start(10.0)
    rate.start(10.5)  # Both at once: the time counts once.
    rate.stop(11.0, 300)
    rate.stop(11.0, 300)
    assert rate.bytes_per_s == pytest.approx(600, rel=0.1)
    rate.start(500.0)  # Nothing was asked for meanwhile.
    rate.stop(500.5, 300)
    assert rate.bytes_per_s == pytest.approx(600, rel=0.1)
    # It forgets, and sinks while nothing arrives.
    rate = Rate()
    for second in range(60):
        rate.start(second)
        rate.stop(second + 1, 1000)
    assert rate.bytes_per_s == pytest.approx(1000, rel=0.1)
    for second in range(60, 90):
        rate.start(second)
        rate.stop(second + 1, 100)
    assert 100 < rate.bytes_per_s < 300
    rate.start(90)
    rate.stop(150, 0)
    assert rate.bytes_per_s < 10


def test_the_rate_of_reads_is_measured(faulty, faulty_storage, clock):
    storage = faulty_storage
    write_all(storage, 1)
    assert storage.read_bytes_per_s == 0
    faulty.faults.hang = 1.0
    storage.submit_reads([key(1)], FOREVER)
    wait_for(lambda: faulty.num_faults["hang"] == 1)
    clock.now_s += 0.25
    faulty.let_go()
    wait_all(storage, 1)
    assert storage.read_bytes_per_s == pytest.approx(4 * OBJECT)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_calls_without_a_thread_fail_at_once_and_later_ones_are_made(
    store, error, caplog
):
    def submit_each():
        storage.submit_reads([key(1)], FOREVER)
        storage.submit_writes(writes(1))
        storage.submit_probes([[key(1)]], FOREVER)

    with refused_threads(error=error):
        storage = StorageIO(store, BLOCKS)
        submit_each()
        done = storage.wait(0)
        assert {(c.kind, c.outcome, c.reason) for c in done} == {
            (kind, "failed", "other") for kind in ("read", "write", "probe")
        }
        storage.delete([key(1)])
        storage.list_all()
        pages, ended = storage.take_pages(10)
        assert (pages, ended.is_whole) == ([], False)
        stats = storage.stats
        assert stats.failed == dict.fromkeys(
            ("list other", "probe other", "read other", "write other"), 1
        )
        assert stats.queued_write_bytes == stats.open_read_bytes == 0
        assert "can't start new thread" in stats.last_error
        storage.log_health()
    write_all(storage, 1)
    submit_each()
    assert {c.outcome for c in wait_all(storage, 3)} == {"done"}
    storage.list_all()
    assert take_all_pages(storage) == [(key(1), 0)]
    assert storage.is_up
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    storage.close(60.0)


def test_a_thread_that_cannot_be_started_is_started_by_a_later_call(tmp_path):
    for first in range(0, 10, 3):
        with refused_threads(first, 1) as refused:
            storage = StorageIO(LocalStore(str(tmp_path)), BLOCKS)
        assert len(refused) == 1
        write_all(storage, *range(9))
        check_reads(storage, *range(9))
        storage.submit_probes([[key(1)]], FOREVER)
        wait_all(storage, 1)
        assert not any(crew.num_missing for crew in storage._crews.values())
        storage.close(60.0)


def test_a_delete_that_failed_is_made_again_at_the_next_listing(faulty, faulty_storage):
    storage = faulty_storage
    write_all(storage, 1, 2)
    faulty.faults.error = 1.0
    storage.delete([key(1), key(2)])
    wait_for(lambda: storage.stats.failed == {"delete other": 2})
    faulty.faults.error = 0.0
    write_all(storage, 2)  # It must stay.
    storage.list_all()
    wait_for(lambda: storage.stats.num_deleted == 1)
    assert outcomes(storage, 1, 2) == ["missing", "done"]
    assert storage.is_up


class FullStore(MemoryStore):
    """A store with room for some objects, which counts the writes that it is given."""

    room = num_tried = 0

    def put(self, items):
        self.num_tried += len(items)
        if len(self._blobs) + len(items) <= self.room:
            return super().put(items)
        return [StoreError("full", "No space left on device")] * len(items)


def test_a_full_store_is_written_again_after_a_second_or_a_delete(clock):
    store = FullStore()
    with StorageIO(store, BLOCKS, clock=clock) as storage:
        [failed] = write_all(storage, 1)
        assert (failed.outcome, failed.reason) == ("failed", "full")
        for number in range(50):
            assert storage.submit_writes(writes(number)) == [None]
        assert (store.num_tried, storage.stats.num_dropped) == (1, 50)
        clock.now_s += 1.0
        write_all(storage, 2)
        assert store.num_tried == 2
        assert storage.submit_writes(writes(3)) == [None]
        storage.delete([key(9)])
        wait_for(lambda: storage.stats.num_deleted == 1)
        store.room = 1
        assert write_all(storage, 3)[0].outcome == "done"
        assert storage.stats.failed == {"write full": 2}


def test_a_full_store_that_takes_no_record_of_a_bound_is_still_listed_and_trimmed():
    store = FullStore()
    store.room = 10
    with StorageIO(store, BLOCKS) as storage:
        write_all(storage, *range(10))
        storage.list_all(Bound(4))
        pages, ended = [], None
        while ended is None:
            new_pages, ended = storage.take_pages(100)
            pages += new_pages
        assert sum(len(page.keys) for page in pages) == 10
        assert (ended.is_whole, ended.bound, ended.num_blocks) == (True, 4, 4)
        wait_for(lambda: storage.stats.num_deleted == 6)
        assert storage.stats.failed == {"write full": 1}
