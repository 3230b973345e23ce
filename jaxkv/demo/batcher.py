"""Who runs in the engine's next step, and with which device blocks.

Requests get blocks as they need them, in order of arrival. When the pool is short, the
running request that came last loses its blocks, as in vLLM. It starts again later, and
finds on the device or the host what nobody has overwritten.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence

from jaxkv.blocks import DeviceBlockPool
from jaxkv.connector import ConnectorOutput, SchedulerOutput
from jaxkv.demo.allocation import (
    Extension,
    extend,
    plan_extension,
    release_all,
    release_unneeded,
)
from jaxkv.demo.request import EngineRequest, Phase
from jaxkv.groups import GroupSpec
from jaxkv.scheduler import OffloadScheduler
from jaxkv.search import find_cached_prefix
from jaxkv.types import BlockKey


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a step computes.

    Attributes:
        prefill: The request whose next chunk is computed, or none.
        decode: The requests whose newest token is computed.
        output: The same for the offload scheduler.
    """

    prefill: list[EngineRequest]
    decode: list[EngineRequest]
    output: SchedulerOutput


class Batcher:
    """The engine's requests from submission to their end.

    Args:
        blocks: The device tier.
        groups: The groups of layers, all with blocks of one size.
        concurrency: Requests that hold blocks at a time.
        max_chunk: Most tokens that a prefill step computes.
        offload: The host tier's scheduler; None without one.

    Attributes:
        num_preemptions: Times that a request lost its blocks to an older one.
    """

    def __init__(
        self,
        blocks: DeviceBlockPool,
        groups: tuple[GroupSpec, ...],
        concurrency: int,
        max_chunk: int,
        offload: OffloadScheduler | None,
    ) -> None:
        self.num_preemptions = 0
        self._blocks = blocks
        self._groups = groups
        self._block_size = groups[0].block_size
        self._concurrency = concurrency
        self._max_chunk = max_chunk
        self._offload = offload
        # Both in order of arrival.
        self._waiting: list[EngineRequest] = []
        self._active: list[EngineRequest] = []
        self._preempted_ids: list[str] = []  # not yet told to the offload scheduler

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._active)

    def add(self, request: EngineRequest) -> None:
        """Put a new request at the end of the queue."""
        self._waiting.append(request)

    def end(self, request: EngineRequest, phase: Phase) -> None:
        """Take a request's blocks away and let the offload scheduler know.

        Args:
            request: A request. Nothing happens if it is over already.
            phase: What has become of it.
        """
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

    def note_transfers(self, output: ConnectorOutput) -> None:
        """Have requests go on whose load is over."""
        loading = {r.request_id: r for r in self._active if r.phase is Phase.LOADING}
        for request_id in output.finished_recving:
            request = loading.get(request_id)
            if request is not None:  # else it was aborted meanwhile
                self._end_load(request)
                request.phase = Phase.RUNNING
                self.cache_computed([request])
        for request_id in output.failed_recving:
            request = loading.get(request_id)
            if request is not None:
                request.load_failed = True
                self._send_back(request)

    def schedule(self) -> Batch:
        """Choose what the next step computes, and give it blocks."""
        planned, is_short = self._plan_running()
        batch = [extension.request for extension in planned]
        # While somebody lacks blocks, nobody new comes in.
        closed = is_short or self._preempted_ids
        new = [] if closed else self._admit(sum(e.num_blocks for e in planned))
        added = extend(self._blocks, planned + new)
        for extension in new:
            request = extension.request
            if self._offload is not None:
                self._offload.update_state_after_alloc(
                    request,
                    _as_told(request.block_ids_by_group),
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
                    extension.request.request_id: _as_told(entries)
                    for extension, entries in zip(planned, added, strict=False)
                    if extension.num_blocks
                },
                preempted,
            ),
        )

    def release_unneeded(self, batch: Batch) -> None:
        """Free what is out of every window, once the step's stores were planned.

        Args:
            batch: The step's.
        """
        release_unneeded(self._blocks, self._groups, batch.prefill + batch.decode)

    def cache_computed(self, requests: Sequence[EngineRequest]) -> None:
        """Make newly computed full blocks findable on the device."""
        cached: list[tuple[int, BlockKey]] = []
        for request in requests:
            first = request.num_cached_blocks
            last = request.num_computed_tokens // self._block_size
            tables = request.block_ids_by_group
            for table, keys in zip(tables, request.block_keys_by_group, strict=True):
                cached += zip(table[first:last], keys[first:last], strict=True)
            request.num_cached_blocks = max(first, last)
        if cached:
            block_ids, keys = zip(*cached, strict=True)
            self._blocks.cache(block_ids, keys)

    def _plan_running(self) -> tuple[list[Extension], bool]:
        """Find blocks for whatever runs, the oldest request first.

        Returns:
            What the requests of this step lack, and whether another one has to wait
            until transfers, or requests that load, let go of blocks.
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
            while num_planned > self._blocks.num_free and running:
                self._preempt(running.pop())
            if num_planned > self._blocks.num_free:
                return planned, True
            planned.append(extension)
            has_prefill |= request.is_prefilling
        return planned, False

    def _admit(self, num_planned: int) -> list[Extension]:
        """Let waiting requests in, in order of arrival, while their first tokens fit.

        Args:
            num_planned: Free blocks that are for others.

        Returns:
            What the new requests lack.
        """
        admitted: list[Extension] = []
        for request in tuple(self._waiting):
            if len(self._active) == self._concurrency:
                break
            self._take_cached_prefix(request)
            extension = self._plan_first_step(request)
            if num_planned + extension.num_blocks > self._blocks.num_free:
                self._let_go(request)
                break
            if not self._ask_host(request):
                self._let_go(request)
                continue
            extension = self._plan_first_step(request)
            if num_planned + extension.num_blocks > self._blocks.num_free:
                self._let_go(request)
                if self._active or self._has_stores:
                    break
                # Nobody will make room: an offer may hold device blocks to copy from,
                # and leave too few to copy to. The model computes them instead.
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

    def _ask_host(self, request: EngineRequest) -> bool:
        """Ask what the host adds to a request's prefix; tell whether it knows yet."""
        if self._offload is None or request.load_failed:
            return True
        num_external, is_async = self._offload.get_num_new_matched_tokens(
            request, request.num_computed_tokens
        )
        if num_external is None:
            return False
        request.num_loading_tokens = num_external
        if num_external and is_async:
            request.phase = Phase.LOADING
        release_unneeded(self._blocks, self._groups, [request])
        return True

    def _plan_first_step(self, request: EngineRequest) -> Extension:
        """Find out what a request lacks to come in."""
        end = self._next_end(request)
        if request.phase is Phase.LOADING:
            end = request.num_present_tokens
        return plan_extension(self._groups, request, end)

    def _next_end(self, request: EngineRequest) -> int:
        """Tell how many tokens are there after a request's next step."""
        return min(request.num_present_tokens + self._max_chunk, request.num_tokens)

    def _take_cached_prefix(self, request: EngineRequest) -> None:
        """Hold what the device has of a request's prefix."""
        # The last token is computed in any case: its logits are needed.
        request.num_computed_tokens, request.block_ids_by_group = find_cached_prefix(
            self._blocks,
            self._groups,
            request.block_keys_by_group,
            request.num_tokens - 1,
        )
        request.num_cached_blocks = request.num_computed_tokens // self._block_size
        self._blocks.touch([b for ids in request.block_ids_by_group for b in ids])

    def _end_load(self, request: EngineRequest) -> None:
        request.num_computed_tokens += request.num_loading_tokens
        request.num_loading_tokens = 0

    def _preempt(self, request: EngineRequest) -> None:
        """Take a running request's blocks for an older one."""
        self._send_back(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _send_back(self, request: EngineRequest) -> None:
        """Have a request start again, before those that came after it."""
        self._let_go(request)
        self._preempted_ids.append(request.request_id)
        self._active.remove(request)
        bisect.insort(self._waiting, request, key=_arrival)

    def _let_go(self, request: EngineRequest) -> None:
        """Take all that a request has or was offered, but not its tokens."""
        if self._offload is not None:
            self._offload.request_preempted(request)
        release_all(self._blocks, request)
        request.num_computed_tokens = request.num_loading_tokens = 0
        request.phase = Phase.WAITING


def _arrival(request: EngineRequest) -> int:
    return request.number


def _as_told(tables: list[list[int]]) -> list[int] | list[list[int]]:
    """Write block ids as the offload scheduler reads them: of one group, no list."""
    return tables[0] if len(tables) == 1 else tables
