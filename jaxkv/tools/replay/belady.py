"""The offline optimum: the hits of a cache that knows the future.

Belady's rule evicts the block whose next use is farthest away. Here every missing block
must be stored, as under the policies, and hits are prefixes. Of blocks with the same
next use, the deepest in the prompt is evicted first, so that the rest of a prefix can
still be found.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.replay.device import DeviceHits
from jaxkv.tools.replay.traces import OnCount, Trace


def find_optimum(
    trace: Trace,
    capacity_blocks: int,
    on_progress: OnCount = lambda done, total: None,
    device: DeviceHits | None = None,
) -> NDArray[np.int64]:
    """Count the prefix blocks that the optimum finds for each request.

    A request with more blocks than the cache is held completely until the next one
    needs room. No real cache can do that; the result is an upper bound.

    With a device in front, a block is of use to a request only beyond what the device
    has found by itself. All that the request holds is stored nevertheless.

    Returns i64[R]. The length of the prefix found, on the device or in the cache.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> find_optimum(make_trace("t", [[1], [2], [3], [1]]), 2).tolist()
    [0, 0, 0, 1]
    """
    ids, offsets = trace.ids.tolist(), trace.offsets.tolist()
    local = np.zeros(trace.num_requests, np.int64)
    used, findable = trace.num_blocks, trace.num_asked
    if device is not None:
        local, used, findable = device.hits, device.usable, device.findable
    next_uses = _next_uses(trace, local, findable)
    num_hits = np.zeros(trace.num_requests, np.int64)
    held: dict[int, int] = {}  # a block -> the request that uses it next
    # (-next use, -depth, block); entries that disagree with `held` are outdated.
    farthest: list[tuple[int, int, int]] = []
    for request in trace.requests(on_progress):
        start = offsets[request]
        blocks = ids[start : start + int(used[request])]
        first, last = int(local[request]), int(findable[request])
        beyond = enumerate(blocks[first:last], first)
        num_hits[request] = next((i for i, b in beyond if b not in held), last)
        for depth, block in enumerate(blocks):
            use = next_uses[start + depth]
            if held.get(block) != use:  # Else it has its entry.
                held[block] = use
                heapq.heappush(farthest, (-use, -depth, block))
        _evict(held, farthest, capacity_blocks, set(blocks))
    return num_hits


def _evict(
    held: dict[int, int],
    farthest: list[tuple[int, int, int]],
    capacity_blocks: int,
    pinned: set[int],
) -> None:
    """Evict down to the capacity, sparing the request's own blocks."""
    spared = []
    while len(held) > capacity_blocks and farthest:
        entry = heapq.heappop(farthest)
        block = entry[2]
        if held.get(block) != -entry[0]:
            continue  # used or evicted since
        if block in pinned:
            spared.append(entry)
        else:
            del held[block]
    for entry in spared:
        heapq.heappush(farthest, entry)


def _next_uses(
    trace: Trace, first: NDArray[np.int64], last: NDArray[np.int64]
) -> list[int]:
    """Return for each block of each request which one uses it next, or R for none.

    Shapes: first: i64[R]; last: i64[R].
    """
    requests = np.repeat(np.arange(trace.num_requests), trace.num_blocks)
    # Sorted by block and request, the next use is the next entry that counts.
    order = np.lexsort((requests, trace.ids))
    depths = np.arange(len(trace.ids)) - trace.offsets[requests]
    counts = (depths >= first[requests]) & (depths < last[requests])
    places = np.where(counts[order], np.arange(len(order)), len(order))
    after = np.append(np.minimum.accumulate(places[::-1])[::-1], len(order))[1:]
    has_next = after < len(order)
    has_next[has_next] = trace.ids[order[after[has_next]]] == trace.ids[order[has_next]]
    next_uses = np.full(len(trace.ids), trace.num_requests)
    next_uses[order[has_next]] = requests[order[after[has_next]]]
    result: list[int] = next_uses.tolist()
    return result
