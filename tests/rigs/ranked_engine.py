"""An engine like `fake_engine`'s with several ranks, each with a scheduler.

Like tpu-inference's `DPScheduler`, it merges metadata by the names of attributes, and
passes all of the worker's output to each scheduler. Both are pickled, as between
processes. The runner's caches are sharded over the ranks.
"""

import pickle
import time
from collections import ChainMap, deque
from types import SimpleNamespace

import jax
import numpy as np

from tests.rigs.fake_engine import MAX_TOKENS, Engine, Runner, Scheduler
from tests.rigs.fake_vllm import (
    CachedRequestData,
    KVConnectorRole,
    SchedulerOutput,
    create_connector,
    make_configs,
)


def sent(value):
    return pickle.loads(pickle.dumps(value))


def sharding_of(num_ranks):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("data",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def merged_metadata(outputs, num_blocks):
    """Merge metadata as `DPScheduler._combine_scheduler_outputs` of 0.32 does."""
    merged = None
    for rank, output in enumerate(outputs):
        meta = output.kv_connector_metadata
        merged = type(meta)() if merged is None else merged
        if hasattr(meta, "requests_meta"):
            for step in meta.requests_meta:
                if step.local_block_ids:
                    offset = rank * num_blocks
                    step.local_block_ids = [b + offset for b in step.local_block_ids]
            merged.requests_meta.extend(meta.requests_meta)
    return merged


class RankedScheduler:
    """Schedulers of ranks; the one with the fewest requests gets the next."""

    def __init__(self, schedulers, num_blocks):
        self.ranks = schedulers
        self.num_blocks = num_blocks  # Of each rank.
        self.connector = SimpleNamespace(take_events=self.take_events)

    def take_events(self):
        return [event for rank in self.ranks for event in rank.connector.take_events()]

    @property
    def requests(self):
        return ChainMap(*(rank.requests for rank in self.ranks))

    @property
    def num_external_tokens(self):
        return sum(rank.num_external_tokens for rank in self.ranks)

    @property
    def was_preempted(self):
        return set().union(*(rank.was_preempted for rank in self.ranks))

    def add(self, request, rank=None):
        chosen = min(self.ranks, key=lambda rank: len(rank.requests))
        (chosen if rank is None else self.ranks[rank]).add(request)

    def abort(self, request_id):
        (scheduler,) = (rank for rank in self.ranks if request_id in rank.requests)
        scheduler.abort(request_id)

    def reset_running(self):
        for rank in self.ranks:
            rank.reset_running()

    def has_requests(self):
        """Whether requests are left; connectors are not asked."""
        return any(rank.requests or rank.finished for rank in self.ranks)

    def schedule(self):
        outputs = [sent(rank.schedule()) for rank in self.ranks]
        merged = SchedulerOutput([], CachedRequestData([], set(), []), {}, set(), None)
        merged.kv_connector_metadata = merged_metadata(outputs, self.num_blocks)
        merged.work, merged.all_tokens, merged.drafts = {}, {}, {}
        merged.of_ranks = outputs
        for rank, output in enumerate(outputs):
            first = rank * self.num_blocks
            merged.num_scheduled_tokens |= output.num_scheduled_tokens
            merged.finished_req_ids |= output.finished_req_ids
            merged.all_tokens |= output.all_tokens
            merged.drafts |= output.drafts
            for name, (start, num, tables) in output.work.items():
                tables = [[block + first for block in table] for table in tables]
                merged.work[name] = start, num, tables
        return merged

    def update(self, merged, connector_output, sampled):
        for rank, output in zip(self.ranks, merged.of_ranks, strict=True):
            names = sampled.keys() & output.num_scheduled_tokens.keys()
            part = {name: sampled[name] for name in names}
            rank.update(output, sent(connector_output), part)


class RankedRunner(Runner):
    """A runner whose caches are sharded over ranks, whatever wrote them."""

    def __init__(self, connector, num_blocks, windows, num_ranks):
        self.sharding = sharding_of(num_ranks)
        self.max_tokens = num_ranks * MAX_TOKENS
        super().__init__(connector, num_blocks, windows, newer=True)

    @property
    def kv_caches(self):
        return self._caches

    @kv_caches.setter
    def kv_caches(self, caches):
        self._caches = [jax.device_put(cache, self.sharding) for cache in caches]


class RankedEngine(Engine):
    """An engine with `num_ranks` ranks, each with `num_blocks` device blocks."""

    def __init__(
        self,
        *,
        num_ranks=2,
        windows=(None,),
        num_blocks=24,
        is_async=False,
        num_drafts=0,
        extra=None,
        **options,
    ):
        options |= {
            "extra": {"num_cpu_blocks": 32 * num_ranks} | (extra or {}),
            "windows": windows,
            "num_blocks": num_ranks * num_blocks,
            "sharding_config": SimpleNamespace(total_dp_size=num_ranks),
        }
        config, cache_config = make_configs(**options)
        if num_drafts:
            config.speculative_config = SimpleNamespace(method="ngram")
        worker = create_connector(config, KVConnectorRole.WORKER, cache_config)
        num_all = num_ranks * num_blocks
        self.runner = RankedRunner(worker, num_all, windows, num_ranks)
        _, of_rank = make_configs(**options)
        of_rank.num_blocks = num_blocks  # And the bytes of all ranks.
        connectors = [
            create_connector(config, KVConnectorRole.SCHEDULER, of_rank)
            for _ in range(num_ranks)
        ]
        self.scheduler = RankedScheduler(
            [
                Scheduler(
                    connector, num_blocks, windows, newer=True, num_drafts=num_drafts
                )
                for connector in connectors
            ],
            num_blocks,
        )
        self.is_async = is_async
        self.in_flight = deque()
        self.events = []

    @property
    def connectors(self):
        return [rank.connector for rank in self.scheduler.ranks]

    def settle(self):
        """Step until nothing is in flight, as further requests would."""
        while any(half.has_pending_push_work() for half in self.connectors):
            self.step()
            time.sleep(0.002)
        while self.in_flight:
            self.take_output()

    def check_nothing_leaked(self):
        self.settle()
        for rank in self.scheduler.ranks:
            assert len(rank.pool.free_queue) == len(rank.pool.blocks) - 1
            offload = rank.connector._scheduler.scheduler
            assert not offload.has_pending_stores()
            assert not offload.has_pending_loads()
        worker = self.runner.connector._worker
        assert not worker._targets
        assert not worker._ranks._loads
        assert not worker._ranks._stores
        assert not worker._ranks._below
