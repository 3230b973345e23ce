"""How many stores and loads there were, how they ended, how long they took."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxkv.scheduling.listening import Listener, Lookup
from jaxkv.scheduling.protocol import Request

# The buckets of vLLM's histograms of the same names (`jaxkv.observe.metrics`).
SIZE_BUCKETS = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)
LOOKUP_BUCKETS = (1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
DELAY_BUCKETS = (1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)

MOST_SAMPLES = 1 << 14
"""Values that a `Histogram` keeps at most until they are taken."""


@dataclasses.dataclass
class OffloadStats:
    """How stores and loads ended so far.

    Blocks are device blocks unless it says otherwise. Whatever was offered to the host
    is stored, dropped, or still on its way (`InTransit`).

    A reader in another thread may see a block that has been offered and is nowhere
    else yet, never the other way round: a part is counted after the whole and, as the
    fields are read in their order, read before it.

    Attributes:
        num_store_refusals: Times that the host had no room for all that was offered.
        num_stored: Blocks that got to the host.
        num_dropped_full: Blocks that did not get to the host, as it had no room until
            their request was over.
        num_dropped_slow: Likewise, as too much was on its way already.
        num_dropped_failed: Blocks whose transfer to the host failed.
        num_dropped_reset: Blocks that were on their way when the host was reset.
        num_offered: Blocks that were to be stored: that got a place on the host, or
            were dropped without.
        num_skipped: Times that a host block was not stored as too few had asked for it
            (`OffloadRules.store_threshold`), or as it was in the tail of a prompt that
            no request had asked for (`max_unseen_blocks`).
        num_paused: Blocks of requests that were not stored, as nothing that was stored
            had been asked for (`pause_unused_stores`).
        num_evicted: Host blocks that were evicted to make room for others.
        num_loads: Loads that arrived, each for a request.
        num_loads_failed: Loads that did not.
        num_loads_declined: Look-ups whose load would have taken longer than to compute;
            a request that asks again counts again.
        num_loaded: Blocks that came back from the host.
        num_copied: Blocks that were copied on the device, in place of a load.
        num_storage_stored: Blocks that got to the store.
        num_storage_dropped_slow: Blocks that were to be written there and were not, as
            too many were on their way.
        num_storage_dropped_evicted: Likewise, as the host had evicted them by then.
        num_storage_dropped_failed: Likewise, as the store failed or was late.
        num_storage_dropped_reset: Likewise, as the host was reset meanwhile.
        num_storage_loaded: Blocks that came from the store to the host.
        num_storage_failed: Blocks that were to come and did not: they were not there
            any more, not right, or late.
        num_storage_found: Blocks that the store turned out to have when it was asked.
        num_storage_evicted: Host blocks that the store was to delete to make room.
        num_fetches_declined: Times that nothing was fetched from the store, as it would
            have taken longer than to compute.
        num_device_hit_tokens: Tokens of new requests that were found on the device.
        num_device_query_tokens: Tokens of new requests, found or not.
        num_host_hit_tokens: Of the tokens that the device's own prefix did not have,
            those that the host brought, or copies on the device.
        num_host_query_tokens: Tokens that the device's own prefix did not have.
    """

    num_store_refusals: int = 0
    num_stored: int = 0
    num_dropped_full: int = 0
    num_dropped_slow: int = 0
    num_dropped_failed: int = 0
    num_dropped_reset: int = 0
    num_offered: int = 0
    num_skipped: int = 0
    num_paused: int = 0
    num_evicted: int = 0
    num_loads: int = 0
    num_loads_failed: int = 0
    num_loads_declined: int = 0
    num_loaded: int = 0
    num_copied: int = 0
    num_storage_stored: int = 0
    num_storage_dropped_slow: int = 0
    num_storage_dropped_evicted: int = 0
    num_storage_dropped_failed: int = 0
    num_storage_dropped_reset: int = 0
    num_storage_loaded: int = 0
    num_storage_failed: int = 0
    num_storage_found: int = 0
    num_storage_evicted: int = 0
    num_fetches_declined: int = 0
    num_device_hit_tokens: int = 0
    num_device_query_tokens: int = 0
    num_host_hit_tokens: int = 0
    num_host_query_tokens: int = 0

    @property
    def num_storage_dropped(self) -> int:
        """Blocks that were to be written to the store and were not."""
        return (
            self.num_storage_dropped_slow
            + self.num_storage_dropped_evicted
            + self.num_storage_dropped_failed
            + self.num_storage_dropped_reset
        )

    def with_storage(self, counts: TierCounts, num_evicted: int) -> OffloadStats:
        """Copy these, with what became of blocks between the host and a store.

        Args:
            counts: All of that but `num_storage_evicted`.
            num_evicted: That.
        """
        own = {f"num_storage_{name}": num for name, num in vars(counts).items()}
        return dataclasses.replace(self, num_storage_evicted=num_evicted, **own)

    def count_request(
        self, request: Request, num_local: int | None, num_external: int
    ) -> None:
        """Count what a new request had found when it got its blocks.

        Args:
            request: The request.
            num_local: Tokens found on the device; None if none was asked for.
            num_external: Tokens that come from the host or are copied.
        """
        if num_local is not None:
            num_tokens = request.num_tokens
            self.num_device_query_tokens += num_tokens
            self.num_device_hit_tokens += num_local
            self.num_host_query_tokens += num_tokens - num_local
            self.num_host_hit_tokens += num_external


@dataclasses.dataclass
class TierCounts:
    """What became of blocks between a tier and the next one down, in device blocks.

    The fields are those of `OffloadStats` that begin with `num_storage_`.
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
    """What is on its way now, in device blocks unless it says otherwise.

    Attributes:
        stores_waiting: Blocks with a place on the host that have not left yet.
        stores_in_flight: Blocks that have left for the host.
        host_blocks_written: Host blocks with a store that waits or is in flight.
        loads_waiting: Blocks to be loaded for requests that have their device blocks.
        loads_in_flight: Blocks that have left for the device.
        host_blocks_read: Host blocks held for a load: offered, waiting or in flight.
    """

    stores_waiting: int
    stores_in_flight: int
    host_blocks_written: int
    loads_waiting: int
    loads_in_flight: int
    host_blocks_read: int


