"""Blocks on their way back to the device, from the query to the last report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from jaxkv.blocks import DeviceBlockPool
from jaxkv.connector import NO_EVENT, BlockTable, Request
from jaxkv.groups import FullAttention, GroupSpec, alignment
from jaxkv.host_tier import HostTier
from jaxkv.scheduling.gate import Gate
from jaxkv.scheduling.load_plan import (
    Ids,
    Load,
    find_offer,
    find_targets,
    split_load,
)
from jaxkv.scheduling.request_keys import RequestKeys
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search import Match
from jaxkv.types import BlockKey

HoldUp: TypeAlias = Literal["loading", "shared", "gate"]
_NO_IDS: Ids = np.empty(0, np.int32)


class Preview(NamedTuple):
    """What a query would come to.

    Attributes:
        match: The longest prefix that the tiers hold.
        num_tokens: What would be offered; None if the request is to ask again.
        is_awaited: Whether the request would have to wait for it.
        hold_up: Why it is less than the tiers hold: the request has a load under way;
            another has one of its blocks; computing is faster. None if it is not.
        own: The load that the request has under way.
        shared: Host blocks that others are loading, for which it would wait.
    """

    match: Match
    num_tokens: int | None
    is_awaited: bool
    hold_up: HoldUp | None
    own: Load | None
    shared: tuple[int, ...]


class Loads:
    """The loads of all requests.

    Every block of a load is held: on the host from the query on, so that nothing can
    evict what was offered; on the device from the allocation on; both until all workers
    have reported it.

    Args:
        groups: The groups of the model's layers.
        host: The host tier.
        rules: What the engine chose.
        gate: Tells whether a load is worth its time.
        keys: The requests' keys.
        stats: Where it is counted what comes of the loads.

    Attributes:
        event_to_reqs: The requests that each load event in flight serves.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: HostTier,
        rules: OffloadRules,
        gate: Gate,
        keys: RequestKeys,
        stats: OffloadStats,
    ) -> None:
        self.event_to_reqs: dict[int, tuple[str, ...]] = {}
        self._groups = groups
        self._host = host
        self._rules = rules
        self._gate = gate
        self._keys = keys
        self._stats = stats
        self._loads: dict[str, Load] = {}
        # How many loads bring each host block; kept only to delay those that share.
        self._shared: Counter[int] = Counter()
        self._next_event = 0

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_blocks_in_flight(self) -> int:
        """Device blocks that are being written."""
        return sum(
            len(load.written_blocks)
            for load in self._loads.values()
            if load.event != NO_EVENT
        )

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The part of `InTransit` that tells of loads; for any thread."""
        num_blocks = {True: 0, False: 0}
        rows = [_NO_IDS]
        for load in tuple(self._loads.values()):
            num_blocks[load.event == NO_EVENT] += len(load.written_blocks)
            rows.append(load.host_blocks)
        # Several requests may load one host block.
        return num_blocks[True], num_blocks[False], np.unique(np.concatenate(rows)).size

    def query(
        self, pool: DeviceBlockPool, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look for what continues a prefix, and hold it."""
        before = self._loads.get(request.request_id)
        if before is not None and before.event != NO_EVENT:
            return None, False  # From before a preemption; its end will be reported.
        self.drop(pool, request.request_id)

        def num_free_beside(sources: Ids) -> int:
            pool.pin(sources)
            num_free = pool.num_free
            pool.unpin(sources)
            return num_free

        factor = self._rules.blocks_per_host_block
        _, load = find_offer(
            self._groups,
            self._host,
            pool,
            request,
            self._keys.of(request),
            num_computed_tokens,
            self._rules,
            num_free_beside,
        )
        if load is None:
            return 0, False
        rows = load.host_blocks
        if self._rules.delay_shared_loads and any(map(self._shared.get, rows.tolist())):
            return None, False
        if rows.size and not self._gate.is_worth(
            num_tokens=load.num_tokens,
            num_blocks=rows.size * factor,
            num_blocks_ahead=self.num_blocks_in_flight,
        ):
            return 0, False
        self._host.pin(rows)
        pool.pin(load.sources)
        self._loads[request.request_id] = load
        if self._rules.delay_shared_loads:
            self._shared.update(rows.tolist())
        # Copies are done when the step's model runs; a transfer takes its time.
        load.is_awaited = bool(rows.size)
        return load.num_tokens, load.is_awaited

    def preview(
        self,
        pool: DeviceBlockPool,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_computed_tokens: int,
    ) -> Preview:
        """Tell what `query` would answer, and change nothing."""
        own = self._loads.get(request.request_id)
        dropped = _NO_IDS  # What `query` lets go of first.
        if own is not None and own.event == NO_EVENT:
            dropped = np.concatenate(
                [own.sources, own.written_blocks, own.copy_targets]
            )

        def num_free_beside(sources: Ids) -> int:
            blocks = np.union1d(sources, dropped)
            held, pins = pool.counts(blocks)
            pins_then = pins - (blocks[:, None] == dropped).sum(axis=1)
            is_free_then = (held == 0) & (pins_then == 0) & ~np.isin(blocks, sources)
            num_free_now = int(((held == 0) & (pins == 0)).sum())
            return pool.num_free + int(is_free_then.sum()) - num_free_now

        factor = self._rules.blocks_per_host_block
        match, load = find_offer(
            self._groups,
            self._host,
            pool,
            request,
            keys,
            num_computed_tokens,
            self._rules,
            num_free_beside,
        )
        if own is not None and own.event != NO_EVENT:
            return Preview(match, None, False, "loading", own, ())
        if load is None:
            return Preview(match, 0, False, None, None, ())
        rows = load.host_blocks
        if self._rules.delay_shared_loads:
            of_others = self._shared - Counter(own.host_blocks.tolist() if own else ())
            shared = tuple(row for row in rows.tolist() if of_others[row])
            if shared:
                return Preview(match, None, False, "shared", None, shared)
        if rows.size and not self._gate.would_pass(
            num_tokens=load.num_tokens,
            num_blocks=rows.size * factor,
            num_blocks_ahead=self.num_blocks_in_flight,
        ):
            return Preview(match, 0, False, "gate", None, ())
        return Preview(match, load.num_tokens, bool(rows.size), None, None, ())

    def take(
        self,
        pool: DeviceBlockPool,
        request: Request,
        table: BlockTable,
        num_external_tokens: int,
    ) -> Load | None:
        """Note where what was offered is to go; give what was taken of it."""
        load = self._loads.get(request.request_id)
        if load is not None and load.targets is not None:
            if num_external_tokens:
                raise ValueError(
                    f"{num_external_tokens=} of request {request.request_id!r} must be "
                    "0: it has taken an offer, whose load is under way."
                )
            return None
        offered = load.num_tokens if load else 0
        step = alignment(self._groups)
        if not all(isinstance(group, FullAttention) for group in self._groups):
            step = max(offered, 1)  # A shorter prefix may need other blocks.
        if num_external_tokens % step or not 0 <= num_external_tokens <= offered:
            raise ValueError(
                f"{num_external_tokens=} of request {request.request_id!r} must be a "
                f"multiple of {step} up to {offered}, the offer."
            )
        if load is None:
            return None
        if num_external_tokens == 0:
            self.drop(pool, request.request_id)
            return None
        num_tokens = load.num_computed_tokens + num_external_tokens
        taken, left = split_load(
            load, *find_targets(load, self._groups, table, num_tokens)
        )
        pool.pin(np.concatenate([taken.written_blocks, taken.copy_targets]))
        pool.unpin(left.sources)
        self._release([left])
        self._loads[request.request_id] = taken
        return taken

    @property
    def is_held_up(self) -> bool:
        """Whether a load has been taken and has not left."""
        return any(
            load.event == NO_EVENT and load.targets is not None
            for load in self._loads.values()
        )

    def issue(
        self, pool: DeviceBlockPool, num_blocks: int | None, in_flight: int
    ) -> tuple[int, list[Load], list[Load]]:
        """Send out loads that have been taken, in the order of the queries.

        Args:
            pool: The device's blocks.
            num_blocks: How many device blocks may leave; None for any number. A load
                that is larger leaves if nothing else is in flight.
            in_flight: Device blocks that are in flight, in either direction.

        Returns:
            The event, the loads that leave with it, and the loads with copies, which
            are done in this step.
        """
        event = self._next_event
        leaving: list[Load] = []
        copying: list[Load] = []
        for load in list(self._loads.values()):
            if load.event != NO_EVENT or load.targets is None:
                continue
            own = len(load.written_blocks)
            if num_blocks is not None and own:
                if own > num_blocks and in_flight:
                    num_blocks = 0  # Nor may others overtake it.
                    continue
                num_blocks -= own
                in_flight += own
            if load.sources.size:
                copying.append(load)
            if load.is_awaited:
                load.event = event
                leaving.append(load)
            else:
                del self._loads[load.request_id]
        for load in copying:
            self._stats.num_copied += load.sources.size
            # Whatever overwrites a source comes later, on the device too.
            pool.unpin(load.sources)
            if load.event == NO_EVENT:
                pool.unpin(load.copy_targets)
        if not leaving:
            return NO_EVENT, [], copying
        self._next_event += 1
        self.event_to_reqs[event] = tuple(load.request_id for load in leaving)
        return event, leaving, copying

    def report(
        self, pool: DeviceBlockPool, finished: Sequence[str], failed: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Note what workers reported.

        Returns:
            The requests whose loads are now there, and those whose loads have failed,
            on one worker or more.

        Raises:
            ValueError: If no report of such a load is due. Then nothing changes.
        """
        for request_id, count in Counter((*finished, *failed)).items():
            load = self._loads.get(request_id)
            due = self._rules.world_size - load.num_reports if load else 0
            if load is None or load.event == NO_EVENT or count > due:
                raise ValueError(
                    f"{count} reports of a load of request {request_id!r}, which is "
                    f"not in flight on so many workers; in flight are "
                    f"{sorted(self.event_to_reqs.values())}."
                )
        ended: list[Load] = []
        for request_id in (*finished, *failed):
            load = self._loads[request_id]
            load.num_reports += 1
            load.has_failed |= request_id in failed
            if load.num_reports == self._rules.world_size:
                ended.append(load)
        for load in ended:
            self._stats.num_loads_failed += load.has_failed
            self._stats.num_loads += not load.has_failed
            self._stats.num_loaded += len(load.written_blocks) * (not load.has_failed)
            if load.has_failed and load.is_wanted:
                # Now the request computes all that it was to get.
                pool.unwritten.difference_update(load.skipped)
        self._end(pool, ended)
        answers: tuple[list[str], list[str]] = [], []
        for load in ended:
            if load.is_wanted:
                answers[load.has_failed].append(load.request_id)
        return answers

    def drop(self, pool: DeviceBlockPool, request_id: str) -> None:
        """Let go of a load that nobody waits for; one in flight when it ends."""
        load = self._loads.get(request_id)
        if load is None:
            return
        if load.event != NO_EVENT:
            load.is_wanted = False
            return
        pool.unpin(load.sources)
        self._end(pool, [load])

    def _end(self, pool: DeviceBlockPool, loads: Iterable[Load]) -> None:
        """Let go of all blocks of loads, but of sources of copies."""
        loads = list(loads)
        if not loads:
            return
        self._release(loads)
        pool.unpin(
            np.concatenate(
                [
                    ids
                    for load in loads
                    for ids in (load.written_blocks, load.copy_targets)
                ]
            )
        )
        for load in loads:
            del self._loads[load.request_id]
            if load.has_failed:
                # Whoever asks next is to compute them, and to store them anew.
                self._host.discard(load.keys)
            if load.event == NO_EVENT:
                continue
            others = tuple(
                other
                for other in self.event_to_reqs.pop(load.event)
                if other != load.request_id
            )
            if others:
                self.event_to_reqs[load.event] = others

    def _release(self, loads: Sequence[Load]) -> None:
        """Let go of the host blocks of loads."""
        rows = np.concatenate([load.host_blocks for load in loads])
        if rows.size:
            self._host.unpin(rows)
        if self._rules.delay_shared_loads:
            # Not `subtract`, which would keep every block that was ever loaded.
            self._shared -= Counter(rows.tolist())
