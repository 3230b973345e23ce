"""`python -m benchmarks.storage`: what it prints, writes, refuses and leaves.

A folder is compared with plain files, a server with its client.
"""

import json
import os
import pathlib
import signal
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.storage import __main__ as storage
from benchmarks.storage import rivals
from benchmarks.storage.rivals import CLIENT, FILES, FILES_REUSED
from benchmarks.storage.run import ALONE, JAXKV
from jaxkv.transfer.storage import objects, open_store
from tests.rigs.children import DEVNULL, Child
from tests.rigs.servers import mooncake_lender, mooncake_master, redis_server
from tests.rigs.waiting import wait_for

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = ["--block-sizes", "4KiB,16KiB", "--per-round", "64KiB", "--rounds", "3"]


def bench(*words):
    return storage.main([*map(str, words), *SMALL])


def test_a_folder_is_compared_with_plain_files_and_nothing_is_left(capsys, tmp_path):
    folder, figures = tmp_path / "store", tmp_path / "a.json"
    assert bench(folder, "--json", figures) == 0
    assert not folder.exists()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "of others").write_text("x")
    out, err = capsys.readouterr()
    assert bench(shared, "--sealed") == 0
    assert [path.name for path in shared.iterdir()] == ["of others"]
    labels = [line.partition(" ...")[0] for line in err.splitlines()]
    assert labels == ["4 KiB blocks", "16 KiB blocks"]
    assert out.startswith(f"Store        file://{folder}\n")
    assert max(len(line) for line in out.split("GB are")[0].splitlines()[1:]) <= 80
    assert rivals.NOTES[FILES] in out

    written = json.loads(figures.read_text())
    assert written["config"]["url"] == f"file://{folder}"
    assert {"device", "cpu", "jax", "jaxkv", "tensorstore"} <= written["machine"].keys()
    sizes = [(r["block_bytes"] >> 10, r["num_blocks"]) for r in written["results"]]
    assert sizes == [(4, 16), (16, 4)]
    for result in written["results"]:
        assert list(result["ways"]) == [JAXKV, FILES, FILES_REUSED]
        assert list(result["jaxkv_over"]) == [FILES, FILES_REUSED]
        section = out.split(f"{result['block_bytes'] >> 10} KiB ")[1]
        share = section.split(f"{JAXKV} : {FILES_REUSED} ")[1].split()
        low, p50, high = result["jaxkv_over"][FILES_REUSED]["write"]["quartiles"]
        assert low <= p50 <= high
        assert float(share[2]) == pytest.approx(p50, abs=0.006)
        for way in ("write", "read"):
            speeds = result["ways"][JAXKV][way]
            assert 0 < speeds["p50_gb_per_s"] <= speeds["best_gb_per_s"]


def test_redis_is_compared_with_its_client_and_keeps_nothing(tmp_path, capsys):
    with redis_server(tmp_path) as (url, _):
        assert bench(url) == 0
        out = capsys.readouterr().out
        assert f"{JAXKV} : {ALONE}" in out
        assert f"{JAXKV} : {CLIENT}" in out
        store = open_store(url)
        assert not any(store.list("jaxkv1"))
        store.close()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("ftp://x", 2, "URL: storage='ftp://x': unknown 'ftp'"),
        ("s3://", 2, "URL: storage='s3://...' must be s3://BUCKET/PREFIX"),
        ("taken", 1, ""),
        ("other", 1, "bytes differ: block"),
    ],
)
def test_a_store_that_fails_or_bytes_that_differ_are_one_line(
    line, code, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("taken").mkdir()
    pathlib.Path("taken/jaxkv1").write_text("in the way")
    if message.startswith("bytes"):
        monkeypatch.setattr(
            objects.ObjectFormat,
            "decode",
            lambda self, key, data: memoryview(bytes(self.payload_bytes)),
        )
    assert bench(line) == code
    (error,) = [x for x in capsys.readouterr().err.splitlines() if x[-3:] != "..."]
    assert error.startswith(f"python -m benchmarks.storage: error: {message}")


@pytest.mark.skipif(not pathlib.Path("/proc").exists(), reason="there is no /proc")
def test_an_interrupt_leaves_nothing_in_the_folder(tmp_path):
    folder = tmp_path / "store"
    words = "-m", "benchmarks.storage", folder, "--rounds", "1000"
    process = Child(*words, stdout=DEVNULL, stderr=DEVNULL)
    try:
        wait_for(lambda: process.poll() or any(files for *_, files in os.walk(folder)))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert not any(files for *_, files in os.walk(folder))


def test_mooncake_is_compared_with_its_client_and_keeps_nothing(capsys):
    with mooncake_master() as (url, _), mooncake_lender(url) as lender:
        bench(url)
        assert lender.remove_all(True) == 0  # Nothing was left.
    out = capsys.readouterr().out
    assert f"{JAXKV} : {ALONE}" in out
    assert f"{JAXKV} : {CLIENT}" in out


def test_redis_is_asked_for_one_value_in_each_call(monkeypatch):
    redis = pytest.importorskip("redis")
    held, requested = {}, []
    server = SimpleNamespace(
        set=held.__setitem__, get=requested.append, close=held.clear
    )
    monkeypatch.setattr(redis.Redis, "from_url", lambda url: server)
    client = rivals._redis("redis://127.0.0.1:1")
    blocks = [np.full(4, number, np.uint8) for number in range(3)]
    client.write(["a", "b", "c"], blocks)
    client.read(["c", "a"])
    assert [bytes(value) for value in held.values()] == [bytes(b) for b in blocks]
    assert (list(held), requested) == (["a", "b", "c"], ["c", "a"])
    client.close()
    assert not held
