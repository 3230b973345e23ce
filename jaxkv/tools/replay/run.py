"""Replay a trace against a cache policy: how much of each prefix would be found.

`jaxkv.tools.replay.serve` serves a request; the next one follows. A request whose store
is refused stores nothing and does not touch again. A request with more blocks than the
cache uses only the first that fit, but all count.

With a device in front, requests are served as `jaxkv.tools.replay.device` says. With an
`Admission`, what it keeps out is not stored. With a `Fleet`, each engine has a cache of
its own, and perhaps a device; `jaxkv.tools.replay.fleet` says who serves a request, and
what a store behind them adds.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies import PolicyMaker, get_policy_maker
from jaxkv.policies.registry import AUTO
from jaxkv.tiers.executors import Executor, Words, make_executor
from jaxkv.tools.replay.admission import (
    Admission,
    Admitted,
    AskedGate,
    find_admitted,
)
from jaxkv.tools.replay.auto import AutoHost
from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import (
    DeviceCache,
    DeviceHits,
    find_on_device,
    fit_device,
)
from jaxkv.tools.replay.fleet import ONE_ENGINE, Fleet, SharedStore, choose_engines
from jaxkv.tools.replay.serve import Facts, OnDevice, Request, serve
from jaxkv.tools.replay.traces import OnCount, Trace, keys_of

OPTIMUM = "optimum"
"""The name of Belady's rule (`jaxkv.tools.replay.belady`) among the policies."""

STORE_ALONE = "store alone"
"""The name of no host at all, but the shared store, among the policies."""


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """The hits of a policy at a capacity. Arrays are i64[R] and read-only."""

    policy: str
    capacity_blocks: int
    num_requests: int
    num_block_refs: int  # blocks that the requests asked for
    num_hit_blocks: int  # prefix blocks found, on the device or the host
    input_tokens: int
    hit_tokens: int
    num_refused: int  # requests with a refused store
    compile_s: float = dataclasses.field(compare=False)
    wall_s: float = dataclasses.field(compare=False)  # without compilation
    hits_by_request: NDArray[np.int64] = dataclasses.field(compare=False, repr=False)
    # 0 for the optimum.
    stores_by_request: NDArray[np.int64] = dataclasses.field(compare=False, repr=False)
    # Blocks that came from the store to a host.
    fetches_by_request: NDArray[np.int64] = dataclasses.field(compare=False, repr=False)
    # The device's share of the hits; None without one.
    device: DeviceHits | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    fleet: Fleet = ONE_ENGINE
    # The engine that served each request; None if there is one engine.
    engines: NDArray[np.int64] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def block_hit_ratio(self) -> float:
        """Share of the requested blocks that were found."""
        return self.num_hit_blocks / self.num_block_refs

    @property
    def token_hit_ratio(self) -> float:
        """Share of the requested tokens that were found."""
        return self.hit_tokens / self.input_tokens


def replay(
    policy: str | PolicyMaker,
    trace: Trace,
    capacity_blocks: int,
    on_progress: OnCount = lambda done, total: None,
    device: DeviceHits | None = None,
    admitted: Admitted | None = None,
    fleet: Fleet = ONE_ENGINE,
) -> ReplayResult:
    """Replay a trace against one policy at one capacity, in blocks of each engine.

    `policy` is a registered name, `OPTIMUM`, "auto", `STORE_ALONE` or a maker of
    policies. `device` is what a device in front finds; of several engines, only its
    size and what takes part count (`fit_device`). `OPTIMUM` stores all blocks, whatever
    is `admitted`, and is for one engine without a store; `STORE_ALONE` needs a store.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> trace = make_trace("three", [[1, 2], [1, 3], [1, 2]])
    >>> result = replay("lru", trace, capacity_blocks=2)
    >>> result.num_hit_blocks, result.num_block_refs
    (2, 6)
    """
    if capacity_blocks < 1:
        raise ValueError(f"{capacity_blocks=} must be at least 1.")
    name = _check_name(policy)
    if policy == OPTIMUM and fleet != ONE_ENGINE:
        raise ValueError(f"{OPTIMUM!r} is for one engine without a store.")
    if policy == STORE_ALONE and not fleet.storage_blocks:
        raise ValueError(f"{STORE_ALONE!r} needs storage_blocks of at least 1.")
    begun_s = ready_s = time.perf_counter()
    if policy == OPTIMUM:
        num_hits = find_optimum(trace, capacity_blocks, on_progress, device)
        stores, fetches, engine_of = np.zeros((3, trace.num_requests), np.int64)
        served = _Served(num_hits, stores, fetches, engine_of, 0)
    else:
        blocks = fleet.storage_blocks if policy == STORE_ALONE else capacity_blocks
        largest = int(trace.num_blocks.max(initial=1))
        # Without a device, a request uses no more blocks than fit the cache.
        max_keys = blocks if device is None else device.num_blocks
        max_batch = max(min(largest, max_keys), 2)
        store = None
        if fleet.storage_blocks:
            store = SharedStore(fleet.storage_blocks, max_batch)
        first = None if device is None else OnDevice(0, 1, 1)
        engines = _make_engines(policy, trace, blocks, max_batch, fleet, store, first)
        if len(engines) > 1:
            if device is not None:
                no_hits = np.zeros(trace.num_requests, np.int64)
                device = dataclasses.replace(device, hits=no_hits)
                for engine in engines:
                    engine.device = DeviceCache(trace, device)
            if admitted is not None and admitted.make_gate is not None:
                for engine in engines:
                    engine.gate = admitted.make_gate()
        if policy == STORE_ALONE:
            store = None  # They use it directly.
        ready_s = time.perf_counter()
        served = _serve_all(
            trace, engines, blocks, device, admitted, fleet, store, on_progress
        )
    for counts in served[:4]:
        counts.flags.writeable = False
    has_both = fleet.storage_blocks and policy != STORE_ALONE
    return ReplayResult(
        policy=f"{name} + store" if has_both else name,
        capacity_blocks=capacity_blocks,
        num_requests=trace.num_requests,
        num_block_refs=trace.num_block_refs,
        num_hit_blocks=int(served.hits.sum()),
        input_tokens=int(trace.input_tokens.sum()),
        hit_tokens=int(trace.tokens_of(served.hits).sum()),
        num_refused=served.num_refused,
        compile_s=ready_s - begun_s,
        wall_s=time.perf_counter() - ready_s,
        hits_by_request=served.hits,
        stores_by_request=served.stores,
        fetches_by_request=served.fetches,
        device=device,
        fleet=fleet,
        engines=served.engines if fleet.num_engines > 1 else None,
    )


