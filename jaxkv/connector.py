"""What an engine, the offload scheduler and the worker tell one another.

The names are those of vLLM's connectors; everything here is a value or a shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxkv.types import BlockKey

NO_EVENT = -1


class Request(Protocol):
    """What the scheduler reads of an engine's request. It changes none of it."""

    @property
    def request_id(self) -> str:
        """Unique among the requests that are alive or have a load in flight."""
        ...

    @property
    def block_keys(self) -> Sequence[BlockKey]:
        """Keys of the full blocks of all tokens so far."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens so far, prompt and generated."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Of these, the ones whose KV is in the device pool for certain."""
        ...


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """What the engine is about to compute in a step.

    Attributes:
        num_scheduled_tokens: Tokens to compute, by request id.
        new_block_ids: Device blocks allocated since the last step, by request id,
            other than those given to `update_state_after_alloc`.
        preempted_req_ids: Requests whose blocks were taken away in this step.
    """

    num_scheduled_tokens: Mapping[str, int]
    new_block_ids: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    preempted_req_ids: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class OffloadMetadata:
    """The transfers of a step. Block ids of the two tiers go in pairs.

    Attributes:
        load_event: Number of this step's loads, NO_EVENT if there are none.
        load_device_blocks: Where the loads write.
        load_host_blocks: What they read.
        load_event_to_reqs: The requests that each load event in flight serves.
        store_event: Number of this step's stores, NO_EVENT if there are none.
        store_device_blocks: What the stores read.
        store_host_blocks: Where they write.
        need_flush: Whether blocks in flight are about to be taken away, so that the
            worker must wait for them first.
    """

    load_event: int
    load_device_blocks: tuple[int, ...]
    load_host_blocks: tuple[int, ...]
    load_event_to_reqs: Mapping[int, tuple[str, ...]]
    store_event: int
    store_device_blocks: tuple[int, ...]
    store_host_blocks: tuple[int, ...]
    need_flush: bool


@dataclasses.dataclass(frozen=True)
class ConnectorOutput:
    """What the worker saw complete.

    Attributes:
        finished_recving: Requests whose load arrived.
        failed_recving: Requests whose load failed; they compute those tokens instead.
        completed_store_events: Store events that arrived.
        failed_store_events: Store events that did not.
    """

    finished_recving: tuple[str, ...] = ()
    failed_recving: tuple[str, ...] = ()
    completed_store_events: tuple[int, ...] = ()
    failed_store_events: tuple[int, ...] = ()
