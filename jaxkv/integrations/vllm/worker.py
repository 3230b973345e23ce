"""The worker's half of `OffloadConnector`: moves the blocks of a runner's KV caches."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import jax

from jaxkv import ConnectorOutput, OffloadWorker, TransferEngine
from jaxkv._util import gib
from jaxkv.integrations.vllm.adapters import Adapters
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.hosts import (
    check_processes,
    local_part,
    placement,
    with_part,
)
from jaxkv.integrations.vllm.prompt_logprobs import guard_prompt_logprobs
from jaxkv.integrations.vllm.ranks import (
    ALL_LOST,
    Adapter,
    Ranks,
    RankSteps,
    StepMetadata,
)
from jaxkv.integrations.vllm.stats import OffloadConnectorStats, StatsReader
from jaxkv.integrations.vllm.tokens import TokenRestorer
from jaxkv.integrations.weights_watch import PHASES, WeightsWatch, worker_of
from jaxkv.observe.start import log_start
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    NO_MOVES,
    NO_REPORTS,
    TierMoves,
    TierReport,
)
from jaxkv.scheduling.worker.storage_worker import StorageWorker
from jaxkv.transfer import AnyEngine, MultiPoolEngine
from jaxkv.transfer.codecs import Compression
from jaxkv.transfer.host_memory import parse_argument
from jaxkv.transfer.limits import device_bytes_left
from jaxkv.types import NO_BLOCK, PyTree

_LOG = logging.getLogger("jaxkv")

# The most steps whose reports vLLM has not passed on; more than its engines have.
_MAX_STEPS_AHEAD = 16

# tpu-inference's caches are `[num_blocks, block, heads, packing, head_dim]`. These axes
# separate heads, and a head's keys from its values.
_NUM_AXES = 5
_SCALED_AXES = frozenset({2, 3})

# The minimum for transfers on each device: four extents of the usual size.
_MIN_STAGING_BYTES = 32 << 20


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """Completed transfers of a worker, sent to the scheduler's process."""

    output: ConnectorOutput
    # Times that the KV was lost: its pool was dropped, or the weights changed.
    num_lost_pools: int = 0
    # Marks of the adapters loaded so far, by vLLM's integer id; None if unchanged.
    adapters: Mapping[int, bytes] | None = None
    # Whether the store has been listed, or took too long. Only the first host lists it.
    is_listed: bool = False
    # The rate of loads, and of reads from the store, of whole blocks, if all hosts are
    # as fast as the slowest; 0 if unknown.
    load_bytes_per_s: float = 0.0
    storage_bytes_per_s: float = 0.0
    # Replaces `output` with several ranks, by sender; see `Ranks`.
    by_rank: Mapping[str, ConnectorOutput] = dataclasses.field(default_factory=dict)
    # Adapters of keys, whose blocks other weights have computed since the last report,
    # and the number of such steps so far, by the host's process index.
    misfits: frozenset[Adapter] = frozenset()
    num_misfits: Mapping[int, int] = dataclasses.field(default_factory=dict)
    number: int = 0  # Among the reports of its worker.

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Combine the reports of two hosts, the scheduler's first, as executors do."""
        return WorkerReport(
            ConnectorOutput.aggregate([self.output, other.output]),
            max(self.num_lost_pools, other.num_lost_pools),
            _joined_adapters(self.adapters, other.adapters),
            self.is_listed or other.is_listed,
            min(self.load_bytes_per_s, other.load_bytes_per_s),
            min(self.storage_bytes_per_s, other.storage_bytes_per_s),
            misfits=self.misfits | other.misfits,
            num_misfits={**self.num_misfits, **other.num_misfits},
        )


def _joined_adapters(
    first: Mapping[int, bytes] | None, second: Mapping[int, bytes] | None
) -> Mapping[int, bytes] | None:
    """Return the first host's marks, b"" if an adapter is unknown to the second.

    Marks have times and inodes, which copies of a file on several hosts do not share.
    """
    if first is None or second is None:
        return second if first is None else first
    return {
        name: mark if second.get(name, mark) else b"" for name, mark in first.items()
    }


LOST_POOLS: dict[str, int] = {}
"""Pools lost by the worker of each engine in this process, by vLLM's engine id.

A scheduler in the same process reads here what a report says a step later.
"""

