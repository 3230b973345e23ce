"""A block is stored under a key only if its request has computed it and kept it."""

import itertools
import random
import types

import numpy as np
import pytest

from jaxkv import (
    BorrowedPool,
    ConnectorOutput,
    FullAttention,
    OffloadRules,
    OffloadScheduler,
    SchedulerOutput,
    SlidingWindow,
)
from jaxkv.integrations.vllm.pool import VllmBlockPool, key_in_group
from jaxkv.scheduling.places import Places

SIZE = 4


def keys_of(tokens):
    """Hashes of full blocks, as vLLM makes them: 32 bytes over all tokens so far."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [repr(tuple(tokens[:end])).encode().ljust(32, b".")[-32:] for end in ends]


class Blocks:
    """vLLM's pool: a block gets its hash when it is allocated, before its bytes."""

    def __init__(self, num_blocks):
        self.blocks = [
            types.SimpleNamespace(block_id=n, ref_cnt=0, block_hash=None, is_null=not n)
            for n in range(num_blocks)
        ]
        self.free = self.blocks[1:]

    def get_num_free_blocks(self):
        return len(self.free)

    def touch(self, blocks):
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self.free.append(block)

    def named(self, ids):
        return [self.blocks[number] for number in ids]

    def borrowed(self):
        return BorrowedPool(
            len(self.blocks),
            num_free=self.get_num_free_blocks,
            hold=lambda ids: self.touch(self.named(ids)),
            release=lambda ids: self.free_blocks(self.named(ids)),
            content_of=lambda number: self.blocks[number].block_hash,
        )


class Engine:
    """Plans steps; the bytes of a block are the key that was computed into it."""

    def __init__(self, group, num_host_blocks, pool="borrowed", **rules):
        self.blocks = blocks = Blocks(16)
        rules = OffloadRules(**rules)
        self.scheduler = OffloadScheduler([group], num_host_blocks, rules=rules)
        self.pool = VllmBlockPool(blocks, 1) if pool == "vllm" else blocks.borrowed()
        self.scheduler.bind_device_block_pool(self.pool)
        self.stored, self.in_flight = [], []

    def allocate(self, hashes, first=None):
        ids = []
        for block_hash in hashes:
            block = self.blocks.free[0] if first is None else self.blocks.blocks[first]
            first = None
            self.blocks.free.remove(block)
            block.ref_cnt = 1
            block.block_hash = block_hash and key_in_group(block_hash, 0)
            ids.append(block.block_id)
        return ids

    def request(self, name, tokens):
        return types.SimpleNamespace(
            request_id=name,
            num_tokens=len(tokens),
            num_computed_tokens=0,
            block_keys=keys_of(tokens),
        )

    def admit(self, request, first=None):
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        table = self.allocate([*request.block_keys, None], first)
        self.scheduler.update_state_after_alloc(request, table, 0)
        request.table = table

    def step(self, *requests, num_tokens=1, new=None):
        """Plan a step; return the blocks that it stores, and compute its tokens."""
        scheduled = {request.request_id: num_tokens for request in requests}
        meta = self.scheduler.build_connector_meta(
            SchedulerOutput(scheduled, new or {}, [])
        )
        if meta.store_event >= 0:
            self.in_flight.append(meta.store_event)
        for request in requests:
            request.num_computed_tokens += num_tokens
        return list(meta.store_device_blocks)

    def settle(self):
        events, self.in_flight = tuple(self.in_flight), []
        self.scheduler.update_connector_output(
            ConnectorOutput(completed_store_events=events)
        )

    def release(self, ids):
        self.blocks.free_blocks(self.blocks.named(ids))

    def finish(self, request):
        self.scheduler.request_finished(request, request.table)
        self.release(request.table[::-1])

    def on_host(self, key):
        return bool(self.scheduler._manager.contains([key])[0])


@pytest.mark.parametrize("pool", ["borrowed", "vllm"])
def test_a_block_that_comes_back_to_a_prefix_is_stored_once_it_is_computed(pool):
    """It left a window, served another request, and has its old hash before its bytes.

    The plan of the step that computes it stored the other request's bytes.
    """
    engine = Engine(SlidingWindow(SIZE, SIZE), 1, pool)
    filler = engine.request("filler", [1, 2, 3, 4, 1])
    engine.admit(filler)
    engine.step(filler, num_tokens=5)
    prefix = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    first = engine.request("first", prefix)
    engine.admit(first)
    assert engine.step(filler) == filler.table[:1], "the host is full from now on"
    assert engine.step(first, num_tokens=9) == []
    assert engine.step(first) == [], "its blocks find no room"
    block = first.table[0]
    engine.release([block])  # It leaves the window.
    other = engine.request("other", [90, 91, 92, 93, 94])
    engine.admit(other, block)
    assert other.table[0] == block
    engine.step(other, num_tokens=5)
    engine.finish(other)
    engine.settle()
    second = engine.request("second", prefix)
    engine.admit(second, block)
    assert second.table[0] == block
    assert block not in engine.step(second, num_tokens=4)
    engine.settle()
    assert block in engine.step(second, num_tokens=4), "it is computed now"
    engine.settle()
    assert engine.on_host(second.block_keys[0])


