"""jaxkv's scheduler or vLLM 0.19.1's, by a switch.

`Vllm019Scheduler` has the hooks of `OffloadScheduler`. What it does wrong is listed at
the class; `tests/test_scheduler_known_faults.py` holds both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxkv.groups import GroupSpec
from jaxkv.scheduler import OffloadScheduler
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.vllm_019 import Vllm019Scheduler
from jaxkv.types import Policy

__all__ = ["Vllm019Scheduler", "make_scheduler"]


def make_scheduler(
    groups: int | GroupSpec | Sequence[GroupSpec],
    num_host_blocks: int,
    cache_policy: str | Policy = "lru",
    enable_events: bool = False,
    *,
    rules: OffloadRules | None = None,
    compat: Literal["vllm-0.19"] | None = None,
) -> OffloadScheduler | Vllm019Scheduler:
    """Make an offload scheduler, jaxkv's own or one that decides as vLLM did.

    Args:
        groups: See `OffloadScheduler`.
        num_host_blocks: Blocks of the host tier; vLLM's null block among them.
        cache_policy: See `OffloadScheduler`.
        enable_events: Whether to keep events for `take_events`.
        rules: How to store and load.
        compat: "vllm-0.19" for vLLM 0.19.1's decisions, None for jaxkv's.

    Raises:
        ValueError: If an argument is wrong, or vLLM 0.19.1 had no such choice.
    """
    if compat is None:
        return OffloadScheduler(
            groups, num_host_blocks, cache_policy, enable_events, rules=rules
        )
    if compat != "vllm-0.19":
        raise ValueError(f"{compat=} must be 'vllm-0.19' or None.")
    if cache_policy != "lru":
        raise ValueError(f"{cache_policy=} must be 'lru', for {compat=} has no other.")
    rules = rules or OffloadRules()
    known = OffloadRules(
        mode=rules.mode,
        max_num_batched_tokens=rules.max_num_batched_tokens,
        world_size=rules.world_size,
    )
    for field in dataclasses.fields(rules):
        value = getattr(rules, field.name)
        if value != getattr(known, field.name):
            raise ValueError(
                f"{field.name}={value} and {compat=} exclude one another: vLLM 0.19.1 "
                "had no such choice there."
            )
    return Vllm019Scheduler(
        groups,
        num_host_blocks,
        enable_events,
        mode=rules.mode,
        max_num_batched_tokens=rules.max_num_batched_tokens,
        world_size=rules.world_size,
    )
