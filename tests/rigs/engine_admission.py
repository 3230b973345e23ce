"""Admission of requests, and the offers that the scheduler must make them."""

from jaxkv.scheduling.protocol import NO_EVENT
from jaxkv.search.groups import alignment
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.types import NULL_BLOCK
from tests.rigs.engine_refusals import Refuser
from tests.rigs.offload_sim import first_read, longest_prefix
from tests.rigs.sim_requests import SimLoad


class Admission(Refuser):
    """Admits requests with all, a part or nothing of an offer."""

    def admit(self):
        rng = self.rng
        barred = {*self.preempted}
        for request in list(self.waiting):
            if len(self.active) >= 6 or (not self.is_calm and rng.random() < 0.2):
                return
            if request.request_id in barred:
                continue
            if not self.try_to_admit(request):
                return

    def try_to_admit(self, request):
        """Admit one request.

        Returns:
            Whether the next may be tried.
        """
        rng = self.rng
        limit = request.num_tokens - 1
        local, block_ids = find_cached_prefix(
            self.pool, self.groups, request.block_keys_by_group, limit
        )
        self.check_local(request, local, block_ids)
        if self.only_full and local and rng.random() < 0.1:
            local = rng.randrange(0, local, alignment(self.groups))
            block_ids = [
                own[: local // spec.block_size]
                for own, spec in zip(block_ids, self.groups, strict=True)
            ]
        held = [block for own in block_ids for block in own]
        touch_first = rng.random() < 0.5
        if touch_first:
            self.pool.touch(held)
        offer, is_async = self.query(request, local, held if touch_first else ())
        if not touch_first:
            self.pool.touch(held)
        if offer is None:
            self.counts["later"] += 1
            self.pool.free(held[::-1])
            return True
        taken = offer
        if self.only_full and offer and rng.random() < 0.3:
            step = alignment(self.groups)
            taken = rng.randrange(0, offer + 1, step)
        elif offer and rng.random() < 0.05:
            taken = 0
        total = local + taken
        is_async = is_async and taken > 0
        ahead = 0
        if not is_async:
            ahead = rng.randint(1, request.num_tokens - total)
        skip = rng.random() < 0.5
        tables, holes = [list(own) for own in block_ids], []
        for g, spec in enumerate(self.groups):
            first = first_read(spec, total)
            for i in range(len(tables[g]), -(-(total + ahead) // spec.block_size)):
                tables[g].append(NULL_BLOCK)
                if i >= first or not skip:
                    holes.append((g, i))
        if len(holes) > self.pool.num_free:
            self.pool.free(held[::-1])
            return False
        for (g, i), block in zip(holes, self.allocate(len(holes)), strict=True):
            tables[g][i] = block
        request.tables = tables
        request.new_blocks = [[] for _ in self.groups]
        request.num_cached = [
            max(local // spec.block_size, first_read(spec, total))
            for spec in self.groups
        ]
        request.is_careless = rng.random() < 0.3
        if request.is_careless:
            request.num_cached = [local // spec.block_size for spec in self.groups]
        request.seen_on_host = set()
        request.steps_waited.clear()
        if rng.random() < 0.03:
            self.try_bad_takes(request, offer)
        after = self.scheduler.update_state_after_alloc(request, request.table, taken)
        self.storage.forget(request.request_id)
        load = self.loads.get(request.request_id)
        if load is not None and not taken:
            del self.loads[request.request_id]
        elif load is not None:
            load.cut([total // spec.block_size for spec in self.groups])
            load.targets = {
                (g, i): tables[g][i]
                for g, i in [
                    *load.copies,
                    *((g, i) for (g, _), own in load.rows.items() for i in own),
                ]
            }
            assert NULL_BLOCK not in load.targets.values()
        self.note_skipped(request, local, total, load if taken else None)
        assert after == [
            [NULL_BLOCK if b in request.skipped else b for b in own] for own in tables
        ]
        # The hits of a request are checked on the host when it ends, not before.
        for g, spec in enumerate(self.groups):
            rows = range(0, total // spec.block_size, self.factor)
            request.seen_on_host |= {(g, i) for i in rows}
        request.num_computed_tokens = local if is_async else total
        request.num_loading_tokens = taken
        request.phase = "loading" if is_async else "running"
        self.counts["at once"] += bool(taken) and not is_async
        self.counts["device"] += local
        self.waiting.remove(request)
        self.active.append(request)
        return True

    def note_skipped(self, request, local, total, load):
        """Record the blocks of an offer that are not written."""
        request.skipped = {
            request.tables[g][i]
            for g, spec in enumerate(self.groups)
            for i in range(local // spec.block_size, total // spec.block_size)
            if load is None or (g, i) not in load.targets
        } - {NULL_BLOCK}
        self.unwritten |= request.skipped
        self.counts["skipped"] += len(request.skipped)

    def query(self, request, local, touched):
        """Query an offer, and compare it with the known contents of the tiers."""
        name = request.request_id
        before, storage = self.loads.get(name), self.storage
        is_under_way = before is not None and before.event != NO_EVENT
        if not is_under_way and self.setup.num_storage_blocks:
            wanted = storage.lack(request, local)
            has_to_wait = storage.before_query(request, local)
        offer, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        if is_under_way:
            assert (offer, is_async) == (None, False)
            return offer, is_async
        if self.setup.num_storage_blocks:
            is_waiting = storage.real.is_awaited(name)
            if has_to_wait is not None:
                assert is_waiting == has_to_wait, f"{name} waits: {is_waiting}"
            storage.after_query(request, wanted, is_waiting)
            self.take_events()  # A fetch may have made room for itself.
        self.loads.pop(name, None)
        if self.setup.num_storage_blocks:
            if is_waiting:
                assert (offer, is_async) == (None, False)
                return offer, is_async
            if offer is not None:
                storage.release(name)
        load = self.plan(request, local, is_modest=False)
        if load is not None and load.copies:
            # Blocks to copy from must leave room for the blocks of the request.
            busy = {*touched, *self.held_blocks(), *self.pinned_blocks()}
            busy = {*busy, *load.copies.values()} - {NULL_BLOCK}
            own = sum(-(-request.num_tokens // spec.block_size) for spec in self.groups)
            if self.pool.num_blocks - 1 - len(busy) < own:
                load = self.plan(request, local, is_modest=True)
                self.counts["modest"] += 1
        if load is None:
            assert (offer, is_async) == (0, False)
            return 0, False
        taken = [load for load in self.loads.values() if load.targets is not None]
        others = {key for load in taken for key in load.keys.values()}
        if self.rules.delay_shared_loads and others & set(load.keys.values()):
            assert (offer, is_async) == (None, False)
            return None, False
        if self.rules.skip_slow_loads and load.rows and offer == 0:
            self.counts["declined"] += 1
            return 0, False
        assert (offer, is_async) == (load.num_tokens, bool(load.rows))
        self.loads[name] = load
        return offer, is_async

    def plan(self, request, local, is_modest):
        """Return the offer that a request must get."""
        keys, factor = request.block_keys_by_group, self.factor

        def row_key(g, i):
            last = i // factor * factor + factor - 1
            return keys[g][last] if last < len(keys[g]) else None

        def on_device(g, i):
            if is_modest and i >= local // self.groups[g].block_size:
                return False
            return keys[g][i] in self.serving

        def has(g, i):
            return on_device(g, i) or row_key(g, i) in self.ready

        total = longest_prefix(
            self.groups,
            [len(own) for own in keys],
            has,
            request.num_tokens - 1,
            alignment(self.groups),
        )
        if total <= local:
            return None
        load = SimLoad(total - local, local, {}, {}, {}, {})
        for g, spec in enumerate(self.groups):
            size = spec.block_size
            for i in range(max(first_read(spec, total), local // size), total // size):
                if on_device(g, i):
                    load.copies[g, i] = self.serving[keys[g][i]][0]
                else:
                    at = g, i // factor * factor
                    load.rows.setdefault(at, []).append(i)
                    load.keys[at] = row_key(g, i)
                    load.hosts[at] = self.ready[load.keys[at]]
        return load

    def check_local(self, request, local, block_ids):
        keys = request.block_keys_by_group
        expected = longest_prefix(
            self.groups,
            [len(own) for own in keys],
            lambda g, i: keys[g][i] in self.serving,
            request.num_tokens - 1,
            alignment(self.groups),
        )
        assert local == expected
        for g, spec in enumerate(self.groups):
            first = first_read(spec, local)
            num = local // spec.block_size
            own = [self.serving[keys[g][i]][0] for i in range(first, num)]
            assert block_ids[g] == [NULL_BLOCK] * first + own
