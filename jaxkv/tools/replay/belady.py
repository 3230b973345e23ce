"""The offline optimum: the most prefix blocks that any cache can find.

After each request, the cache keeps what it holds or declines it: of the blocks that it
had and of those of the request, those with the nearest next use (Belady's rule). Among
blocks with the same next use, it gives up the deepest in the prompt first.

This is exact. Keeping a block until its next use is an interval, and of intervals of
which at most `capacity` may overlap, giving up the one that ends last keeps the most.
Each use of a block is also a use of those before it in its prompt. So their intervals
end no later, and none that is kept waits for one that was given up.
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

    With a device in front, a block is of use to a request only beyond what the device
    has found by itself. The cache can store all that the request has there.

    Returns i64[R]. The length of the prefix found, on the device or in the cache.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> find_optimum(make_trace("t", [[1], [2], [3], [1], [2]]), 1).tolist()
    [0, 0, 0, 1, 0]
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
            if use == trace.num_requests:
                held.pop(block, None)
            elif held.get(block) != use:  # Else it has its entry.
                held[block] = use
                heapq.heappush(farthest, (-use, -depth, block))
        while len(held) > capacity_blocks:
            use, _, block = heapq.heappop(farthest)
            if held.get(block) == -use:  # Not used or given up since.
                del held[block]
    return num_hits


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
