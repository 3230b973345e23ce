"""The measurement of transfers: arithmetic, rounds, checks and limits."""

import itertools

import jax
import numpy as np
import pytest

from jaxkv.tools import speed
from jaxkv.tools.speed import BytesDifferError, SpeedBench
from jaxkv.transfer import TransferEngine

KIB = 1 << 10


def test_speeds_are_decimal_gigabytes_of_the_fastest_and_the_median_round():
    measured = speed.speed(3 * 10**9, [1.0, 2.0, 3.0])
    assert measured == speed.Speed(3.0, 1.5, [1.0, 2.0, 3.0])
    assert measured.text == "3.00 / 1.50"


def test_all_sides_are_timed_in_every_round_but_the_first_in_rotating_order():
    bench = SpeedBench(16 * KIB, 64 * KIB)
    calls = []
    sides = {
        name: lambda direction, name=name: calls.append(f"{name} {direction}")
        for name in "abc"
    }
    times = bench.compare(sides, range(4))
    order = [call[0] for call in calls if call.endswith("save")]
    assert "".join(order) == "abcbcacababc"
    assert calls[:2] == ["a save", "a load"]
    lengths = {len(times[name][way]) for name in "abc" for way in speed.DIRECTIONS}
    assert lengths == {3}


def test_one_device_is_measured_with_blocks_of_the_size_asked_for(monkeypatch):
    monkeypatch.setattr(speed, "_MOVED_BYTES", 256 * KIB)
    shown = []
    measured = speed.measure_bandwidth(lambda *row: shown.append(row), None, 16 * KIB)
    assert (measured.size_bytes, measured.block_bytes) == (256 * KIB, 16 * KIB)
    for side in (measured.save, measured.load, measured.limit_save):
        assert 0 < side.p50_gb_per_s <= side.best_gb_per_s
    assert shown[-1] == ("moving blocks", 8, 8)
    # A block has at least a row of each leaf.
    assert SpeedBench(1, 1, devices=jax.devices()[:1]).block_bytes == 2 * KIB


@pytest.mark.parametrize("direction", speed.DIRECTIONS)
def test_an_engine_that_moves_wrong_bytes_is_detected(direction, monkeypatch):
    move = getattr(TransferEngine, direction)

    def broken(self, pool, first, second):
        return move(self, pool, first, np.roll(second, 1))

    bench = SpeedBench(16 * KIB, 64 * KIB)
    bench.check()
    monkeypatch.setattr(TransferEngine, direction, broken)
    with pytest.raises(BytesDifferError, match="blocks are not what was saved"):
        bench.check()


def test_the_limit_of_an_accelerator_moves_both_ways():
    # The CPU backend has both memories too, so this runs anywhere.
    limit = speed.DevicePutLimit([jax.numpy.zeros(500) for _ in range(3)])
    for _, direction in itertools.product(range(2), speed.DIRECTIONS):
        limit.copy(direction)
    assert isinstance(speed.make_limit(10, 10), speed.CopyLimit) == speed.is_cpu()
