"""The steps of several schedulers, merged for one worker; its reports, cut for each.

With data or attention parallelism tpu-inference runs a scheduler for each rank, in a
process of its own, and one worker over KV caches whose block axis is sharded over the
ranks. Each scheduler numbers its device blocks, host blocks and events from 0 on, and
has a part of the host tier. tpu-inference's `DPScheduler` merges the metadata of its
own connectors only, by the names of their attributes, which the classes here have.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jaxkv.scheduling.protocol import (
    NO_EVENT,
    NO_MOVES,
    ConnectorOutput,
    OffloadMetadata,
)
from jaxkv.types import NO_BLOCK

Name = TypeVar("Name")


@dataclasses.dataclass
class RankStep:
    """The transfers of one rank in a step.

    `DPScheduler` adds the rank's first block to `local_block_ids`: that is how the
    worker learns which rank it is.
    """

    sender: str  # Names the rank's scheduler.
    num_blocks: int  # Device blocks of the rank, by vLLM's configuration.
    transfers: OffloadMetadata
    num_lost_pools: int
    is_idle: bool
    local_block_ids: list[int] = dataclasses.field(default_factory=lambda: [0])

    @property
    def rank(self) -> int:
        """The number of the rank, from 0 on."""
        return self.local_block_ids[0] // self.num_blocks


@dataclasses.dataclass
class RankSteps:
    """A step of all ranks. `DPScheduler` makes an empty one and extends its list."""

    requests_meta: list[RankStep] = dataclasses.field(default_factory=list)


class Merged(NamedTuple):
    """The transfers of the ranks that know of equally many lost pools."""

    transfers: OffloadMetadata
    num_lost_pools: int
    is_idle: bool  # Whether the model computes nothing for any rank.


class Ranks:
    """Merges the steps of all ranks, and cuts the reports of their transfers.

    Stores of a step move together, so that an extent leaves all devices at once, and
    they are reported together.
    """

    def __init__(self, num_ranks: int, num_host_blocks: int) -> None:
        self._num_ranks = num_ranks
        self._num_host_blocks = num_host_blocks  # Of each rank.
        self._next_event = 0
        # In flight: the sender of each load, by request; the senders of each store with
        # their own events, by the merged event.
        self._loads: dict[str, str] = {}
        self._stores: dict[int, list[tuple[str, int]]] = {}

    def merge(self, steps: Sequence[RankStep], shard_blocks: int) -> list[Merged]:
        """Merge the steps of all ranks, each with `shard_blocks` blocks of the caches.

        Ranks notice a lost pool in different steps: those that know of fewer come
        first, so that an order to abandon transfers in flight spares the new ones.
        """
        ranks = [step.rank for step in steps]
        if sorted(ranks) != list(range(self._num_ranks)):
            raise RuntimeError(
                f"a step has transfers of the ranks {ranks}; it must have them of "
                f"{self._num_ranks} ranks, each once: this tpu-inference does not "
                "merge the metadata of its ranks as 0.32 does."
            )
        is_idle = all(step.is_idle for step in steps)
        by_loss: dict[int, list[RankStep]] = defaultdict(list)
        for step in steps:
            by_loss[step.num_lost_pools].append(step)
        return [
            Merged(self._merge(by_loss[num_lost], shard_blocks), num_lost, is_idle)
            for num_lost in sorted(by_loss)
        ]

    def _merge(self, steps: list[RankStep], shard_blocks: int) -> OffloadMetadata:
        steps = [step for step in steps if not step.transfers.is_nothing]
        if not steps:
            return NO_MOVES
        event = self._next_event
        self._next_event += 1
        load_blocks: list[int] = []
        load_rows: list[int] = []
        requests: list[str] = []
        sizes: list[int] = []
        store_blocks: list[int] = []
        store_rows: list[int] = []
        stores: list[tuple[str, int]] = []
        for step in steps:
            plan, sender = step.transfers, step.sender
            first_block = step.rank * shard_blocks
            first_row = step.rank * self._num_host_blocks
            if plan.load_event != NO_EVENT:
                names = plan.load_event_to_reqs[plan.load_event]
                load_blocks += _shifted(plan.load_device_blocks, first_block)
                load_rows += _shifted(plan.load_host_blocks, first_row)
                requests += names
                sizes += plan.load_sizes
                self._loads.update(dict.fromkeys(names, sender))
            if plan.store_event != NO_EVENT:
                store_blocks += _shifted(plan.store_device_blocks, first_block)
                store_rows += _shifted(plan.store_host_blocks, first_row)
                stores.append((sender, plan.store_event))
        if stores:
            self._stores[event] = stores
        return OffloadMetadata(
            load_event=event if requests else NO_EVENT,
            load_device_blocks=tuple(load_blocks),
            load_host_blocks=tuple(load_rows),
            load_event_to_reqs={event: tuple(requests)} if requests else {},
            store_event=event if stores else NO_EVENT,
            store_device_blocks=tuple(store_blocks),
            store_host_blocks=tuple(store_rows),
            need_flush=any(step.transfers.need_flush for step in steps),
            load_sizes=tuple(sizes),
        )

    def cut(self, output: ConnectorOutput) -> Mapping[str, ConnectorOutput]:
        """Cut a report into one for each sender, with the sender's own events."""
        finished, failed = (
            _by_sender((self._loads.pop(name), name) for name in names)
            for names in (output.finished_recving, output.failed_recving)
        )
        stored, not_stored = (
            _by_sender(store for event in events for store in self._stores.pop(event))
            for events in (output.completed_store_events, output.failed_store_events)
        )
        return {
            sender: ConnectorOutput(
                finished_recving=tuple(finished.get(sender, ())),
                failed_recving=tuple(failed.get(sender, ())),
                completed_store_events=tuple(stored.get(sender, ())),
                failed_store_events=tuple(not_stored.get(sender, ())),
            )
            for sender in {**finished, **failed, **stored, **not_stored}
        }


def _shifted(blocks: Iterable[int], first: int) -> list[int]:
    return [block if block == NO_BLOCK else block + first for block in blocks]


def _by_sender(pairs: Iterable[tuple[str, Name]]) -> dict[str, list[Name]]:
    names: dict[str, list[Name]] = defaultdict(list)
    for sender, name in pairs:
        names[sender].append(name)
    return names
