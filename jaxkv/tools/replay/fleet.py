"""Several engines in a replay: who serves a request, and the store behind them all.

Each engine has a device and a host of its own. The store is one LRU of blocks: what is
stored on a host is also written to it. As `jaxkv.scheduling.boundary` does, a request
fetches to its host what continues its prefix only in the store, half of the host at
most, and its use of a block counts as a use in the store. In reality, each engine has
its own index of the store, learns of others' use only by their writes, and moves few
blocks at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from jaxkv.policies import get_policy_maker
from jaxkv.tiers.bare import BareTier
from jaxkv.tiers.executors import Executor, Words, make_executor
from jaxkv.tools.replay.traces import Trace
from jaxkv.types import NO_BLOCK

Route: TypeAlias = Literal["round-robin", "sticky", "prefix"]
"""Which engine serves a request: the next one; the one that serves its conversation; or
the one whose device and host hold the longest prefix of it, and of several the one that
has served the fewest requests."""

ROUTES: tuple[Route, ...] = get_args(Route)


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Engines that share the requests."""

    num_engines: int = 1
    route: Route = "round-robin"  # Which of them serves a request
    storage_blocks: int = 0  # Blocks of the store behind them; 0 for no store


ONE_ENGINE = Fleet()
"""An engine alone, without a store."""


def choose_engines(trace: Trace, fleet: Fleet) -> NDArray[np.int64] | None:
    """Choose who serves each request, i64[R]; None if it depends on what they hold."""
    if fleet.num_engines == 1:
        return np.zeros(trace.num_requests, np.int64)
    if fleet.route == "round-robin":
        return np.arange(trace.num_requests) % fleet.num_engines
    if fleet.route == "sticky":
        return find_conversations(trace) % fleet.num_engines
    return None


def find_conversations(trace: Trace) -> NDArray[np.int64]:
    """Return the number of each request's conversation: i64[R].

    A request continues the conversation of the deepest block that it shares with
    earlier requests, if nothing has followed that block so far, or if it asks for
    nothing beyond it (the policy `hazard` counts turns alike). Else it begins one.

    >>> from jaxkv.tools.replay.traces import make_trace
    >>> trace = make_trace("four", [[1, 2], [1, 3], [1, 2, 4], [1, 3]])
    >>> find_conversations(trace).tolist()
    [0, 1, 0, 1]
    """
    ids, offsets = trace.ids.tolist(), trace.offsets.tolist()
    of_block: dict[int, int] = {}
    is_followed: set[int] = set()
    conversations, num = np.empty(trace.num_requests, np.int64), 0
    for request in range(trace.num_requests):
        blocks = ids[offsets[request] : offsets[request + 1]]
        num_known = next(
            (i for i, b in enumerate(blocks) if b not in of_block), len(blocks)
        )
        last = blocks[num_known - 1] if num_known else None
        if last is not None and (num_known == len(blocks) or last not in is_followed):
            conversation = of_block[last]
        else:
            conversation, num = num, num + 1
        conversations[request] = conversation
        of_block.update(dict.fromkeys(blocks[num_known:], conversation))
        is_followed.update(blocks[:-1])
    return conversations


class SharedStore:
    """The blocks of a write-through store."""

    def __init__(self, num_blocks: int, max_batch: int) -> None:
        # Its index
        self.executor = make_executor(get_policy_maker("lru")(num_blocks, max_batch))
        self._tier = BareTier(self.executor)

    def fetch(self, host: Executor, keys: Words, max_blocks: int) -> int:
        """Copy to a host what continues a prefix only here.

        Returns how many were. Shapes: keys: u32[n, 8].
        """
        if not len(keys):
            return 0
        rows = host.find_readable(keys)
        is_there = rows != NO_BLOCK
        is_found = is_there | (self.executor.find(keys) != NO_BLOCK)
        num = int(is_found.argmin()) if not is_found.all() else len(keys)
        lacking = keys[:num][~is_there[:num]][:max_blocks]
        if not len(lacking):
            return 0
        lacking.flags.writeable = False  # As all keys are.
        # So that making room does not evict what the rest continues.
        pinned = rows[:num][is_there[:num]].astype(np.int64)
        host.pin(pinned)
        _, placed = BareTier(host).place(lacking, may_decline=False)
        if placed is not None:
            host.complete_step(placed[1].block_ids, 0)
        host.complete_step(pinned, len(pinned))
        return placed[1].num_stored if placed is not None else 0

    def touch(self, keys: Words) -> None:
        if len(keys):
            self.executor.touch(keys, True)

    def write(self, keys: Words) -> None:
        """Store blocks that were stored on a host."""
        if not len(keys):
            return
        keys.flags.writeable = False
        _, placed = self._tier.place(keys)
        if placed is not None:
            self.executor.complete_step(placed[1].block_ids, 0)
