"""A random engine that owns its pool, and gives blocks their hashes at allocation.

It is in the shape of vLLM: prefix cache, sliding windows, chunked prefill, preemption,
tokens taken back, asynchronous steps, and a worker that may be in another process. Its
KV is a number per token, which depends on the weights, the adapter and all tokens up to
it, so that each read is compared with its right value, whatever a key says.
"""

import collections
import types

import numpy as np

from jaxkv import (
    BorrowedPool,
    ConnectorOutput,
    Extras,
    FullAttention,
    KeyChain,
    Namespace,
    OffloadRules,
    OffloadScheduler,
    SchedulerOutput,
    SlidingWindow,
)
from jaxkv.integrations.engine_hooks import EngineHooks
from jaxkv.types import NO_BLOCK
from tests.campaign import truth
from tests.campaign.model import WrongBytesError
from tests.rigs.children import FORKS

SIZE = 4  # Tokens per block.
FULL, WINDOW = FullAttention(SIZE), SlidingWindow(SIZE, 5)
WIDE = SlidingWindow(SIZE, 10)
GROUPS = ((FULL,), (WINDOW,), (WIDE,), (FULL, WINDOW), (WIDE, FULL))
MAX_RUNNING, MAX_REQUESTS, MAX_TOKENS, STEP_TOKENS = 4, 8, 30, 24
_MASK = (1 << 62) - 1


def extend(value, token, weights):
    """KV of a token: a number that depends on all before it."""
    value = (value * 6364136223846793005 + token * 7919 + weights * 104729 + 1) & _MASK
    return value ^ value >> 29


def random_setup(rng, *, has_process=None):
    by_hooks, is_roomy = rng.random() < 0.5, rng.random() < 0.25
    groups = (FULL,) if by_hooks else rng.choice(GROUPS)
    is_async = rng.random() < 0.5
    has_pairs = groups == (FULL,) and not is_roomy
    if has_process is None:
        has_process = rng.random() < 0.05
    return types.SimpleNamespace(
        groups=groups,
        by_hooks=by_hooks,
        num_blocks=rng.choice((10, 12, 16, 24)) * len(groups),
        num_host_blocks=6000 if is_roomy else rng.choice((3, 8, 24, 200)),
        rules=OffloadRules(
            max_blocks_in_flight=None if is_roomy else rng.choice((None, 2, 6)),
            store_batch_blocks=rng.choice((0, 0, 3, None)),
            store_max_wait_steps=rng.choice((1, 4)),
            blocks_per_host_block=rng.choice((1, 2)) if has_pairs else 1,
            delay_shared_loads=rng.random() < 0.3,
        ),
        is_async=is_async,
        has_process=has_process,
        # Steps until the scheduler has a report.
        lag=rng.choice((0, 1, 3)),
        # Whether tokens count as computed once their load begins.
        counts_loads=rng.random() < 0.5,
        # Whether the prefix cache gets blocks a step late.
        caches_late=rng.random() < 0.3,
        has_content_of=rng.random() < 0.6,
        # Whether a store may read its blocks until it is reported.
        reads_late=rng.random() < 0.5,
        # Nothing fails and the host has room: all must be stored.
        is_roomy=is_roomy,
        failures=0.0 if is_roomy else rng.choice((0.0, 0.2, 0.5)),
    )


