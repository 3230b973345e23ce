"""Several engines in a replay, and the store that they share."""

import itertools

import numpy as np
import pytest

from jaxkv.scheduling.boundary import TierBelow
from jaxkv.tiers.index import BlockIndex
from jaxkv.tools.replay.admission import Admission, find_admitted
from jaxkv.tools.replay.device import find_on_device, fit_device
from jaxkv.tools.replay.fleet import ROUTES, Fleet, find_conversations
from jaxkv.tools.replay.run import OPTIMUM, replay
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import make_trace
from tests.tools.replay.test_device import SIZE, Engine, make_mixed_trace


@pytest.fixture(scope="module")
def trace():
    """Conversations, with an empty request among them."""
    made = make_synthetic_trace(300, seed=5, turn_blocks=3, max_open=30)
    requests = [part.tolist() for part in np.split(made.ids, made.offsets[1:-1])]
    requests[150:151] = [[]]
    return make_trace("synthetic", requests, made.time_ms, made.input_tokens, 512)


class PlainLRU:
    """An LRU over a list, the next to leave first."""

    def __init__(self, capacity):
        self.capacity, self.held = capacity, []

    def count(self, keys):
        return next((i for i, b in enumerate(keys) if b not in self.held), len(keys))

    def touch(self, keys):
        for block in reversed(keys):
            if block in self.held:
                self.held.remove(block)
                self.held.append(block)

    def place(self, keys, spared):
        new = [block for block in keys if block not in self.held]
        idle = [block for block in self.held if block not in {*keys, *spared}]
        evicted = idle[: max(len(self.held) + len(new) - self.capacity, 0)]
        self.held = [block for block in self.held if block not in evicted] + new
        return new


def serve_plainly(trace, capacity, fleet):
    """Serve a trace by LRU hosts over an LRU store: hits and engine of each request."""
    hosts = [PlainLRU(capacity) for _ in range(fleet.num_engines)]
    store, counts = PlainLRU(fleet.storage_blocks), [0] * fleet.num_engines
    conversations, hits, engines = find_conversations(trace).tolist(), [], []
    for number, request in enumerate(np.split(trace.ids, trace.offsets[1:-1])):
        keys = request.tolist()[:capacity]
        number = {
            "round-robin": number % len(hosts),
            "sticky": conversations[number] % len(hosts),
            "prefix": min(
                range(len(hosts)), key=lambda e: (-hosts[e].count(keys), counts[e])
            ),
        }[fleet.route]
        host = hosts[number]
        counts[number] += 1
        engines.append(number)
        either = {*host.held, *store.held}
        prefix = keys[: next((i for i, b in enumerate(keys) if b not in either), None)]
        lacking = [block for block in prefix if block not in host.held]
        host.place(lacking[:capacity], spared=prefix)
        store.touch(keys)
        hits.append(host.count(keys))
        host.touch(keys)
        stored = host.place(keys, spared=keys)
        host.touch(keys)
        if fleet.storage_blocks:
            store.place(stored, spared=())
    return hits, engines


@pytest.mark.parametrize("route", ROUTES)
def test_a_fleet_finds_what_plain_lists_do(route, trace):
    for storage_blocks, capacity in itertools.product((0, 90, 300), (20, 60)):
        fleet = Fleet(4, route, storage_blocks)
        result = replay("lru", trace, capacity, fleet=fleet)
        hits, engines = serve_plainly(trace, capacity, fleet)
        assert result.hits_by_request.tolist() == hits, fleet
        assert result.engines.tolist() == engines, fleet
        assert 0 < sum(hits) < trace.num_block_refs
        assert len(set(engines)) > 1


@pytest.mark.parametrize(("policy", "seed"), [("lru", 1), ("hazard", 2)])
def test_a_fleet_finds_what_real_schedulers_over_one_store_do(policy, seed):
    trace, fleet = make_mixed_trace(seed), Fleet(3, "sticky", 230)
    store = BlockIndex(SIZE, fleet.storage_blocks, medium="STORAGE")
    tiers_below = [TierBelow(store, "through", 1000)]
    engines = [
        Engine(trace, policy, 128, 64, tiers_below=tiers_below) for _ in range(3)
    ]
    device = fit_device(trace, 64)
    result = replay(policy, trace, 128, device=device, fleet=fleet)
    served = [engines[e].serve(i) for i, e in enumerate(result.engines.tolist())]
    hits = np.array(served)
    assert result.device.hits.tolist() == hits[:, 0].tolist()
    assert result.hits_by_request.tolist() == hits.sum(axis=1).tolist()
    assert store.num_evicted > 0
    for engine in engines:
        counts = engine.scheduler.below[0].counts
        assert not counts.dropped_slow
    fetched = sum(e.scheduler.below[0].counts.loaded for e in engines)
    assert result.fetches_by_request.sum() == fetched > 0


def test_each_engine_has_a_device_and_an_admission_of_its_own(trace):
    requests = [part.tolist() for part in np.split(trace.ids, trace.offsets[1:-1])]
    twice = make_trace("twice", [keys for keys in requests for _ in range(2)])
    fleet, gates = Fleet(2), find_admitted(twice, Admission(store_threshold=2))
    options = {"device": fit_device(twice, 20), "admitted": gates, "fleet": fleet}
    halves = replay("lru", twice, 40, **options)
    alone = make_trace("once", requests)
    gate = find_admitted(alone, Admission(store_threshold=2))
    options = {"device": find_on_device(alone, 20), "admitted": gate}
    once = replay("lru", alone, 40, **options)
    for half in (halves.hits_by_request[::2], halves.hits_by_request[1::2]):
        assert (half == once.hits_by_request).all()
    assert (halves.device.hits[::2] == once.device.hits).all()


def test_the_engine_with_the_longest_prefix_serves_on_device_or_host():
    requests = [[1, 2], [3], [1, 2, 4], [5], [3, 6], [1]]
    few = make_trace("few", requests)
    device = fit_device(few, 6)
    # One engine finds what it finds without a route.
    alone = replay("lru", few, 8, device=device)
    for route in ROUTES:
        single = replay("lru", few, 8, device=device, fleet=Fleet(1, route))
        assert (single.hits_by_request == alone.hits_by_request).all()
    routed = replay("lru", few, 8, device=device, fleet=Fleet(3, "prefix"))
    assert routed.engines.tolist() == [0, 1, 0, 2, 1, 0]


def test_a_policy_that_does_not_fit_the_fleet_is_refused(trace):
    with pytest.raises(ValueError, match="one engine without a store"):
        replay(OPTIMUM, trace, 5, fleet=Fleet(2))
