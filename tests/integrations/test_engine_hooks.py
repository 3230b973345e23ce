"""`EngineHooks` under the engine of examples/toy_engine.py, and what it refuses."""

import collections
import dataclasses
import functools
import random
import re
import sys
import types
from pathlib import Path

import pytest

from jaxkv import (
    BorrowedPool,
    ConnectorOutput,
    FullAttention,
    KeyChain,
    Namespace,
    OffloadRules,
    OffloadScheduler,
    SlidingWindow,
)
from jaxkv.integrations.engine_hooks import EngineHooks, ParkedFrees
from jaxkv.scheduling.protocol import NO_EVENT

# The examples are files to be run, not a package.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import integrate_own_pool as example
import toy_model

BLOCK = toy_model.BLOCK
NAMESPACE = Namespace("m", "1", "int8", "flat", BLOCK)
EVENTS = "pause", "abort", "reset", "reset both tiers"


@functools.cache
def answer(prompt, num_new):
    return toy_model.answer(list(prompt), num_new)


class Traffic:
    """Requests with common prefixes, and random events between their steps."""

    def __init__(self, seed, num_requests=40):
        self.rng = random.Random(seed)
        self.engine = engine = example.OffloadingEngine(24, 40)
        self.counts, self.requests = collections.Counter(), []
        self.must_reset = False
        documents = [self.rng.choices(range(97), k=41) for _ in range(3)]
        for number in range(num_requests):
            prompt = self.rng.choice(documents)[: self.rng.randint(9, 41)]
            request = engine.submit(f"r{number}", prompt, self.rng.randint(1, 12))
            request.future.add_done_callback(self.record_end)
            self.requests.append(request)
        self.schedule, engine.schedule = engine.schedule, self.act_and_schedule
        self.preempt, engine.preempt = engine.preempt, self.count_and_preempt

    def is_done(self):
        return all(request.future.done() for request in self.requests)

    def record_end(self, _):
        if self.is_done():
            self.engine.calls.put(None)

    def act_and_schedule(self):
        engine = self.engine
        if self.rng.random() < 0.25:
            event = self.rng.choice(EVENTS)
            self.counts[event] += 1
            if event == "pause":
                engine.calls.put(None)  # As `Engine.pause`, which waits for the loop.
            elif event == "abort" and engine.requests:
                engine.abort(self.rng.choice([*engine.requests.values()]))
            elif event == "reset":
                engine.pool.reset()
            self.must_reset |= event == "reset both tiers"
        if self.must_reset and engine.hooks.scheduler.reset():
            engine.pool.reset()
            self.must_reset = False
        return self.schedule()

    def count_and_preempt(self, request):
        self.counts["preempt"] += 1
        self.preempt(request)

    def serve(self):
        """Serve all requests, with a new thread after each pause."""
        engine = self.engine
        while not self.is_done():
            engine.resume()
            engine.thread.join()
        engine.worker.adopt()
        while engine.hooks.has_pending_transfers:
            engine.execute(self.schedule())

    def check(self):
        """Check the tokens of each request, also of an aborted one."""
        for request in self.requests:
            prompt = tuple(request.tokens[: request.num_prompt_tokens])
            tokens = request.future.result(0)
            right = answer(prompt, request.max_tokens - len(prompt))
            assert tokens == right[: len(tokens)], request.request_id
        pool = self.engine.pool
        assert not any(pool.counts)
        assert len(pool.free_blocks) == len(pool.counts) - 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["plain", "strict", "failing loads"])
def test_tokens_are_those_of_the_model_alone_whatever_happens(mode, seed, monkeypatch):
    if mode != "plain":
        monkeypatch.setenv("JAXKV_STRICT", "1")
        monkeypatch.setenv("JAXKV_STRICT_SEED", str(seed))
    if mode == "failing loads":
        monkeypatch.setenv("JAXKV_STRICT_FAIL_LOADS", "3")
    traffic = Traffic(seed)
    traffic.serve()
    traffic.check()
    assert {*EVENTS, "preempt"} == set(traffic.counts)
    assert not traffic.must_reset
    stats = traffic.engine.hooks.scheduler.stats
    assert stats.num_loaded > 0
    assert bool(stats.num_loads_failed) == (mode == "failing loads")


def make_hooks(groups=BLOCK, content_of=None, **rules):
    scheduler = OffloadScheduler(groups, 8, rules=OffloadRules(**rules))
    calls = {"num_free": lambda: 7, "hold": id, "release": id}
    pool = BorrowedPool(8, **calls, content_of=content_of)
    get = {"tokens_of": lambda r: r.tokens, "table_of": lambda r: r.table}
    return EngineHooks(scheduler, pool, NAMESPACE, **get)


def make_request(name="r", num_tokens=9, table=(1, 2, 3)):
    return types.SimpleNamespace(
        request_id=name,
        num_tokens=num_tokens,
        num_computed_tokens=0,
        table=table,
        tokens=[*range(num_tokens)],
    )


