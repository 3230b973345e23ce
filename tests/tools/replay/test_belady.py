"""The optimum: no other choice of victims finds more."""

import itertools
import random

import pytest

from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.traces import make_trace


def best_of_all(requests, capacity, local):
    """Try every choice of victims: the most that a cache finds beyond the device."""

    def best(held, at):
        if at == len(requests):
            return 0
        prompt = requests[at]
        rest = prompt[local[at] :]
        num_hits = next((i for i, b in enumerate(rest) if b not in held), len(rest))
        evictable = sorted(held - set(prompt))
        num_kept = min(len(evictable), capacity - len(prompt))
        return num_hits + max(
            best(frozenset(prompt) | set(kept), at + 1)
            for kept in itertools.combinations(evictable, num_kept)
        )

    return best(frozenset(), 0)


def make_requests(rng):
    """Prefixes of a small tree, none longer than 3."""
    paths = [(0, 1, 2), (0, 1, 3), (0, 4, 5), (6, 7, 8), (6, 9, 10)]
    return [rng.choice(paths)[: rng.randint(1, 3)] for _ in range(7)]


def test_no_other_choice_of_victims_finds_more():
    for capacity in (3, 4, 5):
        rng = random.Random(capacity)
        for _ in range(25):
            requests = make_requests(rng)
            trace = make_trace("tree", requests)
            best = best_of_all(requests, capacity, [0] * len(requests))
            assert find_optimum(trace, capacity).sum() == best, requests
            # Behind a device, too.
            device = find_on_device(trace, rng.randint(4, 6))
            best = best_of_all(requests, capacity, device.hits.tolist())
            hits = find_optimum(trace, capacity, device=device)
            assert (hits - device.hits).sum() == best, requests


def test_a_request_larger_than_the_cache_is_held_until_the_next():
    trace = make_trace("large", [[1, 2, 3], [1, 2, 3], [9], [1, 2, 3]])
    assert find_optimum(trace, 2).tolist() == [0, 3, 0, 1]


def test_the_end_is_reported_and_capacity_0_is_refused():
    reports = []
    trace = make_trace("t", [[1], [1]])
    find_optimum(trace, 1, lambda done, total: reports.append((done, total)))
    assert reports[-1] == (2, 2)
    with pytest.raises(ValueError, match="capacity_blocks=0 must be at least 1"):
        find_optimum(trace, 0)
