"""A folder as a store: what others, signals and full disks do to it."""

import contextlib
import errno
import os
import pathlib
import socket
import sys
import urllib.parse
from contextlib import closing

import numpy as np
import pytest

from jaxkv.transfer.storage import (
    LocalStore,
    ObjectFormat,
    Refusal,
    StoreError,
    open_store,
)
from jaxkv.transfer.storage.buffers import Buffers
from tests.transfer.storage.calls import delete, exists, get, listed, put, write_error


@pytest.fixture
def store(tmp_path):
    """A store with one object."""
    with closing(LocalStore(tmp_path)) as store:
        put(store, {"a/1": b"x"})
        yield store


def cut(move, num_bytes):
    """Move at most `num_bytes` at once, as after a signal or on a file server."""
    return lambda file, buffers: move(file, [memoryview(buffers[0])[:num_bytes]])


@pytest.mark.parametrize("num_bytes", [1, 100, 5000, 1 << 20])
def test_a_file_is_whole_however_its_bytes_are_moved(store, monkeypatch, num_bytes):
    monkeypatch.setattr(os, "readv", cut(os.readv, num_bytes))
    monkeypatch.setattr(os, "writev", cut(os.writev, num_bytes))
    payload = np.random.default_rng(num_bytes).bytes(9000)
    assert store.put([("a/b", [b"head", memoryview(payload)])]) == [None]
    assert get(store, "a/b") == [b"head" + payload]
    short = get(store, "a/b", "nowhere", max_bytes=300)
    assert short == [(b"head" + payload)[:300], None]


def test_a_file_that_is_cut_while_it_is_read_is_read_as_far_as_it_goes(
    store, monkeypatch
):
    take = Buffers.take
    # The file ends before the size that it had.
    monkeypatch.setattr(Buffers, "take", lambda self, num: take(self, num + 500))
    assert get(store, "a/1", max_bytes=1000) == [b"x"]


def test_a_file_system_that_writes_0_bytes_fails_the_write(store, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda file, pieces: 0)
    assert write_error(store, "a/2", bytes(64)) == "other"
    assert get(store, "a/2") == [None]


@pytest.mark.parametrize("place", ["", "/below"])
@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_private_folder_that_is_put_in_a_new_ones_place_stays_private(
    tmp_path, monkeypatch, place, kind
):
    """A member of the group wins the race between making a folder and its mode."""
    victim, share = tmp_path / "victim", tmp_path / "share"
    victim.mkdir(mode=0o700)
    (victim / "key").write_text("secret")
    share.mkdir(mode=0o770)
    new, mkdir = f"{share}/kv{place}", os.mkdir

    def mkdir_and_lose(path, mode=0o777, *, dir_fd=None):
        mkdir(path, mode, dir_fd=dir_fd)
        if os.path.isdir(new) and not os.path.islink(new):
            os.rmdir(new)
            if kind == "link":
                os.symlink(victim, new)
            else:
                victim.rename(new)

    monkeypatch.setattr(os, "mkdir", mkdir_and_lose)
    with contextlib.suppress(StoreError):
        store = LocalStore(f"{share}/kv", 0o660)
        write_error(store, "below/1")
    private = victim if victim.exists() else pathlib.Path(new)
    assert oct(private.stat().st_mode & 0o777) == "0o700"
    assert [path.name for path in victim.glob("*")] in ([], ["key"])


def test_a_link_in_a_folders_place_is_not_written_through(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "b").symlink_to("elsewhere")
    assert write_error(store, "b/1") == "other"
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("umask", "query", "parent_mode", "folder_mode", "file_mode"),
    [
        (0o000, "", 0o755, "0o700", "0o600"),  # Only the owner can replace a folder.
        (0o077, "?mode=660", 0o755, "0o770", "0o660"),
        (0o022, "?mode=660", 0o2770, "0o2770", "0o660"),  # They inherit the group.
    ],
)
def test_files_are_the_owners_or_the_groups_whatever_the_umask(
    tmp_path, umask, query, parent_mode, folder_mode, file_mode
):
    tmp_path.chmod(parent_mode)
    old = os.umask(umask)
    try:
        with closing(open_store(f"file://{tmp_path}/new/store{query}")) as store:
            put(store, {"a/b/1": b"x"})
    finally:
        os.umask(old)
    modes = {p.name: oct(p.stat().st_mode & 0o7777) for p in tmp_path.rglob("*")}
    folders = dict.fromkeys(("new", "store", "a", "b"), folder_mode)
    assert modes == folders | {"1": file_mode}


def put_in_the_way(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
    elif kind == "folder":
        path.mkdir()
        (path / "notes").write_text("of others")
    else:
        target = path.parent.parent / f"target of a {kind}"
        if kind == "link":
            target.write_text("of others")
        path.symlink_to(target)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "link", "dangling link"])
