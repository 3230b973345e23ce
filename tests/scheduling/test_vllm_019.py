"""`Vllm019Scheduler` against the plain-Python twin: the same calls, the same decisions.

That it has vLLM's faults is in `test_scheduler_known_faults.py`, item by item.
"""

import random

import pytest

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.vllm_019 import Vllm019Scheduler, make_scheduler
from jaxkv.search.groups import ChunkedLocal, FullAttention, Mamba, SlidingWindow
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.base import DEVICE_MEDIUM
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NULL_BLOCK
from tests.reference.block_pool import BlockPool
from tests.reference.hit_search import find_longest_cache_hit
from tests.reference.offload_scheduler import ReferenceScheduler
from tests.rigs.offload_rig import BLOCK_SIZE, first_needed, make_request

NUM_BLOCKS = 24
FULL = FullAttention(BLOCK_SIZE)
MODELS = {
    "full": (FULL,),
    "window": (FULL, SlidingWindow(BLOCK_SIZE, 6)),
    "three": (Mamba(2 * BLOCK_SIZE), FULL, ChunkedLocal(2 * BLOCK_SIZE, 16)),
}


class Ours:
    """jaxkv's pool and its imitation of vLLM's scheduler."""

    def __init__(self, groups, **rules):
        self.groups = groups
        self.pool = DeviceBlockPool(NUM_BLOCKS)
        self.scheduler = make_scheduler(
            groups,
            NUM_BLOCKS,
            enable_events=True,
            rules=OffloadRules(**rules),
            compat="vllm-0.19",
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.allocate = self.pool.allocate
        self.touch = self.pool.touch
        self.free = self.pool.free

    def find(self, keys, most):
        return find_cached_prefix(self.pool, self.groups, keys, most)

    def cache(self, ids, keys):
        assert self.pool.cache(ids, keys) == []

    def plan(self, output):
        meta = self.scheduler.build_connector_meta(output)
        assert not meta.copy_from_blocks
        return (
            (meta.load_event, meta.load_device_blocks, meta.load_host_blocks),
            dict(meta.load_event_to_reqs),
            (meta.store_event, meta.store_device_blocks, meta.store_host_blocks),
            meta.need_flush,
        )

    def events(self):
        events = list(self.scheduler.take_events())
        assert all((e.medium, e.removed) == (DEVICE_MEDIUM, True) for e in events)
        return [key for event in events for key in event.block_hashes]

    def free_queues(self):
        pools = self.pool, self.scheduler._host
        return [pool.next_free(pool.num_free) for pool in pools]

    def is_pending(self):
        return self.scheduler.has_pending_stores(), self.scheduler.has_pending_loads()


class Twin:
    """The same in plain Python."""

    def __init__(self, groups, mode, max_num_batched_tokens, world_size):
        self.groups = groups
        self.pool = BlockPool(NUM_BLOCKS)
        self.scheduler = ReferenceScheduler(
            groups,
            NUM_BLOCKS,
            lazy=mode == "lazy",
            max_num_batched_tokens=max_num_batched_tokens,
            world_size=world_size,
            enable_events=True,
        )
        self.scheduler.bind_device_block_pool(self.pool)

    def blocks(self, ids):
        return [self.pool.blocks[i] for i in ids if i != NULL_BLOCK]

    def allocate(self, num):
        return [block.block_id for block in self.pool.get_new_blocks(num)]

    def touch(self, ids):
        self.pool.touch(self.blocks(ids))

    def free(self, ids):
        self.pool.free_blocks(self.blocks(ids))

    def cache(self, ids, keys):
        for i, key in zip(ids, keys, strict=True):
            if i != NULL_BLOCK and self.pool.blocks[i].key is None:
                self.pool.cache_block(self.pool.blocks[i], key)

    def find(self, keys, most):
        get = self.pool.get_cached_block
        num_tokens, found = find_longest_cache_hit(self.groups, keys, get, most)
        return num_tokens, [
            [NULL_BLOCK if hit is None else hit.block_id for hit in hits]
            for hits in found
        ]

    def plan(self, output):
        meta = self.scheduler.build_connector_meta(output)
        reqs = {event: tuple(r) for event, r in meta.load_event_to_reqs.items()}
        return (
            (
                meta.load_event,
                tuple(meta.load_device_blocks),
                tuple(meta.load_host_blocks),
            ),
            reqs,
            (
                meta.store_event,
                tuple(meta.store_device_blocks),
                tuple(meta.store_host_blocks),
            ),
            meta.need_flush,
        )

    def events(self):
        return [key for event in self.scheduler.take_events() for key in event.keys]

    def free_queues(self):
        pools = self.pool, self.scheduler.host_pool
        queues = [list(pool.free_queue) for pool in pools]
        return [
            ([block.block_id for block in queue], [block.key for block in queue])
            for queue in queues
        ]

    def is_pending(self):
        return self.scheduler.has_pending_stores(), bool(self.scheduler.loads)


class Engine:
    """Makes each call on both sides and compares what they say."""

    def __init__(self, groups, world_size, **rules):
        self.groups = groups
        self.world_size = world_size
        self.sides = [
            Ours(groups, world_size=world_size, **rules),
            Twin(groups, world_size=world_size, **rules),
        ]
        self.requests = {}
        self.preempted, self.waiting = [], []
        self.loads, self.reports = [], []
        self.num_loaded = self.num_stored = self.num_evicted = 0

    def both(self, call):
        ours, theirs = (call(side) for side in self.sides)
        assert ours == theirs
        return ours

    @property
    def num_free(self):
        return self.both(lambda side: side.pool.num_free)

    def needs(self, request):
        sizes = [spec.block_size for spec in self.groups]
        return sum(-(-request.num_tokens // size) for size in sizes)

    def admit(self, request):
        keys, most = request.block_keys_by_group, request.num_tokens - 1
        local, tables = self.both(lambda side: side.find(keys, most))
        for table in tables:
            self.both(lambda side, table=table: side.touch(table))
        offer, is_async = self.both(
            lambda side: side.scheduler.get_num_new_matched_tokens(request, local)
        )
        assert is_async == (offer > 0)
        end = local + offer
        request.tables = []
        for spec, table in zip(self.groups, tables, strict=True):
            first = first_needed(spec, end // spec.block_size)
            table += [NULL_BLOCK] * max(first - len(table), 0)
            num = -(-request.num_tokens // spec.block_size) - len(table)
            table += self.both(lambda side, num=num: side.allocate(num))
            request.tables.append(table)
        request.num_computed_tokens, request.loading_tokens = local, offer
        self.both(
            lambda side: side.scheduler.update_state_after_alloc(
                request, request.table, offer
            )
        )
        self.requests[request.request_id] = request
        self.num_loaded += offer > 0

    def step(self, scheduled, new_block_ids):
        output = SchedulerOutput(scheduled, new_block_ids, tuple(self.preempted))
        self.preempted = []
        load, reqs, store, _ = self.both(lambda side: side.plan(output))
        if load[0] != NO_EVENT:
            self.loads.append(reqs[load[0]])
        if store[0] != NO_EVENT:
            self.num_stored += len(store[1])
            self.reports += [store[0]] * self.world_size
        for name, num_tokens in scheduled.items():
            request = self.requests[name]
            done = request.num_computed_tokens + num_tokens
            self.compute(request, min(done, request.num_tokens))

    def compute(self, request, num_tokens):
        request.num_computed_tokens = num_tokens
        for spec, table, keys in zip(
            self.groups, request.tables, request.block_keys_by_group, strict=True
        ):
            num = min(num_tokens // spec.block_size, len(keys))
            self.both(lambda s, n=num, t=table, k=keys: s.cache(t[:n], k[:n]))

    def report(self, stores=(), loads=()):
        output = ConnectorOutput(tuple(loads), completed_store_events=tuple(stores))
        for side in self.sides:
            side.scheduler.update_connector_output(output)
        for name in loads:
            request = self.requests.get(name)
            if request is not None:
                done = request.num_computed_tokens + request.loading_tokens
                request.loading_tokens = 0
                self.compute(request, done)

    def part_with(self, name, *, preempt):
        request = self.requests.pop(name)
        if preempt:
            self.preempted.append(name)
            self.waiting.append(request)
        else:
            for side in self.sides:
                side.scheduler.request_finished(request)
        for table in request.tables:
            self.both(lambda side, table=table: side.free(table[::-1]))

    def check(self):
        self.num_evicted += len(self.both(lambda side: side.events()))
        self.both(lambda side: side.free_queues())
        self.both(lambda side: side.is_pending())


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(4))
def test_random_engines_get_equal_decisions(mode, model, seed):
    print(f"seed {seed}")
    rng = random.Random(f"{mode} {model} {seed}")
    engine = Engine(
        MODELS[model],
        world_size=1 + seed % 2,
        mode=mode,
        max_num_batched_tokens=rng.choice([4, 16]),
    )
    for number in range(600):
        action = rng.random()
        if action < 0.25:
            path = [rng.randrange(3) for _ in range(rng.choice([2, 4, 4, 6]))]
            request = make_request(
                f"r{number}",
                *path,
                extra_tokens=rng.randint(0, 3),
                groups=engine.groups,
            )
            if engine.waiting and request not in engine.waiting:
                back = engine.waiting[0]
                if back.request_id not in engine.preempted and rng.random() < 0.5:
                    request = engine.waiting.pop(0)
            if engine.needs(request) <= engine.num_free:
                engine.admit(request)
            elif request.request_id != f"r{number}":
                engine.waiting.insert(0, request)
        elif action < 0.6:
            scheduled, new = {}, {}
            for name, request in engine.requests.items():
                if request.loading_tokens or rng.random() < 0.2:
                    continue
                scheduled[name] = rng.choice([0, 1, 3, 8, 8, 40])
            engine.step(scheduled, new)
        elif action < 0.75 and engine.reports:
            rng.shuffle(engine.reports)
            num = rng.randint(1, len(engine.reports))
            done, engine.reports = engine.reports[:num], engine.reports[num:]
            engine.report(stores=done)
        elif action < 0.85 and engine.loads:
            engine.report(loads=engine.loads.pop(rng.randrange(len(engine.loads))))
        elif engine.requests:
            name = rng.choice(sorted(engine.requests))
            is_loading = engine.requests[name].loading_tokens > 0
            engine.part_with(name, preempt=rng.random() < 0.3 and not is_loading)
        engine.check()
    assert engine.num_stored > 10
    assert engine.num_loaded > 0
    assert engine.num_evicted > 0
    for name in list(engine.requests):
        engine.part_with(name, preempt=False)
    engine.step({}, {})
    while engine.reports or engine.loads:
        engine.report(
            engine.reports, [name for names in engine.loads for name in names]
        )
        engine.reports, engine.loads = [], []
        engine.step({}, {})
    engine.check()
    assert engine.num_free == NUM_BLOCKS - 1


def test_blocks_that_are_allocated_later_are_stored_too():
    engine = Engine((FULL,), 1, mode="eager", max_num_batched_tokens=16)
    request = make_request("one", 1, 2, 3)
    request.num_tokens = 2 * BLOCK_SIZE
    engine.admit(request)
    engine.step({"one": 8}, {})
    request.num_tokens = 3 * BLOCK_SIZE
    new = engine.both(lambda side: side.allocate(1))
    # The scheduler's table is its own: it hears of the block by the step's output.
    request.tables[0] = request.tables[0] + new
    engine.step({"one": 4}, {"one": new})
    engine.step({"one": 1}, {})
    assert engine.num_stored == 3
    engine.check()


def test_make_scheduler_makes_either():
    assert type(make_scheduler(BLOCK_SIZE, 8)) is OffloadScheduler
    rules = OffloadRules(mode="lazy", world_size=2, max_num_batched_tokens=64)
    made = make_scheduler(BLOCK_SIZE, 8, rules=rules, compat="vllm-0.19")
    assert type(made) is Vllm019Scheduler
    arc = make_scheduler(
        BLOCK_SIZE, 8, "arc", True, rules=OffloadRules(skip_slow_loads=False)
    )
    assert type(arc) is OffloadScheduler


@pytest.mark.parametrize(
    ("arguments", "rules", "why"),
    [
        ({"compat": "vllm-0.33"}, {}, "compat='vllm-0.33' must be"),
        ({"cache_policy": "arc"}, {}, "cache_policy='arc' must be 'lru'"),
        ({}, {"blocks_per_host_block": 2}, "blocks_per_host_block=2 and compat"),
        ({}, {"store_threshold": 2}, "store_threshold=2 and compat"),
        ({}, {"prompt_only": True}, "prompt_only=True and compat"),
        ({}, {"max_offload_tokens": 9}, "max_offload_tokens=9 and compat"),
        ({}, {"delay_shared_loads": True}, "delay_shared_loads=True and compat"),
        ({}, {"max_blocks_in_flight": 3}, "max_blocks_in_flight=3 and compat"),
        ({}, {"flush_on_preemption": True}, "flush_on_preemption=True and compat"),
        (
            {},
            {"skip_slow_loads": True, "block_bytes": 9},
            "and compat='vllm-0.19' exclude",
        ),
        ({"groups": SlidingWindow(4, 8)}, {}, "needs a group of full attention"),
        ({"num_host_blocks": 1}, {}, "num_blocks=1 must be at least 2"),
    ],
)
def test_what_vllm_did_not_have_is_refused(arguments, rules, why):
    all_arguments = {"groups": BLOCK_SIZE, "num_host_blocks": 8, "compat": "vllm-0.19"}
    with pytest.raises(ValueError, match=why):
        make_scheduler(**(all_arguments | arguments), rules=OffloadRules(**rules))
