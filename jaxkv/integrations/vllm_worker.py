"""The worker's half of `OffloadConnector`: moves the blocks of a runner's KV caches."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax

from jaxkv import ConnectorOutput, OffloadMetadata, OffloadWorker, TransferEngine
from jaxkv.connector import NO_EVENT
from jaxkv.integrations.vllm_config import ConnectorConfig
from jaxkv.transfer.engine import DEFAULT_STAGING_BYTES
from jaxkv.types import NO_BLOCK
from jaxkv.units import gib

_LOG = logging.getLogger("jaxkv")


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """What a worker saw complete, on its way to the scheduler's process.

    Attributes:
        output: The same, as jaxkv's scheduler takes it.
    """

    output: ConnectorOutput

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Put together what two workers saw, as vLLM's executors do."""
        return WorkerReport(ConnectorOutput.aggregate([self.output, other.output]))


class WorkerHalf:
    """Starts the transfers of each step and tells what became of them.

    A runner's caches are donated to its model in every step. So none is kept here:
    each call takes those that the runner has now, and gives it back those to go on
    with.

    Args:
        config: How to store and load.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._runner: Any = None
        self._worker: OffloadWorker | None = None
        # Where each request's load writes, for the blocks of one that fails.
        self._targets: dict[str, tuple[int, ...]] = {}
        self._failed_blocks: set[int] = set()
        self._report = ConnectorOutput()

    def register_runner(self, runner: Any) -> None:
        """Set up the host memory for the blocks of a runner.

        Args:
            runner: Has `kv_caches`, a list with an array for each layer, the block
                axis first.

        Raises:
            ValueError: If the caches cannot be offloaded.
            MemoryError: If there is not that much host memory.
        """
        if jax.process_count() > 1:
            raise ValueError(
                f"{jax.process_count()} processes serve the model: the connector was "
                "never tried with more than one."
            )
        config = self._config
        # Nothing is kept of the caches but what they look like.
        engine = TransferEngine(
            list(runner.kv_caches),
            config.num_host_blocks,
            blocks_per_host_block=config.rules.blocks_per_host_block,
            staging_bytes=config.staging_bytes or DEFAULT_STAGING_BYTES,
        )
        self._worker = OffloadWorker(engine, deadline_s=config.deadline_s)
        self._runner = runner
        # Runners forbid to compile during a step.
        engine.warm_up()
        _LOG.info(
            "%d host blocks of %d bytes, %s of pinned memory in all",
            config.num_host_blocks,
            engine.block_bytes,
            gib(engine.host_bytes),
        )
        used = engine.block_bytes * config.num_host_blocks
        if used > config.planned_bytes:
            _LOG.warning(
                "the host tier takes %s, and not %s: the runner's blocks are larger "
                "than vLLM says; num_cpu_blocks gives their number instead",
                gib(used),
                gib(config.planned_bytes),
            )

    def start(self, meta: OffloadMetadata) -> None:
        """Start the transfers of a step; returns before they are done."""
        runner, worker = self._runner, self._worker
        if worker is None:
            raise RuntimeError(
                "register_runner() was not called: the runner of this vLLM does not "
                "hand its KV caches to connectors as tpu-inference's does."
            )
        if meta.load_event != NO_EVENT:
            for request_id in meta.load_event_to_reqs[meta.load_event]:
                self._targets[request_id] = meta.load_device_blocks
        caches = runner.kv_caches
        runner.kv_caches = type(caches)(worker.start(meta, list(caches)))

    def poll(self) -> ConnectorOutput:
        """Tell what completed since the last time; never waits."""
        if self._worker is None:
            return ConnectorOutput()
        new = self._worker.poll()
        for request_id in new.finished_recving:
            self._targets.pop(request_id, None)
        for request_id in new.failed_recving:
            self._failed_blocks.update(self._targets.pop(request_id, ()))
        self._report = ConnectorOutput.aggregate([self._report, new])
        return new

    def take_failed_blocks(self) -> set[int]:
        """Hand out the device blocks that failed loads left unwritten.

        All those of a load event, as its requests fail together.
        """
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed - {NO_BLOCK}

    def take_report(self) -> WorkerReport | None:
        """Hand out what the scheduler is to be told; None if there is nothing."""
        report, self._report = self._report, ConnectorOutput()
        return None if report == ConnectorOutput() else WorkerReport(report)

    def shut_down(self) -> None:
        """Wait for what is in flight, and let go of the runner."""
        runner, worker = self._runner, self._worker
        self._runner = self._worker = None
        if worker is None or not worker.num_in_flight:
            return
        caches = runner.kv_caches
        if caches and not any(cache.is_deleted() for cache in caches):
            pool, _ = worker.drain(list(caches))
            runner.kv_caches = type(caches)(pool)
