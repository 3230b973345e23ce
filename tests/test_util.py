"""Sizes as people write them."""

import argparse

import numpy as np
import pytest

from jaxkv import _util as units
from jaxkv.tools import options


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("8GiB", 8 << 30),
        (" 64mib ", 64 << 20),
        ("1.5 KiB", 1536),
        ("2GB", 2 * 10**9),
        ("1TiB", 1 << 40),
        ("7", 7),
        ("1.9B", 1),
        ("9007199254740993", 2**53 + 1),
        ("0.000000001GB", 1),
        (1, 1),
        (1 << 70, 1 << 70),
        (np.int64(5), 5),
    ],
)
def test_a_size_in_bytes(size, num_bytes):
    parsed = units.parse_bytes(size)
    assert parsed == num_bytes
    assert type(parsed) is int


@pytest.mark.parametrize(
    "size",
    [
        *("", "GiB", "-1", "+1", "1e9", "0", "0.5", "1 M", "1  MiB", "nan", "1GiB/s"),
        *("٣", "9" * 400, 0, -1, True, 1.0, None, b"1GiB"),
    ],
)
def test_what_is_no_size_is_refused_by_name(size):
    with pytest.raises(ValueError, match="must be a size such as 64MiB") as caught:
        units.parse_bytes(size)
    assert str(caught.value).startswith(units.shown(size))


def test_the_command_line_reads_and_refuses_the_same():
    assert options.parse_bytes("8GiB") == units.parse_bytes("8GiB")
    with pytest.raises(argparse.ArgumentTypeError, match="'8 parsecs' must be a size"):
        options.parse_bytes("8 parsecs")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.00 GiB"), (1 << 30, "1.00 GiB"), (10**12, "931.32 GiB")],
)
def test_bytes_for_messages(num_bytes, text):
    assert units.gib(num_bytes) == text


@pytest.mark.parametrize("number", [0, 1, 8, 9])
def test_a_whole_number_is_accepted_between_its_bounds_alone(number):
    if number in (1, 8):
        units.check_whole(1, 8, blocks=number)
    else:
        with pytest.raises(ValueError, match=f"blocks={number} must be at"):
            units.check_whole(1, 8, blocks=number)
