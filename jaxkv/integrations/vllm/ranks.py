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
from typing import Any, TypeAlias, TypeVar

from jaxkv.scheduling import ConnectorOutput, OffloadMetadata
from jaxkv.scheduling.protocol import NO_EVENT, NO_MOVES, TierMoves, TierReport
from jaxkv.types import NO_BLOCK, BlockKey

Name = TypeVar("Name")
Adapter: TypeAlias = tuple[int, bytes]

# The moves to and from the store, and the reports of those that have ended.
_BELOW = {"fetches": "fetched", "writes": "written", "probes": "probed"}


@dataclasses.dataclass(frozen=True, slots=True)  # Pickled without names.
class StepMetadata:
    """The transfers of a step, sent to the worker's process."""

    transfers: OffloadMetadata
    # Lost pools that the scheduler knew of when it planned the transfers: earlier KV
    # may have other weights. `ALL_LOST` while a reset waits for loads.
    num_lost_pools: int = 0
    is_idle: bool = False  # Whether the model computes nothing in the step.
    # The adapters, by vLLM's integer id and mark, in the keys of the requests that the
    # step computes, and of those that it begins to load.
    adapters: frozenset[Adapter] = frozenset()
    loaded_adapters: frozenset[Adapter] = frozenset()
    # The reported `WorkerReport.num_misfits` that no planned transfer precedes.
    num_misfits: tuple[tuple[int, int], ...] = ()


ALL_LOST = -1
"""A number of lost pools that ends all transfers planned until now."""


@dataclasses.dataclass
class RankStep:
    """The step of one rank.

    `DPScheduler` adds the rank's first block to `local_block_ids`: that is how the
    worker learns which rank it is.
    """

    sender: str  # Names the rank's scheduler.
    num_blocks: int  # Device blocks of the rank, by vLLM's configuration.
    step: StepMetadata
    local_block_ids: list[int] = dataclasses.field(default_factory=lambda: [0])

    @property
    def rank(self) -> int:
        """The number of the rank, from 0 on."""
        return self.local_block_ids[0] // self.num_blocks


@dataclasses.dataclass
class RankSteps:
    """A step of all ranks. `DPScheduler` makes an empty one and extends its list."""

    requests_meta: list[RankStep] = dataclasses.field(default_factory=list)


