"""An engine like vLLM's on TPU: a scheduler and a runner, with a connector in each.

The runner knows what every slot of its KV caches must contain, and checks before each
step all that the step's attention reads. Messages between the two halves are pickled,
as between processes.
"""

import functools
import hashlib
import pickle
import time
from collections import Counter, deque
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.scheduling.protocol import NO_REPORTS, ConnectorOutput
from tests.rigs.fake_vllm import (
    BLOCK_SIZE,
    BlockPool,
    CachedRequestData,
    KVCacheBlocks,
    KVConnectorOutput,
    KVConnectorRole,
    SchedulerOutput,
    create_connector,
    make_configs,
)

MAX_TOKENS = 16


def next_token(tokens):
    return hashlib.sha256(repr(tokens).encode()).digest()[0] % 50


def reference(prompt, num_output, updates=()):
    """Return the tokens of a request's last turn without a host tier."""
    tokens = list(prompt)
    for update, num in ([], num_output), *updates:
        if update:  # The last token of a turn has no KV: it is dropped.
            tokens = [*tokens[:-1], *update]
        for _ in range(num):
            tokens.append(next_token(tokens))
    return tokens


@functools.lru_cache(maxsize=1 << 16)
def slot(prefix, group, layer):
    """The content of a layer of a group for the last token of a prefix."""
    seed = hashlib.sha256(repr((prefix, group, layer)).encode()).digest()
    values = np.random.default_rng(list(seed)).standard_normal((2, 2, 8), np.float32)
    return values.astype(jnp.bfloat16)


