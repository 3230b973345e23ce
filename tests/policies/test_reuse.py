"""The table of reuses: classes that share what they learn with their parents."""

import numpy as np
import pytest

from jaxkv.compiling import Bound, compiled
from jaxkv.policies import reuse


def make_table(*counts):
    """A table of classes: (code, parent, begin, uses, reuses at 0 ms, kind) each."""
    table = reuse.init()
    bound = Bound(table)
    for code, parent, begin, num_uses, num_reuses, *kind in counts:
        code = (code << reuse.HINT_BITS) + sum(kind)
        row = reuse.row_of(bound, code, parent, begin, reuse.NUM_ROWS)
        table.touches[row] += num_uses
        table.reuses[row, 0] += num_reuses
    reuse.fill_index(bound)
    return table


@compiled
def bin_of(age_ms):
    return reuse.bin_of(age_ms)


def values(table):
    return table.index[: table.num_rows, 0].tolist()


def test_a_class_without_uses_is_worth_what_its_parent_is():
    table = make_table((5, 0, -1, 0, 0), (6, 1, -1, 900, 800))
    row = reuse.row_of(Bound(table), 7, 1, -1, reuse.NUM_ROWS)
    root, above, used, new = values(table)
    assert (row, new) == (3, above)
    assert root < above < used


def test_few_uses_are_judged_by_the_parent_and_many_by_their_own():
    parent = (5, 0, -1, 0, 0)
    best = (8, 1, -1, 10_000, 9_000)
    few, many = (make_table(parent, best, (9, 1, -1, num, 0)) for num in (10, 100_000))
    assert np.array(values(many)[3:], np.int32).view(np.float32) < 0.01
    assert np.array(values(few)[3:], np.int32).view(np.float32) > 0.2


def test_a_final_class_counts_for_the_class_of_its_beginning_and_once_for_all():
    begin, final = (-5, 0, -1, 0, 0), (5, 0, 1, 900, 800)
    table = make_table(begin, final)
    root, at_begin, at_end = values(table)
    assert at_begin == at_end
    assert root == values(make_table((5, 0, -1, 900, 800)))[0]


def test_a_kind_that_is_right_in_one_class_counts_in_all_classes():
    kinds = (5, 1, -1, 900, 800, 1), (5, 1, -1, 900, 100, 2)
    others = (6, 4, -1, 0, 0, 1), (6, 4, -1, 0, 0, 2), (6, 4, -1, 0, 0, 3)
    table = make_table((5, 0, -1, 0, 0), *kinds, (6, 0, -1, 900, 400), *others)
    plain, used, unused, unknown = values(table)[4:]
    assert unused < plain < used
    assert unknown == plain


def test_without_room_a_class_counts_for_its_parent():
    table = reuse.init()
    bound = Bound(table)
    for code in range(1, reuse.NUM_ROWS):
        assert reuse.row_of(bound, code, 0, -1, reuse.NUM_ROWS) == code
    assert reuse.row_of(bound, reuse.NUM_ROWS, 7, -1, reuse.NUM_ROWS) == 7
    assert reuse.row_of(bound, 3, 0, -1, reuse.NUM_ROWS) == 3
    assert table.num_rows == reuse.NUM_ROWS


@pytest.mark.parametrize("seed", range(3))
def test_ages_are_in_half_octaves(seed):
    rng = np.random.default_rng(seed)
    edges = [0, *(part << octave + 9 for octave in range(14) for part in (2, 3))]
    for age in [
        *edges,
        *(edge - 1 for edge in edges[1:]),
        *rng.integers(1 << 32, size=50),
    ]:
        age_bin, fraction = bin_of(int(age))
        expected = min(sum(edge <= age for edge in edges) - 1, reuse.NUM_BINS - 1)
        assert age_bin == expected, age
        if age_bin < reuse.NUM_BINS - 1:
            width = edges[age_bin + 1] - edges[age_bin]
            assert fraction == int(256 * (age - edges[age_bin]) / width), age
