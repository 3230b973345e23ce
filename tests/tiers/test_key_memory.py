"""Blocks that are offered to the host tier only after a second request for them."""

import random
from collections import Counter

from jaxkv.tiers.key_memory import ReuseFilter


def test_asking_whether_keys_pass_is_no_lookup():
    reuse = ReuseFilter(threshold=2, max_size=2)
    reuse.count([b"a", b"b"])
    for _ in range(3):
        assert reuse.passes([b"a"]) == [False]
    reuse.count([b"c"])  # a was still the one looked up longest ago
    reuse.count([b"a", b"c"])
    assert reuse.passes([b"a", b"b", b"c"]) == [False, False, True]


def test_equals_a_count_over_the_latest_keys():
    rng = random.Random(5)
    reuse, history, max_size = ReuseFilter(threshold=2, max_size=6), [], 6
    universe = [bytes([i]) for i in range(12)]
    counts = Counter()
    for _ in range(500):
        key = rng.choice(universe)
        reuse.count([key])
        history.append(key)
        counts[key] += 1
        latest = list(dict.fromkeys(reversed(history)))[:max_size]
        counts = Counter({key: counts[key] for key in latest})
        assert reuse.passes(universe) == [counts[key] >= 2 for key in universe]


def test_the_head_of_an_unknown_prompt_passes_and_the_rest_next_time():
    scans = ReuseFilter(threshold=0, max_size=100, max_unseen=2)
    prompt = [b"a", b"b", b"c", b"d"]
    scans.count(prompt)
    assert scans.passes(prompt) == [True, True, False, False]
    scans.count(prompt[:3])
    assert scans.passes(prompt) == [True, True, True, False]


def test_known_blocks_of_a_prompt_do_not_count_as_unseen():
    scans = ReuseFilter(threshold=0, max_size=100, max_unseen=1)
    scans.count([b"system"])
    scans.count([b"system", b"a", b"b"])
    assert scans.passes([b"system", b"a", b"b"]) == [True, True, False]


def test_a_key_twice_in_one_prompt_is_not_asked_for_again():
    scans = ReuseFilter(threshold=0, max_size=100, max_unseen=1)
    scans.count([b"a", b"b", b"b", b"c"])
    assert scans.passes([b"a", b"b", b"c"]) == [True, False, False]


def test_none_may_pass_at_first_sight():
    once = ReuseFilter(threshold=0, max_size=100, max_unseen=0)
    once.count([b"a"])
    assert once.passes([b"a", b"generated"]) == [False, True]


def test_forgotten_keys_are_not_held_back_indefinitely():
    scans = ReuseFilter(threshold=0, max_size=2, max_unseen=1)
    for first in range(0, 30, 3):
        scans.count([b"%d" % number for number in range(first, first + 3)])
        assert len(scans._held_back) <= 2


def test_a_tail_is_held_back_as_long_as_its_request_runs():
    """It passed at the request's end if others had asked for much meanwhile."""
    scans = ReuseFilter(threshold=0, max_size=10, max_unseen=1)
    tail = [b"b", b"c", b"d"]
    scans.count([b"a", *tail])
    for number in range(30):
        scans.count([b"other %d" % number])
    assert scans.passes(tail) == [False] * 3
    scans.count([b"a", *tail])  # Forgotten meanwhile: unseen again.
    assert scans.passes([b"a", *tail]) == [True, False, False, False]
    scans.count([b"a", *tail])
    assert all(scans.passes(tail))


def test_the_rules_of_admission_go_together():
    both = ReuseFilter(threshold=2, max_size=100, max_unseen=1)
    both.count([b"a", b"b"])
    assert both.passes([b"a", b"b"]) == [False, False]
    both.count([b"a", b"b"])
    assert both.passes([b"a", b"b"]) == [True, True]
