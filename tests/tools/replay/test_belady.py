"""The optimum: no other choice of victims finds more."""

import itertools
import random

from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.traces import make_trace


def best_of_all(requests, capacity, local, num_asked):
    """Try every choice of victims: the most that a cache finds beyond the device.

    A request holds all of its blocks, and asks for the first `num_asked`.
    """

    def best(held, at):
        if at == len(requests):
            return 0
        prompt = requests[at]
        rest = prompt[local[at] : num_asked[at]]
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
            outputs = [rng.randrange(len(request)) for request in requests]
            trace = make_trace("tree", requests, num_output_blocks=outputs)
            none = [0] * len(requests)
            best = best_of_all(requests, capacity, none, trace.num_asked)
            assert find_optimum(trace, capacity).sum() == best, requests
            # Behind a device, too.
            trace = make_trace("tree", requests)
            device = find_on_device(trace, rng.randint(4, 6))
            local = device.hits.tolist()
            best = best_of_all(requests, capacity, local, trace.num_asked)
            hits = find_optimum(trace, capacity, device=device)
            assert (hits - device.hits).sum() == best, requests


def test_a_request_larger_than_the_cache_is_held_until_the_next():
    trace = make_trace("large", [[1, 2, 3], [1, 2, 3], [9], [1, 2, 3]])
    assert find_optimum(trace, 2).tolist() == [0, 3, 0, 1]
