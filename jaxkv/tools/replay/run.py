"""Replay a trace against a cache policy: how much of each prefix would be found.

A request looks its blocks up (the prefix before the first missing block is the hit),
touches them, stores the missing ones, and touches them again while the store is in
flight; then the store completes and the next request follows. A request whose store is
refused stores nothing and does not touch again. A request with more blocks than the
cache uses only the first that fit, but all count. A policy that listens is told that
the request begins, and at last that it has finished, both at the time of its arrival.

With a device in front, requests are served as `jaxkv.tools.replay.device` says. With an
`Admission`, what it keeps out is not stored.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies import PolicyMaker, get_policy_maker
from jaxkv.policies.registry import AUTO
from jaxkv.tiers.bare import those_of
from jaxkv.tiers.executors import Executor, Step, Words, make_executor
from jaxkv.tools.replay.admission import Admission, Admitted, find_admitted
from jaxkv.tools.replay.auto import AutoHost, News
from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import (
    DeviceHits,
    find_on_device,
    serve_behind,
)
from jaxkv.tools.replay.traces import Trace, keys_of

OPTIMUM = "optimum"
"""The name of Belady's rule (`jaxkv.tools.replay.belady`) among the policies."""

_REQUESTS_PER_REPORT = 256


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """What a policy found at a capacity.

    Attributes:
        policy: Its name.
        capacity_blocks: Blocks of the cache.
        num_requests: Requests of the trace.
        num_block_refs: Blocks that the requests asked for.
        num_hit_blocks: Blocks found, as part of a prefix; with a device in front, there
            or on the host.
        input_tokens: Tokens that the requests asked for, None if not known.
        hit_tokens: Tokens found, None if not known.
        num_refused: Requests whose store was refused, in part if that can be.
        compile_s: Seconds to compile.
        wall_s: Seconds to replay, without compilation.
        hits_by_request: i64[R], read-only. Blocks found for each request. Neither
            compared nor shown.
        device: What a device in front found of that; None without one. Neither
            compared nor shown.
        stores_by_request: i64[R], read-only. Blocks stored for each request; None for
            the optimum. Neither compared nor shown.
    """

    policy: str
    capacity_blocks: int
    num_requests: int
    num_block_refs: int
    num_hit_blocks: int
    input_tokens: int | None
    hit_tokens: int | None
    num_refused: int
    compile_s: float = dataclasses.field(compare=False)
    wall_s: float = dataclasses.field(compare=False)
    hits_by_request: NDArray[np.int64] = dataclasses.field(compare=False, repr=False)
    device: DeviceHits | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    stores_by_request: NDArray[np.int64] | None = dataclasses.field(
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
) -> ReplayResult:
    """Replay a trace against one policy at one capacity.

    Args:
        policy: A registered name, `OPTIMUM`, "auto", or a maker of policies.
        trace: The requests.
        capacity_blocks: Blocks of the cache.
        on_progress: Called repeatedly with the requests done and in total.
        device: What a device in front finds by itself; None for no device.
        admitted: Which blocks may be stored (`find_admitted`); None for all. `OPTIMUM`
            stores all in any case.

    Returns:
        The result.

    Raises:
        ValueError: If the policy is unknown, or the capacity is less than 1.

    Example:
        >>> from jaxkv.tools.replay.traces import make_trace
        >>> trace = make_trace("three", [[1, 2], [1, 3], [1, 2]])
        >>> result = replay("lru", trace, capacity_blocks=2)
        >>> result.num_hit_blocks, result.num_block_refs
        (2, 6)
    """
    if capacity_blocks < 1:
        raise ValueError(f"{capacity_blocks=} must be at least 1.")
    name = _check_name(policy)
    begun_s = ready_s = time.perf_counter()
    if policy == OPTIMUM:
        num_hits = find_optimum(trace, capacity_blocks, on_progress, device)
        num_refused, num_stores = 0, None
    else:
        largest = int(trace.num_blocks.max(initial=1))
        # Without a device, a request uses no more blocks than fit the cache.
        most = capacity_blocks if device is None else device.num_blocks
        sizes = capacity_blocks, max(min(largest, most), 2)
        ahead = None if device is None else (0, 1, 1)
        auto = AutoHost(trace, *sizes) if policy == AUTO else None
        if auto is not None:
            executor, listens = auto.executor, True
        else:
            make = policy if callable(policy) else get_policy_maker(policy)
            cache = make(*sizes)
            executor, listens = make_executor(cache), cache.listens
            # Compiles; then start empty.
            some = keys_of(np.zeros(1, np.int64))
            _serve(executor, some, 1, News() if listens else None, ahead)
            executor = make_executor(cache)
        ready_s = time.perf_counter()
        num_hits = np.zeros(trace.num_requests, np.int64)
        num_stores = np.zeros(trace.num_requests, np.int64)
        num_refused = 0
        used, num_asked = np.minimum(trace.num_blocks, capacity_blocks), trace.num_asked
        if device is not None:
            used = device.usable
        for request in range(trace.num_requests):
            start = trace.offsets[request]
            ids = trace.ids[start : start + used[request]]
            news = _news_of(trace, request)
            keys = keys_of(ids) if auto is None else auto.keys_of(ids)
            if device is not None:
                ahead = (
                    int(device.hits[request]),
                    int(device.findable[request]),
                    int(device.running[request]),
                )
            asked = min(int(num_asked[request]), len(ids))
            passes, limit = None, None
            if admitted is not None:
                passes = admitted.passes[start : start + len(ids)]
                limit = int(admitted.limits[request])
            rest = ahead, passes, limit
            num_hits[request], num_stores[request], is_refused = _serve(
                executor, keys, asked, news if listens else None, *rest
            )
            if auto is not None:
                auto.note(keys, asked, news, *rest)
                executor = auto.executor
            num_refused += is_refused
            if request % _REQUESTS_PER_REPORT == 0:
                on_progress(request, trace.num_requests)
        on_progress(trace.num_requests, trace.num_requests)
        num_stores.flags.writeable = False
    hit_tokens, input_tokens = _count_tokens(trace, num_hits)
    num_hits.flags.writeable = False
    return ReplayResult(
        policy=name,
        capacity_blocks=capacity_blocks,
        num_requests=trace.num_requests,
        num_block_refs=trace.num_block_refs,
        num_hit_blocks=int(num_hits.sum()),
        input_tokens=input_tokens,
        hit_tokens=hit_tokens,
        num_refused=num_refused,
        compile_s=ready_s - begun_s,
        wall_s=time.perf_counter() - ready_s,
        hits_by_request=num_hits,
        device=device,
        stores_by_request=num_stores,
    )


