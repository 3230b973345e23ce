"""Eager stores: every full block is offered soon after it is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from typing import TypeAlias

import numpy as np

from jaxkv.keys.mark import KeyMark
from jaxkv.keys.packed import PackedKeys
from jaxkv.scheduling.chooser import Chooser
from jaxkv.scheduling.listening import Listeners, Offer, Passes
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.requests import Requests, Rows, rows_of
from jaxkv.scheduling.rules import NO_LIMIT, OffloadRules
from jaxkv.scheduling.stores import StorePause, Stores
from jaxkv.search.groups import GroupSpec
from jaxkv.tiers.bare import REORDER_SHARE
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import BlockKey


@dataclasses.dataclass
class _Progress:
    """The stores of a request so far. Lists have one item per group."""

    request: Request
    tables: list[list[int]]  # Its device blocks.
    num_offered: list[int]  # How many first blocks were hits, or were offered.
    marks: list[KeyMark]  # The keys of those blocks.
    limits: tuple[int, int]  # The last result of `Requests.check_stores`.
    next_tokens: int = 0  # It next has blocks to offer when this many are computed.
    refused_at: int = -1  # `Stores.num_changes` when the host had no room; else -1.
    is_ordered: bool = False  # Whether the host would evict these blocks tail first.
    whole_at: int = -1  # `BlockIndex.num_removed` when the host had all; -1 if unknown.
    is_skipped: bool = False  # Whether it is not stored while stores are paused.


Ready: TypeAlias = tuple[_Progress, tuple[int, int], Sequence[PackedKeys]]
"""A request that has blocks to offer, its limits, and its keys of each group."""


class EagerStores(Chooser):
    """Chooses which blocks to store, request by request.

    A block that the host evicts while its request runs is stored again when the request
    ends, because the device will evict it, too.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: BlockIndex,
        rules: OffloadRules,
        stores: Stores,
        listeners: Listeners,
        requests: Requests,
        num_shadow_hit_tokens: Callable[[], int],
    ) -> None:
        self._groups = groups
        self._host = host
        self._rules = rules
        self._factor = rules.blocks_per_host_block
        self._stores = stores
        self._requests = requests
        self._listeners = listeners
        self._pause = StorePause(
            rules, host.num_blocks, stores.stats, num_shadow_hit_tokens
        )
        self._progress: dict[str, _Progress] = {}
        self._scheduled: dict[str, int] = {}  # Requests in steps since the last offer.

    @property
    def is_paused(self) -> bool | None:
        """Whether stores are paused; None if they never are."""
        return self._pause.is_on if self._rules.pause_unused_stores else None

    def begun(
        self,
        request: Request,
        keys: Sequence[PackedKeys],
        tables: list[list[int]],
        num_local: int | None,
        num_external: int,
        limits: tuple[int, int],
    ) -> None:
        """Track a request; if it already runs, replace its block tables."""
        # After a lookup, a request starts over, even if it declined its offer.
        if num_local is None and self.replace_tables(request, tables, limits):
            return
        factor = self._factor
        num_tokens = (num_local or 0) + num_external
        offered = [
            num_tokens // spec.block_size // factor * factor for spec in self._groups
        ]
        marks = list(map(KeyMark.of, keys, offered))
        progress = _Progress(request, tables, offered, marks, limits, is_ordered=True)
        if self._rules.pause_unused_stores:
            progress.is_skipped = self._pause.skips(keys[0])
        progress.next_tokens = self._next_tokens(progress)
        self._progress[request.request_id] = progress

    def recompute(self, request_id: str) -> None:
        """Expect a request to recompute the blocks whose load has failed."""
        self._start_over(self._progress[request_id])

    def replace_tables(
        self, request: Request, tables: list[list[int]], limits: tuple[int, int]
    ) -> bool:
        """Replace the block tables of a known request; return whether it is known."""
        progress = self._progress.get(request.request_id)
        if progress is None:
            return False
        progress.request, progress.tables = request, tables
        progress.limits = limits
        self._current_keys(progress)
        # The prompt may have grown, and so has the limit of stored tokens.
        progress.next_tokens = self._next_tokens(progress)
        return True

    def note_step(
        self,
        scheduled: Mapping[str, int],
        new_tables: Mapping[str, list[list[int]]],
        preempted: Iterable[str],
    ) -> None:
        """Record which requests a step computes, their new blocks, and preemptions."""
        for request_id in preempted:
            self._progress.pop(request_id, None)
        for request_id, tables in new_tables.items():
            progress = self._progress.get(request_id)
            if progress is not None:
                for table, new in zip(progress.tables, tables, strict=True):
                    table += new
        self._scheduled.update(scheduled)

    def find_ready(
        self, scheduled: Mapping[str, int], preempted: Sequence[str]
    ) -> list[Ready]:
        """Find requests with blocks to offer, in all steps since the last offer."""
        num_changes = self._stores.num_changes
        due = []
        names = {**self._scheduled, **scheduled} if self._scheduled else scheduled
        try:
            for request_id in names:
                progress = self._progress.get(request_id)
                if (
                    progress is not None
                    and progress.request.num_computed_tokens >= progress.next_tokens
                    and progress.refused_at != num_changes
                    and request_id not in preempted
                ):
                    due.append(progress)
            if not due or self._stores.is_congested:
                return []
            limits_of, keys_of = self._requests.check_stores, self._requests.of
            return [(p, limits_of(p.request), keys_of(p.request)) for p in due]
        except (TypeError, ValueError):  # Comparing an array raises ValueError.
            self._check_all(names)
            raise

    def _check_all(self, names: Iterable[str]) -> None:
        """Raise an error that names the attribute of the wrong type."""
        for progress in map(self._progress.get, names):
            if progress is not None:
                self._requests.check_stores(progress.request)
                self._requests.checked(progress.request, is_admission=False)

    def offer_step(self, pool: DevicePool, ready: Sequence[Ready]) -> None:
        """Offer the blocks of requests that `find_ready` has returned."""
        self._scheduled.clear()
        for progress, limits, keys in ready:
            progress.limits = limits
            self._restart_if_rewritten(progress, keys)
            num_full, first = self._num_full(progress, keys), progress.num_offered
            num_waiting = len(self._stores.waiting.keys)
            self._offer(pool, progress, keys, num_full)
            if self._listeners.offered:
                blocks = keys[0], first[0], num_full[0]
                self._notify(pool, progress, *blocks, num_waiting)

    def finish(
        self, pool: DevicePool, request: Request, limits: tuple[int, int]
    ) -> None:
        """Offer all blocks of a request that is about to lose its device blocks."""
        progress = self._progress.pop(request.request_id, None)
        if progress is None:
            return
        progress.request, progress.limits = request, limits
        keys = self._requests.by_request[request.request_id]  # They were just checked.
        self._restart_if_rewritten(progress, keys)
        can_store = not self._stores.is_congested
        num_waiting = len(self._stores.waiting.keys)
        self._offer_all(pool, progress, keys)
        if self._listeners.offered:
            blocks = keys[0], 0, self._num_full(progress, keys)[0]
            self._notify(pool, progress, *blocks, num_waiting, True, can_store)

    def _notify(
        self,
        pool: DevicePool,
        progress: _Progress,
        keys: PackedKeys,
        first: int,
        end: int,
        num_waiting: int,
        is_end: bool = False,
        can_store: bool = True,
    ) -> None:
        """Notify listeners of an offer; `num_waiting` host blocks waited before it."""
        offer = Offer(
            progress.request.request_id,
            keys,
            first,
            end,
            frozenset(self._stores.waiting.keys[num_waiting:]),
            lambda start: self._passes(pool, progress, keys, start, first, end),
            is_end,
            can_store,
        )
        for notify in self._listeners.offered:
            notify(offer)

    def _offer_all(
        self, pool: DevicePool, progress: _Progress, keys: Sequence[PackedKeys]
    ) -> None:
        """Offer all blocks of a request that ends, unless the host has them."""
        if (
            progress.is_ordered
            and progress.whole_at == self._host.num_removed
            and progress.request.num_computed_tokens < progress.next_tokens
        ):
            return  # The host has all its blocks.
        factor, stats = self._factor, self._stores.stats
        from_head = [0] * len(self._groups)
        num_full = self._num_full(progress, keys)
        rows = self._rows(progress, keys, from_head, num_full)
        if progress.is_skipped and self._pause.is_on:
            stats.num_paused += len(rows.keys) * factor
            self._host.drops.note(rows.keys, "paused")
            return
        is_known = self._host.contains(rows.keys)
        if 0 not in is_known.tobytes():  # `all()` takes 40 us with cold caches.
            if not progress.is_ordered:
                self._host.reorder(rows.keys)
            return
        if self._stores.is_congested:
            num_dropped = int((~is_known).sum()) * factor
            stats.num_offered += num_dropped
            stats.num_dropped_slow += num_dropped
            self._host.drops.note(compress(rows.keys, ~is_known), "slow")
            return
        # From the head on: the tail must not evict the head.
        progress.num_offered = from_head
        self._offer(pool, progress, keys, num_full)
        num_done = sum(progress.num_offered) // factor
        if num_done == len(rows.keys):
            return
        num_dropped = int((~is_known[num_done:]).sum()) * factor
        stats.num_offered += num_dropped
        stats.num_dropped_full += num_dropped
        dropped = compress(rows.keys[num_done:], ~is_known[num_done:])
        self._host.drops.note(dropped, "full")

    def clear(self, pool: DevicePool) -> None:
        """Offer all blocks again."""
        for progress in self._progress.values():
            self._start_over(progress)

    def _start_over(self, progress: _Progress) -> None:
        progress.num_offered = [0] * len(self._groups)
        progress.marks = [KeyMark()] * len(self._groups)
        progress.next_tokens = NO_LIMIT if progress.is_skipped else 0
        progress.refused_at = -1

    def _current_keys(self, progress: _Progress) -> Sequence[PackedKeys]:
        """Return a request's keys; start over if offered ones were rewritten."""
        keys = self._requests.of(progress.request)
        self._restart_if_rewritten(progress, keys)
        return keys

    def _restart_if_rewritten(
        self, progress: _Progress, keys: Sequence[PackedKeys]
    ) -> None:
        """Offer all blocks again if keys of offered blocks were rewritten."""
        if not all(map(KeyMark.is_in, progress.marks, keys)):
            self._start_over(progress)

    def _num_full(
        self, progress: _Progress, keys: Sequence[Sequence[BlockKey]]
    ) -> list[int]:
        """Return how many computed blocks may be stored, for each group."""
        num_tokens = min(progress.limits)
        factor, num_full = self._factor, []
        for spec, ks, table in zip(self._groups, keys, progress.tables, strict=True):
            num = min(num_tokens // spec.block_size, len(ks), len(table))
            num_full.append(num // factor * factor)
        return num_full

    def _offer(
        self,
        pool: DevicePool,
        progress: _Progress,
        keys: Sequence[Sequence[BlockKey]],
        num_full: list[int],
    ) -> None:
        """Offer the blocks from `progress.num_offered` up to `num_full`."""
        first = progress.num_offered
        rows = self._rows(progress, keys, first, num_full)
        num_skipped = self._host.num_skipped
        is_head = not any(first)
        num_done, is_held = self._stores.place(pool, rows, is_head=is_head)
        progress.refused_at = -1
        if num_done < len(rows.keys):
            progress.refused_at = self._stores.num_changes
        if is_held and num_skipped == self._host.num_skipped and is_head:
            progress.whole_at = self._host.num_removed
        if rows.groups is None:
            progress.num_offered = [first[0] + num_done * self._factor]
        else:
            done = np.bincount(rows.groups[:num_done], minlength=len(first))
            progress.num_offered = (done + first).tolist()
        progress.marks = list(map(KeyMark.of, keys, progress.num_offered))
        progress.next_tokens = self._next_tokens(progress)
        if not rows.keys:
            return
        progress.is_ordered = is_head
        if not is_head:
            num_rows = sum(num_full) // self._factor
            if len(rows.keys) * REORDER_SHARE >= num_rows:
                from_head = [0] * len(self._groups)
                prefix = self._rows(progress, keys, from_head, num_full)
                self._host.reorder(prefix.keys)
                progress.is_ordered = True

    def _passes(
        self,
        pool: DevicePool,
        progress: _Progress,
        keys: Sequence[BlockKey],
        start: int,
        first: int,
        end: int,
    ) -> Passes:
        """Return which blocks [start, end) may be stored; [first, end) only if held."""
        passes = np.ones(end - start, np.bool_)
        if isinstance(pool, DeviceBlockPool):  # `holds` of other pools is slow.
            table = progress.tables[0][first:end]
            passes[first - start :] = pool.holds(table, keys[first:end])
        admitted = self._host.pass_mask(keys[start:end])
        if admitted is not None:
            passes &= admitted
        return None if passes.all() else passes

    def _next_tokens(self, progress: _Progress) -> int:
        """Return how many tokens a request must have computed to offer more blocks."""
        if progress.is_skipped:
            return NO_LIMIT
        next_tokens = NO_LIMIT
        for offered, spec in zip(progress.num_offered, self._groups, strict=True):
            end = (offered + self._factor) * spec.block_size
            next_tokens = min(next_tokens, end)
        if next_tokens > progress.limits[1]:
            return NO_LIMIT
        return next_tokens

    def _rows(
        self,
        progress: _Progress,
        keys: Sequence[Sequence[BlockKey]],
        first: list[int],
        end: list[int],
    ) -> Rows:
        """Return the blocks [first[g], end[g]) of all groups g as rows."""
        tables, factor = progress.tables, self._factor
        return rows_of(self._groups, keys, tables, first, end, factor)
