"""A model of all tiers, compared with the state of the library."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.keys.packed import key_from_foreign
from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, lazy_target_blocks
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.storage import STORAGE_MEDIUM
from jaxkv.types import NULL_BLOCK
from tests.rigs.offload_sim import Prefixes, SimWorker
from tests.rigs.sim_requests import SimStore
from tests.rigs.sim_storage import SimStorage


class Watcher:
    """Tracks the holders and contents of blocks, and the transfers in flight.

    Attributes:
        counts: Number of events, by name.
        digest: Digest of all plans of the scheduler.
    """

    def __init__(self, setup, rng):
        self.setup = setup
        self.rng = rng
        self.groups = setup.groups
        self.rules = rules = setup.rules
        self.factor = rules.blocks_per_host_block
        self.pool = DeviceBlockPool(setup.num_device_blocks)
        self.now_s = 0.0
        self.scheduler = OffloadScheduler(
            setup.groups,
            setup.num_host_blocks,
            setup.policy,
            enable_events=True,
            rules=rules,
            num_storage_blocks=setup.num_storage_blocks,
            clock=self.tick,
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.host = self.scheduler._manager
        self.workers = [
            SimWorker(setup.num_device_blocks, setup.num_host_blocks, self.factor)
            for _ in range(rules.world_size)
        ]
        self.prefixes = Prefixes()
        self.only_full = all(isinstance(g, FullAttention) for g in setup.groups)
        self.requests = {}
        self.waiting = []
        self.active = []
        self.device_keys = {}  # block -> key
        self.serving = {}  # key -> blocks, the first cached first
        self.ready = {}  # key -> host block
        self.loads = {}
        self.stores = {}
        self.preempted = []
        self.histories = [[0]]
        self.counts = Counter()
        self.digest = b""
        self.is_calm = False
        self.evicted = set()
        self.unwritten = set()  # blocks that the pool is not to cache
        self._num_requests = 0
        self.storage = SimStorage(self)

    def tick(self):
        """Tell the time; it goes on by some seconds each time that it is asked."""
        self.now_s += 1.75
        return self.now_s

    def key(self, group, prefix):
        key = self.prefixes.key((group, prefix), self.setup.key_length)
        self.storage.names[key_from_foreign(key)] = key
        return key

    def note_stores(self, meta):
        """Record the stores of a step; each must be of a full block."""
        blocks, hosts = meta.store_device_blocks, meta.store_host_blocks
        assert (meta.store_event == NO_EVENT) == (not hosts)
        if not hosts:
            return
        rows = []
        for row, host in enumerate(hosts):
            own = blocks[row * self.factor : (row + 1) * self.factor]
            for worker in self.workers:
                contents = [worker.read(block) for block in own]
                assert all(isinstance(content, tuple) for content in contents)
            (g, prefix), size = contents[-1], self.groups[contents[-1][0]].block_size
            for content in reversed(contents):
                assert content == (g, prefix), "a row of blocks is not of one prefix"
                assert self.prefixes.lengths[prefix] % size == 0, "a block is not full"
                for _ in range(size):
                    prefix = self.prefixes.parents[prefix]
            rows.append((self.key(*contents[-1]), host))
        self.stores[meta.store_event] = SimStore(rows, list(blocks))
        self.counts["sent"] += len(rows)

    def note_loads(self, meta):
        """Record the loads of a step; they must be the accepted ones."""
        names = meta.load_event_to_reqs.get(meta.load_event, ())
        assert (meta.load_event == NO_EVENT) == (not names)
        pairs, copies = [], []
        for name, load in list(self.loads.items()):
            if load.targets is None or load.event != NO_EVENT:
                continue
            if name in names:
                load.event = meta.load_event
                for (g, first), indices in load.rows.items():
                    row = [
                        load.targets[g, i] if i in indices else -1
                        for i in range(first, first + self.factor)
                    ]
                    pairs.append((tuple(row), load.hosts[g, first]))
            elif load.rows:
                assert self.rules.max_blocks_in_flight, f"the load of {name} waits"
                continue
            copies += [(src, load.targets[at]) for at, src in load.copies.items()]
            if name not in names:
                del self.loads[name]
            load.copies = {} if name in names else load.copies
        rows = [
            (meta.load_device_blocks[r * self.factor : (r + 1) * self.factor], host)
            for r, host in enumerate(meta.load_host_blocks)
        ]
        assert sorted(rows) == sorted(pairs)
        real = zip(meta.copy_from_blocks, meta.copy_to_blocks, strict=True)
        assert sorted(real) == sorted(copies)
        self.counts["copied"] += len(copies)
        assert list(meta.load_event_to_reqs) == [meta.load_event] * bool(names)
        # Each request's rows stand together, in the order of the requests.
        hosts = iter(meta.load_host_blocks)
        for name, size in zip(names, meta.load_sizes, strict=True):
            own = [next(hosts) for _ in range(size)]
            load = self.loads[name]
            assert sorted(own) == sorted(load.hosts[at] for at in load.rows)
        assert not list(hosts)
        most = self.rules.max_blocks_in_flight
        if most:
            own = [
                sum(map(len, load.rows.values()))
                for load in self.loads.values()
                if load.event != NO_EVENT and load.rows
            ]
            assert len(own) <= 1 or sum(own) <= most
            stored = sum(len(store.device_blocks) for store in self.stores.values())
            assert stored <= max(most, self.factor)

    def allocate(self, num):
        blocks = self.pool.allocate(num)
        for worker in self.workers:
            busy = worker.being_read() | worker.being_written()
            assert not busy & set(blocks), "a block in flight is handed out"
        for block in blocks:
            self.forget_device(block)
        self.unwritten.difference_update(blocks)
        return blocks

    def forget_device(self, block):
        key = self.device_keys.pop(block, None)
        if key is not None:
            self.serving[key].remove(block)
            if not self.serving[key]:
                del self.serving[key]

    def take_events(self):
        """Record what was evicted; nothing that is being loaded, fetched or written."""
        stored = set()
        held = {row for wait in self.storage.waits.values() for row in wait.rows}
        for move in self.storage.writes.values():
            held.update(move.host_blocks if not move.is_stale else ())
        for event in self.scheduler.take_events():
            if event.medium == STORAGE_MEDIUM:
                self.storage.note_event(event)
                continue
            if not event.removed:
                stored |= set(event.block_hashes)
                continue
            for key in event.block_hashes:
                host = self.ready.pop(key)
                self.evicted.add(key)
                assert host not in held, "what a write or a wait holds is evicted"
                for load in self.loads.values():
                    assert key not in load.keys.values(), "a held block is evicted"
                    assert host not in load.hosts.values()
        assert stored <= set(self.ready)

    def before_lazy_offer(self):
        if self.rules.mode != "lazy" or self.rng.random() < 0.7:
            return []
        lazy = self.scheduler._lazy
        if lazy._look(self.pool) == lazy._seen:
            return []  # Blocks pinned then do not make others the next to evict.
        target = lazy_target_blocks(self.groups, self.rules.max_num_batched_tokens)
        copied = sum(len(load.copies) for load in self.loads.values())
        _, keys = self.pool.next_free(target - copied)
        return [key for key in keys if key is not None]

    @property
    def is_selective(self):
        """Whether some blocks are not to be stored, whoever asked for them."""
        rules = self.rules
        return rules.store_threshold > 1 or rules.max_unseen_blocks is not None

    def check_offers(self, scheduled, lazily, is_refused):
        """Check that all offered blocks are or were on the host, or in flight.

        Or that they wait for others, no longer than they may.
        """
        if self.is_selective or self.rules.max_blocks_in_flight:
            return
        there = self.keys_on_host() | self.evicted
        if not is_refused:
            assert set(lazily) <= there
        if self.rules.mode == "lazy":
            return
        rules = self.rules
        most_steps = rules.store_max_wait_steps if rules.store_batch else 0
        num_waiting = 0
        for request in self.active:
            is_refused_too = is_refused or self.is_refused(request)
            if is_refused_too:
                request.steps_waited.clear()
            is_due = scheduled.get(request.request_id) and not is_refused_too
            for row, key, is_held in self.full_rows(request):
                if key in there:
                    request.seen_on_host.add(row)
                elif is_due and is_held and row not in request.seen_on_host:
                    num_waiting += 1
                    request.steps_waited[row] += 1
                    name = request.request_id
                    assert request.steps_waited[row] <= most_steps, (
                        f"{row} of {name} is not stored"
                    )
        self.counts["waits"] += bool(num_waiting)

    def check_farewell(self, request, num_refusals):
        """Check that all blocks of a request that frees them are in flight."""
        rules = self.rules
        if self.is_selective or rules.max_blocks_in_flight or rules.mode == "lazy":
            return
        if self.scheduler.stats.num_store_refusals > num_refusals:
            return
        there = self.keys_on_host()
        for row, key, is_held in self.full_rows(request):
            assert key in there or not is_held, f"{row} is lost at the end"

    def full_rows(self, request):
        """List the rows that may be stored: row, key, whether its blocks are there."""
        factor = self.factor
        most = min(
            request.num_certain, self.rules.max_offload_tokens or self.setup.max_tokens
        )
        if self.rules.prompt_only:
            most = min(most, request.num_prompt_tokens)
        for g, spec in enumerate(self.groups):
            keys, table = request.block_keys_by_group[g], request.tables[g]
            last = min(most // spec.block_size, len(keys), len(table))
            for i in range(0, last // factor * factor, factor):
                is_held = all(
                    self.device_keys.get(table[j]) == keys[j]
                    for j in range(i, i + factor)
                )
                yield (g, i), keys[i + factor - 1], is_held

    def keys_on_host(self):
        """All keys that the host has or is storing."""
        stores = [store for store in self.stores.values() if not store.is_stale]
        in_flight = {key for store in stores for key, _ in store.rows}
        waiting = self.scheduler._stores.waiting.keys
        return {*self.ready, *in_flight, *waiting, *self.storage.fetching}

    def is_refused(self, request):
        """Whether the host had no room, and nothing has ended since."""
        refused_at = self.scheduler._eager._progress[request.request_id].refused_at
        return refused_at == self.scheduler._stores.num_changes

    def held_blocks(self):
        """Count the engine's references to each device block."""
        tables = (table for request in self.active for table in request.tables)
        return Counter(b for table in tables for b in table if b != NULL_BLOCK)

    def pinned_blocks(self):
        """Count the references of transfers to each device block."""
        pins = Counter(self.scheduler._stores.waiting.sources)
        for load in self.loads.values():
            pins.update(load.copies.values())
            pins.update((load.targets or {}).values())
        for store in self.stores.values():
            pins.update(store.device_blocks)
        return pins

    def check_counts(self, ref_cnt):
        """Check that every offered block is counted once."""
        stats, now = self.scheduler.stats, self.scheduler.in_transit
        sent = [store for store in self.stores.values() if not store.is_stale]
        assert now.stores_in_flight == sum(len(store.device_blocks) for store in sent)
        assert now.stores_waiting == len(self.scheduler._stores.waiting.sources)
        leaving = Counter()
        for load in self.loads.values():
            num = sum(map(len, load.rows.values())) * (load.targets is not None)
            leaving[load.event != NO_EVENT] += num
        assert (now.loads_waiting, now.loads_in_flight) == (
            leaving[False],
            leaving[True],
        )
        assert now.host_blocks_written == sum(n < 0 for n in ref_cnt)
        assert now.host_blocks_read == sum(n > 0 for n in ref_cnt)
        dropped = stats.num_dropped_full + stats.num_dropped_slow
        dropped += stats.num_dropped_failed + stats.num_dropped_reset
        on_their_way = now.stores_waiting + now.stores_in_flight
        assert stats.num_offered == stats.num_stored + dropped + on_their_way
        assert stats.num_device_hit_tokens <= stats.num_device_query_tokens
        assert stats.num_host_hit_tokens <= stats.num_host_query_tokens

    def check(self, deeply=False):
        pool, scheduler = self.pool, self.scheduler
        waiting = scheduler._stores.waiting
        held, pins = self.held_blocks(), self.pinned_blocks()
        ref_cnt = Counter()
        for load in self.loads.values():
            ref_cnt.update(load.hosts.values())
        for store in self.stores.values():
            if not store.is_stale:
                for _, host in store.rows:
                    ref_cnt[host] = -1
        for host in waiting.targets:
            ref_cnt[host] = -1

        self.check_counts(list(ref_cnt.values()))
        self.storage.count_host_blocks(ref_cnt)
        self.storage.check(deeply)

        def listed(counts, num):
            return [counts.get(i, 0) for i in range(num)]

        state = jax.tree.map(
            jnp.copy,
            (pool.state.ref_cnt, pool.state.pins, self.host.executor.state.ref_cnt),
        )
        real_held, real_pins, real_ref = (np.asarray(x).tolist() for x in state)
        assert real_held == listed(held, pool.num_blocks)
        assert real_pins == listed(pins, pool.num_blocks)
        assert real_ref == listed(ref_cnt, self.setup.num_host_blocks)
        busy = {*held, *(b for b, n in pins.items() if n)}
        assert pool.num_free == pool.num_blocks - 1 - len(busy)
        assert pool.unwritten == self.unwritten
        is_loading = bool(self.loads) or self.storage.is_held_up
        assert scheduler.has_pending_loads() == is_loading
        is_storing = bool(self.stores or waiting.keys or self.storage.writes)
        if self.storage.real is not None:
            is_storing |= bool(self.storage.real._to_write)
        assert scheduler.has_pending_stores() == is_storing
        on_host = self.keys_on_host()
        assert scheduler.num_host_blocks_held == len(on_host)
        hosts = list(self.ready.values())
        hosts += [host for host, n in ref_cnt.items() if n < 0]
        assert len(set(hosts)) == len(hosts) == len(on_host)
        if deeply:
            pool.check()
            found = pool.find(list(self.serving)).tolist()
            assert found == [blocks[0] for blocks in self.serving.values()]
            snapshot = self.host.snapshot()
            assert set(snapshot.block_ids) == on_host
            assert self.ready.items() <= snapshot.block_ids.items()
            everything = [*snapshot.free_ids, *snapshot.block_ids.values()]
            assert sorted(everything) == list(range(self.setup.num_host_blocks))
            for key, host in self.ready.items():
                for worker in self.workers:
                    assert (
                        self.prefixes.key(worker.host[host][-1], self.setup.key_length)
                        == key
                    ), "a findable host block has other bytes"

    def report(self):
        """Pass the workers' reports to the scheduler; return its answer."""
        reports = [
            dataclasses.replace(worker.report(), below=self.storage.take_report(number))
            for number, worker in enumerate(self.workers)
        ]
        output = ConnectorOutput.aggregate(reports)
        expected = {name: [] for name in ("finished", "failed", "completed", "lost")}
        num_workers = self.rules.world_size
        for events, ok in (
            (output.completed_store_events, True),
            (output.failed_store_events, False),
        ):
            for event in events:
                self.stores[event].num_reports += 1
                self.stores[event].has_failed |= not ok
        for event in list(self.stores):
            store = self.stores[event]
            if store.num_reports == num_workers:
                expected["lost" if store.has_failed else "completed"].append(event)
                del self.stores[event]
                if not (store.has_failed or store.is_stale):
                    self.ready |= dict(store.rows)
                    self.counts["stored"] += len(store.rows)
        lost_keys = []
        for names, ok in (
            (output.finished_recving, True),
            (output.failed_recving, False),
        ):
            for name in names:
                self.loads[name].num_reports += 1
                self.loads[name].has_failed |= not ok
        for name in list(self.loads):
            load = self.loads[name]
            if load.num_reports == num_workers:
                if load.is_wanted:
                    expected["failed" if load.has_failed else "finished"].append(name)
                del self.loads[name]
                if load.has_failed:
                    lost_keys += load.keys.values()
        answer = self.scheduler.update_connector_output(output)
        held = Counter()
        self.storage.count_host_blocks(held)
        self.storage.hear(output.below)
        self.take_events()
        read = {key for load in self.loads.values() for key in load.keys.values()}
        # What is held for others, or is being written to the store, is not forgotten.
        read |= {key for key, host in self.ready.items() if held[host]}
        assert not set(lost_keys) & (set(self.ready) - read), "what failed is offered"
        assert sorted(answer.finished_recving) == sorted(expected["finished"])
        assert sorted(answer.failed_recving) == sorted(expected["failed"])
        assert sorted(answer.completed_store_events) == sorted(expected["completed"])
        assert sorted(answer.failed_store_events) == sorted(expected["lost"])
        return answer
