"""The books of offloading: which blocks move when, and for whom.

`OffloadScheduler` stands beside an engine's own scheduler and has the hooks of vLLM's
`SimpleCPUOffloadScheduler`, to be called in this order:

    once         bind_device_block_pool
    a request    get_num_new_matched_tokens -> the engine allocates its blocks
                 -> update_state_after_alloc
    a step       build_connector_meta -> `jaxkv.worker` moves the blocks
                 -> the model runs -> update_connector_output
    at its end   request_finished, for an aborted request too

Stores are eager: a block is stored in the step after it was computed, when its data
are certain. No hook blocks, and none touches an array on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxkv.blocks import DeviceBlockPool
from jaxkv.connector import (
    NO_EVENT,
    ConnectorOutput,
    OffloadMetadata,
    Request,
    SchedulerOutput,
)
from jaxkv.offloading_manager import OffloadingManager
from jaxkv.types import BlockKey, OffloadingEvent, Policy


@dataclasses.dataclass
class _Load:
    """Host blocks pinned for a request, from the query until they were read."""

    keys: list[BlockKey]
    host_blocks: list[int]
    first_block: int
    device_blocks: list[int] = dataclasses.field(default_factory=list)
    event: int = NO_EVENT


@dataclasses.dataclass
class _Store:
    """How far a request has been stored."""

    request: Request
    device_blocks: list[int]
    num_offered: int = 0


@dataclasses.dataclass
class _Transfer:
    """Blocks on their way to the host."""

    keys: list[BlockKey] = dataclasses.field(default_factory=list)
    device_blocks: list[int] = dataclasses.field(default_factory=list)
    host_blocks: list[int] = dataclasses.field(default_factory=list)


class OffloadScheduler:
    """Decides what is stored to the host and what is loaded back.

    Args:
        block_size: Tokens in a block, the same on both tiers.
        num_host_blocks: Blocks of the host tier.
        cache_policy: Which of them to give up when it is full; a name or a `Policy`.
        enable_events: Whether to keep events for `take_events`.
        store_threshold: Store only what `get_num_new_matched_tokens` looked up on the
            host at least so often; 0 or 1 to store whatever is computed.

    Raises:
        ValueError: If a number is too small, or the policy is not known or was made
            for other sizes.
        TypeError: If the policy is neither a name nor a `Policy`.

    Attributes:
        num_store_refusals: Times that the host tier had no room for all new blocks.
    """

    def __init__(
        self,
        block_size: int,
        num_host_blocks: int,
        cache_policy: str | Policy = "lru",
        enable_events: bool = False,
        *,
        store_threshold: int = 0,
    ) -> None:
        self.block_size = block_size
        self.num_store_refusals = 0
        self._manager = OffloadingManager(
            block_size,
            num_host_blocks,
            cache_policy,
            enable_events,
            store_threshold=store_threshold,
        )
        self._device_pool: DeviceBlockPool | None = None
        self._loads: dict[str, _Load] = {}
        self._stores: dict[str, _Store] = {}
        self._load_event_to_reqs: dict[int, tuple[str, ...]] = {}
        self._next_load_event = 0
        # Blocks given a place on the host, that leave with the next step's metadata.
        self._outgoing = _Transfer()
        self._stores_in_flight: dict[int, _Transfer] = {}
        self._next_store_event = 0

    def bind_device_block_pool(self, pool: DeviceBlockPool) -> None:
        """Take the pool whose blocks are to be held during transfers."""
        self._device_pool = pool

    @property
    def has_pending_stores(self) -> bool:
        """Whether blocks are on their way to the host."""
        return bool(self._stores_in_flight or self._outgoing.keys)

    @property
    def has_pending_loads(self) -> bool:
        """Whether blocks are on their way back, for a living request or a dead one."""
        return bool(self._loads)

    @property
    def num_host_blocks_held(self) -> int:
        """Blocks of the host tier that hold something, stores in flight included."""
        return self._manager.num_held_blocks

    def warm_up(self, max_blocks_per_request: int) -> None:
        """Compile all decisions now, so that no later request waits for it."""
        self._manager.warm_up(max_blocks_per_request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Ask how far the host tier continues a prefix; what it has is pinned.

        The pin lasts until the request's blocks are loaded, it finishes, or it asks
        again. The last token is never matched, as its logits are needed.

        Args:
            request: A request that is about to be scheduled.
            num_computed_tokens: Tokens found on the device, whole blocks.

        Returns:
            How many tokens more can be loaded, and whether that happens
            asynchronously, while the request waits.

        Raises:
            ValueError: If a load for a request of this name is in flight.
        """
        self._drop_unissued_load(request.request_id)
        if request.request_id in self._loads:
            raise ValueError(
                f"A load for {request.request_id=} is in flight; wait for it."
            )
        first = num_computed_tokens // self.block_size
        last = max(request.num_tokens - 1, 0) // self.block_size
        keys = list(request.block_keys[first:last])
        self._manager.touch(request.block_keys[:last])
        num_hits = self._manager.lookup(keys)
        if num_hits == 0:
            return 0, False
        keys = keys[:num_hits]
        spec = self._manager.prepare_load(keys)
        self._loads[request.request_id] = _Load(keys, spec.block_ids.tolist(), first)
        return num_hits * self.block_size, True

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Note the device blocks of a request and what is to be loaded into them.

        Args:
            request: The request.
            block_ids: All its device blocks, those found on the device first.
            num_external_tokens: How much of the host's offer the engine takes; 0 if
                nothing.

        Raises:
            ValueError: If that is no whole number of blocks, or more than
                `get_num_new_matched_tokens` offered.
        """
        request_id = request.request_id
        num_loads, rest = divmod(num_external_tokens, self.block_size)
        load = self._loads.get(request_id)
        offered = len(load.keys) if load else 0
        if rest or not 0 <= num_loads <= offered:
            raise ValueError(
                f"{num_external_tokens=} of request {request_id!r} must be a multiple "
                f"of {self.block_size} up to {offered * self.block_size}, the offer."
            )
        self._stores.setdefault(request_id, _Store(request, list(block_ids)))
        if load is None:
            return
        if num_loads < offered:
            self._manager.complete_load(load.keys[num_loads:])
            del load.keys[num_loads:], load.host_blocks[num_loads:]
        if num_loads == 0:
            del self._loads[request_id]
            return
        load.device_blocks = list(
            block_ids[load.first_block : load.first_block + num_loads]
        )
        self._pool.touch(load.device_blocks)

    def build_connector_meta(self, output: SchedulerOutput) -> OffloadMetadata:
        """List the transfers to start in this step.

        Args:
            output: What the engine is about to compute. The requests'
                `num_computed_tokens` do not count it yet.

        Returns:
            The transfers.
        """
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            store = self._stores.get(request_id)
            if store is None:
                continue
            store.device_blocks.extend(output.new_block_ids.get(request_id, ()))
            if num_tokens > 0:
                self._offer(store)
        store_event, outgoing = self._issue_stores()
        load_event, loads = self._issue_loads()
        return OffloadMetadata(
            load_event=load_event,
            load_device_blocks=tuple(b for load in loads for b in load.device_blocks),
            load_host_blocks=tuple(b for load in loads for b in load.host_blocks),
            load_event_to_reqs=dict(self._load_event_to_reqs),
            store_event=store_event,
            store_device_blocks=tuple(outgoing.device_blocks),
            store_host_blocks=tuple(outgoing.host_blocks),
            need_flush=bool(output.preempted_req_ids),
        )

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """Release what the worker no longer reads or writes.

        Args:
            output: What completed since the last time.
        """
        for request_id in (*output.finished_recving, *output.failed_recving):
            self._end_load(request_id)
        for event in output.completed_store_events:
            self._end_store(event, success=True)
        for event in output.failed_store_events:
            self._end_store(event, success=False)

    def request_finished(self, request: Request) -> None:
        """Note that a request is over, by itself or by abort.

        Its last full blocks are stored with the next step. The engine may free its
        blocks at once: what is in flight is held here until it has arrived.

        Args:
            request: The request, its `num_computed_tokens` final.
        """
        self._drop_unissued_load(request.request_id)
        store = self._stores.pop(request.request_id, None)
        if store is not None:
            self._offer(store)

    def take_events(self) -> Iterator[OffloadingEvent]:
        """Hand out the host tier's events since the last time."""
        return self._manager.take_events()

    @property
    def _pool(self) -> DeviceBlockPool:
        if self._device_pool is None:
            raise RuntimeError("Call bind_device_block_pool() before scheduling.")
        return self._device_pool

    def _offer(self, store: _Store) -> None:
        """Find places on the host for a request's blocks computed since the last time.

        Blocks for which there is no room are offered again in its next step.
        """
        request = store.request
        num_full = min(
            request.num_computed_tokens // self.block_size,
            len(request.block_keys),
            len(store.device_blocks),
        )
        if num_full <= store.num_offered:
            return
        first = store.num_offered
        # All or, as the manager places all or none, half of them, and so on: the head
        # of a prefix is worth having without its tail.
        while (
            answer := self._manager.prepare_store(request.block_keys[first:num_full])
        ) is None:
            self.num_store_refusals += 1
            num_full = first + (num_full - first) // 2
        if num_full == first:
            return
        # The whole prefix again, so that its head outlives its tail on the host.
        self._manager.touch(request.block_keys[:num_full])
        device_blocks = dict(
            zip(
                request.block_keys[first:num_full],
                store.device_blocks[first:num_full],
                strict=True,
            )
        )
        to_read = [device_blocks[key] for key in answer.block_hashes_to_store]
        self._pool.touch(to_read)
        self._outgoing.keys += answer.block_hashes_to_store
        self._outgoing.device_blocks += to_read
        self._outgoing.host_blocks += answer.store_spec.block_ids.tolist()
        store.num_offered = num_full

    def _issue_stores(self) -> tuple[int, _Transfer]:
        outgoing = self._outgoing
        if not outgoing.keys:
            return NO_EVENT, outgoing
        event = self._next_store_event
        self._next_store_event += 1
        self._stores_in_flight[event] = outgoing
        self._outgoing = _Transfer()
        return event, outgoing

    def _issue_loads(self) -> tuple[int, list[_Load]]:
        waiting = {
            request_id: load
            for request_id, load in self._loads.items()
            if load.event == NO_EVENT and load.device_blocks
        }
        if not waiting:
            return NO_EVENT, []
        event = self._next_load_event
        self._next_load_event += 1
        self._load_event_to_reqs[event] = tuple(waiting)
        for load in waiting.values():
            load.event = event
        return event, list(waiting.values())

    def _end_store(self, event: int, *, success: bool) -> None:
        transfer = self._stores_in_flight.pop(event)
        self._manager.complete_store(transfer.keys, success)
        # Tail first, so that on the device too the head of a prefix outlives it.
        self._pool.free(transfer.device_blocks[::-1])

    def _end_load(self, request_id: str) -> None:
        load = self._loads.pop(request_id)
        self._manager.complete_load(load.keys)
        self._pool.free(load.device_blocks[::-1])
        others = tuple(
            other
            for other in self._load_event_to_reqs.get(load.event, ())
            if other != request_id
        )
        if others:
            self._load_event_to_reqs[load.event] = others
        else:
            self._load_event_to_reqs.pop(load.event, None)

    def _drop_unissued_load(self, request_id: str) -> None:
        load = self._loads.get(request_id)
        if load is not None and load.event == NO_EVENT:
            self._end_load(request_id)
