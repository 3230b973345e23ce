"""Hazard's native choice of victims against a sort."""

import types

import numpy as np
import pytest

from jaxkv.policies import hazard


@pytest.fixture
def choose(monkeypatch):
    """The native choice in Python, where an index out of bounds is an error."""
    for name, function in (
        *(("empty", np.empty), ("filled", np.full), ("lesser", min), ("greater", max)),
        ("_sort", hazard._sort.py_func),
    ):
        monkeypatch.setattr(hazard, name, function)
    return hazard._native_choose_lowest.py_func


@pytest.mark.parametrize(
    ("num_blocks", "num_values"),
    [(3, 2), (200, 1), (900, 3), (2000, 1 << 20), (2000, 1 << 31)],
)
def test_the_lowest_values_are_chosen_in_order_and_the_deepest_first(
    num_blocks, num_values, choose
):
    rng = np.random.default_rng(num_values)
    # Most values are small: a few buckets have most of the blocks.
    values = (num_values ** rng.random(num_blocks)).astype(np.int64) - 1
    values[rng.random(num_blocks) < 0.1] = -1
    values[0] = 0
    depths = rng.integers(0, 40, num_blocks, np.int32)
    ref_cnt = rng.integers(0, 2, num_blocks, np.int32)
    ref_cnt[0] = 0
    idle = np.flatnonzero((values >= 0) & (ref_cnt == 0))
    order = idle[np.lexsort((idle, -depths[idle], values[idle]))].tolist()
    state = types.SimpleNamespace(depths=depths)
    for num in {1, 1 + len(idle) // 9, 1 + len(idle) // 2, len(idle)}:
        chosen = choose(state, values, ref_cnt, num).tolist()
        assert chosen[:num] == order[:num]
        assert len(chosen) <= 2 * num + hazard._SORT_RUN