class Histogram:
    """Counts values by size.

    One thread adds to it; others may read meanwhile.

    Args:
        bounds: The largest value of each bucket but the last, ascending.

    Attributes:
        bounds: As given.
        total: The sum of all values.

    Example:
        >>> sizes = Histogram([1.0, 10.0])
        >>> for size in (0.5, 1.0, 7.0, 70.0):
        ...     sizes.add(size)
        >>> sizes.counts, sizes.total
        ((2, 1, 1), 78.5)
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._samples: deque[float] | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values each bucket has; the last those above all bounds."""
        return tuple(self._counts)

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        if self._samples is not None:
            self._samples.append(value)

    def keep_samples(self) -> None:
        """Keep the values from now on, for a reader that takes them every step.

        Who does not, gets the last `MOST_SAMPLES`: they are not kept without end.
        """
        if self._samples is None:
            self._samples = deque(maxlen=MOST_SAMPLES)

    def take_samples(self) -> list[float]:
        """Return the values kept since the last call; only the adding thread may."""
        samples = list(self._samples or ())
        if self._samples:
            self._samples.clear()
        return samples


class Delays(Listener):
    """How long look-ups take, and how long requests wait for what they found.

    Args:
        clock: Seconds since some moment.

    Attributes:
        lookups: Seconds of each single look-up.
        deferrals: Seconds from a look-up that was deferred until one that
            gives an answer, or the end of the request.
        loads: Seconds from the look-up that offered a load until it was reported to
            have arrived, whatever it had to wait for.
    """

    _NOT_STATE = "lookups", "deferrals", "loads"
    _NOT_DIGESTED = True  # The times since when requests wait.

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lookups = Histogram(LOOKUP_BUCKETS)
        self.deferrals = Histogram(DELAY_BUCKETS)
        self.loads = Histogram(DELAY_BUCKETS)
        self.clock = clock
        # When the look-up of each request began that was put off, or offered a load.
        self._deferred_s: dict[str, float] = {}
        self._offered_s: dict[str, float] = {}

    def looked_up(self, lookup: Lookup) -> None:
        """Measure a lookup that has just ended."""
        request_id, start_s = lookup.request.request_id, lookup.start_s
        now_s = self.clock()
        self.lookups.add(now_s - start_s)
        if lookup.num_tokens is None:
            self._deferred_s.setdefault(request_id, start_s)
            return
        if request_id in self._deferred_s:
            self._end_deferral(request_id, now_s)
        if lookup.is_awaited:
            self._offered_s[request_id] = start_s
        else:
            self._offered_s.pop(request_id, None)

    def loaded(self, finished: Sequence[str], failed: Sequence[str]) -> None:
        """Measure loads that have ended."""
        for request_id in finished:
            self.loads.add(self.clock() - self._offered_s.pop(request_id))
        for request_id in failed:
            self._offered_s.pop(request_id, None)

    def left(self, request_id: str) -> None:
        """End the deferral of a request that waits no more."""
        self._offered_s.pop(request_id, None)
        if request_id in self._deferred_s:
            self._end_deferral(request_id, self.clock())

    def _end_deferral(self, request_id: str, now_s: float) -> None:
        self.deferrals.add(now_s - self._deferred_s.pop(request_id))
