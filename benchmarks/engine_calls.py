"""An engine's calls to a pool and an offload scheduler, jaxkv's or the twin's, timed.

For `scheduler.py`, which says what is measured, and `in_flight.py`. The repository's
root must be on Python's path, as the twin is in `tests/reference`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxkv.scheduling.protocol import NO_EVENT, ConnectorOutput, SchedulerOutput
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.tiers.device import DeviceBlockPool
from tests.reference.block_pool import BlockPool
from tests.reference.offload_scheduler import ReferenceScheduler

BLOCK_SIZE = 16
CHUNK_TOKENS = 8192

Keys = list[bytes]


class Jaxkv:
    """jaxkv's side. All that this file knows of its classes is here."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, lazy: bool):
        self.pool = DeviceBlockPool(num_device_blocks)
        rules = OffloadRules("lazy" if lazy else "eager", CHUNK_TOKENS)
        self.scheduler = OffloadScheduler(BLOCK_SIZE, num_host_blocks, rules=rules)
        self.scheduler.bind_device_block_pool(self.pool)
        self.find_prefix = self.pool.find_prefix
        self.allocate = self.pool.allocate
        self.touch = self.pool.touch
        self.free = self.pool.free
        self.cache = self.pool.cache
        self.forget = self.pool.evict


class Twin:
    """The other side, with the same calls."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int, lazy: bool):
        self.pool = BlockPool(num_device_blocks)
        self.scheduler = ReferenceScheduler(
            BLOCK_SIZE,
            num_host_blocks + 1,  # The null block has a place there too.
            lazy=lazy,
            max_num_batched_tokens=CHUNK_TOKENS,
        )
        self.scheduler.bind_device_block_pool(self.pool)
        self.forget = self.pool.evict_blocks

    def find_prefix(self, keys: Keys) -> list[int]:
        block_ids = []
        for key in keys:
            block = self.pool.get_cached_block(key)
            if block is None:
                break
            block_ids.append(block.block_id)
        return block_ids

    def allocate(self, num: int) -> list[int]:
        return [block.block_id for block in self.pool.get_new_blocks(num)]

    def touch(self, block_ids: Sequence[int]) -> None:
        self.pool.touch([self.pool.blocks[i] for i in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        self.pool.free_blocks(self.pool.blocks[i] for i in block_ids)

    def cache(self, block_ids: Sequence[int], keys: Keys) -> None:
        for block_id, key in zip(block_ids, keys, strict=True):
            self.pool.cache_block(self.pool.blocks[block_id], key)


@dataclasses.dataclass
class Prompt:
    """A request, as an engine knows it. The token after its full blocks is its last."""

    request_id: str
    block_keys: Keys
    num_computed_tokens: int = 0
    block_ids: list[int] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.block_keys) * BLOCK_SIZE + 1


class Engine:
    """Calls a side as an engine does; adds up what its calls take."""

    def __init__(self, side: Jaxkv | Twin) -> None:
        self.side = side
        self.running: list[Prompt] = []  # The requests that are scheduled in every step
        self.start_clock()

    def start_clock(self) -> None:
        """Forget what was counted."""
        self.num_steps = 0  # Steps since the clock was started, as all that follows
        # What was matched, and which device blocks were loaded and stored
        self.moved: list[Any] = []
        # Seconds in the hooks of the scheduler, and in the pool
        self.spent_s = {"hooks": 0.0, "pool": 0.0}

    def admit(self, prompt: Prompt) -> None:
        """Find what is there of a prompt and give it blocks for its first step."""
        cached = self._pool(self.side.find_prefix, prompt.block_keys)
        num_local = len(cached) * BLOCK_SIZE
        ask = self.side.scheduler.get_num_new_matched_tokens
        num_loaded, _ = self._hook(ask, prompt, num_local)
        if cached:
            self._pool(self.side.touch, cached)
        prompt.block_ids = cached
        prompt.num_computed_tokens = num_local
        self._grow(prompt, num_local + num_loaded)
        tell = self.side.scheduler.update_state_after_alloc
        self._hook(tell, prompt, prompt.block_ids, num_loaded)
        prompt.num_computed_tokens += num_loaded
        self.moved.append(num_loaded)

    def step(self) -> None:
        """Schedule a step, end its transfers, and note what it would compute."""
        new_blocks = {}
        scheduled = {}
        for prompt in self.running:
            left = prompt.num_tokens - prompt.num_computed_tokens
            scheduled[prompt.request_id] = max(1, min(left, CHUNK_TOKENS))
            if left > 0:
                new = self._grow(prompt, prompt.num_computed_tokens)
                new_blocks[prompt.request_id] = new
        output = SchedulerOutput(scheduled, new_blocks)
        meta = self._hook(self.side.scheduler.build_connector_meta, output)
        self.moved.append(
            (sorted(meta.load_device_blocks), sorted(meta.store_device_blocks))
        )
        events = () if meta.store_event == NO_EVENT else (meta.store_event,)
        loaded = tuple(meta.load_event_to_reqs.get(meta.load_event, ()))
        report = ConnectorOutput(loaded, completed_store_events=events)
        self._hook(self.side.scheduler.update_connector_output, report)
        for prompt in self.running:
            if prompt.num_computed_tokens < prompt.num_tokens:
                self._compute(prompt, scheduled[prompt.request_id])
        self.num_steps += 1

    def resume(self, prompt: Prompt) -> None:
        """Run a request for a step, after its load."""
        num_loaded = len(prompt.block_keys)
        self._pool(self.side.cache, prompt.block_ids[:num_loaded], prompt.block_keys)
        tell = self.side.scheduler.update_state_after_alloc
        self._hook(tell, prompt, prompt.block_ids, 0)
        self.running.append(prompt)
        self.step()
        self.running.remove(prompt)

    def finish(self, prompt: Prompt) -> None:
        """End a request and give its blocks back, the last first."""
        self._hook(self.side.scheduler.request_finished, prompt)
        self._pool(self.side.free, prompt.block_ids[::-1])

    def serve(self, prompt: Prompt) -> None:
        """Run a request until all its full blocks are stored, and end it."""
        self.run(prompt)
        self.running.remove(prompt)
        self.finish(prompt)

    def run(self, prompt: Prompt) -> None:
        """Run a request until all its full blocks are stored; it goes on running."""
        self.admit(prompt)
        self.running.append(prompt)
        while prompt.num_computed_tokens < prompt.num_tokens:
            self.step()
        self.step()

    def _grow(self, prompt: Prompt, num_computed: int) -> list[int]:
        """Allocate the blocks that a request's next chunk needs."""
        end = min(num_computed + CHUNK_TOKENS, prompt.num_tokens)
        num_new = -(-end // BLOCK_SIZE) - len(prompt.block_ids)
        if num_new <= 0:
            return []
        new: list[int] = self._pool(self.side.allocate, num_new)
        prompt.block_ids += new
        return new

    def _compute(self, prompt: Prompt, num_tokens: int) -> None:
        start = prompt.num_computed_tokens // BLOCK_SIZE
        prompt.num_computed_tokens += num_tokens
        end = prompt.num_computed_tokens // BLOCK_SIZE
        if start < end:
            ids, keys = prompt.block_ids[start:end], prompt.block_keys[start:end]
            self._pool(self.side.cache, ids, keys)

    def _hook(self, call: Callable[..., Any], *args: Any) -> Any:
        return self._timed("hooks", call, *args)

    def _pool(self, call: Callable[..., Any], *args: Any) -> Any:
        return self._timed("pool", call, *args)

    def _timed(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        start_s = time.perf_counter()
        answer = call(*args)
        self.spent_s[what] += time.perf_counter() - start_s
        return answer
