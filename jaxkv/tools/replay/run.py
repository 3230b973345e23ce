"""Replay a trace against a cache policy: how much of each prefix would be found.

A request looks its blocks up (the prefix before the first missing block is the hit),
touches them, stores the missing ones, and touches them again while the store is in
flight; then the store completes and the next request follows. A request whose store is
refused stores nothing and does not touch again. A request with more blocks than the
cache uses only the first that fit, but all count. A policy that listens is
notified of the request's begin and, last, of its end, both at the time of its arrival.

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
from jaxkv.policies.facts import BEGIN, FINISH, begun, finished
from jaxkv.policies.registry import AUTO
from jaxkv.tiers.bare import select_keys
from jaxkv.tiers.executors import Executor, Step, Words, make_executor
from jaxkv.tools.replay.admission import (
    Admission,
    Admitted,
    AskedGate,
    find_admitted,
)
from jaxkv.tools.replay.auto import AutoHost, News
from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import (
    DeviceCache,
    DeviceHits,
    find_on_device,
    fit_device,
    serve_behind,
)
from jaxkv.tools.replay.fleet import ONE_ENGINE, Fleet, SharedStore, choose_engines
from jaxkv.tools.replay.traces import Trace, keys_of
from jaxkv.types import NO_BLOCK

OPTIMUM = "optimum"
"""The name of Belady's rule (`jaxkv.tools.replay.belady`) among the policies."""

STORE_ALONE = "store alone"
"""The name of no host at all, but the shared store, among the policies."""

_REQUESTS_PER_REPORT = 256


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """The hits of a policy at a capacity."""

    policy: str
    capacity_blocks: int  # Blocks of the cache
    num_requests: int  # Requests of the trace
    num_block_refs: int  # Blocks that the requests asked for
    # Blocks found, as part of a prefix; with a device in front, there or on the host
    num_hit_blocks: int
    input_tokens: int | None  # Tokens that the requests asked for, None if not known
    hit_tokens: int | None  # Tokens found, None if not known
    num_refused: int  # Requests whose store was refused, in part if that can be
    compile_s: float = dataclasses.field(compare=False)
    # Seconds to replay, without compilation
    wall_s: float = dataclasses.field(compare=False)
    # i64[R], read-only. Blocks found for each request. Neither compared nor shown.
    hits_by_request: NDArray[np.int64] = dataclasses.field(compare=False, repr=False)
    # The device's share of the hits; None without one. Neither compared nor shown.
    device: DeviceHits | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    # i64[R], read-only. Blocks stored for each request; None for the optimum. Neither
    # compared nor shown.
    stores_by_request: NDArray[np.int64] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    fleet: Fleet = ONE_ENGINE  # The engines that shared the requests
    # i64[R], read-only. Which of them served each; None if there is one. Neither
    # compared nor shown.
    engines: NDArray[np.int64] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    # i64[R], read-only. Blocks of those found that came from the store to a host; None
    # without a store. Neither compared nor shown.
    fetches_by_request: NDArray[np.int64] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def num_device_hit_blocks(self) -> int:
        """Blocks found on the device in front, 0 without one."""
        return 0 if self.device is None else int(self.device.hits.sum())

    @property
    def num_host_hit_blocks(self) -> int:
        """Blocks found on the host."""
        return self.num_hit_blocks - self.num_device_hit_blocks

    @property
    def block_hit_ratio(self) -> float:
        """Share of the requested blocks that were found."""
        return self.num_hit_blocks / self.num_block_refs

    @property
    def token_hit_ratio(self) -> float | None:
        """Share of the requested tokens that were found, None if not known."""
        if self.hit_tokens is None or not self.input_tokens:
            return None
        return self.hit_tokens / self.input_tokens


