"""Counts of stores and loads, how they ended and how long they took."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxkv.scheduling.listening import Listener
from jaxkv.scheduling.protocol import Request

# The buckets of vLLM's histograms of the same names (`jaxkv.observe.metrics`).
SIZE_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
LOOKUP_BUCKETS = (1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
DELAY_BUCKETS = (1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)

MAX_SAMPLES = 1 << 14
"""The last values that a `Histogram` keeps until they are taken."""


@dataclasses.dataclass
class OffloadStats:
    """Counts of stores and loads that have ended so far.

    Blocks are device blocks unless a field says otherwise. A block offered to the host
    is stored, dropped, or still in flight (`InTransit`).

    Another thread may read a block as offered but not yet stored or dropped, never the
    reverse: `num_offered` is incremented before the other counts and, as fields are
    read in their order, read after them.
    """

    num_store_refusals: int = 0  # Placements refused because not all blocks fit.
    num_stored: int = 0  # Blocks that arrived on the host.
    # Blocks that did not arrive: the host had no room until their request had finished;
    # too many blocks were in flight; their transfer failed; the host was reset.
    num_dropped_full: int = 0
    num_dropped_slow: int = 0
    num_dropped_failed: int = 0
    num_dropped_reset: int = 0
    num_offered: int = 0  # Blocks that got a place on the host, or were dropped.
    # Times that a host block was not stored because too few requests had asked for it
    # (`OffloadRules.store_threshold`, `max_unseen_blocks`).
    num_skipped: int = 0
    num_declined: int = 0  # Host blocks that the cache policy did not store.
    # Host blocks of new requests, at most 64 each, that an earlier one's loss made
    # useless; of one group with full attention.
    num_headless: int = 0
    num_paused: int = 0  # Blocks not stored because of `pause_unused_stores`.
    num_evicted: int = 0  # Host blocks that were evicted to make room for others.
    num_loads: int = 0  # Loads that arrived, each for one request.
    num_loads_failed: int = 0
    num_loads_declined: int = 0  # Lookups with a load slower than recomputing.
    num_loaded: int = 0  # Blocks loaded from the host.
    num_storage_stored: int = 0  # Blocks written to the store.
    # Blocks not written to the store: too many were in flight; the host had evicted
    # them; the write failed or timed out; the host was reset.
    num_storage_dropped_slow: int = 0
    num_storage_dropped_evicted: int = 0
    num_storage_dropped_failed: int = 0
    num_storage_dropped_reset: int = 0
    num_storage_loaded: int = 0  # Blocks fetched from the store to the host.
    num_storage_failed: int = 0  # Blocks missing from the store, damaged or late.
    num_storage_found: int = 0  # Blocks that the store had when probed.
    num_storage_evicted: int = 0  # Host blocks deleted to make room in the store.
    # Fetches from the store that were declined because recomputing was faster.
    num_fetches_declined: int = 0
    num_device_hit_tokens: int = 0  # Tokens of new requests found on the device.
    num_device_query_tokens: int = 0  # Tokens of new requests, found or not.
    # Tokens of new requests after the device's own prefix: those loaded from the host;
    # and all of them.
    num_host_hit_tokens: int = 0
    num_host_query_tokens: int = 0

    @property
    def num_storage_dropped(self) -> int:
        """Blocks for the store that were not written."""
        num = self.num_storage_dropped_slow + self.num_storage_dropped_evicted
        return num + self.num_storage_dropped_failed + self.num_storage_dropped_reset

    def with_storage(self, counts: TierCounts, num_evicted: int) -> OffloadStats:
        """Return a copy with the counts of blocks between the host and a store."""
        nums = {f"num_storage_{name}": num for name, num in vars(counts).items()}
        return dataclasses.replace(self, num_storage_evicted=num_evicted, **nums)

    def count_request(
        self, request: Request, num_local: int | None, num_external: int
    ) -> None:
        """Count a new request's tokens and hits, when it gets its blocks.

        `num_local` is None if it made no lookup; then nothing is counted.
        """
        if num_local is not None:
            num_tokens = request.num_tokens
            self.num_device_query_tokens += num_tokens
            self.num_device_hit_tokens += num_local
            self.num_host_query_tokens += num_tokens - num_local
            self.num_host_hit_tokens += num_external


@dataclasses.dataclass
class TierCounts:
    """Counts of device blocks between a tier and the next one down.

    `OffloadStats` has the same fields with the prefix `num_storage_`.
    """

    stored: int = 0
    dropped_slow: int = 0
    dropped_evicted: int = 0
    dropped_failed: int = 0
    dropped_reset: int = 0
    loaded: int = 0
    failed: int = 0
    found: int = 0


class InTransit(NamedTuple):
    """Blocks in flight now, device blocks unless a field says otherwise."""

    stores_waiting: int  # Blocks with a place on the host, not issued yet.
    stores_in_flight: int
    host_blocks_written: int  # Host blocks of waiting stores and stores in flight.
    loads_waiting: int  # Blocks of loads that requests have taken, not issued yet.
    loads_in_flight: int
    host_blocks_read: int  # Host blocks held for loads offered, waiting or in flight.


class Histogram:
    """Counts values by size. One thread adds to it; others may read meanwhile.

    `bounds` are the largest value of each bucket except the last, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._samples: deque[float] | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values in each bucket; the last has those above all bounds."""
        return tuple(self._counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        if self._samples is not None:
            self._samples.append(value)

    def keep_samples(self) -> None:
        """Keep values from now on, at most `MAX_SAMPLES`, for `take_samples`."""
        if self._samples is None:
            self._samples = deque(maxlen=MAX_SAMPLES)

    def take_samples(self) -> list[float]:
        """Return the values kept since the last call; only the adding thread may."""
        samples = list(self._samples or ())
        if self._samples:
            self._samples.clear()
        return samples


class Delays(Listener):
    """Measures lookups, and how long requests wait for deferred or offered blocks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lookups = Histogram(LOOKUP_BUCKETS)  # Seconds of each single lookup.
        # Seconds from a deferred lookup to the first lookup that is not deferred, or to
        # the request's end; and from a lookup that offers a load to the load's arrival.
        self.deferrals = Histogram(DELAY_BUCKETS)
        self.loads = Histogram(DELAY_BUCKETS)
        self.clock = clock  # Returns seconds.
        # The start of each request's first deferred lookup; of its lookup with a load.
        self._deferred_s: dict[str, float] = {}
        self._offered_s: dict[str, float] = {}

    def looked_up(
        self,
        request: Request,
        num_computed_tokens: int,
        num_tokens: int | None,
        is_awaited: bool,
        start_s: float,
    ) -> None:
        """Measure a lookup that has just ended."""
        request_id = request.request_id
        self.lookups.add(self.clock() - start_s)
        if num_tokens is None:
            self._deferred_s.setdefault(request_id, start_s)
            return
        self.left(request_id)
        if is_awaited:
            self._offered_s[request_id] = start_s

    def loaded(self, finished: Sequence[str], failed: Sequence[str]) -> None:
        """Measure loads that have ended."""
        for request_id in finished:
            self.loads.add(self.clock() - self._offered_s.pop(request_id))
        for request_id in failed:
            self._offered_s.pop(request_id, None)

    def left(self, request_id: str) -> None:
        """End the deferral of a request that no longer waits."""
        self._offered_s.pop(request_id, None)
        if request_id in self._deferred_s:
            self.deferrals.add(self.clock() - self._deferred_s.pop(request_id))
