"""A scheduler that checks the order and arguments of the engine's calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import compress
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.scheduling.checks import checked_step
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    BlockTable,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
    tables_by_group,
)
from jaxkv.scheduling.requests import keys_by_group
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, first_block_read
from jaxkv.strict.blocks import StrictError
from jaxkv.strict.worker import MAX_SILENT_STEPS, StepFacts, ended_moves
from jaxkv.tiers.base import BlockIds
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.pools import BorrowedPool, DevicePool
from jaxkv.types import NULL_BLOCK, BlockKey

_Pool: TypeAlias = DeviceBlockPool | BorrowedPool


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
    tables: list[list[int]] = dataclasses.field(default_factory=list)  # By group.

    @property
    def num_certain(self) -> int:
        """The computed tokens, without those that a load in flight must bring."""
        num_computed = max(_num_computed(self.request), 0)
        return min(num_computed, self.num_local) if self.is_loading else num_computed


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
        self._has_cached = True  # Unless a DeviceBlockPool is bound that has no block.
        # The engine's pool, if it has a `cache` method.
        self._blocks: _Pool | None = None
        self._allocated: set[int] = set()  # Blocks that requests got since a step.
        # By computed block: the request that has it, or had, and its key.
        self._computed: dict[int, tuple[str, BlockKey]] = {}
        self._in_flight: set[int | str] = set()  # See `StepFacts`.

    def bind_device_block_pool(self, pool: DevicePool) -> None:
        """Bind the pool, and check its `cache` calls; see `OffloadScheduler`."""
        super().bind_device_block_pool(pool)
        if not isinstance(pool, DeviceBlockPool | BorrowedPool) or pool is self._blocks:
            return
        # The prefix cache of a borrowed pool is the engine's own.
        self._has_cached = isinstance(pool, BorrowedPool) or pool.has_cached
        self._blocks = pool
        name, cache = type(pool).__name__, pool.cache

        def checked(block_ids: BlockIds, keys: Sequence[BlockKey]) -> list[int]:
            if len(block_ids) < len(keys):
                raise StrictError(
                    f"{name}.cache() was given {len(block_ids)} blocks for {len(keys)} "
                    "keys: allocate a block for each key before the model runs."
                )
            block_list = np.asarray(block_ids).tolist()
            if wrong := self._loads.blocks_awaited().intersection(block_list):
                raise StrictError(
                    f"{name}.cache() was called for blocks {sorted(wrong)[:8]}, into "
                    "which a load is in flight: wait until update_connector_output() "
                    "names its request in finished_recving."
                )
            self._has_cached = True
            return cache(block_ids, keys)

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
                    f"{shown(request.request_id)}, which has its blocks: call "
                    "request_finished() if it has ended, and request_preempted() if it "
                    "lost them."
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
                    "before get_num_new_matched_tokens(): match it, also after a "
                    "preemption, then allocate its blocks."
                )
            # Engines that bind no pool, such as vLLM, skip the match if nothing loads.
            entry = _Entry(request, request.num_tokens, self._marks(request))
        tables = tables_by_group(block_ids, len(self.groups))
        is_declined = not (any(tables) or num_external_tokens)
        if not is_declined:
            self._check_held("update_state_after_alloc", name, tables)
        num_found = entry.num_found + num_external_tokens
        is_admitted = entry.phase == "matched" and not is_declined
        if is_admitted and (self._blocks is not None or num_external_tokens):
            self._check_covers(
                "update_state_after_alloc", name, tables, num_found, "were found for it"
            )
        num = entry.num_local if is_admitted else request.num_computed_tokens
        for spec, table in zip(self.groups, tables, strict=True):
            found = table[: num // spec.block_size] if is_admitted else ()
            if wrong := self._loads.blocks_awaited().intersection(found):
                raise StrictError(
                    f"request {shown(name)} was found blocks {sorted(wrong)[:8]}, into "
                    "which a load is in flight: let a prefix cache have them once "
                    "update_connector_output() names their request in finished_recving."
                )
        entry.request = request
        allocated = self._new_blocks("update_state_after_alloc", entry, num, tables)
        answer = super().update_state_after_alloc(
            request, block_ids, num_external_tokens
        )
        self._allocated |= allocated
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
                f"with {len(self._in_flight)} moves in flight: in every step pass it "
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
            tables = [ids.tolist() for ids in self._tables(name, table)]
            self._check_held("SchedulerOutput.new_block_ids", name, tables)
            entry = self._requests[name]
            if entry.tables:  # A request that has no blocks yet has no tables.
                grown = [[*a, *b] for a, b in zip(entry.tables, tables, strict=True)]
                num = entry.request.num_computed_tokens
                call = "SchedulerOutput.new_block_ids"
                self._allocated |= self._new_blocks(call, entry, num, grown)
                entry.tables = grown
        # The others were named by request_preempted() and may be admitted again by now.
        preempted = set(output.preempted_req_ids) - set(self._preempted)
        meta = super().build_connector_meta(output)
        for name in preempted:
            if output.num_scheduled_tokens.get(name, 0) == 0:
                self._set_preempted(name)
        if self._blocks is None:
            return meta  # Of vLLM, which passes only non-empty reports.
        names = meta.load_event_to_reqs.get(meta.load_event, ())
        self._in_flight.update((meta.store_event, *names))
        self._in_flight.discard(NO_EVENT)
        self._num_silent += bool(self._in_flight)
        return dataclasses.replace(meta, strict=self._facts(self._blocks, output, meta))

    def _facts(
        self, pool: _Pool, output: SchedulerOutput, meta: OffloadMetadata
    ) -> StepFacts:
        """Return the facts of a step; forget blocks that others may write."""
        in_tables: set[int] = set()
        written = {*meta.load_device_blocks}
        uncomputed = set(self._allocated)
        computed: dict[int, tuple[str, BlockKey]] = {}
        for name, entry in self._requests.items():
            num_tokens = entry.request.num_computed_tokens
            num_new = output.num_scheduled_tokens.get(name, 0)
            for spec, table in zip(self.groups, entry.tables, strict=False):
                num_full = entry.num_certain // spec.block_size
                end = -(-(num_tokens + num_new) // spec.block_size)
                written.update(table[num_full:end] if num_new else ())
                uncomputed.update(table[num_full:])
                in_tables.update(table[first_block_read(spec, num_tokens) :])
            computed |= self._computed_of(entry)
        known = {b: c for b, c in self._computed.items() if b not in uncomputed}
        known |= computed
        # A block without a request may be anybody's, unless it is free and findable.
        if idle := [block for block in known if block not in in_tables]:
            keys = [known[block][1] for block in idle]
            is_idle = pool.are_free(idle) & pool.holds(idle, keys)
            in_tables.update(compress(idle, is_idle.tolist()))
        self._computed = {b: c for b, c in known.items() if b in in_tables}
        unchanged = {b: c[0] for b, c in self._computed.items() if b not in written}
        # A load fills its blocks itself.
        filled = self._allocated.difference(meta.load_device_blocks)
        self._allocated = set()
        in_flight = frozenset(self._in_flight if self.rules.world_size == 1 else ())
        return StepFacts(tuple(sorted(filled)), unchanged, in_flight)

    def _computed_of(self, entry: _Entry) -> dict[int, tuple[str, BlockKey]]:
        """Return the full, computed blocks that a request reads, with their keys."""
        request, computed = entry.request, {}
        by_group = keys_by_group(request, len(self.groups))
        unwritten = {NULL_BLOCK, *(self._blocks.unwritten if self._blocks else ())}
        for spec, table, keys in zip(self.groups, entry.tables, by_group, strict=False):
            first = first_block_read(spec, request.num_computed_tokens)
            full = slice(first, entry.num_certain // spec.block_size)
            for block, key in zip(table[full], keys[full], strict=False):
                if block not in unwritten:
                    computed[block] = request.request_id, key
        return computed

    def _new_blocks(
        self, call: str, entry: _Entry, num_computed: int, tables: Sequence[list[int]]
    ) -> set[int]:
        """Return new blocks of a table; refuse blocks that have other content."""
        allocated: set[int] = set()
        if self._blocks is None:
            return allocated
        keys_of = keys_by_group(entry.request, len(self.groups))
        olds = entry.tables or [[]] * len(tables)
        for spec, old, table, keys in zip(
            self.groups, olds, tables, keys_of, strict=True
        ):
            first = -(-num_computed // spec.block_size)
            allocated |= set(table[first:]).difference(old, table[:first])
            for place, block in enumerate(table):
                name, known = self._computed.get(block, ("", b""))
                if not known or known in keys[place : place + 1] or block in old:
                    continue
                if isinstance(self._blocks, BorrowedPool) and (
                    place >= first or not self._blocks.has_contents
                ):
                    continue  # It has not forgotten the blocks of this step yet.
                if self._blocks.holds([block], [known])[0]:
                    raise StrictError(
                        f"{call}() was given block {block} as block {place} of request "
                        f"{shown(entry.request.request_id)}, but it has what request "
                        f"{shown(name)} computed: pass tables in the order of tokens, "
                        "and let a prefix cache forget the blocks that are allocated."
                    )
        return allocated

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release blocks that no worker reads or writes; see `OffloadScheduler`."""
        answer = super().update_connector_output(output)
        self._num_silent = 0
        self._in_flight -= ended_moves(output)
        for name in (*answer.finished_recving, *answer.failed_recving):
            if entry := self._requests.get(name):
                entry.is_loading = False
                entry.may_rematch |= name in answer.failed_recving
        return answer

    def request_preempted(self, request: Request) -> None:
        """Record that a request is preempted; see `OffloadScheduler`."""
        super().request_preempted(request)
        if entry := self._requests.get(request.request_id):
            entry.request = request
            self._computed |= self._computed_of(entry)
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
        if entry := self._requests.pop(name, None):
            entry.request = request
            self._computed |= self._computed_of(entry)
        return answer

    def _set_preempted(self, name: str) -> None:
        if entry := self._requests.get(name):
            entry.phase, entry.is_loading, entry.tables = "preempted", False, []

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
                "request with its id, which has not ended: call request_finished()."
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
                        "or request_preempted()."
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
            why = "although update_state_after_alloc() was given no blocks for it"
        elif entry.phase == "matched":
            why = "although update_state_after_alloc() was not called for it"
        elif entry.phase == "preempted":
            why = "although it was preempted: match it and allocate blocks again"
        elif entry.is_loading:
            why = (
                "while its load is in flight: wait until update_connector_output() "
                "names it in finished_recving or failed_recving"
            )
        if why is not None:
            raise StrictError(
                f"request {shown(name)} is in SchedulerOutput.num_scheduled_tokens, "
                f"{why}."
            )
        for spec in self.groups:
            num_full = _num_computed(entry.request) // spec.block_size
            if not self._has_cached and num_full > entry.num_found // spec.block_size:
                raise StrictError(
                    f"request {shown(name)} has computed {num_full} full blocks, and "
                    "DeviceBlockPool.cache() was never called: call it after each step "
                    "with full blocks and their keys."
                )


def _num_computed(request: Request) -> int:
    """Return a request's computed tokens, without those that are only scheduled."""
    num_ahead: int = getattr(request, "num_output_placeholders", 0)
    return request.num_computed_tokens - num_ahead


def _unknown(name: str, where: str) -> str:
    return (
        f"request {shown(name)} is in SchedulerOutput.{where}, but is not known: match "
        "it and allocate its blocks first. request_finished() makes it unknown."
    )
