"""The twin of vLLM's offload scheduler does what is known of vLLM's, faults included.

The faults are what jaxkv does better, so they are pinned one by one.
"""

import random
from itertools import takewhile
from math import lcm
from types import SimpleNamespace

import pytest

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from tests.reference.block_pool import BlockPool, PoolEvent
from tests.reference.hit_search import find_longest_cache_hit
from tests.reference.offload_scheduler import ReferenceScheduler

FULL = FullAttention(4)


def make_request(name, path, extra_tokens=1):
    """A request of a block a letter; blocks are alike as far as their paths are."""
    return SimpleNamespace(
        request_id=name,
        block_keys=[path[: i + 1].encode() for i in range(len(path))],
        num_tokens=len(path) * 4 + extra_tokens,
        num_computed_tokens=0,
    )


class Engine:
    """The calls of an engine, over one group of layers."""

    def __init__(self, device_blocks=20, host_blocks=20, **more):
        self.pool = BlockPool(device_blocks)
        self.scheduler = ReferenceScheduler([FULL], host_blocks, **more)
        self.scheduler.bind_device_block_pool(self.pool)

    def admit(self, request):
        """Allocate all blocks of a request; returns how many tokens will be loaded."""
        keys = request.block_keys[: (request.num_tokens - 1) // 4]
        blocks = [*takewhile(bool, map(self.pool.get_cached_block, keys))]
        request.num_computed_tokens = 4 * len(blocks)
        self.pool.touch(blocks)
        matched, _ = self.scheduler.get_num_new_matched_tokens(request, 4 * len(blocks))
        blocks += self.pool.get_new_blocks(-(-request.num_tokens // 4) - len(blocks))
        request.block_ids = [block.block_id for block in blocks]
        self.scheduler.update_state_after_alloc(request, request.block_ids, matched)
        return matched

    def step(self, *requests, preempted=()):
        """Let the scheduler look, then compute all that is missing."""
        names = [request.request_id for request in requests]
        output = SchedulerOutput(dict.fromkeys(names, 1), preempted_req_ids=preempted)
        meta = self.scheduler.build_connector_meta(output)
        for request in requests:
            for i, key in zip(request.block_ids, request.block_keys, strict=False):
                if self.pool.blocks[i].key is None:
                    self.pool.cache_block(self.pool.blocks[i], key)
            request.num_computed_tokens = request.num_tokens
        return meta

    def report(self, *store_events, loaded=()):
        output = ConnectorOutput(loaded, completed_store_events=store_events)
        self.scheduler.update_connector_output(output)

    def finish(self, request, preempt=False):
        if not preempt:
            self.scheduler.request_finished(request)
        self.pool.free_blocks(self.pool.blocks[i] for i in request.block_ids[::-1])

    def run(self, *requests):
        """Admit requests and compute all their tokens; nothing is stored yet."""
        for request in requests:
            self.admit(request)
        assert self.step(*requests).store_event == NO_EVENT

    def store(self, name, path):
        """Serve a request to its end, all its full blocks stored."""
        request = make_request(name, path)
        self.run(request)
        self.report(self.step(request).store_event)
        self.finish(request)

    def hit(self, path):
        request = make_request("?", path)
        return self.scheduler.get_num_new_matched_tokens(request, 0)[0] // 4

    def free_ids(self):
        return [block.block_id for block in self.pool.free_queue]


def test_the_pool_gives_up_what_was_freed_first_and_serves_what_was_first_cached():
    pool = BlockPool(4, enable_events=True)
    a, b, c = pool.get_new_blocks(3)
    for block in (b, a, c):
        pool.cache_block(block, b"k")
    with pytest.raises(ValueError, match="0 are free"):
        pool.get_new_blocks(1)
    pool.free_blocks([b, c])
    assert pool.get_cached_block(b"k") is b
    assert pool.get_new_blocks(1) == [b]
    assert pool.get_cached_block(b"k") is a
    pool.evict_blocks([a.block_id])
    assert pool.get_cached_block(b"k") is c
    assert pool.take_events()[3:] == 2 * [PoolEvent((b"k",), "GPU", removed=True)]
    pool.touch([c])
    assert (pool.num_free, pool.reset_prefix_cache()) == (0, False)
    pool.touch([pool.null_block])
    pool.free_blocks([a, pool.null_block, b, c])
    assert (pool.num_free, pool.reset_prefix_cache()) == (3, True)
    assert pool.get_cached_block(b"k") is None


def needed(spec, num_blocks):
    """The blocks, of so many, that the next token reads; of a window at least one."""
    match spec:
        case FullAttention():
            first = 0
        case SlidingWindow(size, window):
            first = num_blocks - max(1, -(-(window - 1) // size))
        case ChunkedLocal(size, chunk):
            first = num_blocks - num_blocks % (chunk // size)
        case Mamba():
            first = num_blocks - 1
    return set(range(max(0, first), num_blocks))


EQUAL = [FULL, SlidingWindow(4, 2), SlidingWindow(4, 14), Mamba(4), ChunkedLocal(4, 12)]
MIXED = [FULL, FullAttention(2), SlidingWindow(2, 9), SlidingWindow(8, 10), Mamba(6)]


def test_the_search_finds_the_longest_common_hit():
    for seed in range(1000):
        rng = random.Random(seed)
        kinds, share = rng.choice([EQUAL, MIXED]), rng.choice([0.6, 0.9])
        specs = rng.choices(kinds, k=rng.choice([1, 2, 2, 2, 3, 4]))
        keys = [
            [(g, i) for i in range(99 // spec.block_size)]
            for g, spec in enumerate(specs)
        ]
        cached = {key: key for row in keys for key in row if rng.random() < share}
        limit = rng.randint(0, 96)
        length, blocks = find_longest_cache_hit(specs, keys, cached.get, limit)
        assert length == max(
            tokens
            for tokens in range(0, limit + 1, lcm(*(s.block_size for s in specs)))
            if all(
                cached.keys() >= {(g, i) for i in needed(s, tokens // s.block_size)}
                for g, s in enumerate(specs)
            )
        ), seed
        for g, spec in enumerate(specs):
            assert len(blocks[g]) == length // spec.block_size, seed
            assert cached.keys() >= set(blocks[g]) - {None}, seed
            there = {i for i, block in enumerate(blocks[g]) if block == (g, i)}
            assert needed(spec, len(blocks[g])) <= there, seed


def test_what_was_stored_is_loaded_but_for_the_last_token():
    engine = Engine()
    engine.store("a", "abc")
    exact = make_request("exact", "abc", extra_tokens=0)
    assert engine.scheduler.get_num_new_matched_tokens(exact, 0) == (8, True)
    engine.pool.evict_blocks([2, 3])
    request, aborted = (make_request(name, "abcd") for name in "bc")
    assert engine.admit(request) == engine.admit(aborted) == 8
    engine.finish(aborted)
    meta = engine.step()
    assert (meta.load_event, meta.load_event_to_reqs) == (0, {0: ["b"]})
    assert meta.load_device_blocks == request.block_ids[1:3]
    assert meta.load_host_blocks == [2, 3]
    assert engine.step().load_event == NO_EVENT
    engine.finish(request)
    assert (engine.pool.num_free, engine.scheduler.host_pool.num_free) == (17, 17)
    engine.report(loaded=["b"])
    assert (engine.pool.num_free, engine.scheduler.host_pool.num_free) == (19, 19)
    assert meta.load_event_to_reqs == {}  # It is the scheduler's own.


def test_fault_a_hit_that_is_evicted_before_allocation_ends_the_engine():
    engine = Engine(host_blocks=3)
    engine.store("a", "ab")
    request = make_request("b", "ab")
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    engine.store("c", "xy")
    with pytest.raises(AssertionError, match="8 tokens were promised, 0 are there"):
        engine.scheduler.update_state_after_alloc(request, [7, 8, 9], 8)


def test_fault_a_block_in_flight_is_stored_again_and_one_given_up_is_not():
    engine = Engine(host_blocks=5)
    first, *others = (make_request(name, "ab") for name in "pqr")
    engine.run(first)
    assert engine.step(first).store_device_blocks == [1, 2]
    for request in others:
        engine.admit(request)
    meta = engine.step(first, *others)
    assert (meta.store_device_blocks, meta.store_host_blocks) == ([1, 2], [3, 4])
    engine.report(0, 1)
    engine.store("x", "wxyz")
    assert engine.hit("ab") == 0
    assert engine.step(first, *others).store_event == NO_EVENT


def test_fault_equal_blocks_of_one_step_are_stored_twice():
    engine = Engine()
    requests = [make_request("a", "x"), make_request("b", "x")]
    engine.run(*requests)
    assert engine.step(*requests).store_device_blocks == [1, 3]


def test_fault_what_a_preempted_request_has_computed_is_lost():
    engine = Engine()
    request = make_request("a", "ab")
    engine.run(request)
    engine.finish(request, preempt=True)
    assert engine.step(preempted=["a"]).store_event == NO_EVENT
    assert engine.hit("ab") == 0


def test_fault_a_hole_on_the_device_ends_reuse():
    engine = Engine()
    engine.store("a", "abcd")
    engine.pool.evict_blocks([2])
    engine.scheduler.host_pool.evict_blocks([3, 4])
    # 1, 3 and 4 are on the device and 2 on the host, but two of the four are used.
    assert engine.admit(make_request("b", "abcd")) == 4


def test_fault_one_new_block_costs_an_older_prefix_all_its_hits_on_the_wrong_tier():
    engine = Engine(host_blocks=5, enable_events=True)
    engine.store("a", "abcd")
    assert engine.hit("abcd") == 4
    assert engine.scheduler.take_events() == []  # Stores are not told.
    engine.store("x", "x")
    assert engine.hit("abcd") == 0
    assert engine.scheduler.take_events() == [PoolEvent((b"a",), "GPU", removed=True)]


def test_fault_the_end_of_a_request_loses_its_last_blocks_and_frees_its_head_first():
    engine = Engine(device_blocks=8)
    stored, lost = make_request("a", "abc"), make_request("x", "xy")
    engine.run(stored)
    event = engine.step(stored).store_event
    engine.run(lost)
    for request in (stored, lost):
        engine.finish(request)
    assert engine.step().store_event == NO_EVENT
    engine.report(event)
    assert engine.free_ids() == [4, 7, 6, 5, 1, 2, 3]


def test_fault_the_lazy_cursor_moves_to_the_end_and_leaves_blocks_out():
    engine = Engine(device_blocks=7, lazy=True, max_num_batched_tokens=4)
    request = make_request("a", "abcde")
    engine.run(request)
    engine.finish(request)
    assert engine.free_ids() == [6, 5, 4, 3, 2, 1]
    assert [engine.step().store_device_blocks for _ in "ab"] == [[5], [4]]
    engine.report(0, 1)
    assert engine.free_ids() == [6, 3, 2, 1, 5, 4]
    assert [engine.step().store_event for _ in range(3)] == [NO_EVENT] * 3
    engine.scheduler.cursor = None
    engine.scheduler.host_pool.get_new_blocks(19)
    assert engine.step().store_event == NO_EVENT  # For want of room.
