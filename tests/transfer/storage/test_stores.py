"""What every store does, whatever keeps its bytes."""

import collections
import errno
import gc
import http.server
import itertools
import os
import pathlib
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
from concurrent.futures import wait
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest
import redis

from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage import (
    LocalStore,
    MemoryStore,
    ObjectFormat,
    Refusal,
    StoreError,
    mooncake_store,
    open_store,
    redis_store,
    tensor_store,
)
from jaxkv.transfer.storage.buffers import Buffers
from jaxkv.transfer.storage.store import can_list
from jaxkv.transfer.storage.tensor_store import TensorStoreStore
from tests.rigs.children import PIPE, Child
from tests.rigs.refused_threads import refused_threads
from tests.rigs.servers import (
    OF_CLUSTER,
    free_port,
    leaves_sockets,
    mooncake_lender,
    mooncake_master,
    mooncake_program,
    redis_client,
    redis_cluster,
    redis_server,
    s3_server,
)
from tests.rigs.waiting import wait_for

MOST = 1 << 30
_prefixes = map(str, itertools.count())


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    with redis_cluster(folder) as (url, _):
        yield url


@pytest.fixture(scope="module")
def s3_url():
    with s3_server("blocks") as (endpoint, _):
        yield f"s3://blocks/%s?endpoint={endpoint}"


@pytest.fixture(scope="module")
def mooncake_pool():
    with mooncake_master() as (url, _), mooncake_lender(url) as lender:
        yield url, lender


@pytest.fixture
def mooncake_url(mooncake_pool):
    url, lender = mooncake_pool
    lender.remove_all(True)
    return url


KINDS = ["memory", "folder", "tensorstore", "s3", "redis", "unix", "cluster"]
KINDS += ["mooncake"]


@pytest.fixture(params=KINDS)
def store(request, tmp_path, monkeypatch):
    """Each kind, empty."""
    if request.param == "memory":
        store = MemoryStore()
    elif request.param == "folder":
        store = LocalStore(tmp_path / "s")
    elif request.param == "tensorstore":
        store = TensorStoreStore({"driver": "file", "path": f"{tmp_path}/s/"}, "test")
    elif request.param == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        # moto never forgets a bucket: each test has a prefix of its own.
        store = open_store(request.getfixturevalue("s3_url") % next(_prefixes))
    elif request.param == "mooncake":
        store = open_store(request.getfixturevalue("mooncake_url"))
    elif request.param == "cluster":
        url = request.getfixturevalue("cluster_url")
        with redis.RedisCluster.from_url(url.replace("+cluster", "")) as client:
            client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
        store = open_store(url)
    else:
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
            folder = client.config_get("dir")["dir"]
        if request.param == "unix":
            url = f"unix://{folder}/redis.sock"
        store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def listing_store(store):
    """Each kind that has a list."""
    if not can_list(store):
        pytest.skip("it has no list")
    return store


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
    return sorted({each for page in pages for each in page})


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


def test_a_folder_is_listed_with_all_below_it(listing_store):
    store = listing_store
    put(store, a__1=b"1", a__b__2=b"22", ab__3=b"333", c=b"4")
    assert listed(store, "a") == ["a/1", "a/b/2"]
    assert listed(store, "nowhere") == []


def test_all_of_many_objects_are_listed(listing_store):
    store = listing_store
    names = [f"a/{n % 17:02x}/{n}" for n in range(5000)]
    names += ["a/A", "a/0/0", "a/f", "a/zz/0", "a/Z"]
    if isinstance(store, TensorStoreStore):
        names = names[-300:]  # moto is slow.
    items = [(name, [b"x" * (n % 3)]) for n, name in enumerate(names)]
    wait(store.put(items), 60)
    assert listed(store, "a") == sorted(names)


def test_no_more_is_read_of_a_planted_object_than_was_asked_for(store):
    put(store, a=b"x" * 1000, b=b"y" * 10, c=b"z" * 3, d=b"")
    wait(futures := store.get(["a", "b", "c", "nowhere"], 10), 60)
    read = [each.result() and bytes(each.result()) for each in futures]
    assert read == [b"x" * 10, b"y" * 10, b"z" * 3, None]
    assert not store.get(["d"], 10)[0].result(60)


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