class Worker:
    """Device, host and model. A step's loads and stores end some steps later."""

    def __init__(self, setup, seed):
        factor = setup.rules.blocks_per_host_block
        self.setup, self.rng = setup, np.random.default_rng(seed)
        self.kv = np.full((setup.num_blocks, SIZE), -1)
        self.host = np.full((setup.num_host_blocks, factor, SIZE), -2)
        self.in_flight = []
        self.number = 0

    def step(self, message):
        """Return the transfers that have ended, and names of reads that were wrong."""
        meta, writes, reads, names = message
        self.number += 1
        report = [[], [], [], []]
        for transfer in [t for t in self.in_flight if t[0] <= self.number]:
            self.in_flight.remove(transfer)
            self._end(*transfer[1:], report)
        self._start(meta)
        blocks, places, values = writes
        self.kv[blocks, places] = values
        blocks, places, values, owners = reads
        wrong = np.unique(owners[self.kv[blocks, places] != values])
        return ConnectorOutput(*map(tuple, report)), [names[row] for row in wrong]

    def _start(self, meta):
        factor, rng = self.setup.rules.blocks_per_host_block, self.rng
        due = self.number + int(rng.integers(1, 5))
        fails = rng.random() < self.setup.failures
        if meta.store_host_blocks:
            ids = np.array(meta.store_device_blocks).reshape(-1, factor)
            now = None if self.setup.reads_late else self.kv[ids].copy()
            targets = list(meta.store_host_blocks)
            event = meta.store_event
            self.in_flight.append((due, "store", fails, event, ids, targets, now))
        if meta.load_host_blocks:
            ids = np.array(meta.load_device_blocks).reshape(-1, factor)
            self.kv[ids[ids != NO_BLOCK]] = -3  # A load may write at any time.
            names = meta.load_event_to_reqs[meta.load_event]
            fails = rng.random() < self.setup.failures
            sources = list(meta.load_host_blocks)
            self.in_flight.append((due, "load", fails, names, ids, sources, None))

    def _end(self, kind, fails, event, device, host, values, report):
        if kind == "store":
            report[3 if fails else 2].append(event)
            values = self.kv[device] if values is None else values
            is_meant = device[..., None] != NO_BLOCK
            values = np.where(is_meant, values, self.host[host])
            self.host[host] = -4 if fails else values
            return
        report[1 if fails else 0].extend(event)
        is_meant = device != NO_BLOCK
        self.kv[device[is_meant]] = -5 if fails else self.host[host][is_meant]


def _serve(pipe, setup, seed):
    worker = Worker(setup, seed)
    while (message := pipe.recv()) is not None:
        pipe.send(worker.step(message))


class Link:
    """Messages to a worker, here or in another process; replies come late."""

    def __init__(self, setup, seed):
        self.lag, self.replies, self.process = setup.lag, collections.deque(), None
        if setup.has_process:
            self.pipe, other = FORKS.Pipe()
            self.process = FORKS.Process(target=_serve, args=(other, setup, seed))
            self.process.start()
            other.close()
        else:
            self.worker = Worker(setup, seed)

    def send(self, message):
        if self.process:
            self.pipe.send(message)
        self.replies.append(None if self.process else self.worker.step(message))

    def receive(self):
        while len(self.replies) > self.lag:
            yield self.replies.popleft() or self.pipe.recv()

    def close(self):
        if self.process:
            self.pipe.send(None)
            self.process.join()


class Pool:
    """An engine's blocks: free list, reference counts and prefix cache."""

    def __init__(self, num_blocks):
        self.counts, self.users = [0] * num_blocks, [0] * num_blocks
        self.free = collections.OrderedDict.fromkeys(range(1, num_blocks))
        self.hashes, self.by_hash = {}, {}

    def allocate(self, num):
        blocks = [self.free.popitem(last=False)[0] for _ in range(num)]
        for block in blocks:
            self.counts[block] = self.users[block] = 1
            self.uncache(block)
        return blocks

    def hold(self, blocks):
        for block in blocks:
            self.free.pop(block, None)
            self.counts[block] += 1

    def release(self, blocks):
        for block in blocks:
            self.counts[block] -= 1
            assert self.counts[block] >= 0
            if not self.counts[block]:
                self.free[block] = None

    def cache(self, block, content):
        if block and block not in self.hashes and content not in self.by_hash:
            self.hashes[block] = content
            self.by_hash[content] = block

    def uncache(self, block):
        content = self.hashes.pop(block, None)
        if content is not None:
            del self.by_hash[content]

    def reset(self):
        self.hashes.clear()
        self.by_hash.clear()


