"""`replay` against a plain loop over the twin of the manager, and published figures."""

import dataclasses
import threading

import numpy as np
import pytest

from jaxkv.policies import make_lru
from jaxkv.tools.replay.run import OPTIMUM, replay, sweep
from jaxkv.tools.replay.synthetic import make_synthetic_trace
from jaxkv.tools.replay.traces import keys_of, make_trace, read_trace
from tests.reference.arc import ReferenceARC
from tests.reference.hazard import ReferenceHazard
from tests.reference.offloading_manager import ReferenceLRU, ReferenceManager

TWINS = {
    "lru": ReferenceLRU,
    "arc": ReferenceARC,
    "hazard": ReferenceHazard,
}


def replay_twin(twin, trace, capacity):
    """Replay with Python's dicts: each request's hits, stores and refusal."""
    cache = ReferenceManager(capacity, twin)
    num_hits, num_stores, refused = [], [], []
    for number, request in enumerate(np.split(trace.ids, trace.offsets[1:-1])):
        # As the keys of a replay are made; the policy `hazard` looks at their bits.
        keys = [words.tobytes() for words in keys_of(request[:capacity])]
        fields = int(trace.time_ms[number]), list(range(len(keys)))
        if twin is ReferenceHazard:
            mark = cache.begin_request(keys, int(trace.input_tokens[number]), *fields)
        num_hits.append(cache.lookup(keys))
        cache.touch(keys)
        stored = cache.prepare_store(keys)
        refused.append(stored is None)
        num_stores.append(0 if stored is None else len(stored.keys))
        if stored is not None:
            cache.touch(keys)
            cache.complete_store(keys)
        if twin is ReferenceHazard:
            cache.finish_request(keys, mark, fields[0], None, None, fields[1])
    return num_hits, num_stores, refused


@pytest.fixture(scope="module")
def trace():
    """Conversations, with an empty request and a repeated one among them."""
    made = make_synthetic_trace(400, seed=3, turn_blocks=3, max_open=30)
    requests = [part.tolist() for part in np.split(made.ids, made.offsets[1:-1])]
    requests[200:202] = [[], [5, 6, 5, 99_999, 6, 99_999]]
    return make_trace("synthetic", requests, made.time_ms, made.input_tokens, 512)


def test_every_request_agrees_with_the_twin(trace):
    # Some requests are larger than the cache.
    assert max(trace.num_blocks) > 60
    for policy, twin in TWINS.items():
        expected, stored, refused = replay_twin(twin, trace, 60)
        result = replay(policy, trace, 60)
        assert not any(refused)
        assert result.hits_by_request.tolist() == expected, policy
        assert not result.hits_by_request.flags.writeable
        assert result.stores_by_request.tolist() == stored, policy
        assert result.num_refused == sum(refused), policy
        assert result.num_block_refs == trace.num_block_refs
        assert result.block_hit_ratio == sum(expected) / trace.num_block_refs
        tokens = np.minimum(np.array(expected) * 512, trace.input_tokens)
        assert result.hit_tokens == tokens.sum()
        assert result.token_hit_ratio == tokens.sum() / trace.input_tokens.sum()


def test_a_policy_without_native_functions_gives_the_same_result():
    def make_pure(capacity_blocks, max_batch):
        return make_lru(capacity_blocks, max_batch)._replace(native=None)

    trace = make_synthetic_trace(60, seed=3, turn_blocks=3)
    assert replay(make_lru, trace, 40) == replay("lru", trace, 40)
    pure = replay(make_pure, trace, 40)
    assert pure == dataclasses.replace(replay("lru", trace, 40), policy="pure")
    assert pure.num_hit_blocks > 0


