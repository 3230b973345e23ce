"""The part of a scheduler that reports: counts, blocks in flight, the whole state."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxkv._util.state import State, restore, snapshot
from jaxkv.scheduling.boundary import Boundary
from jaxkv.scheduling.checks import check_alike
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
    """The reports of a scheduler, which sets these attributes."""

    below: tuple[Boundary, ...]
    _storage: tuple[Boundary, ...]  # The store's, if there is one.
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
        """Blocks of the host tier that hold something, stores in flight included."""
        return self._manager.num_held_blocks

    @property
    def num_storage_blocks_held(self) -> int:
        """Host blocks that the store is known to hold, writes in flight included."""
        return sum(boundary.tier.num_held_blocks for boundary in self._storage)

    @property
    def num_storage_blocks_left_out(self) -> int:
        """Host blocks that the store holds beyond those, which the index leaves out."""
        return sum(boundary.tier.num_unindexed for boundary in self._storage)

    @property
    def stats(self) -> OffloadStats:
        """Counts of stores and loads that have ended so far."""
        host = self._manager
        stats = dataclasses.replace(
            self._stats, num_evicted=host.num_evicted, num_skipped=host.num_skipped
        )
        for boundary in self._storage:
            stats = stats.with_storage(boundary.counts, boundary.tier.num_evicted)
        return stats

    @property
    def shadow_counts(self) -> tuple[ShadowCount, ...]:
        """The counts of each of the `shadow` tiers; any thread may read them."""
        return self._whatif.counts

    def outlook(self) -> Outlook:
        """Return what other memory or another policy would find, by the shadows so far.

        Any thread may ask. `Outlook.since` leaves out an earlier one.

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
        """The name of the policy that serves now; None for one without a name."""
        return self._whatif.policy

    @property
    def num_policy_changes(self) -> int | None:
        """Changes of the policy by "auto"; None with another `cache_policy`."""
        return self._whatif.num_changes

    @property
    def is_storing_paused(self) -> bool | None:
        """Whether stores are paused; None without `pause_unused_stores`."""
        return self._chooser.is_paused

    @property
    def in_transit(self) -> InTransit:
        """The blocks in flight now; any thread may ask, as for `stats`."""
        return InTransit(*self._stores.in_transit, *self._loads.in_transit)

    def has_pending_stores(self) -> bool:
        """Whether blocks are in flight to the host, or on to tiers below it.

        An engine without requests goes on stepping while there are.
        """
        return len(self._stores) > 0 or any(below.has_writes for below in self.below)

    def has_pending_loads(self) -> bool:
        """Whether blocks are in flight to the device, for any request."""
        return len(self._loads) > 0 or any(below.has_fetches for below in self.below)

    @property
    def is_storage_listed(self) -> bool:
        """Whether the store's content is known, except what others write since."""
        return all(boundary.tier.is_listed for boundary in self._storage)

    def num_fetched_tokens(self, request_id: str) -> int:
        """Return the tokens of a request's last fetch from the store.

        It is 0 if the request waited for none, or has finished.
        """
        nums = [below.num_fetched_tokens.get(request_id, 0) for below in self.below]
        return max(nums, default=0)

    def explain(
        self, request: Request, num_computed_tokens: int | None = None
    ) -> Explanation:
        """Return for each block of a request where it is or why not; nothing changes.

        If keys were rewritten since the request last asked, its next lookup first
        drops what it waits for below the host. The explanation does not foresee that.

        Args:
            request: A request, whether it is known or not.
            num_computed_tokens: Tokens found on the device, whole blocks; None to look
                for the device's own prefix.

        Raises:
            ValueError: That is no number of whole blocks; or it is None, and the bound
                pool is no `DeviceBlockPool`, which alone can be searched.
        """
        return explain(self._view, self._pool, request, num_computed_tokens)

    def snapshot(self) -> State:
        """Copy all that decisions depend on, also of the tiers and the device's pool.

        Returns:
            The state, as plain values. It refers to the engine's requests.

        Example:
            >>> from jaxkv import DeviceBlockPool, OffloadScheduler
            >>> scheduler = OffloadScheduler(16, num_host_blocks=4)
            >>> scheduler.bind_device_block_pool(DeviceBlockPool(8))
            >>> before = scheduler.snapshot()
            >>> before.entries["scheduler._loads.in_flight"].fields["moves"]
            {}
            >>> _ = scheduler.reset()
            >>> scheduler.restore(before)
            >>> scheduler.digest() == before.digest
            True
        """
        return snapshot(self, "scheduler")

    def digest(self) -> str:
        """Return a digest of `snapshot`; equal in all processes that decide alike."""
        return self.snapshot().digest

    def restore(self, state: State) -> None:
        """Go back to a state of this scheduler, or of one of the same configuration.

        The bound pool is put back, too. Files, recordings and measured times are not.

        Args:
            state: What `snapshot` returned. It refers to the engine's requests, which
                the engine must put back.

        Raises:
            ValueError: The state is of another configuration, or there is another pool
                than a `DeviceBlockPool`. Then nothing changes.
        """
        check_alike(self, state.entries, self._pool)
        restore(self, state)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Yield the events of the host tier and of those below since the last call."""
        yield from self._manager.take_events()
        for boundary in self.below:
            yield from boundary.tier.take_events()
