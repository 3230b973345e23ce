"""A scheduler that watches in which order the engine calls it, and with what."""

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
from jaxkv.strict.worker import MOST_SILENT_STEPS
from jaxkv.tiers.base import BlockIds
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NULL_BLOCK, BlockKey


@dataclasses.dataclass
class _Known:
    """What the scheduler knows of a request.

    Attributes:
        request: The request, as it was given last.
        num_tokens: Tokens that it had.
        marks: Its keys, for each group.
        phase: Whether it has asked, has its blocks, or has lost them again.
        is_put_back: Whether it has asked, and then got no blocks.
        is_awaited: Whether it has to wait for what it was offered.
        is_loading: Whether it waits for that.
        may_ask: Whether it may ask again though it has its blocks.
        num_found: Tokens that it had or was offered when it got its blocks.
        num_local: Of these, the ones that it had.
        num_left: The same once its load has failed, until it is computed; else None.
        tables: Its device blocks, for each group.
    """

    request: Request
    num_tokens: int
    marks: list[KeyMark]
    phase: Literal["asked", "running", "preempted"] = "asked"
    is_put_back: bool = False
    is_awaited: bool = False
    is_loading: bool = False
    may_ask: bool = False
    num_found: int = 0
    num_local: int = 0
    num_left: int | None = None
    tables: list[list[int]] = dataclasses.field(default_factory=list)


