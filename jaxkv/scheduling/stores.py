"""Blocks on their way to the host, from their place there to the last report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxkv.scheduling.prefix import Rows
from jaxkv.scheduling.protocol import NO_EVENT
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.host import OffloadingManager
from jaxkv.types import BlockKey

Item = TypeVar("Item")


@dataclasses.dataclass
class StoreBatch:
    """Blocks on their way to the host. n rows, each a host block.

    Attributes:
        keys: Key of each row.
        device_blocks: The device blocks of all rows, m for each, held until the end.
        host_blocks: Where each row goes.
        num_reports: Workers that reported it.
        has_failed: Whether one of them reported a failure.
        is_stale: Whether the host tier has forgotten it.
    """

    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    device_blocks: list[int] = dataclasses.field(default_factory=list)
    host_blocks: list[int] = dataclasses.field(default_factory=list)
    num_reports: int = 0
    has_failed: bool = False
    is_stale: bool = False

    def take(self, num: int, num_blocks: int) -> StoreBatch:
        """Take the first rows, and their device blocks, out of what has not left."""
        # Not two copies: what stays may be a thousand times as much.
        taken = StoreBatch(
            self.keys[:num], self.device_blocks[:num_blocks], self.host_blocks[:num]
        )
        del self.keys[:num], self.device_blocks[:num_blocks], self.host_blocks[:num]
        return taken


class Stores:
    """The stores of all requests, whoever chooses the blocks.

    A device block is held until its store has ended. It keeps its place in the order
    of eviction meanwhile, so that a store changes nothing about what goes next.

    Args:
        host: The host tier.
        rules: What the engine chose.
        stats: Where stores that arrive and blocks that are dropped are counted.
        on_arrival: Told the keys of what has arrived on the host.

    Attributes:
        num_changes: Counts what may have made room on the host.
        num_blocks_in_flight: Device blocks that are being read.
        stats: As given.
    """

    def __init__(
        self,
        host: OffloadingManager,
        rules: OffloadRules,
        stats: OffloadStats,
        on_arrival: Callable[[Sequence[BlockKey]], None] | None = None,
    ) -> None:
        self.num_changes = 0
        self.stats = stats
        self._on_arrival = on_arrival
        self._host = host
        self._rules = rules
        self._factor = rules.blocks_per_host_block
        self._waiting = StoreBatch()
        self._in_flight: dict[int, StoreBatch] = {}
        self._next_event = 0
        self.num_blocks_in_flight = 0
        # Host blocks in flight that the host tier has not forgotten.
        self._num_known_in_flight = 0

    def __len__(self) -> int:
        return len(self._in_flight) + bool(self._waiting.keys)

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The part of `InTransit` that tells of stores; for any thread."""
        # In this order, so that what leaves meanwhile is not counted twice.
        num_known = self._num_known_in_flight
        waiting = self._waiting
        return (
            len(waiting.device_blocks),
            num_known * self._factor,
            len(waiting.keys) + num_known,
        )

    @property
    def is_congested(self) -> bool:
        """Whether as much waits as may be in flight at a time."""
        most = self._rules.max_blocks_in_flight
        return most is not None and len(self._waiting.device_blocks) >= most

    def place(self, pool: DeviceBlockPool, offer: Rows, *, check: bool = True) -> int:
        """Find room on the host for blocks that it does not know.

        Args:
            pool: The device's blocks.
            offer: What could be stored. What a device block does not contain, and what
                the host has, counts as done.
            check: Whether to look what the device blocks contain.

        Returns:
            How many rows are done, from the first on.
        """
        num = len(offer.keys)
        if not num:
            return 0
        blocks = np.asarray(offer.device_blocks, np.int64)
        is_held: NDArray[np.bool_] | None = None  # None if all are.
        if check:
            held = pool.holds(blocks, offer.device_keys)
            if not held.all():
                is_held = np.all(held.reshape(-1, self._factor), axis=1)
        blocks = blocks.reshape(-1, self._factor)
        # All or, as the tier places all or none, half of them, and so on: the head of
        # a prefix is worth having without its tail.
        while num and not self._take(pool, num, offer.keys, blocks, is_held):
            self.stats.num_store_refusals += 1
            num //= 2
        return num

    def _take(
        self,
        pool: DeviceBlockPool,
        num: int,
        keys: Sequence[BlockKey],
        blocks: NDArray[np.int64],
        is_held: NDArray[np.bool_] | None,
    ) -> bool:
        """Find room for the first rows, all or none; tell whether there was."""
        if num < len(keys):
            keys, blocks = keys[:num], blocks[:num]
        if is_held is not None:
            own = is_held[:num]
            keys, blocks = list(compress(keys, own.tolist())), blocks[own]
        placement = self._host.place(keys)
        if placement is None:
            return False
        if placement.rows is not None:
            blocks = blocks[placement.rows]
        to_read = blocks.reshape(-1)
        pool.pin(to_read)
        self.stats.num_offered += len(to_read)
        self._waiting.keys += placement.keys
        self._waiting.host_blocks += placement.block_ids.tolist()
        self._waiting.device_blocks += to_read.tolist()
        return True

    def issue(self, num_blocks: int | None, in_flight: int) -> tuple[int, StoreBatch]:
        """Send out what has a place on the host, the first come first.

        Args:
            num_blocks: How many device blocks may leave; None for any number. A row
                that is larger leaves if nothing else is in flight.
            in_flight: Device blocks that are in flight, in either direction.

        Returns:
            The event and what leaves with it.
        """
        waiting = self._waiting
        num = len(waiting.keys)
        if num_blocks is not None:
            least = 0 if in_flight else 1
            num = min(num, max(num_blocks // self._factor, least))
        if num == 0:
            return NO_EVENT, StoreBatch()
        event = self._next_event
        self._next_event += 1
        if num == len(waiting.keys):
            leaving, self._waiting = waiting, StoreBatch()
        else:
            leaving = waiting.take(num, num * self._factor)
        self._in_flight[event] = leaving
        self.num_blocks_in_flight += len(leaving.device_blocks)
        self._num_known_in_flight += len(leaving.keys)
        return event, leaving

    def check_reports(self, completed: Sequence[int], failed: Sequence[int]) -> None:
        """Raise ValueError if workers report what is not in flight on them."""
        if not (completed or failed):
            return
        for event, count in Counter((*completed, *failed)).items():
            sent = self._in_flight.get(event)
            due = self._rules.world_size - sent.num_reports if sent else 0
            if count > due:
                raise ValueError(
                    f"{count} reports of store event {event}, of which {due} are due; "
                    f"in flight are {list(self._in_flight)}."
                )

    def report(
        self, pool: DeviceBlockPool, completed: Sequence[int], failed: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Note what workers reported, which `check_reports` has let pass.

        Returns:
            The events that are over on all workers: those that arrived, and those that
            did not.
        """
        if not (completed or failed):
            return [], []
        has_failed = set(failed)
        ended: dict[int, StoreBatch] = {}
        for event in (*completed, *failed):
            sent = self._in_flight[event]
            sent.num_reports += 1
            sent.has_failed |= event in has_failed
            if sent.num_reports == self._rules.world_size:
                ended[event] = self._in_flight.pop(event)
                self.num_blocks_in_flight -= len(sent.device_blocks)
                self._num_known_in_flight -= len(sent.keys) * (not sent.is_stale)
        if ended:
            self._end(pool, list(ended.values()))
        return (
            [event for event, sent in ended.items() if not sent.has_failed],
            [event for event, sent in ended.items() if sent.has_failed],
        )

    def forget(self, pool: DeviceBlockPool) -> None:
        """Let go of what waits; what is in flight holds its device blocks, no more."""
        pool.unpin(self._waiting.device_blocks)
        for sent in (self._waiting, *self._in_flight.values()):
            if not sent.is_stale:
                self.stats.num_dropped_reset += len(sent.device_blocks)
            sent.is_stale = True
        self._waiting = StoreBatch()
        self._num_known_in_flight = 0

    def _end(self, pool: DeviceBlockPool, transfers: Sequence[StoreBatch]) -> None:
        known = [sent for sent in transfers if not sent.is_stale]
        arrived = [sent for sent in known if not sent.has_failed]
        if arrived:
            keys = _joined([sent.keys for sent in arrived])
            self._host.publish(_joined([sent.host_blocks for sent in arrived]), keys)
            if self._on_arrival is not None:
                self._on_arrival(keys)
            self.stats.num_stored += sum(len(sent.device_blocks) for sent in arrived)
        lost = [sent for sent in known if sent.has_failed]
        if lost:
            keys = _joined([sent.keys for sent in lost])
            self._host.complete_store(keys, False)
            self._host.drops.note(keys, "store failed")
            num_lost = sum(len(sent.device_blocks) for sent in lost)
            self.stats.num_dropped_failed += num_lost
        pool.unpin(_joined([sent.device_blocks for sent in transfers]))
        self.num_changes += 1


def _joined(lists: Sequence[list[Item]]) -> list[Item]:
    """Put lists in a row; one that is alone is not copied."""
    return lists[0] if len(lists) == 1 else list(chain(*lists))
