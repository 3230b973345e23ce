"""Rows of host blocks, copied at their addresses, against slices of NumPy."""

import random

import numpy as np
import pytest

from jaxkv.transfer.host_rows import copy_in, copy_out

SHAPES = [
    ((6, 5), 0),
    ((3, 8, 2), 1),
    ((2, 3, 12), 2),
    ((1, 4, 7, 2), 1),
]


def table_of(arrays, axes, num_rows):
    """What the copies want to know, in numbers."""
    rows = []
    for array, axis in zip(arrays, axes, strict=True):
        row_bytes = int(np.prod(array.shape[axis + 1 :]))
        num_pieces = int(np.prod(array.shape[:axis]))
        stride = array.shape[axis] * row_bytes
        rows.append((array.ctypes.data, num_pieces, stride, num_rows * row_bytes))
    return np.array(rows, np.int64)


@pytest.mark.parametrize("seed", range(8))
def test_a_block_is_copied_out_and_in_as_slices_are(seed):
    print(f"seed {seed}")
    rng, random_bytes = random.Random(seed), np.random.default_rng(seed)
    chosen = rng.choices(SHAPES, k=rng.randrange(1, 5))
    axes = [axis for _, axis in chosen]
    arrays = [random_bytes.integers(0, 256, shape, np.uint8) for shape, _ in chosen]
    num_rows = rng.choice((1, 2))
    table = table_of(arrays, axes, num_rows)
    most = min(shape[axis] for shape, axis in chosen) // num_rows
    place = rng.randrange(most)

    def rows_of(array, axis):
        rows = slice(place * num_rows, (place + 1) * num_rows)
        return array[(slice(None),) * axis + (rows,)]

    own = [rows_of(*pair) for pair in zip(arrays, axes, strict=True)]
    expected = np.concatenate([rows.reshape(-1) for rows in own])
    payload = np.zeros(len(expected), np.uint8)
    copy_out(table, place, payload)
    np.testing.assert_array_equal(payload, expected)

    before = [array.copy() for array in arrays]
    payload = ~payload
    copy_in(table, place, payload)
    written = np.concatenate([rows.reshape(-1) for rows in own])
    np.testing.assert_array_equal(written, payload)
    for array, old, axis in zip(arrays, before, axes, strict=True):
        rows_of(array, axis)[...] = rows_of(old, axis)
        np.testing.assert_array_equal(array, old)  # All else is as it was.
