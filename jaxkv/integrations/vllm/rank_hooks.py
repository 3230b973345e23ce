"""Hooks into tpu-inference's `DPScheduler`.

Each rank is a process with a vLLM scheduler and a connector. `DPScheduler` routes a
new request to the rank with the fewest tokens to compute, but counts the whole prompts
of waiting requests and ignores host hits. It stops stepping once no rank has a request,
and drops the statistics of connectors.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxkv.integrations.vllm.stats import OffloadConnectorStats
from jaxkv.integrations.vllm.worker import WORKERS

_LOG = logging.getLogger("jaxkv")

# tpu-inference's function that probes a rank's prefix cache to route a request.
_PROBE = "_scheduler_worker_process"

# The weight of a hit token relative to a backlog token: a hit is worth more, because
# later requests of the user return to its rank, while a backlog is computed once.
_HIT_WEIGHT = 8


def count_host_hits(
    kv_cache_manager: Any, count: Callable[[Sequence[bytes], int, int], int]
) -> None:
    """Include a rank's host hits when tpu-inference routes a request.

    vLLM calls the same function to allocate blocks, so only tpu-inference's call gets
    the larger count. `count` takes a request's block hashes, the maximum number of
    tokens and the tokens on the device; it returns the tokens on device and host.
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


class Backlog:
    """The prompt tokens that each rank still has to compute."""

    def __init__(self, num_ranks: int, max_requests: int) -> None:
        self._num_ranks = num_ranks
        self._max_requests = max_requests  # Running requests per rank
        # By request: its rank, and its tokens that are not computed yet.
        self._left: dict[str, tuple[int, int]] = {}
        self._num_routed = [0] * num_ranks

    def route(
        self, request_id: str, num_tokens: int, hits: Sequence[int], ranks: Counter[int]
    ) -> int:
        """Choose the rank with the lowest backlog minus weighted hits.

        A full rank is chosen only if all are full. Ties are broken round-robin, so that
        every rank's host tier fills.

        `hits` has the request's hit tokens per rank; `ranks` counts requests per rank.
        """
        loads: Counter[int] = Counter()
        for rank, num_left in self._left.values():
            loads[rank] += num_left

        def cost(rank: int) -> tuple[bool, int, int, int]:
            num, load = ranks[rank], loads[rank] - _HIT_WEIGHT * hits[rank]
            return num >= self._max_requests, load, num, self._num_routed[rank]

        best = min(range(self._num_ranks), key=cost)
        self._num_routed[best] += 1
        self._left[request_id] = best, num_tokens - hits[best]
        return best

    def record_step(
        self, num_tokens: Mapping[str, int], finished: Iterable[str]
    ) -> None:
        """Subtract the tokens that a step computes; drop finished requests."""
        for name in self._left.keys() & num_tokens.keys():
            rank, num_left = self._left.pop(name)
            if num_left > num_tokens[name]:
                self._left[name] = rank, num_left - num_tokens[name]
        for name in finished:
            self._left.pop(name, None)


def route_by_backlog() -> None:
    """Route requests by a `Backlog`, which excludes the hits of waiting requests.

    tpu-inference counts their whole prompts: if several users return to one rank at
    once, it sends half of them elsewhere. ImportError without tpu-inference,
    AttributeError if its scheduler has a different API.
    """
    from tpu_inference.core.sched import dp_scheduler

    ranked = dp_scheduler.DPScheduler
    probe = dp_scheduler.SchedulerCommand.PROBE_COMPUTED_BLOCKS
    find, schedule = ranked._find_best_rank_for_request, ranked.schedule
    if hasattr(find, "__wrapped__"):
        return  # An earlier engine of this process has installed it.

    def backlog_of(scheduler: Any) -> Backlog:
        backlog: Backlog | None = vars(scheduler).get("jaxkv_backlog")
        if backlog is None:
            max_requests = scheduler.vllm_config.scheduler_config.max_num_seqs
            backlog = Backlog(scheduler.dp_size, max_requests)
            scheduler.jaxkv_backlog = backlog
        return backlog

    @functools.wraps(find)
    def find_rank(scheduler: Any, request: Any) -> int:
        ranks = range(scheduler.dp_size)
        for rank in ranks:
            scheduler._send_command(rank, probe, request)
        hits = [scheduler._get_result(rank, probe) for rank in ranks]
        return backlog_of(scheduler).route(
            request.request_id,
            request.num_tokens,
            hits,
            Counter(scheduler.assigned_dp_rank.values()),
        )

    @functools.wraps(schedule)
    def schedule_and_record(scheduler: Any, *args: Any, **named: Any) -> Any:
        output = schedule(scheduler, *args, **named)
        backlog_of(scheduler).record_step(
            output.num_scheduled_tokens, output.finished_req_ids
        )
        return output

    ranked._find_best_rank_for_request = find_rank
    ranked.schedule = schedule_and_record


def step_while_idle() -> None:
    """Keep a rank's scheduler stepping until its connector has nothing in flight.

    ImportError if vLLM lacks this scheduler.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    has_finished = Scheduler.has_finished_requests

    @functools.wraps(has_finished)
    def has_finished_requests(scheduler: Any) -> bool:
        if has_finished(scheduler):
            return True
        return bool(scheduler.connector and scheduler.connector.has_pending_push_work())

    Scheduler.has_finished_requests = has_finished_requests


def pass_on_stats() -> None:
    """Forward the statistics of all ranks and of the worker to vLLM.

    ImportError without tpu-inference.
    """
    from tpu_inference.core.sched import dp_scheduler

    combine = dp_scheduler.DPScheduler._combine_scheduler_stats
    if hasattr(combine, "__wrapped__"):
        return  # An earlier engine of this process has installed it.

    @functools.wraps(combine)
    def combine_with_connectors(scheduler: Any, rank_stats: Sequence[Any]) -> Any:
        combined = combine(scheduler, rank_stats)
        if combined is None:
            return None
        last = vars(scheduler).setdefault("jaxkv_gauges", {})
        reports = (getattr(rank, "kv_connector_stats", None) for rank in rank_stats)
        stats = sum_of_ranks(reports, last)
        worker = WORKERS.get(str(scheduler.vllm_config.kv_transfer_config.engine_id))
        worker_stats = worker.take_stats() if worker is not None else None
        if worker_stats is not None:
            stats.aggregate(worker_stats)
        if not stats.is_empty():
            combined.kv_connector_stats = stats.to_dict()
        return combined

    dp_scheduler.DPScheduler._combine_scheduler_stats = combine_with_connectors


def sum_of_ranks(
    reports: Iterable[Mapping[str, Any] | None], last: dict[str, Any]
) -> OffloadConnectorStats:
    """Sum the reports of all ranks; `last` keeps gauges, reported on change only."""
    stats = OffloadConnectorStats()
    for rank, report in enumerate(reports):
        if not report:
            continue
        for name, by_label in report["gauges"].items():
            gauge = last.setdefault(name, {})
            for label, by_part in by_label.items():
                gauge.setdefault(label, {})[str(rank)] = by_part[""]
            stats.data["gauges"][name] = copy.deepcopy(gauge)
        stats.aggregate(OffloadConnectorStats({**report, "gauges": {}}))
    return stats
