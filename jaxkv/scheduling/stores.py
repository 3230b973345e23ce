"""Stores: blocks that move to the host, from their placement to the last report."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import PackedKeys
from jaxkv.scheduling.listening import Listeners
from jaxkv.scheduling.moves import Budget, Ledger, Move, Report
from jaxkv.scheduling.protocol import NO_EVENT
from jaxkv.scheduling.requests import Rows
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import GroupSpec
from jaxkv.tiers.base import Placement, as_ids
from jaxkv.tiers.device import DeviceBlockPool, Victims
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import NO_BLOCK, NULL_BLOCK, BlockKey

_LOG = logging.getLogger(__name__)
_PAUSE_SAMPLE = 16  # While stores are paused, store one request in this many.

Store: TypeAlias = Move[list[int]]
"""n rows in flight to the host, of m device blocks each (`sources` has n * m)."""
NO_STORES: dict[str, Any] = {
    "store_event": NO_EVENT,
    "store_device_blocks": (),
    "store_host_blocks": (),
}
"""The fields of `OffloadMetadata` for stores, in a step without stores."""


class StoreSteps:
    """Decides which steps store blocks, to batch them into few transfers.

    Blocks are stored once `OffloadRules.store_batch` of them have been computed, or the
    first has waited for `store_max_wait_steps`. Meanwhile running requests hold them.
    Decisions depend only on counts that all processes of one model share.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], rules: OffloadRules) -> None:
        self.batch_blocks = rules.store_batch  # 0 to store in each step.
        blocks_per_token = sum(1 / spec.block_size for spec in groups)
        self._batch_tokens = math.ceil(rules.store_batch / blocks_per_token)
        self._max_wait_steps = rules.store_max_wait_steps
        # Tokens since blocks were last stored, and how many steps these may still wait.
        self._num_tokens = 0
        self._steps_left = self._max_wait_steps

    def is_due(self, pool: DevicePool, *, must_store: bool) -> bool:
        """Whether blocks are stored in the step that begins.

        If the pool has less than a batch of free blocks, no block waits: it could be
        evicted as soon as its request releases it.
        """
        return (
            must_store
            or self._num_tokens >= self._batch_tokens
            or not self._steps_left
            or pool.num_free < self.batch_blocks
        )

    def begin(self, num_tokens: int, *, is_due: bool) -> None:
        """Begin a step that computes `num_tokens`."""
        if is_due:
            self._num_tokens = 0
            self._steps_left = self._max_wait_steps
        elif self._num_tokens:
            self._steps_left -= 1
        self.record_tokens(num_tokens)

    def record_tokens(self, num_tokens: int) -> None:
        """Count tokens that a step computes, or that a request loads."""
        self._num_tokens = min(self._num_tokens + num_tokens, self._batch_tokens)


class StorePause:
    """Pauses stores while no stored block is hit.

    A pause begins after twice the host's capacity was offered without a hit on the
    host. A sample of the requests is still stored: its blocks stay longer, because no
    others are stored. The first hit ends the pause. A hash of a prompt's last key
    decides whether the request is in the sample, because many prompts share their first
    blocks.
    """

    def __init__(
        self, rules: OffloadRules, num_host_blocks: int, stats: OffloadStats
    ) -> None:
        self.is_on = False
        self._max_unused = 2 * num_host_blocks * rules.blocks_per_host_block
        self._stats = stats
        self._num_offered = 0  # `stats.num_offered` at the last hit.
        self._num_hit_tokens = 0

    def skips(self, keys: Sequence[BlockKey]) -> bool:
        """Whether a request whose prompt has these keys is not stored."""
        stats = self._stats
        num_hit_tokens = stats.num_host_hit_tokens
        if num_hit_tokens != self._num_hit_tokens:
            self._num_hit_tokens = num_hit_tokens
            self._num_offered = stats.num_offered
            if self.is_on:
                _LOG.info("all requests are stored again after a hit on the host")
            self.is_on = False
        elif not self.is_on:
            num_unused = stats.num_offered - self._num_offered
            self.is_on = num_unused >= self._max_unused
            if self.is_on:
                _LOG.info(
                    "%d blocks were stored without a hit on the host: only 1 request "
                    "in %d is stored until the next hit",
                    num_unused,
                    _PAUSE_SAMPLE,
                )
        return self.is_on and bool(keys) and zlib.crc32(keys[-1]) % _PAUSE_SAMPLE != 0


