"""vLLM's connector, which vLLM loads by the path of this package; see docs/vllm.md."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from jaxkv.integrations.vllm.config import ConnectorConfig, names_of_vllm
from jaxkv.integrations.vllm.installed import find_name
from jaxkv.integrations.vllm.rank_hooks import (
    count_host_hits,
    pass_on_stats,
    route_by_backlog,
    step_while_idle,
)
from jaxkv.integrations.vllm.ranks import RankSteps, StepMetadata
from jaxkv.integrations.vllm.scheduler import SchedulerHalf, end_before_resets
from jaxkv.integrations.vllm.stats import OffloadConnectorStats, OffloadPromMetrics
from jaxkv.integrations.vllm.worker import WorkerHalf, WorkerReport
from jaxkv.scheduling.protocol import NO_REPORTS

_LOG = logging.getLogger("jaxkv")

_BASE_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_BASE_NAMES = ("KVConnectorBase_V1", "SupportsHMA")
_BASES = tuple(base for name in _BASE_NAMES if (base := find_name(_BASE_MODULE, name)))


def _join_vllm_log() -> None:
    """Write jaxkv's log lines to vLLM's log, unless jaxkv's logger has a handler.

    vLLM configures only its own logger and drops the root logger's lines.
    """
    ours, theirs = logging.getLogger("jaxkv"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = theirs.propagate
    if ours.level == logging.NOTSET:
        ours.setLevel(theirs.level)


def _try_hook(install: Callable[[], None], consequence: str) -> None:
    """Install a hook into vLLM; if vLLM's API differs, log the consequence."""
    try:
        install()
    except (ImportError, AttributeError) as error:
        _LOG.warning("%s: %s", consequence, error)