def admit(hooks, name="r", num_tokens=9, table=(1, 2, 3)):
    """Query and allocate a request; return it with the calls of `allocate_slots`."""
    request = make_request(name, num_tokens, table)
    return request, admit_again(hooks, request)


def admit_again(hooks, request):
    calls = []

    def allocate_slots(num, *, delay_cache_blocks):
        calls.append((num, delay_cache_blocks))
        return "slots"

    hooks.query(request, 0)
    slots = hooks.allocate(request, BLOCK, allocate_slots)
    assert (slots is None) == hooks.is_loading(request)
    return calls


def end_stores(hooks, plan):
    ended = ConnectorOutput(completed_store_events=(plan.store_event,))
    assert hooks.collect(ended) == []


def hooks_with_blocks(**rules):
    """Make hooks whose host has the first two blocks of every request."""
    hooks = make_hooks(**rules)
    first, _ = admit(hooks, "first")
    first.num_computed_tokens = 8
    hooks.free(first, has_ended=True)
    end_stores(hooks, hooks.plan({}))
    return hooks


def test_a_request_that_loads_gets_all_its_blocks_at_once():
    hooks = hooks_with_blocks()
    request, calls = admit(hooks, num_tokens=11)
    assert hooks.is_loading(request)
    assert calls == [(11, True)]


def test_the_request_that_loaded_first_is_returned_last_until_it_is_planned():
    hooks = hooks_with_blocks()
    first, _ = admit(hooks, "one")
    second, _ = admit(hooks, "two", table=(4, 5, 6))
    hooks.plan({})
    ended = ConnectorOutput(finished_recving=("one", "two"))
    assert hooks.collect(ended) == [(second, 8), (first, 8)]
    first.num_computed_tokens = second.num_computed_tokens = 8
    hooks.plan({"one": 1})
    assert hooks.collect(ConnectorOutput()) == [(second, 8)]


def test_an_aborted_load_is_forgotten():
    hooks = hooks_with_blocks()
    request, _ = admit(hooks)
    hooks.free(request, has_ended=True)
    assert not hooks.is_loading(request)
    assert not hooks.collect(ConnectorOutput())


def test_blocks_that_a_running_request_gets_are_stored_once_full():
    hooks = make_hooks()
    request, calls = admit(hooks)
    assert calls == [(BLOCK, False)]
    request.num_computed_tokens = 8
    first = hooks.plan({"r": 4})
    assert first.store_device_blocks == (1, 2)
    end_stores(hooks, first)
    request.num_computed_tokens, request.num_tokens = 12, 17
    request.tokens = [*range(17)]
    request.table = 1, 2, 3, 7, 6
    second = hooks.plan({"r": 4})
    assert second.store_device_blocks == (3,)
    end_stores(hooks, second)
    request.num_computed_tokens = 16
    assert hooks.plan({"r": 1}).store_device_blocks == (7,)


def test_tokens_that_running_steps_will_sample_fill_no_block():
    hooks = make_hooks()
    request, _ = admit(hooks)
    request.num_computed_tokens, request.num_output_placeholders = 8, 1
    assert hooks.plan({"r": 1}).store_device_blocks == (1,)
    keys = KeyChain(NAMESPACE).extend(range(8))
    assert hooks._pool.holds([1, 2], keys).tolist() == [True, False]


def test_a_preempted_request_caches_its_new_blocks_and_the_step_knows():
    hooks = make_hooks(flush_on_preemption=True, max_blocks_in_flight=2)
    request, _ = admit(hooks)
    request.num_computed_tokens = 8
    stored = hooks.plan({"r": 1})
    hooks.free(request, has_ended=False)
    request.num_computed_tokens = 0
    assert hooks.plan({}).need_flush
    end_stores(hooks, stored)
    hooks.scheduler.reset()
    request.table = 4, 5, 6
    admit_again(hooks, request)
    request.num_computed_tokens = 8
    assert hooks.plan({"r": 1}).store_device_blocks == (4, 5)


def test_computed_blocks_are_stored_before_the_prefix_cache_has_them():
    hooks = make_hooks(content_of={}.get)
    request, _ = admit(hooks)
    request.num_computed_tokens = 8
    assert hooks.plan({"r": 1}).store_device_blocks == (1, 2)


def test_a_token_that_is_taken_back_and_sampled_again_is_in_the_key():
    """The number of full blocks stays the same, and so did the key."""
    hooks = make_hooks()
    request, _ = admit(hooks, num_tokens=11)
    request.num_computed_tokens = 8
    hooks.plan({"r": 3})
    request.num_computed_tokens, request.num_tokens = 11, 12
    request.tokens = [*range(11), 50]
    hooks.plan({"r": 1})
    request.tokens[11] = 60  # A grammar refuses 50, which has been computed.
    hooks.plan({"r": 1})
    request.num_computed_tokens = 12
    hooks.free(request, has_ended=True)
    assert 3 in hooks.plan({}).store_device_blocks
    taken_back = make_request("taken back", 13, ())
    taken_back.tokens[11] = 50
    resampled = make_request("resampled", 13, ())
    resampled.tokens[11] = 60
    hooks.collect(ConnectorOutput(completed_store_events=(0, 1)))
    assert (hooks.query(taken_back, 0), hooks.query(resampled, 0)) == (8, 12)


