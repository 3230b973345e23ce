"""vLLM's connector: jaxkv as the host tier of vLLM on TPU.

vLLM loads the class by this module's path, with no change to vLLM or to tpu-inference::

    vllm serve MODEL --no-async-scheduling --kv-transfer-config '{
        "kv_connector": "TPUOffloadConnector",
        "kv_connector_module_path": "jaxkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64GiB"}}'

docs/vllm.md has the keys, what is served and what is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxkv import OffloadMetadata
from jaxkv.integrations.vllm_config import ConnectorConfig
from jaxkv.integrations.vllm_events import to_vllm
from jaxkv.integrations.vllm_scheduler import SchedulerHalf
from jaxkv.integrations.vllm_worker import WorkerHalf, WorkerReport


def _bases() -> tuple[type, ...]:
    """Give vLLM's base classes; none where there is no vLLM."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # type: ignore[import-not-found]
            KVConnectorBase_V1,
            SupportsHMA,
        )
    except ImportError:
        return ()
    return KVConnectorBase_V1, SupportsHMA


_BASES = _bases()


class OffloadConnector(*_BASES):  # type: ignore[misc]
    """A host tier for vLLM's KV cache, over the KV caches of a JAX runner.

    vLLM makes two of them, one beside its scheduler and one beside its runner, in one
    process or in two. What each is asked follows vLLM's `KVConnectorBase_V1`, from
    version 0.19 on. Without vLLM the class has no base and the same calls.

    A store reads blocks that are full and held, so it may run beside the model. A load
    is waited for by its request alone. So none of the calls waits for a transfer.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        role: vLLM's `KVConnectorRole`.
        kv_cache_config: vLLM's `KVCacheConfig`.

    Raises:
        ValueError: If vLLM was started with what jaxkv does not serve, or a key of
            ``kv_connector_extra_config`` is not known or has a bad value.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        if _BASES:
            super().__init__(vllm_config, role, kv_cache_config)
        config = ConnectorConfig.of(vllm_config, kv_cache_config)
        self._num_groups = len(config.groups)
        reports_requests = any(hasattr(base, "get_transfer_results") for base in _BASES)
        if _BASES and self._num_groups > 1 and not reports_requests:
            raise ValueError(
                f"{self._num_groups} KV cache groups need a vLLM that asks for "
                "get_transfer_results(): this one is told of failed loads by block "
                "ids, which it cannot tell apart by group. Add "
                "--disable-hybrid-kv-cache-manager."
            )
        self._metadata: OffloadMetadata | None = None
        self._failed_requests: set[str] = set()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role.name == "SCHEDULER":
            self._scheduler = SchedulerHalf(config)
        else:
            self._worker = WorkerHalf(config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not stored is computed again."""
        return False

    # What vLLM's scheduler calls.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool, whose blocks are held while they are in flight.

        All decisions are compiled here, which takes a while.
        """
        self._of_scheduler.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tell how many tokens more the host has than vLLM's own prefix cache.

        Args:
            request: vLLM's `Request`.
            num_computed_tokens: Tokens that vLLM found on the device.

        Returns:
            How many; None to be asked again in a later step. And whether the request
            has to wait for them.
        """
        return self._of_scheduler.query(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Note the blocks of a request and what is to be loaded into them.

        Args:
            request: vLLM's `Request`.
            blocks: vLLM's `KVCacheBlocks`, all that the request has.
            num_external_tokens: How much of the offer vLLM takes.
        """
        block_ids = blocks.get_block_ids()
        self._of_scheduler.note_blocks(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> OffloadMetadata:
        """List the transfers of a step, from vLLM's `SchedulerOutput`."""
        return self._of_scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the worker reports, from vLLM's `KVConnectorOutput`."""
        report: WorkerReport | None = connector_output.kv_connector_worker_meta
        self._of_scheduler.note_report(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request is over. Its blocks may be freed at once."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request is over. Its blocks may be freed at once.

        Those that are in flight are held by themselves.
        """
        self._of_scheduler.finish(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Tell whether vLLM is to go on stepping although no request is left."""
        return self._of_scheduler.has_pending_transfers()

    def take_events(self) -> Iterable[Any]:
        """Hand out vLLM's events of what came to the host tier and what left it.

        Token ids and parents are not in them: a router knows both by the block's hash,
        from the event of the device.
        """
        return list(to_vllm(self._of_scheduler.take_events(), self._num_groups))

    def reset_cache(self) -> bool | None:
        """Forget what the host holds; tell whether it was done."""
        return self._scheduler.reset() if self._scheduler else None

    # What the runner calls.

    def register_runner(self, runner: Any) -> None:
        """Set up the host memory for the KV caches of tpu-inference's runner.

        Args:
            runner: Its `kv_caches` are taken from it and put back in every step, for
                the model donates them.
        """
        self._of_worker.register_runner(runner)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Refuse caches without their runner.

        Raises:
            ValueError: Always. Arrays that a model donates are gone after a step, and
                tensors of PyTorch cannot be moved by JAX.
        """
        raise ValueError(
            f"register_kv_caches() was called with {type(kv_caches).__name__}: jaxkv "
            "serves JAX runners, which call register_runner(). For PyTorch take vLLM's "
            "own OffloadingConnector."
        )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Do nothing: blocks in flight are held, and nobody can overwrite them."""

    def bind_connector_metadata(self, connector_metadata: OffloadMetadata) -> None:
        """Take the transfers of a step."""
        self._metadata = connector_metadata

    def has_connector_metadata(self) -> bool:
        """Tell whether a step is under way."""
        return self._metadata is not None

    def clear_connector_metadata(self) -> None:
        """Note that the step is over."""
        self._metadata = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the transfers of the step, stores and loads; returns at once.

        vLLM calls it before or after the model, as its version has it. Either is
        right: neither do the step's requests write what is stored, nor do they read
        what is loaded.
        """
        if self._metadata is not None:
            self._of_worker.start(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request runs before its load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored when they are full, all layers together."""

    def wait_for_save(self) -> None:
        """Do nothing: what is being stored is held until it was reported."""

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Tell whose loads are over, those that failed among them."""
        output = self._of_worker.poll()
        if self._num_groups > 1:
            self._failed_requests.update(output.failed_recving)
        return None, {*output.finished_recving, *output.failed_recving}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Tell the same, and which loads failed, where blocks cannot tell it."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._failed_requests
        self._failed_requests.clear()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell the blocks that failed loads left unwritten, to be computed again."""
        failed = self._of_worker.take_failed_blocks()
        return failed if self._num_groups == 1 else set()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Hand out what the scheduler's half is to be told."""
        return self._of_worker.take_report()

    def shutdown(self) -> None:
        """Wait for what is in flight."""
        if self._worker is not None:
            self._worker.shut_down()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for no layout: a block is moved as it is, all its bytes."""
        return None

    @property
    def _of_scheduler(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("the worker's connector was asked for the scheduler's.")
        return self._scheduler

    @property
    def _of_worker(self) -> WorkerHalf:
        if self._worker is None:
            raise RuntimeError("the scheduler's connector was asked for the worker's.")
        return self._worker


# tpu-inference 0.32 lets connectors in by their names; this is one of them.
TPUOffloadConnector = OffloadConnector