class _Served(NamedTuple):
    """The outcome of the requests: i64[R] each."""

    hits: NDArray[np.int64]
    stores: NDArray[np.int64]
    fetches: NDArray[np.int64]  # from the store
    engines: NDArray[np.int64]
    num_refused: int


def _serve_all(
    trace: Trace,
    engines: list[_Engine],
    capacity_blocks: int,
    device: DeviceHits | None,
    admitted: Admitted | None,
    fleet: Fleet,
    store: SharedStore | None,
    on_progress: OnCount,
) -> _Served:
    """Serve all requests, one after the other."""
    hits, stores, fetches, served_by = np.zeros((4, trace.num_requests), np.int64)
    num_refused, num_served = 0, [0] * len(engines)
    used, num_asked = np.minimum(trace.num_blocks, capacity_blocks), trace.num_asked
    if device is not None:
        used = device.usable
    routed = choose_engines(trace, fleet)
    on_arrival = None if store is None else store.write
    for number in trace.requests(on_progress):
        ids = trace.blocks_of(number)[: used[number]]
        asked_here = min(int(num_asked[number]), len(ids))
        findable = asked_here if device is None else int(device.findable[number])
        if routed is not None:
            chosen = int(routed[number])
        else:
            lengths = [engine.find(number, ids[:findable]) for engine in engines]
            chosen = min(
                range(len(engines)), key=lambda e: (-lengths[e], num_served[e], e)
            )
            num_served[chosen] += 1
        served_by[number] = chosen
        engine = engines[chosen]
        executor, keys = engine.executor, engine.keys_of(ids)
        facts, part = _facts_of(trace, number), None
        if device is not None:
            if engine.device is not None:
                device.hits[number] = engine.device.serve(number)
            running = int(device.running[number])
            part = OnDevice(int(device.hits[number]), findable, running)
        request = Request(keys, asked_here, facts if engine.listens else None, part)
        if admitted is not None:
            start = trace.offsets[number]
            passes = admitted.passes[start : start + len(ids)]
            if engine.gate is not None:
                passes = np.array(engine.gate.note(number)[: len(ids)], np.bool_)
            limit = int(admitted.limits[number])
            request = request._replace(passes=passes, limit=limit)
        if store is not None:
            missing = keys[part.num_found if part else 0 : findable]
            max_fetched = max(capacity_blocks // 2, 1)
            fetches[number] = store.fetch(executor, missing, max_fetched)
            store.touch(keys[:asked_here])
        hits[number], stores[number], is_refused = serve(executor, request, on_arrival)
        if engine.auto is not None:
            engine.auto.note(request, facts)
            engine.executor = engine.auto.executor
        num_refused += is_refused
    if device is not None:
        device.hits.flags.writeable = False
    return _Served(hits, stores, fetches, served_by, num_refused)


def sweep(
    trace: Trace,
    policies: Iterable[str | PolicyMaker],
    capacities: Sequence[int],
    on_progress: Callable[[str, int, int], None] = lambda label, done, total: None,
    device_blocks: int | None = None,
    admission: Admission | None = None,
    fleets: Sequence[Fleet] = (ONE_ENGINE,),
) -> list[ReplayResult]:
    """Replay a trace against several policies at several capacities.

    Returns the results: the first policy at every capacity, then the same with the next
    fleet, then the next policy.
    """
    policies = list(policies)
    for policy in policies:
        _check_name(policy)
    if min(capacities, default=1) < 1:
        raise ValueError(f"{capacities=} must be at least 1 each.")
    device = admitted = None
    if device_blocks is not None:
        label = f"device, {device_blocks:,} blocks"
        if fleets[0].num_engines > 1:  # Each has one, and finds less.
            device = fit_device(trace, device_blocks)
        else:
            device = find_on_device(trace, device_blocks, partial(on_progress, label))
    if admission is not None:
        report_admission = partial(on_progress, "admission")
        admitted = find_admitted(trace, admission, report_admission, device)
    runs = [
        (policy, fleet, capacity)
        for policy in policies
        for fleet in fleets
        if fleet.storage_blocks or policy != STORE_ALONE
        # Without hosts their capacity is nothing.
        for capacity in capacities[: 1 if policy == STORE_ALONE else None]
    ]
    label, total = f"replaying, {len(runs)} runs", len(runs) * trace.num_requests
    num_done, lock, stopped = [0] * len(runs), threading.Lock(), threading.Event()

    def run(number: int) -> ReplayResult:
        policy, fleet, capacity = runs[number]

        def report(done: int, _: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                num_done[number] = done
                on_progress(label, sum(num_done), total)

        report(0, 0)
        return replay(policy, trace, capacity, report, device, admitted, fleet)

    # A thread per core: LRU at four capacities took 11.6 s on two cores and 16.8 s on
    # one, mostly to compile. Capacities differ in shape, so they cannot share a
    # program; with equal ones, four caches took 0.98 of the time of four loops under
    # `lax.map`, and 1.5 times as long under `vmap` (CPU).
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(run, number) for number in range(len(runs))]
        try:
            results = [future.result() for future in futures]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [
        dataclasses.replace(result, capacity_blocks=capacity)
        for result in results
        for capacity in (
            capacities if result.policy == STORE_ALONE else [result.capacity_blocks]
        )
    ]


@dataclasses.dataclass
class _Engine:
    """An engine of a replay."""

    executor: Executor  # Its host's index
    listens: bool = False  # Whether the policy is notified of requests
    auto: AutoHost | None = None  # The host, if its policy changes
    # Its device, if there are several engines and they have any
    device: DeviceCache | None = None
    gate: AskedGate | None = None  # In a fleet, admits blocks of its requests.

    def keys_of(self, ids: NDArray[np.int32]) -> Words:
        """Make keys of blocks."""
        return keys_of(ids) if self.auto is None else self.auto.keys_of(ids)

    def find(self, request: int, ids: NDArray[np.int32]) -> int:
        """Count what it has of a request's blocks, on the device and then the host."""
        num = 0 if self.device is None else self.device.find(request)
        if num == len(ids):
            return num
        return num + self.executor.lookup(self.keys_of(ids[num:]))


def _make_engines(
    policy: str | PolicyMaker,
    trace: Trace,
    num_blocks: int,
    max_batch: int,
    fleet: Fleet,
    store: SharedStore | None,
    device: OnDevice | None,
) -> list[_Engine]:
    """Make empty engines, whose functions are compiled."""
    num = range(fleet.num_engines)
    if policy == AUTO:
        autos = [AutoHost(trace, num_blocks, max_batch) for _ in num]
        return [_Engine(auto.executor, True, auto) for auto in autos]
    if policy == STORE_ALONE:
        assert store is not None
        return [_Engine(store.executor) for _ in num]
    make = policy if callable(policy) else get_policy_maker(policy)
    cache = make(num_blocks, max_batch)
    executor, listens = make_executor(cache), cache.listens
    # Compiles; then start empty.
    keys, facts = keys_of(np.zeros(1, np.int64)), Facts() if listens else None
    serve(executor, Request(keys, 1, facts, device))
    return [_Engine(make_executor(cache), listens) for _ in num]


def _facts_of(trace: Trace, number: int) -> Facts:
    return Facts(
        int(trace.time_ms[number]) & 0xFFFFFFFF,
        int(trace.input_tokens[number]),
        int(trace.output_tokens[number]),
        int(trace.stops[number]),
    )


def _check_name(policy: str | PolicyMaker) -> str:
    """Return the name of a policy; refuse an unknown one."""
    if not isinstance(policy, str):
        return getattr(policy, "__name__", repr(policy)).removeprefix("make_")
    if policy not in (OPTIMUM, STORE_ALONE, AUTO):
        get_policy_maker(policy)
    return policy
