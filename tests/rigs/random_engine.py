"""A small engine that does at random what engines do, and compares all KV it reads."""

import random
import zlib

import jax.numpy as jnp
import numpy as np

from jaxkv import (
    DeviceBlockPool,
    FullAttention,
    OffloadConfig,
    SchedulerOutput,
    find_cached_prefix,
)
from jaxkv.integrations.engine_hooks import EngineHooks
from jaxkv.types import NULL_BLOCK
from tests.campaign.truth import first_block_read
from tests.rigs.own_pool import OwnPool
from tests.rigs.wrong_engines import example

BLOCK = example.BLOCK
FULL = (FullAttention(BLOCK),)


class WrongKVError(AssertionError):
    """A request read KV that is not of its tokens."""


def content(tokens):
    """The KV of the last token."""
    return float(zlib.crc32(bytes(tokens)) >> 9)


class RandomEngine:
    """An engine with the library's pool ("device"), its own ("own") or `EngineHooks`.

    Its own pool gives blocks their hash when they are allocated, as vLLM does.
    """

    def __init__(self, seed, kind="device", groups=FULL, **config):
        self.rng, self.kind, self.groups = random.Random(seed), kind, groups
        num_blocks = 22 * len(groups)
        self.kv = jnp.zeros((num_blocks, BLOCK))
        self.pool = (DeviceBlockPool if kind == "device" else OwnPool)(num_blocks)
        config = OffloadConfig(
            num_host_blocks=40, strict=True, strict_seed=seed, **config
        )
        self.engine, self.scheduler, self.worker = config.connect(self.kv, groups)
        if kind == "hooks":
            self.hooks = EngineHooks(
                self.scheduler,
                self.pool,
                example.NAMESPACE,
                tokens_of=lambda request: request.tokens,
                table_of=lambda request: request.tables[0],
            )
        else:
            self.scheduler.bind_device_block_pool(self.pool)
        self.stories = [[self.rng.randrange(90) for _ in range(30)] for _ in range(3)]
        self.requests, self.waiting, self.running = {}, [], []
        self.new_blocks, self.preempted = {}, []
        self.num_read = self.num_submitted = 0

    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()
        for _ in range(600):
            if not self.requests and not self.has_transfers():
                break
            self.step(is_calm=True)
        assert not self.requests, "requests are never served"
        assert not self.has_transfers(), "transfers never end"
        assert self.pool.num_free == self.pool.num_blocks - 1, "blocks are left"

    def has_transfers(self):
        return self.scheduler.has_pending_stores() or self.scheduler.has_pending_loads()

    def step(self, *, is_calm=False):
        self.collect(self.worker.poll())
        if not is_calm:
            self.act()
        shares = self.schedule()
        self.kv = self.worker.start(self.plan(dict(shares)), self.kv)
        self.compute(shares)

    def act(self):
        rng = self.rng
        if len(self.requests) < 5 and rng.random() < 0.5:
            tokens = rng.choice(self.stories)[: rng.randint(6, 30)]
            tokens = [*tokens, *(rng.randrange(90) for _ in range(rng.randint(0, 3)))]
            name = f"r{self.num_submitted}"
            self.num_submitted += 1
            request = example.Request(name, tokens, len(self.groups))
            request.max_tokens = len(tokens) + rng.randint(1, 8)
            request.tables, request.num_loading = [], 0
            self.requests[name] = request
            self.waiting.append(request)
        if self.requests and rng.random() < 0.06:
            self.end(self.requests[rng.choice(list(self.requests))])
        if self.running and rng.random() < 0.08:
            self.preempt(rng.choice(self.running))

    # Requests.

    def admit(self, request):
        """Allocate blocks; return whether the request has them now."""
        if self.kind == "hooks":
            return self.admit_by_hooks(request)
        search = self.groups, request.block_keys_by_group, request.num_tokens - 1
        local, tables = find_cached_prefix(self.pool, *search)
        for table in tables:
            self.pool.touch(table)
        offer, takes_time = self.scheduler.get_num_new_matched_tokens(request, local)
        end = local + (offer or 0)
        end += (
            0 if takes_time else min(self.rng.randint(1, 9), request.num_tokens - end)
        )
        new = None if offer is None else self.grown(tables, end)
        if new is None:
            for table in tables:
                self.pool.free(table[::-1])
            if offer:
                self.scheduler.update_state_after_alloc(request, [], 0)
            return False
        request.tables, request.num_computed_tokens = new, local
        request.num_loading = offer
        request.after = self.scheduler.update_state_after_alloc(request, new, offer)
        if not takes_time:
            self.has_loaded(request, is_ok=True)
            self.cache_allocated(request, end)
        return True

    def admit_by_hooks(self, request):
        hits = []
        for key in request.block_keys[: (request.num_tokens - 1) // BLOCK]:
            hits += (self.pool.engine_pool.by_hash.get(key, -1),)
        hits = hits[: hits.index(-1)] if -1 in hits else hits
        request.num_loading = self.hooks.query(request, len(hits) * BLOCK)

        def allocate_slots(num_tokens, *, delay_cache_blocks):
            self.pool.touch(hits)
            tables = self.grown([hits], len(hits) * BLOCK + num_tokens)
            if tables is None:
                self.pool.free(hits[::-1])
                return None
            request.tables, request.num_computed_tokens = tables, len(hits) * BLOCK
            if not delay_cache_blocks:
                self.cache_allocated(request, len(hits) * BLOCK + num_tokens)
            return tables

        num_tokens = self.rng.randint(1, request.num_tokens - len(hits) * BLOCK)
        has_slots = self.hooks.allocate(request, num_tokens, allocate_slots) is not None
        if has_slots:
            request.num_loading = 0
        return has_slots or self.hooks.is_loading(request)

    def grown(self, tables, end):
        """Return tables with new blocks for `end` tokens; None without room."""
        num_new = -(-end // BLOCK)
        missing = [max(num_new - len(table), 0) for table in tables]
        if sum(missing) > self.pool.num_free:
            return None
        new = self.pool.allocate(sum(missing))
        return [
            [*table, *(new.pop(0) for _ in range(num))]
            for table, num in zip(tables, missing, strict=True)
        ]

    def cache_allocated(self, request, end):
        """Give a hash to blocks that the coming step computes up to `end`."""
        if self.kind != "device":
            cache = self.pool.engine_pool.cache
            for table, chain in zip(request.tables, request.chains, strict=True):
                cache(table[: end // BLOCK], chain.keys[: end // BLOCK])

    def collect(self, output):
        if self.kind == "hooks":
            for request, num_tokens in self.hooks.collect(output):
                if request in self.running and request.num_loading:
                    request.num_loading = 0
                    if num_tokens:
                        request.num_computed_tokens = num_tokens
                    else:
                        self.preempt(request)
            return
        done = self.scheduler.update_connector_output(output)
        for name in done.finished_recving:
            self.has_loaded(self.requests[name], is_ok=True)
        for name in done.failed_recving:
            self.has_loaded(self.requests[name], is_ok=False)

    def has_loaded(self, request, *, is_ok):
        if is_ok:
            for table, after in zip(request.tables, request.after, strict=True):
                self.pool.free([block for block in table if block not in after][::-1])
            request.tables = request.after
            request.num_computed_tokens += request.num_loading
            self.cache(request)
        request.num_loading, request.after = 0, None

    def preempt(self, request):
        if self.kind == "hooks":
            self.hooks.free(request, has_ended=False)
        else:
            self.scheduler.request_preempted(request)
            self.preempted.append(request.request_id)
        self.leave(request)
        self.waiting.insert(0, request)

    def end(self, request):
        if self.kind == "hooks":
            if request.tables or request in self.waiting:
                self.hooks_end(request)
        else:
            self.scheduler.request_finished(request, request.tables)
        del self.requests[request.request_id]
        if request in self.running:
            self.leave(request)
        else:
            self.waiting.remove(request)

    def hooks_end(self, request):
        request.tables = request.tables or [[]]
        self.hooks.free(request, has_ended=True)

    def leave(self, request):
        """Free a request's blocks."""
        self.running.remove(request)
        for table in request.tables:
            self.pool.free(table[::-1])
        self.new_blocks.pop(request.request_id, None)
        request.tables, request.num_computed_tokens, request.num_loading = [], 0, 0

    # A step.

    def schedule(self):
        """Return the requests of a step, and their numbers of tokens."""
        shares = []
        for request in list(self.running):
            if request not in self.running or request.num_loading:
                continue
            num = request.num_tokens - request.num_computed_tokens
            num = min(num, self.rng.randint(0, 9))
            if num and self.grow(request, num, shares):
                shares.append((request.request_id, num))
        for request in self.waiting[:]:
            if request.request_id in self.preempted or not self.admit(request):
                break
            self.waiting.remove(request)
            self.running.append(request)
            if not request.num_loading:
                end = min(len(request.tables[0]) * BLOCK, request.num_tokens)
                num = end - request.num_computed_tokens
                shares.append((request.request_id, num))
        return shares

    def grow(self, request, num, shares):
        end = request.num_computed_tokens + num
        while (tables := self.grown(request.tables, end)) is None:
            victim = self.running[-1]
            if victim is request or victim.request_id in dict(shares):
                return False
            self.preempt(victim)
        added = [
            new[len(old) :] for old, new in zip(request.tables, tables, strict=True)
        ]
        if any(added):
            self.new_blocks[request.request_id] = added
        request.tables = tables
        self.cache_allocated(request, end)
        return True

    def plan(self, num_scheduled):
        if self.kind == "hooks":
            return self.hooks.plan(num_scheduled)
        output = SchedulerOutput(num_scheduled, self.new_blocks, self.preempted)
        self.new_blocks, self.preempted = {}, []
        return self.scheduler.build_connector_meta(output)

    def compute(self, shares):
        kv = np.array(self.kv)
        for name, num in shares:
            request = self.requests[name]
            self.read(request, kv)
            for at in range(
                request.num_computed_tokens, request.num_computed_tokens + num
            ):
                for table in request.tables:
                    kv[table[at // BLOCK], at % BLOCK] = content(
                        request.tokens[: at + 1]
                    )
        self.kv = jnp.asarray(kv)
        for name, num in shares:
            request = self.requests[name]
            request.num_computed_tokens += num
            self.cache(request)
            if request.num_computed_tokens == request.num_tokens:
                request.append([self.rng.randrange(3)])
            if request.num_tokens >= request.max_tokens:
                self.end(request)

    def read(self, request, kv):
        """Compare the KV of a request's computed tokens."""
        computed = request.num_computed_tokens
        for spec, table in zip(self.groups, request.tables, strict=True):
            for place in range(first_block_read(spec, computed), -(-computed // BLOCK)):
                ats = range(place * BLOCK, min(computed, (place + 1) * BLOCK))
                if spec != FULL[0]:
                    ats = [at for at in ats if at > computed - spec.window]
                right = [content(request.tokens[: at + 1]) for at in ats]
                block = kv[table[place]]
                self.num_read += len(right)
                if (
                    table[place] == NULL_BLOCK
                    or block[[at % BLOCK for at in ats]].tolist() != right
                ):
                    raise WrongKVError(f"{request.request_id}, block {place}: {block}")

    def cache(self, request):
        if self.kind == "hooks":
            full = request.num_computed_tokens // BLOCK
            self.pool.engine_pool.cache(
                request.tables[0][:full], request.block_keys[:full]
            )
            return
        for table, chain in zip(request.tables, request.chains, strict=True):
            full = request.num_computed_tokens // BLOCK
            self.pool.cache(table[:full], chain.keys[:full])
