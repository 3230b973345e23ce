"""`python -m benchmarks.storage`: plain files and clients next to the store."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import storage
from benchmarks.storage import CLIENT, FILES, FILES_REUSED
from jaxkv.tools.bench.storage.run import ALONE, JAXKV
from tests.rigs.servers import mooncake_lender, mooncake_master, redis_server

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = ["--block-sizes", "4KiB,16KiB", "--per-round", "64KiB", "--rounds", "3"]


def bench(*words):
    storage.main([*map(str, words), *SMALL])


def test_a_folder_is_compared_with_plain_files_and_nothing_is_left(capsys, tmp_path):
    folder, figures = tmp_path / "store", tmp_path / "a.json"
    bench(folder, "--json", figures)
    assert not folder.exists()
    out = capsys.readouterr().out
    assert f"{JAXKV} : {FILES_REUSED}" in out
    assert storage.NOTES[FILES] in out
    for result in json.loads(figures.read_text())["results"]:
        assert list(result["ways"]) == [JAXKV, FILES, FILES_REUSED]
        assert list(result["jaxkv_over"]) == [FILES, FILES_REUSED]


def test_redis_is_compared_with_its_client(tmp_path, capsys):
    with redis_server(tmp_path) as (url, _):
        bench(url)
    assert f"{JAXKV} : {CLIENT}" in capsys.readouterr().out


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
    client = storage._redis("redis://127.0.0.1:1")
    blocks = [np.full(4, number, np.uint8) for number in range(3)]
    client.write(["a", "b", "c"], blocks)
    client.read(["c", "a"])
    assert [bytes(value) for value in held.values()] == [bytes(b) for b in blocks]
    assert (list(held), requested) == (["a", "b", "c"], ["c", "a"])
    client.close()
    assert not held