def replay(
    policy: str | PolicyMaker,
    trace: Trace,
    capacity_blocks: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    device: DeviceHits | None = None,
    admitted: Admitted | None = None,
    fleet: Fleet = ONE_ENGINE,
) -> ReplayResult:
    """Replay a trace against one policy at one capacity.

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
    served = None
    if policy == OPTIMUM:
        num_hits = find_optimum(trace, capacity_blocks, on_progress, device)
    else:
        blocks = fleet.storage_blocks if policy == STORE_ALONE else capacity_blocks
        largest = int(trace.num_blocks.max(initial=1))
        # Without a device, a request uses no more blocks than fit the cache.
        max_keys = blocks if device is None else device.num_blocks
        max_batch = max(min(largest, max_keys), 2)
        store = None
        if fleet.storage_blocks:
            store = SharedStore(fleet.storage_blocks, max_batch)
        ahead = None if device is None else (0, 1, 1)
        engines = _make_engines(policy, trace, blocks, max_batch, fleet, store, ahead)
        if len(engines) > 1:
            if device is not None:
                own_hits = np.zeros(trace.num_requests, np.int64)
                device = dataclasses.replace(device, hits=own_hits)
            for engine in engines:
                engine.divide(trace, device, admitted)
        if policy == STORE_ALONE:
            store = None  # They use it directly.
        ready_s = time.perf_counter()
        served = _serve_all(
            trace, engines, blocks, device, admitted, fleet, store, on_progress
        )
        num_hits = served.hits
    hit_tokens, input_tokens = _count_tokens(trace, num_hits)
    num_hits.flags.writeable = False
    has_both = fleet.storage_blocks and policy != STORE_ALONE
    return ReplayResult(
        policy=f"{name} + store" if has_both else name,
        capacity_blocks=capacity_blocks,
        num_requests=trace.num_requests,
        num_block_refs=trace.num_block_refs,
        num_hit_blocks=int(num_hits.sum()),
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        num_refused=0 if served is None else served.num_refused,
        compile_s=ready_s - begun_s,
        wall_s=time.perf_counter() - ready_s,
        hits_by_request=num_hits,
        device=device,
        stores_by_request=None if served is None else served.stores,
        fleet=fleet,
        engines=served.engines if served and fleet.num_engines > 1 else None,
        fetches_by_request=served.fetches if served and has_both else None,
    )


class _Served(NamedTuple):
    """The outcome of the requests."""

    hits: NDArray[np.int64]  # i64[R]. Blocks found for each.
    # i64[R], read-only like the others. Blocks stored for each.
    stores: NDArray[np.int64]
    fetches: NDArray[np.int64]  # i64[R]. Blocks fetched from the store for each.
    engines: NDArray[np.int64]  # i64[R]. Who served each.
    num_refused: int  # Requests whose store was refused


def _serve_all(
    trace: Trace,
    engines: list[_Engine],
    capacity_blocks: int,
    device: DeviceHits | None,
    admitted: Admitted | None,
    fleet: Fleet,
    store: SharedStore | None,
    on_progress: Callable[[int, int], None],
) -> _Served:
    """Serve all requests, one after the other."""
    hits, stores, fetches, served_by = np.zeros((4, trace.num_requests), np.int64)
    num_refused, num_served = 0, [0] * len(engines)
    used, num_asked = np.minimum(trace.num_blocks, capacity_blocks), trace.num_asked
    if device is not None:
        used = device.usable
    routed, ahead = choose_engines(trace, fleet), None
    on_arrival = None if store is None else store.write
    for request in range(trace.num_requests):
        start = trace.offsets[request]
        ids = trace.ids[start : start + used[request]]
        num_findable = min(int(num_asked[request]), len(ids))
        findable = num_findable if device is None else int(device.findable[request])
        if routed is not None:
            number = int(routed[request])
        else:
            lengths = [candidate.find(request, ids[:findable]) for candidate in engines]
            number = min(
                range(len(engines)), key=lambda e: (-lengths[e], num_served[e], e)
            )
            num_served[number] += 1
        served_by[request] = number
        engine = engines[number]
        executor, auto = engine.executor, engine.auto
        facts = _news_of(trace, request)
        keys = engine.keys_of(ids)
        if device is not None:
            if engine.device is not None:
                device.hits[request] = engine.device.serve(request)
            running = int(device.running[request])
            ahead = int(device.hits[request]), findable, running
        passes, limit = None, None
        if admitted is not None:
            passes = admitted.passes[start : start + len(ids)]
            if engine.gate is not None:
                passes = np.array(engine.gate.note(request)[: len(ids)], np.bool_)
            limit = int(admitted.limits[request])
        if store is not None:
            num_local = 0 if ahead is None else ahead[0]
            missing, max_keys = keys[num_local:findable], max(capacity_blocks // 2, 1)
            fetches[request] = store.fetch(executor, missing, max_keys)
            store.touch(keys[:num_findable])
        rest = ahead, passes, limit
        listened = facts if engine.listens else None
        hits[request], stores[request], is_refused = _serve(
            executor, keys, num_findable, listened, *rest, on_arrival
        )
        if auto is not None:
            auto.note(keys, num_findable, facts, *rest)
        num_refused += is_refused
        if request % _REQUESTS_PER_REPORT == 0:
            on_progress(request, trace.num_requests)
    on_progress(trace.num_requests, trace.num_requests)
    for counts in (stores, fetches, served_by):
        counts.flags.writeable = False
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
    named = [(_check_name(policy), policy) for policy in policies]
    if min(capacities, default=1) < 1:
        raise ValueError(f"{capacities=} must be at least 1 each.")
    device = None
    if device_blocks is not None:
        label = f"device, {device_blocks:,} blocks"
        report_device = partial(on_progress, label)
        if fleets[0].num_engines > 1:  # Each has one, and finds less.
            device = fit_device(trace, device_blocks)
        else:
            device = find_on_device(trace, device_blocks, report_device)
    admitted = None
    if admission is not None:
        report_admission = partial(on_progress, "admission")
        admitted = find_admitted(trace, admission, report_admission, device)
    lock, stopped = threading.Lock(), threading.Event()

    def run(
        name: str, policy: str | PolicyMaker, capacity: int, fleet: Fleet
    ) -> ReplayResult:
        label = f"{name}, {capacity:,} blocks"
        if fleet.storage_blocks:
            label += f", store of {fleet.storage_blocks:,}"

        def report(done: int, total: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                on_progress(label, done, total)

        report(0, trace.num_requests)
        return replay(policy, trace, capacity, report, device, admitted, fleet)

    # A thread per core: LRU at four capacities took 11.6 s on two cores and 16.8 s on
    # one, mostly to compile. Capacities differ in shape, so they cannot share a
    # program; with equal ones, four caches took 0.98 of the time of four loops under
    # `lax.map`, and 1.5 times as long under `vmap` (CPU).
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [
            pool.submit(run, name, policy, capacity, fleet)
            for name, policy in named
            for fleet in fleets
            if fleet.storage_blocks or policy != STORE_ALONE
            # Without hosts their capacity is nothing.
            for capacity in capacities[: 1 if policy == STORE_ALONE else None]
        ]
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

    own_executor: Executor  # Its host's index, unless its policy changes
    listens: bool = False  # Whether the policy is notified of requests
    auto: AutoHost | None = None  # The host, if its policy changes
    # Its device, if there are several engines and they have any
    device: DeviceCache | None = None
    gate: AskedGate | None = (
        None  # Chooses the blocks of its requests that may be stored, in a fleet
    )

    @property
    def executor(self) -> Executor:
        """Its host's index."""
        return self.own_executor if self.auto is None else self.auto.executor

    def keys_of(self, ids: NDArray[np.int32]) -> Words:
        """Make keys of blocks."""
        return keys_of(ids) if self.auto is None else self.auto.keys_of(ids)

    def divide(
        self, trace: Trace, device: DeviceHits | None, admitted: Admitted | None
    ) -> None:
        """Add this engine's own device and admission, if there are several engines."""
        if device is not None:
            self.device = DeviceCache(trace, device)
        if admitted is not None and admitted.make_gate is not None:
            self.gate = admitted.make_gate()

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
    ahead: tuple[int, int, int] | None,
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
    some, facts = keys_of(np.zeros(1, np.int64)), News() if listens else None
    _serve(executor, some, 1, facts, ahead)
    return [_Engine(make_executor(cache), listens) for _ in num]


