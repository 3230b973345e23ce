"""The scheduler's statistics, explanations and events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxkv.scheduling.boundary import Boundary
from jaxkv.scheduling.chooser import Chooser
from jaxkv.scheduling.explain import Explanation, explain
from jaxkv.scheduling.loads import Loads
from jaxkv.scheduling.plan import View
from jaxkv.scheduling.protocol import Request
from jaxkv.scheduling.stats import InTransit, OffloadStats
from jaxkv.scheduling.stores import Stores
from jaxkv.scheduling.whatif.outlook import Outlook
from jaxkv.scheduling.whatif.shadows import ShadowCount
from jaxkv.scheduling.whatif.what_if import WhatIf
from jaxkv.tiers.base import OffloadingEvent
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool


class Reporting:
    """The reporting methods of `OffloadScheduler`, which sets these attributes."""

    below: tuple[Boundary, ...]
    _storage: tuple[Boundary, ...]  # The boundary to the store, or none.
    _manager: BlockIndex
    _pool: DevicePool
    _view: View
    _loads: Loads
    _stores: Stores
    _chooser: Chooser
    _whatif: WhatIf
    _stats: OffloadStats

    @property
    def num_host_blocks_held(self) -> int:
        """Host blocks in use, including those that stores in flight write."""
        return self._manager.num_held_blocks

    @property
    def num_storage_blocks_held(self) -> int:
        """Blocks in the index of the store, writes in flight included."""
        return sum(boundary.tier.num_held_blocks for boundary in self._storage)

    @property
    def num_storage_blocks_left_out(self) -> int:
        """Blocks in the store that its index has no room for."""
        return sum(boundary.tier.num_unindexed for boundary in self._storage)

    @property
    def stats(self) -> OffloadStats:
        """Counts of stores and loads that have ended so far."""
        host = self._manager
        stats = dataclasses.replace(
            self._stats,
            num_evicted=host.num_evicted,
            num_skipped=host.num_skipped,
            num_declined=host.num_declined,
        )
        for boundary in self._storage:
            stats = stats.with_storage(boundary.counts, boundary.tier.num_evicted)
        return stats

    @property
    def shadow_counts(self) -> tuple[ShadowCount, ...]:
        """The counts of each shadow tier (`OffloadRules.shadow`); thread-safe."""
        return self._whatif.counts

    def outlook(self) -> Outlook:
        """Return the hits that shadows of other sizes and policies have had so far.

        Thread-safe. `Outlook.since` returns the difference from an earlier outlook.

        Raises:
            ValueError: There are no shadows.

        Example:
            >>> from jaxkv import OffloadRules, OffloadScheduler
            >>> scheduler = OffloadScheduler(16, 64, rules=OffloadRules(shadow="lru*2"))
            >>> print(scheduler.outlook())
            policy        host  found  error  saved per request
            lru     128 blocks   0.0%    0.0                  ?
            <BLANKLINE>
            No request has looked for its prefix yet.
        """
        return self._whatif.outlook()

    @property
    def serving_policy(self) -> str | None:
        """The name of the current cache policy; None for a `Policy` object."""
        return self._whatif.policy

    @property
    def is_storing_paused(self) -> bool | None:
        """Whether stores are paused; None without `pause_unused_stores`."""
        return self._chooser.is_paused

    @property
    def in_transit(self) -> InTransit:
        """Counts of blocks in flight now; thread-safe, as `stats` is."""
        return InTransit(*self._stores.in_transit, *self._loads.in_transit)

    def has_pending_stores(self) -> bool:
        """Whether stores to the host, or calls to a tier below it, are not over yet.

        While this is True, an engine must keep stepping even without requests.
        """
        return len(self._stores) > 0 or any(
            boundary.has_writes for boundary in self.below
        )

    def has_pending_loads(self) -> bool:
        """Whether any request has an offer, or a load, fetch or probe in flight."""
        return len(self._loads) > 0 or any(
            boundary.has_fetches for boundary in self.below
        )

    @property
    def is_storage_listed(self) -> bool:
        """Whether a listing of the store has ended; True without a store."""
        return all(boundary.tier.is_listed for boundary in self._storage)

    def num_fetched_tokens(self, request_id: str) -> int:
        """Return how many tokens a request's last fetch brought to the host.

        0 if the request has not waited for a fetch, or has finished.
        """
        fetched = (boundary.num_fetched_tokens for boundary in self.below)
        return max((tokens.get(request_id, 0) for tokens in fetched), default=0)

    def explain(
        self, request: Request, num_computed_tokens: int | None = None
    ) -> Explanation:
        """Return what a request would be offered, and the tier of each of its blocks.

        Nothing changes. If the request's keys were rewritten since its last lookup, the
        next lookup drops its fetches and probes; the explanation still counts them.

        Args:
            request: A request; the scheduler need not know it.
            num_computed_tokens: Tokens found on the device, whole blocks of them; None
                to find them in the bound pool, which must then be a `DeviceBlockPool`.

        Raises:
            ValueError: `num_computed_tokens` is not whole blocks, or is None and the
                bound pool is not a `DeviceBlockPool`.
        """
        return explain(self._view, self._pool, request, num_computed_tokens)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield events of the host tier and the tiers below it since the last call."""
        yield from self._manager.take_events()
        for boundary in self.below:
            yield from boundary.tier.take_events()
