"""vLLM's own offloading classes beside jaxkv's, with the same random calls.

jaxkv ports vLLM 0.19.1. `DIFFERENCES` lists where the installed, newer vLLM decides
otherwise; all else is equal, call by call.
"""

import hashlib
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxkv import OffloadingManager
from jaxkv.policies import arc, lru
from jaxkv.scheduling.protocol import ConnectorOutput, SchedulerOutput
from tests.reference.block_pool import BlockPool, PoolEvent
from tests.reference.offload_scheduler import Copy, Load, ReferenceScheduler
from tests.rigs.real_vllm import NEEDS_VLLM, tensors_of

pytestmark = NEEDS_VLLM

# What vLLM 0.32 decides otherwise, and 0.19.1's way. `Managers` allows for the first
# two, `Pool` and `Twin` for the others. docs/internals/vllm.md has the same table.
DIFFERENCES = {
    "ARC's target moves when ghosts are stored": "when touched",
    "a request's end uses its blocks": "`touch` alone",
    "a hit is pinned from its query": "searched again at allocation",
    "a block in flight is not stored again": "within one step",
    "a request's end stores its last blocks": "loses them",
    "blocks without keys are passed over": "end the scan",
    "freed blocks without keys are reused first": "queue like others",
    "stored blocks get keys at the end": "at the start",
    "stores have events, of medium CPU": "only evictions, of GPU",
}
NUM_CALLS = 2000
BLOCK = 4
DOCS = Path(__file__).resolve().parents[2] / "docs" / "internals" / "vllm.md"


def key_of(number):
    """An OffloadKey: a hash and the number of the group."""
    return number.to_bytes(28, "big") + bytes(4)


