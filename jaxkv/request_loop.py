"""The loop over a trace's requests, as one compiled program.

Requests differ in length from one block to thousands. Each is padded to one of a few
widths, and the loop has an inner loop for each width, which takes the requests that
come one after the other and have it. The arrays of the state are then updated in
place, as they would not be by a `switch` over the widths, nor is any request padded
to the longest.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jaxkv import manager
from jaxkv.batches import cpu_device
from jaxkv.manager import ManagerState
from jaxkv.policies import PolicyMaker
from jaxkv.traces import Trace
from jaxkv.types import KEY_LANES, Policy

_SMALLEST_WIDTH = 16
# What it takes to compile the loop for one more width, and to run a request for each
# place of its width: under LRU, on two cores of an AMD EPYC.
_COMPILE_S = 1.5
_PLACE_S = 0.35e-6

_FACTORS = np.arange(1, 2 * KEY_LANES, 2, dtype=np.uint32) * np.uint32(0x9E3779B1)
"""u32[8]. Odd, so that no two ids are alike in any lane of their keys."""


class Requests(NamedTuple):
    """The requests of a trace, on the device. R requests.

    Attributes:
        ids: i32[]. The blocks of all requests, and padding for the widest.
        starts: i32[R]. Where each request begins in `ids`.
        counts: i32[R]. Its blocks.
        widths: i32[R]. The number of its width.
    """

    ids: Array
    starts: Array
    counts: Array
    widths: Array


class Carry(NamedTuple):
    """What the loop hands on.

    Attributes:
        next: i32[]. The request that comes next.
        state: The cache.
        num_hits: i32[R]. Length of the prefix found, for each request done.
        refused: bool[R]. Whether its store was refused.
    """

    next: Array
    state: ManagerState
    num_hits: Array
    refused: Array


class RequestLoop:
    """A replay in progress.

    Args:
        make_policy: Maker of the policy.
        trace: The requests.
        capacity_blocks: Blocks of the cache.

    Attributes:
        num_done: Requests done so far.
    """

    def __init__(
        self, make_policy: PolicyMaker, trace: Trace, capacity_blocks: int
    ) -> None:
        self.num_done = 0
        self._num_requests = trace.num_requests
        counts = np.minimum(trace.num_blocks, capacity_blocks)
        self._widths = choose_widths(counts)
        self._policy = make_policy(capacity_blocks, self._widths[-1])
        device = cpu_device()
        widths = np.searchsorted(self._widths, counts)
        self._requests = Requests(
            *jax.device_put(
                (
                    np.pad(trace.ids, (0, self._widths[-1])),
                    trace.offsets[:-1].astype(np.int32),
                    counts.astype(np.int32),
                    widths.astype(np.int32),
                ),
                device,
            )
        )
        with jax.default_device(device):
            carry = Carry(
                next=jnp.int32(0),
                state=manager.init(self._policy, capacity_blocks),
                num_hits=jnp.zeros(counts.shape, jnp.int32),
                refused=jnp.zeros(counts.shape, jnp.bool),
            )
        self._carry = jax.device_put(carry, device)
        self.advance(0)  # compiles

    def advance(self, num_requests: int) -> None:
        """Replay the next `num_requests` requests, or as many as there are."""
        self.num_done = min(self.num_done + num_requests, self._num_requests)
        self._carry = _run(
            self._policy,
            self._widths,
            self._requests,
            np.int32(self.num_done),
            self._carry,
        )
        self._carry.next.block_until_ready()

    def num_hits(self) -> NDArray[np.int64]:
        """Tell the length of the prefix found, for each request done: i64[R]."""
        return np.asarray(self._carry.num_hits, np.int64)

    def num_refused(self) -> int:
        """Count the requests whose store was refused."""
        return int(np.count_nonzero(self._carry.refused))


def choose_widths(counts: NDArray[np.integer[Any]]) -> tuple[int, ...]:
    """Choose the widths to compile the loop for, the narrowest first.

    The widest fits all; a narrower one has to save more time than it takes to compile.

    Args:
        counts: int[R]. Blocks of each request.

    Example:
        >>> choose_widths(np.array([3, 100]))
        (128,)
        >>> choose_widths(np.array([3] * 200_000 + [100]))
        (32, 128)
    """
    widest = _SMALLEST_WIDTH
    while widest < counts.max():
        widest *= 2
    widths, width = [widest], widest // 4
    while width >= _SMALLEST_WIDTH:
        num_fitting = np.count_nonzero(counts <= width)
        if num_fitting * (widths[0] - width) * _PLACE_S > _COMPILE_S:
            widths.insert(0, width)
        width //= 4
    return tuple(widths)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _run(
    policy: Policy,
    widths: tuple[int, ...],
    requests: Requests,
    stop: Array,
    carry: Carry,
) -> Carry:
    """Replay requests up to `stop` (i32[]). `carry` is donated."""

    def of_width(number: int, carry: Carry) -> Carry:
        def is_next(carry: Carry) -> Array:
            # Past the last request the index is clamped, and `stop` ends the loop.
            return (carry.next < stop) & (requests.widths[carry.next] == number)

        serve = functools.partial(_serve, policy, widths[number], requests)
        return lax.while_loop(is_next, serve, carry)

    def each_width(carry: Carry) -> Carry:
        for number in range(len(widths)):
            carry = of_width(number, carry)
        return carry

    return lax.while_loop(lambda carry: carry.next < stop, each_width, carry)


def _serve(policy: Policy, width: int, requests: Requests, carry: Carry) -> Carry:
    """Serve the next request."""
    request, state = carry.next, carry.state
    count = requests.counts[request]
    ids = lax.dynamic_slice(requests.ids, (requests.starts[request],), (width,))
    keys = ids.astype(jnp.uint32)[:, None] * jnp.asarray(_FACTORS)[None, :]

    state, answer = manager.request_step(policy, state, keys, count)
    # The second touch comes before the blocks are ready, which ARC can tell. To touch
    # none is to change nothing.
    state = manager.touch(policy, state, keys, jnp.where(answer.ok, count, 0))
    state, _ = manager.complete_step(state, answer.block_ids, answer.num_hits)
    return Carry(
        next=request + 1,
        state=state,
        num_hits=carry.num_hits.at[request].set(answer.num_hits),
        refused=carry.refused.at[request].set(~answer.ok),
    )
