"""Replay a trace against a cache policy: how much of each prefix would be found.

Requests are served one after the other, each on the simulated host of one engine
(`jaxkv.tiers.bare`). Alone, a request looks its blocks up (the prefix before the first
missing block is the hit), touches them, stores the missing ones, and touches them again
while the store is in flight; then the store completes. If its store is refused, it
stores nothing and does not touch again. If it has more blocks than the host, it uses
only the first that fit, but all count. `jaxkv.tools.replay.device` describes requests
behind a device, `jaxkv.tools.replay.fleet` engines that share the requests.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import field
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies import PolicyMaker, get_policy_maker
from jaxkv.tiers.bare import BareTier, Course, select_keys
from jaxkv.tiers.executors import Executor, Step, Words, make_executor
from jaxkv.tools.replay.admission import (
    Admission,
    Admitted,
    AskedGate,
    find_admitted,
)
from jaxkv.tools.replay.belady import find_optimum
from jaxkv.tools.replay.device import (
    DeviceCache,
    DeviceHits,
    find_on_device,
    fit_device,
)
from jaxkv.tools.replay.fleet import ONE_ENGINE, Fleet, SharedStore, choose_engines
from jaxkv.tools.replay.traces import OnCount, Trace, keys_of
from jaxkv.types import NO_BLOCK

OPTIMUM = "optimum"
"""The name of Belady's rule (`jaxkv.tools.replay.belady`) among the policies."""


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
    fleet: Fleet
    hits_by_request: NDArray[np.int64] = field(compare=False, repr=False)
    # 0 for the optimum.
    stores_by_request: NDArray[np.int64] = field(compare=False, repr=False)
    # Blocks that came from the store to a host.
    fetches_by_request: NDArray[np.int64] = field(compare=False, repr=False)
    # The engine that served each request.
    engines: NDArray[np.int64] = field(compare=False, repr=False)
    # What the device found; None without one.
    device: DeviceHits | None = field(compare=False, repr=False)

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

    `policy` is a registered name, `OPTIMUM` or a maker of policies. `device` is what a
    device in front finds; of several engines, only its size and what takes part count
    (`fit_device`). `OPTIMUM` may store any block, whatever is `admitted`, and is for
    one engine without a store.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> trace = make_trace("three", [[1, 2], [1, 3], [1, 2]])
    >>> result = replay("lru", trace, capacity_blocks=2)
    >>> result.num_hit_blocks, result.num_block_refs
    (2, 6)
    """
    if capacity_blocks < 1:
        raise ValueError(f"{capacity_blocks=} must be at least 1.")
    name, num_refused = _check_name(policy, fleet), 0
    hits, stores, fetches, engine_of = np.zeros((4, trace.num_requests), np.int64)
    if policy == OPTIMUM:
        hits = find_optimum(trace, capacity_blocks, on_progress, device)
    else:
        if device is not None and fleet.num_engines > 1:
            device = dataclasses.replace(device, hits=np.zeros_like(hits))
        run = _Run(policy, trace, capacity_blocks, device, admitted, fleet)
        for number in trace.requests(on_progress):
            chosen = engine_of[number] = run.choose(number)
            engine = run.engines[chosen]
            request = engine.make_request(number)
            if run.store is not None:
                fetches[number] = engine.fetch(request, run.store)
            hits[number], stores[number], is_refused = engine.serve(request)
            num_refused += is_refused
    for counts in (
        hits,
        stores,
        fetches,
        engine_of,
        *([device.hits] if device else []),
    ):
        counts.flags.writeable = False
    return ReplayResult(
        policy=name,
        capacity_blocks=capacity_blocks,
        num_requests=trace.num_requests,
        num_block_refs=trace.num_block_refs,
        num_hit_blocks=int(hits.sum()),
        input_tokens=int(trace.input_tokens.sum()),
        hit_tokens=int(trace.tokens_of(hits).sum()),
        num_refused=num_refused,
        fleet=fleet,
        hits_by_request=hits,
        stores_by_request=stores,
        fetches_by_request=fetches,
        engines=engine_of,
        device=device,
    )


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
        _check_name(policy, fleets[0])
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
        (p, f, capacity) for p in policies for f in fleets for capacity in capacities
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

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = [pool.submit(run, number) for number in range(len(runs))]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_Served: TypeAlias = tuple[int, int, bool]
"""Blocks of a request found and stored, and whether its store was refused."""


class _Request(NamedTuple):
    """A request as a host sees it, in blocks from the first on."""

    number: int
    keys: Words  # u32[n, 8]
    num_asked: int  # The output fills the blocks after these.
    num_keys: int  # Blocks that may be stored
    passes: NDArray[np.bool_] | None  # bool[n]. None admits all.
    num_local: int  # Found on the device
    num_findable: int  # On the device or the host
    num_running: int  # Offered to the host before the request's end


class _Run:
    """The engines of a replay, and their shared inputs and store."""

    def __init__(
        self,
        policy: str | PolicyMaker,
        trace: Trace,
        num_blocks: int,
        device: DeviceHits | None,
        admitted: Admitted | None,
        fleet: Fleet,
    ) -> None:
        self.trace, self.num_blocks, self.device = trace, num_blocks, device
        self.admitted = admitted
        fitting = np.minimum(trace.num_blocks, num_blocks)
        self.used = fitting if device is None else device.usable
        self.num_asked = np.minimum(trace.num_asked, self.used)
        # Without a device, a request uses no more blocks than fit the cache.
        max_keys = num_blocks if device is None else device.num_blocks
        max_batch = max(min(int(trace.num_blocks.max(initial=1)), max_keys), 2)
        self.store: SharedStore | None = None
        if fleet.storage_blocks:
            self.store = SharedStore(fleet.storage_blocks, max_batch)
        self._routed = choose_engines(trace, fleet)
        self._num_served = [0] * fleet.num_engines
        self.engines = [_Engine(self, policy, max_batch) for _ in self._num_served]
        for engine in self.engines if fleet.num_engines > 1 else ():
            if device is not None:
                engine.device = DeviceCache(trace, device)
            if admitted is not None and admitted.make_gate is not None:
                engine.gate = admitted.make_gate()

    def choose(self, number: int) -> int:
        """Choose the engine that serves a request."""
        if self._routed is not None:
            return int(self._routed[number])
        lengths = [engine.find(number) for engine in self.engines]
        order = zip(lengths, self._num_served, range(len(lengths)), strict=True)
        chosen = min(order, key=lambda row: (-row[0], *row[1:]))[2]
        self._num_served[chosen] += 1
        return chosen

    def findable(self, number: int) -> int:
        """Return the blocks of a request that may be found."""
        return int(
            (self.num_asked if self.device is None else self.device.findable)[number]
        )


class _Engine:
    """An engine of a replay: its host, and of several its own device and admission."""

    def __init__(self, run: _Run, policy: str | PolicyMaker, max_batch: int) -> None:
        self.run = run
        self.device: DeviceCache | None = None
        self.gate: AskedGate | None = None
        make = policy if callable(policy) else get_policy_maker(policy)
        cache = make(run.num_blocks, max_batch)
        self.host = BareTier(make_executor(cache), listens=cache.listens)

    def find(self, number: int) -> int:
        """Count what it has of a request's blocks, on the device and then the host."""
        ids = self.run.trace.blocks_of(number)[: self.run.findable(number)]
        num = 0 if self.device is None else self.device.find(number)
        if num == len(ids):
            return num
        return num + self.host.executor.lookup(keys_of(ids[num:]))

    def fetch(self, request: _Request, store: SharedStore) -> int:
        """Fetch blocks from the store; return how many."""
        missing = request.keys[request.num_local : request.num_findable]
        num_fetched = store.fetch(self.host.executor, missing, self.run.num_blocks)
        store.touch(request.keys[: request.num_asked])
        return num_fetched

    def serve(self, request: _Request) -> _Served:
        """Serve a request."""
        if not len(request.keys):
            return 0, 0, False
        is_alone = self.run.device is None
        return (self._serve_alone if is_alone else self._serve_behind)(request)

    def make_request(self, number: int) -> _Request:
        """Make a request of the trace, after its device has served it."""
        run, device = self.run, self.run.device
        ids = run.trace.blocks_of(number)[: run.used[number]]
        num_asked, num_keys, passes = int(run.num_asked[number]), len(ids), None
        num_local, num_running = 0, num_asked
        if device is not None:
            if self.device is not None:
                device.hits[number] = self.device.serve(number)
            num_local = int(device.hits[number])
            num_running = int(device.running[number])
        if run.admitted is not None:
            start = run.trace.offsets[number]
            passes = run.admitted.passes[start : start + len(ids)]
            if self.gate is not None:
                passes = np.array(self.gate.note(number)[: len(ids)], np.bool_)
            num_keys = min(num_keys, int(run.admitted.limits[number]))
        keys = keys_of(ids)
        blocks = num_local, run.findable(number), num_running
        return _Request(number, keys, num_asked, num_keys, passes, *blocks)

    def _begin(self, course: Course, request: _Request) -> None:
        trace, at = self.run.trace, request.number
        keys, kind = request.keys[: request.num_asked], int(trace.kinds[at])
        begun = int(trace.time_ms[at]), int(trace.input_tokens[at])
        self.host.begin(course, keys, *begun, None if kind < 0 else kind)

    def _finish(self, course: Course, request: _Request) -> None:
        trace, at = self.run.trace, request.number
        ended = int(trace.output_tokens[at]), int(trace.stops[at])
        self.host.finish(course, request.keys, int(trace.time_ms[at]), *ended)

    def _serve_alone(self, request: _Request) -> _Served:
        keys, passes = request.keys, request.passes
        executor, store, course = self.host.executor, self.run.store, Course()
        if self.host.listens:
            self._begin(course, request)
        offered = keys
        if passes is None:
            step = executor.request_step(keys)
        else:
            num = request.num_keys
            offered = select_keys(keys[:num], passes[:num])
            step = _request_step(executor, keys, offered)
        is_refused = step.evicted_keys is None
        if not is_refused:
            # The second touch comes before the blocks are ready, which matters to ARC.
            executor.touch(keys, True)
        executor.complete_step(step.block_ids, step.num_hits)
        if store is not None and step.num_stored:
            placed = step.block_ids[-len(offered) :]
            if passes is None:
                is_hit = np.arange(len(keys)) < step.num_hits
                placed = np.where(is_hit, NO_BLOCK, placed)
            store.write(offered[placed != NO_BLOCK])
        if self.host.listens:
            self._finish(course, request)
        num_hits = min(step.num_hits, request.num_asked)
        return num_hits, 0 if is_refused else step.num_stored, is_refused

    def _serve_behind(self, request: _Request) -> _Served:
        _, keys, num_asked, num_keys, passes, num_local, num_findable, running = request
        host, course, num_stored = self.host, Course(), self.host.num_stored
        if num_local < num_findable:
            course.num_found = host.executor.lookup(keys[num_local:num_findable])
        self._begin(course, request)
        if num_asked:
            host.executor.touch(keys[:num_asked], True)
        # No other request is served meanwhile, so loaded blocks need no pin.
        num_hits = course.num_known = num_local + course.num_found
        for end in range(min(num_asked, num_keys), min(running, num_keys) + 1):
            if course.num_known < end:
                host.offer(course, keys, end, passes)
                # Refused blocks are offered again at the end.
                course.num_known = end
        host.end(course, keys, num_keys, passes)
        self._finish(course, request)
        for offered, store in course.in_flight:
            host.executor.complete_step(store.block_ids, 0)
            if self.run.store is not None:
                self.run.store.write(offered[store.block_ids != NO_BLOCK])
        return num_hits, host.num_stored - num_stored, course.is_refused


def _request_step(executor: Executor, keys: Words, admitted: Words) -> Step:
    """`Executor.request_step` that stores only admitted blocks."""
    num_hits = executor.lookup(keys)
    executor.touch(keys, True)
    block_ids = np.empty(0, np.int64)
    if num_hits:
        _, block_ids = executor.prepare_load(keys[:num_hits])
    if not len(admitted):
        return Step(num_hits, 0, block_ids, keys[:0])
    stored = executor.prepare_store(admitted, True)
    if stored is None:
        return Step(num_hits, 0, block_ids, None)
    block_ids = np.concatenate([block_ids, stored.block_ids])
    return Step(
        num_hits,
        stored.num_stored,
        block_ids,
        stored.evicted_keys,
        stored.num_declined,
    )


def _check_name(policy: str | PolicyMaker, fleet: Fleet) -> str:
    """Return the name of a policy; refuse one that is unknown or not for the fleet."""
    if not isinstance(policy, str):
        return getattr(policy, "__name__", repr(policy)).removeprefix("make_")
    if policy == OPTIMUM and fleet != ONE_ENGINE:
        raise ValueError(f"{OPTIMUM!r} is for one engine without a store.")
    if policy != OPTIMUM:
        get_policy_maker(policy)
    return policy
