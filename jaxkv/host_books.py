"""What is known of the host tier, kept for Python callers.

Bytes in, Python values out. The state lives on the CPU backend, as the scheduler that
asks needs its answers at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv import manager, programs
from jaxkv.batches import cpu_device
from jaxkv.keys import key_from_foreign
from jaxkv.losses import Losses
from jaxkv.request_batch import RequestBatch, flatten
from jaxkv.reuse import ReuseFilter
from jaxkv.snapshot import Snapshot, take_snapshot
from jaxkv.types import (
    HOST_MEDIUM,
    BlockKey,
    OffloadingEvent,
    Policy,
    RequestStepOutput,
)


class HostBooks:
    """The state of the host tier, its events, and the names of its keys.

    `HostTier` adds vLLM's calls.

    Attributes:
        block_size: Tokens in a block; only repeated in events.
        num_blocks: Blocks of the tier.
        policy: The cache policy.
        state: All that is known, as a pytree.
        events: What happened since it was emptied last, None if that is not kept.
        losses: Why blocks are not here, as far as that is to be remembered.
        num_held_blocks: Blocks that hold a key, stores in progress included.
        num_evicted: Blocks that were given up so far to make room for others.
        num_skipped: Times so far that a block was not to be stored, as too few had
            asked for it.
    """

    def __init__(
        self,
        block_size: int,
        policy: Policy,
        enable_events: bool = False,
        reuse: ReuseFilter | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = policy.num_blocks
        self.policy = policy
        self.events: list[OffloadingEvent] | None = [] if enable_events else None
        self.losses = Losses(max_size=0)
        self.num_held_blocks = 0
        self.num_evicted = 0
        self.num_skipped = 0
        self._names: dict[BlockKey, bytes] = {}
        self._reuse = reuse
        # By identity. Who drops an output has ended it otherwise, or never will.
        self._unfinished: WeakValueDictionary[int, RequestStepOutput] = (
            WeakValueDictionary()
        )
        self.state = self._empty()

    def passes(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Tell for each key whether it was looked up often enough to be stored."""
        if self._reuse is None:
            return [True] * len(keys)
        return self._reuse.passes(keys)

    def contains(self, keys: Iterable[bytes]) -> NDArray[np.bool_]:
        """Tell which keys have a block, stores in progress included: bool[n]."""
        batch = flatten([keys])
        if not batch.keys:
            return np.empty(0, np.bool_)
        found: NDArray[np.bool_] = self._call(programs.CONTAINS, batch)
        return found

    def count_lookup(self, keys: Iterable[BlockKey]) -> None:
        """Count keys as looked up, by `lookup` or by others who read the state."""
        if self._reuse is not None:
            self._reuse.count(keys)

    def pin(self, block_ids: NDArray[np.integer[Any]]) -> None:
        """Do as `prepare_load` does, for blocks that a search has just found.

        Raises:
            ValueError: If a block is being stored. Then nothing is pinned.
        """
        self.state, ok = programs.pin(self.state, block_ids)
        if not ok:
            raise ValueError(f"one of {block_ids=} is being stored.")

    def unpin(self, block_ids: NDArray[np.integer[Any]]) -> None:
        """Do as `complete_load` does, for blocks by their ids.

        Raises:
            ValueError: If a block has no load in progress. Then nothing is unpinned.
        """
        self.state, ok = programs.complete_step(
            self.state, block_ids, num_hits=len(block_ids)
        )
        if not ok:
            raise ValueError(f"one of {block_ids=} has no load in progress.")

    def publish(self, block_ids: Sequence[int], keys: list[bytes]) -> None:
        """Do as `complete_store` does for what arrived, without a search.

        Args:
            block_ids: Blocks that are being stored.
            keys: Their keys.

        Raises:
            ValueError: If a block is not being stored. Then nothing changes.
        """
        if not keys:
            return
        self.state, ok = programs.complete_step(
            self.state, np.array(block_ids, np.int32), num_hits=0
        )
        if not ok:
            raise ValueError(f"one of {block_ids=} is not being stored.")
        self._record([self._names.get(key, key) for key in keys], removed=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget blocks whose bytes are no good; those in flight stay."""
        batch = flatten([keys])
        if not batch.keys:
            return
        rows = np.flatnonzero(self._call(programs.DISCARD, batch)).tolist()
        names = [batch.names[row] for row in rows]
        self._forget(names)
        self.losses.note(names, "load failed")

    def clear(self) -> None:
        """Forget everything at once, loads and stores in progress included."""
        self.state = self._empty()
        self.num_held_blocks = 0
        self._names.clear()
        self._unfinished.clear()
        self.losses.clear()
        if self.events is not None:
            self.events.append(OffloadingEvent([], self.block_size, HOST_MEDIUM, True))

    def snapshot(self) -> Snapshot:
        """Show the state to a reader, for tests and for debugging."""
        return take_snapshot(self.policy, self.state, self._names)

    def warm_up(
        self,
        max_keys: int,
        max_total_keys: int = 0,
        which: Sequence[programs.Program] | None = None,
    ) -> None:
        """Compile every program, now rather than at its first use.

        Args:
            max_keys: Most keys that one request will have.
            max_total_keys: Most keys that the requests of one call will have together;
                0 if there will be single requests only.
            which: The programs that will be called; None for all.
        """
        self.state = programs.warm_up(
            self.policy, self.state, max_keys, max_total_keys, which
        )

    def _empty(self) -> manager.ManagerState:
        device = cpu_device()
        with jax.default_device(device):
            state = manager.init(self.policy, self.num_blocks)
        placed: manager.ManagerState = jax.device_put(state, device)
        return placed

    def _call(self, program: programs.Program, batch: RequestBatch, *each: Any) -> Any:
        self.state, answer = programs.call(
            program, self.policy, self.state, batch.keys, batch.offsets, *each
        )
        return answer

    def _forget(self, names: list[bytes]) -> None:
        """Note that blocks with these names are gone."""
        self.num_held_blocks -= len(names)
        for name in names:
            self._names.pop(key_from_foreign(name), None)
        self._record(names, removed=True)

    def _record(self, block_hashes: list[bytes], *, removed: bool) -> None:
        if block_hashes and self.events is not None:
            self.events.append(
                OffloadingEvent(block_hashes, self.block_size, HOST_MEDIUM, removed)
            )
