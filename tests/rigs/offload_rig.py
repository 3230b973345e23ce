"""An engine as a scheduler sees it, which knows what every block contains.

Keys replace bytes. A store copies the keys of device blocks when it is issued, and the
host has them when it completes; a request that computes must find the keys of its
prefix in its blocks.
"""

import dataclasses
import time
from collections import deque
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import OffloadConfig
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    ConnectorOutput,
    SchedulerOutput,
    TierReport,
)
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.scheduling.worker import storage_worker
from jaxkv.search.groups import FullAttention, SlidingWindow, as_groups
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.reference.longest import first_read
from tests.rigs.waiting import wait_for

BLOCK_SIZE = 4
# The same for both tiers and nearly all tests, since each size compiles again.
NUM_BLOCKS = 16
FULL = (FullAttention(BLOCK_SIZE),)
HYBRID = (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 2 * BLOCK_SIZE))

modes = pytest.mark.parametrize("mode", ["eager", "lazy"])


@dataclasses.dataclass(eq=False)
class FakeRequest:
    request_id: str
    block_keys_by_group: list
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    tables: list = dataclasses.field(default_factory=list)
    loading_tokens: int = 0

    @property
    def block_keys(self):
        return self.block_keys_by_group[0]

    @property
    def block_ids(self):
        return self.tables[0]

    @property
    def table(self):
        return self.tables if len(self.tables) > 1 else self.tables[0]


def make_keys(*path, group=0):
    """Keys of a prefix: a block's key depends on all blocks before it."""
    ends = range(1, len(path) + 1)
    return [repr((group, path[:n])).encode().ljust(32, b".")[-32:] for n in ends]