class Request:
    """A request, with the attributes that the scheduler or the hooks read."""

    def __init__(self, name, tokens, max_tokens, adapter, weights, groups):
        self.request_id, self.tokens, self.max_tokens = name, list(tokens), max_tokens
        self.adapter, self.weights, self.groups = adapter, weights, groups
        self.prompt = tuple(tokens)
        # Tokens that have been sampled but that the scheduler does not know yet.
        self.unknown = []
        self.num_running = 0  # Steps in flight that compute it.
        self.is_mixed = False
        self.extras = Extras(lora_name=f"adapter {adapter}" if adapter else None)
        self.chains = [
            KeyChain(namespace(weights), self.extras, group=group)
            for group in range(len(groups))
        ]
        for chain in self.chains:
            chain.extend(self.tokens)
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.lose_blocks()

    def lose_blocks(self):
        self.life = object()  # A step that ends may belong to an earlier life.
        self.tables = [[] for _ in self.groups]
        self.first_held = [0] * len(self.groups)
        self.num_computed_tokens = self.num_output_placeholders = 0
        self.num_cached, self.num_loading, self.phase = 0, 0, "waiting"
        self.num_read = [0] * len(self.groups)
        self.num_planned = 0  # Tokens before the last step that was planned.
        self.unknown, self.new_blocks = [], [[] for _ in self.groups]
        self.kv = []  # The KV of its tokens, of those that are in its blocks.

    num_tokens = property(lambda self: len(self.tokens))
    block_keys = property(lambda self: self.chains[0].keys)
    block_keys_by_group = property(lambda self: [chain.keys for chain in self.chains])

    def fill(self, num_tokens, weights):
        """Compute the KV of its tokens so far, which it may read."""
        tokens = self.tokens + self.unknown
        value = self.kv[-1] if self.kv else extend(17, self.adapter, 0)
        for token in tokens[len(self.kv) : num_tokens]:
            value = extend(value, token, weights)
            self.kv.append(value)


def namespace(weights):
    return Namespace("driver", str(weights), "int64", "tokens", SIZE)


