"""Rows of host blocks, copied at their addresses, against slices of NumPy."""

import random

import numpy as np

from jaxkv.transfer.host_rows import copy_in, copy_out

SHAPES = [((6, 5), 0), ((3, 8, 2), 1), ((2, 3, 12), 2), ((1, 4, 7, 2), 1)]


def table_of(arrays, axes, num_rows):
    """What the copies want to know, in numbers."""
    rows = []
    for array, axis in zip(arrays, axes, strict=True):
        row_bytes = int(np.prod(array.shape[axis + 1 :]))
        num_pieces = int(np.prod(array.shape[:axis]))
        stride = array.shape[axis] * row_bytes
        rows.append((array.ctypes.data, num_pieces, stride, num_rows * row_bytes))
    return np.array(rows, np.int64)


def test_a_block_is_copied_out_and_in_as_slices_are():
    for seed in range(8):
        rng, random_bytes = random.Random(seed), np.random.default_rng(seed)
        chosen = rng.choices(SHAPES, k=rng.randrange(1, 5))
        axes = [axis for _, axis in chosen]
        arrays = [random_bytes.integers(0, 256, shape, np.uint8) for shape, _ in chosen]
        num_rows = rng.choice((1, 2))
        table = table_of(arrays, axes, num_rows)
        place = rng.randrange(min(shape[a] for shape, a in chosen) // num_rows)
        rows = slice(place * num_rows, (place + 1) * num_rows)

        def views(arrays, axes=axes, rows=rows):
            pairs = zip(arrays, axes, strict=True)
            return [array[(slice(None),) * axis + (rows,)] for array, axis in pairs]

        def bytes_in(arrays, views=views):
            return np.concatenate([view.reshape(-1) for view in views(arrays)])

        payload = np.zeros(len(bytes_in(arrays)), np.uint8)
        copy_out(table, place, payload)
        np.testing.assert_array_equal(payload, bytes_in(arrays), f"{seed=}")

        before = [array.copy() for array in arrays]
        payload = ~payload
        copy_in(table, place, payload)
        np.testing.assert_array_equal(bytes_in(arrays), payload, f"{seed=}")
        for view, old in zip(views(arrays), views(before), strict=True):
            view[...] = old
        for array, old in zip(arrays, before, strict=True):  # All else is as it was.
            np.testing.assert_array_equal(array, old, f"{seed=}")
