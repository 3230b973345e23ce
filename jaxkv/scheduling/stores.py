"""Stores: blocks in flight to the host, from their place there to the last report."""

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
from jaxkv.types import NO_BLOCK, BlockKey

_LOG = logging.getLogger(__name__)
# While stores are paused, one request in this many is still stored.
_PAUSE_SAMPLE = 16

Store: TypeAlias = Move[list[int]]
"""Device blocks, m for each row, in flight to the host."""
NO_STORES: dict[str, Any] = {
    "store_event": NO_EVENT,
    "store_device_blocks": (),
    "store_host_blocks": (),
}
"""The fields of `OffloadMetadata` about stores, in a step without any."""


class StoreSteps:
    """Decides which steps store blocks, so that few transfers move many.

    Blocks that could be stored stay where they are until `OffloadRules.store_batch` of
    them have been computed, or the first has waited for `store_max_wait_steps`: what a
    running request holds is not evicted. That depends on counts alone, which are the
    same in all processes that serve one model.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], rules: OffloadRules) -> None:
        self.batch_blocks = rules.store_batch  # 0 to store in each step.
        blocks_per_token = sum(1 / spec.block_size for spec in groups)
        self._batch_tokens = math.ceil(rules.store_batch / blocks_per_token)
        self._max_wait_steps = rules.store_max_wait_steps
        # Tokens that may have filled blocks since the last such step, and how many
        # steps they may wait.
        self._num_tokens = 0
        self._steps_left = self._max_wait_steps

    def is_due(self, pool: DevicePool, *, must_store: bool) -> bool:
        """Whether blocks are stored in the step that begins.

        If less than a batch is free in the pool, nothing waits: what requests hold
        could be released at any time.
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
        self.note_tokens(num_tokens)

    def note_tokens(self, num_tokens: int) -> None:
        """Count tokens that the device has allocated blocks for."""
        self._num_tokens = min(self._num_tokens + num_tokens, self._batch_tokens)


class StorePause:
    """Stops storing while nothing that was stored is asked for.

    It begins when twice as many blocks as the host has were offered since a request
    last found something there. A sample of the requests is still stored, and stays for
    longer, as it has the host to itself: the first hit ends the pause. The last block
    of a prompt decides whether it is in the sample, because many prompts begin alike.
    Tokens that shadows find (`num_found_elsewhere`) end the pause, too.
    """

    def __init__(
        self,
        rules: OffloadRules,
        num_host_blocks: int,
        stats: OffloadStats,
        num_found_elsewhere: Callable[[], int],
    ) -> None:
        self.is_on = False
        self._max_unused = 2 * num_host_blocks * rules.blocks_per_host_block
        self._stats = stats
        self._num_offered = 0
        self._num_found = 0
        self._num_found_elsewhere = num_found_elsewhere

    def skips(self, keys: Sequence[BlockKey]) -> bool:
        """Whether a request is not stored, by the keys of its prompt."""
        stats = self._stats
        num_found = stats.num_host_hit_tokens + self._num_found_elsewhere()
        if num_found != self._num_found:
            self._num_found = num_found
            self._num_offered = stats.num_offered
            if self.is_on:
                _LOG.info("blocks are stored again: a request found some on the host")
            self.is_on = False
        elif not self.is_on:
            num_unused = stats.num_offered - self._num_offered
            self.is_on = num_unused >= self._max_unused
            if self.is_on:
                _LOG.info(
                    "%d blocks were stored and none was asked for: only one request in "
                    "%d is stored from now on, until something is found on the host",
                    num_unused,
                    _PAUSE_SAMPLE,
                )
        return self.is_on and bool(keys) and zlib.crc32(keys[-1]) % _PAUSE_SAMPLE != 0