class Scheduler:
    """vLLM's scheduler: chunked prefill, prefix caching, preemption, drafts."""

    MAX_RUNNING = 4

    def __init__(self, connector, num_blocks, windows, *, newer, num_drafts=0):
        self.connector = connector
        self.num_drafts = num_drafts
        self.pool = BlockPool(num_blocks, newer=newer)
        self.windows = windows
        self.requests = {}
        self.tables = {}
        self.waiting = deque()
        self.running = []
        self.finished_recving, self.failed_recving = set(), set()
        self.preempted, self.finished = set(), set()
        # Outputs in flight; `stale` counts the ones from before a preemption.
        self.expected, self.stale = Counter(), Counter()
        self.num_external_tokens = 0
        self.was_preempted = set()
        self.response_params = {}
        self.newer = newer
        self.num_waits = 0
        if newer:
            manager = SimpleNamespace(block_pool=self.pool)
            connector.bind_kv_cache_manager(manager)
        else:
            connector.bind_gpu_block_pool(self.pool)

    def add(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self):
        self.budget, self.num_scheduled, self.drafts = MAX_TOKENS, {}, {}
        new, cached, has_sync = [], CachedRequestData([], set(), []), False
        num_preempted = len(self.preempted)
        for request in list(self.running):
            if request not in self.running:
                continue
            num_known = request.num_tokens + request.num_output_placeholders
            num = min(num_known - request.num_computed_tokens, self.budget)
            if num <= 0:
                continue
            is_decode = request.num_computed_tokens >= request.num_prompt_tokens
            if num == num_known - request.num_computed_tokens and is_decode:
                max_drafts = min(self.budget - num, request.max_tokens - num_known)
                num_drafts = max(min(self.num_drafts, max_drafts), 0)
                self.drafts[request.request_id] = num_drafts
                num += num_drafts
            before = [len(table) for table in self.tables[request.request_id]]
            num_tokens = request.num_computed_tokens + num
            while not (has_room := self.allocate(request, num_tokens)):
                if self.newer and self.connector.has_pending_block_frees():
                    self.num_waits += 1
                    break
                victim = self.running.pop()
                self.preempt(victim)
                if victim is request:
                    break
            if not has_room:
                break
            added = zip(self.tables[request.request_id], before, strict=True)
            ids = tuple([b.block_id for b in table[start:]] for table, start in added)
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(ids if any(ids) else None)
            self.note(request, num)
        if len(self.preempted) == num_preempted:
            skipped = []
            # Requests with blocks come first.
            is_new = {True: deque(), False: deque()}
            for request in self.waiting:
                is_new[request.request_id not in self.tables].append(request)
            self.waiting = is_new[False] + is_new[True]
            while self.waiting and self.budget and len(self.running) < self.MAX_RUNNING:
                answer = self.admit(self.waiting[0])
                if answer == "no room":
                    self.preempt_a_session()
                    break
                request = self.waiting.popleft()
                if answer == "skipped":
                    skipped.append(request)
                    continue
                has_sync |= answer == "sync"
                name = request.request_id
                if name in self.was_preempted:
                    ids = KVCacheBlocks(self.tables[name]).get_block_ids()
                    cached.req_ids.append(name)
                    cached.resumed_req_ids.add(name)
                    cached.new_block_ids.append(ids)
                else:
                    new.append(name)
            self.waiting.extendleft(reversed(skipped))
        output = SchedulerOutput(
            new, cached, self.num_scheduled, self.finished, self.preempted, has_sync
        )
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        output.work = {
            name: (
                self.requests[name].num_computed_tokens,
                num,
                KVCacheBlocks(self.tables[name]).get_block_ids(),
            )
            for name, num in self.num_scheduled.items()
        }
        output.all_tokens = {
            name: list(self.requests[name].tokens)
            for name in (*new, *cached.resumed_req_ids)
        }
        self.finished, self.preempted = set(), set()
        output.drafts = self.drafts
        for name, num in self.num_scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += num
            num_known = request.num_tokens + request.num_output_placeholders
            if request.num_computed_tokens >= num_known:
                request.num_output_placeholders += 1 + self.drafts.get(name, 0)
                self.expected[name] += 1
        return output

    def admit(self, request):
        name = request.request_id
        if request.status == "WAITING_FOR_STREAMING_REQ":
            request.status = "WAITING_FOR_ITS_STEP"
            return "skipped"
        if request.status == "WAITING_FOR_ITS_STEP":
            request.status = "WAITING"
            request.stream(*request.inputs.popleft())
        if request.status == "WAITING_FOR_REMOTE_KVS":
            if name not in self.finished_recving:
                return "skipped"
            self.finished_recving.discard(name)
            if name in self.failed_recving and not request.num_computed_tokens:
                self.free(request)
            self.failed_recving.discard(name)
            self.cache(request, request.num_computed_tokens)
            request.status = "WAITING"
        hits, external, is_async = [], 0, False
        computed = request.num_computed_tokens
        if computed == 0:
            hits = self.find_hits(request)
            request.num_hits = len(hits)
            computed = len(hits) * BLOCK_SIZE
            external, is_async = self.connector.get_num_new_matched_tokens(
                request, computed
            )
            if external is None:
                return "skipped"
            assert external % BLOCK_SIZE == 0
            assert computed + external < request.num_tokens
            computed += external
        num = min(request.num_tokens - computed, self.budget) * (not is_async)
        if is_async and not self.has_room_for_all(request):
            return "no room"
        if not self.allocate(request, computed + num, hits, computed):
            return "no room"
        blocks = KVCacheBlocks(self.tables[name])
        self.connector.update_state_after_alloc(request, blocks, external)
        self.num_external_tokens += external
        request.num_computed_tokens = computed
        if is_async:
            request.status = "WAITING_FOR_REMOTE_KVS"
            return "skipped"
        request.status = "RUNNING"
        self.running.append(request)
        self.note(request, num)
        return "sync" if external else "none"

    def find_hits(self, request):
        hits = []
        for block_hash in request.block_hashes[
            : (request.num_tokens - 1) // BLOCK_SIZE
        ]:
            block = self.pool.get_cached_block(block_hash, 0)
            if block is None or len(self.windows) > 1:
                break
            hits.append(block)
        return hits

    def first_needed(self, group, num_tokens):
        window = self.windows[group]
        return max(num_tokens - window + 1, 0) // BLOCK_SIZE if window else 0

    def allocate(self, request, num_tokens, hits=(), num_computed=0):
        tables = self.tables.get(request.request_id, ([],) * len(self.windows))
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        plans = []
        for group, table in enumerate(tables):
            first = self.first_needed(group, num_computed) if not table else 0
            start = max(len(table) + len(hits), min(first, num_blocks))
            plans.append((start, max(num_blocks - start, 0)))
        num_free = len(self.pool.free_queue) - sum(b.ref_cnt == 0 for b in hits)
        if sum(num for _, num in plans) > num_free:
            return False
        self.pool.touch(hits)
        result = []
        for table, (start, num) in zip(tables, plans, strict=True):
            held = [*table, *hits]
            null = [self.pool.null_block] * (start - len(held))
            result.append(held + null + self.pool.get_new_blocks(num))
        self.tables[request.request_id] = tuple(result)
        return True

    def has_room_for_all(self, request):
        loading = [r for r in self.requests.values() if r.request_id in self.tables]
        loading = [r for r in loading if r not in self.running]
        need = 0
        for waiting in (request, *loading):
            tables = self.tables.get(waiting.request_id, ([],) * len(self.windows))
            num_blocks = -(-waiting.num_tokens // BLOCK_SIZE)
            need += sum(max(num_blocks - len(table), 0) for table in tables)
        return need <= len(self.pool.free_queue)

    def note(self, request, num):
        self.num_scheduled[request.request_id] = num
        self.budget -= num
        self.cache(request, request.num_computed_tokens + num)

    def cache(self, request, num_tokens):
        num = min(num_tokens // BLOCK_SIZE, len(request.block_hashes))
        for group, table in enumerate(self.tables.get(request.request_id, ())):
            for block, key in zip(table[:num], request.block_hashes, strict=False):
                self.pool.cache(block, key, group)

    def free(self, request):
        for table in self.tables.pop(request.request_id, ()):
            self.pool.free_blocks(reversed(table))

    def preempt(self, request):
        self.free(request)
        request.num_computed_tokens = 0
        self.stale[request.request_id] += self.expected.pop(request.request_id, 0)
        request.num_output_placeholders = 0
        request.status = "PREEMPTED"
        self.preempted.add(request.request_id)
        self.was_preempted.add(request.request_id)
        self.waiting.appendleft(request)

    def reset_running(self):
        while self.running:
            self.preempt(self.running.pop())

    def update(self, output, connector_output, sampled):
        for request in list(self.waiting):
            self.record_failures(request, connector_output)
        for name, tokens in sampled.items():
            request = self.requests.get(name)
            if request is None or request.status == "ABORTED":
                continue
            if self.stale[name]:
                self.stale[name] -= 1
                continue
            self.expected[name] -= 1
            num_rejected = output.drafts.get(name, 0) + 1 - len(tokens)
            request.num_computed_tokens -= num_rejected
            request.num_output_placeholders -= num_rejected
            tokens = tokens[: request.max_tokens - request.num_tokens]
            request.num_output_placeholders -= len(tokens)
            request.append(*tokens)
            if request.num_tokens >= request.max_tokens:
                self.running.remove(request)
                if request.inputs:
                    self.await_input(request)
                else:
                    self.finish(request)
        self.connector.update_connector_output(connector_output)
        for name in connector_output.finished_recving or ():
            request = self.requests[name]
            if request.status == "WAITING_FOR_REMOTE_KVS":
                self.finished_recving.add(name)
            else:
                assert request.status == "ABORTED"
                self.free(request)
                del self.requests[name]

    def await_input(self, request):
        """Make a request wait for more input, which comes after a step without it."""
        name = request.request_id
        request.num_computed_tokens -= request.num_output_placeholders
        request.num_output_placeholders = 0
        self.stale[name] += self.expected.pop(name, 0)
        request.status = "WAITING_FOR_STREAMING_REQ"
        self.was_preempted.discard(name)
        self.waiting.append(request)

    def preempt_a_session(self):
        """Preempt the last waiting session, as sessions may hold all blocks."""
        held = [r for r in self.waiting if r.has_streamed and r.status == "WAITING"]
        held = [r for r in held if r.request_id in self.tables]
        if held and not self.running:
            self.waiting.remove(held[-1])
            self.preempt(held[-1])

    def record_failures(self, request, connector_output):
        name = request.request_id
        if request.status != "WAITING_FOR_REMOTE_KVS":
            return
        if name in connector_output.failed_recving:
            request.num_computed_tokens = 0
            self.failed_recving.add(name)
        if len(self.windows) > 1:
            assert not connector_output.invalid_block_ids
            return
        (table,) = self.tables[name]
        for index, block in enumerate(table):
            if block.block_id in connector_output.invalid_block_ids:
                request.num_computed_tokens = index * BLOCK_SIZE
                self.failed_recving.add(name)
                break

    def abort(self, request_id):
        request = self.requests[request_id]
        is_loading = request.status == "WAITING_FOR_REMOTE_KVS"
        is_loading &= request_id not in self.finished_recving
        self.finished_recving.discard(request_id)
        self.failed_recving.discard(request_id)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.status = "ABORTED"
        self.finish(request, keep_blocks=is_loading)

    def finish(self, request, *, keep_blocks=False):
        tables = self.tables.get(request.request_id, ([],) * len(self.windows))
        ids = KVCacheBlocks(tables).get_block_ids()
        delay, params = self.connector.request_finished_all_groups(request, ids)
        assert not delay
        self.response_params[request.request_id] = params
        self.finished.add(request.request_id)
        if not keep_blocks:
            self.free(request)
            del self.requests[request.request_id]

    def has_requests(self):
        # The last part came between 0.19 and 0.25. A step follows the last finish.
        if self.requests or self.finished:
            return True
        return self.connector.has_pending_push_work()


@functools.partial(jax.jit, donate_argnums=0)
def write(caches, blocks, offsets, values):
    at = [cache.at[blocks, offsets] for cache in caches]
    return [ref.set(new, mode="drop") for ref, new in zip(at, values, strict=True)]


class KVCacheManager:
    """tpu-inference's: drops the KV caches around a change of weights."""

    def __init__(self, runner):
        self.runner = runner
        self.shapes = jax.tree.map(
            lambda array: (array.shape, array.dtype), runner.kv_caches
        )

    def delete_kv_cache(self):
        for array in jax.tree.leaves(self.runner.kv_caches):
            array.delete()
        self.runner.kv_caches.clear()

    def reinitialize_kv_cache(self):
        assert not self.runner.kv_caches
        self.runner.kv_caches += jax.tree.map(
            lambda spec: jnp.zeros(*spec),
            self.shapes,
            is_leaf=lambda spec: len(spec) == 2 and isinstance(spec[1], np.dtype),
        )


class Worker:
    """tpu-inference's worker: opens and ends updates of its runner's weights."""

    def __init__(self, runner):
        self.model_runner = runner

    def initialize_from_config(self):
        self.model_runner.connector.register_runner(self.model_runner)

    def start_weight_update(self, free_kv_cache=True):
        self.has_freed = free_kv_cache
        if free_kv_cache:
            self.model_runner.kv_cache_manager.delete_kv_cache()

    def update_weights(self, update_info):
        """Do nothing: the test writes the weights."""

    def finish_weight_update(self):
        if self.has_freed:
            self.model_runner.kv_cache_manager.reinitialize_kv_cache()


class LoRAManager:
    """vLLM's manager of adapters, by their ids."""

    def __init__(self):
        self.loaded = {}

    def add_adapter(self, lora):
        if lora.lora_int_id not in self.loaded or lora.load_inplace:
            self.loaded[lora.lora_int_id] = self._load_adapter(lora)

    def _load_adapter(self, lora):
        return lora.lora_name


class Runner:
    """tpu-inference's runner: a list with a cache for each layer, donated."""

    max_tokens = MAX_TOKENS  # Of a step.

    def __init__(self, connector, num_blocks, windows, *, newer, num_layers=2):
        shape = (num_blocks, BLOCK_SIZE, 2, 2, 8)
        self.kv_caches = [jnp.zeros(shape, jnp.bfloat16) for _ in range(num_layers)]
        self.kv_caches += self.more_caches()
        self.connector = connector
        self.windows = windows
        self.newer = newer
        self.tokens = {}
        self.rng = np.random.default_rng(0)
        # Blocks of all groups that were compared.
        self.num_reads = 0
        # What the content of caches depends on, and arrays that stand for it.
        self.weights = 0
        self.state = {"model.weight": np.zeros(4), "q.lora_a_stacked": np.zeros(4)}
        self.lora_manager = LoRAManager()
        # The weights of requests' adapters.
        self.adapters = {}
        # Max error of loaded values, as a share of the largest computed value.
        self.tolerance = 0.0
        self.kv_cache_manager = KVCacheManager(self)
        self.worker = Worker(self)
        self.worker.initialize_from_config()

    def more_caches(self):
        """Caches of other layers, which `forward` knows."""
        return []

    def execute(self, output):
        connector = self.connector
        connector.bind_connector_metadata(output.kv_connector_metadata)
        starts_late = self.newer and not output.has_sync_kv_loads
        if not starts_late:
            connector.start_load_kv(None)
        sampled = self.forward(output) if output.num_scheduled_tokens else {}
        if starts_late:
            connector.start_load_kv(None)
        connector.wait_for_save()
        result = KVConnectorOutput()
        if self.newer:
            done = connector.get_transfer_results(output.finished_req_ids)
            result.finished_recving = done.finished_recving
            result.failed_recving = done.failed_recving
        else:
            done = connector.get_finished(output.finished_req_ids)
            result.finished_sending, result.finished_recving = done
        assert not result.finished_sending
        result.invalid_block_ids = connector.get_block_ids_with_load_errors()
        result.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return result, sampled

    def spoil(self, blocks):
        """Make the contents of blocks unknown."""
        blocks = np.array(blocks, np.int32)
        self.kv_caches = [cache.at[blocks].set(jnp.nan) for cache in self.kv_caches]

    def forward(self, output):
        for name, tokens in output.all_tokens.items():
            self.tokens[name] = list(tokens)
        num_rows = self.max_tokens * len(self.windows)
        num_layers = len(self.kv_caches)
        blocks = np.full(num_rows, len(self.kv_caches[0]), np.int32)
        offsets = np.zeros(num_rows, np.int32)
        values = np.zeros((num_layers, num_rows, 2, 2, 8), jnp.bfloat16)
        row = 0
        work = {
            name: (*self.with_drafts(name, start, output.drafts.get(name, 0)), *rest)
            for name, (start, *rest) in output.work.items()
        }
        for name, (tokens, start, num, tables) in work.items():
            for group, table in enumerate(tables):
                for place in range(start, start + num):
                    blocks[row] = table[place // BLOCK_SIZE]
                    offsets[row] = place % BLOCK_SIZE
                    about = name, tokens, place, group
                    for layer in range(num_layers):
                        values[layer, row] = self.content(*about, layer)
                    row += 1
        assert blocks.all(), "a token is to be written to the null block"
        self.kv_caches = write(self.kv_caches, blocks, offsets, list(values))
        self.check_what_is_read(work)
        sampled = {}
        for name, (tokens, start, num, _) in work.items():
            if start + num < len(tokens):
                continue
            past, sampled[name] = self.tokens[name], []
            # A token more for each draft that is right.
            while not sampled[name] or tokens[len(past) - 1 : len(past)] == (past[-1],):
                sampled[name].append(next_token(past))
                past.append(sampled[name][-1])
        return sampled

    def with_drafts(self, name, start, num_drafts):
        """Return a request's tokens with drafts after them, and where it continues.

        A scheduler that is ahead takes all drafts for right.
        """
        tokens = list(self.tokens[name])
        start = min(start, len(tokens) - 1)
        for _ in range(num_drafts):
            is_right = self.rng.random() < 0.6
            tokens.append(next_token(tokens) if is_right else 50)
        return tuple(tokens), start

    def content(self, name, tokens, place, group, layer):
        """Return the KV of one token in a layer; it depends on the weights."""
        weights = self.weights, self.adapters.get(name)
        return slot(tokens[: place + 1], group, (weights, layer))

    def check_what_is_read(self, work):
        """Compare all that the step's attention reads with the computed values.

        Requests may read what others write in the same step.
        """
        content = [np.asarray(cache) for cache in self.kv_caches]
        for name, (tokens, start, num, tables) in work.items():
            for group, table in enumerate(tables):
                window = self.windows[group]
                first = max(start - window + 1, 0) if window else 0
                self.num_reads += (start + num - first) // BLOCK_SIZE
                for place in range(first, start + num):
                    block = table[place // BLOCK_SIZE]
                    for layer, cache in enumerate(content):
                        loaded = cache[block, place % BLOCK_SIZE]
                        computed = self.content(name, tokens, place, group, layer)
                        about = f"{name}, token {place}, {block=}, {group=}, {layer=}"
                        if self.tolerance:
                            error = np.abs(np.float32(loaded) - np.float32(computed))
                            assert error.max() <= self.tolerance * 4, about
                            continue
                        np.testing.assert_array_equal(
                            loaded.view(np.uint16), computed.view(np.uint16), about
                        )


class Unreliable:
    """An `OffloadWorker` with late reports and some failing transfers."""

    def __init__(self, half, runner, rng):
        self._half, self._worker, self._runner = half, half._worker, runner
        self._rng, self._failure_rate = rng, 0.2
        self._late = deque()

    def __getattr__(self, name):
        return getattr(self._worker, name)

    @property
    def num_in_flight(self):
        return self._worker.num_in_flight + len(self._late)

    def abandon(self):
        return self._with_late(self._worker.abandon())

    def drain(self, pool):
        pool, output = self._worker.drain(pool)
        return pool, self._with_late(output)

    def _with_late(self, *outputs):
        late = [*self._late, *outputs]
        self._late.clear()
        return ConnectorOutput.aggregate(late)

    def poll(self):
        if (output := self._worker.poll()) != NO_REPORTS:
            self._late.append(output)
        if not self._late or self._rng.random() < 0.5:
            return ConnectorOutput()
        output = self._with_late()
        if self._rng.random() > self._failure_rate:
            return output
        targets = [self._half._targets[name] for name in output.finished_recving]
        self._runner.spoil([b for blocks in targets for b in blocks if b >= 0])
        return ConnectorOutput(
            failed_recving=output.finished_recving + output.failed_recving,
            failed_store_events=output.completed_store_events
            + output.failed_store_events,
            below=output.below,
        )


class Engine:
    def __init__(
        self,
        *,
        generation="0.32",
        windows=(None,),
        num_blocks=24,
        is_async=False,
        num_drafts=0,
        drafts="ngram",
        extra=None,
        model="model",
    ):
        config, cache_config = make_configs(
            extra=extra, windows=windows, num_blocks=num_blocks, model=model
        )
        if num_drafts:
            config.speculative_config = SimpleNamespace(
                method=drafts, use_eagle_block_drop=lambda: drafts != "ngram"
            )
        newer = generation == "0.32"
        configs, runner_configs = (
            create_connector(config, role, cache_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self.scheduler = Scheduler(
            configs, num_blocks, windows, newer=newer, num_drafts=num_drafts
        )
        self.runner = Runner(runner_configs, num_blocks, windows, newer=newer)
        self.is_async = is_async
        self.in_flight = deque()
        self.events = []

    @property
    def connectors(self):
        return [self.scheduler.connector]

    @property
    def offload_schedulers(self):
        return [connector._scheduler.scheduler for connector in self.connectors]

    @property
    def offload_scheduler(self):
        (scheduler,) = self.offload_schedulers
        return scheduler

    def make_unreliable(self, rng):
        half = self.runner.connector._worker
        half._worker = Unreliable(half, self.runner, rng)

    def step(self):
        output = self.scheduler.schedule()
        result = self.runner.execute(pickle.loads(pickle.dumps(output)))
        self.in_flight.append((output, pickle.loads(pickle.dumps(result))))
        while len(self.in_flight) > self.is_async:
            self.take_output()
        self.events += self.scheduler.connector.take_events()
        return bool(output.num_scheduled_tokens)

    def take_output(self):
        done, (connector_output, sampled) = self.in_flight.popleft()
        self.scheduler.update(done, connector_output, sampled)

    def run(self, *requests, max_steps=400):
        for request in requests:
            self.scheduler.add(request)
        for _ in range(max_steps):
            if self.scheduler.has_requests():
                if not self.step():
                    time.sleep(0.002)  # Transfers land in their own time.
            elif self.in_flight:
                self.take_output()
            else:
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler}")

    def check_nothing_leaked(self):
        pool = self.scheduler.pool
        assert len(pool.free_queue) == len(pool.blocks) - 1
        assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)
        assert not self.offload_scheduler.has_pending_stores()
        assert not self.offload_scheduler.has_pending_loads()
        # Where the next token reads no block, vLLM has none to cache.
        assert self.offload_scheduler._pool.unwritten == set()


def drop_by_runner(engine):
    engine.runner.kv_cache_manager.delete_kv_cache()
    engine.runner.kv_cache_manager.reinitialize_kv_cache()


def unregister(engine):
    engine.runner.connector.unregister_kv_caches()


def register_again(engine):
    engine.runner.connector.register_runner(engine.runner)


def replace_arrays(engine):
    engine.runner.state = {name: a + 1 for name, a in engine.runner.state.items()}


def write_arrays(engine):
    engine.runner.state["model.weight"] = np.ones(4)


def update_in_place(engine):
    engine.runner.worker.start_weight_update(free_kv_cache=False)
    engine.runner.worker.update_weights({})
    engine.runner.worker.finish_weight_update()


def reset_connector(engine):
    assert engine.scheduler.connector.reset_cache() is True


def reset_device(engine):
    assert engine.scheduler.pool.reset_prefix_cache() is True


# Weight changes that keep the KV caches.
CHANGES = [replace_arrays, write_arrays, update_in_place]
# Events that invalidate the caches and the host.
LOSSES = [
    update_in_place,
    drop_by_runner,
    unregister,
    register_again,
    reset_connector,
    reset_device,
]
