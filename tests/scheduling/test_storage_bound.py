"""The bound on the blocks of a store that engines share."""

import itertools
import pathlib
import random
import signal
import threading
import time

import pytest

from jaxkv.transfer.storage import (
    LocalStore,
    MemoryStore,
    ObjectFormat,
    StorageIO,
    StoreError,
)
from jaxkv.transfer.storage.census import Bound, Census
from tests.rigs.children import FORKS
from tests.rigs.offload_rig import StoredEngine, make_keys
from tests.rigs.waiting import wait_for

BLOCKS = ObjectFormat(b"m", "u8[8]", 8)


def files(folder):
    return len(list(folder.rglob("*.0")))


def writer(folder, num_blocks=40, **options):
    """An engine whose store may hold `num_blocks`; the test decides on listings."""
    num_bytes = num_blocks * StoredEngine.OBJECT_BYTES
    return StoredEngine(folder, storage_bytes=num_bytes, storage_list_s=None, **options)


def write(engine, *numbers):
    for number in numbers:
        engine.write(make_keys(number))


def test_engines_in_turn_leave_no_more_than_the_bound(tmp_path):
    for turn in range(5):
        with writer(tmp_path) as engine:
            write(engine, *range(100 * turn, 100 * turn + 15))  # Before it is listed.
            engine.list()
            write(engine, *range(100 * turn + 15, 100 * turn + 30))
        assert files(tmp_path) <= 40 * 1.1


def write_without_end(folder, start):
    engine = writer(folder)
    for number in itertools.count(start):
        write(engine, number)


@pytest.mark.long
def test_engines_that_are_killed_in_turn_leave_no_more_than_the_bound(tmp_path):
    rng = random.Random(7)
    for life in range(6):
        start = 1_000_000 * life
        child = FORKS.Process(target=write_without_end, args=(tmp_path, start))
        before = set(tmp_path.rglob("*.0"))
        child.start()
        try:
            wait_for(lambda before=before: len({*tmp_path.rglob("*.0")} - before) > 15)
            time.sleep(rng.uniform(0, 0.05))
        finally:
            child.kill()
            child.join()
        assert child.exitcode == -signal.SIGKILL
    with writer(tmp_path) as engine:
        engine.list()
        assert files(tmp_path) <= 40 * 1.1
        write(engine, *range(30))
        assert files(tmp_path) <= 40 * 1.1


def test_three_engines_at_once_keep_the_bound_after_each_listing(tmp_path):
    engines = [writer(tmp_path) for _ in range(3)]
    for rounds in range(2):
        for number, engine in enumerate(engines):
            start = 1000 * number + 100 * rounds
            write(engine, *range(start, start + 30))
        for engine in engines:
            engine.list()
            assert files(tmp_path) <= 40 * 1.25
    for engine in engines:
        engine.storage.close(5.0)


def test_a_small_engine_that_joins_a_large_store_deletes_nothing_of_others(tmp_path):
    with writer(tmp_path, num_blocks=200) as large:
        large.list()
        write(large, *range(100))
    with writer(tmp_path, num_blocks=40) as small:
        small.list()
        assert small.scheduler.num_storage_blocks_left_out == 60
        write(small, *range(100, 120))
        assert files(tmp_path) == 120
        assert small.scheduler.num_storage_blocks_left_out == 80
    with writer(tmp_path, num_blocks=40, storage_owner=True) as owner:
        owner.list()
        assert files(tmp_path) == 40
    with writer(tmp_path, num_blocks=200) as large:
        large.list()
        write(large, *range(200, 210))
        wait_for(lambda: files(tmp_path) == 40)  # Deletes follow the writes.


class Timeless:
    """A store without times of use, like a bucket."""

    def __init__(self):
        inner = MemoryStore()
        for name in ("url", "get", "put", "exists", "delete", "list", "close"):
            setattr(self, name, getattr(inner, name))


def listed(storage, bound):
    storage.list_all(bound)
    ended = None
    while ended is None:
        _, ended = storage.take_pages(100)
    return ended


@pytest.mark.parametrize("make_store", [MemoryStore, Timeless])
def test_blocks_beyond_the_bound_are_deleted_oldest_first(make_store):
    keys = [bytes([200 - number]) * 32 for number in range(9)]
    with StorageIO(make_store(), BLOCKS) as storage:
        for number, key in enumerate(keys):
            storage.submit_writes([(key, [bytes(8)])])
            storage.wait(60)
            if number < 5:
                time.sleep(1e-3)
                # Which records the order of what is there.
                assert listed(storage, Bound(5)).deleted == ()
        ended = listed(storage, Bound(5))
        assert (ended.bound, ended.num_blocks) == (5, 5)
        assert set(ended.deleted) == set(keys[:4])
        wait_for(lambda: storage.stats.num_deleted == 4)


class Evicting(MemoryStore):
    """A store that forgets what was not read since it was listed."""

    def __init__(self):
        super().__init__()
        self.num_read = 0

    def get(self, names, max_bytes):
        self.num_read += len(names)
        return super().get(names, max_bytes)

    def lose(self, name):
        self.delete([name])


