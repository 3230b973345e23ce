"""The optimum: no other choice of blocks to keep finds more, and no policy."""

import itertools
import random

import pytest

from jaxkv.policies import policy_names
from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import find_on_device
from jaxkv.tools.replay.run import OPTIMUM, sweep
from jaxkv.tools.replay.traces import make_trace


def best_of_all(requests, capacity, local, num_asked):
    """Try every choice of blocks to keep: the most found beyond the device.

    A request has all of its blocks, and asks for the first `num_asked`.
    """

    def best(held, at):
        if at == len(requests):
            return 0
        prompt = requests[at]
        rest = prompt[local[at] : num_asked[at]]
        num_hits = next((i for i, b in enumerate(rest) if b not in held), len(rest))
        offered = sorted(held | set(prompt))
        return num_hits + max(
            best(frozenset(kept), at + 1)
            for kept in itertools.combinations(offered, min(len(offered), capacity))
        )

    return best(frozenset(), 0)


def make_requests(rng):
    """Prefixes of a small tree, none longer than 3."""
    paths = [(0, 1, 2), (0, 1, 3), (0, 4, 5), (6, 7, 8), (6, 9, 10)]
    return [rng.choice(paths)[: rng.randint(1, 3)] for _ in range(6)]


def test_no_other_choice_of_blocks_finds_more():
    for capacity in (1, 2, 3, 4):
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


def test_a_request_larger_than_the_cache_is_found_as_far_as_it_fits():
    trace = make_trace("large", [[1, 2, 3], [1, 2, 3], [9], [1, 2, 3]])
    assert find_optimum(trace, 2).tolist() == [0, 2, 0, 2]


def test_declining_prompts_that_do_not_return_keeps_the_one_that_does():
    trace = make_trace("agent", [[1, 2], [3, 4], [1, 2], [5, 6], [1, 2]])
    assert find_optimum(trace, 2).tolist() == [0, 0, 2, 0, 2]


@pytest.mark.parametrize("seed", range(12))
def test_no_policy_finds_more_at_any_size(seed):
    rng = random.Random(seed)
    requests = []
    for _ in range(rng.randrange(3, 60)):
        path, number = [], 0
        for _ in range(rng.randint(1, 12)):
            number = 3 * number + rng.choice((1, 1, 1, 1, 2, 3))
            path.append(number)
        requests.append(path)
    times_ms = [10.0 * number for number in range(len(requests))]
    trace = make_trace("tree", renumbered(requests), times_ms)
    sizes = [1, 2, 5, rng.randint(3, 20), trace.num_unique_blocks]
    device_blocks = rng.choice((None, rng.randint(1, 10)))
    policies = [OPTIMUM, *policy_names()]
    results = sweep(trace, policies, sizes, device_blocks=device_blocks)
    best = {r.capacity_blocks: r.hit_tokens for r in results[: len(sizes)]}
    for result in results:
        assert result.hit_tokens <= best[result.capacity_blocks], result


def renumbered(requests):
    numbers = {}
    return [[numbers.setdefault(b, len(numbers)) for b in r] for r in requests]
