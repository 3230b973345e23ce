"""`jaxkv bench storage`: what it prints and writes, how it refuses, what it leaves."""

import json
import os
import pathlib
import signal

import pytest

from jaxkv.tools import main as cli
from jaxkv.tools.bench.storage.run import ALONE, JAXKV
from jaxkv.transfer.storage import objects as objects_module
from jaxkv.transfer.storage import open_store
from tests.rigs.children import DEVNULL, Child
from tests.rigs.command_line import LAUNCHER
from tests.rigs.servers import redis_server
from tests.rigs.waiting import wait_for

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = ["--block-sizes", "4KiB,16KiB", "--per-round", "64KiB", "--rounds", "3"]


def bench(*words):
    return cli.main(["bench", "storage", *map(str, words)])


def test_it_prints_and_writes_and_leaves_nothing(capsys, tmp_path):
    folder, figures = tmp_path / "store", tmp_path / "a.json"
    assert bench(folder, *SMALL, "--json", figures) == 0
    assert not folder.exists()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "of others").write_text("x")
    out, err = capsys.readouterr()
    assert bench(shared, *SMALL, "--sealed") == 0
    assert [path.name for path in shared.iterdir()] == ["of others"]
    labels = [line.partition(" ...")[0] for line in err.splitlines()]
    assert labels == ["4 KiB blocks", "16 KiB blocks"]
    assert out.startswith(f"Store        file://{folder}\n")
    assert max(len(line) for line in out.split("GB are")[0].splitlines()[1:]) <= 80

    written = json.loads(figures.read_text())
    assert written["config"]["url"] == f"file://{folder}"
    assert {"device", "cpu", "jax", "jaxkv", "tensorstore"} <= written["machine"].keys()
    sizes = [(r["block_bytes"] >> 10, r["num_blocks"]) for r in written["results"]]
    assert sizes == [(4, 16), (16, 4)]
    for result in written["results"]:
        assert list(result["ways"]) == [JAXKV, ALONE]
        assert list(result["jaxkv_over"]) == [ALONE]
        section = out.split(f"{result['block_bytes'] >> 10} KiB ")[1]
        share = section.split(f"{JAXKV} : {ALONE} ")[1].split()
        low, p50, high = result["jaxkv_over"][ALONE]["write"]["quartiles"]
        assert low <= p50 <= high
        assert float(share[2]) == pytest.approx(p50, abs=0.006, rel=0.01)
        for way in ("write", "read"):
            speeds = result["ways"][JAXKV][way]
            assert 0 < speeds["p50_gb_per_s"] <= speeds["best_gb_per_s"]


def test_redis_is_measured_and_keeps_nothing(tmp_path, capsys):
    with redis_server(tmp_path) as (url, _):
        assert bench(url, *SMALL) == 0
        assert f"{JAXKV} : {ALONE}" in capsys.readouterr().out
        store = open_store(url)
        assert list(store.list("jaxkv1")) == []
        store.close()


def test_a_store_that_fails_or_bytes_that_differ_are_one_line(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "jaxkv1").write_text("in the way")
    assert bench(tmp_path, *SMALL) == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x[-3:] != "..."]
    assert line.startswith("jaxkv bench storage: error: ")

    def decode(self, key, data):
        return memoryview(bytes(self.payload_bytes))

    monkeypatch.setattr(objects_module.ObjectFormat, "decode", decode)
    assert bench(tmp_path / "other", *SMALL) == 1
    assert "jaxkv bench storage: error: bytes differ: block" in capsys.readouterr().err


@pytest.mark.skipif(not pathlib.Path("/proc").exists(), reason="there is no /proc")
def test_a_signal_leaves_nothing_in_the_folder(tmp_path):
    folder = tmp_path / "store"
    words = "bench", "storage", folder, "--rounds", "1000", "--per-round", "16MiB"
    log = tmp_path / "log"
    with log.open("w") as err:
        process = Child(*LAUNCHER[1:], *words, stdout=DEVNULL, stderr=err)
    try:
        wait_for(lambda: process.poll() or any(files for *_, files in os.walk(folder)))
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGINT
    assert log.read_text().splitlines()[-1] == "jaxkv bench: interrupted"
    assert not any(files for *_, files in os.walk(folder))
