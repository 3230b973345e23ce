"""Plan a host tier: what each size and policy finds on a trace, and which to take.

A replay says which tokens of each prompt the host holds beyond those that the device
holds anyway. With a model and the speeds of a server, that is time: a request saves the
prefill of these tokens less their load, or nothing where the load would take longer
(`OffloadRules.skip_slow_loads` declines it). Requests wait neither for one another nor
for the link. Where prefill takes longer than the trace lasts, it is taken for the
traffic of as many servers as that needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxkv.scheduling.whatif.outlook import ENOUGH as ENOUGH
from jaxkv.scheduling.whatif.speeds import Speeds
from jaxkv.tools.plan.accelerators import Accelerator
from jaxkv.tools.plan.model_costs import ModelCosts
from jaxkv.tools.replay.admission import Admission
from jaxkv.tools.replay.fleet import ONE_ENGINE, Fleet
from jaxkv.tools.replay.run import OPTIMUM, ReplayResult
from jaxkv.tools.replay.traces import Trace

WORTH = 0.01
"""Offloading pays from this share of the prefill time on."""

_BUSY_S = 60.0

Reason = Literal[
    "pays",
    "nothing returns",
    "device suffices",
    "too small",
    "cheap prefill",
    "slow loads",
    "slow stores",
]
"""Why offloading pays, or does not; see `recommend`."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """A model on a server, for the times of tokens."""

    model: ModelCosts
    speeds: Speeds
    sources: Mapping[str, str]  # Where each speed is from, by its field, for display
    num_devices: int = 1  # Devices that the model is divided among
    machine: Accelerator | None = None  # Each device; None if its speeds are given


@dataclasses.dataclass(frozen=True)
class Setting:
    """The inputs of a plan. Its sizes are in bytes, or in blocks without a timing."""

    trace: Trace
    timing: Timing | None = None  # None counts tokens only
    device_blocks: int | None = None  # Of its prefix cache; None if it keeps none
    notes: tuple[str, ...] = ()  # Further assumptions
    admission: Admission | None = None  # None keeps nothing out of the host tier
    fleet: Fleet = ONE_ENGINE  # The engines that share the requests, without a store
    price_per_hour: float | None = None  # Of a server; None leaves money out
    price_per_gib_month: float = 0.0  # Of host memory

    @property
    def block_size(self) -> int:
        if self.timing is None:
            return 1
        return self.trace.block_size * self.timing.model.kv_bytes_per_token

    def capacities_of(self, sizes: Sequence[int]) -> list[int]:
        """Return the blocks that fit each size, at most the trace's unique blocks."""
        num_unique = self.trace.num_unique_blocks
        return [min(size // self.block_size, num_unique) for size in sizes]


@dataclasses.dataclass(frozen=True)
class Demand:
    """The demand of a trace, independent of the host's size and policy."""

    num_requests: int
    input_tokens: int  # Tokens of all prompts
    device_tokens: int  # Tokens that the device's own prefix cache finds
    returning_tokens: int  # Tokens that an unlimited host tier would find beyond those
    prefill_s: float  # Of all that the device does not find; 0 without a timing
    span_s: float | None  # From the first request to the last; None without times
    num_engines: int = 1  # Engines that share the requests

    @property
    def num_servers(self) -> int:
        """Servers that the prefill takes, which each have a link; at least one each."""
        needed = 0.0 if self.span_s is None else self.prefill_s / self.span_s
        return max(self.num_engines, math.ceil(needed))


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The outcome of a size with a policy. Without a timing, times and bytes are 0."""

    policy: str
    size: int  # The size that was asked for, in bytes, or in blocks without a timing
    capacity_blocks: int  # The blocks that fit, at most the trace's unique blocks
    num_hit_blocks: int  # Prefix blocks found on device and host
    hit_tokens: int  # Prefix tokens found on device and host
    host_tokens: int  # Tokens found beyond what the device finds
    num_refused: int  # Requests whose store was refused
    requests_by_engine: tuple[int, ...]  # That each engine serves
    found_s: float = 0.0  # Seconds of prefill that the host's tokens would take
    num_loads: int = 0  # Requests that load
    num_declined: int = 0  # Requests whose load would take longer than to compute
    load_bytes: int = 0  # Bytes of all loads, on each device
    store_bytes: int = 0  # Bytes of all stores, on each device
    saved_s: float = 0.0  # Seconds of prefill saved, less the time of the loads
    saved_p50_s: float = 0.0  # The median of the requests, also those that save nothing
    saved_p95_s: float = 0.0
    saved_max_s: float = 0.0
    # Shares of the time that a server's link loads and stores; None without times.
    # Above 1, it cannot keep up with the stores.
    load_use: float | None = None
    store_use: float | None = None
    peak_store_use: float | None = None  # In the busiest minute

    @property
    def is_eligible(self) -> bool:
        """Whether it may be recommended: a policy whose stores the link carries."""
        return self.policy != OPTIMUM and (self.store_use or 0.0) <= 1


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The recommended row, and its neighbours in size."""

    reason: Reason
    row: PlanRow | None = None  # What to take; None if offloading does not pay
    smaller: PlanRow | None = None  # The best row of the next smaller size
    larger: PlanRow | None = None  # The best row of the next larger size

    @property
    def pays(self) -> bool:
        return self.row is not None


@dataclasses.dataclass(frozen=True)
class StoreRow:
    """The gain from a store of one size that all engines share."""

    size: int  # The size that was asked for, as `PlanRow.size`
    storage_blocks: int  # The blocks that fit, at most the trace's unique blocks
    base: PlanRow  # What there is without it
    added_tokens: int  # Tokens found beyond that
    added_s: float  # Seconds saved beyond that, without the time of the store's reads
    num_fetched_blocks: int  # Blocks read from the store
    fetch_bytes: int  # Their bytes, of all devices together

    @property
    def least_bytes_per_s(self) -> float | None:
        """Below this rate, reads take longer than they save; None if none saves."""
        return self.fetch_bytes / self.added_s if self.added_s > 0 else None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan."""

    demand: Demand  # What is asked for
    rows: tuple[PlanRow, ...]  # The first policy at every size, then the next
    recommendation: Recommendation | None = None  # What to do; None without a timing
    stores: tuple[StoreRow, ...] = ()  # Their gain over `base`, the smallest first

    @property
    def base(self) -> PlanRow:
        """The recommended row, or the one that saves and finds most."""
        if self.recommendation is not None and self.recommendation.row is not None:
            return self.recommendation.row
        rows = (row for row in self.rows if row.policy != OPTIMUM)
        return max(rows, key=lambda row: (row.saved_s, row.host_tokens))


def make_plan(
    setting: Setting, sizes: Sequence[int], results: Sequence[ReplayResult]
) -> Plan:
    trace, timing = setting.trace, setting.timing
    start = _device_tokens(trace, results[0])
    returning = trace.tokens_of(find_returning(trace))
    prefill_s = 0.0
    if timing is not None:
        whole = timing.speeds.prefill_s(timing.model, start, trace.input_tokens)
        prefill_s = float(whole.sum())
    span_s = float(trace.time_ms.max() - trace.time_ms.min()) / 1000
    demand = Demand(
        num_requests=trace.num_requests,
        input_tokens=int(trace.input_tokens.sum()),
        device_tokens=int(start.sum()),
        returning_tokens=int(np.maximum(returning - start, 0).sum()),
        prefill_s=prefill_s,
        span_s=span_s or None,
        num_engines=results[0].fleet.num_engines,
    )
    by_capacity = {(r.policy, r.capacity_blocks): r for r in results}
    capacities = setting.capacities_of(sizes)
    rows = [
        _plan_row(setting, demand, start, by_capacity[policy, capacity], size)
        for policy in dict.fromkeys(result.policy for result in results)
        for size, capacity in zip(sizes, capacities, strict=True)
    ]
    choice = None if timing is None else recommend(demand, rows)
    return Plan(demand, tuple(rows), choice)


def add_stores(
    setting: Setting,
    plan: Plan,
    without: ReplayResult,
    sizes: Sequence[int],
    results: Sequence[ReplayResult],
) -> Plan:
    trace, base, rows = setting.trace, plan.base, []
    start = _device_tokens(trace, without)
    by_size = {result.fleet.storage_blocks: result for result in results}
    for size, num_blocks in zip(sizes, setting.capacities_of(sizes), strict=True):
        result = by_size[num_blocks]
        row = _plan_row(setting, plan.demand, start, result, base.size)
        num_fetched = int(result.fetches_by_request.sum())
        gain = row.host_tokens - base.host_tokens, row.saved_s - base.saved_s
        fetched = num_fetched, num_fetched * setting.block_size
        rows.append(StoreRow(size, num_blocks, base, *gain, *fetched))
    return dataclasses.replace(plan, stores=tuple(rows))


def _device_tokens(trace: Trace, result: ReplayResult) -> NDArray[np.int64]:
    if result.device is None:
        return np.zeros(trace.num_requests, np.int64)
    return trace.tokens_of(result.device.hits)


def find_returning(trace: Trace) -> NDArray[np.int64]:
    """Return how many blocks a cache without end would find of each prompt: i64[R]."""
    # Ids are numbered by first appearance, so what is new is above all before it. All
    # that follows a new block in a prompt is at least absent from the prefix.
    highest = np.maximum.accumulate(np.concatenate([[-1], trace.ids]))[:-1]
    request = np.repeat(np.arange(trace.num_requests), trace.num_blocks)
    # A request's own blocks are not there before it.
    before = highest[trace.offsets[:-1].clip(max=len(highest) - 1)]
    is_new = trace.ids > before[request]
    position = np.arange(len(trace.ids)) - trace.offsets[request]
    hits = trace.num_asked.copy()
    np.minimum.at(hits, request[is_new], position[is_new])
    return hits


def recommend(demand: Demand, rows: Sequence[PlanRow]) -> Recommendation:
    """Choose a size and a policy, or say why offloading does not pay.

    1. Rows whose stores the link cannot carry are left out, and the optimum.
    2. If none saves at least `WORTH` of the prefill time, offloading does not pay. The
       reason is the first that holds: "nothing returns", less than `WORTH` of the
       tokens are asked for again; "device suffices", less than that beyond what the
       device finds; "too small", no size finds that many; "cheap prefill", computing
       what is found takes less than `WORTH` of the prefill time, so that no load
       bandwidth would be enough; "slow stores", a row that was left out would save
       enough; else "slow loads".
    3. Else take the smallest size where a policy saves at least `ENOUGH` of the best
       row's saving.
    4. Take the policy that saves most there; of equals, the one that saves most at the
       next smaller size, and so on. No row of this size or a smaller one saves more.
    """
    kept = [row for row in rows if row.is_eligible]
    best = max((row.saved_s for row in kept), default=0.0)
    if not best or best < WORTH * demand.prefill_s:
        return Recommendation(_why_not(demand, rows))
    saved_s = {(row.policy, row.size): row.saved_s for row in kept}
    sizes = sorted({row.size for row in kept})

    def best_at(place: int) -> PlanRow | None:
        if not 0 <= place < len(sizes):
            return None
        return max(
            (row for row in kept if row.size == sizes[place]),
            key=lambda row: [
                saved_s.get((row.policy, size), 0.0) for size in sizes[place::-1]
            ],
        )

    at = next(
        place
        for place, size in enumerate(sizes)
        if max(r.saved_s for r in kept if r.size == size) >= ENOUGH * best
    )
    return Recommendation("pays", best_at(at), best_at(at - 1), best_at(at + 1))


def _why_not(demand: Demand, rows: Sequence[PlanRow]) -> Reason:
    min_tokens, min_s = WORTH * demand.input_tokens, WORTH * demand.prefill_s
    rows = [row for row in rows if row.policy != OPTIMUM]
    if demand.device_tokens + demand.returning_tokens < min_tokens:
        return "nothing returns"
    if demand.returning_tokens < min_tokens:
        return "device suffices"
    if max(row.host_tokens for row in rows) < min_tokens:
        return "too small"
    if max(row.found_s for row in rows) < min_s:
        return "cheap prefill"
    if max(row.saved_s for row in rows) >= min_s > 0:
        return "slow stores"
    return "slow loads"


def _plan_row(
    setting: Setting,
    demand: Demand,
    usual: NDArray[np.int64],
    result: ReplayResult,
    size: int,
) -> PlanRow:
    """Compute a row; i64[R] tokens are `usual` found on the device without a host."""
    trace, timing = setting.trace, setting.timing
    start = _device_tokens(trace, result)
    stop = np.maximum(trace.tokens_of(result.hits_by_request), start)
    row = PlanRow(
        policy=result.policy,
        size=size,
        capacity_blocks=result.capacity_blocks,
        num_hit_blocks=result.num_hit_blocks,
        hit_tokens=result.hit_tokens,
        host_tokens=int((stop - usual).sum()),
        num_refused=result.num_refused,
        requests_by_engine=tuple(
            np.bincount(result.engines, minlength=demand.num_engines).tolist()
        ),
    )
    if timing is None:
        return row
    model, speeds = timing.model, timing.speeds
    # The last token of a prompt is computed in any case.
    end = np.maximum(np.minimum(stop, trace.input_tokens - 1), start)
    load_bytes = model.load_bytes(start, end, timing.num_devices)
    prefill_s = speeds.prefill_s(model, start, end)
    saved_s = speeds.saved_s(prefill_s, load_bytes)
    if (start != usual).any():  # The route depends on the hosts' blocks.
        saved_s = saved_s + speeds.prefill_s(model, usual, start)
    is_found = end > start
    is_loaded = is_found & (speeds.load_s(load_bytes) <= prefill_s)
    token_bytes = model.kv_bytes_per_token_on(timing.num_devices)
    stored_bytes = result.stores_by_request * trace.block_size * token_bytes
    p50_s, p95_s = np.percentile(saved_s, [50, 95], method="inverted_cdf")
    row = dataclasses.replace(
        row,
        found_s=float(prefill_s.sum()),
        num_loads=int(is_loaded.sum()),
        num_declined=int((is_found & ~is_loaded).sum()),
        load_bytes=int(load_bytes[is_loaded].sum()),
        store_bytes=int(stored_bytes.sum()),
        saved_s=float(saved_s.sum()),
        saved_p50_s=float(p50_s),
        saved_p95_s=float(p95_s),
        saved_max_s=float(saved_s.max()),
    )
    if demand.span_s is None:
        return row
    load_rate = speeds.load_bytes_per_s * demand.num_servers
    store_rate = speeds.store_bytes_per_s * demand.num_servers
    busy_s = min(_BUSY_S, demand.span_s)
    time_s = (trace.time_ms - trace.time_ms.min()) / 1000
    in_slice = np.bincount((time_s // busy_s).astype(np.int64), stored_bytes)
    return dataclasses.replace(
        row,
        load_use=row.load_bytes / load_rate / demand.span_s,
        store_use=row.store_bytes / store_rate / demand.span_s,
        peak_store_use=float(in_slice.max()) / store_rate / busy_s,
    )
