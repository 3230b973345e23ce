"""The contract of every store, and the failures of its server."""

import contextlib
import gc
import itertools
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.parse
from contextlib import ExitStack, closing

import numpy as np
import pytest
import redis

from jaxkv._util.extras import pip_install
from jaxkv.transfer.storage import (
    LocalStore,
    MemoryStore,
    ObjectFormat,
    Refusal,
    StorageIO,
    StoreError,
    open_store,
    redis_store,
    tensor_store,
)
from jaxkv.transfer.storage.storage_io import Listed
from jaxkv.transfer.storage.store import SizedStore, TimedStore, can_list
from jaxkv.transfer.storage.tensor_store import TensorStoreStore
from tests.rigs.children import PIPE, Child
from tests.rigs.servers import (
    OF_CLUSTER,
    free_port,
    http_server,
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
from tests.transfer.storage.calls import (
    delete,
    errors_of,
    exists,
    get,
    listed,
    outcomes,
    put,
    read_error,
    write_error,
)

KINDS = ["memory", "folder", "s3", "redis", "cluster", "mooncake"]
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
def s3_endpoint():
    with s3_server("blocks") as (endpoint, _):
        yield endpoint


@pytest.fixture(scope="module")
def mooncake_pool():
    with mooncake_master() as (url, _), mooncake_lender(url) as lender:
        yield url, lender


@pytest.fixture
def mooncake_url(mooncake_pool):
    url, lender = mooncake_pool
    lender.remove_all(True)
    return url


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.fixture(params=KINDS)
def store(request, tmp_path, credentials):
    if request.param == "memory":
        store = MemoryStore()
    elif request.param == "folder":
        store = LocalStore(tmp_path / "s")
    elif request.param == "s3":
        endpoint = request.getfixturevalue("s3_endpoint")
        # moto never forgets a bucket: each test has a prefix of its own.
        store = open_store(f"s3://blocks/{next(_prefixes)}?endpoint={endpoint}")
    elif request.param == "mooncake":
        store = open_store(request.getfixturevalue("mooncake_url"))
    elif request.param == "cluster":
        url = request.getfixturevalue("cluster_url")
        with redis.RedisCluster.from_url(url.replace("+cluster", "")) as client:
            client.flushall(target_nodes=redis.RedisCluster.PRIMARIES)
            client.disconnect_connection_pools()
        store = open_store(url)
    else:
        url = request.getfixturevalue("redis_url")
        with redis.Redis.from_url(url) as client:
            client.flushall()
        store = open_store(url)
    with closing(store):
        yield store


@contextlib.contextmanager
def opened(*urls):
    """Open stores, close them, and have redis-py let go of nodes that are gone."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(open_store(url))) for url in urls]
    gc.collect()


def test_what_was_put_is_found_until_it_is_deleted(store):
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(int(n)) for n in rng.integers(0, 50, 2000)]
    assert list(store.put([("a/1", list(map(memoryview, pieces)))])) == [None]
    put(store, {"a/2": b"two" * 5, "a/3": b"three", "a/0": b""})
    whole = b"".join(pieces)
    assert get(store, "a/1", "nowhere", "a/2") == [whole, None, b"two" * 5]
    # A read ends after `max_bytes`, even if another writer's object is longer.
    expected = [whole[:15], b"two" * 5, b"three"]
    assert get(store, "a/1", "a/2", "a/3", max_bytes=15) == expected
    assert get(store, "a/0", max_bytes=15)[0] in (b"", None)
    assert exists(store, "a/1", "a/4") == [True, False]
    if isinstance(store, SizedStore):
        missing, num_bytes = store.sizes(["nowhere", "a/1"])
        assert missing is None
        assert num_bytes >= len(whole)
    if isinstance(store, TimedStore):
        used, missing = store.times(["a/1", "nowhere"])
        assert used > missing == 0
    delete(store, "a/1", "a/4")
    assert get(store, "a/1", "a/2") == [None, b"two" * 5]


def test_a_name_that_is_none_is_refused(store):
    names = ["", "/a", "a/", "../a", "a/../b", ".tmp/a", "a//b", "a b", "ä", "a" * 300]
    for name in names:
        for call in (
            lambda name: store.get([name], 10),
            lambda name: store.put([(name, [b"x"])]),
            lambda name: store.exists([name]),
            lambda name: store.delete([name]),
            lambda name: list(store.list(name)),
        ):
            with pytest.raises(ValueError, match="no name of an object"):
                call(name)


def test_a_folder_is_listed_with_all_below_it(store):
    if not can_list(store):
        pytest.skip("it has no list")
    # Redis has several pages.
    num_names = 5000 if isinstance(store, redis_store.RedisStore) else 300
    names = [f"a/{n % 17:02x}/{n}" for n in range(num_names)]
    names += ["a/A", "a/0/0", "a/f", "a/zz/0", "a/Z", "a/1"]
    put(store, dict.fromkeys([*names, "ab/3", "c"], b"x"))
    assert listed(store, "a") == sorted(names)


def test_writers_of_one_name_leave_one_of_their_objects_and_readers_no_mixture(store):
    blobs = [bytes([n]) * 20_000 for n in range(3)]
    seen = set()

    def write(blob):
        for _ in range(10):
            assert list(store.put([("a/1", [blob[:100], blob[100:]])])) == [None]

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


def test_stores_in_memory_of_one_name_are_one():
    urls = ("memory://a", "memory://a", "memory://b")
    with opened(*urls) as (writer, reader, separate):
        put(writer, {"a": b"x"})
        assert get(reader, "a") == [b"x"]
        assert get(separate, "a") == [None]


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "s3", "mooncake"])
def test_a_server_that_is_not_there_is_unreachable(scheme, credentials):
    place = f"127.0.0.1:{free_port()}"
    if scheme == "mooncake":
        mooncake_program()
    is_s3 = scheme == "s3"
    url = f"s3://bkt?endpoint=http://{place}" if is_s3 else f"{scheme}://{place}"
    with opened(url) as [store]:
        assert read_error(store) == write_error(store) == "unreachable"
        if can_list(store):
            with pytest.raises(StoreError) as info:
                listed(store, "a")
            assert info.value.kind == "unreachable"


def test_a_missing_extra_is_named_in_one_line(monkeypatch):
    for url, package, extra in (
        ("s3://bucket", "tensorstore", "storage"),
        ("gs://bucket", "tensorstore", "storage"),
        ("redis://host", "redis", "redis"),
        ("unix:///socket", "redis", "redis"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError) as info:
            open_store(url)
        assert str(info.value).endswith(pip_install(extra))
        assert "\n" not in str(info.value)


# S3 and what else tensorstore reaches.


def test_s3_is_where_the_url_or_the_environment_says(
    s3_endpoint, credentials, monkeypatch
):
    with opened(f"s3://nowhere/p?endpoint={s3_endpoint}") as [store]:
        [error] = store.put([("a", [b"x"])])
        assert "bucket does not exist" in str(error)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    bucket = "s3://blocks/environment"
    with opened(bucket, f"{bucket}/?region=eu-west-1") as (store, in_region):
        assert store.url == "s3://blocks/environment"
        put(store, {"a": b"x"})
        assert get(in_region, "a") == [b"x"]


def test_s3_takes_the_credentials_of_the_environment_if_it_has_some(monkeypatch):
    specs = []
    monkeypatch.setattr(
        tensor_store, "TensorStoreStore", lambda spec, url: specs.append(spec)
    )
    for key in ("test", ""):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        open_store("s3://blocks/p")
    has_some, has_none = specs
    assert has_some["aws_credentials"] == {"type": "environment"}
    assert "aws_credentials" not in has_none


def test_a_bucket_without_room_is_full(credentials):
    answers = []
    with (
        http_server(lambda: answers[0]) as port,
        opened(f"s3://blocks/kv?endpoint=http://127.0.0.1:{port}") as [store],
    ):
        for status, code, kind in (
            (507, "", "full"),
            (507, "XMinioStorageFull", "full"),
            (400, "XMinioAdminBucketQuotaExceeded", "full"),
            (403, "QuotaExceeded", "full"),
            (403, "AccessDenied", "denied"),
            (413, "EntityTooLarge", "other"),
        ):
            message = f"<Code>{code}</Code><Message>no</Message>"
            answers[:] = [(status, code and f"<Error>{message}</Error>")]
            assert write_error(store) == kind, code
            assert errors_of(lambda: store.exists(["a"])) == {kind}, code


def test_an_empty_object_of_a_bucket_is_there(tmp_path):
    store = TensorStoreStore({"driver": "file", "path": f"{tmp_path}/"}, "test")
    (tmp_path / "a").touch()
    assert exists(store, "a") == [True]
    assert get(store, "a") == [b""]


# Redis, one server or a cluster.


def test_a_socket_leads_to_the_server_that_listens_at_it(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        folder = client.config_get("dir")["dir"]
    with opened(redis_url, f"unix://{folder}/redis.sock") as (store, by_socket):
        put(by_socket, {"socket": b"x"})
        assert get(store, "socket") == [b"x"]


def test_a_closed_store_leaves_no_connection_to_a_cluster(cluster_url):
    host, _, port = cluster_url.rpartition("/")[2].partition(",")[0].partition(":")
    with redis.Redis(host, int(port)) as client:
        num_before = len(client.client_list())
        store = open_store(cluster_url)
        put(store, {f"a/{number}": b"x" for number in range(64)})
        assert len(client.client_list()) > num_before
        store.close()
        wait_for(lambda: len(client.client_list()) == num_before)


def test_a_redis_that_refuses_says_why_and_keeps_what_it_has(tmp_path):
    options = "--requirepass", "hidden", "--maxmemory", "3mb"
    with redis_server(tmp_path, *options) as (url, _):
        urls = [url.replace("//", f"//:{word}@") for word in ("hidden", "wrong-one")]
        with opened(*urls) as (store, wrong):
            assert store.url == url
            put(store, {"a": b"x"})
            assert write_error(store, "b", bytes(8 << 20)) == "full"
            assert get(store, "a", "b") == [b"x", None]
            [error] = outcomes(lambda: wrong.get(["a"], 10))
            assert error.kind == "denied"
            assert "wrong-one" not in str(error)


def test_redis_is_used_again_once_it_is_back(tmp_path):
    with redis_server(tmp_path) as (url, process):
        port = urllib.parse.urlsplit(url).port
        with opened(url) as [store]:
            put(store, {"f/1": b"x"})
            for _ in range(10):  # Listings, each in a thread, leave no connections.
                thread = threading.Thread(target=listed, args=(store, "f"))
                thread.start()
                thread.join()
            with redis.Redis.from_url(url) as client:
                assert client.info("clients")["connected_clients"] <= 4
            assert listed(store, "nowhere") == []
            process.kill()
            process.wait()
            assert read_error(store) == "unreachable"
            with redis_server(tmp_path, port=port):
                assert get(store, "f/1") == [None]
                put(store, {"f/1": b"y"})
                assert get(store, "f/1") == [b"y"]


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
            lambda host, _, *args: lookup(host, *target, *args),
        )
        with closing(open_store("redis://127.0.0.1:1/0")) as store:
            put(store, {"a": b"x"})
            with redis.Redis.from_url(old) as client:
                client.replicaof("127.0.0.1", ports[1])
            target[:] = ports[1:]
            errors_of(lambda: store.put([("b", [b"y"])]))
            assert errors_of(lambda: store.put([("b", [b"y"])])) == {None}
        with redis.Redis.from_url(new) as client:
            assert client.get("b") == b"y"


# Each node of a cluster has some of them.
NAMES = [f"a/{number}" for number in range(100)]
OF_NAMES = {name: name.encode() for name in NAMES}


def has_all(store):
    """Whether all can be read now; nothing but that a node is away may hinder it."""
    answers = outcomes(lambda: store.get(NAMES, 100))
    if errors := [answer for answer in answers if isinstance(answer, StoreError)]:
        assert {error.kind for error in errors} == {"unreachable"}
        return False
    assert list(map(bytes, answers)) == [*OF_NAMES.values()]
    return True


@leaves_sockets
def test_a_replica_takes_the_place_of_a_node_that_died(tmp_path):
    with redis_cluster(tmp_path, num_replicas=1) as (url, nodes):
        first, second, *_ = nodes
        late_url = f"redis+cluster://x.invalid,127.0.0.1:{second}"
        with opened(url, late_url) as (store, late):
            put(store, OF_NAMES)
            with redis.Redis(port=first) as client:
                wait_for(lambda: is_copied(client.info("replication")))
            nodes[first].kill()
            nodes[first].wait()
            assert not has_all(store)
            wait_for(has_all, store)
            assert listed(store, "a") == sorted(NAMES)
            assert has_all(late)


@leaves_sockets
def test_a_node_of_a_cluster_that_fails_costs_only_its_values(tmp_path):
    """Not the call, not the listing, and not the rest of the store."""
    with (
        redis_cluster(tmp_path) as (url, nodes),
        contextlib.closing(open_store(url)) as store,
    ):
        for port in nodes:
            with redis.Redis(port=port) as client:
                client.config_set("cluster-require-full-coverage", "no")
        put(store, OF_NAMES)
        *_, victim = nodes
        with redis.Redis(port=victim) as client:
            lost = {name.decode() for name in client.scan_iter(count=1000)}
        assert 0 < len(lost) < len(NAMES)
        nodes[victim].kill()
        nodes[victim].wait()
        for call in (
            lambda: store.get(NAMES, 100),
            lambda: store.exists(NAMES),
            lambda: store.put([(name, [b"x"]) for name in NAMES]),
            lambda: store.delete(NAMES[50:] + NAMES[:50]),
        ):
            answers = call()
            failed = [a for a in answers if isinstance(a, StoreError)]
            assert {error.kind for error in failed} == {"unreachable"}
            assert len(failed) == len(lost)
        # All names of a call belong to the node: the others still answer.
        answers = store.get(sorted(lost), 100)
        assert {type(answer) for answer in answers} == {StoreError}
        put(store, {name: OF_NAMES[name] for name in {*NAMES} - lost})
        # A listing is incomplete, and has what the other nodes have.
        names, error = listed_until_error(store, "a")
        assert names == {*NAMES} - lost
        assert error.kind == "other"
        for process in nodes.values():
            process.kill()
            process.wait()
        names, error = listed_until_error(store, "a")
        assert (names, error.kind) == (set(), "unreachable")


@leaves_sockets
def test_a_node_of_a_cluster_that_hangs_costs_one_deadline_and_then_its_blocks(
    tmp_path, caplog
):
    """Reads, writes, probes and listings of the other nodes go on meanwhile."""
    caplog.set_level("INFO", "jaxkv.transfer.storage.outage")
    blocks = ObjectFormat(b"model", "u8[4]", 4)
    keys = [bytes([number]) * 32 for number in range(60)]
    items = [(key, [b"body"]) for key in keys]
    with (
        redis_cluster(tmp_path) as (url, nodes),
        StorageIO(open_store(url), blocks) as storage,
    ):

        def outcomes_of(tickets):
            ended = []
            while len(ended) < len(tickets):
                ended += storage.wait(0.01, len(tickets) - len(ended))
            return {done.key: (done.outcome, done.num_found) for done in ended}

        def read(wait_s=1000.0):
            return outcomes_of(storage.submit_reads(keys, time.monotonic() + wait_s))

        whole = dict.fromkeys(keys, ("done", 0))
        assert outcomes_of(storage.submit_writes(items)) == read() == whole
        for victim in nodes:
            with redis.Redis(port=victim) as client:
                client.config_set("cluster-require-full-coverage", "no")
                names = {word.decode() for word in client.scan_iter(count=1000)}
        lost = {key for key in keys if blocks.name(key) in names}
        name, others = f"127.0.0.1:{victim}", whole | dict.fromkeys(lost, ("failed", 0))
        nodes[victim].send_signal(signal.SIGSTOP)
        try:
            assert ("late", 0) in read(1.0).values()
            assert storage.node_states[name] is False
            assert read() == others  # At once, not at the deadline.
            assert outcomes_of(storage.submit_writes(items)) == others
            probes = storage.submit_probes([(key,) for key in keys], math.inf)
            found = outcomes_of(probes).items()
            assert {key for key, (_, num) in found if num} == {*keys} - lost
            storage.list_all()
            wait_for(lambda: storage.take_pages(1000)[1] == Listed(False))
            threads = [thread.name for thread in threading.enumerate()]
            assert threads.count(f"jaxkv storage outage {name}") == 1
            assert storage.is_up
        finally:
            nodes[victim].send_signal(signal.SIGCONT)
        wait_for(lambda: all(storage.node_states.values()))
        assert read() == whole
        shown = f"the node {name} of the store {url}"
        fails, works = caplog.messages
        assert fails.startswith(f"{shown} fails: its blocks count as misses until it")
        assert works.startswith(f"{shown} answers again after")


def listed_until_error(store, folder):
    names = set()
    try:
        for page in store.list(folder):
            names.update(page)
    except StoreError as error:
        return names, error
    raise AssertionError("the listing is complete")


def test_a_range_of_a_bucket_that_cannot_be_listed_costs_its_names(ranges):
    store, fail = ranges
    num_calls = fail(b"f/07")
    names, error = listed_until_error(store, "f")
    assert names == {f"f/{n:02x}" for n in range(256) if n != 7}
    assert "UNAVAILABLE" in str(error)
    assert num_calls() == 256
    # A bucket that is down is not asked for each range.
    num_calls = fail(b"f/")
    names, error = listed_until_error(store, "f")
    assert not names
    assert num_calls() < 40


@pytest.fixture
def ranges():
    """A bucket in memory with a name in each range, and a function to fail some."""
    pytest.importorskip("tensorstore")
    store = TensorStoreStore({"driver": "memory"}, "memory://")
    put(store, {f"f/{n:02x}": b"x" for n in range(256)})
    kvstore, failing, calls = store._store, [], []

    class Failing:
        def list(self, part):
            calls.append(part)
            is_failing = part.inclusive_min.startswith(failing[-1])
            return tensorstore_error() if is_failing else kvstore.list(part)

    store._store = Failing()

    def fail(prefix):
        failing.append(prefix)
        calls.clear()
        return lambda: len(calls)

    return store, fail


def tensorstore_error():
    def result():
        raise RuntimeError("UNAVAILABLE: the service is overloaded")

    return types.SimpleNamespace(result=result)


def is_copied(info):
    """Whether the only replica of a node has what the node has."""
    replica = info.get("slave0", {"state": "none"})
    is_there = replica["state"] == "online"
    return is_there and replica["offset"] == info["master_repl_offset"]


def test_a_cluster_is_reached_by_tls_if_its_certificate_is_known(tmp_path):
    with (
        redis_cluster(tmp_path, has_tls=True) as (url, _),
        opened(url, url.partition("?")[0]) as (store, stranger),
    ):
        put(store, OF_NAMES)
        assert has_all(store)
        assert read_error(stranger) == "unreachable"


@leaves_sockets
def test_a_cluster_is_read_while_values_move_and_used_again_once_it_is_back(tmp_path):
    with ExitStack() as stack:
        with redis_cluster(tmp_path) as (url, nodes):
            [store] = stack.enter_context(opened(url))
            put(store, OF_NAMES)
            source, target, _ = map(node_id, nodes)
            words = [redis_client(), "--cluster", "reshard", f"127.0.0.1:{min(nodes)}"]
            words += ["--cluster-from", source, "--cluster-to", target]
            words += ["--cluster-yes", "--cluster-slots", "2000"]
            with subprocess.Popen(words, stdout=subprocess.DEVNULL) as moving:
                num_reads = 0
                while moving.poll() is None:
                    assert has_all(store)
                    num_reads += 1
            assert moving.returncode == 0
            assert num_reads > 1
            assert listed(store, "a") == sorted(NAMES)
        assert read_error(store, *NAMES) == "unreachable"
        for number, port in enumerate(nodes):
            server = redis_server(tmp_path / str(number), *OF_CLUSTER, port=port)
            stack.enter_context(server)
        # Each node finds out by itself that the others are back.
        wait_for(lambda: errors_of(lambda: store.exists(NAMES)) == {None})
        assert get(store, *NAMES) == [None] * len(NAMES)
        put(store, OF_NAMES)
        wait_for(has_all, store)


def node_id(port):
    with redis.Redis(port=port) as client:
        return client.execute_command("CLUSTER", "MYID").decode()


# Mooncake.


def test_a_mooncake_pool_without_a_list_or_room_says_so(mooncake_url):
    with opened(mooncake_url) as [store]:
        with pytest.raises(StoreError, match="storage_list_s=0"):
            listed(store, "a")
        [error] = store.put([("a", [bytes(80 << 20)])])
        assert error.kind == "full"
        assert "segment=" in str(error)


def test_what_one_client_of_mooncake_writes_another_reads_and_deletes(mooncake_url):
    payload = np.random.default_rng(0).bytes(3 << 20)
    with opened(mooncake_url, mooncake_url) as (client, peer):
        assert list(peer.put([("a/1", [b"head", payload])])) == [None]
        assert get(client, "a/1") == get(peer, "a/1") == [b"head" + payload]
        assert get(peer, "a/1", max_bytes=100) == [b"head" + payload[:96]]
        # An object that is there stays, until it is deleted, which needs no lease.
        put(client, {"a/1": b"other"})
        assert get(peer, "a/1") == [b"head" + payload]
        delete(client, "a/1")
        put(client, {"a/1": b"other"})
        assert get(peer, "a/1") == [b"other"]


def test_mooncake_is_used_again_once_its_master_is_back():
    with ExitStack() as stack:
        with mooncake_master() as (url, process):
            [store] = stack.enter_context(opened(f"{url}?segment=64MiB"))
            put(store, {"a": b"x"})
            process.kill()
            process.wait()
            assert read_error(store) == "unreachable"
            [late] = stack.enter_context(opened(url))
            [error] = late.get(["a"], 10)
            assert f"no Mooncake master answers at {url[11:]}" in str(error)
        stack.enter_context(mooncake_master(int(url.rpartition(":")[2])))
        wait_for(lambda: errors_of(lambda: store.put([("a", [b"y"])])) == {None})
        assert get(store, "a") == [b"y"]
        wait_for(lambda: errors_of(lambda: late.exists(["a"])) == {None})
        assert get(late, "a") == [b"y"]


# Processes that end while their stores hang or are written.


def run_interpreter(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"},
    )


def never_answered(urls, end="storage.close(0.1)"):
    """Return code that uses stores that never answer."""
    return f"""
from jaxkv.transfer.storage import ObjectFormat, StorageIO, open_store
for url in {urls!r}:
    storage = StorageIO(open_store(url), ObjectFormat(b"m", "u8[4]", 4))
    storage.submit_writes([(b"k" * 32, [b"body"])])
    storage.submit_reads([b"k" * 32], 0.0)
    print([each.outcome for each in storage.wait(0.5) if each.kind == "read"])
    {end}
"""


def test_a_process_ends_although_its_stores_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        urls = [f"s3://bucket/?endpoint=http://{place}", f"redis://{place}"]
        code = f"""
from jaxkv.transfer.storage import MemoryStore
MemoryStore.get = lambda *_: open({str(tmp_path / "pipe")!r})
{never_answered([*urls, "memory://hanging"])}
{never_answered(urls[1:], end="pass")}
print("end")
"""
        done = run_interpreter(code)
    assert done.stdout == "['late']\n" * 4 + "end\n", done.stderr
    assert done.returncode == 0


def test_a_process_ends_although_a_mooncake_master_never_answers():
    mooncake_program()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"mooncake://127.0.0.1:{server.getsockname()[1]}"
        done = run_interpreter(never_answered([url]))
    # A client that cannot start has waited already.
    assert done.stdout in ("['failed']\n", "['late']\n"), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["folder", "mooncake"])
def test_what_a_killed_writer_leaves_is_whole_or_not_seen(tmp_path, kind, request):
    is_folder = kind == "folder"
    url = str(tmp_path) if is_folder else request.getfixturevalue("mooncake_url")
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
        for number in range(random.Random(0).randrange(5, 200)):
            assert process.stdout.readline() == f"{number}\n"
        process.kill()
    objects = ObjectFormat(b"m", "u8", 300_000)
    with opened(url) as [store]:
        keys = [number.to_bytes(32, "little") for number in range(50)]
        blobs = get(store, *map(objects.name, keys), max_bytes=objects.object_bytes)
    pairs = zip(keys, blobs, strict=True)
    whole = [objects.decode(key, data) for key, data in pairs if data is not None]
    assert whole
    for payload in whole:
        assert not isinstance(payload, Refusal), payload
        assert len(set(bytes(payload))) == 1