class Stores:
    """The stores of all requests, eager or lazy.

    A device block is held until its store has ended. It keeps its place in the order
    of eviction meanwhile, so that a store does not change what is evicted next.
    `on_arrival` is called with the keys of blocks that have arrived on the host.
    """

    def __init__(
        self,
        host: BlockIndex,
        rules: OffloadRules,
        stats: OffloadStats,
        listeners: Listeners,
        on_arrival: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self.num_changes = 0  # Counts what may have made room on the host.
        self.stats = stats
        self._listeners = listeners
        self._on_arrival = on_arrival
        self._host = host
        self._rules = rules
        self._factor = rules.blocks_per_host_block
        # What has its place on the host and has not left, and what has left.
        self.waiting = _no_blocks()
        self.in_flight: Ledger[Store] = Ledger("store event", rules.world_size)
        # Rows in flight that the host tier has not forgotten.
        self._num_known_in_flight = 0

    def __len__(self) -> int:
        return len(self.in_flight.moves) + bool(self.waiting.keys)

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The stores' part of `InTransit`; for any thread."""
        # In this order, so that what leaves meanwhile is not counted twice.
        num_known = self._num_known_in_flight
        waiting = self.waiting
        return (
            len(waiting.sources),
            num_known * self._factor,
            len(waiting.keys) + num_known,
        )

    @property
    def is_congested(self) -> bool:
        """Whether as much waits as may be in flight at a time."""
        max_blocks = self._rules.max_blocks_in_flight
        return max_blocks is not None and len(self.waiting.sources) >= max_blocks

    def place(
        self, pool: DevicePool, offer: Rows, *, is_head: bool
    ) -> tuple[int, bool]:
        """Find room on the host for blocks that it does not know.

        Blocks that the device does not hold, or that the host has, count as done. An
        offer that begins with the head of a prefix (`is_head`) is also put in order in
        the host's order of eviction.

        Returns:
            How many rows are done, from the first on; and whether the device blocks
            hold all of the rows.
        """
        num = len(offer.keys)
        if not num:
            return 0, True
        blocks = as_ids(offer.device_blocks)
        keys = offer.keys if self._factor == 1 else None
        if isinstance(keys, PackedKeys) and isinstance(pool, DeviceBlockPool):
            # Holds, place, pins and reorder in one call.
            placement = self._host.place_from(pool, keys, blocks, is_head)
            if placement is not None:
                self._wait(placement, blocks)
                return num, True
        held = pool.holds(blocks, offer.device_keys)
        blocks = blocks.reshape(-1, self._factor)
        is_held: NDArray[np.bool_] | None = None  # None if all are.
        if np.count_nonzero(held) < len(held):
            is_held = np.all(held.reshape(-1, self._factor), axis=1)

        def take(num: int) -> bool:
            keys, own_blocks = offer.keys, blocks
            if num < len(keys):
                keys, own_blocks = keys[:num], blocks[:num]
            if is_held is not None:
                own = is_held[:num]
                keys, own_blocks = list(compress(keys, own.tolist())), own_blocks[own]
            return self._take(pool, self._host.place(keys), own_blocks)

        num = self._halve(num, take)
        if is_head:
            # So that the head of a prefix outlives its tail on the host.
            self._host.reorder(offer.keys)
        return num, is_held is None

    def place_victims(self, pool: DeviceBlockPool, victims: Victims) -> bool:
        """Find room on the host for the device's next victims; return if for all.

        The host does not evict copies of the victims to make room for the others.
        """
        bare = victims.block_ids[victims.rows]

        def take(num: int) -> bool:
            keys, blocks, copies = victims.keys, bare, victims.copies
            if num < len(copies):
                num_bare = int(np.searchsorted(victims.rows, num))
                keys, blocks, copies = keys[:num_bare], bare[:num_bare], copies[:num]
            placement = self._host.place_keeping(keys, copies[copies != NO_BLOCK])
            if placement is not None:
                placed = blocks if placement.rows is None else blocks[placement.rows]
                pool.note_copies(placed, placement.block_ids)
            return self._take(pool, placement, blocks)

        num = len(victims.block_ids)
        return self._halve(num, take) == num

    def _halve(self, num: int, take: Callable[[int], bool]) -> int:
        """Store the first `num` rows, or half of them and so on; return how many.

        The tier places all or none, and the head of a prefix is worth having without
        its tail.
        """
        while num and not take(num):
            self.stats.num_store_refusals += 1
            num //= 2
        return num

    def _take(
        self,
        pool: DevicePool,
        placement: Placement | None,
        blocks: NDArray[np.int64],
    ) -> bool:
        """Pin blocks that have found room, which wait to leave; return if they have."""
        if placement is None:
            return False
        pool.pin(self._wait(placement, blocks))
        return True

    def _wait(
        self, placement: Placement, blocks: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Add blocks that have found room to those that wait; return their ids."""
        if placement.rows is not None:
            blocks = blocks[placement.rows]
        to_read = blocks.reshape(-1)
        self.stats.num_offered += len(to_read)
        waiting = self.waiting
        waiting.keys += placement.keys
        waiting.targets += placement.block_ids.tolist()
        waiting.sources += to_read.tolist()
        return to_read

    def issue(self, budget: Budget) -> dict[str, Any]:
        """Send out what has a place on the host, the first come first.

        A row that is larger than the budget leaves if nothing else is in flight.

        Returns:
            The fields of `OffloadMetadata` about stores.
        """
        waiting = self.waiting
        num_rows = max(budget.num_left // self._factor, not budget.in_flight)
        num = min(len(waiting.keys), num_rows)
        if num == 0:
            return NO_STORES
        if num == len(waiting.keys):
            leaving, self.waiting = waiting, _no_blocks()
        else:
            # Not two copies: what stays may be a thousand times as much.
            keys, targets, end = waiting.keys, waiting.targets, num * self._factor
            leaving = Move(keys[:num], waiting.sources[:end], targets[:num])
            del keys[:num], waiting.sources[:end], targets[:num]
        self.in_flight.issue([leaving])
        self._num_known_in_flight += num
        return {
            "store_event": leaving.event,
            "store_device_blocks": tuple(leaving.sources),
            "store_host_blocks": tuple(leaving.targets),
        }

    def report(
        self, pool: DevicePool, reports: Sequence[Report]
    ) -> tuple[list[int], list[int]]:
        """Apply checked reports; return the events that arrived, and that failed.

        They are those that every worker has reported.
        """
        events: tuple[list[int], list[int]] = [], []
        stats = self.stats
        for store in self.in_flight.report(reports):
            events[not store.ok].append(store.event)
            if not store.is_stale:
                keys, num_blocks = store.keys, len(store.sources)
                self._num_known_in_flight -= len(keys)
                if store.ok:
                    self._host.publish(store.targets, keys)
                    if self._on_arrival is not None:
                        self._on_arrival(keys)
                    stats.num_stored += num_blocks
                else:
                    self._host.complete_store(keys, False)
                    self._host.drops.note(keys, "store failed")
                    stats.num_dropped_failed += num_blocks
                for notify in self._listeners.stored:
                    notify(keys, bool(store.ok))
            pool.unpin(store.sources)
            self.num_changes += 1
        return events

    def forget(self, pool: DevicePool) -> None:
        """Release what waits; what is in flight holds nothing but its device blocks."""
        pool.unpin(self.waiting.sources)
        for store in (self.waiting, *self.in_flight.moves.values()):
            if not store.is_stale:
                self.stats.num_dropped_reset += len(store.sources)
            store.is_stale = True
        self.waiting = _no_blocks()
        self._num_known_in_flight = 0


def _no_blocks() -> Store:
    return Move([], [], [])
