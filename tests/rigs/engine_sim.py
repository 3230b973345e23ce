"""An engine that makes any calls of `OffloadScheduler` that an engine may make.

A random generator chooses its actions; `Watcher` checks the state after every step.
"""

from jaxkv.scheduling.protocol import NO_EVENT, SchedulerOutput
from jaxkv.types import NULL_BLOCK
from tests.rigs.engine_admission import Admission
from tests.rigs.offload_sim import first_read
from tests.rigs.sim_requests import SimRequest


class Engine(Admission):
    """Admits, computes, preempts and ends requests, and completes transfers."""

    def step(self):
        self.collect()
        if not self.is_calm:
            self.meddle()
        self.admit()
        scheduled = self.schedule()
        new_blocks = {}
        for request in self.active:
            if any(request.new_blocks):
                own = request.new_blocks
                new_blocks[request.request_id] = own if len(own) > 1 else own[0]
                request.new_blocks = [[] for _ in self.groups]
        output = SchedulerOutput(scheduled, new_blocks, tuple(self.preempted))
        refusals = self.scheduler.stats.num_store_refusals
        offered = self.before_lazy_offer()
        meta = self.scheduler.build_connector_meta(output)
        self.digest = meta.digest(self.digest)
        self.preempted = []
        self.evicted = set()
        self.take_events()
        self.note_stores(meta)
        is_refused = self.scheduler.stats.num_store_refusals > refusals
        self.check_offers(scheduled, offered, is_refused)
        self.note_loads(meta)
        for worker in self.workers:
            worker.start(meta)
        self.storage.note_moves(meta.below[0] if meta.below else None)
        self.compute(scheduled)
        self.transfer()
        self.check()

    def collect(self):
        """Process the loads that ended, and resume requests."""
        answer = self.report()
        for name in answer.finished_recving:
            request = self.requests[name]
            assert request.phase == "loading"
            request.phase = "running"
            request.num_computed_tokens += request.num_loading_tokens
            self.counts["loaded"] += request.num_loading_tokens
            self.cache(request)
            if self.rng.random() < 0.5:
                self.scheduler.update_state_after_alloc(request, request.table, 0)
        for name in answer.failed_recving:
            self.restart(self.requests[name])

    def restart(self, request):
        """Let a request compute the tokens that it could not load."""
        assert request.phase == "loading"
        request.phase = "running"
        self.counts["failed"] += 1
        self.unwritten -= request.skipped
        first = request.num_computed_tokens
        holes = []
        for g, spec in enumerate(self.groups):
            request.num_cached[g] = first // spec.block_size
            holes += [
                (g, i)
                for i in range(first // spec.block_size, len(request.tables[g]))
                if request.tables[g][i] == NULL_BLOCK
            ]
        if len(holes) > self.pool.num_free:
            self.preempt(request)
        elif holes:
            new = self.allocate(len(holes))
            for (g, i), block in zip(holes, new, strict=True):
                request.tables[g][i] = block
            self.scheduler.update_state_after_alloc(request, request.table, 0)

    def meddle(self):
        """Do random actions that may happen between two steps."""
        rng = self.rng
        if rng.random() < 0.35 and len(self.requests) < 8:
            self.submit()
        if self.requests and rng.random() < 0.06:
            self.finish(self.requests[rng.choice(list(self.requests))])
            self.counts["aborted"] += 1
        if self.active and rng.random() < 0.06:
            self.preempt(rng.choice(self.active))
        if rng.random() < 0.01:
            has_loads = bool(self.loads) or self.storage.is_held_up
            assert self.scheduler.has_pending_loads() == has_loads
            assert self.scheduler.reset() != has_loads
            if not has_loads:
                self.counts["reset"] += 1
                self.ready = {}
                for store in self.stores.values():
                    store.is_stale = True
                self.storage.reset()
                for request in self.requests.values():
                    request.seen_on_host = set()
                    request.steps_waited.clear()
                list(self.scheduler.take_events())
        if rng.random() < 0.02:
            is_idle = self.pool.num_free == self.pool.num_blocks - 1
            assert self.pool.reset() == is_idle
            if is_idle:
                self.device_keys, self.serving = {}, {}
        if rng.random() < 0.1 and self.device_keys:
            blocks = list(self.device_keys)
            gone = rng.sample(blocks, rng.randint(1, min(len(blocks), 4)))
            self.pool.evict(gone)
            for block in gone:
                self.forget_device(block)
        if rng.random() < 0.15:
            self.pool.free(self.allocate(rng.randint(0, self.pool.num_free)))
        if rng.random() < 0.03:
            self.try_refused()
        if self.rules.skip_slow_loads and rng.random() < 0.1:
            self.scheduler.note_rates(rng.choice((0, 1, 100)), rng.choice((0, 9)))

    def submit(self):
        """Add a request from a common tree, or continuing a finished one."""
        rng = self.rng
        path = [0]
        if rng.random() < 0.5:
            path = list(rng.choice(self.histories)[: rng.randint(8, 32)])
        for _ in range(rng.randint(0 if len(path) > 1 else 1, 4)):
            token = rng.randrange(2)
            for _ in range(rng.randint(2, 8)):
                path.append(self.prefixes.extend(path[-1], token))
        path = path[: self.setup.max_tokens - 1]
        num = len(path) - 1
        most = rng.randint(num + 1, self.setup.max_tokens)
        name = f"r{self._num_requests}"
        self._num_requests += 1
        request = SimRequest(name, self, path, num, most)
        self.requests[name] = request
        self.waiting.append(request)

    def schedule(self):
        """Choose what to compute, and allocate its blocks, preempting if needed."""
        rng = self.rng
        scheduled = {}
        for request in list(self.active):
            if request not in self.active or request.phase != "running":
                continue
            self.trim(request)
            left = request.num_tokens - request.num_computed_tokens
            least = 1 if self.is_calm else rng.choice((0, 1, 1))
            if left > 0:
                num = rng.randint(least, left) if rng.random() < 0.7 else left
            else:
                room = request.max_tokens - request.num_computed_tokens
                num = rng.randint(0, max(min(self.setup.max_drafts, room), 0))
            end = request.num_computed_tokens + num
            wanted = [
                (g, -(-end // spec.block_size) - len(request.tables[g]))
                for g, spec in enumerate(self.groups)
            ]
            needed = sum(max(n, 0) for _, n in wanted)
            while needed > self.pool.num_free:
                others = [r for r in self.active if r.phase == "running"]
                victim = others[-1]
                if victim is request or victim.request_id in scheduled:
                    break
                self.preempt(victim)
            if needed > self.pool.num_free:
                continue
            new = self.allocate(needed)
            for g, n in wanted:
                own, new = new[: max(n, 0)], new[max(n, 0) :]
                request.tables[g] += own
                request.new_blocks[g] += own
            if any(request.new_blocks) and rng.random() < 0.1:
                self.scheduler.update_state_after_alloc(request, request.table, 0)
                request.new_blocks = [[] for _ in self.groups]
            scheduled[request.request_id] = num
        return scheduled

    def compute(self, scheduled):
        """Run the model: read the context, write the computed tokens."""
        for name, num in scheduled.items():
            request = self.requests[name]
            start = request.num_computed_tokens
            path = request.path + request.drafts
            while len(path) <= start + num:
                token = self.rng.randrange(2)
                path.append(self.prefixes.extend(path[-1], token))
            if num:
                self.run_model(request, path, start, start + num)
            request.num_computed_tokens = start + num
            request.drafts = path[request.num_tokens + 1 : start + num + 1]
            request.num_output_placeholders = len(request.drafts)
        for request in list(self.active):
            if request.phase == "running":
                self.sample(request)
                self.cache(request)
                if request.num_tokens >= request.max_tokens:
                    self.histories.append(request.path)
                    self.histories = self.histories[-6:]
                    self.counts["finished"] += 1
                    self.finish(request)

    def run_model(self, request, path, start, end):
        for g, spec in enumerate(self.groups):
            size, table = spec.block_size, request.tables[g]
            for worker in self.workers:
                for i in range(first_read(spec, start), start // size):
                    content = worker.read(table[i])
                    assert content == (g, path[(i + 1) * size]), (
                        f"block {i} of group {g} of {request.request_id} is wrong"
                    )
                if start % size:
                    content = worker.read(table[start // size])
                    assert isinstance(content, tuple)
                    assert content[0] == g
                    assert self.prefixes.is_part(path[start], content[1])
                for i in range(start // size, -(-end // size)):
                    worker.write(table[i], (g, path[min(end, (i + 1) * size)]))

    def sample(self, request):
        """Accept tokens that were computed ahead, or the next one."""
        if request.num_certain < request.num_tokens:
            return
        drafts = request.drafts
        if self.setup.max_drafts and not self.is_calm and self.rng.random() < 0.4:
            return  # The step is not over yet.
        num = self.rng.randint(0, len(drafts))
        for prefix in drafts[:num]:
            request.append(prefix)
        request.num_computed_tokens -= len(drafts) - num
        request.drafts, request.num_output_placeholders = [], 0
        if request.num_tokens < request.max_tokens:
            token = self.rng.randrange(2)
            request.append(self.prefixes.extend(request.path[-1], token))

    def cache(self, request):
        """Cache the blocks whose tokens are certain."""
        blocks, keys = [], []
        for g, spec in enumerate(self.groups):
            last = min(
                request.num_certain // spec.block_size,
                len(request.block_keys_by_group[g]),
            )
            for i in range(request.num_cached[g], last):
                blocks.append(request.tables[g][i])
                keys.append(request.block_keys_by_group[g][i])
            request.num_cached[g] = max(last, request.num_cached[g])
        assert NULL_BLOCK not in blocks or request.is_careless
        if blocks:
            skipped = self.pool.cache(blocks, keys)
            assert skipped == [block for block in blocks if block in self.unwritten]
            self.counts["not cached"] += len(skipped)
        for block, key in zip(blocks, keys, strict=True):
            if block == NULL_BLOCK or block in self.unwritten:
                continue
            assert self.device_keys.setdefault(block, key) == key
            self.serving.setdefault(key, []).append(block)

    def trim(self, request):
        """Free the blocks that no later token reads."""
        gone = []
        for g, spec in enumerate(self.groups):
            table = request.tables[g]
            for i in range(min(first_read(spec, request.num_certain), len(table))):
                if table[i] != NULL_BLOCK:
                    gone.append(table[i])
                    table[i] = NULL_BLOCK
        if gone:
            self.pool.free(gone[::-1])

    def preempt(self, request):
        """Preempt a request; it starts again later."""
        load = self.loads.get(request.request_id)
        # Loads that were not issued are dropped at once, or, if that is not reported,
        # with the step's metadata; in between other requests could wait for them.
        has_offer = load is not None and load.event == NO_EVENT
        if has_offer or self.rng.random() < 0.7:
            num_refusals = self.scheduler.stats.num_store_refusals
            self.scheduler.request_preempted(request)
            self.take_events()
            self.check_farewell(request, num_refusals)
        self.release(request)
        self.preempted.append(request.request_id)
        request.phase = "waiting"
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.drafts = []
        self.waiting.insert(0, request)
        self.counts["preempted"] += 1

    def finish(self, request):
        """End a request in any phase."""
        if request.phase == "waiting":
            self.waiting.remove(request)
        num_refusals = self.scheduler.stats.num_store_refusals
        match self.rng.randrange(3):
            case 0:
                self.scheduler.request_finished(request)
            case 1:
                self.scheduler.request_finished(request, request.table)
            case 2:
                answer = self.scheduler.request_finished_all_groups(
                    request, request.tables
                )
                assert answer == (False, None)
        self.storage.forget(request.request_id)
        self.take_events()
        if request in self.active:
            self.check_farewell(request, num_refusals)
        self.release(request)
        del self.requests[request.request_id]

    def release(self, request):
        self.drop_load(request)
        if request in self.active:
            self.active.remove(request)
        self.pool.free([b for own in request.tables for b in reversed(own)])
        request.tables = [[] for _ in self.groups]
        self.take_events()

    def drop_load(self, request):
        load = self.loads.get(request.request_id)
        if load is not None and load.event == NO_EVENT:
            del self.loads[request.request_id]
        elif load is not None:
            load.is_wanted = False

    def transfer(self):
        """Complete transfers, on each worker at another time."""
        rng = self.rng
        self.storage.act()
        for worker in self.workers:
            if self.is_calm:
                worker.drain()
                continue
            for queue, end in (
                (worker.stores, worker.end_store),
                (worker.loads, worker.end_load),
            ):
                while queue and rng.random() < 0.4:
                    end(ok=rng.random() >= self.setup.failures)

    def settle(self):
        """Finish all requests and transfers."""
        self.is_calm = True
        total = sum(request.max_tokens for request in self.requests.values())
        for _ in range(60 + 4 * total):
            if not self.requests:
                break
            self.step()
        assert not self.requests, "some requests never end"
        for _ in range(3 + self.setup.num_host_blocks):
            self.step()
        self.check(deeply=True)
        scheduler = self.scheduler
        assert not self.loads
        self.storage.check_at_rest()
        assert not scheduler.has_pending_stores()
        assert self.pool.num_free == self.pool.num_blocks - 1
        assert not scheduler._known
        assert scheduler.in_transit == (0, 0, 0, 0, 0, 0)
        assert not scheduler._loads._waiting
        assert not scheduler._loads._copying
        assert not scheduler.delays._offered_s
        assert not scheduler.delays._deferred_s
        if scheduler._eager is not None:
            assert not scheduler._eager._progress
        self.is_calm = False