def sweep(
    trace: Trace,
    policies: Iterable[str | PolicyMaker],
    capacities: Sequence[int],
    on_progress: Callable[[str, int, int], None] = lambda label, done, total: None,
    device_blocks: int | None = None,
    admission: Admission | None = None,
) -> list[ReplayResult]:
    """Replay a trace against several policies at several capacities.

    Args:
        trace: The requests.
        policies: As `replay` takes them.
        capacities: Blocks of the cache.
        on_progress: Called repeatedly with a label for the policy and capacity, the
            requests done and in total; from several threads, one at a time.
        device_blocks: Blocks of a device in front of the cache; None for no device.
        admission: What is kept out of the cache, whatever the policy, but for
            `OPTIMUM`; None for nothing.

    Returns:
        The results: the first policy at every capacity, then the next.

    Raises:
        ValueError: As in `replay` and `find_admitted`, before anything is run.
    """
    named = [(_check_name(policy), policy) for policy in policies]
    if min(capacities, default=1) < 1:
        raise ValueError(f"{capacities=} must be at least 1 each.")
    device = None
    if device_blocks is not None:
        label = f"device, {device_blocks:,} blocks"
        device = find_on_device(trace, device_blocks, partial(on_progress, label))
    admitted = None
    if admission is not None:
        report_admission = partial(on_progress, "admission")
        admitted = find_admitted(trace, admission, report_admission, device)
    lock, stopped = threading.Lock(), threading.Event()

    def run(name: str, policy: str | PolicyMaker, capacity: int) -> ReplayResult:
        label = f"{name}, {capacity:,} blocks"

        def report(done: int, total: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                on_progress(label, done, total)

        report(0, trace.num_requests)
        return replay(policy, trace, capacity, report, device, admitted)

    # A thread per core: LRU at four capacities took 11.6 s on two cores and 16.8 s on
    # one, mostly to compile. Capacities differ in shape, so they cannot share a
    # program; with equal ones, four caches took 0.98 of the time of four loops under
    # `lax.map`, and 1.5 times as long under `vmap` (CPU).
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [
            pool.submit(run, name, policy, capacity)
            for name, policy in named
            for capacity in capacities
        ]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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
    news: News | None,
    ahead: tuple[int, int, int] | None,
    passes: NDArray[np.bool_] | None = None,
    limit: int | None = None,
) -> tuple[int, int, bool]:
    """Serve a request; return its hit blocks, those stored, and if any was refused.

    Args:
        executor: The cache.
        keys: u32[n, 8]. The keys of the request's blocks.
        num_asked: How many it asks for; its output fills those after them.
        news: What to tell the policy; None if it does not listen.
        ahead: How many blocks the device in front has found, how many may be found, and
            how many are offered before the request's end; None if there is no device.
        passes: bool[n]. Which blocks were asked for often enough to be stored; None
            for all.
        limit: How many blocks, the first ones, may be stored at all; None for all.
    """
    if not len(keys):
        return 0, 0, False
    positions = np.arange(len(keys), dtype=np.int32)

    def begin() -> int:
        if news is None or not num_asked:
            return 0
        asked = keys[:num_asked], positions[:num_asked]
        return executor.begin(*asked, news.time_ms, news.input_tokens)

    def finish(mark: int) -> None:
        if news is not None:
            end = news.time_ms, news.output_tokens, news.stop
            executor.finish(keys, positions, *end, mark)

    if ahead is not None:
        num_found, num_stored, is_refused = serve_behind(
            executor, keys, *ahead, num_asked, begin, finish, passes, limit
        )
        return ahead[0] + num_found, num_stored, is_refused
    mark = begin()
    if passes is None:
        step = executor.request_step(keys)
    else:
        step = _step(executor, keys, those_of(keys[:limit], passes[:limit]))
    if step.evicted_keys is not None:
        # The second touch comes before the blocks are ready, which matters to ARC.
        executor.touch(keys)
    executor.complete_step(step.block_ids, step.num_hits)
    finish(mark)
    is_refused = step.evicted_keys is None
    num_stored = 0 if is_refused else step.num_stored
    return min(step.num_hits, num_asked), num_stored, is_refused


def _step(executor: Executor, keys: Words, admitted: Words) -> Step:
    """Do as `Executor.request_step` does, but store only what may be stored."""
    num_hits = executor.lookup(keys)
    executor.touch(keys)
    block_ids = np.empty(0, np.int64)
    if num_hits:
        block_ids, _ = executor.prepare_load(keys[:num_hits])
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
    if policy not in (OPTIMUM, AUTO):
        get_policy_maker(policy)
    return policy


def _count_tokens(
    trace: Trace, num_hits: NDArray[np.int64]
) -> tuple[int | None, int | None]:
    """Return the tokens found and requested, from the blocks found (i64[R])."""
    if trace.input_tokens is None:
        return None, None
    asked = int(trace.input_tokens.sum())
    if trace.block_size is None:
        return None, asked
    found = np.minimum(num_hits * trace.block_size, trace.input_tokens)
    return int(found.sum()), asked