def test_a_block_that_was_left_out_once_is_stored_when_it_is_used_again():
    """Nobody removed the mark of a block that was not loaded, as no token read it."""
    engine = Engine(SlidingWindow(SIZE, SIZE), 8)
    first = engine.request("first", range(13))
    engine.admit(first)
    engine.step(first, num_tokens=13)
    engine.finish(first)
    engine.step()
    engine.settle()
    for block in engine.blocks.blocks:
        block.block_hash = None
    again = engine.request("again", range(13))
    num_tokens, _ = engine.scheduler.get_num_new_matched_tokens(again, 0)
    table = engine.allocate([None] * 4)
    after = engine.scheduler.update_state_after_alloc(again, table, num_tokens)
    (skipped,) = [[b for b in table if b not in row] for row in after]
    assert skipped
    engine.step()
    engine.scheduler.update_connector_output(
        ConnectorOutput(finished_recving=("again",))
    )
    engine.scheduler.request_finished(again, table)
    engine.release(table)
    grows = engine.request("grows", [70, 71, 72, 73, 74])
    engine.scheduler.get_num_new_matched_tokens(grows, 0)
    engine.scheduler.update_state_after_alloc(grows, [engine.allocate([None])[0]], 0)
    new = engine.allocate([None], skipped[0])
    engine.step(grows, num_tokens=8, new={"grows": [new]})
    grows.num_tokens, grows.block_keys = (
        9,
        keys_of([70, 71, 72, 73, 74, 75, 76, 77, 78]),
    )
    assert skipped[0] in engine.step(grows)


def test_a_block_that_the_prefix_cache_gets_late_is_stored():
    engine = Engine(FullAttention(SIZE), 8)
    request = engine.request("r", range(9))
    engine.scheduler.get_num_new_matched_tokens(request, 0)
    request.table = engine.allocate([None] * 4)
    engine.scheduler.update_state_after_alloc(request, request.table, 0)
    engine.step(request, num_tokens=9)
    request.num_tokens, request.block_keys = 13, keys_of(range(13))
    assert engine.step(request, num_tokens=3) == request.table[:2]
    assert engine.step(request) == request.table[2:3]


def test_a_block_that_waits_for_room_is_stored_though_it_gets_its_hash_meanwhile():
    engine = Engine(FullAttention(SIZE), 1)
    first, second = engine.request("first", range(5)), engine.request("second", "abcde")
    for request in (first, second):
        engine.scheduler.get_num_new_matched_tokens(request, 0)
        request.table = engine.allocate([None] * 2)
        engine.scheduler.update_state_after_alloc(request, request.table, 0)
        engine.step(request, num_tokens=5)
    assert engine.step(first) == first.table[:1]
    assert engine.step(second) == [], "the host is full"
    block = engine.blocks.blocks[second.table[0]]
    block.block_hash = key_in_group(second.block_keys[0], 0)
    engine.settle()
    assert engine.step(second) == second.table[:1]
    block.block_hash = None
    assert not engine.pool.holds([block.block_id], second.block_keys)[0]


def test_what_a_request_was_found_is_not_stored_before_the_step_that_may_compute_it():
    """Its hits may be blocks of a request that computes them in the same step."""
    engine = Engine(FullAttention(SIZE), 8)
    first = engine.request("first", range(9))
    engine.admit(first)
    hit = engine.request("hit", range(9))
    engine.scheduler.get_num_new_matched_tokens(hit, 8)
    engine.blocks.touch(engine.blocks.named(first.table[:2]))
    hit.table = [*first.table[:2], *engine.allocate([None])]
    engine.scheduler.update_state_after_alloc(hit, hit.table, 0)
    hit.num_computed_tokens = 8
    engine.finish(hit)
    assert engine.step(first, num_tokens=9) == []
    assert engine.step(first) == first.table[:2]


def test_a_hit_in_a_window_is_no_mark_on_a_block_that_is_computed_in_this_step():
    """Its key is not recorded yet: it counted as left out, for the first one too."""
    engine = Engine(SlidingWindow(SIZE, 2 * SIZE), 8)
    first = engine.request("first", range(5))
    engine.admit(first)
    hit = engine.request("hit", range(5))
    engine.scheduler.get_num_new_matched_tokens(hit, SIZE)
    engine.blocks.touch(engine.blocks.named(first.table[:1]))
    hit.table = [first.table[0], *engine.allocate([None])]
    engine.scheduler.update_state_after_alloc(hit, hit.table, 0)
    hit.num_computed_tokens = SIZE
    assert engine.pool.unwritten == set()
    engine.step(first, num_tokens=5)
    assert engine.step(first) == first.table[:1]


