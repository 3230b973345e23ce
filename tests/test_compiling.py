"""States that compiled functions write to."""

import numpy as np

from jaxkv.compiling import (
    Bound,
    CodeCache,
    compiled,
    copy_row,
    copy_to_numpy,
    empty,
    entry_point,
    filled,
    greater,
    lesser,
    parts,
    same_row,
)
from jaxkv.policies import lru


@compiled
def add_to_tail(state, number):
    state.order.tail[()] += number
    return state.order.places.shape[0]


def test_a_bound_state_is_changed_in_place():
    state = copy_to_numpy(lru.init(6, 4))
    assert add_to_tail(Bound(state), 3) == 6
    assert int(state.order.tail) == 3
    assert entry_point(add_to_tail, Bound(state), 1)(Bound(state), 2) == 6
    assert int(state.order.tail) == 5


def test_own_copies_all_arrays():
    state = copy_to_numpy(lru.init(6, 4))
    copy = copy_to_numpy(state)
    add_to_tail(Bound(copy), 1)
    assert int(state.order.tail) == 0
    assert isinstance(copy.order.tail, np.ndarray)


@compiled
def chosen(array, number):
    return lesser(array[0], number), greater(array[0], number)


def test_the_lesser_and_the_greater_are_those_of_python():
    for dtype in (np.int32, np.uint32, np.float64):
        for number in (2, 3, 4):
            assert chosen(np.full(1, 3, dtype), number) == (
                min(3, number),
                max(3, number),
            )


@compiled
def moved(rows):
    scratch = empty(3, np.int64)
    scratch[0] = filled(2, 7, np.int64)[1]
    copy_row(rows, 2, rows, 1)
    return same_row(rows, 1, rows, 2), same_row(rows, 0, rows, 2), scratch[0]


def test_rows_are_copied_and_compared_whole():
    for word in range(8):
        rows = np.zeros((3, 8), np.uint32)
        rows[1, word] = 1 << 31
        assert moved(rows) == (True, False, 7)
        assert (rows[2] == rows[1]).all()


def test_where_numba_is_another_than_is_known_it_compiles_by_itself(monkeypatch):
    def fail(*_):
        raise AttributeError("of another version")

    @compiled
    def part(number):
        return number + 1

    @compiled
    def entry(number):
        return part(number)

    monkeypatch.setattr(parts, "_parts_work", None)
    monkeypatch.setattr(CodeCache, "load_overload", lambda *_: None)
    monkeypatch.setattr(parts._PartLowering, "run_pass", fail)
    assert entry(1) == 2
    assert parts._parts_work is False
    assert part.signatures  # It has machine code of its own.