class Managers:
    """A manager of vLLM's and one of jaxkv's."""

    def __init__(self, policy, num_blocks, rng):
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.policy, self.rng, self.num_blocks = policy, rng, num_blocks
        self.theirs = CPUOffloadingManager(num_blocks, policy, enable_events=True)
        self.ours = OffloadingManager(16, num_blocks, policy, enable_events=True)
        self.universe = [key_of(number) for number in range(3 * num_blocks)]
        self.new_context = lambda: ReqContext("request")
        self.loading, self.storing = [], []
        self.counts = Counter()

    def some_keys(self):
        """A prefix of the universe from somewhere on, or keys from all over it."""
        size = self.rng.randrange(1, 2 + self.num_blocks // 2)
        first = self.rng.randrange(len(self.universe))
        if self.rng.random() < 0.7:
            return (self.universe[first:] + self.universe[:first])[:size]
        return self.rng.sample(self.universe, size)

    def lookup(self):
        from vllm.v1.kv_offload.base import LookupResult

        keys, num = self.some_keys(), 0
        for key in keys:
            if self.theirs.lookup(key, self.new_context()) is not LookupResult.HIT:
                break
            num += 1
        assert self.ours.lookup(keys) == num
        return keys[:num]

    def touch(self):
        keys = self.some_keys()
        self.theirs.touch(keys, self.new_context())
        self.ours.touch(keys)

    def prepare_load(self):
        keys = self.lookup()
        theirs = self.theirs.prepare_load(keys, self.new_context())
        assert self.ours.prepare_load(keys).block_ids.tolist() == ids_of(theirs)
        self.loading.append(keys)

    def complete_load(self):
        if self.loading:
            keys = self.loading.pop(self.rng.randrange(len(self.loading)))
            self.theirs.complete_load(keys, self.new_context())
            self.ours.complete_load(keys)

    def prepare_store(self):
        keys, context = self.some_keys(), self.new_context()
        missing = [key for key in keys if self.theirs._policy.get(key) is None]
        if self.policy == "arc":
            # It learns from ghosts in `touch` alone.
            self.ours.touch(missing)
        ours = self.ours.prepare_store(keys)
        theirs = self.theirs.prepare_store(keys, context)
        if theirs is None:
            assert ours is None
            self.counts["refused"] += 1
            return
        assert ours.block_hashes_to_store == theirs.keys_to_store
        assert ours.store_spec.block_ids.tolist() == ids_of(theirs.store_spec)
        assert ours.block_hashes_evicted == theirs.evicted_keys
        self.counts["evicted"] += len(theirs.evicted_keys)
        if theirs.keys_to_store:
            self.storing.append(theirs.keys_to_store)

    def complete_store(self):
        if self.storing:
            keys = self.storing.pop(self.rng.randrange(len(self.storing)))
            success = self.rng.random() < 0.7
            self.theirs.complete_store(keys, self.new_context(), success)
            self.ours.complete_store(keys, success)

    def request(self):
        """A whole request of vLLM 0.32; for LRU its end is one touch of all it saw."""
        if self.policy == "arc":
            return
        keys, context = self.lookup(), self.new_context()
        theirs = self.theirs.prepare_load(keys, context)
        assert self.ours.prepare_load(keys).block_ids.tolist() == ids_of(theirs)
        self.theirs.complete_load(keys, context)
        self.ours.complete_load(keys)
        self.theirs.on_request_finished(context)
        self.ours.touch(keys)

    def reset(self):
        if self.rng.random() < 0.02:
            self.theirs.reset_cache()
            self.ours.clear()
            # jaxkv says so in an event.
            assert self.take_events()[1].pop() == ([], True)
            self.loading, self.storing = [], []

    def take_events(self):
        theirs = [(list(e.keys), e.removed) for e in self.theirs.take_events()]
        ours = [(e.block_hashes, e.removed) for e in self.ours.take_events()]
        return theirs, ours

    def check(self):
        theirs, ours = self.take_events()
        assert ours == theirs
        policy = self.theirs._policy
        state = self.ours.executor.state.policy
        if self.policy == "lru":
            expected = {"order": sorted(policy.chunks, key=policy._ranks.__getitem__)}
            assert lru.snapshot(state) == expected
        else:
            expected = {name: list(getattr(policy, name)) for name in ARC_LISTS}
            expected["target"] = policy.target_t1_size
            assert arc.snapshot(state) == expected

    def run(self, num_calls):
        calls = [
            self.touch,
            self.prepare_load,
            self.complete_load,
            self.prepare_store,
            self.prepare_store,
            self.complete_store,
            self.complete_store,
            self.request,
            self.reset,
        ]
        for _ in range(num_calls):
            self.rng.choice(calls)()
            self.check()


ARC_LISTS = ("t1", "t2", "b1", "b2")


def ids_of(spec):
    return spec.block_ids.tolist()


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_the_manager_returns_and_evicts_what_vllms_does(policy):
    counts = Counter()
    for num_blocks in (1, 7, 24):
        managers = Managers(policy, num_blocks, random.Random(f"{policy}/{num_blocks}"))
        managers.run(NUM_CALLS)
        counts += managers.counts
    assert min(counts["evicted"], counts["refused"]) > 100, counts


class Pool(BlockPool):
    """The twin of vLLM's block pool, with the differences of 0.32."""

    def free_blocks(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            block.ref_cnt -= 1
        free = [b for b in blocks if b.ref_cnt == 0 and not b.is_null]
        queued = [*self.free_queue]
        for block in queued:
            self.free_queue.remove(block)
        self.free_queue.append_n([block for block in free if block.key is None])
        self.free_queue.append_n(queued)
        self.free_queue.append_n([block for block in free if block.key is not None])


class Twin(ReferenceScheduler):
    """The twin of vLLM's scheduler, with the differences of 0.32."""

    def __init__(self, num_host_blocks, **options):
        super().__init__(BLOCK, num_host_blocks, enable_events=True, **options)
        self.host_pool = Pool(num_host_blocks, enable_events=True)
        self.pinned = {}  # By request: the host blocks of its hit, and their place.
        self.in_flight = set()
        self.finished = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self._unpin(request)
        num, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num:
            place = num_computed_tokens // BLOCK
            keys = request.block_keys[place : place + num // BLOCK]
            blocks = [self.host_pool.get_cached_block(key) for key in keys]
            self.host_pool.touch(blocks)
            self.pinned[request.request_id] = blocks, place
        return num, is_async

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        super().update_state_after_alloc(request, block_ids, 0)
        if num_external_tokens:
            blocks, place = self.pinned[request.request_id]
            copy = Copy(block_ids[place:][: len(blocks)], [b.block_id for b in blocks])
            self.host_pool.touch(blocks)
            self.device_pool.touch(
                [self.device_pool.blocks[i] for i in copy.device_blocks]
            )
            self.loads[request.request_id] = Load(copy)
        self._unpin(request)

    def request_finished(self, request):
        store = self.stores.get(request.request_id)
        if store is not None:
            picked = []
            self._scan(store, None, picked, self.host_pool.num_free)
            if picked:
                ids = [block.block_id for block in picked]
                self.finished.append(Copy(ids, self._take_host_blocks(picked)))
        self._unpin(request)
        super().request_finished(request)

    def has_pending_stores(self):
        return bool(self.finished or self.copies)

    def _unpin(self, request):
        blocks, _ = self.pinned.pop(request.request_id, ((), 0))
        self.host_pool.free_blocks(blocks)

    def _scan_requests(self, output):
        stores, request_ids = super()._scan_requests(output)
        for copy in self.finished:
            stores.device_blocks += copy.device_blocks
            stores.host_blocks += copy.host_blocks
        self.finished = []
        return stores, request_ids

    def _scan(self, store, this_step, picked, num_free):
        ready = store.request.num_computed_tokens // BLOCK
        ids = store.device_blocks[store.num_seen : ready]
        for block_id in ids if num_free > 0 else ():
            block = self.device_pool.blocks[block_id]
            is_new = block.key is not None and block_id not in self.in_flight
            if is_new and self.host_pool.get_cached_block(block.key) is None:
                if num_free == 0:
                    break
                num_free -= 1
                picked.append(block)
            store.num_seen += 1
        return num_free

    def _take_host_blocks(self, device_blocks):
        host_blocks = self.host_pool.get_new_blocks(len(device_blocks))
        self.device_pool.touch(device_blocks)
        if not self.lazy:
            self.in_flight.update(block.block_id for block in device_blocks)
        return [block.block_id for block in host_blocks]

    def _end_store(self, event):
        copy = self.copies[event]
        self.in_flight.difference_update(copy.device_blocks)
        for source, target in zip(copy.device_blocks, copy.host_blocks, strict=True):
            key = self.device_pool.blocks[source].key
            self.host_pool.blocks[target].key = key
            self.host_pool.events.append(PoolEvent((key,), "CPU", removed=False))
        super()._end_store(event)


class Request(SimpleNamespace):
    """A request of one group with full blocks, for both schedulers."""

    num_output_placeholders = 0
    skip_reading_prefix_cache = False
    lora_request = None
    mm_features = ()
    cache_salt = prompt_embeds = None

    @property
    def all_token_ids(self):
        return [0] * self.num_tokens


class Schedulers:
    """A scheduler of vLLM's and the twin of it, each with a device pool of its own.

    This is the part of vLLM's engine core that calls them: requests are admitted, run,
    preempted, aborted and finished, transfers end in their order, and both pools hand
    out the same blocks.
    """

    def __init__(self, rng, *, num_device, num_host, lazy, world_size):
        from vllm.v1.core.block_pool import BlockPool as VllmPool
        from vllm.v1.core.sched.output import CachedRequestData

        self.rng, self.lazy, self.world_size = rng, lazy, world_size
        self.cached_data = CachedRequestData
        self.theirs = make_vllm_scheduler(num_device, num_host, lazy, world_size)
        self.ours = Twin(
            num_host, lazy=lazy, max_num_batched_tokens=16, world_size=world_size
        )
        self.their_pool = VllmPool(num_device, True, BLOCK, True)
        self.our_pool = Pool(num_device, enable_events=True)
        self.theirs.bind_gpu_block_pool(self.their_pool)
        self.ours.bind_device_block_pool(self.our_pool)
        self.waiting, self.loading, self.running = [], {}, {}
        self.stores, self.loads, self.preempted = [], [], set()
        self.scheduled_before = set()
        self.number = 0
        self.counts = Counter()

    def free(self, block_ids):
        self.their_pool.free_blocks([self.their_pool.blocks[i] for i in block_ids])
        self.our_pool.free_blocks([self.our_pool.blocks[i] for i in block_ids])

    def allocate(self, num):
        theirs = [block.block_id for block in self.their_pool.get_new_blocks(num)]
        assert [block.block_id for block in self.our_pool.get_new_blocks(num)] == theirs
        return theirs

    def add(self):
        """Make a request that shares its first blocks with others."""
        length, fork = self.rng.randrange(1, 9), self.rng.choice((3, 5, 9))
        path = self.rng.choice("ab") * fork + self.rng.choice("cd") * length
        keys = [hash_of(path[: end + 1]) for end in range(length)]
        self.number += 1
        extra = self.rng.randrange(BLOCK)
        self.waiting.append(
            Request(
                request_id=f"r{self.number}",
                block_hashes=keys,
                block_keys=[key + bytes(4) for key in keys],
                num_tokens=length * BLOCK + extra,
                num_prompt_tokens=length * BLOCK + extra,
                num_computed_tokens=0,
                block_ids=[],
            )
        )

    def admit(self):
        if not self.waiting or len(self.running) + len(self.loading) > 3:
            return
        request = self.waiting[0]
        max_blocks = (request.num_tokens - 1) // BLOCK
        hits = []
        for key in request.block_keys[:max_blocks]:
            theirs = self.their_pool.get_cached_block(key[:-4], [0])
            ours = self.our_pool.get_cached_block(key)
            assert (theirs and theirs[0].block_id) == (ours and ours.block_id)
            if ours is None:
                break
            hits.append(ours.block_id)
        num_local = len(hits) * BLOCK
        offer = self.theirs.get_num_new_matched_tokens(request, num_local)
        assert self.ours.get_num_new_matched_tokens(request, num_local) == offer
        num, _ = offer
        if self.rng.random() < 0.1:
            return  # There is no room for it yet, say: it asks again.
        wanted = -(-request.num_tokens // BLOCK) - len(hits)
        num_idle = sum(self.our_pool.blocks[i].ref_cnt == 0 for i in hits)
        if wanted > self.our_pool.num_free - num_idle:
            return
        self.their_pool.touch([self.their_pool.blocks[i] for i in hits])
        self.our_pool.touch([self.our_pool.blocks[i] for i in hits])
        request.block_ids = hits + self.allocate(wanted)
        request.num_computed_tokens = num_local
        tables = (list(request.block_ids),)
        blocks = SimpleNamespace(get_block_ids=lambda: tables)
        self.theirs.update_state_after_alloc(request, blocks, num)
        self.ours.update_state_after_alloc(request, list(request.block_ids), num)
        self.waiting.pop(0)
        if num:
            self.loading[request.request_id] = request, num
            self.counts["loaded"] += num
        else:
            self.running[request.request_id] = request

    def step(self):
        """Schedule some of the running requests, and compute their tokens."""
        names = [name for name in self.running if self.rng.random() < 0.8]
        new = [name for name in names if name not in self.scheduled_before]
        old = [name for name in names if name in self.scheduled_before]
        num = dict.fromkeys(new + old, 1)
        their_output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=name, block_ids=(list(self.running[name].block_ids),)
                )
                for name in new
            ],
            scheduled_cached_reqs=self.cached_data(
                req_ids=old,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * len(old),
                num_computed_tokens=[0] * len(old),
                num_output_tokens=[0] * len(old),
            ),
            num_scheduled_tokens=num,
            preempted_req_ids=self.preempted,
            finished_req_ids=set(),
            kv_connector_block_state=None,
        )
        theirs = self.theirs.build_connector_meta(their_output)
        ours = self.ours.build_connector_meta(
            SchedulerOutput(num, preempted_req_ids=tuple(self.preempted))
        )
        assert (theirs.store_event, theirs.load_event, theirs.need_flush) == (
            ours.store_event,
            ours.load_event,
            ours.need_flush,
        )
        assert theirs.store_gpu_blocks == ours.store_device_blocks
        assert theirs.store_cpu_blocks == ours.store_host_blocks
        assert theirs.load_gpu_blocks == ours.load_device_blocks
        assert theirs.load_cpu_blocks == ours.load_host_blocks
        assert theirs.load_event_to_reqs == ours.load_event_to_reqs
        self.preempted = set()
        self.scheduled_before.update(names)
        self.counts["stored"] += len(theirs.store_gpu_blocks)
        if theirs.store_event >= 0:
            self.stores += [theirs.store_event] * self.world_size
        if theirs.load_event >= 0:
            self.loads.append(list(theirs.load_event_to_reqs[theirs.load_event]))
        for name in names:
            request = self.running[name]
            num_new = self.rng.randrange(1, 3 * BLOCK)
            self.compute(request, request.num_computed_tokens + num_new)

    def compute(self, request, num_tokens):
        request.num_computed_tokens = min(num_tokens, request.num_tokens)
        full = request.num_computed_tokens // BLOCK
        for block_id, key in zip(
            request.block_ids[:full], request.block_keys, strict=False
        ):
            ours = self.our_pool.blocks[block_id]
            theirs = self.their_pool.blocks[block_id]
            assert theirs.block_hash == ours.key
            if ours.key is None:
                self.our_pool.cache_block(ours, key)
                self.their_pool._insert_block_hash(key, theirs, num_tokens=BLOCK)

    def report(self):
        """Some workers report the next store, or all of them the next load."""
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        done, loaded = [], []
        if self.stores:
            done = self.stores[: self.rng.randrange(1, 1 + self.world_size)]
            done = [event for event in done if event == done[0]]
            del self.stores[: len(done)]
        if self.loads and self.rng.random() < 0.5:
            loaded = self.loads.pop(0)
        meta = SimpleCPUOffloadWorkerMetadata({e: done.count(e) for e in done})
        self.theirs.update_connector_output(
            SimpleNamespace(finished_recving=loaded, kv_connector_worker_meta=meta)
        )
        self.ours.update_connector_output(
            ConnectorOutput(tuple(loaded), completed_store_events=tuple(done))
        )
        for name in loaded:
            request, num = self.loading.pop(name, (None, 0))
            if request is not None:
                self.compute(request, request.num_computed_tokens + num)
                self.running[name] = request

    def finish(self):
        done = [
            name
            for name, request in self.running.items()
            if request.num_computed_tokens == request.num_tokens
        ]
        if done:
            self.end(self.running.pop(self.rng.choice(done)))

    def abort(self):
        alive = [*self.waiting, *self.running.values()]
        alive += [request for request, _ in self.loading.values()]
        if alive and self.rng.random() < 0.1:
            request = self.rng.choice(alive)
            if request in self.waiting:
                self.waiting.remove(request)
            self.loading.pop(request.request_id, None)
            self.running.pop(request.request_id, None)
            self.counts["aborted"] += 1
            self.end(request)

    def end(self, request):
        self.theirs.request_finished_all_groups(request, (request.block_ids,))
        self.ours.request_finished(request)
        self.free(request.block_ids[::-1])

    def preempt(self):
        if self.running and self.rng.random() < 0.3 and not self.preempted:
            name = self.rng.choice(list(self.running))
            request = self.running.pop(name)
            self.free(request.block_ids[::-1])
            request.block_ids, request.num_computed_tokens = [], 0
            self.preempted = {name}
            self.scheduled_before.discard(name)
            self.counts["preempted"] += 1
            self.step()
            self.waiting.insert(0, request)

    def forget(self):
        """Evict all idle blocks of the device."""
        if self.rng.random() < 0.3:
            idle = [block.block_id for block in self.our_pool.free_queue]
            self.their_pool.evict_blocks(idle)
            self.our_pool.evict_blocks(idle)

    def reset(self):
        """Abort everything and reset both tiers."""
        if self.rng.random() < 0.05:
            for request in [*self.waiting, *self.running.values()]:
                self.end(request)
            for request, _ in self.loading.values():
                self.end(request)
            self.waiting, self.loading, self.running = [], {}, {}
            self.step()
            while self.stores or self.loads:
                self.report()
            assert self.our_pool.reset_prefix_cache()
            assert self.their_pool.reset_prefix_cache()
            assert self.ours.host_pool.reset_prefix_cache()
            assert self.theirs.reset()
            self.ours.cursor = None
            self.counts["resets"] += 1

    def check(self):
        theirs = seen(self.theirs.take_events(), "CPU")
        assert as_vllm(self.ours.take_events()) == theirs
        self.counts["evicted"] += sum(removed for _, removed in theirs)
        ours = as_vllm(e for e in self.our_pool.take_events() if e.removed)
        assert ours == seen(self.their_pool.take_events(), "GPU")
        assert self.ours.has_pending_stores() == self.theirs.has_pending_stores()
        for ours, theirs in (
            (self.our_pool, self.their_pool),
            (self.ours.host_pool, self.theirs.cpu_block_pool),
        ):
            assert [(b.block_id, b.key) for b in ours.free_queue] == [
                (b.block_id, b.block_hash)
                for b in theirs.free_block_queue.get_all_free_blocks()
            ]

    def run(self, num_calls):
        calls = [
            *[self.add, self.admit, self.admit, self.step, self.step, self.report],
            *[self.finish, self.finish, self.abort, self.preempt],
            *[self.forget, self.reset],
        ]
        for _ in range(num_calls):
            self.rng.choice(calls)()
            self.check()


def hash_of(path):
    return hashlib.sha256(path.encode()).digest()


def as_vllm(events):
    """Events of the twin as vLLM's are compared: keys as vLLM's events have them."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    return [
        ([maybe_convert_block_hash(key[:-4]) for key in event.keys], event.removed)
        for event in events
    ]


def seen(events, medium):
    """Return the hashes of each event of vLLM's, and whether it removes them."""
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

    changes = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            changes.append(([], True))
        else:
            assert event.medium == medium
            changes.append((event.block_hashes, isinstance(event, BlockRemoved)))
    return changes


def make_vllm_scheduler(num_device, num_host, lazy, world_size):
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
    )
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
    )
    size = num_device * BLOCK * 128
    caches = KVCacheConfig(
        num_blocks=num_device,
        kv_cache_tensors=tensors_of(["layer"], size, num_device),
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    config = SimpleNamespace(
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, world_size=world_size
        ),
        speculative_config=None,
        model_config=SimpleNamespace(max_model_len=64),
        max_in_flight_tokens=16,
        num_prefill_lookahead_tokens=0,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
    )
    num_bytes = num_host * size // num_device
    return SimpleCPUOffloadScheduler(config, caches, num_bytes, BLOCK, BLOCK, lazy)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_the_twin_scheduler_stores_and_loads_what_vllms_does(lazy):
    counts = Counter()
    for num_device, num_host, world_size in ((40, 64, 1), (20, 8, 2), (28, 20, 1)):
        schedulers = Schedulers(
            random.Random(f"{lazy}/{num_device}"),
            num_device=num_device,
            num_host=num_host,
            lazy=lazy,
            world_size=world_size,
        )
        schedulers.run(NUM_CALLS)
        counts += schedulers.counts
    names = "loaded", "stored", "evicted", "preempted", "aborted", "resets"
    assert min(counts[name] for name in names) > 20, counts


def test_the_docs_have_the_table_of_differences():
    rows = "".join(f"| {new} | {old} |\n" for new, old in DIFFERENCES.items())
    assert rows in DOCS.read_text(encoding="utf-8")
