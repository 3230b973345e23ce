"""`python -m benchmarks.transfer`: rival designs, and what a running step hides."""

import json

import jax
import numpy as np
import pytest

from benchmarks import transfer
from jaxkv.tools.bench.transfer.plan import make_plan
from jaxkv.tools.bench.transfer.records import (
    DIRECTIONS,
    BytesDifferError,
    TransferConfig,
)
from jaxkv.tools.bench.transfer.run import run_transfer

LIMIT = "np.copyto" if jax.default_backend() == "cpu" else "device_put"
KIB = 1 << 10
SMALL = "--block-sizes 4KiB --rounds 3"

pytestmark = pytest.mark.usefixtures("plain_output")


def test_rivals_and_overlap_are_printed_and_written(capsys, tmp_path):
    figures = tmp_path / "a.json"
    line = f"{SMALL} --sizes 16KiB,64KiB --layers 2 --working-set 128KiB"
    transfer.main([*line.split(), "--json", str(figures)])
    out, written = capsys.readouterr().out, json.loads(figures.read_text())
    assert max(len(line) for line in out.split("GB are")[0].splitlines()) <= 80
    assert written["step_s"] > 0
    assert written["config"]["designs"] == ["engine", "per-block", "numpy"]
    # At most two transfers of 16 blocks fit in 32.
    for result, num_steps in zip(written["results"], (4, 2), strict=True):
        assert set(result["designs"]) == set(transfer.DESIGNS)
        assert set(result["engine_over"]) == {"per-block", "numpy"}
        for direction in DIRECTIONS:
            overlap = result["overlap"][direction]
            assert len(overlap["hidden_fraction"]) == 3
            assert overlap["num_steps"] == num_steps
            low, p50, high = result["engine_over"]["numpy"][direction]["quartiles"]
            assert low <= p50 <= high
    assert out.count("engine : per-block") == out.count("hidden by a step  ") == 2


def test_designs_and_overlap_can_be_left_out(capsys):
    line = (
        f"{SMALL} --sizes 8KiB --layers 1 --working-set 16KiB --designs engine "
        "--mode staged --run 1 --no-overlap"
    )
    transfer.main(line.split())
    out = capsys.readouterr().out
    rows = [li.split("  ")[1] for li in out.splitlines() if li.startswith("  ")]
    assert [row for row in rows if row] == [LIMIT, "engine"]
    assert "hidden" not in out


def test_hidden_fraction_is_the_time_steps_did_not_wait():
    for with_s, hidden in ((10.0, 1.0), (12.0, 0.5), (14.0, 0.0), (16.0, -0.5)):
        assert transfer.hidden_fraction(10.0, with_s, 4.0) == hidden
    overlap = transfer.Overlap(4, [10.0] * 3, [4.0] * 3, [10.0, 12.0, 14.0])
    assert overlap.hidden == [0.0, 0.5, 1.0]


def test_a_transfer_is_cut_into_powers_of_two():
    assert [part.stop for part in transfer.buckets(70)] == [64, 68, 70]


@pytest.mark.parametrize("name", ["per-block", "numpy"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_rival_that_moves_wrong_bytes_is_detected(name, direction, monkeypatch):
    sizes = {"sizes": (8 * KIB,), "block_sizes": (2 * KIB,), "num_layers": 2}
    config = TransferConfig(
        **sizes, rounds=3, working_set_bytes=32 * KIB, designs=(name,)
    )
    design, calls = transfer.DESIGNS[name], iter(range(1000))
    move = getattr(design, direction)

    def broken(self, pool, *ids):
        # Right at first; then the first two blocks are swapped.
        if next(calls) >= 3:
            ids = (ids[0], np.array([*ids[1][[1, 0]], *ids[1][2:]], np.int32))
        return move(self, pool, *ids)

    monkeypatch.setattr(design, direction, broken)
    overlaps = transfer.Overlaps()
    with pytest.raises(BytesDifferError, match="blocks differ from what was saved"):
        run_transfer(
            config,
            make_plan(config, None, None),
            lambda *_: None,
            lambda *args: transfer.OverlapBench(overlaps, *args),
        )
