"""Eager stores: every full block is offered soon after it is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from operator import gt, is_
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import PackedKeys
from jaxkv.scheduling.chooser import Chooser
from jaxkv.scheduling.listening import Listeners, Offer, Passes
from jaxkv.scheduling.places import Places, Table
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.requests import Requests, Rows, rows_of
from jaxkv.scheduling.rules import NO_LIMIT, OffloadRules
from jaxkv.scheduling.stores import StorePause, Stores
from jaxkv.search.groups import GroupSpec
from jaxkv.tiers.bare import REORDER_SHARE
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import BorrowedPool, DevicePool
from jaxkv.types import BlockKey


@dataclasses.dataclass
class _Progress:
    """The stores of a request so far. Lists have one item per group."""

    request: Request
    tables: list[Table]  # Its device blocks; `Places` says which are still its own.
    keys: Sequence[PackedKeys]  # The keys that its tokens had last.
    num_offered: list[int]  # How many first blocks were hits, or were offered.
    limits: tuple[int, int]  # The last result of `Requests.check_stores`.
    # How many first blocks have the content of `keys`: nothing, before its first step.
    num_computed: list[int]
    is_capped: bool = False  # Whether `Requests.caps` holds until it recomputes.
    # It is looked at once its computed tokens reach `next_tokens`, where a block fills,
    # or fall below `min_tokens`, so that it overwrites what it has computed.
    next_tokens: int = 0
    min_tokens: int = 0
    is_behind: bool = False  # Whether computed blocks wait to be offered.
    refused_at: int = -1  # `Stores.num_changes` when the host had no room; else -1.
    is_ordered: bool = False  # Whether the host would evict these blocks tail first.
    whole_at: int = -1  # `BlockIndex.num_removed` when the host had all; -1 if unknown.
    is_skipped: bool = False  # Whether it is not stored while stores are paused.


Ready: TypeAlias = tuple[_Progress, tuple[int, int], Sequence[PackedKeys], int]
"""A request to look at, its limits, its keys by group, and its scheduled tokens."""

_Keys: TypeAlias = Sequence[Sequence[BlockKey]]


class EagerStores(Chooser):
    """Chooses which blocks to store, request by request.

    A block is offered once a step after the one that computed it is planned, if nobody
    was given the block meanwhile (`Places`) and its key has not changed since.

    A block that the host evicts while its request runs is stored again when the request
    ends, because the device will also evict it.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: BlockIndex,
        rules: OffloadRules,
        stores: Stores,
        listeners: Listeners,
        requests: Requests,
    ) -> None:
        self._groups = groups
        self._min_block_size = min(spec.block_size for spec in groups)
        self._host = host
        self._rules = rules
        self._is_batched = rules.store_batch > 0
        self._factor = rules.blocks_per_host_block
        self._stores = stores
        self._requests = requests
        self._listeners = listeners
        self._pause = StorePause(rules, host.num_blocks, stores.stats)
        self._places = Places(1)
        self._progress: dict[str, _Progress] = {}
        # Requests for which blocks were found on the device since the last plan: the
        # step that is planned next may have to compute these blocks.
        self._new: set[str] = set()
        self._scheduled: dict[str, int] = {}  # Requests in steps since the last offer.

    @property
    def is_paused(self) -> bool | None:
        """Whether stores are paused; None if they never are."""
        return self._pause.is_on if self._rules.pause_unused_stores else None

    def bind(self, pool: DevicePool) -> None:
        """Serve the requests of a pool."""
        if pool.num_blocks != self._places.num_blocks:
            self._places = Places(pool.num_blocks)
            self._progress.clear()  # Their tables are of another pool.

    def begun(
        self,
        pool: DevicePool,
        request: Request,
        keys: Sequence[PackedKeys],
        tables: list[NDArray[np.int64]],
        num_local: int | None,
        num_external: int,
        limits: tuple[int, int],
    ) -> None:
        """Track a request; if it already runs, replace its block tables."""
        # After a lookup, a request starts over, even if it declined its offer.
        if num_local is None and self.replace_tables(pool, request, tables, limits):
            return
        name, factor, groups = request.request_id, self._factor, self._groups
        num_local = num_local or 0
        own = [
            self._places.admit(table, num_local // spec.block_size)
            for spec, table in zip(groups, tables, strict=True)
        ]
        for spec, table in zip(groups, own, strict=True):
            _clear(pool, table.ids[num_local // spec.block_size :])
        num_tokens = num_local + num_external
        offered = [num_tokens // spec.block_size // factor * factor for spec in groups]
        nothing = [0] * len(groups)
        progress = _Progress(
            request, own, tuple(keys), offered, limits, nothing, is_ordered=True
        )
        if self._rules.pause_unused_stores:
            progress.is_skipped = self._pause.skips(keys[0])
        self._progress[name] = progress
        if num_local:
            self._new.add(name)

    def recompute(self, request_id: str) -> None:
        """Expect a request to recompute the blocks whose load has failed."""
        progress = self._progress[request_id]
        progress.num_computed = [0] * len(self._groups)
        progress.is_capped = True
        self._start_over(progress)

    def replace_tables(
        self,
        pool: DevicePool,
        request: Request,
        tables: list[NDArray[np.int64]],
        limits: tuple[int, int],
        *,
        is_end: bool = False,
    ) -> bool:
        """Replace the block tables of a known request; return whether it is known."""
        name = request.request_id
        progress = self._progress.get(name)
        if progress is None:
            return False
        for table, blocks in zip(progress.tables, tables, strict=True):
            _clear(pool, self._places.replace(table, blocks))
        progress.request, progress.limits = request, limits
        keys = self._requests.of(request)
        self._check_content(pool, progress, keys, is_end=is_end)
        return True

    def record_step(
        self,
        pool: DevicePool,
        scheduled: Mapping[str, int],
        new_tables: Mapping[str, list[NDArray[np.int64]]],
        preempted: Iterable[str],
    ) -> None:
        """Record which requests a step computes, their new blocks, and preemptions."""
        for name in preempted:
            self._progress.pop(name, None)
        for name, tables in new_tables.items():
            progress = self._progress.get(name)
            for group, blocks in enumerate(tables):
                if progress is None:
                    self._places.give(blocks)
                else:
                    self._places.extend(progress.tables[group], blocks)
                _clear(pool, blocks)
        self._new.clear()
        if self._is_batched:
            self._scheduled.update(scheduled)

    def find_ready(
        self, scheduled: Mapping[str, int], preempted: Sequence[str], *, is_due: bool
    ) -> list[Ready]:
        """Find requests that fill or overwrite blocks; if due, since the last offer."""
        num_changes = self._stores.num_changes
        due, names, progress_of = [], scheduled, self._progress.get
        if is_due and self._scheduled:
            names = {**self._scheduled, **scheduled}
        try:
            for name in names:
                progress = progress_of(name)
                if progress is None:
                    continue
                num_tokens = progress.request.num_computed_tokens
                if progress.min_tokens <= num_tokens < progress.next_tokens and not (
                    progress.is_behind and is_due and progress.refused_at != num_changes
                ):
                    continue
                if name not in preempted:
                    due.append((name, progress))
            limits_of, keys_of = self._requests.check_stores, self._requests.of
            return [
                (p, limits_of(p.request), keys_of(p.request), scheduled.get(name, 0))
                for name, p in due
            ]
        except (TypeError, ValueError):  # Comparing an array raises ValueError.
            self._check_all(names)
            raise

    def _check_all(self, names: Iterable[str]) -> None:
        """Raise an error that names the attribute of the wrong type."""
        for progress in map(self._progress.get, names):
            if progress is not None:
                self._requests.check_stores(progress.request)
                self._requests.checked(progress.request, is_admission=False)

    def offer_step(
        self, pool: DevicePool, ready: Sequence[Ready], *, is_due: bool
    ) -> None:
        """Look at the requests of `find_ready`; offer their blocks if it `is_due`."""
        if is_due:
            self._scheduled.clear()
        if not ready:
            return
        num_changes = self._stores.num_changes
        is_due &= not self._stores.is_congested
        for progress, limits, keys, num_scheduled in ready:
            progress.limits = limits
            self._check_content(pool, progress, keys, is_step=True)
            num_tokens = progress.request.num_computed_tokens + num_scheduled
            progress.min_tokens = num_tokens - num_tokens % self._min_block_size
            num_full, first = self._num_full(progress, keys), progress.num_offered
            is_refused = progress.refused_at == num_changes
            if not progress.is_behind or is_refused or not is_due:
                continue
            num_waiting = len(self._stores.waiting.keys)
            self._offer(pool, progress, keys, num_full)
            if self._listeners.offered:
                blocks = keys[0], first[0], num_full[0]
                self._notify(pool, progress, *blocks, num_waiting)

    def finish(
        self, pool: DevicePool, request: Request, limits: tuple[int, int]
    ) -> None:
        """Offer all blocks of a request that is about to lose its device blocks."""
        name = request.request_id
        progress = self._progress.pop(name, None)
        if progress is None:
            return
        if name in self._new:
            self._new.remove(name)
            return
        progress.request, progress.limits = request, limits
        keys = self._requests.by_request[name]  # They were just checked.
        self._check_content(pool, progress, keys, is_end=True)
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

    def _offer_all(self, pool: DevicePool, progress: _Progress, keys: _Keys) -> None:
        """Offer all blocks of a request that ends, unless the host has them."""
        if (
            progress.is_ordered
            and progress.whole_at == self._host.num_removed
            and not progress.is_behind
            and progress.request.num_computed_tokens < progress.next_tokens
        ):
            return  # The host has all its blocks.
        factor, stats = self._factor, self._stores.stats
        from_head = [0] * len(self._groups)
        num_full = self._num_full(progress, keys)
        rows = self._rows(progress, keys, from_head, num_full)
        if progress.is_skipped and self._pause.is_on:
            stats.num_paused += len(rows.keys) * factor
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

    def clear(self, pool: DevicePool) -> None:
        """Offer all blocks again."""
        for progress in self._progress.values():
            self._start_over(progress)

    def _start_over(self, progress: _Progress) -> None:
        progress.num_offered = [0] * len(self._groups)
        progress.is_behind = not progress.is_skipped
        progress.next_tokens = self._next_tokens(progress)
        progress.refused_at = -1

    def _check_content(
        self,
        pool: DevicePool,
        progress: _Progress,
        keys: Sequence[PackedKeys],
        *,
        is_step: bool = False,
        is_end: bool = False,
    ) -> None:
        """Find which blocks were computed with the keys that they have now."""
        request, requests = progress.request, self._requests
        num_tokens = request.num_computed_tokens
        name = request.request_id
        if is_step and progress.is_capped and num_tokens <= requests.caps[name]:
            # It computes all tokens whose content was in doubt.
            del requests.caps[name]
            progress.is_capped = False
            progress.limits = requests.check_stores(request)
        self._rewind(pool, progress, num_tokens, is_end=is_end)
        if not all(map(is_, keys, progress.keys)):
            self._check_keys(progress, keys, min(num_tokens, progress.min_tokens))
            progress.keys = tuple(keys)
        num_computed = self._num_full(progress, keys, progress.limits[0])
        if isinstance(pool, BorrowedPool):
            for group, end in enumerate(num_computed):
                first = progress.num_computed[group]
                if first < end:
                    blocks = self._places.read(progress.tables[group], first, end)
                    pool.record(blocks, keys[group][first:end])
        progress.num_computed = list(map(max, progress.num_computed, num_computed))
        progress.next_tokens = self._next_tokens(progress)
        if progress.limits[1] < progress.limits[0]:
            num_computed = self._num_full(progress, keys)
        is_full = any(map(gt, num_computed, progress.num_offered))
        progress.is_behind = is_full and not progress.is_skipped

    def _rewind(
        self, pool: DevicePool, progress: _Progress, num_tokens: int, *, is_end: bool
    ) -> None:
        """Void the computed blocks that a request overwrites from a token on."""
        factor = self._factor
        for group, spec in enumerate(self._groups):
            first = num_tokens // spec.block_size
            # Others may store what the last step has written.
            num_written = progress.min_tokens // spec.block_size
            if first >= max(num_written, progress.num_computed[group]):
                continue
            kept = first // factor * factor
            progress.num_computed[group] = min(progress.num_computed[group], kept)
            progress.num_offered[group] = min(progress.num_offered[group], kept)
            progress.whole_at = progress.refused_at = -1
            if not is_end:
                blocks = self._places.rewind(progress.tables[group], first)
                self._stores.void(pool, blocks.tolist())
                _clear(pool, blocks)

    def _check_keys(self, progress: _Progress, keys: _Keys, num_tokens: int) -> None:
        """Stop storing a request whose keys changed without a new computation.

        It has kept its first `num_tokens` computed tokens since its keys were read.
        """
        cap = num_tokens
        for spec, old, new in zip(self._groups, progress.keys, keys, strict=True):
            num = min(num_tokens // spec.block_size, len(old))
            pairs = zip(old[:num], [*new[:num], None], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), num)
            if same < num:
                cap = min(cap, same * spec.block_size)
        if cap == num_tokens:
            return
        name, factor = progress.request.request_id, self._factor
        self._requests.caps[name] = min(cap, self._requests.caps.get(name, cap))
        progress.is_capped = True
        progress.limits = self._requests.check_stores(progress.request)
        for group, spec in enumerate(self._groups):
            kept = cap // spec.block_size // factor * factor
            progress.num_computed[group] = min(progress.num_computed[group], kept)
            progress.num_offered[group] = min(progress.num_offered[group], kept)
        progress.whole_at = -1

    def _num_full(
        self, progress: _Progress, keys: _Keys, num_tokens: int | None = None
    ) -> list[int]:
        """Return the blocks that tokens fill, by group; None for those to be stored."""
        if num_tokens is None:
            num_tokens = min(progress.limits)
        factor, num_full = self._factor, []
        for spec, ks, table in zip(self._groups, keys, progress.tables, strict=True):
            num = min(num_tokens // spec.block_size, len(ks), len(table))
            num_full.append(num // factor * factor)
        return num_full

    def _offer(
        self, pool: DevicePool, progress: _Progress, keys: _Keys, num_full: list[int]
    ) -> None:
        """Offer the blocks from `progress.num_offered` up to `num_full`."""
        first = progress.num_offered
        rows = self._rows(progress, keys, first, num_full)
        host = self._host
        num_left_out = host.num_skipped + host.num_declined
        is_head = not any(first)

        def head() -> list[BlockKey]:
            return [
                key
                for group_keys, end in zip(keys, first, strict=True)
                for key in group_keys[self._factor - 1 : end : self._factor]
            ]

        num_done, is_held = self._stores.place(
            pool,
            rows,
            is_head=is_head,
            head=head if self._rules.keep_heads and not is_head else None,
        )
        progress.refused_at = -1
        if num_done < len(rows.keys):
            progress.refused_at = self._stores.num_changes
        if not is_held:
            progress.whole_at = -1
        elif num_left_out == host.num_skipped + host.num_declined and is_head:
            progress.whole_at = host.num_removed
        if rows.groups is None:
            progress.num_offered = [first[0] + num_done * self._factor]
        else:
            done = np.bincount(rows.groups[:num_done], minlength=len(first))
            progress.num_offered = (done + first).tolist()
        progress.is_behind = num_done < len(rows.keys)
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
            blocks = progress.tables[0].ids[first:end]
            passes[first - start :] = pool.holds(blocks, keys[first:end])
        admitted = self._host.pass_mask(keys[start:end])
        if admitted is not None:
            passes &= admitted
        return None if passes.all() else passes

    def _next_tokens(self, progress: _Progress) -> int:
        """Return how many tokens a request must have computed to fill more blocks."""
        if progress.is_capped:
            return 0
        if progress.is_skipped:
            return NO_LIMIT
        next_tokens = NO_LIMIT
        for computed, spec in zip(progress.num_computed, self._groups, strict=True):
            end = (computed + self._factor) * spec.block_size
            next_tokens = min(next_tokens, end)
        if next_tokens > progress.limits[1]:
            return NO_LIMIT
        return next_tokens

    def _rows(
        self, progress: _Progress, keys: _Keys, first: list[int], end: list[int]
    ) -> Rows:
        """Return the blocks [first[g], end[g]) of all groups g, or null, as rows."""
        spans = zip(progress.tables, first, end, strict=True)
        blocks = [self._places.read(*span) for span in spans]
        return rows_of(self._groups, keys, blocks, first, end, self._factor)


def _clear(pool: DevicePool, block_ids: NDArray[np.int64]) -> None:
    """Forget what a pool knows of blocks that were given to a request."""
    if isinstance(pool, BorrowedPool):
        pool.forget(block_ids)
    elif pool.unwritten:
        pool.unwritten.difference_update(block_ids.tolist())
