"""Lazy stores: what the device is about to evict, and not before."""

from __future__ import annotations

from jaxkv.scheduling.prefix import Rows
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stores import Stores
from jaxkv.search.groups import GroupSpec, lazy_target_blocks
from jaxkv.tiers.device import DeviceBlockPool


class LazyStores:
    """Chooses what to store from the old end of the device's order of eviction.

    Every step looks at the blocks that will be evicted next, as many as twice those of
    a full step, and stores what the host lacks. Each look begins at the oldest block:
    there is no cursor that could pass one by.

    Args:
        groups: The groups of the model's layers.
        rules: What the engine chose.
        stores: Takes what was chosen.

    Attributes:
        num_blocks: How many blocks each look goes over.
    """

    def __init__(
        self, groups: tuple[GroupSpec, ...], rules: OffloadRules, stores: Stores
    ) -> None:
        self.num_blocks = lazy_target_blocks(groups, rules.max_num_batched_tokens)
        self._stores = stores
        self._seen: tuple[int, int, int] | None = None

    def offer_step(self, pool: DeviceBlockPool) -> None:
        """Offer the blocks that the device will evict next."""
        if self._look(pool) == self._seen or self._stores.is_congested:
            return
        blocks, keys = pool.next_victims(self.num_blocks)
        # The pool has just told what they contain.
        self._stores.place(pool, Rows(keys, keys, blocks, None), check=False)
        # What was placed is pinned by now, which is no change to come back for.
        self._seen = self._look(pool)

    def clear(self) -> None:
        """Note that the host has forgotten everything."""
        self._seen = None

    def _look(self, pool: DeviceBlockPool) -> tuple[int, int, int]:
        """Give numbers that differ if there may be something new to store."""
        # A block that was passed over, as a load had it pinned, is no change.
        return pool.num_changes, pool.num_free, self._stores.num_changes
