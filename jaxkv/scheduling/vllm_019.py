"""The decisions of vLLM 0.19.1's `SimpleCPUOffloadScheduler`, faults included.

Which ids, in which order, with which events; to compare with, not to serve with.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from jaxkv.policies.base import Policy
from jaxkv.scheduling.protocol import (
    NO_EVENT,
    BlockTable,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
    keys_by_group,
    tables_by_group,
)
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, GroupSpec, as_groups, lazy_target_blocks
from jaxkv.search.tiers import Match, search, source_of
from jaxkv.tiers.base import OffloadingEvent
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.types import NO_BLOCK, NULL_BLOCK, BlockKey


@dataclasses.dataclass
class _Transfer:
    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    device_blocks: list[int] = dataclasses.field(default_factory=list)
    host_blocks: list[int] = dataclasses.field(default_factory=list)
    event: int = NO_EVENT


@dataclasses.dataclass
class _Progress:
    request: Request
    tables: list[list[int]]
    num_seen: list[int]
    is_running: bool = False


class Vllm019Scheduler:
    """Decides what is stored and loaded as vLLM 0.19.1 does.

    Where `OffloadScheduler` does better:

    * What a query found is not held, and may be gone at the allocation, which raises.
    * A block that another request is storing is stored again.
    * The last blocks of a request that finishes are lost, and so are those that the
      host evicts while their request runs.
    * The host is searched from the device's part on: it has to have all the rest.
    * Blocks are released head first, so that the head of a prefix is evicted first.
    * Lazy stores go on from where they were, past blocks that were not stored.
    * Events tell of evictions only, and call the host "GPU".

    Args:
        groups: The groups of the model's layers, one of them of full attention.
        num_host_blocks: Blocks of the host tier, the null block among them.
        enable_events: Whether to keep events for `take_events`.
        mode: "eager" or "lazy".
        max_num_batched_tokens: Most tokens of a step; for lazy stores.
        world_size: Workers that each report every transfer.

    Raises:
        ValueError: If no group is of full attention, or a number is too small.
    """

    def __init__(
        self,
        groups: int | GroupSpec | Sequence[GroupSpec],
        num_host_blocks: int,
        enable_events: bool = False,
        *,
        mode: Literal["eager", "lazy"] = "eager",
        max_num_batched_tokens: int = 8192,
        world_size: int = 1,
    ) -> None:
        self.groups = as_groups(groups)
        is_full = [isinstance(group, FullAttention) for group in self.groups]
        if not any(is_full):
            raise ValueError(
                f"vLLM 0.19.1 needs a group of full attention; {self.groups} has none."
            )
        self._full = is_full.index(True)
        self._block_size = self.groups[self._full].block_size
        self._host = DeviceBlockPool(
            num_host_blocks, enable_events=enable_events, block_size=self._block_size
        )
        self._device: DeviceBlockPool | None = None
        self._world_size = world_size
        self._target = 0
        if mode == "lazy":
            self._target = lazy_target_blocks(self.groups, max_num_batched_tokens)
        self._cursor = NO_BLOCK
        self._progress: dict[str, _Progress] = {}
        self._loads: dict[str, _Transfer] = {}
        self._load_event_to_reqs: dict[int, tuple[str, ...]] = {}
        self._next_load_event = 0
        self._stores: dict[int, _Transfer] = {}
        self._num_reports: Counter[int] = Counter()
        self._has_failed: defaultdict[int, bool] = defaultdict(bool)
        self._next_store_event = 0

    def bind_device_block_pool(self, pool: DeviceBlockPool) -> None:
        """Take the pool whose blocks are to be held during transfers."""
        self._device = pool

    def has_pending_stores(self) -> bool:
        """Tell whether blocks are on their way to the host."""
        return bool(self._stores)

    def has_pending_loads(self) -> bool:
        """Tell whether blocks are on their way back."""
        return bool(self._loads)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Count the tokens that the host has right after those of the device."""
        first = num_computed_tokens // self._block_size * self._block_size
        most = request.num_tokens - 1 - num_computed_tokens
        num_tokens = self._find(request, first, most)[1].num_tokens
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        """Note a request's device blocks, and what to load into them.

        Raises:
            RuntimeError: If what was found meanwhile has gone.
        """
        tables = tables_by_group(block_ids, len(self.groups))
        if not self._target:
            progress = self._progress.get(request.request_id)
            if progress is None or not progress.is_running:
                self._progress[request.request_id] = _Progress(
                    request, tables, [0] * len(tables)
                )
        if num_external_tokens == 0:
            return
        full_keys = keys_by_group(request, len(self.groups))[self._full]
        known = list(zip(tables[self._full], full_keys, strict=False))
        held = self._pool.holds([b for b, _ in known], [key for _, key in known])
        start = int(held.sum()) * self._block_size
        end = start + num_external_tokens
        keys, match = self._find(request, start, num_external_tokens, end)
        if match.num_tokens != num_external_tokens:
            raise RuntimeError(
                f"{num_external_tokens=} of request {request.request_id!r} were found, "
                f"but {match.num_tokens} are left; nothing had held them."
            )
        load = _Transfer()
        for group, (spec, table) in enumerate(zip(self.groups, tables, strict=True)):
            # What was found is the last of what is computed then.
            place = -(-end // spec.block_size) - match.num_tokens // spec.block_size
            for index in np.flatnonzero(match.needed[group]).tolist():
                load.keys.append(keys[group][index])
                load.device_blocks.append(table[place + index])
                load.host_blocks.append(int(match.block_ids[0][group][index]))
        self._host.touch(load.host_blocks)
        self._pool.touch(load.device_blocks)
        self._loads[request.request_id] = load

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """List the transfers to start in this step."""
        store = self._scan_queue() if self._target else self._scan_requests(output)
        if store.keys:
            store.event = self._next_store_event
            self._next_store_event += 1
            self._stores[store.event] = store
        waiting = {r: load for r, load in self._loads.items() if load.event == NO_EVENT}
        load_event = NO_EVENT
        if waiting:
            load_event = self._next_load_event
            self._next_load_event += 1
            self._load_event_to_reqs[load_event] = tuple(waiting)
        for load in waiting.values():
            load.event = load_event
        for request_id in output.preempted_req_ids:
            if request_id in self._progress:
                self._progress[request_id].is_running = False
        loads = waiting.values()
        return OffloadMetadata(
            load_event=load_event,
            load_device_blocks=tuple(b for load in loads for b in load.device_blocks),
            load_host_blocks=tuple(b for load in loads for b in load.host_blocks),
            load_event_to_reqs=dict(self._load_event_to_reqs),
            store_event=store.event,
            store_device_blocks=tuple(store.device_blocks),
            store_host_blocks=tuple(store.host_blocks),
            need_flush=bool(output.preempted_req_ids),
        )

    def update_connector_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """Release what no worker reads or writes any more."""
        for request_id in (*output.finished_recving, *output.failed_recving):
            self._end_load(request_id)
        completed, failed = [], []
        reports = (*output.completed_store_events, *output.failed_store_events)
        # In the order of the first reports, whenever the others come.
        for event, count in Counter(reports).items():
            self._num_reports[event] += count
            self._has_failed[event] |= event in output.failed_store_events
            if self._num_reports[event] < self._world_size:
                continue
            del self._num_reports[event]
            store = self._stores.pop(event)
            if self._has_failed.pop(event):  # which vLLM's workers never report
                failed.append(event)
            else:
                completed.append(event)
                self._host.cache(store.host_blocks, store.keys)
            self._host.free(store.host_blocks)
            self._pool.free(store.device_blocks)
        return dataclasses.replace(
            output,
            completed_store_events=tuple(completed),
            failed_store_events=tuple(failed),
        )

    def request_preempted(self, request: Request) -> None:
        """Do nothing, as vLLM does."""

    def request_finished(
        self, request: Request, block_ids: BlockTable | None = None
    ) -> tuple[bool, None]:
        """Note that a request is over; what it has not stored is lost."""
        load = self._loads.get(request.request_id)
        if load is not None and load.event == NO_EVENT:
            self._end_load(request.request_id)
        self._progress.pop(request.request_id, None)
        return False, None

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the host tier's evictions since the last time."""
        return (event for event in self._host.take_events() if event.removed)

    @property
    def _pool(self) -> DeviceBlockPool:
        if self._device is None:
            raise RuntimeError("Call bind_device_block_pool() before scheduling.")
        return self._device

    def _find(
        self, request: Request, start: int, most: int, end: int | None = None
    ) -> tuple[list[Sequence[BlockKey]], Match]:
        """Search the host for the tokens from `start` on as if none came before."""
        keys = [
            own[start // spec.block_size : end and end // spec.block_size]
            for spec, own in zip(
                self.groups, keys_by_group(request, len(self.groups)), strict=True
            )
        ]
        return keys, search(self.groups, keys, most, [source_of(self._host)])

    def _scan_requests(self, output: SchedulerOutput) -> _Transfer:
        """Collect what the scheduled requests computed up to the last step."""
        store = _Transfer()
        num_free = self._host.num_free
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            progress = self._progress.get(request_id)
            if progress is None:
                continue
            progress.is_running = True
            new = output.new_block_ids.get(request_id)
            if new:
                more = tables_by_group(new, len(self.groups))
                for table, ids in zip(progress.tables, more, strict=True):
                    table.extend(ids)
            if num_tokens == 0:
                continue
            own = _Transfer()
            for group in range(len(self.groups)):
                if not self._scan(progress, group, store, own, num_free):
                    break
            num_free -= len(own.keys)
            self._add(store, own)
        return store

    def _scan(
        self,
        progress: _Progress,
        group: int,
        store: _Transfer,
        own: _Transfer,
        num_free: int,
    ) -> bool:
        """Collect what a request has of a group; tell whether there was room."""
        request = progress.request
        certain = request.num_computed_tokens
        certain -= getattr(request, "num_output_placeholders", 0)
        part = slice(progress.num_seen[group], certain // self.groups[group].block_size)
        keys = keys_by_group(request, len(self.groups))[group][part]
        table = progress.tables[group][part][: len(keys)]
        keys = keys[: len(table)]
        held = self._pool.holds(table, keys).tolist()
        known = (self._host.find(keys) != NO_BLOCK).tolist()
        for block, key, is_held, is_known in zip(table, keys, held, known, strict=True):
            if block != NULL_BLOCK:
                if not is_held:
                    break
                if not is_known and block not in store.device_blocks:
                    if len(own.keys) >= num_free:
                        return False
                    own.keys.append(key)
                    own.device_blocks.append(block)
            progress.num_seen[group] += 1
        return True

    def _scan_queue(self) -> _Transfer:
        """Collect from the blocks that are evicted next, on from the last visited."""
        block_ids, keys = self._pool.next_free(self._pool.num_free)
        if self._cursor not in block_ids:
            self._cursor = NO_BLOCK
        first = 0
        if self._cursor != NO_BLOCK:
            first = block_ids.index(self._cursor) + 1
        part = slice(first, first + self._target)
        cached = [key for key in keys[part] if key is not None]
        known = {
            key: block != NO_BLOCK
            for key, block in zip(cached, self._host.find(cached), strict=True)
        }
        own = _Transfer()
        for block, key in zip(block_ids[part], keys[part], strict=True):
            if len(own.keys) >= self._host.num_free:
                break
            self._cursor = block
            if key is not None and not known[key]:
                own.keys.append(key)
                own.device_blocks.append(block)
        store = _Transfer()
        self._add(store, own)
        return store

    def _add(self, store: _Transfer, own: _Transfer) -> None:
        """Find places on the host for what was collected."""
        self._pool.touch(own.device_blocks)
        store.host_blocks += self._host.allocate(len(own.keys))
        store.keys += own.keys
        store.device_blocks += own.device_blocks

    def _end_load(self, request_id: str) -> None:
        load = self._loads.pop(request_id)
        self._host.free(load.host_blocks)
        self._pool.free(load.device_blocks)
        others = tuple(
            other
            for other in self._load_event_to_reqs.pop(load.event, ())
            if other != request_id
        )
        if others:
            self._load_event_to_reqs[load.event] = others


def make_scheduler(
    groups: int | GroupSpec | Sequence[GroupSpec],
    num_host_blocks: int,
    cache_policy: str | Policy = "lru",
    enable_events: bool = False,
    *,
    rules: OffloadRules | None = None,
    compat: Literal["vllm-0.19"] | None = None,
) -> OffloadScheduler | Vllm019Scheduler:
    """Make an offload scheduler, jaxkv's own or one that decides as vLLM did.

    Args:
        groups: See `OffloadScheduler`.
        num_host_blocks: Blocks of the host tier; vLLM's null block among them.
        cache_policy: See `OffloadScheduler`.
        enable_events: Whether to keep events for `take_events`.
        rules: How to store and load.
        compat: "vllm-0.19" for vLLM 0.19.1's decisions, None for jaxkv's.

    Raises:
        ValueError: If an argument is wrong, or vLLM 0.19.1 had no such choice.
    """
    if compat is None:
        return OffloadScheduler(
            groups, num_host_blocks, cache_policy, enable_events, rules=rules
        )
    if compat != "vllm-0.19":
        raise ValueError(f"{compat=} must be 'vllm-0.19' or None.")
    if cache_policy != "lru":
        raise ValueError(f"{cache_policy=} must be 'lru', for {compat=} has no other.")
    rules = rules or OffloadRules()
    known = OffloadRules(
        mode=rules.mode,
        max_num_batched_tokens=rules.max_num_batched_tokens,
        world_size=rules.world_size,
    )
    for field in dataclasses.fields(rules):
        value = getattr(rules, field.name)
        if value != getattr(known, field.name):
            raise ValueError(
                f"{field.name}={value} and {compat=} exclude one another: vLLM 0.19.1 "
                "had no such choice there."
            )
    return Vllm019Scheduler(
        groups,
        num_host_blocks,
        enable_events,
        mode=rules.mode,
        max_num_batched_tokens=rules.max_num_batched_tokens,
        world_size=rules.world_size,
    )
