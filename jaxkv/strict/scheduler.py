"""A scheduler that checks the order and arguments of the engine's calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.scheduling.checks import checked_step
from jaxkv.scheduling.protocol import (
    BlockTable,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
    tables_by_group,
)
from jaxkv.scheduling.requests import keys_by_group
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention
from jaxkv.strict.blocks import StrictError
from jaxkv.strict.worker import MAX_SILENT_STEPS
from jaxkv.tiers.base import BlockIds
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.pools import BorrowedPool, DevicePool
from jaxkv.types import NULL_BLOCK, BlockKey


@dataclasses.dataclass
class _Entry:
    """A request from its look-up until its end."""

    request: Request  # The object passed last.
    num_tokens: int
    marks: list[KeyMark]  # Marks of its keys, by group.
    # After its look-up, after it got blocks, and after a preemption.
    phase: Literal["matched", "running", "preempted"] = "matched"
    is_put_back: bool = False  # Whether it got no blocks after its look-up.
    loads_async: bool = False  # Whether it must wait for the load of its offer.
    is_loading: bool = False
    may_rematch: bool = False  # Whether a look-up is allowed although it has blocks.
    num_found: int = 0  # Tokens computed or offered when it got its blocks.
    num_local: int = 0  # Of these, the tokens already computed.
    num_valid: int | None = None  # After a failed load, the tokens not to recompute.
    tables: list[list[int]] = dataclasses.field(default_factory=list)  # By group.


class StrictOffloadScheduler(OffloadScheduler):
    """Plans exactly like `OffloadScheduler`, and refuses wrong calls of the engine.

    Raises:
        StrictError: By most methods: the engine omitted a call, made it too early, or
            passed a wrong argument. The state is unchanged.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._requests: dict[str, _Entry] = {}
        self._num_silent = 0
        self._has_cached = False
        # The engine's pool, if it has a `cache` method.
        self._blocks: DeviceBlockPool | BorrowedPool | None = None

    def bind_device_block_pool(self, pool: DevicePool) -> None:
        """Bind the pool, and check its `cache` calls; see `OffloadScheduler`."""
        super().bind_device_block_pool(pool)
        if not isinstance(pool, DeviceBlockPool | BorrowedPool) or pool is self._blocks:
            return
        self._blocks, self._has_cached = pool, pool.has_cached
        name, cache = type(pool).__name__, pool.cache

        def checked(block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
            if len(block_ids) < len(keys):
                raise StrictError(
                    f"{name}.cache() was given {len(block_ids)} blocks for "
                    f"{len(keys)} keys: the block table is too short, so allocate a "
                    "block for each key before the model runs."
                )
            block_list = np.asarray(block_ids).tolist()
            if wrong := self._loads.blocks_awaited().intersection(block_list):
                raise StrictError(
                    f"{name}.cache() was called for blocks "
                    f"{sorted(wrong)[:8]}, into which a load is in flight: wait until "
                    "update_connector_output() names its request in finished_recving."
                )
            self._has_cached = True
            return cache(block_ids, keys)

        # Replace the method of this pool only, not of its class.
        setattr(pool, "cache", checked)  # noqa: B010

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Match a request; see `OffloadScheduler`."""
        self._book.check_lookup(request)
        entry = self._requests.get(request.request_id)
        if entry is not None:
            self._check_same(request, entry)
            is_running = entry.phase == "running" and not entry.may_rematch
            if self._blocks is not None and is_running:
                raise StrictError(
                    "get_num_new_matched_tokens() was called for request "
                    f"{shown(request.request_id)}, which has its blocks. If it is a "
                    "new request, the earlier one with its id has not ended: call "
                    "request_finished() first. If it lost its blocks, call "
                    "request_preempted(), or name it in "
                    "SchedulerOutput.preempted_req_ids."
                )
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._requests[request.request_id] = _Entry(
            request,
            request.num_tokens,
            self._marks(request),
            loads_async=bool(answer[0]) and answer[1],
            num_found=num_computed_tokens,
            num_local=num_computed_tokens,
        )
        return answer

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> list[list[int]]:
        """Record the device blocks of a request; see `OffloadScheduler`."""
        self._book.check_stores(request)
        name = request.request_id
        entry = self._requests.get(name)
        if entry is not None and entry.phase != "preempted":
            self._check_same(request, entry)
        else:
            entry = None
            if num_external_tokens or self._blocks is not None:
                raise StrictError(
                    f"update_state_after_alloc() was called for request {shown(name)} "
                    "before get_num_new_matched_tokens(): match first, then allocate, "
                    "then pass the allocated blocks. A preempted request must be "
                    "matched again."
                )
            # Engines that bind no pool, such as vLLM, skip the match if nothing loads.
            entry = _Entry(request, request.num_tokens, self._marks(request))
        tables = tables_by_group(block_ids, len(self.groups))
        is_declined = not (any(tables) or num_external_tokens)
        if not is_declined:
            self._check_held("update_state_after_alloc", name, tables)
        num_found = entry.num_found + num_external_tokens
        is_admitted = entry.phase == "matched" and not is_declined
        if is_admitted:
            self._check_covers(
                "update_state_after_alloc", name, tables, num_found, "were found for it"
            )
        answer = super().update_state_after_alloc(
            request, block_ids, num_external_tokens
        )
        entry.is_put_back = entry.phase == "matched" and is_declined
        if is_admitted:
            entry.phase, entry.num_found = "running", num_found
            entry.is_loading = entry.loads_async and num_external_tokens > 0
        entry.request, entry.num_tokens = request, request.num_tokens
        entry.marks = self._marks(request)
        entry.tables = [list(table) for table in answer]
        self._requests[name] = entry
        return answer

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """List the transfers to start in this step; see `OffloadScheduler`."""
        if self._num_silent >= MAX_SILENT_STEPS:
            raise StrictError(
                f"update_connector_output() was not called in {self._num_silent} steps "
                f"with {self._num_in_flight} blocks in flight: in every step pass it "
                "the result of OffloadWorker.poll()."
            )
        checked_step(output)
        self._check_not_freed(output)
        for name, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens > 0:
                self._check_scheduled(name)
        for name, table in output.new_block_ids.items():
            if name not in self._requests:
                raise StrictError(_unknown(name, "new_block_ids"))
            tables = tables_by_group(table, len(self.groups))
            self._check_held("SchedulerOutput.new_block_ids", name, tables)
            # A request that has no blocks yet has no tables.
            for old, new in zip(self._requests[name].tables, tables, strict=False):
                old += new
        # The others were named by request_preempted() and may be admitted again by now.
        preempted = set(output.preempted_req_ids) - set(self._preempted)
        meta = super().build_connector_meta(output)
        for name, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens > 0:
                self._requests[name].num_valid = None
        for name in preempted:
            if output.num_scheduled_tokens.get(name, 0) == 0:
                self._set_preempted(name)
        # Engines that bind no pool, such as vLLM, pass only non-empty reports.
        if self._num_in_flight and self._blocks is not None:
            self._num_silent += 1
        return meta

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release blocks that no worker reads or writes; see `OffloadScheduler`."""
        answer = super().update_connector_output(output)
        self._num_silent = 0
        for name in (*answer.finished_recving, *answer.failed_recving):
            if entry := self._requests.get(name):
                entry.is_loading = False
                if name in answer.failed_recving:
                    entry.may_rematch, entry.num_valid = True, entry.num_local
        return answer

    def request_preempted(self, request: Request) -> None:
        """Record that a request is preempted; see `OffloadScheduler`."""
        super().request_preempted(request)
        self._set_preempted(request.request_id)

    def request_finished(
        self, request: Request, block_ids: BlockTable | None = None
    ) -> tuple[bool, None]:
        """Record the end of a request; see `OffloadScheduler`."""
        self._book.check_stores(request)
        name = request.request_id
        table = [] if block_ids is None else block_ids
        tables = tables_by_group(table, len(self.groups))
        if any(tables):
            self._check_held("request_finished", name, tables)
            num = _num_computed(request)
            self._check_covers("request_finished", name, tables, num, "it has computed")
        answer = super().request_finished(request, block_ids)
        self._requests.pop(name, None)
        return answer

    @property
    def _num_in_flight(self) -> int:
        in_transit = self.in_transit
        return in_transit.stores_in_flight + in_transit.loads_in_flight

    def _set_preempted(self, name: str) -> None:
        if entry := self._requests.get(name):
            entry.phase, entry.is_loading = "preempted", False

    def _marks(self, request: Request) -> list[KeyMark]:
        groups = keys_by_group(request, len(self.groups))
        return [KeyMark.of(keys, len(keys)) for keys in groups]

    def _check_same(self, request: Request, entry: _Entry) -> None:
        """Refuse a new request with the id of a request that has not ended."""
        if request is entry.request:  # The engine may rewrite its own request.
            return
        keys = keys_by_group(request, len(self.groups))
        is_longer = request.num_tokens >= entry.num_tokens
        if not is_longer or not all(map(KeyMark.is_in, entry.marks, keys)):
            raise StrictError(
                f"request {shown(request.request_id)} has other tokens than an earlier "
                "request with its id, which has not ended: call request_finished() for "
                "the earlier one first, or use unique ids."
            )

    def _check_held(
        self, call: str, name: str, tables: Sequence[Sequence[int]]
    ) -> None:
        free = self._free_among([block for table in tables for block in table])
        if free:
            raise StrictError(
                f"{call}() was given blocks {free} for request {shown(name)}, which "
                "are free: allocate or touch them before, and free them after "
                "request_finished() and request_preempted()."
            )

    def _check_not_freed(self, output: SchedulerOutput) -> None:
        """Refuse a step if a running request's full attention has freed blocks."""
        for name, entry in self._requests.items():
            if entry.phase != "running" or name in output.preempted_req_ids:
                continue
            for spec, table in zip(self.groups, entry.tables, strict=True):
                is_full = isinstance(spec, FullAttention)
                if is_full and (free := self._free_among(table)):
                    raise StrictError(
                        f"blocks {free} of request {shown(name)} are free, although it "
                        "has not ended: before you free them, call request_finished() "
                        "for a request that has ended or was aborted, and "
                        "request_preempted() for a preempted one."
                    )

    def _free_among(self, block_ids: Sequence[int]) -> list[int]:
        """List up to 8 free blocks among `block_ids`, if the pool is bound."""
        pool, ids = self._blocks, np.array(block_ids, np.int64)
        if pool is None or not len(ids):
            return []
        if ids.min() < 0 or ids.max() >= pool.num_blocks:
            return []  # `OffloadScheduler` refuses them.
        free = ids[pool.are_free(ids) & (ids != NULL_BLOCK)]
        return sorted(set(free.tolist()))[:8]

    def _check_covers(
        self,
        call: str,
        name: str,
        tables: Sequence[Sequence[int]],
        num_tokens: int,
        why: str,
    ) -> None:
        """Refuse tables that are too short for a request's tokens."""
        for group, (spec, table) in enumerate(zip(self.groups, tables, strict=True)):
            min_blocks = -(-num_tokens // spec.block_size)
            if len(table) < min_blocks:
                raise StrictError(
                    f"{call}() was given a table of {len(table)} blocks for request "
                    f"{shown(name)} in group {group}, but {num_tokens} tokens {why}, "
                    f"which take {min_blocks}: pass all of its blocks, blocks found on "
                    "the device first, with the null block for a missing one."
                )

    def _check_scheduled(self, name: str) -> None:
        entry = self._requests.get(name)
        if entry is None:
            raise StrictError(_unknown(name, "num_scheduled_tokens"))
        why = None
        if entry.is_put_back:
            why = (
                ", but update_state_after_alloc() was given no blocks for it, which "
                "keeps it in the queue: pass its block tables to run it, even without "
                "loading."
            )
        elif entry.phase == "matched":
            why = (
                ", but update_state_after_alloc() was not called for it after "
                "get_num_new_matched_tokens()."
            )
        elif entry.phase == "preempted":
            why = (
                " although it was preempted: call get_num_new_matched_tokens() and "
                "update_state_after_alloc() again."
            )
        elif entry.is_loading:
            why = (
                " while its load is in flight: get_num_new_matched_tokens() returned "
                "True for a load that takes time, so wait until "
                "update_connector_output() names the request in finished_recving or "
                "failed_recving."
            )
        if why is not None:
            raise StrictError(
                f"request {shown(name)} is in SchedulerOutput.num_scheduled_tokens{why}"
            )
        num_computed = _num_computed(entry.request)
        if entry.num_valid is not None and num_computed > entry.num_valid:
            raise StrictError(
                f"request {shown(name)} continues after {num_computed} tokens, but its "
                f"load has failed, so it has only {entry.num_valid}: "
                "update_connector_output() named it in failed_recving. Recompute the "
                "tokens of its offer."
            )
        for spec in self.groups:
            num_full = num_computed // spec.block_size
            is_uncached = self._blocks is not None and not self._has_cached
            if is_uncached and num_full > entry.num_found // spec.block_size:
                raise StrictError(
                    f"request {shown(name)} has computed {num_full} full blocks, and "
                    f"{type(self._blocks).__name__}.cache() was never called: call it "
                    "after each step with the blocks that are full and their keys. "
                    "Blocks that were not passed to it are found on neither tier."
                )


def _num_computed(request: Request) -> int:
    """Return a request's computed tokens, without those that are only scheduled."""
    num_ahead: int = getattr(request, "num_output_placeholders", 0)
    return request.num_computed_tokens - num_ahead


def _unknown(name: str, where: str) -> str:
    return (
        f"request {shown(name)} is in SchedulerOutput.{where}, but is not known: call "
        "get_num_new_matched_tokens() and update_state_after_alloc() first. "
        "request_finished() makes a request unknown."
    )
