"""A device's own prefix cache in front of the host's: what it leaves to be found there.

Requests are served as an engine with `OffloadScheduler` in eager mode serves them when
each is alone. The device's prefix is looked up and held, then what continues it on the
host. The host's blocks of the prompt are touched, and those found are loaded. The rest
is computed, and offered to the host with the first token that is generated; then the
blocks that a recorded request's output filled. At its end the request is offered as a
whole again, which stores what the host has evicted although the device still had it.

Whether a prefix was loaded or computed, the device has it afterwards. So what the
device finds is the same whatever the host does, and is counted once.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from jaxkv.keys.packed import PackedKeys, words_to_keys
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tools.replay.traces import OnCount, Trace, keys_of


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceHits:
    """The blocks of R requests that a device finds by itself: i64[R], read-only."""

    num_blocks: int  # Blocks of the device
    hits: NDArray[np.int64]  # Blocks found there, from the first on.
    held: NDArray[np.int64]  # Blocks that a request holds there while it runs.
    # Full blocks that take part; fewer than there are if the request does not fit.
    usable: NDArray[np.int64]
    # Blocks that may be found, on the device or on the host: none with the last token,
    # whose logits are needed.
    findable: NDArray[np.int64]
    # Blocks that are offered to the host before the request's end: not one that the
    # last step fills.
    running: NDArray[np.int64]


def find_on_device(
    trace: Trace,
    num_blocks: int,
    on_progress: OnCount = lambda done, total: None,
) -> DeviceHits:
    """Count what a device finds of each request, by the rules of `DeviceBlockPool`.

    A request holds a block for each of its full ones and one for the rest of its
    prompt. What it generates takes room if the trace was recorded. Of a request that
    does not fit, as many tokens take part as do.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> trace = make_trace("four", [[1, 2], [3, 4], [1, 2], [1, 2]])
    >>> find_on_device(trace, 4).hits.tolist()
    [0, 0, 1, 2]
    """
    device = fit_device(trace, num_blocks)
    cache = DeviceCache(trace, device)
    hits = np.zeros(trace.num_requests, np.int64)
    for request in trace.requests(on_progress):
        hits[request] = cache.serve(request)
    hits.flags.writeable = False
    return dataclasses.replace(device, hits=hits)


def fit_device(trace: Trace, num_blocks: int) -> DeviceHits:
    """Compute how many blocks of each request take part on a device, without hits."""
    if num_blocks < 1:
        raise ValueError(f"{num_blocks=} must be at least 1.")
    size = trace.block_size
    num_tokens = np.minimum(_tokens_of(trace), num_blocks * size)
    usable = np.minimum(trace.num_blocks, num_tokens // size)
    max_tokens = np.minimum(num_tokens, trace.input_tokens) - 1
    findable = np.minimum(usable, trace.num_asked)
    findable = np.minimum(findable, np.maximum(max_tokens, 0) // size)
    # Where the output is known, with a step for each of its tokens but the first.
    running = np.minimum(usable, trace.num_asked)
    if trace.recording is not None:
        is_known, num_steps = trace.output_tokens >= 0, trace.output_tokens - 1
        filled = np.where(num_steps > 0, (num_tokens - 1) // size, 0)
        running = np.where(is_known, np.minimum(usable, filled), running)
    hits, held = np.zeros(trace.num_requests, np.int64), -(-num_tokens // size)
    for counts in (hits, held, usable, findable, running):
        counts.flags.writeable = False  # All replays share them.
    return DeviceHits(num_blocks, hits, held, usable, findable, running)


class DeviceCache:
    """A device's prefix cache, which serves one request of a trace after the other."""

    def __init__(self, trace: Trace, device: DeviceHits) -> None:
        self._trace, self._device = trace, device
        self._pool = DeviceBlockPool(device.num_blocks + 1)  # And the null block.

    def find(self, request: int) -> int:
        return len(self._find(request)[1])

    def serve(self, request: int) -> int:
        keys, cached = self._find(request)
        pool, num_held = self._pool, int(self._device.held[request])
        pool.touch(cached)
        table = cached + pool.allocate(num_held - len(cached))
        pool.cache(table[len(cached) : len(keys)], keys[len(cached) :])
        pool.free(table[::-1])
        return len(cached)

    def _find(self, request: int) -> tuple[PackedKeys, list[int]]:
        device = self._device
        words = keys_of(self._trace.blocks_of(request)[: device.usable[request]])
        keys = PackedKeys(words_to_keys(words), words)
        return keys, self._pool.find_prefix(keys[: device.findable[request]])


def _tokens_of(trace: Trace) -> NDArray[np.int64]:
    if trace.recording is None:
        return trace.input_tokens
    # The last one that is generated is not read again.
    return trace.input_tokens + np.maximum(trace.output_tokens - 1, 0)
