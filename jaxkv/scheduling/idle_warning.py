"""Warns of an engine that never offers a block to the host."""

from __future__ import annotations

import logging

from jaxkv.scheduling.listening import End, Listener, Listeners
from jaxkv.scheduling.requests import Requests
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import GroupSpec
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex

_MANY_REQUESTS = 100
_LOG = logging.getLogger(__name__)


class IdleWarning(Listener):
    """Warns if nothing was offered after `_MANY_REQUESTS`, and stops listening."""

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        rules: OffloadRules,
        stats: OffloadStats,
        host: BlockIndex,
        requests: Requests,
    ) -> None:
        self._stats, self._host, self._requests = stats, host, requests
        self._is_lazy = rules.mode == "lazy"
        block_size = min(spec.block_size for spec in groups)
        self._min_tokens = rules.blocks_per_host_block * block_size
        self._num_finished = 0
        self._pool: object = None
        self.listeners = Listeners()  # Those that it leaves after the check.

    def bound(self, pool: object) -> None:
        """Keep the pool for the check."""
        self._pool = pool

    def finished(self, end: End) -> None:
        """Count a request with a block to store; check after `_MANY_REQUESTS`."""
        if min(self._requests.check_stores(end.request)) < self._min_tokens:
            return
        self._num_finished += 1
        if self._num_finished < _MANY_REQUESTS:
            return
        self.listeners.remove(self)
        stats, pool = self._stats, self._pool
        is_idle = not (stats.num_offered or self._host.num_skipped or stats.num_loads)
        if self._is_lazy:
            # The device may have had room for all blocks so far.
            is_idle &= (
                isinstance(pool, DeviceBlockPool) and not pool.state.has_key.any()
            )
        if is_idle:
            _LOG.warning(
                "%d requests with full blocks have finished, but no block was offered "
                "to the host. Call update_state_after_alloc() for each request, name "
                "it in SchedulerOutput.num_scheduled_tokens in each step that computes "
                "it, and pass its full blocks to DeviceBlockPool.cache(). Set "
                "JAXKV_STRICT=1 to find the missing call.",
                _MANY_REQUESTS,
            )
