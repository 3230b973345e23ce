"""An engine as a scheduler sees it, which knows what every block contains.

Keys replace bytes. A store copies the keys of device blocks when it is issued, and the
host has them when it completes; a request that computes must find the keys of its
prefix in its blocks.
"""

import dataclasses
import time
from collections import deque

import jax
import numpy as np
import pytest

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, SlidingWindow, as_groups
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK
from tests.reference.longest import first_read

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
        """The block table as the scheduler takes it."""
        return self.tables if len(self.tables) > 1 else self.tables[0]


def make_keys(*path, group=0):
    """Keys of a prefix: a block's key depends on all blocks before it."""
    parts = range(1, len(path) + 1)
    return [repr((group, path[:n])).encode().ljust(32, b".")[-32:] for n in parts]


def make_request(name, *path, extra_tokens=1, groups=FULL):
    """A request of full blocks of the first group, and some more tokens."""
    num_tokens = len(path) * groups[0].block_size + extra_tokens
    keys = []
    for number, spec in enumerate(groups):
        # Each block of any group has the number of its block in the first group.
        blocks = range(len(path) * groups[0].block_size // spec.block_size)
        own = [path[n * spec.block_size // groups[0].block_size] for n in blocks]
        keys.append(make_keys(*own, group=number))
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
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.device = {}
        self.host = {}
        self.stores = deque()
        self.loads = deque()
        self.requests = {}

    def request(self, name, *path, **more):
        return make_request(name, *path, groups=self.groups, **more)

    def find(self, request):
        """The prefix of a request on the device."""
        most = request.num_tokens - 1
        if len(self.groups) > 1 or not isinstance(self.groups[0], FullAttention):
            return find_cached_prefix(
                self.pool, self.groups, request.block_keys_by_group, most
            )
        (spec,) = self.groups
        found = self.pool.find_prefix(request.block_keys[: most // spec.block_size])
        return len(found) * spec.block_size, [found]

    def offer(self, request):
        """The tokens that the scheduler offers; nothing is held on the device."""
        num_tokens, _ = self.find(request)
        return self.scheduler.get_num_new_matched_tokens(request, num_tokens)

    def hit(self, *path):
        """The number of prefix blocks on both tiers together."""
        request = self.request("?", *path)
        num_tokens, _ = self.find(request)
        more, _ = self.scheduler.get_num_new_matched_tokens(request, num_tokens)
        self.scheduler.request_finished(request)
        return (num_tokens + more) // self.groups[0].block_size

    def admit(self, request, take=None):
        """Allocate the blocks of a request.

        Returns the tokens that it accepts of the offer, at most `take`; None if it must
        ask again.
        """
        num_local, tables = self.find(request)
        for table in tables:
            self.pool.touch(table)
        offer, takes_time = self.scheduler.get_num_new_matched_tokens(
            request, num_local
        )
        if offer is None:
            for table in tables:
                self.pool.free(table[::-1])
            return None
        if take is not None:
            offer = min(offer, take)
        total = num_local + offer
        request.tables = []
        for spec, table in zip(self.groups, tables, strict=True):
            first = first_read(spec, total)
            num = -(-request.num_tokens // spec.block_size)
            skipped = [NULL_BLOCK] * max(first - len(table), 0)
            table += skipped
            request.tables.append(table + self.pool.allocate(num - len(table)))
        request.num_computed_tokens = num_local
        after = self.scheduler.update_state_after_alloc(request, request.table, offer)
        # This engine allocates no block that the next token does not read.
        assert after == request.tables
        self.requests[request.request_id] = request
        request.loading_tokens = offer
        if offer and not takes_time:
            # Copies are done when the step's model runs.
            request.num_computed_tokens += offer
            request.loading_tokens = 0
        return offer

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
            for host, parts in zip(meta.store_host_blocks, blocks, strict=True):
                copies[host] = [self.device[part] for part in parts]
                self.host.pop(host, None)  # Unreadable until the bytes have arrived.
            self.stores.append((meta.store_event, copies))
        for source, target in zip(
            meta.copy_from_blocks, meta.copy_to_blocks, strict=True
        ):
            assert source not in meta.copy_to_blocks
            self.device[target] = self.device[source]
        if meta.load_event != NO_EVENT:
            blocks = np.array(meta.load_device_blocks).reshape(-1, rows).tolist()
            copies = {}
            for host, parts in zip(meta.load_host_blocks, blocks, strict=True):
                for part, key in zip(parts, self.host[host], strict=True):
                    if part != NO_BLOCK:
                        assert part not in copies
                        copies[part] = key
            if meta.load_in_step:
                self.device |= copies  # By the program of this step.
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

    def store_arrives(self, ok=True):
        event, copies = self.stores.popleft()
        if ok:
            self.host |= copies
        events = (event,) * self.rules.world_size
        self.scheduler.update_connector_output(
            ConnectorOutput(completed_store_events=events)
            if ok
            else ConnectorOutput(failed_store_events=events)
        )

    def load_arrives(self, ok=True):
        names, copies = self.loads.popleft()
        if ok:
            self.device |= copies
        names_of_all = tuple(names) * self.rules.world_size
        self.scheduler.update_connector_output(
            ConnectorOutput(finished_recving=names_of_all)
            if ok
            else ConnectorOutput(failed_recving=names_of_all)
        )
        for name in names:
            request = self.requests.get(name)
            if request is not None:
                request.num_computed_tokens += request.loading_tokens * ok
                request.loading_tokens = 0
                self.check_prefix(request)
                self.cache(request)

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
        """Complete all transfers."""
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

    def fill_host(self, num_blocks):
        """Store new blocks, four at a time."""
        while num_blocks:
            num = min(num_blocks, 4)
            first = len(self.host) + 1000 * num_blocks
            self.run(make_request(f"filler-{first}", *range(first, first + num)))
            num_blocks -= num
        self.forget_device()

    def forget_device(self):
        """Evict all cached device blocks."""
        self.pool.free(self.pool.allocate(self.pool.num_free))

    def check_nothing_leaked(self):
        assert not self.requests
        self.settle()
        assert not self.scheduler.has_pending_stores()
        assert not self.scheduler.has_pending_loads()
        assert self.pool.num_free == self.pool.num_blocks - 1
        self.pool.check()
        ref_cnt = np.asarray(self.scheduler._manager.executor.state.ref_cnt)
        assert not ref_cnt.any()


def make_rig(mode="eager", **more):
    """In lazy mode every step looks at all that the device could evict."""
    return Rig(mode=mode, max_num_batched_tokens=NUM_BLOCKS * BLOCK_SIZE, **more)


def state_of(rig):
    """All that the two tiers know."""
    states = rig.pool.state, rig.scheduler._manager.executor.state
    return jax.tree.map(np.array, states), rig.scheduler.stats


def on_host(rig):
    """The keys in host memory; of rows of blocks, the rows."""
    rows = [row[0] if len(row) == 1 else tuple(row) for row in rig.host.values()]
    assert len(set(rows)) == len(rows)
    return set(rows)


def check_refused(rig, match, function, *arguments):
    before = state_of(rig)
    with pytest.raises(ValueError, match=match):
        function(*arguments)
    jax.tree.map(np.testing.assert_array_equal, before[0], state_of(rig)[0])
    assert before[1] == rig.scheduler.stats