def test_what_a_caller_moves_itself_is_what_the_threads_move(tmp_path):
    payload = np.random.default_rng(0).bytes(1_000_000)
    with closing(LocalStore(tmp_path)) as store:
        store.write("a/b", [b"head", memoryview(payload)])
        assert get(store, "a/b") == [b"head" + payload]
        assert bytes(store.read("a/b", MOST)) == b"head" + payload
        assert bytes(store.read("a/b", 300)) == (b"head" + payload)[:300]
        assert store.read("nowhere", MOST) is None


@pytest.mark.parametrize("num_first", [1, 100, 5000])
def test_a_move_that_is_interrupted_goes_on(tmp_path, monkeypatch, num_first):
    """As by a signal, or on a file server."""

    def cut(move):
        def some(file, parts):
            return move(file, [memoryview(parts[0])[:num_first]])

        return some

    monkeypatch.setattr(os, "readv", cut(os.readv))
    monkeypatch.setattr(os, "writev", cut(os.writev))
    payload = np.random.default_rng(num_first).bytes(9000)
    with closing(LocalStore(tmp_path)) as store:
        store.write("a/b", [b"head", payload])
        assert bytes(store.read("a/b", MOST)) == b"head" + payload


def test_a_file_that_is_cut_while_it_is_read_is_read_as_far_as_it_goes(
    tmp_path, monkeypatch
):
    take = Buffers.take
    # The file ends before the size that it had.
    monkeypatch.setattr(Buffers, "take", lambda self, num: take(self, num + 500))
    with closing(LocalStore(tmp_path)) as store:
        put(store, a=b"payload")
        assert bytes(store.read("a", MOST)) == b"payload"


def test_files_and_folders_are_the_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        store = LocalStore(tmp_path / "new" / "store")
        put(store, a__b__1=b"x")
    finally:
        os.umask(old)
    root = tmp_path / "new" / "store"
    assert root.parent.stat().st_mode & 0o777 == 0o700, "nobody else can replace it"
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in root.rglob("*")}
    assert modes == {"a": "0o700", "b": "0o700", "1": "0o600"}
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
    assert modes == {"store": "0o770", "a": "0o770", "1": "0o660"}
    store.close()


def test_a_shared_folder_keeps_the_group_that_it_inherits(tmp_path):
    tmp_path.chmod(0o2770)
    store = open_store(f"file://{tmp_path}/store?mode=660")
    put(store, a__1=b"x")
    modes = {p.name: oct(p.stat().st_mode & 0o7777) for p in tmp_path.rglob("*")}
    assert modes == {"store": "0o2770", "a": "0o2770", "1": "0o660"}
    store.close()


