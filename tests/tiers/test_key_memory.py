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
    for max_unseen, prompts, keys, expected in (
        (2, ("abcd",), "abcd", "1100"),
        (2, ("abcd", "abc"), "abcd", "1110"),
        # Known blocks do not count as unseen, and a repeated key counts once.
        (1, ("s", "sab"), "sab", "110"),
        (1, ("abbc",), "abc", "100"),
        # What was generated was in no prompt.
        (0, ("a",), "ag", "01"),
    ):
        scans = ReuseFilter(threshold=0, max_size=100, max_unseen=max_unseen)
        for prompt in prompts:
            scans.count([key.encode() for key in prompt])
        passes = scans.passes([key.encode() for key in keys])
        assert passes == [flag == "1" for flag in expected], (prompts, keys)


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
