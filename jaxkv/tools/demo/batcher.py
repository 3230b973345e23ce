"""Chooses the requests of the engine's next step, and allocates their device blocks.

Requests get blocks as they need them, in order of arrival. If the pool is short, and
stays so when the transfers in flight have ended, the running request that arrived last
is preempted, as in vLLM. It starts again later, with what is still cached on the device
or the host.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence

from jaxkv.scheduling.protocol import ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import GroupSpec
from jaxkv.search.tiers import find_cached_prefix
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tools.demo.allocation import (
    Extension,
    extend,
    plan_extension,
    release_all,
    release_unneeded,
)
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.request import EngineRequest, Phase
from jaxkv.types import BlockKey


@dataclasses.dataclass(frozen=True)
class Batch:
    """The work of a step."""

    prefill: list[EngineRequest]  # The request whose next chunk is computed, or none
    decode: list[EngineRequest]  # The requests whose newest token is computed
    output: SchedulerOutput  # The same, for the offload scheduler


class Batcher:
    """Manages the engine's requests from submission to their end."""

    def __init__(
        self,
        config: EngineConfig,
        groups: tuple[GroupSpec, ...],
        blocks: DeviceBlockPool,
        offload: OffloadScheduler | None,
    ) -> None:
        self.num_preemptions = 0  # Number of preemptions
        self._config, self._groups = config, groups
        self._blocks, self._offload = blocks, offload
        # Both in order of arrival.
        self._waiting: list[EngineRequest] = []
        self._active: list[EngineRequest] = []
        self._preempted_ids: list[str] = []  # not yet reported to the offload scheduler

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._active)

    def add(self, request: EngineRequest) -> None:
        """Append a new request to the queue."""
        self._waiting.append(request)

    def end(self, request: EngineRequest, phase: Phase) -> None:
        """Free a request's blocks and notify the offload scheduler."""
        if request in self._active:
            self._active.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            return
        request.phase = phase
        if self._offload is not None:
            self._offload.request_finished(request)
        release_all(self._blocks, request)

    def end_transfers(self, output: ConnectorOutput) -> None:
        """Resume the requests whose loads are over."""
        loading = {r.request_id: r for r in self._active if r.phase is Phase.LOADING}
        for request_id in output.finished_recving:
            request = loading.get(request_id)
            if request is not None:  # otherwise it was aborted
                self._end_load(request)
                request.phase = Phase.RUNNING
                self.cache_computed([request])
        for request_id in output.failed_recving:
            request = loading.get(request_id)
            if request is not None:
                request.load_failed = True
                self._send_back(request)

    def schedule(self) -> Batch:
        """Choose the requests of the next step, and allocate their blocks."""
        planned, is_short = self._plan_running()
        batch = [extension.request for extension in planned]
        # No request is admitted while another one waits for blocks.
        closed = is_short or self._preempted_ids
        new = [] if closed else self._admit(sum(e.num_blocks for e in planned))
        added = extend(self._blocks, planned + new)
        for extension in new:
            request = extension.request
            if self._offload is not None:
                self._offload.update_state_after_alloc(
                    request,
                    _flat_if_single(request.block_ids_by_group),
                    request.num_loading_tokens,
                )
            if request.phase is Phase.RUNNING:
                self._end_load(request)  # it arrives before the model runs
                if not (request.is_prefilling and any(r.is_prefilling for r in batch)):
                    batch.append(request)
        preempted, self._preempted_ids = self._preempted_ids, []
        return Batch(
            [request for request in batch if request.is_prefilling],
            [request for request in batch if not request.is_prefilling],
            SchedulerOutput(
                {
                    request.request_id: self._next_end(request)
                    - request.num_computed_tokens
                    for request in batch
                },
                {
                    extension.request.request_id: _flat_if_single(entries)
                    for extension, entries in zip(planned, added, strict=False)
                    if extension.num_blocks
                },
                preempted,
            ),
        )

    def release_unneeded(self, batch: Batch) -> None:
        """Free blocks out of every window, after the step's stores were planned."""
        release_unneeded(self._blocks, self._groups, batch.prefill + batch.decode)

    def cache_computed(self, requests: Sequence[EngineRequest]) -> None:
        """Make newly computed full blocks findable on the device."""
        cached: list[tuple[int, BlockKey]] = []
        for request in requests:
            first = request.num_cached_blocks
            last = request.num_computed_tokens // self._config.block_size
            tables = request.block_ids_by_group
            for table, keys in zip(tables, request.block_keys_by_group, strict=True):
                cached += zip(table[first:last], keys[first:last], strict=True)
            request.num_cached_blocks = max(first, last)
        if cached:
            block_ids, keys = zip(*cached, strict=True)
            self._blocks.cache(block_ids, keys)

    def _plan_running(self) -> tuple[list[Extension], bool]:
        """Plan blocks for the running requests, the oldest first.

        Returns the extensions of this step, and whether a request has to wait until
        transfers, or requests that load, free blocks.
        """
        planned: list[Extension] = []
        num_planned, has_prefill = 0, False
        running = deque(r for r in self._active if r.phase is Phase.RUNNING)
        while running:
            request = running.popleft()
            if request.is_prefilling and has_prefill:
                continue
            extension = plan_extension(self._groups, request, self._next_end(request))
            num_planned += extension.num_blocks
            # Blocks that transfers alone hold are awaited, not taken from others.
            while num_planned > self._num_free_soon and running:
                self._preempt(running.pop())
            if num_planned > self._blocks.num_free:
                return planned, True
            planned.append(extension)
            has_prefill |= request.is_prefilling
        return planned, False

    @property
    def _num_free_soon(self) -> int:
        return self._blocks.num_free + self._blocks.num_pending_free

    def _admit(self, num_planned: int) -> list[Extension]:
        """Admit waiting requests in order of arrival, while their first tokens fit.

        Returns the extensions of the new requests.
        """
        admitted: list[Extension] = []
        for request in tuple(self._waiting):
            if len(self._active) == self._config.concurrency:
                break
            self._take_cached_prefix(request)
            extension = self._plan_first_step(request)
            if num_planned + extension.num_blocks > self._blocks.num_free:
                self._release(request)
                break
            if not self._query_host(request):
                self._release(request)
                continue
            extension = self._plan_first_step(request)
            if num_planned + extension.num_blocks > self._blocks.num_free:
                self._release(request)
                if self._active or self._has_stores:
                    break
                # No other request will free blocks: an offer may hold device blocks to
                # copy from, and leave too few to copy to. Compute the tokens instead.
                self._take_cached_prefix(request)
                extension = self._plan_first_step(request)
            num_planned += extension.num_blocks
            admitted.append(extension)
            if not request.num_preemptions:
                request.device_hit_tokens = request.num_computed_tokens
                request.host_hit_tokens = request.num_loading_tokens
            if request.phase is Phase.WAITING:
                request.phase = Phase.RUNNING
            self._waiting.remove(request)
            bisect.insort(self._active, request, key=_arrival)
        return admitted

    @property
    def _has_stores(self) -> bool:
        return self._offload is not None and self._offload.has_pending_stores()

    def _query_host(self, request: EngineRequest) -> bool:
        """Query the host for a request's prefix; return False to ask again later."""
        if self._offload is None:
            return True
        num_external, is_async = self._offload.get_num_new_matched_tokens(
            request, request.num_computed_tokens
        )
        if num_external is None:
            return False
        if request.load_failed:
            num_external = 0
        request.num_loading_tokens = num_external
        if num_external and is_async:
            request.phase = Phase.LOADING
        release_unneeded(self._blocks, self._groups, [request])
        return True

    def _plan_first_step(self, request: EngineRequest) -> Extension:
        """Plan the blocks that a request needs to be admitted."""
        end = self._next_end(request)
        if request.phase is Phase.LOADING:
            end = request.num_present_tokens
        return plan_extension(self._groups, request, end)

    def _next_end(self, request: EngineRequest) -> int:
        """Return how many tokens are computed after a request's next step."""
        max_chunk = self._config.chunk_sizes[-1]
        return min(request.num_present_tokens + max_chunk, request.num_tokens)

    def _take_cached_prefix(self, request: EngineRequest) -> None:
        """Hold the blocks of a request's prefix on the device."""
        # The last token is always computed: its logits are needed.
        request.num_computed_tokens, request.block_ids_by_group = find_cached_prefix(
            self._blocks,
            self._groups,
            request.block_keys_by_group,
            request.num_tokens - 1,
        )
        num_cached = request.num_computed_tokens // self._config.block_size
        request.num_cached_blocks = num_cached
        self._blocks.touch([b for ids in request.block_ids_by_group for b in ids])

    def _end_load(self, request: EngineRequest) -> None:
        request.num_computed_tokens += request.num_loading_tokens
        request.num_loading_tokens = 0

    def _preempt(self, request: EngineRequest) -> None:
        """Preempt a running request for an older one."""
        self._send_back(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _send_back(self, request: EngineRequest) -> None:
        """Return a request to the queue, before later arrivals."""
        self._release(request)
        self._preempted_ids.append(request.request_id)
        self._active.remove(request)
        bisect.insort(self._waiting, request, key=_arrival)

    def _release(self, request: EngineRequest) -> None:
        """Free all blocks of a request, and drop its offer."""
        if self._offload is not None:
            self._offload.request_preempted(request)
        release_all(self._blocks, request)
        request.num_computed_tokens = request.num_loading_tokens = 0
        request.phase = Phase.WAITING


def _arrival(request: EngineRequest) -> int:
    return request.number


def _flat_if_single(tables: list[list[int]]) -> list[int] | list[list[int]]:
    """Return block tables as the offload scheduler takes them: flat for one group."""
    return tables[0] if len(tables) == 1 else tables