@pytest.mark.parametrize("bound", [Bound(40), Bound(4, True)])
def test_a_bound_that_the_store_has_evicted_holds_and_is_recorded_again(bound):
    store = Evicting()
    keys = [bytes([number]) * 32 for number in range(9)]
    with StorageIO(store, BLOCKS) as storage:
        storage.submit_writes([(key, [bytes(8)]) for key in keys])
        while storage.stats.num_written < len(keys):
            storage.wait(60)
        name = BLOCKS.bound_name(bound)
        store.put([(name, [b"jaxkv\n"])])  # As another engine has recorded it.
        assert listed(storage, Bound(2)).bound == bound.num_blocks
        assert store.num_read == 1, "a store that evicts keeps what is read"
        assert store.exists([name])[0], "only an owner deletes an owner's record"
        store.lose(name)
        ended = listed(storage, Bound(2))
        assert ended.bound == bound.num_blocks
        assert store.exists([name])[0]
        # Another owner replaces an owner's bound.
        owner = Bound(3, True)
        store.lose(name)
        store.put([(BLOCKS.bound_name(owner), [b"jaxkv\n"])])
        assert listed(storage, Bound(2)).bound == 3
        assert store.exists([name])[0] is not bound.is_owners


def test_a_label_is_recorded_beside_the_bound_until_the_store_loses_it():
    store = MemoryStore()
    name = BLOCKS.label_name("llama, bfloat16")
    with StorageIO(store, BLOCKS) as storage:
        listed(storage, Bound(9))
        assert "label" not in str(*store.list(BLOCKS.folder))
        storage.label = "llama, bfloat16"
        for _ in range(2):
            listed(storage, Bound(9))
            assert store.exists([name]) == [True]
            store.delete([name])
    assert bytes.fromhex(name.rpartition(".")[2]) == b"llama, bfloat16"
    assert len(BLOCKS.label_name("x" * 999)) < 255


def test_an_owner_forgets_the_larger_bound_of_the_owner_before():
    store = MemoryStore()
    names = [BLOCKS.bound_name(Bound(number, True)) for number in (9, 3)]
    store.put([(names[0], [b"jaxkv\n"])])
    with StorageIO(store, BLOCKS) as storage:
        assert listed(storage, Bound(3, True)).bound == 3
        assert store.exists(names) == [False, True]
        store.delete(names)  # As a store that evicts records does.
        assert listed(storage, Bound(2)).bound == 3


def test_a_block_that_a_listing_has_twice_counts_once():
    store = MemoryStore()
    store.times = lambda names: [int(name) for name in names]
    census = Census(store, "order")
    first, second, third = make_keys(1, 2, 3)
    census.add_page([first, second], ["5", "7"])
    census.add_page([first, third], ["9", "6"])
    assert census.oldest_first() == [third, second, first]
    assert Census(store, "order").oldest_first() == []


def test_nobody_without_the_secret_can_record_a_bound():
    sealed = ObjectFormat(b"m", "u8[8]", 8, secret="a secret of 16 bytes")
    name = sealed.bound_name(Bound(40))
    assert sealed.bounds_of([name]) == [Bound(40)]
    assert sealed.bounds_of([name.replace("40", "41"), name[:-1], "README"]) == []


def full_beyond(monkeypatch, num):
    """Make each folder refuse blocks beyond `num`, like a full disk."""
    put, lock = LocalStore.put, threading.Lock()

    def put_if_it_fits(store, items):
        [(name, _)] = items
        with lock:
            root = pathlib.Path(store.path)
            is_new = name.endswith(".0") and not (root / name).exists()
            if is_new and files(root) >= num:
                return [StoreError("full", "No space left on device")]
            return put(store, items)

    monkeypatch.setattr(LocalStore, "put", put_if_it_fits)


def numbers_in(folder, numbers):
    return [number for number in numbers if path_of(folder, number).exists()]


def path_of(folder, number):
    [key] = make_keys(number)
    [root] = (folder / "jaxkv1").iterdir()
    return root / key.hex()[:2] / f"{key.hex()}.0"


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_engines_on_a_full_disk_keep_what_is_used_now_and_delete_no_more_than_needed(
    tmp_path, monkeypatch, num_engines
):
    full_beyond(monkeypatch, 40)
    with writer(tmp_path, num_blocks=1000) as engine:
        engine.list()
        write(engine, *range(60))
        assert files(tmp_path) > 40 - 8
        yesterday = numbers_in(tmp_path, range(60))
        assert min(yesterday) > 15  # The oldest went first.
    engines = [writer(tmp_path, num_blocks=1000) for _ in range(num_engines)]
    for engine in engines:
        engine.list()
    for number in range(100, 190):
        write(engines[number % num_engines], number)
    stats = [engine.storage.storage_io.stats for engine in engines]
    for engine in engines:
        engine.storage.close(5.0)
    # One goes for each that came or found no room.
    num_failed = sum(engine_stats.failed.get("write full", 0) for engine_stats in stats)
    assert sum(engine_stats.num_deleted for engine_stats in stats) <= 90 + num_failed
    # They choose the same old blocks, and each deletion makes room only once.
    assert num_failed < 90 * num_engines / 4
    assert files(tmp_path) > 40 - 8 * num_engines
    today = numbers_in(tmp_path, range(100, 190))
    assert len(today) > 40 - 12 * num_engines
    assert numbers_in(tmp_path, range(60)) == [] or num_engines > 1


def test_a_full_disk_without_a_block_of_ours_is_tried_again_and_then_used(
    tmp_path, monkeypatch
):
    full_beyond(monkeypatch, 0)
    with writer(tmp_path, num_blocks=1000) as engine:
        engine.list()
        write(engine, *range(30))
        stats = engine.storage.storage_io.stats
        assert 0 < stats.failed["write full"] < 30
        assert (stats.num_written, stats.num_deleted) == (0, 0)
        full_beyond(monkeypatch, 100)
        monkeypatch.undo()
        engine.list()
        engine.storage.storage_io._full_until_s = 0.0
        write(engine, *range(30, 60))
        assert files(tmp_path) == 30
