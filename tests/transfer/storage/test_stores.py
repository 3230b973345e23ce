"""What every store does, whatever keeps its bytes."""

import os
import threading
from concurrent.futures import wait

import numpy as np
import pytest

from jaxkv.transfer.storage import LocalStore, MemoryStore, StoreError, open_store

MOST = 1 << 30


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "s")
    yield store
    store.close()


def get(store, *names):
    return [
        None if future.result(60) is None else bytes(future.result())
        for future in store.get(names, MOST)
    ]


def put(store, **blobs):
    named = {name.replace("__", "/"): blob for name, blob in blobs.items()}
    for future in store.put([(name, [blob]) for name, blob in named.items()]):
        future.result(60)


def listed(store, folder):
    pages = list(store.list(folder))
    return sorted(each for page in pages for each in page)


def test_what_was_put_is_found_until_it_is_deleted(store):
    put(store, a__1=b"one", a__2=b"two", b__1=b"three")
    assert get(store, "a/1", "nowhere", "a/2") == [b"one", None, b"two"]
    answers = [future.result(60) for future in store.exists(["a/1", "a/3"])]
    assert answers == [True, False]
    for future in store.delete(["a/1", "a/3"]):
        assert future.result(60) is None
    assert get(store, "a/1", "a/2") == [None, b"two"]


def test_pieces_are_joined(store):
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(int(n)) for n in rng.integers(0, 50, 2000)]
    store.put([("a/1", [memoryview(piece) for piece in pieces])])[0].result(60)
    assert get(store, "a/1") == [b"".join(pieces)]


def test_a_folder_is_listed_with_all_below_it(store):
    put(store, a__1=b"1", a__b__2=b"22", ab__3=b"333", c=b"4")
    assert listed(store, "a") == [("a/1", 1), ("a/b/2", 2)]
    assert listed(store, "nowhere") == []


def test_many_objects_are_listed_once_each(store):
    items = [(f"a/{n % 7}/{n}", [b"x" * (n % 3)]) for n in range(5000)]
    wait(store.put(items), 60)
    assert listed(store, "a") == sorted(
        (name, n % 3) for n, (name, _) in enumerate(items)
    )


def test_no_more_is_read_than_is_wanted(store):
    put(store, a=b"x" * 1000)
    (future,) = store.get(["a"], 10)
    assert bytes(future.result(60)) == b"x" * 10


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "../a", "a/../b", ".tmp/a", "a//b", "a b", "ä", "a" * 300]
)
def test_a_name_that_is_none_is_refused(store, name):
    for call in (
        lambda: store.get([name], MOST),
        lambda: store.put([(name, [b"x"])]),
        lambda: store.exists([name]),
        lambda: store.delete([name]),
        lambda: list(store.list(name)),
    ):
        with pytest.raises(ValueError, match="no name of an object"):
            call()


def test_writers_of_one_name_leave_one_of_their_objects_and_readers_no_mixture(store):
    blobs = [bytes([n]) * 20_000 for n in range(4)]
    seen = set()

    def write(blob):
        for _ in range(25):
            store.put([("a/1", [blob[:100], blob[100:]])])[0].result(60)

    threads = [threading.Thread(target=write, args=(blob,)) for blob in blobs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.update(get(store, "a/1"))
    for thread in threads:
        thread.join()
    seen.update(get(store, "a/1"))
    assert seen <= {None, *blobs}
    assert seen - {None}


def test_files_and_folders_are_the_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "new" / "store")
        put(store, a__b__1=b"x")
    finally:
        os.umask(old)
    root = tmp_path / "new" / "store"
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in root.rglob("*")}
    assert modes == {".tmp": "0o700", "a": "0o700", "b": "0o700", "1": "0o600"}
    assert root.stat().st_mode & 0o777 == 0o700
    store.close()


def test_a_group_can_share_a_folder_whatever_the_umask(tmp_path):
    old = os.umask(0o077)
    try:
        store = open_store(f"file://{tmp_path}/store?mode=660")
        put(store, a__1=b"x")
    finally:
        os.umask(old)
    modes = {p.name: oct(p.stat().st_mode & 0o777) for p in tmp_path.rglob("*")}
    assert modes == {"store": "0o770", ".tmp": "0o770", "a": "0o770", "1": "0o660"}
    store.close()


def test_what_is_no_file_is_not_read(tmp_path):
    store = LocalStore(tmp_path)
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe")
    (tmp_path / "secret").write_text("of others")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "a" / "folder").mkdir()
    for name in ("a/pipe", "a/link", "a/folder"):
        (future,) = store.get([name], MOST)
        assert isinstance(future.exception(60), StoreError)
    assert listed(store, "a") == []
    store.close()


def test_a_folder_removed_meanwhile_is_made_again(tmp_path):
    store = LocalStore(tmp_path / "store")
    put(store, a__1=b"x")
    for path in sorted((tmp_path / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "store").rmdir()
    assert get(store, "a/1") == [None]
    put(store, a__1=b"y")
    assert get(store, "a/1") == [b"y"]
    store.close()


def test_only_old_remains_of_killed_writers_are_removed(tmp_path):
    (tmp_path / ".tmp").mkdir()
    old, new = tmp_path / ".tmp" / "old", tmp_path / ".tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store = LocalStore(tmp_path)
    put(store, a__1=b"x")
    store._writers.submit(lambda: None).result(60)
    deadline = 200
    while old.exists() and deadline:
        threading.Event().wait(0.05)
        deadline -= 1
    assert not old.exists()
    assert new.exists()
    store.close()


def test_stores_in_memory_of_one_name_are_one():
    store = open_store("memory://shared")
    put(store, a=b"x")
    assert get(open_store("memory://shared"), "a") == [b"x"]
    assert get(open_store("memory://other"), "a") == [None]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must be a URL or the path of a folder"),
        ("nope://x", "unknown 'nope': there is file, s3, gs"),
        ("redi://x", "did you mean redis"),
        ("file://host/path", "must be file:///PATH"),
        ("file:///path?what=1", "must be file:///PATH"),
        ("file:///path?mode=777", "must be permissions of files such as 600"),
    ],
)
def test_a_url_of_no_store_is_refused_in_one_line(url, message):
    with pytest.raises(ValueError, match=message) as info:
        open_store(url)
    assert "\n" not in str(info.value)
