"""`jaxkv bench transfer`: what it prints, draws and writes, and how it refuses."""

import itertools

import jax
import pytest

from jaxkv.tools.bench.transfer import records, run
from jaxkv.tools.bench.transfer.records import BytesDifferError

ON_CPU = jax.default_backend() == "cpu"
LIMIT = "np.copyto" if ON_CPU else "device_put"

pytestmark = pytest.mark.usefixtures("plain_output")

SMALL = (
    "bench transfer --sizes 2KiB,16KiB,64KiB --block-sizes 4KiB --rounds 3 "
    "--layers 2 --working-set 128KiB"
)


def test_it_prints_draws_and_writes(run_line, tmp_path, monkeypatch):
    seen = []

    def keep(*args):
        seen.append(run.run_transfer(*args))
        return seen[-1]

    monkeypatch.setattr("jaxkv.tools.bench.transfer.command.run_transfer", keep)
    picture = tmp_path / "a.svg"
    out, err, written = run_line(f"{SMALL} --plot {picture}")
    assert [line.partition(" ...")[0] for line in err.splitlines()] == [
        "4 KiB blocks: filling host memory",
        "4 KiB blocks, 16 KiB",
        "4 KiB blocks, 64 KiB",
    ]
    drawn = picture.read_text()
    for direction in records.DIRECTIONS:
        assert f"{direction}, GB/s, blocks of 4 KiB" in drawn
    # A mark for each side, size and direction.
    assert drawn.count("<title>engine, ") == drawn.count(f"<title>{LIMIT}, ") == 4
    assert "2 layers of bfloat16, 128 KiB; as much host memory per design" in out
    assert "Left out     2 KiB in blocks of 4 KiB: less than one block" in out
    assert max(len(line) for line in out.split("GB are")[0].splitlines()) <= 80

    assert written["limit"] == LIMIT
    assert written["mode"] == ("fused" if ON_CPU else "staged")
    assert written["working_set_bytes"] == 128 << 10
    assert written["config"]["rounds"] == 3
    assert {"device", "cpu", "jax", "jaxkv"} <= written["machine"].keys()
    sizes = [(r["size_bytes"] >> 10, r["num_blocks"]) for r in written["results"]]
    assert sizes == [(16, 4), (64, 16)]
    for result in written["results"]:
        section = out.split(f"{result['size_bytes'] >> 10} KiB in 4 KiB ")[1]
        lines = itertools.takewhile(str.strip, section.splitlines()[1:])
        rows = {line[2:].partition("  ")[0]: line.split() for line in lines}
        for name, design in result["designs"].items():
            cells = []
            for direction in records.DIRECTIONS:
                figure, limit = design[direction], result["limit"][direction]
                low, p50, high = figure["of_limit"]["quartiles"]
                assert low <= p50 <= high
                best = figure["best_gb_per_s"] / limit["best_gb_per_s"]
                assert figure["of_limit"]["best"] == pytest.approx(best)
                for pair in (
                    (figure["best_gb_per_s"], figure["p50_gb_per_s"]),
                    (best, p50),
                ):
                    cells += "{:.2f} / {:.2f}".format(*pair).split()
            assert rows[name][-12:] == cells
        assert set(result["designs"]) == {"engine"}
        assert (result["engine_over"], result["overlap"]) == ({}, None)
    # Everything is timed in every round.
    (record,) = seen
    for result in record.results:
        assert set(result.designs_s) == {records.ENGINE}
        for sides in (result.limit_s, *result.designs_s.values()):
            for direction in records.DIRECTIONS:
                assert len(sides[direction]) == 3
                assert min(sides[direction]) > 0


def test_a_failure_is_a_one_line_error(run_line, monkeypatch):
    smaller = "use smaller --sizes or a smaller --working-set"
    for error, code, message in (
        (BytesDifferError("3 blocks"), 1, "bytes differ: 3 blocks"),
        (MemoryError("4 blocks"), 2, f"{smaller}: 4 blocks"),
    ):

        def broken(config, plan, on_progress, error=error):
            raise error

        monkeypatch.setattr("jaxkv.tools.bench.transfer.command.run_transfer", broken)
        _, err, _ = run_line(SMALL, code, has_figures=False)
        assert err == f"jaxkv bench transfer: error: {message}\n"