class OffloadConnector(*_BASES):  # type: ignore[misc]
    """A host tier for vLLM's KV cache, over the KV caches of a JAX runner.

    vLLM makes two connectors, one for its scheduler and one for its runner, in one
    process or two. The class implements `KVConnectorBase_V1` of vLLM 0.19 and later.
    Without vLLM it has the same methods and no base.

    No call waits for a transfer. A store reads full blocks that are held, so it can run
    beside the model. A load delays only the request that needs it.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        role: vLLM's `KVConnectorRole`.
        kv_cache_config: vLLM's `KVCacheConfig`.

    Raises:
        ValueError: jaxkv does not support vLLM's configuration, or a key of
            ``kv_connector_extra_config`` is unknown or has a bad value.
        OSError: The file of requests cannot be written.
        ImportError: The store needs an extra of jaxkv that is missing.
    """

    _sources = find_name("vllm.v1.metrics.cache_hit_source", "CacheHitSource")

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if _BASES:
            super().__init__(vllm_config, role, kv_cache_config)
        _join_vllm_log()
        is_rank = role.name == "SCHEDULER"
        config = ConnectorConfig.of(vllm_config, kv_cache_config, is_rank=is_rank)
        self._num_hosts = config.num_hosts
        # Otherwise the block ids of failed loads identify neither group nor rank.
        self._has_plain_ids = len(config.groups) == config.num_ranks == 1
        self._has_folder = config.storage is not None and config.storage.is_folder
        reports_requests = any(hasattr(base, "get_transfer_results") for base in _BASES)
        if _BASES and not (self._has_plain_ids or reports_requests):
            several, names, remedy = f"total_dp_size={config.num_ranks}", "rank", ""
            if len(config.groups) > 1:
                several, names = f"{len(config.groups)} KV cache groups", "group"
                remedy = " Add --disable-hybrid-kv-cache-manager."
            raise ValueError(
                f"{several} need a vLLM that calls get_transfer_results(): this "
                "version takes failed loads as block ids, which do not identify the "
                f"{names}.{remedy}"
            )
        self._num_ranks = config.num_ranks
        self._metadata: StepMetadata | RankSteps | None = None
        self._failed_requests: set[str] = set()
        transfer_config = vllm_config.kv_transfer_config
        engine_id = str(getattr(transfer_config, "engine_id", None) or "")
        # The half of this process; vLLM calls no method of the other one.
        self._scheduler: SchedulerHalf = None  # type: ignore[assignment]
        self._worker: WorkerHalf = None  # type: ignore[assignment]
        if role.name == "SCHEDULER":
            with names_of_vllm():
                self._scheduler = SchedulerHalf(config, engine_id)
        else:
            self._worker = WorkerHalf(config, engine_id)
            if config.num_ranks > 1:
                lacks = "with several ranks, the log and /metrics lack jaxkv's metrics"
                _try_hook(pass_on_stats, lacks)
                spread = "with several ranks, returning users often go to another rank"
                _try_hook(route_by_backlog, spread)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: blocks that are not stored are recomputed."""
        return False

    # Called by vLLM's scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Bind vLLM's pool, which holds blocks in flight; compile all decisions."""
        self._scheduler.bind_block_pool(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Bind its block pool; with several ranks, include host hits in routing."""
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)
        if self._num_ranks == self._num_hosts == 1:
            _try_hook(
                end_before_resets,
                "reset_prefix_cache(reset_running_requests=True) fails during loads",
            )
        if self._num_ranks == 1:
            return
        count_host_hits(kv_cache_manager, self._scheduler.count_hit_tokens)
        ends = "with several ranks, transfers end only in steps that others cause"
        _try_hook(step_while_idle, ends)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens on host and store beyond vLLM's prefix cache.

        None: vLLM must ask again in a later step, for example while the store is read.
        The second value is whether the request must wait for a load.
        """
        return self._scheduler.query(request, num_computed_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return the sources of tokens, by vLLM's names: host, or store and host."""
        fetched = self._scheduler.scheduler.num_fetched_tokens(request.request_id)
        num_from_storage = min(fetched, num_external_tokens)
        names = self._sources
        host = getattr(names, "HOST", None)
        storage = getattr(names, "EXTERNAL_UNSPECIFIED", host)
        if self._has_folder:
            storage = getattr(names, "DISK", storage)
        counts = Counter({host: num_external_tokens - num_from_storage})
        counts[storage] += num_from_storage
        return dict(+counts)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Record all blocks of a request, and the accepted tokens of its offer."""
        block_ids = blocks.get_block_ids()
        self._scheduler.record_blocks(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata | RankSteps:
        """Return the transfers of a step, from vLLM's `SchedulerOutput`."""
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the worker's report, from vLLM's `KVConnectorOutput`."""
        report: WorkerReport | None = connector_output.kv_connector_worker_meta
        if report is None:
            return
        part = self._scheduler.record_report(report)
        if part is not report.output and connector_output.finished_recving:
            # tpu-inference reports the loads of all ranks to each; keep this rank's.
            connector_output.finished_recving &= {
                *part.finished_recving,
                *part.failed_recving,
            }

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request; see `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request, and return the ``kv_transfer_params`` of its response.

        False: vLLM may free the blocks at once, because those in flight are held.
        """
        return False, self._scheduler.finish(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether vLLM must keep stepping although no request is left."""
        return self._scheduler.has_pending_transfers()

    def has_pending_block_frees(self) -> bool:
        """Whether transfers will free blocks: vLLM then waits before it preempts."""
        return self._scheduler.has_pending_block_frees()

    def take_events(self) -> Iterable[Any]:
        """Return the events of blocks stored in or removed from host and store.

        They have tokens, parent, adapter and group, like the events of vLLM's pool.
        """
        return self._scheduler.take_events()

    def reset_cache(self) -> bool | None:
        """Clear the host tier, and disable the store; return whether it was cleared.

        If not, the host offers nothing until it has been cleared.
        """
        return self._scheduler.reset() if self._scheduler else None

    def get_finished_count(self) -> int:
        """Return the number of workers that report each load: one for each host."""
        return self._num_hosts

    # Called by both.

    def get_kv_connector_stats(self) -> OffloadConnectorStats | None:
        """Return the changed metrics of this half; None if no report is due."""
        # With several ranks, `pass_on_stats` reads the worker's report once.
        half = self._scheduler or (self._worker if self._num_ranks == 1 else None)
        return half.take_stats() if half else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> OffloadConnectorStats:
        """Make a report from data of another process."""
        return OffloadConnectorStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OffloadPromMetrics:
        """Make the metrics that vLLM serves in addition to its own."""
        return OffloadPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )

    # Called by the runner.

    def register_runner(self, runner: Any) -> None:
        """Set up the host memory for the KV caches of tpu-inference's runner."""
        self._worker.register_runner(runner)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Raise ValueError: JAX caches come with their runner."""
        raise ValueError(
            f"register_kv_caches() was called with {type(kv_caches).__name__}: jaxkv "
            "serves JAX runners, which call register_runner(). For PyTorch use vLLM's "
            "OffloadingConnector."
        )

    def unregister_kv_caches(self) -> None:
        """Clear the host tier, as vLLM is about to drop the KV caches."""
        self._worker.lose_pool()

    def bind_connector_metadata(
        self, connector_metadata: StepMetadata | RankSteps
    ) -> None:
        """Set the transfers of a step."""
        self._metadata = connector_metadata

    def has_connector_metadata(self) -> bool:
        """Whether a step is being processed."""
        return self._metadata is not None

    def clear_connector_metadata(self) -> None:
        """End the step."""
        self._metadata = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the stores and loads of the step; returns at once.

        Some versions of vLLM call it after the model, others before. Both are correct:
        the step's requests neither write stored blocks nor read loaded blocks.
        """
        if self._metadata is not None:
            self._worker.start(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Ignored: a request runs only after its load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Ignored: blocks are stored when they are full, all layers together."""

    def wait_for_save(self) -> None:
        """Ignored: blocks are held until their store is reported."""

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads have ended, including failed ones."""
        output = self._worker.poll()
        if output is NO_REPORTS:
            return None, set()
        if not self._has_plain_ids:
            self._failed_requests.update(output.failed_recving)
        return None, {*output.finished_recving, *output.failed_recving}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return `get_finished`, and failed loads if block ids do not identify them."""
        results = super().get_transfer_results(finished_req_ids)
        if self._failed_requests:
            results.failed_recving |= self._failed_requests
            self._failed_requests.clear()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads left unwritten, to be recomputed."""
        failed = self._worker.take_failed_blocks()
        return failed if self._has_plain_ids else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the report for the scheduler's half."""
        return self._worker.take_report()

    def shutdown(self) -> None:
        """Wait for transfers in flight; close the store and the file of requests."""
        (self._scheduler or self._worker).shut_down()


# tpu-inference 0.32 accepts connectors by name; this is one of the names.
TPUOffloadConnector = OffloadConnector
