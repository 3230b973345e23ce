"""Lazy stores: blocks are offered when the device is about to evict them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxkv.scheduling.chooser import Chooser
from jaxkv.scheduling.listening import Listeners
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stores import Stores
from jaxkv.search.groups import GroupSpec, lazy_target_blocks
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool


class LazyStores(Chooser):
    """Stores the blocks that the device evicts next.

    Each scan covers the next victims, as many as twice the blocks of a full step and a
    batch, and stores those that the host lacks. It always begins at the next victim:
    there is no cursor that could skip a block. The device pool records the host copy of
    each block that was found on or stored to the host, until the host removes it. So
    only the other blocks are looked up.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: BlockIndex,
        rules: OffloadRules,
        stores: Stores,
        listeners: Listeners,
    ) -> None:
        # Plus a batch, which the device may allocate between two scans.
        num_blocks = lazy_target_blocks(groups, rules.max_num_batched_tokens)
        self.num_blocks = num_blocks + rules.store_batch
        self._host = host
        host.removed_keys = []
        self._stores = stores
        self._listeners = listeners
        self._seen: tuple[int, int, int] | None = None  # The last `_scan_state`.
        # Whether the host had no room for all victims of the last scan.
        self._is_refused = False

    def offer_step(
        self, pool: DevicePool, ready: Sequence[Any], *, is_due: bool
    ) -> None:
        """Offer the blocks that the device will evict next."""
        assert isinstance(pool, DeviceBlockPool)
        if not is_due:
            return
        while self._host.removed_keys:
            pool.forget_copies(self._host.removed_keys.pop())
        if self._scan_state(pool) == self._seen or self._stores.is_congested:
            return
        listeners = self._listeners.victims_offered
        if listeners:
            words = pool.next_keys(self.num_blocks)
            passes = self._host.pass_mask(words)
            num_waiting = len(self._stores.waiting.keys)
        victims = self._host.next_device_victims(pool, self.num_blocks)
        self._is_refused = False
        if victims.rows.size:
            self._is_refused = not self._stores.place_victims(pool, victims)
        for notify in listeners:
            placed = frozenset(self._stores.waiting.keys[num_waiting:])
            notify(words, placed, passes)
        # After placing, which pins blocks: this is no reason for another scan.
        self._seen = self._scan_state(pool)

    def clear(self, pool: DevicePool) -> None:
        """Record that the host has no block of the pool any more."""
        assert isinstance(pool, DeviceBlockPool)
        self._seen = None
        pool.forget_copies()

    def _scan_state(self, pool: DeviceBlockPool) -> tuple[int, int, int]:
        """Return counters that differ if there may be new blocks to store."""
        stores = self._stores
        # Blocks pinned by stores were scanned and count as free here. Blocks pinned by
        # loads were not: they need a scan once they are free.
        num_free = pool.num_free + stores.in_flight.num_blocks
        num_free += len(stores.waiting.sources)
        refused_at = stores.num_changes if self._is_refused else -1
        return pool.num_changes, num_free, refused_at
