"""Compiles beforehand what scheduling will call."""

from __future__ import annotations

from jaxkv import programs, search
from jaxkv.blocks import DeviceBlockPool
from jaxkv.groups import GroupSpec, lazy_target_blocks
from jaxkv.host_tier import HostTier
from jaxkv.scheduling.rules import OffloadRules

_PROGRAMS = (
    programs.CONTAINS,
    programs.TOUCH,
    programs.REORDER,
    programs.PREPARE_STORE,
    programs.COMPLETE_STORE,
)


def warm_up(
    groups: tuple[GroupSpec, ...],
    rules: OffloadRules,
    host: HostTier,
    pool: DeviceBlockPool,
    max_blocks_per_request: int,
    max_blocks_per_step: int,
) -> None:
    """Compile the decisions about both tiers; see `OffloadScheduler.warm_up`.

    Args:
        groups: The groups of the model's layers.
        rules: How to store and load.
        host: The host tier.
        pool: The device's.
        max_blocks_per_request: Most blocks that a request will have in a group.
        max_blocks_per_step: Most blocks that the requests of a step will store
            together, if that is more.
    """
    if rules.mode == "lazy":
        target = lazy_target_blocks(groups, rules.max_num_batched_tokens)
        max_blocks_per_request = max(max_blocks_per_request, target)
    most = max(max_blocks_per_request, max_blocks_per_step)
    host.warm_up(most, which=_PROGRAMS)
    pool.warm_up(most)
    if rules.mode == "lazy":
        pool.next_free(target)
    factor = rules.blocks_per_host_block
    searched = pool if rules.copy_on_device else None
    search.warm_up(groups, searched, host, factor, max_blocks_per_request)
