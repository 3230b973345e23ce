"""A change of policy keeps every block, reference count and free id, and the order."""

import itertools
import random

import numpy as np
import pytest

from jaxkv.keys.packed import pack
from jaxkv.policies import get_policy_maker
from jaxkv.scheduling.auto import CANDIDATES
from jaxkv.tiers.change_over import _nearest
from jaxkv.tiers.executors import make_executor
from jaxkv.tiers.host import OffloadingManager
from tests.tiers.test_host_differential import Pair

NUM_BLOCKS = 24
KEYS = [random.Random(n).randbytes(32) for n in range(16)]
PAIRS = list(itertools.permutations(CANDIDATES, 2))


def test_every_block_stays_through_any_changes_by_either_executor():
    rng = random.Random(0)
    options = {"alternatives": CANDIDATES}
    pair = Pair("hazard", NUM_BLOCKS, (1, 6), rng, **options)
    learned = {
        name: make_executor(get_policy_maker(name)(NUM_BLOCKS, 4096))
        for name in CANDIDATES
    }
    for number, (_, policy) in enumerate(rng.sample(PAIRS * 4, 24)):
        for _ in range(30):
            pair.step()
            pair.compare_states()
        # As a shadow, which also knows keys that the host does not.
        _, words = pack(pair.some_keys() or KEYS[:1])
        for executor in learned.values():
            store = executor.prepare_store(words)
            executor.complete_step(store.block_ids, 0)
            executor.touch(words)
        before = [kept(manager) for manager in pair.managers]
        pair.both("change_policy", policy, learned[policy] if number % 3 else None)
        pair.compare_states()
        assert [kept(manager) for manager in pair.managers] == before
    assert pair.native.num_evicted > 40


def kept(manager):
    """Return what a change keeps, as the state and as the searches show it."""
    shown = manager.snapshot()
    keys = sorted(shown.block_ids)
    found = dict(zip(keys, manager.find_held(keys).tolist(), strict=True))
    assert found == shown.block_ids
    assert manager.num_held_blocks == len(keys)
    assert sorted([*found.values(), *shown.free_ids]) == list(range(NUM_BLOCKS))
    return shown.ref_cnt, found, shown.free_ids


def filled(policy):
    """A host whose blocks were stored, then some used again, in this order of use."""
    host = OffloadingManager(16, 6, policy, alternatives=CANDIDATES)
    mark = host.begin_request(KEYS[:6], 96, 0)
    host.publish(host.place(KEYS[:6]).block_ids, KEYS[:6])
    host.reorder(KEYS[:6])
    host.finish_request(KEYS[:6], mark, 0)
    for time_ms, key in ((60_000, KEYS[3]), (120_000, KEYS[1])):
        mark = host.begin_request([key], 16, time_ms)
        host.touch([key])
        host.finish_request([key], mark, time_ms)
    return host


def test_the_order_of_use_is_taken_over():
    expected = [KEYS[n] for n in (5, 4, 2, 0, 3, 1)]
    for before, after in PAIRS:
        host = filled(before)
        host.change_policy(after)
        evicted = [host.place([key]).evicted_keys[0] for key in KEYS[10:16]]
        assert evicted == expected, (before, after)


def test_a_block_in_flight_is_not_evicted_after_a_change_either():
    host = filled("hazard")
    host.prepare_load([KEYS[5], KEYS[4]])
    host.change_policy("lru")
    assert [*host.place([KEYS[10]]).evicted_keys] == [KEYS[2]]
    host.complete_load([KEYS[4]])
    assert [*host.place([KEYS[11]]).evicted_keys] == [KEYS[4]]


def test_what_its_shadow_has_learned_is_taken_over():
    host, shadow = filled("lru"), filled("slru")
    # Where both know a key, it is protected here as there; others go by their nearest.
    shadow.discard([KEYS[2]])
    shadow.touch([KEYS[5]])
    host.change_policy("slru", shadow.executor)
    assert host.snapshot().policy["protected"] == [KEYS[5], KEYS[3], KEYS[1]]
    host.change_policy("hazard", filled("hazard").executor)
    assert host.snapshot().policy["touches"] != (0,) * 240
    assert host.snapshot().policy["now_ms"] == 120_000


def test_the_nearest_key_stands_for_one_that_is_not_known():
    blocks = np.array([-1, 7, -1, -1, -1, -1, 4, -1], np.int32)
    assert _nearest(blocks).tolist() == [7, 7, 7, 7, 4, 4, 4, 4]
    assert _nearest(blocks[:1]) is None


def test_what_cannot_be_taken_over_is_refused():
    for options, match in (
        ({"cache_policy": "arc"}, "'arc'.* no other policy can take over"),
        ({"retention": True}, "or retention, keeps what no other policy"),
        ({"alternatives": ("arc",)}, r"alternatives=\('arc',\)"),
    ):
        with pytest.raises(ValueError, match=match):
            OffloadingManager(16, 6, **({"alternatives": CANDIDATES} | options))
    host = filled("lru")
    before = host.snapshot()
    with pytest.raises(ValueError, match="name='arc' must be one of the alternatives"):
        host.change_policy("arc")
    assert host.snapshot() == before