WORKERS: weakref.WeakValueDictionary[str, WorkerHalf] = weakref.WeakValueDictionary()
"""The worker's half of each engine in this process, by vLLM's engine id."""


class WorkerHalf:
    """Starts the transfers of each step and reports how they ended.

    A runner donates its caches to the model in every step, so none is kept here: each
    call reads the runner's current caches and replaces them.

    If vLLM drops the KV caches or changes the weights, all transfers planned before are
    refused, and reported as failed, until the scheduler has cleared the host tier.
    """

    def __init__(self, config: ConnectorConfig, engine_id: str = "") -> None:
        self._config = config
        self._engine_id = engine_id
        self._num_lost_pools = LOST_POOLS.get(engine_id, 0)
        self._is_loss_reported = True
        self._weights: WeightsWatch | None = None
        # Whether a scheduler in this process has checked the weights for this step.
        self._has_looked = False
        self._must_abandon = False
        self._adapter_marks = Adapters(has_storage=config.storage is not None)
        # Marks of the adapters loaded so far, by vLLM's integer id; b"" if unknown.
        # Each change replaces the mapping.
        self.adapters: Mapping[int, bytes] = {}
        self._reported_adapters: Mapping[int, bytes] = self.adapters
        # Adapters of the keys in this step, and their marks on this host.
        self._step_adapters: frozenset[Adapter] = frozenset()
        self._own_marks: dict[Adapter, bytes] = {}
        self._num_misfits = 0
        WORKERS[engine_id] = self
        self._refused = NO_REPORTS  # Since the last poll.
        # The last reports: vLLM may not have passed them on to the scheduler yet.
        self._reports: deque[WorkerReport] = deque(maxlen=_MAX_STEPS_AHEAD)
        self._num_reports = 0
        self._runner: Any = None
        self._worker: OffloadWorker | None = None
        self._ranks: Ranks | None = None
        if config.num_ranks > 1:
            self._ranks = Ranks(config.num_ranks, config.rank_host_blocks)
        # The runner's caches in each pool, if states have a separate pool.
        self._caches_by_pool: list[list[int]] = []
        # Device blocks that each request's load writes, in case it fails.
        self._targets: dict[str, tuple[int, ...]] = {}
        self._failed_blocks: set[int] = set()
        self._report = NO_REPORTS
        self._stats: StatsReader | None = None
        # Whether the model computes nothing in this step.
        self._is_idle = False
        # The end of the wait for the first listing, from the first step on.
        self._listing_deadline_s: float | None = None
        self._is_listing_reported = config.storage is None

    def register_runner(self, runner: Any) -> None:
        """Set up the host memory for the blocks of a runner.

        Its `kv_caches` is a list with an array for each layer, the block axis first.
        ValueError if they cannot be offloaded or compressed, too little device memory
        is left, the store has a bad URL, or the runner would drop tokens. MemoryError,
        ImportError or StoreError if host memory, an extra or the store is missing.
        """
        config = self._config
        hosts = config.num_hosts
        check_processes(hosts)
        if self._runner is not runner:
            guard_prompt_logprobs(runner)
        if config.restore_tokens:
            TokenRestorer.install(runner)
        # The store's namespace may not have the weights of new caches.
        has_storage = self._worker is None or config.vllm.storage_keep_on_reset
        if self._worker is not None:
            self.lose_pool()
            self._close_storage(self._worker.storage)
            self._worker = None
        caches = list(runner.kv_caches)
        self._caches_by_pool = _caches_by_pool(config, runner)
        compression = _compression_of(config, caches)
        planned = config.planned_bytes // hosts
        _LOG.info(
            "allocating %s of host memory: %s for %s, and an eighth more as spare "
            "memory, so that blocks stored together are adjacent",
            gib(planned + planned // 8),
            gib(planned),
            f"{config.num_host_blocks} blocks"
            + (f" that {hosts} hosts share" if hosts > 1 else ""),
        )
        # Only the layout of the caches is kept.
        pools = self._pools(caches)
        arrays: list[jax.Array] = jax.tree.leaves(pools)
        staging_bytes = _fitting_staging_bytes(config, arrays)
        engine: AnyEngine
        if self._caches_by_pool:
            engine = MultiPoolEngine(
                pools, config.num_host_blocks, staging_bytes=staging_bytes
            )
        else:
            engine = TransferEngine(
                pools,
                config.num_host_blocks,
                blocks_per_host_block=config.offload.blocks_per_host_block,
                staging_bytes=staging_bytes,
                compression=compression,
            )
        storage = self._open_storage(engine, caches) if has_storage else None
        self._worker = OffloadWorker(
            engine,
            deadline_s=config.offload.deadline_s,
            storage=storage,
            shares_scheduler=hosts > 1,
            num_shards=config.num_ranks,
        )
        self._worker.settings.update(config.settings)
        if self._runner is not runner:
            self._watch(runner)
        self._runner = runner
        # Runners forbid compilation during a step.
        engine.warm_up()
        self._stats = StatsReader(self._worker, jax.process_index())
        store = config.storage
        log_start(
            engine,
            policy=config.offload.cache_policy,
            storage=storage,
            num_storage_blocks=store.num_blocks if store is not None else 0,
            storage_write=config.offload.storage_write,
            about=store.about if store is not None else "",
            ports=("metrics among vLLM's",),
        )
        used = engine.host_block_bytes * config.num_host_blocks * hosts
        if used > config.planned_bytes:
            _LOG.warning(
                "the host tier takes %s instead of %s: the runner's blocks are larger "
                "than vLLM's sizes; set their number by num_cpu_blocks",
                gib(used),
                gib(config.planned_bytes),
            )

    def _open_storage(self, engine: AnyEngine, caches: PyTree) -> StorageWorker | None:
        config = self._config.storage
        if config is None:
            return None
        namespace = config.namespace
        if self._config.num_hosts > 1:
            namespace += placement(caches)
        offload = self._config.offload
        # Its queues must hold what all schedulers may have in flight.
        most = self._config.num_ranks * offload.max_storage_blocks
        offload = dataclasses.replace(offload, max_storage_blocks=most)
        storage = offload.open_storage(
            engine, namespace=namespace, num_blocks=config.num_blocks
        )
        assert storage is not None
        # Begins to list it, during the rest of the start.
        storage.advance()
        # The first host lists for all.
        self._is_listing_reported |= storage.shards[0] > 0
        return storage

    def _close_storage(self, storage: StorageWorker | None) -> None:
        """Close the store, and report pending fetches as failed."""
        if storage is None:
            return
        storage.wait()
        self._refuse(ConnectorOutput(below=storage.take_reports(is_last=True)))
        storage.close(self._config.offload.storage_deadline_s)

    def lose_pool(self) -> None:
        """Wait for transfers in flight, and report them as failed.

        Called before the KV caches are dropped or refilled.
        """
        self._record_loss("the KV caches were dropped")
        runner, worker = self._runner, self._worker
        if worker is None or not worker.num_in_flight:
            return
        if not _are_there(runner.kv_caches):
            self._refuse(worker.abandon())  # The caches are deleted already.
            return
        self._refuse(self._drain(runner, worker))

    def look(self) -> None:
        """Check whether the weights have changed since the last call."""
        self._has_looked = True
        if self._weights is not None and self._weights.has_changed():
            self._record_weights("arrays of the weights were replaced")

    def _record_weights(self, reason: str) -> None:
        """Record changed weights, so that the transfers in flight fail.

        The next step abandons them: any thread may write weights.
        """
        self._record_loss(reason)
        self._must_abandon = True

    def _record_loss(self, reason: str) -> None:
        if self._is_loss_reported:
            _LOG.info("%s: the host tier forgets its blocks", reason)
        self._num_lost_pools += 1
        LOST_POOLS[self._engine_id] = self._num_lost_pools
        self._is_loss_reported = False

    def start(self, step: StepMetadata | RankSteps) -> None:
        """Start the transfers of a step; returns before they are done."""
        if self._ranks is None or not isinstance(step, RankSteps):
            self._start(step)  # type: ignore[arg-type]
            return
        # Without caches, all of it is refused.
        caches = jax.tree.leaves(getattr(self._runner, "kv_caches", ()))
        shard_blocks = len(caches[0]) // self._config.num_ranks if caches else 0
        for rank in step.requests_meta:
            if self._worker is not None:
                self._worker.check_settings(rank.step.transfers.settings)
        for merged in self._ranks.merge(step.requests_meta, shard_blocks):
            self._start(merged)

    def _start(self, step: StepMetadata) -> None:
        runner, worker = self._runner, self._worker
        if worker is None:
            raise RuntimeError(
                "register_runner() was not called: the runner of this vLLM does not "
                "pass its KV caches to connectors as tpu-inference's does."
            )
        self._is_idle = step.is_idle
        self._step_adapters |= step.adapters
        if not self._has_looked:
            self.look()
        self._has_looked = False
        if self._must_abandon or step.num_lost_pools == ALL_LOST:
            self._must_abandon = False
            if worker.num_in_flight:
                self._refuse(worker.abandon())
        meta = step.transfers
        worker.check_settings(meta.settings)
        if (meta is NO_MOVES or meta.is_nothing) and worker.start_nothing():
            return
        offload = self._config.offload
        if offload.storage is not None and self._listing_deadline_s is None:
            self._listing_deadline_s = time.monotonic() + offload.storage_deadline_s
        if meta.load_event != NO_EVENT:
            factor = offload.blocks_per_host_block
            blocks = iter(meta.load_device_blocks)
            for request_id, size in zip(
                meta.load_event_to_reqs[meta.load_event], meta.load_sizes, strict=True
            ):
                self._targets[request_id] = tuple(islice(blocks, size * factor))
        caches = runner.kv_caches
        num_misfits = dict(step.num_misfits).get(jax.process_index(), 0)
        if (
            step.num_lost_pools != self._num_lost_pools
            or num_misfits != self._num_misfits
            or self._misfits(step.loaded_adapters)
            or not caches
        ):
            has_store = meta.store_event != NO_EVENT
            self._refuse(
                ConnectorOutput(
                    failed_recving=meta.load_event_to_reqs.get(meta.load_event, ()),
                    failed_store_events=(meta.store_event,) if has_store else (),
                    below=tuple(map(_refused_moves, meta.below)),
                )
            )
            return
        old_pool = self._pools(caches)
        pool = worker.start(meta, old_pool)
        if pool is not old_pool:
            self._put_back(runner, pool)

    def _misfits(self, adapters: frozenset[Adapter]) -> frozenset[Adapter]:
        """Return the adapters of keys that are not those that are loaded.

        On other hosts than the scheduler's, the files' marks are not those in the keys:
        there, each adapter is compared with the first that was loaded for its key.
        """
        misfits = set()
        for adapter in adapters:
            loaded = self.adapters.get(adapter[0])
            if loaded is None:
                continue
            right = adapter[1]
            if jax.process_index():
                right = self._own_marks.setdefault(adapter, loaded)
            if loaded != right:
                misfits.add(adapter)
        return frozenset(misfits)

    def _pools(self, caches: Any) -> list[Any]:
        """Return this host's part of the caches, or a list for each pool of blocks."""
        if self._config.num_hosts > 1:
            caches = jax.tree.map(local_part, list(caches))
        if self._caches_by_pool:
            return [[caches[n] for n in numbers] for numbers in self._caches_by_pool]
        return caches if type(caches) is list else list(caches)

    def _put_back(self, runner: Any, pools: list[Any]) -> None:
        """Set the runner's caches from the engine's pool."""
        if self._caches_by_pool:
            caches = list(runner.kv_caches)
            for numbers, pool in zip(self._caches_by_pool, pools, strict=True):
                for number, cache in zip(numbers, pool, strict=True):
                    caches[number] = cache
            pools = caches
        if self._config.num_hosts > 1:
            pools = jax.tree.map(with_part, list(runner.kv_caches), pools)
        runner.kv_caches = type(runner.kv_caches)(pools)

    def _drain(self, runner: Any, worker: OffloadWorker) -> ConnectorOutput:
        """Wait for all transfers in flight; return how they ended."""
        pool, output = worker.drain(self._pools(runner.kv_caches))
        self._put_back(runner, pool)
        return output

    def end_transfers(self) -> tuple[list[WorkerReport], WorkerReport | None]:
        """Wait for all transfers; return the last reports, and a new one, if any."""
        earlier, worker = list(self._reports), self._worker
        if worker is not None and worker.num_in_flight:
            ended = self._drain(self._runner, worker)
            self._refused = ConnectorOutput.aggregate([self._refused, ended])
        self.poll()
        self._failed_blocks.clear()
        return earlier, self.take_report()

    def _is_listed(self) -> bool:
        """Whether the store has been listed, or took too long."""
        storage = self._worker.storage if self._worker is not None else None
        late_s = self._listing_deadline_s
        return storage is not None and (
            storage.is_listed or (late_s is not None and time.monotonic() > late_s)
        )

    def poll(self) -> ConnectorOutput:
        """Return what completed since the last call; never waits."""
        if self._worker is None:
            return NO_REPORTS
        new = self._worker.poll()
        if self._refused is not NO_REPORTS:
            new = ConnectorOutput.aggregate([self._refused, new])
            self._refused = NO_REPORTS
        if new is NO_REPORTS:
            return new
        for request_id in new.finished_recving:
            self._targets.pop(request_id, None)
        for request_id in new.failed_recving:
            self._failed_blocks.update(self._targets.pop(request_id, ()))
        self._report = ConnectorOutput.aggregate([self._report, new])
        return new

    def take_failed_blocks(self) -> set[int]:
        """Return all device blocks of failed loads, even those that have arrived."""
        if not self._failed_blocks:
            return set()
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed - {NO_BLOCK}

    def take_stats(self) -> OffloadConnectorStats | None:
        """Return changed metrics; see `StatsReader.take`."""
        if self._stats is None or self._worker is None:
            return None
        is_last = self._is_idle and not self._worker.num_in_flight
        return self._stats.take(is_last=is_last)

    def take_report(self) -> WorkerReport | None:
        """Return the report for the scheduler; None if it is empty."""
        report, self._report = self._report, NO_REPORTS
        is_listed = not self._is_listing_reported and self._is_listed()
        adapters = None if self.adapters is self._reported_adapters else self.adapters
        # Now: an adapter may be loaded in the step that computes with it.
        misfits, self._step_adapters = self._misfits(self._step_adapters), frozenset()
        if misfits:
            self._num_misfits += 1
            self._must_abandon = True
            for adapter in misfits:
                self._own_marks.pop(adapter, None)
        is_known = self._is_loss_reported and adapters is None
        is_known &= not (is_listed or misfits)
        if report is NO_REPORTS and is_known:
            return None
        self._is_loss_reported = True
        self._reported_adapters = self.adapters
        self._is_listing_reported |= is_listed
        worker = self._worker
        rates = 0.0, 0.0
        if worker is not None:
            hosts = self._config.num_hosts
            rates = worker.load_bytes_per_s * hosts, worker.storage_bytes_per_s * hosts
        by_rank: Mapping[str, ConnectorOutput] = {}
        if self._ranks is not None:
            report, by_rank = NO_REPORTS, self._ranks.cut(report)
        self._num_reports += 1
        new = WorkerReport(
            *(report, self._num_lost_pools, adapters, is_listed, *rates),
            by_rank=by_rank,
            misfits=misfits,
            num_misfits={jax.process_index(): self._num_misfits},
            number=self._num_reports,
        )
        self._reports.append(new)
        return new

    def _refuse(self, output: ConnectorOutput) -> None:
        """Report transfers as failed, however they ended."""
        failed = ConnectorOutput(
            failed_recving=output.finished_recving + output.failed_recving,
            failed_store_events=output.completed_store_events
            + output.failed_store_events,
            below=tuple(map(_without_fetches, output.below)),
        )
        self._refused = ConnectorOutput.aggregate([self._refused, failed])

    def _watch(self, runner: Any) -> None:
        """Detect dropped KV caches, written weights and loaded adapters.

        tpu-inference notifies no connector. All caches are dropped by the manager of KV
        caches.
        """
        self._weights = WeightsWatch(runner)
        owner = getattr(runner, "kv_cache_manager", runner)
        for name in ("delete_kv_cache", "reinitialize_kv_cache"):
            call_before(owner, name, self.lose_pool)
        worker = worker_of(runner)
        for name in PHASES:
            notice = functools.partial(self._record_weights, f"{name}() was called")
            call_before(worker, name, notice)
        manager = getattr(runner, "lora_manager", None)
        load = getattr(manager, "_load_adapter", None)
        if load is not None:

            @functools.wraps(load)
            def load_and_note(lora: Any, *args: Any, **named: Any) -> Any:
                before = self._adapter_marks.mark(lora)
                adapter = load(lora, *args, **named)
                self._record_adapter(lora, before)
                return adapter

            manager._load_adapter = load_and_note  # type: ignore[union-attr]

    def _record_adapter(self, lora: Any, before: bytes | None) -> None:
        """Keep a loaded adapter's mark; it was `before`, None if downloaded by now."""
        mark = self._adapter_marks.mark(lora)
        if mark is None or (before is not None and before != mark):
            mark = b""
        if self.adapters.get(lora.lora_int_id) != mark:
            self._must_abandon |= lora.lora_int_id in self.adapters
            self.adapters = {**self.adapters, lora.lora_int_id: mark}

    def shut_down(self) -> None:
        """Wait for transfers in flight, and release the runner and the store."""
        runner, worker = self._runner, self._worker
        self._runner = self._worker = None
        if worker is None:
            return
        if worker.num_in_flight and _are_there(runner.kv_caches):
            self._drain(runner, worker)
        self._close_storage(worker.storage)


def call_before(owner: Any, name: str, notice: Callable[[], None]) -> None:
    """Wrap a method of an object so that it calls `notice` first, if it exists."""
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        notice()
        return method(*args, **named)

    setattr(owner, name, call)


def _caches_by_pool(config: ConnectorConfig, runner: Any) -> list[list[int]]:
    """Return each pool's caches: attention first, then states; [] for a single pool."""
    if not config.state_groups:
        return []
    places: dict[str, int] = runner.layer_name_to_kvcache_index
    attention: list[str] = []
    layers: list[list[str]] = [attention]
    for number, names in enumerate(config.layers):
        if number in config.state_groups:
            layers.append([*names])
        else:
            attention += names
    # Layers may share a cache.
    return [sorted({places[name] for name in names}) for names in layers]


def _are_there(caches: Any) -> bool:
    """Whether the runner has its caches."""
    arrays: list[jax.Array] = jax.tree.leaves(caches)
    return bool(arrays) and not any(array.is_deleted() for array in arrays)


def _refused_moves(moves: TierMoves) -> TierReport:
    """Report a step's fetches and writes as failed."""
    fetched, written = (
        tuple((batch.event, (False,) * len(batch.keys)) for batch in batches)
        for batches in (moves.fetches, moves.writes)
    )
    return TierReport(fetched, written, tier=moves.tier)


def _without_fetches(report: TierReport) -> TierReport:
    """Report fetches as failed; writes have reached the store."""
    fetched = tuple((event, (False,) * len(oks)) for event, oks in report.fetched)
    return dataclasses.replace(report, fetched=fetched)


def _compression_of(config: ConnectorConfig, caches: list[Any]) -> Compression | None:
    """Return the compression of the caches; ValueError if their heads are unknown."""
    dtype = config.offload.compression
    if dtype is None:
        return None
    sizes = {group.block_size for group in config.groups}
    for cache in caches:
        if cache.ndim != _NUM_AXES or cache.shape[1] not in sizes:
            raise ValueError(
                f"compression={dtype!r} needs KV caches with the axes [num_blocks, "
                f"block, heads, packing, head_dim], and one is {list(cache.shape)}."
            )
    return Compression(dtype, _SCALED_AXES)


def _fitting_staging_bytes(config: ConnectorConfig, caches: list[jax.Array]) -> int:
    """Return the staging bytes that fit into the device memory left by vLLM.

    vLLM sets no memory aside for them. Half of the rest stays for the model's programs.
    ValueError if too little is left.
    """
    num_bytes = parse_argument("staging_bytes", config.offload.staging_bytes)
    devices = {device for cache in caches for device in cache.devices()}
    left = device_bytes_left(devices)
    if left is None or num_bytes <= left // 2 * len(devices):
        return num_bytes

    def flag(needed: int) -> str:
        return config.flag_that_leaves(needed - left, devices)

    min_left = 2 * _MIN_STAGING_BYTES
    if left < min_left:
        raise ValueError(
            f"a device has {left >> 20} MiB of memory left after weights and KV cache, "
            f"but offloading needs {min_left >> 20} MiB: set {flag(min_left)}."
        )
    fitting = left // 2 * len(devices)
    _LOG.warning(
        "staging_bytes is %d MiB instead of %d, half of the devices' free memory: set "
        "%s if transfers wait for one another",
        fitting >> 20,
        num_bytes >> 20,
        flag(2 * -(-num_bytes // len(devices))),
    )
    return fitting