class StrictOffloadScheduler(OffloadScheduler):
    """Decides what `OffloadScheduler` does, and refuses calls that make no sense.

    Args:
        args: As of `OffloadScheduler`.
        named: See `args`.

    Raises:
        StrictError: By most methods: the engine has left a call out, made it too early,
            or given it something that cannot be right. Then nothing changes.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._requests: dict[str, _Known] = {}
        self._num_silent = 0
        self._has_cached = False
        # The engine's own pool of device blocks; None for another kind.
        self._blocks: DeviceBlockPool | None = None

    def bind_device_block_pool(self, pool: DeviceBlockPool) -> None:
        """Take the pool, and watch what is cached; see `OffloadScheduler`."""
        super().bind_device_block_pool(pool)
        if not isinstance(pool, DeviceBlockPool) or pool is self._blocks:
            return
        self._blocks = pool
        self._has_cached = bool(pool.state.has_key.any())
        cache = pool.cache

        def watched(block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
            self._check_cached(block_ids, keys)
            self._has_cached = True
            return cache(block_ids, keys)

        # Of this pool alone; others are as they were.
        setattr(pool, "cache", watched)  # noqa: B010

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask how much more of a request can be had; see `OffloadScheduler`."""
        self._book.check_lookup(request)
        known = self._requests.get(request.request_id)
        if known is not None:
            self._check_same(request, known)
            is_running = known.phase == "running" and not known.may_ask
            if self._blocks is not None and is_running:
                raise StrictError(
                    f"request {shown(request.request_id)} asks by "
                    "get_num_new_matched_tokens() though it has its blocks. If it is "
                    "another request, the one before had its id and is not over: call "
                    "request_finished() first. If it lost its blocks, call "
                    "request_preempted(), or name it in "
                    "SchedulerOutput.preempted_req_ids."
                )
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._requests[request.request_id] = _Known(
            request,
            request.num_tokens,
            self._marks(request),
            is_awaited=bool(answer[0]) and answer[1],
            num_found=num_computed_tokens,
            num_local=num_computed_tokens,
        )
        return answer

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> list[list[int]]:
        """Note the device blocks of a request; see `OffloadScheduler`."""
        self._book.check_stores(request)
        name = request.request_id
        known = self._requests.get(name)
        if known is not None and known.phase != "preempted":
            self._check_same(request, known)
        else:
            known = None
            if num_external_tokens or self._blocks is not None:
                raise StrictError(
                    f"update_state_after_alloc() was called for request {shown(name)} "
                    "before get_num_new_matched_tokens(): ask first, then allocate, "
                    "then say what was allocated. A request that was preempted has to "
                    "ask again."
                )
            # Other engines, such as vLLM, need not ask if nothing can be had.
            known = _Known(request, request.num_tokens, self._marks(request))
        tables = tables_by_group(block_ids, len(self.groups))
        is_declined = not (any(tables) or num_external_tokens)
        if not is_declined:
            self._check_held("update_state_after_alloc", name, tables)
        num_found = known.num_found
        if known.phase == "asked" and not is_declined:
            num_found += num_external_tokens
            self._check_covers(
                "update_state_after_alloc", name, tables, num_found, "were found for it"
            )
        answer = super().update_state_after_alloc(
            request, block_ids, num_external_tokens
        )
        known.is_put_back = known.phase == "asked" and is_declined
        if known.phase == "asked" and not is_declined:
            known.phase = "running"
            known.num_found = num_found
            known.is_loading = known.is_awaited and num_external_tokens > 0
        known.request, known.num_tokens = request, request.num_tokens
        known.marks = self._marks(request)
        known.tables = [list(own) for own in answer]
        self._requests[name] = known
        return answer

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """List the transfers to start in this step; see `OffloadScheduler`."""
        self._check_reports()
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
            # None yet, where the request has only asked.
            for own, new in zip(self._requests[name].tables, tables, strict=False):
                own += new
        # Of the others a call has told, and they may have been admitted again since.
        silent = [own for own in output.preempted_req_ids if own not in self._preempted]
        meta = super().build_connector_meta(output)
        for name, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens > 0:
                self._requests[name].num_left = None
        for name in silent:
            if output.num_scheduled_tokens.get(name, 0) == 0:
                self._note_preempted(name)
        # Other engines, such as vLLM, pass on reports that say something.
        if self._num_in_flight and self._blocks is not None:
            self._num_silent += 1
        return meta

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release what no worker reads or writes; see `OffloadScheduler`."""
        answer = super().update_connector_output(output)
        self._num_silent = 0
        for name in (*answer.finished_recving, *answer.failed_recving):
            if name in self._requests:
                known = self._requests[name]
                known.is_loading = False
                if name in answer.failed_recving:
                    known.may_ask = True
                    known.num_left = known.num_local
        return answer

    def request_preempted(self, request: Request) -> None:
        """Note that a request is about to lose its blocks; see `OffloadScheduler`."""
        super().request_preempted(request)
        self._note_preempted(request.request_id)

    def request_finished(
        self, request: Request, block_ids: BlockTable | None = None
    ) -> tuple[bool, None]:
        """Note that a request is over; see `OffloadScheduler`."""
        self._book.check_stores(request)
        name = request.request_id
        tables = tables_by_group(
            [] if block_ids is None else block_ids, len(self.groups)
        )
        if any(tables):
            self._check_held("request_finished", name, tables)
            num = _num_computed(request)
            self._check_covers("request_finished", name, tables, num, "it has computed")
        answer = super().request_finished(request, block_ids)
        self._requests.pop(name, None)
        return answer

    @property
    def _num_in_flight(self) -> int:
        """Device blocks that were sent out and not reported."""
        in_transit = self.in_transit
        return in_transit.stores_in_flight + in_transit.loads_in_flight

    def _note_preempted(self, name: str) -> None:
        known = self._requests.get(name)
        if known is not None:
            known.phase, known.is_loading = "preempted", False

    def _marks(self, request: Request) -> list[KeyMark]:
        keys = keys_by_group(request, len(self.groups))
        return [KeyMark.of(own, len(own)) for own in keys]

    def _check_same(self, request: Request, known: _Known) -> None:
        """Refuse another request under the id of one that is not over."""
        if request is known.request:  # The engine may rewrite it.
            return
        keys = keys_by_group(request, len(self.groups))
        is_same = request.num_tokens >= known.num_tokens
        is_same &= all(map(KeyMark.is_in, known.marks, keys))
        if not is_same:
            raise StrictError(
                f"request {shown(request.request_id)} has other tokens than the one "
                "that had its id, which is not over: call request_finished() for that "
                "one first, or give this one an id of its own."
            )

    def _check_held(
        self, call: str, name: str, tables: Sequence[Sequence[int]]
    ) -> None:
        """Refuse blocks that are free."""
        free = self._free_among([block for own in tables for block in own])
        if free:
            raise StrictError(
                f"{call}() was given blocks {free} for "
                f"request {shown(name)}, which are free: take them by "
                "DeviceBlockPool.allocate() or touch() before, and free() them after "
                "request_finished() and request_preempted()."
            )

    def _check_not_freed(self, output: SchedulerOutput) -> None:
        """Refuse to go on if a request has lost its blocks without a call.

        Blocks that a window has left behind may be freed.
        """
        for name, known in self._requests.items():
            if known.phase != "running" or name in output.preempted_req_ids:
                continue
            for spec, own in zip(self.groups, known.tables, strict=True):
                if not isinstance(spec, FullAttention):
                    continue
                free = self._free_among(own)
                if free:
                    raise StrictError(
                        f"blocks {free} of request {shown(name)} are free, though it "
                        "is not over: before DeviceBlockPool.free(), call "
                        "request_finished() for a request that has ended, also by "
                        "abort, and request_preempted() for one that has to begin anew."
                    )

    def _free_among(self, block_ids: Sequence[int]) -> list[int]:
        """List the first of some blocks that are free, where the pool is known."""
        pool = self._blocks
        ids = np.array(block_ids, np.int64)
        if pool is None or not len(ids) or not (ids >= 0).all():
            return []
        if (ids >= pool.num_blocks).any():
            return []  # They are refused by the usual scheduler.
        free = ids[(pool.counts(ids)[0] == 0) & (ids != NULL_BLOCK)]
        return sorted(set(free.tolist()))[:8]

    def _check_covers(
        self,
        call: str,
        name: str,
        tables: Sequence[Sequence[int]],
        num_tokens: int,
        why: str,
    ) -> None:
        """Refuse tables that end before what a request has."""
        for group, (spec, own) in enumerate(zip(self.groups, tables, strict=True)):
            least = -(-num_tokens // spec.block_size)
            if len(own) < least:
                raise StrictError(
                    f"{call}() was given a table of {len(own)} blocks for request "
                    f"{shown(name)} in group {group}, but {num_tokens} tokens {why}, "
                    f"which take {least}: pass all of its blocks, those found on the "
                    "device first, with the null block for what is not there."
                )

    def _check_scheduled(self, name: str) -> None:
        """Refuse to compute a request that is not ready."""
        known = self._requests.get(name)
        if known is None:
            raise StrictError(_unknown(name, "num_scheduled_tokens"))
        why = None
        if known.is_put_back:
            why = (
                ", but update_state_after_alloc() was given no blocks for it, which "
                "leaves it in the queue: pass its block tables to run it, also without "
                "its offer."
            )
        elif known.phase == "asked":
            why = (
                ", but update_state_after_alloc() was not called for it after "
                "get_num_new_matched_tokens()."
            )
        elif known.phase == "preempted":
            why = (
                " though it was preempted: call get_num_new_matched_tokens() and "
                "update_state_after_alloc() anew."
            )
        elif known.is_loading:
            why = (
                " while its load is in flight: get_num_new_matched_tokens() said that "
                "it takes time, so wait until update_connector_output() names the "
                "request in finished_recving or failed_recving."
            )
        if why is not None:
            raise StrictError(
                f"request {shown(name)} is in SchedulerOutput.num_scheduled_tokens{why}"
            )
        num_computed = _num_computed(known.request)
        if known.num_left is not None and num_computed > known.num_left:
            raise StrictError(
                f"request {shown(name)} goes on after {num_computed} tokens, but its "
                f"load has failed, so that it has {known.num_left}: "
                "update_connector_output() named it in failed_recving. Compute what it "
                "was offered."
            )
        if self._blocks is not None and not self._has_cached:
            self._refuse_uncached(name, known)

    def _refuse_uncached(self, name: str, known: _Known) -> None:
        """Refuse to go on if a block is full, and none was ever made findable."""
        num_computed = _num_computed(known.request)
        for spec in self.groups:
            num_full = num_computed // spec.block_size
            if num_full > known.num_found // spec.block_size:
                raise StrictError(
                    f"request {shown(name)} has computed {num_full} full blocks, and "
                    "DeviceBlockPool.cache() was never called: call it after each step "
                    "with the blocks that are full and their keys. Blocks that "
                    "were not passed to it are found on neither tier."
                )

    def _check_cached(self, block_ids: BlockIds, keys: Sequence[BlockKey]) -> None:
        """Refuse to make blocks findable that are being loaded, or are not there."""
        if len(block_ids) < len(keys):
            raise StrictError(
                f"DeviceBlockPool.cache() was given {len(block_ids)} blocks for "
                f"{len(keys)} keys: the table is shorter than what was computed, so "
                "DeviceBlockPool.allocate() a block for each before the model runs."
            )
        loading = self._loads.blocks_awaited()
        wrong = loading.intersection(np.asarray(block_ids).tolist())
        if wrong:
            raise StrictError(
                f"DeviceBlockPool.cache() was called for blocks {sorted(wrong)[:8]}, "
                "into which a load is in flight: wait until update_connector_output() "
                "names its request in finished_recving."
            )

    def _check_reports(self) -> None:
        """Refuse to go on without reports of transfers."""
        if self._num_silent >= MOST_SILENT_STEPS:
            raise StrictError(
                f"update_connector_output() was not called in {self._num_silent} steps "
                f"with {self._num_in_flight} blocks in flight: in every step call "
                "OffloadWorker.poll(), and give it what that returns."
            )


def _num_computed(request: Request) -> int:
    """Count the tokens that a request has computed, without those only scheduled."""
    num_ahead: int = getattr(request, "num_output_placeholders", 0)
    return request.num_computed_tokens - num_ahead


def _unknown(name: str, where: str) -> str:
    return (
        f"request {shown(name)} is in SchedulerOutput.{where}, but is not known: call "
        "get_num_new_matched_tokens() and update_state_after_alloc() first. It is not "
        "known any more once request_finished() was called."
    )
