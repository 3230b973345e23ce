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
    """Chooses what to store from the old end of the device's order of eviction.

    Each look goes over the next victims, twice the blocks of a full step and a batch,
    and stores what the host does not have. It begins at the oldest block: there is no
    cursor that could pass one by. What the host has, as far as it was looked up or
    stored here, is noted in the device's tier until the host loses it, so that only the
    others are looked up.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: BlockIndex,
        rules: OffloadRules,
        stores: Stores,
        listeners: Listeners,
    ) -> None:
        # In addition to a step's, the blocks that the device allocates between looks.
        num_blocks = lazy_target_blocks(groups, rules.max_num_batched_tokens)
        self.num_blocks = num_blocks + rules.store_batch
        self._host = host
        host.removed_keys = []
        self._stores = stores
        self._listeners = listeners
        self._seen: tuple[int, int, int] | None = None
        # Whether the host had no room for all at the last look.
        self._is_refused = False

    def offer_step(self, pool: DevicePool, ready: Sequence[Any]) -> None:
        """Offer the blocks that the device will evict next."""
        assert isinstance(pool, DeviceBlockPool)
        while self._host.removed_keys:
            pool.forget_copies(self._host.removed_keys.pop())
        if self._look(pool) == self._seen or self._stores.is_congested:
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
        # What was placed is pinned by now, which is no reason to look again.
        self._seen = self._look(pool)

    def clear(self, pool: DevicePool) -> None:
        """Forget which blocks of a pool the host has: it has none."""
        assert isinstance(pool, DeviceBlockPool)
        self._seen = None
        pool.forget_copies()

    def _look(self, pool: DeviceBlockPool) -> tuple[int, int, int]:
        """Return numbers that differ if there may be something new to store."""
        stores = self._stores
        # What stores have pinned was looked at. What a load had pinned was not, and is
        # free afterwards.
        num_free = pool.num_free + stores.in_flight.num_blocks
        num_free += len(stores.waiting.sources)
        refused_at = stores.num_changes if self._is_refused else -1
        return pool.num_changes, num_free, refused_at