def test_what_is_no_file_is_no_object_and_the_next_write_replaces_it(
    store, tmp_path, kind, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # The address of a socket is short.
    put_in_the_way(pathlib.Path("b/1"), kind)
    blocks = ObjectFormat(b"model", "u8[1]", 1)
    (blob,) = get(store, "b/1")
    assert blocks.decode(bytes(32), blob) == Refusal("foreign", is_ours=False)
    assert "b/1" not in listed(store, "b")
    assert exists(store, "b/1") == [False]
    if kind == "folder":
        delete(store, "b/1")
    put(store, {"b/1": b"x"})
    assert get(store, "b/1") == [b"x"]
    assert listed(store, "b") == ["b/1"]
    if kind == "folder":
        [notes] = tmp_path.rglob("notes")
        assert notes.read_text() == "of others"


def test_a_folder_that_is_gone_or_is_a_file_has_no_objects(tmp_path):
    root = tmp_path / "store"
    with closing(LocalStore(root)) as store:
        (root / "b").write_text("in the way")
        for name in ("a/1", "b/1"):
            assert get(store, name) == [None]
            assert exists(store, name) == [False]
            delete(store, name)
        (root / "b").unlink()
        root.rmdir()
        assert get(store, "a/1") == [None]
        assert listed(store, "a") == []
        put(store, {"a/1": b"y"})  # It is made again.
        assert get(store, "a/1") == [b"y"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_looked_at_is_neither_missing_nor_the_oldest(
    store, number, monkeypatch
):
    def fail(path, **_):
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", fail)
        with pytest.raises(StoreError, match=os.strerror(number)):
            exists(store, "a/1")
        with pytest.raises(StoreError, match=os.strerror(number)):
            store.times(["a/1"])
    assert exists(store, "a/1") == [True]


def test_a_folder_that_cannot_be_listed_hides_no_other(store, monkeypatch):
    put(store, {"f/a/1": b"x", "f/b/2": b"y", "f/c/3": b"z"})
    scandir, error = os.scandir, errno.EIO

    def refuse_b(path):
        if os.fspath(path).endswith("/f/b"):  # Modes do not hold root up.
            raise OSError(error, os.strerror(error), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_b)
    names = []
    with pytest.raises(StoreError, match="Input/output error"):
        list(map(names.extend, store.list("f")))
    assert names == ["f/a/1", "f/c/3"]
    error = errno.EACCES  # Its objects could not be read either.
    assert listed(store, "f") == ["f/a/1", "f/c/3"]
    with pytest.raises(StoreError) as caught:
        listed(store, "f/b")
    assert caught.value.kind == "denied"


def test_folders_that_cannot_have_objects_are_passed_over(store, tmp_path):
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "not a name" / "b").mkdir(parents=True)
    (tmp_path / "a" / "not a name" / "b" / "2").touch()
    os.makedirs(f"{tmp_path}/a/{'d/' * 400}")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        assert listed(store, "a") == ["a/1"]
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("ahead_s", [0, 7200, -1e6])
def test_the_age_of_a_file_is_by_the_clock_that_dates_it(
    store, tmp_path, monkeypatch, ahead_s
):
    """A listing removes the temporary files of killed writers once they are old."""
    begun, left, of_others = (
        tmp_path / "a" / name
        for name in (".0123456789abcdef-0", ".0123456789abcdef-1", ".of-others")
    )
    for path in (begun, left, of_others):
        path.write_bytes(b"half")
    now_s = begun.stat().st_mtime
    for path in (left, of_others):
        os.utime(path, (now_s - 4000, now_s - 4000))
    monkeypatch.setattr("time.time", lambda: now_s + ahead_s)
    assert listed(store, "a") == ["a/1"]
    there = {path.name for path in (tmp_path / "a").iterdir()}
    assert there == {begun.name, of_others.name, "1"}


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EFBIG, "other")],
)
def test_a_failed_write_leaves_nothing_and_only_a_full_disk_is_full(
    store, tmp_path, number, kind, monkeypatch
):
    writev = os.writev

    def fill(file, pieces):
        writev(file, [pieces[0][:1000]])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", fill)
    assert write_error(store, "a/2", bytes(5000)) == kind
    assert get(store, "a/1", "a/2") == [b"x", None]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]
    (tmp_path / "b").write_text("in the way")  # Modes do not hold root up.
    assert write_error(store, "b/2") == "other"


def test_a_folder_of_any_name_can_be_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("s p", "%41", "~", "$HOME", "file:", "a#b", "a@b", "é", "."):
        quoted = f"file://{tmp_path}/{urllib.parse.quote(name)}"
        for number, url in enumerate((f"./{name}", f"{tmp_path}/{name}", quoted)):
            with closing(open_store(url)) as store:
                put(store, {f"a{number}": b"x"})
            with closing(open_store(store.url)) as same:
                assert same.path == store.path
            assert (tmp_path / name / f"a{number}").read_bytes() == b"x"


@pytest.mark.parametrize("path", ["file", "file/folder"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        open_store(str(tmp_path / path))
