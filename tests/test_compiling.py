"""States that compiled functions write to."""

import numpy as np

from jaxkv.compiling import Bound, compiled, entry_point, own, state_of
from jaxkv.policies import lru


@compiled
def add_to_tail(bound, number):
    state = state_of(bound)
    state.order.tail[()] += number
    return state.order.places.shape[0]


def test_a_bound_state_is_changed_in_place():
    state = own(lru.init(6, 4))
    assert add_to_tail(Bound(state), 3) == 6
    assert int(state.order.tail) == 3
    assert entry_point(add_to_tail, Bound(state), 1)(Bound(state), 2) == 6
    assert int(state.order.tail) == 5


def test_own_copies_all_arrays():
    state = own(lru.init(6, 4))
    copy = own(state)
    add_to_tail(Bound(copy), 1)
    assert int(state.order.tail) == 0
    assert isinstance(copy.order.tail, np.ndarray)