class Stores:
    """The stores of all requests, eager or lazy.

    A device block is held until its store has ended, and keeps its place in the
    eviction order: a store does not change which block is evicted next. `on_arrival`
    gets the keys of blocks that have arrived on the host.
    """

    def __init__(
        self,
        host: BlockIndex,
        rules: OffloadRules,
        stats: OffloadStats,
        listeners: Listeners,
        on_arrival: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self.num_changes = 0  # Counts events that may have made room on the host.
        self.stats = stats
        self._listeners = listeners
        self._on_arrival = on_arrival
        self._host = host
        self._rules = rules
        self._factor = rules.blocks_per_host_block
        self.waiting = _no_blocks()  # Placed on the host, and not yet issued.
        self.in_flight: Ledger[Store] = Ledger("store event", rules.world_size)
        self._num_known_in_flight = 0  # Rows in flight, except stale ones.

    def __len__(self) -> int:
        return len(self.in_flight.moves) + bool(self.waiting.keys)

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The first three fields of `InTransit`, about stores; thread-safe."""
        # In this order, so that blocks issued meanwhile are not counted twice.
        num_known = self._num_known_in_flight
        waiting = self.waiting
        return (
            len(waiting.sources),
            num_known * self._factor,
            len(waiting.keys) + num_known,
        )

    @property
    def is_congested(self) -> bool:
        """Whether at least as many blocks wait as may be in flight at a time."""
        max_blocks = self._rules.max_blocks_in_flight
        return max_blocks is not None and len(self.waiting.sources) >= max_blocks

    def place(
        self,
        pool: DevicePool,
        offer: Rows,
        *,
        is_head: bool,
        head: Callable[[], Sequence[BlockKey]] | None = None,
    ) -> tuple[int, bool]:
        """Place the offered blocks that the host lacks, and queue them to be stored.

        Rows that the device does not hold, or that the host has, need no place. If the
        offer begins with the first block of a prefix (`is_head`), the host also evicts
        its tail first. No block of `head`, the keys before the offer, is evicted.
        Return how many first rows are placed or need no place, and whether the device
        holds all rows.
        """
        num = len(offer.keys)
        if not num:
            return 0, True
        blocks = as_ids(offer.device_blocks)
        keys = offer.keys if self._factor == 1 else None
        kept: NDArray[np.int64] | None = None
        if (
            head is not None
            and num > self._host.num_blocks - self._host.num_held_blocks
        ):
            found = self._host.find(head())
            kept, keys = found[found != NO_BLOCK].astype(np.int64), None
        if isinstance(keys, PackedKeys) and isinstance(pool, DeviceBlockPool):
            # `holds`, `place`, `pin` and `reorder` in one call.
            placement = self._host.place_from(pool, keys, blocks, is_head)
            if placement is not None:
                self._queue(placement, blocks)
                return num, True
        held = pool.holds(blocks, offer.device_keys) & (blocks != NULL_BLOCK)
        blocks = blocks.reshape(-1, self._factor)
        is_held: NDArray[np.bool_] | None = None  # [n]; None if all rows are held.
        if np.count_nonzero(held) < len(held):
            is_held = np.all(held.reshape(-1, self._factor), axis=1)

        def place_first(num: int) -> bool:
            keys, rows = offer.keys, blocks
            if num < len(keys):
                keys, rows = keys[:num], blocks[:num]
            if is_held is not None:
                held_rows = is_held[:num]
                keys, rows = list(compress(keys, held_rows.tolist())), rows[held_rows]
            if kept is None:
                placement = self._host.place(keys)
            else:
                placement = self._host.place_keeping(keys, kept)
            return self._pin_and_queue(pool, placement, rows)

        end, num = num, self._place_or_halve(num, place_first)
        if self._rules.keep_heads and 0 < num < end:
            end = min(end, 2 * num + 1)
            while (middle := (num + end) // 2) > num:
                num, end = (middle, end) if place_first(middle) else (num, middle)
        if is_head:
            # The host must evict the tail of a prefix before its head.
            self._host.reorder(offer.keys)
        return num, is_held is None

    def place_victims(self, pool: DeviceBlockPool, victims: Victims) -> bool:
        """Place the device's next victims on the host; return whether all fit.

        The host evicts no copy of a victim to make room for another victim.
        """
        uncopied = victims.block_ids[victims.rows]

        def place_first(num: int) -> bool:
            keys, blocks, copies = victims.keys, uncopied, victims.copies
            if num < len(copies):
                end = int(np.searchsorted(victims.rows, num))
                keys, blocks, copies = keys[:end], uncopied[:end], copies[:num]
            placement = self._host.place_keeping(keys, copies[copies != NO_BLOCK])
            if placement is not None:
                placed = blocks if placement.rows is None else blocks[placement.rows]
                pool.record_copies(placed, placement.block_ids)
            return self._pin_and_queue(pool, placement, blocks)

        num = len(victims.block_ids)
        return self._place_or_halve(num, place_first) == num

    def _place_or_halve(self, num: int, place_first: Callable[[int], bool]) -> int:
        """Place the first `num` rows, or half of them and so on; return how many.

        `place_first` places all or none, but a prefix is useful without its tail.
        """
        while num and not place_first(num):
            self.stats.num_store_refusals += 1
            num //= 2
        return num

    def _pin_and_queue(
        self,
        pool: DevicePool,
        placement: Placement | None,
        blocks: NDArray[np.int64],
    ) -> bool:
        if placement is None:
            return False
        pool.pin(self._queue(placement, blocks))
        return True

    def _queue(
        self, placement: Placement, blocks: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Queue placed blocks to be issued; return their device block ids."""
        if placement.rows is not None:
            blocks = blocks[placement.rows]
        sources = blocks.reshape(-1)
        self.stats.num_offered += len(sources)
        waiting = self.waiting
        waiting.keys += placement.keys
        waiting.targets += placement.block_ids.tolist()
        waiting.sources += sources.tolist()
        return sources

    def issue(self, budget: Budget) -> dict[str, Any]:
        """Issue waiting stores within the budget; return `OffloadMetadata`'s fields."""
        waiting = self.waiting
        num_rows = max(budget.num_left // self._factor, not budget.in_flight)
        num = min(len(waiting.keys), num_rows)
        if num == 0:
            return NO_STORES
        if num == len(waiting.keys):
            issued, self.waiting = waiting, _no_blocks()
        else:
            # Copy only the issued part: the rest may be a thousand times larger.
            keys, targets, end = waiting.keys, waiting.targets, num * self._factor
            issued = Move(keys[:num], waiting.sources[:end], targets[:num])
            del keys[:num], waiting.sources[:end], targets[:num]
        self.in_flight.issue([issued])
        self._num_known_in_flight += num
        return {
            "store_event": issued.event,
            "store_device_blocks": tuple(issued.sources),
            "store_host_blocks": tuple(issued.targets),
        }

    def report(
        self, pool: DevicePool, reports: Sequence[Report]
    ) -> tuple[list[int], list[int]]:
        """Apply checked reports; return events that arrived, and those that failed."""
        events: tuple[list[int], list[int]] = [], []
        stats = self.stats
        for store in self.in_flight.report(reports):
            events[not store.ok].append(store.event)
            if not store.is_stale:
                self._num_known_in_flight -= len(store.keys)
                keys, targets = store.keys, store.targets
                if store.void or not store.ok:
                    rows = store.void if store.ok else range(len(keys))
                    self._fail([keys[row] for row in sorted(rows)])
                    kept = sorted(set(range(len(keys))).difference(rows))
                    keys = [keys[row] for row in kept]
                    targets = [targets[row] for row in kept]
                if keys:
                    self._host.publish(targets, keys)
                    if self._on_arrival is not None:
                        self._on_arrival(keys)
                    stats.num_stored += len(keys) * self._factor
                    for notify in self._listeners.stored:
                        notify(keys, True)
            pool.unpin(store.sources)
            self.num_changes += 1
        return events

    def _fail(self, keys: list[BlockKey]) -> None:
        """Give up the host blocks of stores that have failed."""
        self._host.complete_store(keys, False)
        self.stats.num_dropped_failed += len(keys) * self._factor
        for notify in self._listeners.stored:
            notify(keys, False)

    def void(self, pool: DevicePool, block_ids: Sequence[int]) -> None:
        """Void stores, in flight too, of blocks that are about to be overwritten."""
        overwritten, factor = set(block_ids), self._factor
        for store in (self.waiting, *self.in_flight.moves.values()):
            if not store.is_stale and not overwritten.isdisjoint(store.sources):
                store.void.update(
                    row // factor
                    for row, block in enumerate(store.sources)
                    if block in overwritten
                )
        waiting = self.waiting
        if waiting.void:
            kept = sorted(set(range(len(waiting.keys))) - waiting.void)
            rows = as_ids(waiting.sources).reshape(-1, factor)
            pool.unpin(rows[sorted(waiting.void)].reshape(-1))
            self.waiting = Move(
                [waiting.keys[row] for row in kept],
                rows[kept].reshape(-1).tolist(),
                [waiting.targets[row] for row in kept],
            )
            self._fail([waiting.keys[row] for row in sorted(waiting.void)])

    def forget(self, pool: DevicePool) -> None:
        """Drop waiting stores; stores in flight only hold their device blocks."""
        pool.unpin(self.waiting.sources)
        for store in (self.waiting, *self.in_flight.moves.values()):
            if not store.is_stale:
                self.stats.num_dropped_reset += len(store.sources)
            store.is_stale = True
        self.waiting = _no_blocks()
        self._num_known_in_flight = 0


def _no_blocks() -> Store:
    return Move([], [], [])
