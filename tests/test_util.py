"""Sizes as people write them, and values in messages."""

import numpy as np
import pytest

from jaxkv import _util as units


def test_a_size_in_bytes_is_read():
    for size, num_bytes in (
        *(("8GiB", 8 << 30), (" 64mib ", 64 << 20), ("1.5 KiB", 1536)),
        *(("2GB", 2 * 10**9), ("3TB", 3 * 10**12), ("1TiB", 1 << 40), ("7", 7)),
        *(("1.9B", 1), ("9007199254740993", 2**53 + 1), ("0.000000001GB", 1)),
        *((1, 1), (1 << 70, 1 << 70), (np.int64(5), 5)),
    ):
        parsed = units.parse_bytes(size)
        assert (parsed, type(parsed)) == (num_bytes, int), size


def test_an_invalid_size_is_refused_by_name():
    for size in (
        *("", "GiB", "-1", "+1", "1e9", "0", "0.5", "1 M", "1  MiB", "nan", "1GiB/s"),
        *("٣", "9" * 400, 0, -1, True, 1.0, None, b"1GiB"),
    ):
        with pytest.raises(ValueError, match="must be a size such as 64MiB") as caught:
            units.parse_bytes(size)
        assert str(caught.value).startswith(units.shown(size))


def test_bytes_are_shown_in_the_unit_of_their_size():
    sizes = [(0, "0.00 GiB"), (1 << 30, "1.00 GiB"), (10**12, "931.32 GiB")]
    assert [units.gib(num_bytes) for num_bytes, _ in sizes] == [x for _, x in sizes]
    texts = {3 << 40: "3 TiB", 1 << 30: "1 GiB", 3 << 19: "1536 KiB"}
    texts |= {3 << 9: "1536 bytes"}
    assert {num: units.size_text(num) for num in texts} == texts


@pytest.mark.parametrize("number", [0, 1, 8, 9])
def test_a_whole_number_is_accepted_between_its_bounds_alone(number):
    if number in (1, 8):
        units.check_whole(1, 8, blocks=number)
    else:
        with pytest.raises(ValueError, match=f"blocks={number} must be at"):
            units.check_whole(1, 8, blocks=number)


def test_a_long_value_is_cut():
    nested = []
    for _ in range(20_000):
        nested = [nested]
    for value, start, end in (
        (nested, "<list>", "<list>"),
        (-(10**5000), "<int>", "<int>"),
        (" " + "x" * 100_000 + " ", "' xxx", "xxx '"),
        (np.zeros((100, 100)), "array([[0., 0., 0., ", ""),
    ):
        text = units.shown(value)
        assert len(text) < 200
        assert text.startswith(start)
        assert text.endswith(end)