def make_request(name, *path, extra_tokens=1, groups=FULL):
    """A request of full blocks of the first group, and some more tokens."""
    num_tokens = len(path) * groups[0].block_size + extra_tokens
    keys = []
    for number, spec in enumerate(groups):
        # Each block of any group has the number of its block in the first group.
        blocks = range(len(path) * groups[0].block_size // spec.block_size)
        numbers = [path[n * spec.block_size // groups[0].block_size] for n in blocks]
        keys.append(make_keys(*numbers, group=number))
    return FakeRequest(name, keys, num_tokens, num_tokens)


class Rig:
    """An engine that tests drive one call at a time."""

    def __init__(
        self,
        *,
        groups=BLOCK_SIZE,
        device_blocks=NUM_BLOCKS,
        host_blocks=NUM_BLOCKS,
        policy="lru",
        clock=time.perf_counter,
        recorder=None,
        num_storage_blocks=0,
        is_private=None,
        policy_state=None,
        tiers_below=(),
        **rules,
    ):
        self.groups = as_groups(groups)
        self.pool = DeviceBlockPool(device_blocks)
        self.rules = OffloadRules(**rules)
        self.scheduler = OffloadScheduler(
            self.groups,
            host_blocks,
            policy,
            enable_events=True,
            rules=self.rules,
            clock=clock,
            recorder=recorder,
            num_storage_blocks=num_storage_blocks,
            is_private=is_private,
            policy_state=policy_state,
            tiers_below=tiers_below,
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.device = {}
        self.host = {}
        self.stores = deque()
        self.loads = deque()
        self.requests = {}

    @property
    def host_tier(self):
        """The index of the host, to prepare a state; the only private name used."""
        return self.scheduler._manager

    def request(self, name, *path, **options):
        return make_request(name, *path, groups=self.groups, **options)

    def find(self, request):
        max_tokens = request.num_tokens - 1
        if len(self.groups) > 1 or not isinstance(self.groups[0], FullAttention):
            return find_cached_prefix(
                self.pool, self.groups, request.block_keys_by_group, max_tokens
            )
        (spec,) = self.groups
        keys = request.block_keys[: max_tokens // spec.block_size]
        prefix = self.pool.find_prefix(keys)
        return len(prefix) * spec.block_size, [prefix]

    def query(self, request, num_computed_tokens=0):
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def offer(self, request):
        return self.query(request, self.find(request)[0])

    def take(self, request, tables, num_tokens):
        update = self.scheduler.update_state_after_alloc
        return update(request, tables, num_tokens)

    def hit(self, *path):
        """The number of prefix blocks on both tiers together."""
        request = self.request("?", *path)
        num_tokens, _ = self.find(request)
        num_external, _ = self.query(request, num_tokens)
        self.scheduler.request_finished(request)
        return (num_tokens + num_external) // self.groups[0].block_size

    def admit(self, request, take=None):
        """Allocate blocks; return the accepted tokens, None if it must ask again."""
        num_local, tables = self.find(request)
        hits = [block for table in tables for block in table[::-1]]
        self.pool.touch(hits)
        offer, takes_time = self.query(request, num_local)
        if offer is None:
            self.pool.free(hits)
            return None
        if take is not None:
            offer = min(offer, take)
        total = num_local + offer
        num_missing = []
        for spec, table in zip(self.groups, tables, strict=True):
            table += [NULL_BLOCK] * (first_read(spec, total) - len(table))
            num = -(-request.num_tokens // spec.block_size)
            num_missing.append(num - len(table))
        if sum(num_missing) > self.pool.num_free:
            self.pool.free(hits)
            return self.give_up(request)
        pairs = zip(tables, num_missing, strict=True)
        request.tables = [table + self.pool.allocate(num) for table, num in pairs]
        request.num_computed_tokens = num_local
        after = self.scheduler.update_state_after_alloc(request, request.table, offer)
        # This engine allocates no block that the next token does not read.
        assert after == request.tables
        self.requests[request.request_id] = request
        request.loading_tokens = offer
        if offer and not takes_time:
            # The next token reads none of these blocks.
            request.num_computed_tokens += offer
            request.loading_tokens = 0
        return offer

    def give_up(self, request):
        raise AssertionError(f"the device has no room for {request.request_id}")

    def step(self, preempted=(), *, tokens=None, **blocks):
        """Start a step's transfers, then compute blocks or tokens."""
        scheduled = {name: n * BLOCK_SIZE for name, n in blocks.items()}
        scheduled |= tokens or {}
        meta = self.scheduler.build_connector_meta(
            SchedulerOutput(scheduled, preempted_req_ids=preempted)
        )
        rows = self.rules.blocks_per_host_block
        if meta.store_event != NO_EVENT:
            blocks = np.array(meta.store_device_blocks).reshape(-1, rows).tolist()
            copies = {}
            for host, row in zip(meta.store_host_blocks, blocks, strict=True):
                copies[host] = [self.device[block] for block in row]
                self.host.pop(host, None)  # Unreadable until the bytes have arrived.
            self.stores.append((meta.store_event, copies))
        if meta.load_event != NO_EVENT:
            blocks = np.array(meta.load_device_blocks).reshape(-1, rows).tolist()
            copies = {}
            for host, row in zip(meta.load_host_blocks, blocks, strict=True):
                for block, key in zip(row, self.host[host], strict=True):
                    if block != NO_BLOCK:
                        assert block not in copies
                        copies[block] = key
            names = meta.load_event_to_reqs[meta.load_event]
            self.loads.append((names, copies))
        for name, num_tokens in scheduled.items():
            self.compute(self.requests[name], num_tokens)
        return meta

    def compute(self, request, num_tokens):
        assert not request.loading_tokens, "computed before its prefix was there"
        self.check_prefix(request)
        first = request.num_computed_tokens
        last = min(first + num_tokens, request.num_tokens)
        request.num_computed_tokens = last
        for spec, table, keys in zip(
            self.groups, request.tables, request.block_keys_by_group, strict=True
        ):
            for i in range(first // spec.block_size, last // spec.block_size):
                self.device[table[i]] = keys[i]
        self.cache(request)

    def check_prefix(self, request):
        """Check that the next token reads that request's blocks."""
        for spec, table, keys in zip(
            self.groups, request.tables, request.block_keys_by_group, strict=True
        ):
            end = request.num_computed_tokens // spec.block_size
            first = first_read(spec, end * spec.block_size)
            assert [self.device[i] for i in table[first:end]] == keys[first:end]

    def cache(self, request):
        for spec, table, keys in zip(
            self.groups, request.tables, request.block_keys_by_group, strict=True
        ):
            end = request.num_computed_tokens // spec.block_size
            # A block that a window has reused contains its last keys.
            held = dict(zip(table[:end], keys[:end], strict=True))
            held.pop(NULL_BLOCK, None)
            self.pool.cache(list(held), list(held.values()))

    def report(self, **fields):
        """Report as the worker does; `below` may be a single tier's report."""
        if isinstance(fields.get("below"), TierReport):
            fields["below"] = (fields["below"],)
        return self.scheduler.update_connector_output(ConnectorOutput(**fields))

    def store_arrives(self, ok=True):
        event, copies = self.stores.popleft()
        if ok:
            self.host |= copies
        field = "completed_store_events" if ok else "failed_store_events"
        self.report(**{field: (event,) * self.rules.world_size})

    def load_arrives(self, ok=True):
        names, copies = self.loads.popleft()
        if ok:
            self.device |= copies
        field = "finished_recving" if ok else "failed_recving"
        self.report(**{field: tuple(names) * self.rules.world_size})
        for name in names:
            request = self.requests.get(name)
            if request is not None:
                request.num_computed_tokens += request.loading_tokens * ok
                request.loading_tokens = 0
                self.check_prefix(request)
                self.cache(request)

    def load(self, request, ok=True):
        self.admit(request)
        meta = self.step()
        self.load_arrives(ok)
        return meta

    def free(self, request):
        for table in request.tables:
            self.pool.free(table[::-1])
        request.tables = []

    def finish(self, name):
        request = self.requests.pop(name)
        self.scheduler.request_finished(request)
        self.free(request)

    def preempt(self, name, *, silently=False):
        """Preempt a request; report it only in the next step's output."""
        request = self.requests.pop(name)
        if not silently:
            self.scheduler.request_preempted(request)
        self.free(request)
        request.num_computed_tokens = request.loading_tokens = 0

    def settle(self):
        for _ in range(50):
            self.step()
            if not self.stores and not self.loads:
                break
            while self.stores:
                self.store_arrives()
            while self.loads:
                self.load_arrives()

    def run(self, request):
        """Run a request from start to end, and complete its stores."""
        name = request.request_id
        self.admit(request)
        if request.loading_tokens:
            self.step()
            self.load_arrives()
        self.step(tokens={name: request.num_tokens})
        # Another step, which stores the last blocks too.
        self.step(tokens={name: 1})
        self.finish(name)
        self.settle()

    def store(self, *path, name="stored"):
        """Store a prefix on the host; clear the device."""
        self.run(self.request(f"{name} {path}", *path))
        self.forget_device()

    def fill_host(self, num_blocks):
        while num_blocks:
            num = min(num_blocks, 4)
            first = len(self.host) + 1000 * num_blocks
            self.run(make_request(f"filler-{first}", *range(first, first + num)))
            num_blocks -= num
        self.forget_device()

    def forget_device(self):
        self.pool.free(self.pool.allocate(self.pool.num_free))

    def end(self):
        for name in list(self.requests):
            self.finish(name)
        self.check_nothing_leaked()

    def check_nothing_leaked(self):
        assert not self.requests
        self.settle()
        assert not self.scheduler.has_pending_stores()
        assert not self.scheduler.has_pending_loads()
        assert self.pool.num_free == self.pool.num_blocks - 1
        self.pool.check()
        assert not any(self.host_tier.snapshot().ref_cnt.values())


def make_rig(mode="eager", **options):
    """In lazy mode every step looks at all that the device could evict."""
    return Rig(mode=mode, max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE, **options)


def state_of(rig):
    """Return the state of both tiers, the counts and the work in flight."""
    states = rig.pool.state, rig.host_tier.executor.state
    leaves = [leaf.tolist() for leaf in jax.tree.leaves(states)]
    return leaves, rig.scheduler.stats, rig.scheduler.in_transit


def on_host(rig):
    """The keys in host memory, or rows of keys if a host block holds several."""
    rows = [row[0] if len(row) == 1 else tuple(row) for row in rig.host.values()]
    assert len(set(rows)) == len(rows)
    return set(rows)


def check_refused(rig, match, function, *arguments, error=ValueError):
    """Check that a call is refused, and changes nothing."""
    before = state_of(rig)
    with pytest.raises(error, match=match):
        function(*arguments)
    assert state_of(rig) == before, match


class StoreRig(Rig):
    """An engine over a store that the test plays.

    The store has the keys `there`, which the engine does not know.
    """

    def __init__(self, *there, **options):
        named = {"num_storage_blocks": 16, "storage_write": "through"}
        super().__init__(**named | options)
        self.there = set(there)
        self.unanswered, self.written = [], []

    def step(self, *args, **blocks):
        meta = super().step(*args, **blocks)
        self.unanswered += meta.below
        return meta

    def fetches(self):
        """Run a step; return its fetches."""
        return [batch for moves in self.step().below for batch in moves.fetches]

    def probes(self):
        assert not any(moves.fetches and moves.probes for moves in self.unanswered)
        return [probe for moves in self.unanswered for probe in moves.probes]

    def answer(self, ok=True):
        """Report every outstanding storage task as done."""
        for probe in self.probes():
            oks = tuple(ok and key in self.there for run in probe.runs for key in run)
            self.report_below(probed=((probe.event, oks),))
        for moves in self.unanswered:
            fetched, written = [
                tuple((batch.event, (ok,) * len(batch.keys)) for batch in batches)
                for batches in (moves.fetches, moves.writes)
            ]
            for batch in moves.fetches:
                pairs = zip(batch.keys, batch.upper_blocks, strict=True)
                self.host |= {row: [key] for key, row in pairs}
            self.written += [key for batch in moves.writes for key in batch.keys]
            if fetched or written:
                self.report_below(fetched=fetched, written=written)
        self.unanswered.clear()

    def report_below(self, **fields):
        self.report(below=TierReport(**fields))

    def has(self, *keys):
        """Report that a listing found these blocks in the store."""
        self.report_below(found=keys)

    def found(self, request):
        """Query until there is an offer; return its blocks and the number of probes."""
        num = 0
        while (offer := self.offer(request))[0] is None:
            num += sum(len(moves.probes) for moves in self.step().below)
            assert num < 9, "it asks without end"
            self.answer()
        return offer[0] // BLOCK_SIZE, num

    def serve(self, name, *path):
        """Serve a request, and complete its writes."""
        self.run(make_request(name, *path))
        for _ in range(20):
            self.answer()
            self.step()
        assert not self.scheduler.has_pending_stores()


class StoredEngine:
    """The parts of an engine with bytes, over the store of a URL, or over `store`."""

    OBJECT_BYTES = 192 + BLOCK_SIZE * 4

    def __init__(self, url, *, store=None, pool=None, clock=time.monotonic, **config):
        named = {"num_host_blocks": 256, "storage_bytes": "1MiB"}
        named |= {"storage_write": "through", "storage": str(url)}
        config = OffloadConfig(**named | config)
        if pool is None:
            pool = jnp.arange(32.0 * BLOCK_SIZE).reshape(32, BLOCK_SIZE, 1, 1)
        self.pool = [pool]
        self.engine = config.make_engine(self.pool)
        opened = storage_worker.open_store
        with mock.patch.object(
            storage_worker, "open_store", lambda url: store or opened(url)
        ):
            self.worker = config.make_worker(self.engine, clock=clock)
        self.storage = self.worker.storage
        num = self.storage.num_blocks(config.storage_bytes)
        try:
            self.scheduler = config.make_scheduler(
                BLOCK_SIZE, num_storage_blocks=num, policy_clock=clock
            )
        except BaseException:
            self.storage.close()
            raise
        self.blocks = DeviceBlockPool(len(pool))
        self.scheduler.bind_device_block_pool(self.blocks)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.storage.close(5.0)

    def step(self, **scheduled):
        """Run a step; return what has ended."""
        meta = self.scheduler.build_connector_meta(SchedulerOutput(scheduled))
        self.pool = self.worker.start(meta, self.pool)
        return self.scheduler.update_connector_output(self.worker.poll())

    def write(self, keys):
        """Write blocks as if it had computed them."""
        host = self.scheduler._manager
        blocks = host.place(keys).block_ids
        self.engine.save(self.pool, range(1, 1 + len(keys)), blocks)
        self.pool, _ = self.engine.drain(self.pool)
        host.complete_store(keys)
        self.scheduler.below[0].record_stored(keys)
        while self.scheduler.has_pending_stores():
            self.step()
            time.sleep(1e-4)

    def list(self):
        """List the store, and delete the blocks beyond its bound."""
        self.scheduler.below[0].tier._is_listed = False
        self.storage._next_list_s = 0.0
        assert self.scheduler.wait_for_storage(self.worker, 60.0)
        self.step()
        storage_io = self.storage.storage_io
        wait_for(lambda: not storage_io._has_deletes)

    def num_found(self, request, between=lambda: time.sleep(1e-4)):
        """Query until there is an offer; return its blocks."""
        end_s = time.monotonic() + 60
        while True:
            num_tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            if num_tokens is not None:
                return num_tokens // BLOCK_SIZE
            assert time.monotonic() < end_s
            self.step()
            between()

    def bytes_of(self, keys):
        read = self.engine.read_host(self.scheduler._manager.find(keys).tolist())
        payload = np.empty(self.engine.host_payload_bytes, np.uint8)
        payloads = []
        for index in range(len(keys)):
            read.copy(index, payload)
            payloads.append(payload.tobytes())
        read.close()
        return payloads
