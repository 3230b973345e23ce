"""The engine of examples/integrate_scheduler.py, over groups of each kind."""

import dataclasses
import random

import pytest

from jaxkv import FullAttention, SlidingWindow
from tests.rigs.wrong_engines import BLOCK, Right, answer, example, toy_model

GROUPS = {
    "full": (FullAttention(BLOCK),),
    "window": (SlidingWindow(BLOCK, 10),),
    "full and window": (FullAttention(BLOCK), SlidingWindow(BLOCK, 10)),
    "two windows": (SlidingWindow(BLOCK, 13), SlidingWindow(BLOCK, 1)),
}
of_each_kind = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
of_some = pytest.mark.parametrize("groups", [GROUPS["full"], GROUPS["full and window"]])


def serve_turns(engine, num_turns):
    """Serve requests with common prefixes, check their tokens, return their hits."""
    rng = random.Random(7)
    prompts = [rng.choices(range(97), k=41) for _ in range(3)]
    hits = []
    for turn in range(num_turns):
        prompt = rng.choice(prompts)[: rng.randint(9, 41)]
        engine.let_stores_arrive()
        tokens, hit = engine.serve(f"turn {turn}", prompt, 5)
        alone = answer(prompt, 5, engine.windows)
        assert tokens == alone, f"turn {turn}, of which {hit} tokens were found"
        hits.append(hit)
    engine.let_stores_arrive()
    assert engine.blocks.num_free == engine.blocks.num_blocks - 1
    engine.blocks.check()
    return hits


def skipped_blocks(make, groups):
    """Serve 40 turns, check their hits, and return the blocks that were not cached."""
    engine = make(12 * len(groups) + 4, 100, groups)
    cache, skipped = engine.blocks.cache, []
    engine.blocks.cache = lambda *pairs: skipped.extend(cache(*pairs))
    hits = serve_turns(engine, num_turns=40)
    assert sum(hits) > 40 * 10
    assert engine.worker.bytes_stored > 0
    assert engine.worker.bytes_loaded > 0
    return skipped


@of_each_kind
def test_blocks_outside_a_window_that_nobody_wrote_are_not_cached(groups):
    """The engine had cached them: later requests had other tokens."""
    assert skipped_blocks(Right, groups) == []


@of_some
def test_an_engine_that_ignores_the_returned_tables_is_right_too(groups):
    """`DeviceBlockPool.cache` skips what was not written, and says so."""

    class CarelessEngine(Right):
        def take_offer(self, request_id):
            request, num_tokens, _ = self.loading.pop(request_id)
            request.num_computed_tokens += num_tokens

    has_window = any(isinstance(group, SlidingWindow) for group in groups)
    assert bool(skipped_blocks(CarelessEngine, groups)) == has_window


@of_some
def test_what_could_not_be_loaded_is_computed(groups, monkeypatch):
    """And cached: the blocks outside the window, too, are written then."""
    engine = Right(12 * len(groups) + 4, 100, groups)
    prompt = list(range(41))
    alone = answer(prompt, 5, engine.windows)
    assert engine.serve("first", prompt, 5) == (alone, 0)
    engine.let_stores_arrive()
    assert engine.blocks.reset()
    poll = engine.worker.poll

    def poll_failing():
        output = poll()
        if output.finished_recving:
            engine.pool = toy_model.new_pool(engine.blocks.num_blocks)
        return dataclasses.replace(
            output, finished_recving=(), failed_recving=output.finished_recving
        )

    monkeypatch.setattr(engine.worker, "poll", poll_failing)
    assert engine.serve("again", prompt, 5) == (alone, 40)
    assert engine.scheduler.stats.num_loads_failed == 1
    for keys in example.Request("?", prompt, len(groups)).block_keys_by_group:
        assert len(engine.blocks.find_prefix(keys)) == 10


def test_blocks_allocated_in_the_middle_of_a_request_are_stored():
    """The scheduler knows of the prompt's blocks only, until `request_finished`."""
    engine = Right(16, 100)
    prompt = list(range(9))
    tokens, _ = engine.serve("first", prompt, 30)
    engine.let_stores_arrive()
    assert engine.blocks.reset()
    # The last token of the answer was not computed.
    assert engine.serve("next turn", prompt + tokens, 1)[1] == 36