def test_a_store_of_a_block_that_is_overwritten_is_void():
    """A request takes tokens back while their block waits, or is in flight."""
    for limit, is_in_flight in ((1, False), (None, True)):
        engine = Engine(FullAttention(SIZE), 8, max_blocks_in_flight=limit)
        request = engine.request("r", range(13))
        engine.admit(request)
        engine.step(request, num_tokens=12)
        old, block = request.block_keys[2], request.table[2]
        assert (block in engine.step(request)) == is_in_flight
        request.block_keys = keys_of([*range(10), 50, 51, 52])
        request.num_computed_tokens = 10
        assert block not in engine.step(request, num_tokens=3)
        for _ in range(4):
            engine.settle()
            assert block not in engine.step()
        engine.settle()
        assert not engine.on_host(old)
        engine.finish(request)
        assert engine.step() == [block]
        engine.settle()
        assert all(map(engine.on_host, request.block_keys))
        stats = engine.scheduler.stats
        assert (stats.num_stored, stats.num_dropped_failed) == (3, 1)


def test_a_pool_that_is_bound_again_keeps_the_places_of_running_requests():
    engine = Engine(FullAttention(SIZE), 8)
    request = engine.request("r", range(9))
    engine.admit(request)
    engine.step(request, num_tokens=9)
    engine.scheduler.bind_device_block_pool(engine.pool)
    assert engine.step(request) == request.table[:2]
    engine.scheduler.bind_device_block_pool(Blocks(8).borrowed())
    request.table = []
    engine.finish(request)
    assert engine.step() == []


def test_keys_that_change_without_a_computation_store_nothing_more():
    """Such as the keys of new weights for blocks that the old weights have computed."""
    engine = Engine(FullAttention(SIZE), 8)
    request = engine.request("r", range(9))
    engine.admit(request)
    engine.step(request, num_tokens=9)
    request.block_keys = [key[::-1] for key in request.block_keys]
    assert engine.step(request) == []
    engine.finish(request)
    assert engine.step() == []
    engine.admit(again := engine.request("r2", range(9)))
    again.block_keys = request.block_keys
    engine.step(again, num_tokens=9)
    assert engine.step(again) == again.table[:2]


@pytest.mark.parametrize("outcome", ["failed", "in flight"])
def test_tokens_that_count_as_computed_when_their_load_begins_are_not_stored(outcome):
    engine = Engine(FullAttention(SIZE), 8)
    first = engine.request("first", range(9))
    engine.admit(first)
    engine.step(first, num_tokens=9)
    engine.finish(first)
    engine.step()
    engine.settle()
    request = engine.request("r", range(9))
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    request.table = engine.allocate([None] * 3)
    engine.scheduler.update_state_after_alloc(request, request.table, 8)
    request.num_computed_tokens = 8  # As vLLM does since 0.11.
    engine.step()
    if outcome == "failed":
        report = ConnectorOutput(failed_recving=("r",))
        assert engine.scheduler.update_connector_output(report) == report
        assert not engine.on_host(request.block_keys[0])
        assert engine.step(request) == [], "the engine takes it for done"
    engine.finish(request)
    assert engine.step() == []


def test_places_are_valid_until_their_block_is_given_to_anybody():
    """Random calls, beside a copy that remembers every entry by a number."""
    rng, places = random.Random(5), Places(40)
    owner, tables = {}, {}  # The newest number of each block; entries by request.
    entries_of = {}
    numbers = iter(range(1 << 30))

    def give(block):
        owner[block] = next(numbers)
        return block, owner[block]

    for _ in range(3000):
        name, action = f"r{rng.randrange(6)}", rng.randrange(4)
        blocks = rng.sample(range(1, 40), rng.randrange(1, 14))
        if action == 0 or name not in tables:
            found = rng.randrange(len(blocks) + 1)
            entries_of[name] = places.admit(np.array(blocks), found)
            entries = [(block, owner.setdefault(block, -1)) for block in blocks[:found]]
            tables[name] = entries + [give(block) for block in blocks[found:]]
        elif action == 1:
            places.extend(entries_of[name], np.array(blocks))
            tables[name] += [give(block) for block in blocks]
        elif action == 2:
            old = [block for block, _ in tables[name]]
            new = [rng.choice((b, b, rng.randrange(1, 40))) for b in old]
            new += blocks[: rng.randrange(3)]
            given = places.replace(entries_of[name], np.array(new)).tolist()
            pairs = itertools.zip_longest(old, new)
            assert given == [b for a, b in pairs if b is not None and a != b]
            tables[name] = [
                tables[name][i] if i < len(old) and block == old[i] else (block, None)
                for i, block in enumerate(new)
            ]
            fresh = {
                block: next(numbers) for block, number in tables[name] if number is None
            }
            owner |= fresh
            tables[name] = [
                (block, fresh[block] if number is None else number)
                for block, number in tables[name]
            ]
        else:
            first = rng.randrange(len(tables[name]))
            tail = [block for block, _ in tables[name][first:]]
            assert places.rewind(entries_of[name], first).tolist() == tail
            fresh = {block: next(numbers) for block in tail}
            owner |= fresh
            tables[name][first:] = [(block, fresh[block]) for block in tail]
        for other, entries in tables.items():
            first = rng.randrange(len(entries))
            expected = [b if owner[b] == number else 0 for b, number in entries[first:]]
            read = places.read(entries_of[other], first, len(entries))
            assert read.tolist() == expected