def _news_of(trace: Trace, request: int) -> News:
    input_tokens = 1
    if trace.input_tokens is not None:
        input_tokens = int(trace.input_tokens[request])
    return News(
        int(trace.time_ms[request]) & 0xFFFFFFFF,
        input_tokens,
        int(trace.output_tokens[request]),
        int(trace.stops[request]),
    )


def _serve(
    executor: Executor,
    keys: Words,
    num_asked: int,
    facts: News | None,
    ahead: tuple[int, int, int] | None,
    passes: NDArray[np.bool_] | None = None,
    limit: int | None = None,
    on_arrival: Callable[[Words], None] | None = None,
) -> tuple[int, int, bool]:
    """Serve a request; return its hit blocks, those stored, and if any was refused.

    Shapes: keys: u32[n, 8]; passes: bool[n].
    """
    if not len(keys):
        return 0, 0, False
    positions = np.arange(len(keys), dtype=np.int32)

    def begin() -> int:
        if facts is None or not num_asked:
            return 0
        about = begun(facts.time_ms, facts.input_tokens)
        return executor.note(keys[:num_asked], BEGIN, positions[:num_asked], about)

    def finish(mark: int) -> None:
        if facts is not None:
            about = finished(facts.time_ms, facts.output_tokens, facts.stop, mark)
            executor.note(keys, FINISH, positions, about)

    if ahead is not None:
        num_found, num_stored, is_refused = serve_behind(
            executor,
            keys,
            *ahead,
            num_asked,
            begin,
            finish,
            passes,
            limit,
            on_arrival,
        )
        return ahead[0] + num_found, num_stored, is_refused
    mark = begin()
    offered = keys
    if passes is None:
        step = executor.request_step(keys)
    else:
        offered = select_keys(keys[:limit], passes[:limit])
        step = _step(executor, keys, offered)
    if step.evicted_keys is not None:
        # The second touch comes before the blocks are ready, which matters to ARC.
        executor.touch(keys, True)
    executor.complete_step(step.block_ids, step.num_hits)
    if on_arrival is not None and step.num_stored:
        placed = step.block_ids[-len(offered) :]
        if passes is None:
            placed = np.where(np.arange(len(keys)) < step.num_hits, NO_BLOCK, placed)
        on_arrival(offered[placed != NO_BLOCK])
    finish(mark)
    is_refused = step.evicted_keys is None
    num_stored = 0 if is_refused else step.num_stored
    return min(step.num_hits, num_asked), num_stored, is_refused


