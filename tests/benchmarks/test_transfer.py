"""`python -m benchmarks.transfer`: rival designs next to the engine."""

import json

import jax
import pytest

from benchmarks import transfer
from jaxkv.tools.bench.transfer.records import DIRECTIONS

LIMIT = "np.copyto" if jax.default_backend() == "cpu" else "device_put"
SMALL = "--block-sizes 4KiB --rounds 3"

pytestmark = pytest.mark.usefixtures("plain_output")


def test_rivals_are_printed_and_written_and_designs_can_be_chosen(capsys, tmp_path):
    figures = tmp_path / "a.json"
    line = f"{SMALL} --sizes 16KiB,64KiB --layers 2 --working-set 128KiB"
    transfer.main([*line.split(), "--json", str(figures)])
    out, written = capsys.readouterr().out, json.loads(figures.read_text())
    assert max(len(line) for line in out.split("GB are")[0].splitlines()) <= 80
    assert written["config"]["designs"] == ["engine", "per-block", "numpy"]
    for result in written["results"]:
        assert set(result["designs"]) == set(transfer.DESIGNS)
        assert set(result["engine_over"]) == {"per-block", "numpy"}
        for direction in DIRECTIONS:
            low, p50, high = result["engine_over"]["numpy"][direction]["quartiles"]
            assert low <= p50 <= high
    assert out.count("engine : per-block") == 2
    line = f"{SMALL} --sizes 8KiB --layers 1 --working-set 16KiB --designs engine"
    transfer.main(f"{line} --mode staged --run 1".split())
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:2] == "  "]
    rows = [row for row in (line.split("  ")[1] for line in lines) if row]
    assert rows == [LIMIT, "engine"]


def test_a_transfer_is_cut_into_powers_of_two():
    assert [part.stop for part in transfer.buckets(70)] == [64, 68, 70]