def test_requests_of_an_earlier_namespace_are_neither_stored_nor_loaded():
    hooks = hooks_with_blocks()
    loading, _ = admit(hooks, "loads")
    hooks.plan({})
    offered, running = make_request("is offered"), make_request("runs", 13, (4, 5, 6))
    assert (hooks.query(offered, 0), hooks.query(running, 8)) == (8, 0)
    hooks.allocate(running, 4, lambda num, *, delay_cache_blocks: num)
    new = dataclasses.replace(NAMESPACE, weights_epoch="2")
    with pytest.raises(ValueError, match=r"block_size=5 must be 4, the block size"):
        hooks.change_namespace(dataclasses.replace(new, block_size=5))
    hooks.change_namespace(new)
    assert hooks.allocate(offered, 9, pytest.fail) is None, "it must be queried again"
    # As if the load had failed, until the engine frees its blocks.
    ended = ConnectorOutput(finished_recving=("loads",))
    assert hooks.collect(ended) == [(loading, 0)]
    hooks.free(loading, has_ended=False)
    assert hooks.query(loading, 0) == 0, "the host has nothing of the new weights"
    running.num_computed_tokens = 12
    assert hooks.plan({"runs": 1}).store_event == NO_EVENT
    hooks.free(running, has_ended=True)
    assert hooks.plan({}).store_event == NO_EVENT
    # Back to the weights of before: what they computed is found again.
    hooks.change_namespace(NAMESPACE)
    assert hooks.query(loading, 0) == 8


def test_engines_that_the_hooks_do_not_serve_are_refused():
    for groups in (2 * BLOCK, SlidingWindow(BLOCK, 9), [FullAttention(BLOCK)] * 2):
        with pytest.raises(ValueError, match=r"must be \(FullAttention\(block_size=4"):
            make_hooks(groups)
    request = collections.namedtuple("Request", "request_id")("r1")
    with pytest.raises(
        ValueError, match=r"allocate.. was called for request 'r1' before"
    ):
        make_hooks().allocate(request, 1, lambda *_, **__: [])


def test_the_adapter_of_the_example_has_at_most_60_lines():
    text = Path(example.__file__).read_text(encoding="utf-8")
    (adapter,) = re.findall(
        r"^class .*?(?=^if __name__)", text, re.MULTILINE | re.DOTALL
    )
    assert sum(map(bool, adapter.splitlines())) <= 60


def test_frees_of_held_blocks_wait_until_all_transfers_have_ended():
    freed = []
    parked = ParkedFrees(freed.extend)
    pool = BorrowedPool(
        8,
        num_free=lambda: 0,
        hold=parked.hold,
        release=parked.release,
        content_of=parked.version,
    )
    keys = [b"head", b"tail"]
    assert pool.cache([1, 2], keys) == []
    pool.pin([1, 2])
    pool.pin([1])
    parked.free([1, 2, 3])
    assert (freed, parked.parked) == ([3], {1, 2})
    # Their content stays as long as transfers read it.
    assert pool.holds([1, 2], keys).tolist() == [True, True]
    pool.unpin([1, 2])
    assert (freed, parked.parked) == ([3, 2], {1})
    assert pool.holds([1, 2], keys).tolist() == [True, False]
    pool.unpin([1])
    assert (freed, parked.parked, parked.holds) == ([3, 2, 1], set(), {})
    # A block that was held and not freed is its request's.
    pool.pin([4])
    pool.unpin([4])
    assert freed == [3, 2, 1]
    # After a reset, an engine must take held blocks out of its free list.
    pool.pin([5])
    assert parked.park_held() == [5]
    pool.unpin([5])
    assert freed == [3, 2, 1, 5]


def test_blocks_that_the_prefix_cache_has_replaced_are_stored_in_their_place():
    request = types.SimpleNamespace(
        request_id="r", num_tokens=2 * BLOCK + 1, num_computed_tokens=0
    )
    table, counts = [1, 2, 3], collections.Counter()
    hooks = EngineHooks(
        OffloadScheduler(BLOCK, 8, rules=OffloadRules(store_batch_blocks=0)),
        BorrowedPool(
            8, num_free=lambda: 4, hold=counts.update, release=counts.subtract
        ),
        NAMESPACE,
        tokens_of=lambda request: range(request.num_tokens),
        table_of=lambda request: table,
    )
    assert hooks.query(request, 0) == 0
    hooks.allocate(request, request.num_tokens, lambda *_, **__: table)
    hooks.plan({"r": request.num_tokens})
    request.num_computed_tokens = request.num_tokens
    # Another request has computed the same first block.
    table = [5, 2, 3]
    hooks.change_table(request)
    plan = hooks.plan({"r": 1})
    assert plan.store_device_blocks == (5, 2)
    assert counts == {5: 1, 2: 1}