def _step(executor: Executor, keys: Words, admitted: Words) -> Step:
    """`Executor.request_step` that stores only admitted blocks."""
    num_hits = executor.lookup(keys)
    executor.touch(keys, True)
    block_ids = np.empty(0, np.int64)
    if num_hits:
        _, block_ids = executor.prepare_load(keys[:num_hits])
    if not len(admitted):
        return Step(num_hits, 0, block_ids, keys[:0])
    stored = executor.prepare_store(admitted)
    if stored is None:
        return Step(num_hits, 0, block_ids, None)
    block_ids = np.concatenate([block_ids, stored.block_ids])
    return Step(num_hits, stored.num_stored, block_ids, stored.evicted_keys)


def _check_name(policy: str | PolicyMaker) -> str:
    """Return the name of a policy; refuse an unknown one."""
    if not isinstance(policy, str):
        return getattr(policy, "__name__", repr(policy)).removeprefix("make_")
    if policy not in (OPTIMUM, STORE_ALONE, AUTO):
        get_policy_maker(policy)
    return policy


def _count_tokens(
    trace: Trace, num_hits: NDArray[np.int64]
) -> tuple[int | None, int | None]:
    """Return the tokens found and requested, from the blocks found (i64[R])."""
    if trace.input_tokens is None:
        return None, None
    input_tokensindable = int(trace.input_tokens.sum())
    if trace.block_size is None:
        return None, input_tokensindable
    hit_tokens = np.minimum(num_hits * trace.block_size, trace.input_tokens)
    return int(hit_tokens.sum()), input_tokensindable