def put_in_the_way(path, kind):
    """Put something that is no file where an object belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(os.fspath(path))
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
    tmp_path, kind, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # The address of a socket is short.
    store = LocalStore(tmp_path)
    put_in_the_way(pathlib.Path("a/1"), kind)
    blocks = ObjectFormat(b"model", "u8[1]", 1)
    (found,) = get(store, "a/1")
    assert blocks.decode(bytes(32), found) == Refusal("foreign", is_ours=False)
    assert "a/1" not in listed(store, "a")
    assert not store.exists(["a/1"])[0].result(60)
    if kind == "folder":
        assert store.delete(["a/1"])[0].exception(60) is None
    put(store, a__1=b"x")
    assert get(store, "a/1") == [b"x"]
    assert listed(store, "a") == ["a/1"]
    if kind == "folder":
        [notes] = tmp_path.rglob("notes")
        assert notes.read_text() == "of others"
    store.close()


def test_below_a_file_there_is_no_object_and_nothing_to_delete(tmp_path):
    store = LocalStore(tmp_path)
    (tmp_path / "a").write_text("in the way")
    assert get(store, "a/1") == [None]
    assert not store.exists(["a/1"])[0].result(60)
    assert store.delete(["a/1"])[0].exception(60) is None
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_file_that_cannot_be_looked_at_is_neither_missing_nor_the_oldest(
    tmp_path, number, monkeypatch
):
    store = LocalStore(tmp_path)
    put(store, a__1=b"x")

    def fail(path, **_):
        raise OSError(number, os.strerror(number), path)

    for name in ("stat", "lstat"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            if name == "lstat":
                (future,) = store.exists(["a/1"])
                assert os.strerror(number) in str(future.exception(60))
            else:
                with pytest.raises(StoreError, match=os.strerror(number)):
                    store.times(["a/1"])
    assert store.exists(["a/1"])[0].result(60)
    assert store.times(["a/1", "a/2"])[1] == 0
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


def test_a_folder_that_cannot_be_listed_hides_no_other(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    put(store, f__a__1=b"x", f__b__2=b"y", f__c__3=b"z")
    scandir = os.scandir

    def refuse_b(path, error=errno.EIO):
        if os.fspath(path).endswith("/f/b"):  # Modes do not hold root up.
            raise OSError(error, os.strerror(error), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_b)
    found = []
    with pytest.raises(StoreError, match="Input/output error"):
        collections.deque(map(found.extend, store.list("f")))
    assert found == ["f/a/1", "f/c/3"]
    # Its objects could not be read either.
    monkeypatch.setattr(os, "scandir", lambda path: refuse_b(path, errno.EACCES))
    assert listed(store, "f") == ["f/a/1", "f/c/3"]
    with pytest.raises(StoreError) as caught:
        listed(store, "f/b")
    assert caught.value.kind == "denied"
    store.close()


def test_folders_that_cannot_have_objects_are_passed_over(tmp_path):
    store = LocalStore(tmp_path)
    put(store, f__a__1=b"x")
    (tmp_path / "f" / "loop").symlink_to(tmp_path / "f")
    (tmp_path / "f" / "not a name" / "b").mkdir(parents=True)
    (tmp_path / "f" / "not a name" / "b" / "2").touch()
    os.makedirs(f"{tmp_path}/f/{'d/' * 400}")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        assert listed(store, "f") == ["f/a/1"]
    finally:
        sys.setrecursionlimit(limit)
    store.close()


def test_only_old_remains_of_killed_writers_are_removed(tmp_path):
    store = LocalStore(tmp_path)
    put(store, a__1=b"x")
    folder = tmp_path / "a"
    names = [".0123456789abcdef-7", ".0123456789abcdef-8", ".of-others"]
    for name in names:
        (folder / name).write_bytes(b"half")
    for name in names[0], names[2]:
        os.utime(folder / name, (0, 0))
    assert listed(store, "a") == ["a/1"]
    assert sorted(path.name for path in folder.iterdir()) == [*names[1:], "1"]
    store.close()


@pytest.mark.parametrize("ahead_s", [7200, -1e6])
def test_the_age_of_a_file_is_by_the_clock_that_dates_it(
    tmp_path, monkeypatch, ahead_s
):
    store = LocalStore(tmp_path)
    put(store, a__1=b"x")
    begun, left = (tmp_path / "a" / f".0123456789abcdef-{n}" for n in range(2))
    for path in (begun, left):
        path.write_bytes(b"half")
    now_s = begun.stat().st_mtime
    os.utime(left, (now_s - 4000, now_s - 4000))
    monkeypatch.setattr("time.time", lambda: now_s + ahead_s)
    assert listed(store, "a") == ["a/1"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [begun.name, "1"]
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
        ("nope://x", "unknown 'nope': choose from file, s3, gs"),
        ("redi://x", "did you mean redis"),
        ("file://host/path", "must be file:///PATH"),
        ("file:///path?what=1", "must be file:///PATH"),
        ("file:///path?mode=777", "must be permissions of files such as 600"),
        ("s3://", "must be s3://BUCKET/PREFIX with .endpoint= and .region="),
        ("s3://b?endpint=x", "must be s3://BUCKET/PREFIX"),
        ("gs://b?endpoint=x", "must be gs://BUCKET/PREFIX"),
        ("redis://host:port", "port"),
        ("redis://host/0?no_such_option=1", "no_such_option"),
        ("unix://", "must be unix:///PATH"),
        ("x" * 3000, "must be a URL or the path"),
        ("two\nlines", "what cannot be printed"),
        # What would be a folder of this name, beside the process.
        ("file:/path", "storage='file:/path' must begin with file:/// to be a URL"),
        ("S3:/bucket", "storage='S3:/bucket' must begin with s3://"),
        ("redis:localhost", "must begin with redis:// to be a URL; a folder of this"),
        ("x://path", "unknown 'x': choose from"),
        ("~/kv", "storage='~/kv' must be the path itself: ~ and variables"),
        ("$HOME/kv", "storage='.HOME/kv' must be the path itself"),
        # What would be another place than the one that was named.
        ("file:///path#1", "must be file:///PATH, .* and %23 for # in a name"),
        ("file:///path%00", "storage='file:///path%00' must have a path that can be"),
        ("file:///path%FF", "storage='file:///path%FF' must have a path that can be"),
        ("redis://host/kv", "storage='redis://host/kv' must be redis://HOST:PORT/DB"),
        (
            "redis+cluster://host/1",
            "must be redis.cluster://HOST:PORT, of as many nodes",
        ),
        ("mooncake://", "must be mooncake://HOST:PORT of the master, with segment="),
        ("mooncake://me@host", "storage='mooncake://host' must be mooncake://HOST:"),
        ("mooncake://host:port", "must be mooncake://HOST:PORT"),
        ("mooncake://host:1/kv", "must be mooncake://HOST:PORT"),
        ("mooncake://host?segmnt=1GiB", "must be mooncake://HOST:PORT"),
        ("mooncake://host?segment=few", "segment='few' must be a size such as 64MiB"),
        ("mooncake://host?protocol=ib", "protocol='ib' must be tcp or rdma"),
        ("mooncake://host?device=mlx5_0", "device='mlx5_0' needs protocol=rdma"),
        ("redis+cluster://a,,b:1", "must be redis.cluster://HOST:PORT, .*HOST:PORT,"),
        ("redis+cluster://a,b:port", "storage='redis.cluster://...' must be redis"),
        # Errors of others, which would not say which value it is.
        ("s3://[bucket", r"storage='s3://\.\.\.' cannot be read"),
        ("unix://me:of\u2100others@host/x", "storage='unix://host/x' cannot be read"),
        ("rediss://host?ssl_cert_reqs=x", "storage='rediss://host': Invalid SSL"),
    ],
)
def test_a_url_of_no_store_is_refused_in_one_line(url, message):
    with pytest.raises(ValueError, match=message) as info:
        open_store(url)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("name", ["s p", "%41", "~", "$HOME", "file:", "a#b", "é", "."])
def test_a_folder_of_any_name_can_be_said(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quoted = f"file://{tmp_path}/{urllib.parse.quote(name)}"
    for number, url in enumerate((f"./{name}", f"{tmp_path}/{name}", quoted)):
        with closing(open_store(url)) as store:
            put(store, **{f"a{number}": b"x"})
    for number in range(3):
        assert (tmp_path / name / f"a{number}").read_bytes() == b"x"


def error_kinds(futures):
    return {future.exception(60).kind for future in futures}


def test_a_bucket_that_is_not_there_fails_each_write(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    store = open_store(s3_url.replace("blocks", "nowhere") % "p")
    (future,) = store.put([("a", [b"x"])])
    assert "bucket does not exist" in str(future.exception(60))


def test_the_environment_tells_where_s3_is(s3_url, monkeypatch):
    bucket, _, endpoint = (s3_url % "environment").partition("?endpoint=")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    store = open_store(bucket)
    assert store.url == "s3://blocks/environment/"
    put(store, a=b"x")
    assert get(open_store(f"{bucket}/?region=eu-west-1"), "a") == [b"x"]


def test_s3_takes_the_credentials_of_the_environment_if_it_has_some(monkeypatch):
    specs = []
    monkeypatch.setattr(
        tensor_store, "TensorStoreStore", lambda spec, url: specs.append(spec)
    )
    for key in ("test", ""):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        tensor_store.open_s3("s3://blocks/p")
    has_some, has_none = specs
    assert has_some["aws_credentials"] == {"type": "environment"}
    assert "aws_credentials" not in has_none


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "s3", "mooncake"])
def test_a_server_that_is_not_there_is_unreachable(scheme, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    place = f"127.0.0.1:{free_port()}"
    url = (
        f"s3://bkt?endpoint=http://{place}" if scheme == "s3" else f"{scheme}://{place}"
    )
    if scheme == "mooncake":
        mooncake_program()
    store = open_store(url)
    assert error_kinds(store.get(["a"], MOST)) == {"unreachable"}
    assert error_kinds(store.put([("a", [b"x"])])) == {"unreachable"}
    if not can_list(store):
        return
    with pytest.raises(StoreError) as info:
        list(store.list("a"))
    assert info.value.kind == "unreachable"
    store.close()


def test_a_full_redis_says_so_and_keeps_what_it_has(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "3mb") as (url, _):
        store = open_store(url)
        put(store, a=b"x")
        assert error_kinds(store.put([("b", [bytes(8 << 20)])])) == {"full"}
        assert get(store, "a", "b") == [b"x", None]
        store.close()


def test_redis_wants_its_password_and_no_message_has_it(tmp_path):
    with redis_server(tmp_path, "--requirepass", "hidden") as (url, _):
        good = url.replace("redis://", "redis://:hidden@")
        store = open_store(good)
        assert store.url == url
        put(store, a=b"x")
        wrong = open_store(url.replace("redis://", "redis://:wrong-one@"))
        (future,) = wrong.get(["a"], MOST)
        assert future.exception(60).kind == "denied"
        assert "wrong-one" not in str(future.exception())
        wrong.close()
        store.close()


def test_redis_is_used_again_once_it_is_back(tmp_path):
    with redis_server(tmp_path) as (url, process):
        store = open_store(url)
        put(store, a=b"x")
        process.kill()
        process.wait()
        assert error_kinds(store.get(["a"], MOST)) == {"unreachable"}
    port = int(url.rpartition(":")[2].partition("/")[0])
    with redis_server(tmp_path, port=port):
        assert get(store, "a") == [None]
        put(store, a=b"y")
        assert get(store, "a") == [b"y"]
    store.close()


def test_writes_go_to_the_new_primary_after_a_failover(tmp_path, monkeypatch):
    """The old primary lives on as a replica; the name leads to the new one."""
    monkeypatch.setattr(redis_store, "_RECONNECT_S", 0.0)
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    with ExitStack() as stack:
        old, new = (
            stack.enter_context(redis_server(tmp_path / folder))[0]
            for folder in ("old", "new")
        )
        ports = [urllib.parse.urlsplit(url).port for url in (old, new)]
        target = ports[:1]
        lookup = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, _, *more: lookup(host, *target, *more),
        )
        with closing(open_store("redis://127.0.0.1:1/0")) as store:
            put(store, a=b"x")
            with redis.Redis.from_url(old) as client:
                client.replicaof("127.0.0.1", ports[1])
            target[:] = ports[1:]
            # Of each connection that writes, the next call.
            for _ in range(redis_store._WRITE_CONNECTIONS + 1):
                kinds = {
                    future.exception(60) and future.exception().kind
                    for _ in range(8)
                    for future in store.put([("b", [b"y"])])
                }
            assert kinds == {None}
        with redis.Redis.from_url(new) as client:
            assert client.get("b") == b"y"


def test_listings_of_redis_leave_no_connections(tmp_path):
    with redis_server(tmp_path) as (url, _), closing(open_store(url)) as store:
        put(store, f__1=b"x")
        for _ in range(10):
            thread = threading.Thread(target=listed, args=(store, "f"))
            thread.start()
            thread.join()
        with redis.Redis.from_url(url) as client:
            assert client.info("clients")["connected_clients"] <= 4


@contextmanager
def closing_all(*stores):
    """Close stores, and have redis-py let go of nodes that are gone."""
    yield stores
    for store in stores:
        store.close()
    gc.collect()


def put_in_all_slots(store):
    """Write objects of which each node of a cluster has some."""
    names = [f"a/{number}" for number in range(100)]
    for future in store.put([(name, [name.encode()]) for name in names]):
        future.result(60)
    return names


def has_all(store, names):
    """Whether all can be read now; nothing but that a node is away may hinder it."""
    futures = store.get(names, MOST)
    if errors := [each for each in futures if each.exception(60)]:
        assert error_kinds(errors) == {"unreachable"}
        return False
    assert [bytes(future.result()) for future in futures] == [n.encode() for n in names]
    return True


@leaves_sockets
def test_a_replica_takes_the_place_of_a_node_that_died(tmp_path):
    with redis_cluster(tmp_path, num_replicas=1) as (url, nodes):
        first, *others = nodes
        late_url = "redis+cluster://x.invalid," + ",".join(
            f"127.0.0.1:{port}" for port in others
        )
        with closing_all(open_store(url), open_store(late_url)) as (store, late):
            names = put_in_all_slots(store)
            with redis.Redis(port=first) as client:
                wait_for(lambda: is_copied(client.info("replication")))
            nodes[first].kill()
            nodes[first].wait()
            assert not has_all(store, names)
            wait_for(has_all, store, names)
            assert listed(store, "a") == sorted(names)
            assert has_all(late, names)


def is_copied(info):
    """Whether the only replica of a node has what the node has."""
    replica = info.get("slave0", {"state": "none"})
    is_there = replica["state"] == "online"
    return is_there and replica["offset"] == info["master_repl_offset"]


def test_a_cluster_is_reached_by_tls_if_its_certificate_is_known(tmp_path):
    with redis_cluster(tmp_path, has_tls=True) as (url, _):
        store, stranger = open_store(url), open_store(url.partition("?")[0])
        assert has_all(store, put_in_all_slots(store))
        assert error_kinds(stranger.get(["a"], MOST)) == {"unreachable"}
        for each in (store, stranger):
            each.close()


def test_values_are_found_while_they_move_to_another_node(tmp_path):
    with redis_cluster(tmp_path) as (url, nodes):
        store = open_store(url)
        names = put_in_all_slots(store)
        source, target, _ = (own_id(port) for port in nodes)
        words = [redis_client(), "--cluster", "reshard", f"127.0.0.1:{min(nodes)}"]
        words += ["--cluster-from", source, "--cluster-to", target, "--cluster-yes"]
        with subprocess.Popen(
            [*words, "--cluster-slots", "2000"], stdout=subprocess.DEVNULL
        ) as moving:
            num_reads = 0
            while moving.poll() is None:
                assert has_all(store, names)
                num_reads += 1
        assert moving.returncode == 0
        assert num_reads > 1
        assert listed(store, "a") == sorted(names)
        store.close()


def own_id(port):
    with redis.Redis(port=port) as client:
        return client.execute_command("CLUSTER", "MYID").decode()


@leaves_sockets
def test_a_cluster_is_used_again_once_it_is_back(tmp_path):
    with ExitStack() as stack:
        with redis_cluster(tmp_path) as (url, nodes):
            (store,) = stack.enter_context(closing_all(open_store(url)))
            names = put_in_all_slots(store)
        assert error_kinds(store.get(names, MOST)) == {"unreachable"}
        for number, port in enumerate(nodes):
            server = redis_server(tmp_path / str(number), *OF_CLUSTER, port=port)
            stack.enter_context(server)
        # Each node finds out by itself that the others are back.
        wait_for(lambda: not any(each.exception(60) for each in store.exists(names)))
        assert get(store, *names) == [None] * len(names)
        wait_for(has_all, store, put_in_all_slots(store))


def test_a_pool_without_a_list_or_room_says_so(mooncake_url):
    store = open_store(mooncake_url)
    with pytest.raises(StoreError, match="storage_list_s=0"):
        list(store.list("a"))
    (future,) = store.put([("a", [bytes(80 << 20)])])
    assert future.exception(60).kind == "full"
    assert "segment=" in str(future.exception())
    store.close()


def test_what_one_client_has_written_another_reads_and_deletes(mooncake_url):
    payload = np.random.default_rng(0).bytes(3 << 20)
    with closing_all(open_store(mooncake_url), open_store(mooncake_url)) as (one, two):
        two.put([("a/1", [b"head", payload])])[0].result(60)
        assert get(one, "a/1") == get(two, "a/1") == [b"head" + payload]
        assert bytes(two.get(["a/1"], 100)[0].result(60)) == b"head" + payload[:96]
        # An object that is there stays, until it is deleted, which needs no lease.
        put(one, a__1=b"other")
        assert get(two, "a/1") == [b"head" + payload]
        one.delete(["a/1"])[0].result(60)
        put(one, a__1=b"other")
        assert get(two, "a/1") == [b"other"]


def test_mooncake_is_used_again_once_its_master_is_back():
    with ExitStack() as stack:
        with mooncake_master() as (url, process):
            (store,) = stack.enter_context(
                closing_all(open_store(f"{url}?segment=64MiB"))
            )
            put(store, a=b"x")
            process.kill()
            process.wait()
            assert error_kinds(store.get(["a"], MOST)) == {"unreachable"}
            late = stack.enter_context(closing(open_store(url)))
            (future,) = late.get(["a"], MOST)
            assert f"no Mooncake master answers at {url[11:]}" in str(
                future.exception()
            )
        stack.enter_context(mooncake_master(int(url.rpartition(":")[2])))
        wait_for(lambda: store.put([("a", [b"y"])])[0].exception(60) is None)
        assert get(store, "a") == [b"y"]
        wait_for(lambda: late.exists(["a"])[0].exception(60) is None)
        assert get(late, "a") == [b"y"]


def test_a_folder_that_cannot_be_written_still_serves(tmp_path):
    store = LocalStore(tmp_path)
    put(store, a__1=b"x")
    (tmp_path / "b").write_text("in the way")  # Modes do not hold root up.
    assert error_kinds(store.put([("b/2", [b"y"])])) == {"other"}
    assert get(store, "a/1") == [b"x"]
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_so_and_leaves_nothing(tmp_path, number, monkeypatch):
    store = LocalStore(tmp_path)
    put(store, a__1=b"x")
    writev = os.writev

    def fill(file, pieces):
        writev(file, [pieces[0][:1000]])
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fill)
        assert error_kinds(store.put([("a/2", [bytes(5000)])])) == {"full"}
    assert get(store, "a/1", "a/2") == [b"x", None]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["1"]
    store.close()


def test_a_file_larger_than_a_limit_is_no_full_disk(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = LocalStore(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        # To delete others would not help.
        assert error_kinds(store.put([("a/2", [bytes(5000)])])) == {"other"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert get(store, "a/2") == [None]
    store.close()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (507, "", "full"),
        (507, "XMinioStorageFull", "full"),
        (400, "XMinioAdminBucketQuotaExceeded", "full"),
        (403, "QuotaExceeded", "full"),
        (403, "AccessDenied", "denied"),
        (413, "EntityTooLarge", "other"),
    ],
)
def test_a_bucket_without_room_is_full(status, code, kind, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>" if code else ""
    with answering(status, body) as endpoint:
        store = open_store(f"s3://blocks/kv?endpoint={endpoint}")
        assert error_kinds(store.put([("a", [b"x"])])) == {kind}
        assert error_kinds(store.exists(["a"])) == {kind}


@contextmanager
def answering(status, body):
    """Serve HTTP, with the same answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_any(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = handle_any  # noqa: N815

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_empty_object_of_a_bucket_is_there(tmp_path):
    store = TensorStoreStore({"driver": "file", "path": f"{tmp_path}/"}, "test")
    (tmp_path / "a").touch()
    assert store.exists(["a"])[0].result(60)
    assert get(store, "a") == [b""]


@pytest.mark.parametrize("scheme", ["redis", "mooncake"])
def test_calls_of_a_server_without_a_thread_fail_and_later_ones_are_made(
    scheme, monkeypatch
):
    monkeypatch.setattr(mooncake_store, "_import", lambda: None)
    store = open_store(f"{scheme}://127.0.0.1:{free_port()}")

    def calls():
        return [
            *store.get(["a", "b"], 100),
            *store.put([("a", [b"x"])]),
            *store.exists(["a"]),
            *store.delete(["a", "b"]),
        ]

    with refused_threads():
        for future in calls():
            assert "can't start new thread" in str(future.exception(0))
    assert error_kinds(calls()) == {"unreachable"}  # No server listens there.
    store.close()


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket", "tensorstore", "storage"),
        ("gs://bucket", "tensorstore", "storage"),
        ("redis://host", "redis", "redis"),
        ("unix:///socket", "redis", "redis"),
        ("mooncake://host", "mooncake.store", "mooncake"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(url, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as info:
        open_store(url)
    assert str(info.value).endswith(pip_install(extra))
    assert "\n" not in str(info.value)


def test_libraries_that_a_client_needs_are_named(tmp_path, monkeypatch):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libnuma.so.1: not there')")
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"libnuma.so.1: not.*apt-get install"):
        open_store("mooncake://host")
    sys.modules.pop("mooncake", None)


@pytest.mark.parametrize("path_is_a_file", [True, False])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path, path_is_a_file):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        open_store(str(tmp_path / ("file" if path_is_a_file else "file/folder")))


def test_a_process_ends_although_its_stores_hang(tmp_path):
    """The servers take connections and never answer."""
    os.mkfifo(tmp_path / "pipe")
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        urls = [f"s3://bucket/?endpoint=http://{place}", f"redis://{place}"]
        code = f"""
from jaxkv.transfer.storage import LocalStore
store = LocalStore({str(tmp_path / "store")!r})
hanging = store._readers.submit(open, {str(tmp_path / "pipe")!r})
store.close()
{never_answered(urls)}
print("end", hanging.done())
"""
        done = run_interpreter(code)
    assert done.stdout == "['late']\n['late']\nend False\n", done.stderr
    assert done.returncode == 0


def test_a_process_ends_although_a_mooncake_master_never_answers():
    mooncake_program()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"mooncake://127.0.0.1:{server.getsockname()[1]}"
        done = run_interpreter(never_answered([url]))
    # A client that cannot start has waited already.
    assert done.stdout in ("['failed']\n", "['late']\n"), done.stderr
    assert done.returncode == 0


def never_answered(urls):
    """Return code that uses stores that never answer, and closes them."""
    return f"""
from jaxkv.transfer.storage import ObjectFormat, StorageIO, open_store
for url in {urls!r}:
    storage = StorageIO(open_store(url), ObjectFormat(b"m", "u8[4]", 4))
    storage.submit_writes([(b"k" * 32, [b"body"])])
    storage.submit_reads([b"k" * 32], 0.0)
    print([each.outcome for each in storage.wait(0.5) if each.kind == "read"])
    storage.close(0.1)
"""


def run_interpreter(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"},
    )


@pytest.mark.parametrize(
    ("kind", "seed"), [*(("folder", n) for n in range(3)), ("mooncake", 0)]
)
def test_what_a_killed_writer_leaves_is_whole_or_not_seen(
    tmp_path, kind, seed, request
):
    url = str(tmp_path)
    if kind == "mooncake":
        url = request.getfixturevalue("mooncake_url")
    code = f"""
import numpy as np
from jaxkv.transfer.storage import ObjectFormat, StorageIO, open_store
storage = StorageIO(open_store({url!r}), ObjectFormat(b"m", "u8", 300_000))
for number in range(10**9):
    key = (number % 50).to_bytes(32, "little")
    payload = np.full(300_000, number % 251, np.uint8)
    storage.submit_writes([(key, [payload])])
    print(number, flush=True)
    storage.wait(60)
"""
    with Child("-c", code, stdout=PIPE) as process:
        # While this write is in progress, wherever it is.
        for number in range(random.Random(seed).randrange(5, 200)):
            assert process.stdout.readline() == f"{number}\n"
        process.kill()
    objects = ObjectFormat(b"m", "u8", 300_000)
    store = open_store(url)
    num_found = 0
    for number in range(50):
        key = number.to_bytes(32, "little")
        name = objects.name(key)
        data = store.get([name], objects.object_bytes)[0].result(60)
        if data is not None:
            payload = objects.decode(key, data)
            assert not isinstance(payload, Refusal), (name, payload)
            assert len(set(bytes(payload))) == 1
            num_found += 1
    assert num_found
    store.close()
