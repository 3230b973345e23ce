"""The scheduler's half of `OffloadConnector`: vLLM's books, as jaxkv has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from jaxkv import (
    DeviceBlockPool,
    OffloadingEvent,
    OffloadMetadata,
    OffloadScheduler,
    SchedulerOutput,
)
from jaxkv.integrations.vllm_config import ConnectorConfig
from jaxkv.integrations.vllm_pool import VllmBlockPool, key_in_group
from jaxkv.integrations.vllm_worker import WorkerReport
from jaxkv.types import BlockKey


class VllmRequest:
    """A request of vLLM's, read as `OffloadScheduler` reads requests.

    Args:
        request: vLLM's `Request`.
        num_groups: Groups of the model's layers.
    """

    def __init__(self, request: Any, num_groups: int) -> None:
        self.request = request
        self._keys: list[list[BlockKey]] = [[] for _ in range(num_groups)]

    @property
    def request_id(self) -> str:
        """The request's id."""
        request_id: str = self.request.request_id
        return request_id

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Hashes of the full blocks of all tokens so far."""
        hashes: Sequence[BlockKey] = self.request.block_hashes
        return hashes

    @property
    def block_keys_by_group(self) -> Sequence[Sequence[BlockKey]]:
        """The same for each group, told apart as vLLM's prefix cache does."""
        hashes = self.block_keys
        for group, keys in enumerate(self._keys):
            keys += (key_in_group(own, group) for own in hashes[len(keys) :])
        return self._keys

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and generated."""
        return int(self.request.num_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is on the device."""
        return int(self.request.num_computed_tokens)

    @property
    def num_output_placeholders(self) -> int:
        """How many of these are scheduled ahead of time."""
        return int(getattr(self.request, "num_output_placeholders", 0))


class SchedulerHalf:
    """Decides what is stored and loaded, beside vLLM's own scheduler.

    Args:
        config: How to store and load.

    Raises:
        ValueError: If the cache policy is not known, or the rules and the model's
            groups do not go together.

    Attributes:
        scheduler: The books.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self.scheduler = OffloadScheduler(
            config.groups,
            config.num_host_blocks,
            config.cache_policy,
            config.enable_events,
            rules=config.rules,
        )
        self._config = config
        self._is_bound = False
        self._requests: dict[str, VllmRequest] = {}
        # Requests that were given blocks since the last step's metadata.
        self._allocated: set[str] = set()

    def bind_block_pool(self, pool: Any) -> None:
        """Take the pool whose blocks are to be held, and compile all decisions."""
        config = self._config
        held = VllmBlockPool(pool, len(config.groups))
        # It has what the scheduler calls where nothing is copied on the device.
        self.scheduler.bind_device_block_pool(cast(DeviceBlockPool, held))
        self._is_bound = True
        block_size = min(group.block_size for group in config.groups)
        self.scheduler.warm_up(
            -(-config.max_model_len // block_size),
            -(-config.max_num_batched_tokens // block_size),
        )

    def query(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask how much of a request the host has beyond the device's own prefix."""
        if not self._is_bound:
            raise RuntimeError(
                "bind_gpu_block_pool() was not called: this vLLM, or its scheduler "
                "for data parallelism, does not lend its block pool to connectors."
            )
        known = self._request(request)
        return self.scheduler.get_num_new_matched_tokens(known, num_computed_tokens)

    def note_blocks(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Note all blocks of a request and what is to be loaded into them."""
        known = self._request(request)
        self.scheduler.update_state_after_alloc(known, block_ids, num_external_tokens)
        self._allocated.add(known.request_id)

    def build_metadata(self, output: Any) -> OffloadMetadata:
        """List the transfers to start in a step, from vLLM's `SchedulerOutput`."""
        cached = output.scheduled_cached_reqs
        # Whoever comes from the queue had all its blocks noted as it was taken.
        new_block_ids = {
            request_id: block_ids
            for request_id, block_ids in zip(
                cached.req_ids, cached.new_block_ids, strict=True
            )
            if block_ids is not None and request_id not in self._allocated
        }
        # vLLM preempts between steps, too. A request that was back in time is none
        # that has lost its blocks: those noted here are the new ones.
        preempted = set(output.preempted_req_ids or ()) - self._allocated
        self._allocated.clear()
        return self.scheduler.build_connector_meta(
            SchedulerOutput(
                output.num_scheduled_tokens, new_block_ids, sorted(preempted)
            )
        )

    def note_report(self, report: WorkerReport | None) -> None:
        """Release what the worker neither reads nor writes any more."""
        if report is not None:
            self.scheduler.update_connector_output(report.output)

    def finish(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """Note that a request is over, by itself or by abort."""
        self.scheduler.request_finished_all_groups(self._request(request), block_ids)
        self._requests.pop(request.request_id, None)
        self._allocated.discard(request.request_id)

    def has_pending_transfers(self) -> bool:
        """Tell whether vLLM has to go on stepping although it has no requests."""
        pending = self.scheduler
        return pending.has_pending_stores() or pending.has_pending_loads()

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the host tier's events since the last time."""
        return self.scheduler.take_events()

    def reset(self) -> bool:
        """Forget all that the host tier holds; tell whether it was done."""
        return self.scheduler.reset()

    def _request(self, request: Any) -> VllmRequest:
        known = self._requests.get(request.request_id)
        if known is None or known.request is not request:
            known = VllmRequest(request, len(self._config.groups))
            self._requests[request.request_id] = known
        return known
