"""Retention by priority, around LRU and around vLLM's ARC, which may refuse to evict.

`tests/tiers/test_host_differential.py` compares each retained policy with a twin.
"""

import numpy as np
import pytest

from jaxkv.policies import get_policy_maker, make_retained
from jaxkv.policies.facts import BEGIN, RETAIN, begun, retained
from jaxkv.policies.retained import MAX_HALVINGS, MAX_PRIORITY, RELEASE
from jaxkv.tiers.executors import make_executor

NUM_BLOCKS = 6
MINUTE_MS = 60_000
NONE = 0


def keys_of(numbers):
    keys = np.array(list(numbers), np.uint32)[:, None] + np.ones(8, np.uint32)
    keys.flags.writeable = False
    return keys


class Cache:
    """Blocks with the keys 0, 1 and so on, in this order of use."""

    def __init__(self, policy):
        self.policy = policy
        self.executor = make_executor(policy)
        for number in range(policy.num_blocks):
            self.executor.prepare_store(keys_of([number]), True)
            self.executor.complete_store(keys_of([number]), True)

    @property
    def state(self):
        return self.executor.state.policy

    def retain(self, numbers, priority, half_life_ms=NONE, ttl_ms=NONE, at_ms=0):
        note = retained(at_ms, priority, half_life_ms, ttl_ms)
        self.executor.note(keys_of(numbers), RETAIN, np.empty(0, np.int32), note)

    def victims(self, num, at_ms=0):
        """Return the blocks evicted at a time; None if refused."""
        copy = make_executor(self.policy, state=self.executor.state)
        copy.note(keys_of([999]), BEGIN, np.zeros(1, np.int32), begun(at_ms, 1))
        stored = copy.prepare_store(keys_of(range(100, 100 + num)), True)
        return stored and {int(key[0]) - 1 for key in stored.evicted_keys}


def test_a_priority_halves_with_every_half_life_and_ends_with_the_time_to_live():
    lru = Cache(make_retained(get_policy_maker("lru")(NUM_BLOCKS, 64)))
    lru.retain([0], 80, half_life_ms=MINUTE_MS)
    lru.retain([1, 2, 3, 4, 5], 30, ttl_ms=100 * MINUTE_MS)
    assert lru.victims(1, at_ms=2 * MINUTE_MS - 1) == {1}  # 40 against 30
    assert lru.victims(1, at_ms=2 * MINUTE_MS) == {0}  # 20
    assert MAX_PRIORITY >> MAX_HALVINGS == 0
    lru.retain([0], RELEASE)
    lru.retain([0, 1], 99, ttl_ms=MINUTE_MS)
    assert not lru.victims(4, at_ms=MINUTE_MS - 1) & {0, 1}
    assert lru.victims(1, at_ms=MINUTE_MS) == {0}


def test_blocks_of_a_lower_priority_are_evicted_before_older_ones():
    lru = Cache(make_retained(get_policy_maker("lru")(NUM_BLOCKS, 64)))
    lru.retain([0, 1, 2], 20, ttl_ms=MINUTE_MS)
    lru.retain([3], 10, ttl_ms=MINUTE_MS)
    lru.retain([4, 5], 30, ttl_ms=MINUTE_MS)
    assert lru.victims(2) == {3, 0}


def test_a_policy_without_native_functions_and_a_second_wrapping_are_refused():
    lru = get_policy_maker("lru")(4, 64)
    with pytest.raises(ValueError, match="has no native functions"):
        make_retained(lru._replace(native=None))
    with pytest.raises(ValueError, match="retains blocks already"):
        make_retained(make_retained(lru))