def test_a_sweep_is_every_policy_at_every_capacity(trace):
    reports, threads = {}, set()

    def on_progress(label, done, total):
        reports.setdefault(label, []).append((done, total))
        threads.add(threading.get_ident())

    results = sweep(trace, ["lru", OPTIMUM], [60, 200], on_progress)
    assert [(result.policy, result.capacity_blocks) for result in results] == [
        *(("lru", 60), ("lru", 200), (OPTIMUM, 60), (OPTIMUM, 200))
    ]
    assert results[0] == replay("lru", trace, 60)  # except the times
    for lru, optimum in zip(results[:2], results[2:], strict=True):
        assert lru.num_hit_blocks < optimum.num_hit_blocks
    # One label, whose share of all runs never falls.
    (reported,) = reports.values()
    assert list(reports) == ["replaying, 4 runs"]
    assert reported == sorted(reported)
    assert (reported[0], reported[-1]) == ((0, 1600), (1600, 1600))


def test_invalid_arguments_are_refused_before_anything_runs(trace):
    def never(*report):
        raise AssertionError(report)

    with pytest.raises(ValueError, match=r"'lur'.*did you mean lru"):
        sweep(trace, [OPTIMUM, "lur"], [10], never)
    with pytest.raises(ValueError, match=r"capacities=\[10, 0\] must be at least 1"):
        sweep(trace, [OPTIMUM], [10, 0], never)
    with pytest.raises(ValueError, match="capacity_blocks=0 must be at least 1"):
        replay("lru", trace, 0)

    def fail(label, done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        sweep(trace, [OPTIMUM], [10, 20, 30], fail)


LARGE = "mooncake_conversation"


PUBLISHED = (
    ("cc_agentic_a", "lru", {394: 8.7, 3947: 92.9}),
    ("cc_agentic_a", "arc", {394: 8.8, 3947: 92.3}),
    ("cc_agentic_a", OPTIMUM, {394: 37.9, 1184: 73.8}),
)
MORE_PUBLISHED = (
    ("cc_agentic_a", "lru", {1184: 47.5, 1973: 75.8}),
    ("cc_agentic_a", "arc", {1184: 43.5, 1973: 73.9}),
    ("cc_agentic_a", OPTIMUM, {1973: 87.3, 3947: 95.2}),
    (LARGE, "lru", {1708: 5.4, 5126: 12.7, 8544: 20.2, 17089: 28.8, 51269: 37.3}),
    (LARGE, "arc", {1708: 5.9, 5126: 12.3, 8544: 18.7, 17089: 28.6, 51269: 36.2}),
    (LARGE, OPTIMUM, {1708: 25.0, 5126: 35.8, 8544: 38.2, 17089: 38.2, 51269: 38.2}),
)


@pytest.mark.parametrize(
    "figures", [PUBLISHED, pytest.param(MORE_PUBLISHED, marks=pytest.mark.long)]
)
def test_published_figures_are_reproduced(shared_traces, figures):
    for name, policy, percents in figures:
        trace = read_trace(shared_traces / f"{name}.jsonl.gz")
        results = sweep(trace, [policy], list(percents))
        ratios = {r.capacity_blocks: round(100 * r.block_hit_ratio, 1) for r in results}
        assert ratios == percents, (name, policy)


HAZARD = [
    # In percent; without output and stop, more than LRU finds.
    ("cc_agentic_a", {1184: 60.5, 3947: 92.5}, {1184: 47.4, 3947: 92.1}),
    pytest.param(
        *(LARGE, {5126: 17.3, 17089: 29.3}, {5126: 12.5, 17089: 28.2}),
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("name", "min_percents", "min_untold"), HAZARD)
def test_hazard_finds_what_it_is_for(shared_traces, name, min_percents, min_untold):
    trace = read_trace(shared_traces / f"{name}.jsonl.gz")
    unknown = np.full_like(trace.output_tokens, -1), np.zeros_like(trace.stops)
    untold = dataclasses.replace(trace, output_tokens=unknown[0], stops=unknown[1])
    for requests, percents in ((trace, min_percents), (untold, min_untold)):
        for result in sweep(requests, ["hazard"], list(percents)):
            assert 100 * result.token_hit_ratio >= percents[result.capacity_blocks]
