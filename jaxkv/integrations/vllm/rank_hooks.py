"""Hooks for what tpu-inference's `DPScheduler` does not ask of connectors.

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
    """Include a rank's host hits when tpu-inference routes a request.

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
        hit = find(block_hashes, max_tokens, *args, **named)
        if sys._getframe(1).f_code.co_name != _PROBE:
            return hit
        blocks, num_tokens, *rest = hit
        return (blocks, count(block_hashes, max_tokens, num_tokens), *rest)

    coordinator.find_longest_cache_hit = find_for  # type: ignore[union-attr]


def step_while_idle() -> None:
    """Keep a rank's scheduler stepping until its connector has nothing in flight.

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
    """Pass the statistics of all ranks and of the worker to vLLM.

    `take_stats` returns the worker's for vLLM's id of the engine. ImportError without
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
        reports = (getattr(rank, "kv_connector_stats", None) for rank in rank_stats)
        stats = sum_of_ranks(reports, last)
        worker_stats = take_stats(str(engine_id))
        if worker_stats is not None:
            stats.aggregate(worker_stats)
        if not stats.is_empty():
            combined.kv_connector_stats = stats.to_dict()
        return combined

    dp_scheduler.DPScheduler._combine_scheduler_stats = combine_with_connectors


def sum_of_ranks(
    reports: Iterable[Mapping[str, Any] | None], last: dict[int, dict[str, Any]]
) -> OffloadConnectorStats:
    """Add up the reports of all ranks.

    A rank reports a gauge only when it changes: `last` keeps each rank's gauges.
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
    values = {
        label: [gauge[label] for gauge in ranks if label in gauge] for label in labels
    }
    if is_flag:
        return {label: max(numbers) for label, numbers in values.items()}
    share = 1 / len(ranks) if name.endswith("_perc") else 1
    return {label: sum(numbers) * share for label, numbers in values.items()}
