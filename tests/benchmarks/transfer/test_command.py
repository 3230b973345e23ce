"""`python -m benchmarks.transfer`: what it prints, writes and refuses."""

import itertools
import json

import jax
import pytest

from benchmarks.transfer import __main__ as transfer
from benchmarks.transfer.designs import DESIGNS, buckets
from jaxkv.tools.speed import DIRECTIONS, BytesDifferError

ON_CPU = jax.default_backend() == "cpu"
LIMIT = "np.copyto" if ON_CPU else "device_put"
SMALL = "--block-sizes 4KiB --rounds 3"

pytestmark = pytest.mark.usefixtures("plain_output")


def test_it_prints_and_writes_all_designs_next_to_the_limit(capsys, tmp_path):
    figures = tmp_path / "a.json"
    line = f"{SMALL} --sizes 2KiB,16KiB,64KiB --layers 2 --working-set 128KiB"
    assert transfer.main([*line.split(), "--json", str(figures)]) == 0
    (out, err), written = capsys.readouterr(), json.loads(figures.read_text())
    assert [line.partition(" ...")[0] for line in err.splitlines()] == [
        "4 KiB blocks",
        "4 KiB blocks, 16 KiB",
        "4 KiB blocks, 64 KiB",
    ]
    assert "2 layers of bfloat16, 128 KiB; as much host memory per design" in out
    assert "Left out     2 KiB in blocks of 4 KiB: less than one block" in out
    assert max(len(line) for line in out.split("GB are")[0].splitlines()) <= 80

    assert written["limit"] == LIMIT
    assert written["mode"] == ("fused" if ON_CPU else "staged")
    assert written["working_set_bytes"] == 128 << 10
    assert written["config"]["designs"] == ["engine", "per-block", "numpy"]
    assert {"device", "cpu", "jax", "jaxkv"} <= written["machine"].keys()
    sizes = [(r["size_bytes"] >> 10, r["num_blocks"]) for r in written["results"]]
    assert sizes == [(16, 4), (64, 16)]
    for result in written["results"]:
        section = out.split(f"{result['size_bytes'] >> 10} KiB in 4 KiB ")[1]
        rows = [*itertools.takewhile(str.strip, section.splitlines()[1:])]
        names = [row[2:].partition("  ")[0] for row in rows]
        rivals = [f"engine : {name}" for name in DESIGNS if name != "engine"]
        assert names == [LIMIT, *DESIGNS, *rivals]
        for direction, figure in result["designs"]["engine"].items():
            limit = result["limit"][direction]
            low, p50, high = figure["of_limit"]["quartiles"]
            assert low <= p50 <= high
            best = figure["best_gb_per_s"] / limit["best_gb_per_s"]
            assert figure["of_limit"]["best"] == pytest.approx(best)
            assert figure["p50_gb_per_s"] <= figure["best_gb_per_s"]
            for low, p50, high in (
                result["engine_over"][name][direction]["quartiles"]
                for name in ("per-block", "numpy")
            ):
                assert low <= p50 <= high
        assert {*result["designs"]["engine"]} == {*DIRECTIONS}


def test_designs_can_be_chosen(capsys):
    line = f"{SMALL} --sizes 8KiB --layers 1 --working-set 16KiB --designs engine"
    assert transfer.main(f"{line} --mode staged --run 1".split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    rows = [row for row in (line.split("  ")[1] for line in lines) if row]
    assert rows == [LIMIT, "engine"]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--block-sizes 6KiB", 2, "--block-sizes: a block of 6 KiB must be a multiple"),
        ("--rounds 2", 2, "--rounds: '2' must be a whole number from 3"),
        ("--sizes 9TiB", 2, "nothing can be measured: 9 TiB: needs"),
        ("--designs fast", 2, "--designs: unknown 'fast': choose from engine, per-b"),
        (SMALL, 1, "bytes differ: 3 blocks"),
    ],
)
def test_what_cannot_be_measured_is_one_line(line, code, message, capsys, monkeypatch):
    def run_transfer(*_):
        raise BytesDifferError("3 blocks")

    monkeypatch.setattr(transfer, "run_transfer", run_transfer)
    assert transfer.main(line.split()) == code
    error = capsys.readouterr().err
    assert error.startswith(f"python -m benchmarks.transfer: error: {message}")
    assert error.count("\n") == 1


def test_a_transfer_is_cut_into_powers_of_two():
    assert [part.stop for part in buckets(70)] == [64, 68, 70]
