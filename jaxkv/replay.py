"""Replay a trace against a cache policy: how much of each prefix would be found.

A request looks its blocks up (the prefix up to the first that is absent counts),
touches them, stores those that are absent, and touches them again while the store is
in progress; then the store completes and the next request comes. A request that is
refused stores nothing and touches nothing again. Of a request with more blocks than
the cache only the first that fit take part, but all count.

`jaxkv.request_loop` has the loop.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from jaxkv.belady import find_optimum
from jaxkv.policies import PolicyMaker, get_policy_maker
from jaxkv.request_loop import RequestLoop
from jaxkv.traces import Trace

OPTIMUM = "optimum"
"""The name under which `replay` knows Belady's rule; see `jaxkv.belady`."""

_MIN_REQUESTS_PER_CALL = 256
_MAX_CALLS = 50


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """What a policy found at a capacity.

    Attributes:
        policy: Its name.
        capacity_blocks: Blocks of the cache.
        num_requests: Requests of the trace.
        num_block_refs: Blocks that the requests asked for.
        num_hit_blocks: Those of them that were found, as part of a prefix.
        input_tokens: Tokens that the requests asked for, None if not known.
        hit_tokens: Those of them that were found, None if not known.
        num_refused: Requests whose store was refused.
        compile_s: Seconds to get ready.
        wall_s: Seconds to replay, without getting ready.
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

    @property
    def block_hit_ratio(self) -> float:
        """Blocks found of blocks asked for."""
        return self.num_hit_blocks / self.num_block_refs

    @property
    def token_hit_ratio(self) -> float | None:
        """Tokens found of tokens asked for, None if not known."""
        if self.hit_tokens is None or not self.input_tokens:
            return None
        return self.hit_tokens / self.input_tokens


def replay(
    policy: str | PolicyMaker,
    trace: Trace,
    capacity_blocks: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Replay a trace against one policy at one capacity.

    Args:
        policy: A registered name, `OPTIMUM`, or a maker of policies.
        trace: The requests.
        capacity_blocks: Blocks of the cache.
        on_progress: Called now and then with the requests done, and all.

    Returns:
        What was found.

    Raises:
        ValueError: If the policy is not known or the capacity is less than 1.

    Example:
        >>> from jaxkv.traces import make_trace
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
        num_hits, num_refused = find_optimum(trace, capacity_blocks, on_progress), 0
    else:
        make = get_policy_maker(policy) if isinstance(policy, str) else policy
        loop = RequestLoop(make, trace, capacity_blocks)
        ready_s = time.perf_counter()
        step = max(_MIN_REQUESTS_PER_CALL, -(-trace.num_requests // _MAX_CALLS))
        while loop.num_done < trace.num_requests:
            loop.advance(step)
            on_progress(loop.num_done, trace.num_requests)
        num_hits, num_refused = loop.num_hits(), loop.num_refused()
    hit_tokens, input_tokens = _count_tokens(trace, num_hits)
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
    )


def sweep(
    trace: Trace,
    policies: Iterable[str | PolicyMaker],
    capacities: Sequence[int],
    on_progress: Callable[[str, int, int], None] = lambda label, done, total: None,
) -> list[ReplayResult]:
    """Replay a trace against several policies at several capacities.

    Args:
        trace: The requests.
        policies: As `replay` takes them.
        capacities: Blocks of the cache.
        on_progress: Called now and then with a label for the policy and capacity, the
            requests done, and all; from several threads, but never twice at once.

    Returns:
        What was found: the first policy at every capacity, then the next.

    Raises:
        ValueError: As `replay` does, before anything is run.
    """
    named = [(_check_name(policy), policy) for policy in policies]
    if min(capacities, default=1) < 1:
        raise ValueError(f"{capacities=} must be at least 1 each.")
    lock, stopped = threading.Lock(), threading.Event()

    def run(name: str, policy: str | PolicyMaker, capacity: int) -> ReplayResult:
        label = f"{name}, {capacity:,} blocks"

        def report(done: int, total: int) -> None:
            if stopped.is_set():
                raise CancelledError
            with lock:
                on_progress(label, done, total)

        report(0, trace.num_requests)
        return replay(policy, trace, capacity, report)

    # A thread a core: LRU at four capacities took 11.6 s on two cores, 16.8 s on one,
    # most of it to compile. Capacities differ in shape, so no one program can have
    # several; where they are the same, four caches took 0.98 of the time of four
    # loops under `lax.map`, and 1.5 times as long under `vmap` (CPU).
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


def _check_name(policy: str | PolicyMaker) -> str:
    """Find what a policy is called; refuse a name that is not known."""
    if not isinstance(policy, str):
        return getattr(policy, "__name__", repr(policy)).removeprefix("make_")
    if policy != OPTIMUM:
        get_policy_maker(policy)
    return policy


def _count_tokens(
    trace: Trace, num_hits: NDArray[np.int64]
) -> tuple[int | None, int | None]:
    """Count the tokens found and asked for, given the blocks found (i64[R])."""
    if trace.input_tokens is None:
        return None, None
    asked = int(trace.input_tokens.sum())
    if trace.block_size is None:
        return None, asked
    found = np.minimum(num_hits * trace.block_size, trace.input_tokens)
    return int(found.sum()), asked