class BorrowedEngine:
    """The engine: `run` serves random requests, and compares all that they read."""

    def __init__(self, setup, rng, counts, note):
        self.setup, self.rng, self.counts, self.note = setup, rng, counts, note
        self.groups, self.pool = setup.groups, Pool(setup.num_blocks)
        self.link = Link(setup, rng.randrange(1 << 32))
        self.weights, self.num_weights, self.adapters = 1, 1, [1, 2]
        self.scheduler = OffloadScheduler(
            setup.groups, setup.num_host_blocks, rules=setup.rules
        )
        self.borrowed = BorrowedPool(
            setup.num_blocks,
            num_free=lambda: len(self.pool.free),
            hold=self.pool.hold,
            release=self.pool.release,
            content_of=self.pool.hashes.get if setup.has_content_of else None,
            count_of=self.pool.counts.__getitem__,
        )
        self.hooks = None
        if setup.by_hooks:
            self.hooks = EngineHooks(
                self.scheduler,
                self.borrowed,
                namespace(self.weights),
                tokens_of=lambda request: request.tokens,
                table_of=lambda request: request.tables[0],
                extras_of=lambda request: request.extras,
            )
        else:
            self.scheduler.bind_device_block_pool(self.borrowed)
        self.requests, self.waiting, self.running = {}, [], []
        self.preempted, self.served = [], []
        self.last, self.is_calm, self.num_requests = [], False, 0
        self.stories = [[rng.randrange(3) for _ in range(20)] for _ in range(2)]
        self.taken_back = []  # What requests were before their tokens were taken back.
        self.left_early = set()  # Contents that left a window before any plan saw them.

    def run(self, num_steps):
        try:
            for _ in range(num_steps):
                self.step()
            self.settle()
        finally:
            self.link.close()

    def step(self):
        self.counts["steps"] += 1
        for output, wrong in self.link.receive():
            if wrong:
                raise WrongBytesError("wrong bytes: " + "; ".join(wrong))
            self.collect(output)
        if not self.is_calm:
            self.act_at_random()
        shares = self.dispatch(self.schedule())
        if self.setup.is_async:
            self.last, shares = shares, self.last
        self.update(shares)

    # Transfers that have ended.

    def collect(self, output):
        if self.hooks:
            for request, num_tokens in self.hooks.collect(output):
                if request.phase != "ready":
                    self.arrive(request, bool(num_tokens))
            return
        done = self.scheduler.update_connector_output(output)
        for name in done.finished_recving:
            self.arrive(self.requests[name], True)
        for name in done.failed_recving:
            self.arrive(self.requests[name], False)

    def arrive(self, request, is_loaded):
        num, request.num_loading = request.num_loading, 0
        self.note(f"{request.request_id}: load of {num} tokens, arrived: {is_loaded}")
        if is_loaded:
            request.num_computed_tokens += 0 if self.setup.counts_loads else num
            self.counts["blocks loaded"] += num // SIZE
            self.cache(request, request.num_computed_tokens)
            return self.start(request, "ready")
        self.counts["loads failed"] += 1
        can_go_on = not self.hooks and not any(0 in table for table in request.tables)
        if can_go_on and self.rng.random() < 0.5:
            request.num_computed_tokens -= num if self.setup.counts_loads else 0
            self.start(request, "running")
        else:
            self.preempt(request)

        return None

    def start(self, request, phase):
        request.phase, request.num_planned = phase, request.num_computed_tokens
        request.fill(request.num_computed_tokens, request.weights)
        self.running.append(request)

    # What may come at any time.

    def act_at_random(self):
        rng, chance = self.rng, self.rng.random
        if chance() < 0.7 and len(self.requests) < MAX_REQUESTS:
            self.submit()
            if chance() < 0.4:  # Its twin hits blocks that are not computed yet.
                twin = self.waiting[-1]
                self.submit(twin.tokens, twin.adapter)
        alive = list(self.requests.values())
        if alive and chance() < 0.04:
            self.end(rng.choice(alive))
            self.counts["aborts"] += 1
        held = [r for r in self.requests.values() if r.phase != "waiting"]
        if held and chance() < 0.06:
            self.preempt(rng.choice(held))
        if self.running and not self.setup.is_roomy:
            self.rewrite(rng.choice(self.running))
        # A block whose `content_of` changes is not stored, as the documents say.
        if chance() < 0.25 and not (self.setup.is_roomy and self.setup.has_content_of):
            self.pool.reset()
        if chance() < 0.02 and not self.setup.is_roomy:
            self.replace_adapter()
        if chance() < 0.02 and not self.setup.is_roomy:
            self.change_weights()

    def submit(self, tokens=None, adapter=None, max_tokens=None):
        rng = self.rng
        if tokens is None:
            tokens, adapter = (), rng.choice((0,) * 6 + tuple(self.adapters))
            if self.taken_back and rng.random() < 0.5:
                tokens, adapter = self.taken_back.pop(0)
            elif rng.random() < 0.9:
                tokens = rng.choice(self.stories)
                tokens = tokens[: rng.randint(1, len(tokens))]
            tokens = [*tokens, *(rng.randrange(3) for _ in range(rng.randint(1, 3)))]
            tokens = tokens[: MAX_TOKENS - 6]
        self.num_requests += 1
        if max_tokens is None:
            max_tokens = min(len(tokens) + rng.randint(1, 12), MAX_TOKENS)
        name = f"r{self.num_requests}"
        options = tokens, max_tokens, adapter, self.weights, self.groups
        request = self.requests[name] = Request(name, *options)
        self.waiting.append(request)
        self.note(f"{name}: {len(tokens)} tokens, adapter {adapter}: {tokens}")

    def resubmit(self, requests):
        """End requests, and let those that have not finished start again."""
        for request in requests:
            adapter = request.adapter
            if adapter and adapter not in self.adapters:
                adapter = self.rng.choice(self.adapters)
            self.end(request)
            self.submit(request.prompt, adapter, request.max_tokens)

    def replace_adapter(self):
        """Replace an adapter, or roll it back, in place."""
        place = self.rng.randrange(2)
        old, self.adapters[place] = self.adapters[place], self.rng.randint(1, 5)
        self.counts["adapters changed"] += 1
        if old not in self.adapters:
            self.resubmit([r for r in self.requests.values() if r.adapter == old])

    def change_weights(self):
        """Change the model's weights, or roll them back."""
        self.update(self.last)
        self.last = []
        self.num_weights += self.rng.random() < 0.5
        self.weights = self.rng.randint(1, self.num_weights)
        self.counts["weights changed"] += 1
        self.note(f"weights {self.weights}")
        self.pool.reset()
        if not self.hooks:
            return self.resubmit(list(self.requests.values()))
        self.hooks.change_namespace(namespace(self.weights))
        for request in self.requests.values():
            request.is_mixed = request.phase != "waiting"
            if request.phase == "waiting":
                request.weights = self.weights

    def rewrite(self, request):
        """Take back tokens that were sampled, and sample others."""
        rng, num_prompt = self.rng, len(request.prompt)
        if request.num_running or rng.random() < 0.2:
            return
        num_kept = request.num_tokens - rng.choice((1, 2, 4, 5, 6))
        if num_kept < num_prompt:
            return
        first = num_kept // SIZE
        lost = [block for table in request.tables for block in table[first:] if block]
        if any(0 in table[first:] for table in request.tables) or any(
            truth.first_block_read(spec, first * SIZE) < held
            for spec, held in zip(self.groups, request.first_held, strict=True)
        ):
            return
        if any(self.pool.users[block] > 1 for block in lost):
            return
        num_added = rng.choice((0, request.num_tokens - num_kept))
        new = [rng.randrange(3) for _ in range(max(num_added, 1))]
        self.note(f"{request.request_id}: tokens from {num_kept} on become {new}")
        self.counts["rewrites"] += 1
        if first < request.num_computed_tokens // SIZE:  # A full block is overwritten.
            old = request.tokens[:], request.adapter
            self.taken_back = [*self.taken_back[-3:], old]
        request.tokens[num_kept:] = new
        request.num_computed_tokens = min(request.num_computed_tokens, num_kept)
        request.num_cached = min(request.num_cached, first)
        del request.kv[request.num_computed_tokens :]
        for block in lost:
            self.pool.uncache(block)
        for chain in request.chains:
            chain.follow(request.tokens)
        if not self.hooks and len(lost) <= len(self.pool.free) and rng.random() < 0.5:
            # Other blocks, as the documents advise: the kept tokens of the first block
            # are computed again.
            request.num_computed_tokens = min(request.num_computed_tokens, first * SIZE)
            del request.kv[request.num_computed_tokens :]
            for table in request.tables:
                self.give_back(table[first:])
                table[first:] = self.pool.allocate(len(table) - first)
            request.new_blocks = [[] for _ in self.groups]
            self.scheduler.update_state_after_alloc(request, self.table(request), 0)

    # Requests get blocks and lose them.

    def table(self, request):
        tables = [list(table) for table in request.tables]
        return tables if len(tables) > 1 else tables[0]

    def content(self, request, group, place):
        """What the prefix cache calls a block's content: all it depends on."""
        tokens = tuple((request.tokens + request.unknown)[: (place + 1) * SIZE])
        return request.weights, request.adapter, group, tokens

    def cache(self, request, end):
        """Make full blocks findable, before or after they are computed."""
        num_full = min(end, request.num_tokens) // SIZE
        if request.is_mixed:
            return
        for group, table in enumerate(request.tables):
            first = max(request.num_cached, request.first_held[group])
            for place in range(first, min(num_full, len(table))):
                self.pool.cache(table[place], self.content(request, group, place))
        request.num_cached = max(request.num_cached, num_full)

    def give_back(self, blocks):
        for block in blocks:
            self.pool.users[block] -= bool(block)
        self.pool.release([block for block in blocks[::-1] if block])

    def find(self, request):
        """Return the device's longest prefix, in tokens, and its blocks by group."""
        for num in range((request.num_tokens - 1) // SIZE, 0, -1):
            tables = []
            for group, spec in enumerate(self.groups):
                first = truth.first_block_read(spec, num * SIZE)
                hashes = [self.content(request, group, n) for n in range(first, num)]
                blocks = [self.pool.by_hash.get(content) for content in hashes]
                if None in blocks:
                    break
                tables.append([0] * first + blocks)
            else:
                return num * SIZE, tables
        return 0, [[] for _ in self.groups]

    def contents_read(self, request, num):
        """Return what a hit of `num` blocks needs in all groups."""
        return [
            self.content(request, group, place)
            for group, spec in enumerate(self.groups)
            for place in range(truth.first_block_read(spec, num * SIZE), num)
        ]

    def query(self, request, num_found):
        if self.hooks:
            return self.hooks.query(request, num_found)
        return self.scheduler.get_num_new_matched_tokens(request, num_found)[0]

    def free(self, request):
        if self.hooks:
            self.hooks.free(request, has_ended=True)
        else:
            self.scheduler.request_finished(request, self.table(request))

    def admit(self, request, num_left):
        """Admit a request; return whether the next may follow."""
        num_found, found = self.find(request)
        offer = self.query(request, num_found)
        if offer is None:
            return True
        if self.rng.random() < 0.03:
            self.end(request)  # It is aborted with an unanswered offer.
            return True
        num = request.num_tokens - num_found
        num = num if offer else min(num, num_left)
        end = num_found + num

        def allocate(num_tokens, delay_cache_blocks):
            tables, holes = [list(table) for table in found], []
            for group, spec in enumerate(self.groups):
                first = truth.first_block_read(spec, num_found + offer)
                first = first if offer and self.rng.random() < 0.7 else 0
                for place in range(len(found[group]), -(-end // SIZE)):
                    tables[group].append(0)
                    if place >= first:
                        holes.append((group, place))
            blocks = [block for table in found for block in table if block]
            idle = sum(not self.pool.counts[block] for block in blocks)
            if len(holes) + idle > len(self.pool.free):
                return None
            self.pool.hold(blocks)
            for block in blocks:
                self.pool.users[block] += 1
            new = self.pool.allocate(len(holes))
            for (group, place), block in zip(holes, new, strict=True):
                tables[group][place] = block
            request.tables = tables
            return new

        if self.hooks:
            self.hooks.allocate(request, num, allocate)
            is_loading, is_allocated = self.hooks.is_loading(request), request.tables[0]
        else:
            is_allocated = allocate(num, offer > 0) is not None
            table, num_new = (self.table(request), offer) if is_allocated else ([], 0)
            self.scheduler.update_state_after_alloc(request, table, num_new)
            is_loading = num_new > 0
        if not is_allocated:
            return False
        self.waiting.remove(request)
        request.num_computed_tokens = num_found
        request.first_held = [
            truth.first_block_read(spec, num_found + offer) for spec in self.groups
        ]
        request.num_cached = num_found // SIZE
        self.note(f"{request.request_id}: {num_found} + {offer} in {request.tables}")
        if is_loading:
            request.phase, request.num_loading = "loading", offer
            if self.setup.counts_loads:
                request.num_computed_tokens += offer
            return True
        self.start(request, "running")
        # Between its admission and the plan; its hits may not be computed yet.
        if self.rng.random() < (0.3 if num_found and not self.is_calm else 0.05):
            self.rng.choice((self.end, self.end, self.preempt))(request)
        return True

    def preempt(self, request):
        self.counts["preemptions"] += 1
        self.note(f"{request.request_id}: preempted")
        if self.hooks:
            self.hooks.free(request, has_ended=False)
        else:
            self.scheduler.request_preempted(request)
            self.preempted.append(request.request_id)
        self.leave(request)
        request.is_mixed, request.weights = False, self.weights
        self.waiting.insert(0, request)

    def end(self, request):
        self.note(f"{request.request_id}: ends, {request.phase}")
        self.free(request)
        if request in self.waiting:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        self.leave(request)

    def leave(self, request):
        if request in self.running:
            self.running.remove(request)
        for table in request.tables:
            self.give_back(table)
        request.lose_blocks()

    # A step.

    def schedule(self):
        """Choose a step's tokens: requests with their first token and their number."""
        rng, num_left, shares = self.rng, STEP_TOKENS, {}
        for request in list(self.running):
            if request not in self.running or not num_left:
                continue
            known = request.num_tokens + request.num_output_placeholders
            num = min(known, request.max_tokens - 1) - request.num_computed_tokens
            num = min(num, num_left)
            if num > 1 and rng.random() < 0.5:
                num = rng.randint(1, num)
            if num <= 0 or (not self.is_calm and rng.random() < 0.1):
                continue
            self.trim(request)
            while not self.grow(request, request.num_computed_tokens + num):
                victims = [r for r in self.running if r.request_id not in shares]
                self.preempt(victims[-1])
                if victims[-1] is request:
                    break
            else:
                shares[request.request_id] = request, num
                num_left -= num
        barred = set(self.preempted) if rng.random() < 0.5 else ()
        for request in list(self.waiting):
            if not num_left or len(self.running) >= MAX_RUNNING:
                break
            if request.request_id in barred:
                continue
            if not self.admit(request, num_left):
                break
            if request in self.running:
                room = max(map(len, request.tables)) * SIZE
                num = min(request.num_tokens, room) - request.num_computed_tokens
                num = min(num, num_left)
                shares[request.request_id] = request, num
                num_left -= num
                if not self.setup.caches_late:
                    self.cache(request, request.num_computed_tokens + num)
        return shares

    def grow(self, request, end):
        wanted = [max(-(-end // SIZE) - len(table), 0) for table in request.tables]
        if sum(wanted) > len(self.pool.free):
            return False
        for group, num in enumerate(wanted):
            new = self.pool.allocate(num)
            request.tables[group] += new
            request.new_blocks[group] += new
        if not self.setup.caches_late:
            self.cache(request, end)
        return True

    def trim(self, request):
        """Free blocks that no later token reads; the prefix cache still finds them."""
        num = request.num_computed_tokens - request.num_output_placeholders
        for group, table in enumerate(request.tables):
            spec = self.groups[group]
            first = min(truth.first_block_read(spec, num), len(table))
            places = range(request.num_planned // SIZE, first)
            contents = [self.content(request, group, p) for p in places if table[p]]
            self.left_early.update(contents)
            self.give_back(table[:first])
            table[:first] = [0] * first
            request.first_held[group] = max(request.first_held[group], first)

    def dispatch(self, shares):
        """Plan the transfers, and send the step to the worker."""
        tokens = {name: num for name, (_, num) in shares.items()}
        if self.hooks:
            meta = self.hooks.plan(tokens)
        else:
            new = {
                r.request_id: r.new_blocks if len(self.groups) > 1 else r.new_blocks[0]
                for r in self.running
                if any(r.new_blocks)
            }
            output = SchedulerOutput(tokens, new, tuple(self.preempted))
            meta = self.scheduler.build_connector_meta(output)
        self.preempted = []
        running, reads, writes, names = [], [], [], []
        for request, num in shares.values():
            request.new_blocks = [[] for _ in self.groups]
            start, end = request.num_computed_tokens, request.num_computed_tokens + num
            request.num_planned = start
            request.fill(end, self.weights)
            kv = np.array(request.kv)
            for group, table in enumerate(request.tables):
                spec = self.groups[group]
                at = np.arange(truth.first_token_read(spec, start), end)
                blocks = np.array(table)[at // SIZE]
                values, is_new = kv[at] ^ group, at >= start
                rows = np.array([blocks, at % SIZE, values])
                assert blocks.all(), f"{request.request_id} reads the null block"
                writes.append(rows[:, is_new])
                owner = np.full(np.count_nonzero(~is_new), len(names))
                reads.append(np.vstack([rows[:, ~is_new], owner]))
                # Later steps read the same blocks again: only the first time counts.
                num_read = -(-start // SIZE)
                first = max(request.num_read[group], int(at[0]) // SIZE)
                self.counts["block reads compared"] += max(num_read - first, 0)
                request.num_read[group] = max(num_read, request.num_read[group])
                names.append(
                    f"step {self.counts['steps']}, {request.request_id}, group {group},"
                    f" tokens {at[0]}-{start - 1}, table {table}"
                )
            request.num_computed_tokens = end
            request.is_sampled = end == request.num_tokens + len(request.unknown)
            request.num_running += 1
            if request.is_sampled:
                request.unknown.append(self.rng.randrange(3))
                request.num_output_placeholders += 1
            running.append((request, request.is_sampled, request.life))
        reads = np.hstack(reads) if reads else np.zeros((4, 0), int)
        writes = np.hstack(writes) if writes else np.zeros((3, 0), int)
        self.link.send((meta, writes, reads, names))
        return running

    def update(self, shares):
        """Add the tokens of a step that has run."""
        for request, is_sampled, life in shares:
            request.num_running -= 1
            if request.life is not life:
                continue
            if is_sampled:
                request.num_output_placeholders -= 1
                request.tokens.append(request.unknown.pop(0))
                for chain in request.chains:
                    chain.extend(request.tokens[-1:])
            num = request.num_computed_tokens - request.num_output_placeholders
            self.cache(request, num)
            if request.num_tokens >= request.max_tokens:
                self.counts["requests served"] += 1
                self.stories[2:] = [*self.stories[2:][-2:], request.tokens]
                if not request.is_mixed:
                    self.served.append((request.adapter, tuple(request.tokens), num))
                self.end(request)

    # The end.

    def settle(self):
        """Serve the remaining requests; then nothing may be left behind."""
        self.is_calm, scheduler = True, self.scheduler
        for _ in range(3000):
            self.step()
            is_moving = scheduler.has_pending_stores() or scheduler.has_pending_loads()
            if not (self.requests or self.last or is_moving):
                break
        assert not self.requests, f"never served: {sorted(self.requests)}"
        self.link.lag = 0
        self.step()
        assert not any(self.pool.counts), "blocks left behind"
        # A window may free blocks that wait for a batch.
        waits = self.groups != (FULL,) and self.setup.rules.store_batch_blocks != 0
        if self.setup.is_roomy and not waits:
            self.check_all_is_stored()

    def check_all_is_stored(self):
        """The host has room for all: it must have what each request has computed."""
        for number, (adapter, tokens, num_computed) in enumerate(self.served):
            options = (*tokens, 0), MAX_TOKENS, adapter, self.weights, self.groups
            request = Request(f"after {number}", *options)
            offer = self.query(request, 0)
            self.free(request)
            num = num_computed // SIZE
            while not self.left_early.isdisjoint(self.contents_read(request, num)):
                num -= 1
            num *= SIZE
            assert offer >= num, f"never stored: {offer} of {num} tokens of {tokens}"
            self.counts["served requests found on the host"] += 1


def run_borrowed(rng, counts, note, steps, **options):
    setup = random_setup(rng, **options)
    note(str(setup))
    BorrowedEngine(setup, rng, counts, note).run(steps)