class Ranks:
    """Merges the steps of all ranks, and cuts the reports of their transfers.

    Stores of a step move together, so that an extent leaves all devices at once, and
    they are reported together. Each rank has an index of the store, which they share.
    """

    def __init__(self, num_ranks: int, num_host_blocks: int) -> None:
        self._num_ranks = num_ranks
        self._num_host_blocks = num_host_blocks  # Of each rank.
        self._next_event = 0
        # In flight: the sender of each load, by request; the senders of each store with
        # their own events, by the merged event.
        self._loads: dict[str, str] = {}
        self._stores: dict[int, list[tuple[str, int]]] = {}
        # By the field of a report and the merged event: the sender and its own event.
        self._below: dict[tuple[str, int], tuple[str, int]] = {}
        self._senders: list[str] = []
        self._num_without_store = 0

    def merge(self, steps: Sequence[RankStep], shard_blocks: int) -> list[StepMetadata]:
        """Merge the steps of all ranks, each with `shard_blocks` blocks of the caches.

        Ranks notice lost pools and misfits in different steps: each pair of their
        numbers has its own merged step. Those that know of fewer come first, so that an
        order to abandon transfers in flight spares the new ones.
        """
        ranks = [step.rank for step in steps]
        if sorted(ranks) != list(range(self._num_ranks)):
            raise RuntimeError(
                f"a step has transfers of the ranks {ranks}; it must have them of "
                f"{self._num_ranks} ranks, each once: this tpu-inference does not "
                "merge the metadata of its ranks as 0.32 does."
            )
        self._senders = [step.sender for step in steps]
        is_idle = all(rank_step.step.is_idle for rank_step in steps)
        by_numbers: dict[Any, list[RankStep]] = defaultdict(list)
        for rank_step in steps:
            step = rank_step.step
            by_numbers[step.num_lost_pools, step.num_misfits].append(rank_step)
        none: frozenset[Adapter] = frozenset()
        return [
            StepMetadata(
                *(self._merge(equal, shard_blocks), num_lost_pools, is_idle),
                none.union(*(rank.step.adapters for rank in equal)),
                none.union(*(rank.step.loaded_adapters for rank in equal)),
                num_misfits,
            )
            for (num_lost_pools, num_misfits), equal in sorted(by_numbers.items())
        ]

    def _merge(self, steps: list[RankStep], shard_blocks: int) -> OffloadMetadata:
        steps = [
            rank_step for rank_step in steps if not rank_step.step.transfers.is_nothing
        ]
        if not steps:
            return NO_MOVES
        event = self._new_event()
        blocks: dict[str, Any] = defaultdict(tuple)
        requests: list[str] = []
        sizes: list[int] = []
        stores: list[tuple[str, int]] = []
        for rank_step in steps:
            plan, sender = rank_step.step.transfers, rank_step.sender
            names = plan.load_event_to_reqs.get(plan.load_event, ())
            requests += names
            sizes += plan.load_sizes
            self._loads.update(dict.fromkeys(names, sender))
            if plan.store_event != NO_EVENT:
                stores.append((sender, plan.store_event))
            first_block = rank_step.rank * shard_blocks
            first_row = rank_step.rank * self._num_host_blocks
            for move in ("load", "store"):
                for place, first in (("device", first_block), ("host", first_row)):
                    field = f"{move}_{place}_blocks"
                    blocks[field] += _shifted(getattr(plan, field), first)
        if stores:
            self._stores[event] = stores
        return OffloadMetadata(
            load_event=event if requests else NO_EVENT,
            load_event_to_reqs={event: tuple(requests)} if requests else {},
            store_event=event if stores else NO_EVENT,
            need_flush=any(rank_step.step.transfers.need_flush for rank_step in steps),
            load_sizes=tuple(sizes),
            below=self._merge_below(steps),
            **blocks,
        )

    def _new_event(self) -> int:
        self._next_event += 1
        return self._next_event - 1

    def _merge_below(self, steps: Iterable[RankStep]) -> tuple[TierMoves, ...]:
        """Merge what moves to and from the store, which is the only tier below."""
        batches: dict[str, Any] = dict.fromkeys(_BELOW, ())
        deletes: tuple[BlockKey, ...] = ()
        was_last = self._num_without_store
        for rank_step in steps:
            first_row = rank_step.rank * self._num_host_blocks
            for moves in rank_step.step.transfers.below:
                deletes += moves.deletes
                self._num_without_store += moves.is_last
                for kind, field in _BELOW.items():
                    for batch in getattr(moves, kind):
                        event = self._new_event()
                        self._below[field, event] = rank_step.sender, batch.event
                        new: dict[str, Any] = {"event": event}
                        if kind != "probes":
                            blocks = _shifted(batch.upper_blocks, first_row)
                            new["upper_blocks"] = blocks
                        batches[kind] += (dataclasses.replace(batch, **new),)
        is_last = was_last < self._num_without_store == self._num_ranks
        merged = TierMoves(deletes=deletes, is_last=is_last, **batches)
        return () if merged == TierMoves() else (merged,)

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
        below = _by_sender(
            pair for report in output.below for pair in self._cut_below(report)
        )
        return {
            sender: ConnectorOutput(
                finished_recving=tuple(finished.get(sender, ())),
                failed_recving=tuple(failed.get(sender, ())),
                completed_store_events=tuple(stored.get(sender, ())),
                failed_store_events=tuple(not_stored.get(sender, ())),
                below=tuple(below.get(sender, ())),
            )
            for sender in {**finished, **failed, **stored, **not_stored, **below}
        }

    def _cut_below(self, report: TierReport) -> Iterable[tuple[str, TierReport]]:
        """Cut what the store has done; all ranks get what a listing has found."""
        ended: dict[str, dict[str, Any]] = {
            sender: dict.fromkeys(_BELOW.values(), ()) for sender in self._senders
        }
        for field in _BELOW.values():
            for event, oks in getattr(report, field):
                sender, own_event = self._below.pop((field, event))
                ended[sender][field] += ((own_event, oks),)
        for sender, fields in ended.items():
            part = dataclasses.replace(report, **fields)
            if part != TierReport(tier=report.tier):
                yield sender, part


def _shifted(blocks: Iterable[int], first: int) -> tuple[int, ...]:
    return tuple(block if block == NO_BLOCK else block + first for block in blocks)


def _by_sender(pairs: Iterable[tuple[str, Name]]) -> dict[str, list[Name]]:
    names: dict[str, list[Name]] = defaultdict(list)
    for sender, name in pairs:
        names[sender].append(name)
    return names
