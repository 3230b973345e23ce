"""What tpu-inference's `DPScheduler` does not ask connectors, put in its place.

Its ranks are processes that each have a vLLM scheduler with a connector. It gives a new
request to the rank that has the least to compute for it, by the device's prefix caches;
stops stepping when no rank has a request; and drops the statistics of connectors.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from jaxkv.integrations.vllm.stats import FAMILIES, OffloadConnectorStats

_LOG = logging.getLogger("jaxkv")

# The function of tpu-inference that asks for a rank's prefix cache to route a request.
_PROBE = "_scheduler_worker_process"


def count_host_hits(
    kv_cache_manager: Any, count: Callable[[Sequence[bytes], int, int], int]
) -> None:
    """Let a rank count what its host tier has, too, when a request is routed.

    Returning users then go where their KV is. vLLM asks the same function for the
    blocks that a request gets: only tpu-inference's question has another answer.

    `count` gets a request's block hashes, the most tokens, and those that the device
    has; it returns those that can be had.
    """
    coordinator = getattr(kv_cache_manager, "coordinator", None)
    find = getattr(coordinator, "find_longest_cache_hit", None)
    if find is None:
        _LOG.warning(
            "requests are routed by the device's prefix caches alone: this vLLM has no "
            "kv_cache_manager.coordinator.find_longest_cache_hit()"
        )
        return

    @functools.wraps(find)
    def find_for(block_hashes: Any, max_tokens: int, *args: Any, **named: Any) -> Any:
        found = find(block_hashes, max_tokens, *args, **named)
        if sys._getframe(1).f_code.co_name != _PROBE:
            return found
        blocks, num_tokens, *rest = found
        return (blocks, count(block_hashes, max_tokens, num_tokens), *rest)

    coordinator.find_longest_cache_hit = find_for  # type: ignore[union-attr]


def step_while_idle() -> None:
    """Let a rank's scheduler be stepped until its connector has nothing in flight.

    ImportError if vLLM has no such scheduler.
    """
    from vllm.v1.core.sched.scheduler import (  # type: ignore[import-not-found]
        Scheduler,
    )

    has_finished = Scheduler.has_finished_requests

    @functools.wraps(has_finished)
    def has_finished_requests(scheduler: Any) -> bool:
        if has_finished(scheduler):
            return True
        return bool(scheduler.connector and scheduler.connector.has_pending_push_work())

    Scheduler.has_finished_requests = has_finished_requests


def pass_on_stats(take_stats: Callable[[str], OffloadConnectorStats | None]) -> None:
    """Let the statistics of all ranks reach vLLM, with those of the worker.

    `take_stats` returns the worker's, by vLLM's id of the engine. ImportError without
    tpu-inference.
    """
    from tpu_inference.core.sched import (  # type: ignore[import-not-found]
        dp_scheduler,
    )

    combine = dp_scheduler.DPScheduler._combine_scheduler_stats
    if hasattr(combine, "__wrapped__"):
        return  # For an earlier engine in this process.

    @functools.wraps(combine)
    def combine_with_connectors(scheduler: Any, rank_stats: Sequence[Any]) -> Any:
        combined = combine(scheduler, rank_stats)
        if combined is None:
            return None
        last = vars(scheduler).setdefault("jaxkv_gauges", {})
        engine_id = scheduler.vllm_config.kv_transfer_config.engine_id
        stats = sum_of_ranks(
            (getattr(own, "kv_connector_stats", None) for own in rank_stats), last
        )
        own = take_stats(str(engine_id))
        if own is not None:
            stats.aggregate(own)
        if not stats.is_empty():
            combined.kv_connector_stats = stats.to_dict()
        return combined

    dp_scheduler.DPScheduler._combine_scheduler_stats = combine_with_connectors


def sum_of_ranks(
    reports: Iterable[Mapping[str, Any] | None], last: dict[int, dict[str, Any]]
) -> OffloadConnectorStats:
    """Add up the reports of all ranks.

    A rank reports a gauge when it changes: `last` keeps those of each, to add up.
    """
    stats = OffloadConnectorStats()
    changed: set[str] = set()
    for rank, report in enumerate(reports):
        if report:
            gauges = last.setdefault(rank, {})
            for name, values in report["gauges"].items():
                gauges.setdefault(name, {}).update(values)
                changed.add(name)
            stats.aggregate(OffloadConnectorStats({**report, "gauges": {}}))
    for name in changed:
        values = [gauges[name] for gauges in last.values() if name in gauges]
        stats.data["gauges"][name] = _combined(name, values)
    return stats


def _combined(name: str, ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine a gauge of several ranks: the mean of shares, the largest flag, a sum."""
    is_flag = name == "jaxkv:kv_offload_stores_paused" or FAMILIES[name].label
    labels = dict.fromkeys(chain.from_iterable(ranks))
    values = {label: [own[label] for own in ranks if label in own] for label in labels}
    if is_flag:
        return {label: max(own) for label, own in values.items()}
    share = 1 / len(ranks) if name.endswith("_perc") else 1
    return {label: sum(own) * share for label, own in values.items()}
