"""Blocks on their way back to the device, from the query to the last report."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.scheduling.gate import Gate
from jaxkv.scheduling.protocol import NO_EVENT, Request
from jaxkv.scheduling.request_keys import RequestKeys
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import FullAttention, GroupSpec, alignment
from jaxkv.search.tiers import Match, first_tokens, search, source_of
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.host import OffloadingManager
from jaxkv.types import KEY_BYTES, NO_BLOCK, NULL_BLOCK, BlockKey

Stall: TypeAlias = Literal["loading", "shared", "gate"]
Ids: TypeAlias = NDArray[np.int32]
_NO_IDS: Ids = np.empty(0, np.int32)
# Of the counts' own type: with an int `np.add.at` takes seventy times as long.
_ONE = np.int32(1)
# How many requests an error lists.
_MOST_NAMES = 8


@dataclasses.dataclass
class Load:
    """What one request gets from the host, and from elsewhere on the device.

    A row is a host block, which holds m device blocks. r rows, c copies.

    Attributes:
        request_id: Whose it is.
        num_computed_tokens: What the request had when it asked.
        num_tokens: What it was offered beyond that.
        request_keys: The request's keys, for each group.
        host_blocks: i32[r]. The id of each row.
        row_groups: i32[r]. The group of layers of each.
        row_indices: i32[r, m]. Which of the request's blocks in that group its parts
            are; NO_BLOCK for a part that is not wanted.
        sources: i32[c]. Device blocks to be copied.
        copy_groups: i32[c]. The group of layers of each.
        copy_indices: i32[c]. Which of the request's blocks in that group it is.
        is_awaited: Whether the request was told to wait for a report, which comes even
            if it takes no more of the offer than copies.
        targets: i32[r, m]. Device blocks that are written; NO_BLOCK for a part that is
            not wanted. None until the allocation.
        copy_targets: i32[c]. Likewise, for the copies.
        event: Which load event it left with.
        num_reports: Workers that reported it.
        has_failed: Whether one of them reported a failure.
        is_wanted: Whether the request still waits for it, or runs with it.
        skipped: Device blocks of what was offered that nothing is written to.
        written_blocks: i32[w]. Device blocks that the transfer writes.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    request_keys: Sequence[Sequence[BlockKey]]
    host_blocks: Ids
    row_groups: Ids
    row_indices: Ids
    sources: Ids
    copy_groups: Ids
    copy_indices: Ids
    is_awaited: bool = False
    targets: Ids | None = None
    copy_targets: Ids = dataclasses.field(default_factory=lambda: _NO_IDS)
    event: int = NO_EVENT
    num_reports: int = 0
    has_failed: bool = False
    is_wanted: bool = True
    skipped: Sequence[int] = ()
    written_blocks: Ids = dataclasses.field(default_factory=lambda: _NO_IDS)

    @property
    def keys(self) -> list[BlockKey]:
        """Key of each row: that of its last block."""
        factor = self.row_indices.shape[1]
        lasts = self.row_indices.max(axis=1, initial=NO_BLOCK) // factor * factor
        return [
            self.request_keys[group][last + factor - 1]
            for group, last in zip(
                self.row_groups.tolist(), lasts.tolist(), strict=True
            )
        ]

    def aim(self, targets: Ids, copy_targets: Ids) -> None:
        """Note the device blocks that are written."""
        self.targets, self.copy_targets = targets, copy_targets
        self.written_blocks = targets[targets != NO_BLOCK]


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
    hold_up: Stall | None
    own: Load | None
    shared: frozenset[int]


class Loads:
    """The loads of all requests.

    No call goes over all of them, as there may be many: whatever is asked about them
    together is kept up to date.

    Every block of a load is held: on the host from the query on, so that nothing can
    evict what was offered; on the device from the allocation on; both until all workers
    have reported it.

    Args:
        groups: The groups of the model's layers.
        host: The host tier.
        rules: What the engine chose.
        gate: Tells whether a load is worth its time.
        keys: The requests' keys.
        stats: Where loads that arrive and loads that fail are counted.

    Attributes:
        num_blocks_in_flight: Device blocks that are being written.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: OffloadingManager,
        rules: OffloadRules,
        gate: Gate,
        keys: RequestKeys,
        stats: OffloadStats,
    ) -> None:
        self._groups = groups
        self._host = host
        self._rules = rules
        self._gate = gate
        self._keys = keys
        self._stats = stats
        self._loads: dict[str, Load] = {}
        # Those that were taken and have not left, in the order in which they were:
        # those with a transfer, and those with nothing but copies.
        self._waiting: OrderedDict[str, Load] = OrderedDict()
        self._copying: dict[str, Load] = {}
        # How many loads read each host block.
        self._num_readers = np.zeros(host.num_blocks, np.int32)
        self._next_event = 0
        self._num_blocks_waiting = 0
        self.num_blocks_in_flight = 0
        is_all_read = all(isinstance(group, FullAttention) for group in groups)
        # Whether `find_plain_offer` does.
        self._is_plain = (
            is_all_read
            and len(groups) == rules.blocks_per_host_block == 1
            and rules.copy_on_device
        )
        # How many tokens an offer may be cut by; None if it may not.
        self._step = alignment(groups) if is_all_read else None

    def __len__(self) -> int:
        return len(self._loads)

    def is_under_way(self, request_id: str) -> bool:
        """Whether a request has a load in flight, such as from before a preemption."""
        load = self._loads.get(request_id)
        return load is not None and load.event != NO_EVENT

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The part of `InTransit` that tells of loads; for any thread."""
        # Several requests may load one host block.
        num_read = int(np.count_nonzero(self._num_readers))
        return self._num_blocks_waiting, self.num_blocks_in_flight, num_read

    def warm_up(self, pool: DeviceBlockPool) -> None:
        """Load, or compile, what the tiers do not themselves."""
        if self._is_plain:
            self._host.find_beside(pool, [bytes(KEY_BYTES)])

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
        args = self._groups, self._host, pool, request, self._keys.of(request)
        load, is_found = None, False
        if self._is_plain:
            load, is_found = find_plain_offer(*args, num_computed_tokens)
        if not is_found:
            how = num_computed_tokens, self._rules, num_free_beside
            _, load = find_offer(*args, *how)
        if load is None:
            return 0, False
        rows = load.host_blocks
        if self._rules.delay_shared_loads and self._num_readers[rows].any():
            return None, False
        if rows.size and not self._gate.is_worth(
            num_tokens=load.num_tokens,
            num_blocks=rows.size * factor,
            num_blocks_ahead=self.num_blocks_in_flight,
        ):
            return 0, False
        self._host.pin(rows)
        if load.sources.size:
            pool.pin(load.sources)
        self._loads[request.request_id] = load
        np.add.at(self._num_readers, rows, _ONE)
        # Copies are done when the step's model runs; a transfer takes its time, unless
        # the model itself waits for it.
        load.is_awaited = bool(rows.size) and not self._rules.load_in_step
        return load.num_tokens, load.is_awaited

    def preview(
        self,
        pool: DeviceBlockPool,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        num_computed_tokens: int,
    ) -> Preview:
        """Tell what `query` would answer, and change nothing."""
        nothing: frozenset[int] = frozenset()
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
            return Preview(match, None, False, "loading", own, nothing)
        if load is None:
            return Preview(match, 0, False, None, None, nothing)
        rows = load.host_blocks
        if self._rules.delay_shared_loads:
            of_own = Counter(own.host_blocks.tolist() if own else ())
            num_readers = zip(
                rows.tolist(), self._num_readers[rows].tolist(), strict=True
            )
            shared = frozenset(row for row, num in num_readers if num > of_own[row])
            if shared:
                return Preview(match, None, False, "shared", None, shared)
        if rows.size and not self._gate.is_worth(
            num_tokens=load.num_tokens,
            num_blocks=rows.size * factor,
            num_blocks_ahead=self.num_blocks_in_flight,
            is_preview=True,
        ):
            return Preview(match, 0, False, "gate", None, nothing)
        is_awaited = bool(rows.size) and not self._rules.load_in_step
        return Preview(match, load.num_tokens, is_awaited, None, None, nothing)

    def take(
        self,
        pool: DeviceBlockPool,
        request: Request,
        tables: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> Load | None:
        """Note where what was offered is to go; give what was taken of it."""
        load = self._loads.get(request.request_id)
        if load is not None and load.targets is not None:
            if num_external_tokens:
                raise ValueError(
                    f"{num_external_tokens=} of request {shown(request.request_id)} "
                    "must be 0: it has taken an offer, whose load is under way."
                )
            return None
        offered = load.num_tokens if load else 0
        # Where not all of a prefix is read, a shorter one may need other blocks.
        step = self._step or max(offered, 1)
        if num_external_tokens % step or not 0 <= num_external_tokens <= offered:
            raise ValueError(
                f"{num_external_tokens=} of request {shown(request.request_id)} must "
                f"be a multiple of {step} up to {offered}, the offer."
            )
        if load is None:
            return None
        if num_external_tokens == 0:
            self.drop(pool, request.request_id)
            return None
        num_tokens = load.num_computed_tokens + num_external_tokens
        targets = find_targets(load, self._groups, tables, num_tokens)
        taken, left = load, None
        if num_external_tokens < offered:
            taken, left = split_load(load, *targets)
        else:
            load.aim(*targets)
        pool.pin(taken.written_blocks)
        if taken.copy_targets.size:
            pool.pin(taken.copy_targets)
        if left is not None:
            pool.unpin(left.sources)
            self._release([left])
        self._loads[request.request_id] = taken
        num_blocks = len(taken.written_blocks)
        self._num_blocks_waiting += num_blocks
        (self._waiting if num_blocks else self._copying)[request.request_id] = taken
        return taken

    @property
    def is_held_up(self) -> bool:
        """Whether a load has been taken and has not left."""
        return bool(self._waiting or self._copying)

    def issue(
        self, pool: DeviceBlockPool, num_blocks: int | None, in_flight: int
    ) -> tuple[int, list[Load], list[Load]]:
        """Send out loads that have been taken, in the order in which they were.

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
        ready = list(self._copying.values())
        self._copying.clear()
        while self._waiting:
            load = next(iter(self._waiting.values()))
            own = len(load.written_blocks)
            if num_blocks is not None:
                if own > num_blocks and in_flight:
                    break  # Nor may others overtake it.
                num_blocks -= own
                in_flight += own
            self._waiting.popitem(last=False)
            self._num_blocks_waiting -= own
            self.num_blocks_in_flight += own
            ready.append(load)
        leaving = [load for load in ready if load.is_awaited or load.host_blocks.size]
        copying = [load for load in ready if load.sources.size]
        for load in leaving:
            load.event = event
        for load in ready:
            if load.event == NO_EVENT:
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
        return event, leaving, copying

    def report(
        self, pool: DeviceBlockPool, finished: Sequence[str], failed: Sequence[str]
    ) -> tuple[list[str], list[str]]:
        """Note what workers reported.

        Returns:
            The requests that wait for a load that is now there, and those whose loads
            have failed, on one worker or more.

        Raises:
            ValueError: If no report of such a load is due. Then nothing changes.
        """
        if not (finished or failed):
            return [], []
        for request_id, count in Counter((*finished, *failed)).items():
            load = self._loads.get(request_id)
            due = self._rules.world_size - load.num_reports if load else 0
            if load is None or load.event == NO_EVENT or count > due:
                raise ValueError(
                    f"{count} reports of a load of request {shown(request_id)}, which "
                    f"is not in flight on that many workers; in flight are "
                    f"{self._names_in_flight()}."
                )
        ended: list[Load] = []
        has_failed = set(failed)
        for request_id in (*finished, *failed):
            load = self._loads[request_id]
            load.num_reports += 1
            load.has_failed |= request_id in has_failed
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
            if load.is_wanted and (load.is_awaited or load.has_failed):
                answers[load.has_failed].append(load.request_id)
        return answers

    def _names_in_flight(self) -> str:
        """List the requests whose loads are in flight; not all of many."""
        names = [name for name, load in self._loads.items() if load.event != NO_EVENT]
        more = len(names) - _MOST_NAMES
        return f"{names[:_MOST_NAMES]}" + (f" and {more} more" if more > 0 else "")

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

    def _end(self, pool: DeviceBlockPool, loads: Sequence[Load]) -> None:
        """Let go of all blocks of loads, but of sources of copies."""
        if not loads:
            return
        self._release(loads)
        targets = [
            ids
            for load in loads
            for ids in (load.written_blocks, load.copy_targets)
            if ids.size
        ]
        if targets:
            pool.unpin(_join(targets))
        for load in loads:
            del self._loads[load.request_id]
            if load.has_failed:
                # Whoever asks next is to compute them, and to store them anew.
                self._host.discard(load.keys)
            if load.event != NO_EVENT:
                self.num_blocks_in_flight -= len(load.written_blocks)
            elif self._waiting.pop(load.request_id, None) is not None:
                self._num_blocks_waiting -= len(load.written_blocks)
            else:
                self._copying.pop(load.request_id, None)

    def _release(self, loads: Sequence[Load]) -> None:
        """Let go of the host blocks of loads."""
        rows = _join([load.host_blocks for load in loads])
        if rows.size:
            self._host.unpin(rows)
            np.subtract.at(self._num_readers, rows, _ONE)


def plan_load(
    groups: tuple[GroupSpec, ...],
    request_id: str,
    keys: Sequence[Sequence[BlockKey]],
    match: Match,
    num_computed_tokens: int,
    blocks_per_host_block: int,
) -> Load:
    """List what a request lacks of its longest prefix.

    Args:
        groups: The groups of the model's layers.
        request_id: The request.
        keys: Its keys, for each group.
        match: The longest prefix.
        num_computed_tokens: What the request has of it.
        blocks_per_host_block: Device blocks in a host block.
    """
    factor = blocks_per_host_block
    rows, row_indices, sources, copies = [], [], [], []
    for spec, needed, on_device, on_host in zip(
        groups, match.needed, *match.block_ids, strict=True
    ):
        start = num_computed_tokens // spec.block_size
        missing = needed[start:].nonzero()[0].astype(np.int32) + np.int32(start)
        # A copy on the device costs next to nothing beside a transfer.
        nearby = on_device[missing]
        is_copied = nearby != NO_BLOCK
        if is_copied.any():
            copies.append(missing[is_copied])
            sources.append(nearby[is_copied])
            missing = missing[~is_copied]
        else:
            copies.append(_NO_IDS)
            sources.append(_NO_IDS)
        parts = missing[:, None]
        if factor > 1:
            is_missing = np.zeros(-(-needed.size // factor) * factor, np.bool_)
            is_missing[missing] = True
            missing = np.unique(missing // factor) * factor
            parts = missing[:, None] + np.arange(factor, dtype=np.int32)
            parts = np.where(is_missing[parts], parts, np.int32(NO_BLOCK))
        rows.append(on_host[missing])
        row_indices.append(parts)
    return Load(
        request_id,
        num_computed_tokens,
        match.num_tokens - num_computed_tokens,
        keys,
        _join(rows),
        row_groups=_number(rows),
        row_indices=_join(row_indices),
        sources=_join(sources),
        copy_groups=_number(copies),
        copy_indices=_join(copies),
    )


def _join(each: Sequence[Ids]) -> Ids:
    """Put arrays in a row, such as those of all groups."""
    return each[0] if len(each) == 1 else np.concatenate(each)


def _number(each: Sequence[Ids]) -> Ids:
    """Tell of each item of arrays in a row which array it is from."""
    if len(each) == 1:
        return np.zeros(len(each[0]), np.int32)
    numbers = np.arange(len(each), dtype=np.int32)
    return np.repeat(numbers, [len(own) for own in each])


def find_offer(
    groups: tuple[GroupSpec, ...],
    host: OffloadingManager,
    pool: DeviceBlockPool,
    request: Request,
    keys: Sequence[Sequence[BlockKey]],
    num_computed_tokens: int,
    rules: OffloadRules,
    num_free_beside: Callable[[Ids], int],
) -> tuple[Match, Load | None]:
    """Find what continues a request's prefix. Nothing is held or changed.

    Args:
        groups: The groups of the model's layers.
        host: The host tier.
        pool: The device's blocks.
        request: The request.
        keys: Its keys, for each group.
        num_computed_tokens: What the request has of it.
        rules: What the engine chose.
        num_free_beside: Tells how many device blocks are free, if these are held.

    Returns:
        The longest prefix that may be used, and what the request lacks of it; None if
        that is nothing.
    """

    def look(max_device_tokens: int | None) -> tuple[Match, Load | None]:
        factor = rules.blocks_per_host_block
        device = source_of(pool) if rules.copy_on_device else first_tokens(0)
        if max_device_tokens is not None:
            device = device._replace(max_tokens=max_device_tokens)
        sources = device, source_of(host, factor)
        match = search(groups, keys, request.num_tokens - 1, sources)
        if match.num_tokens <= num_computed_tokens:
            return match, None
        name = request.request_id
        return match, plan_load(groups, name, keys, match, num_computed_tokens, factor)

    match, load = look(None if rules.copy_on_device else num_computed_tokens)
    if load is not None and load.sources.size:
        # Beside the blocks that it is to copy a request must find its own, else it
        # would hold them and ask for ever, if no other request ends.
        each = (-(-request.num_tokens // spec.block_size) for spec in groups)
        if num_free_beside(load.sources) < sum(each):
            return look(num_computed_tokens)
    return match, load


def find_plain_offer(
    groups: tuple[GroupSpec, ...],
    host: OffloadingManager,
    pool: DeviceBlockPool,
    request: Request,
    keys: Sequence[Sequence[BlockKey]],
    num_computed_tokens: int,
) -> tuple[Load | None, bool]:
    """Do as `find_offer` does, for one group, of full attention, and rows of one block.

    Most models are like that, and most loads without a copy. Both tiers are searched in
    one call, which ends at the first block that neither has.

    Returns:
        What the request lacks, None if that is nothing; and whether this is so: not if
        there is something to be copied, which is left to `find_offer`.
    """
    (spec,), (own_keys,) = groups, keys
    usable = max(request.num_tokens - 1, 0) // spec.block_size
    if usable < len(own_keys):
        own_keys = own_keys[:usable]
    on_device, on_host = host.find_beside(pool, own_keys)
    num, start = len(on_host), num_computed_tokens // spec.block_size
    num_tokens = num * spec.block_size - num_computed_tokens
    if num_tokens <= 0:
        return None, True
    if (on_device[start:] != NO_BLOCK).any():
        return None, False
    rows = on_host[start:]
    load = Load(
        request.request_id,
        num_computed_tokens,
        num_tokens,
        keys,
        rows,
        row_groups=np.zeros(rows.size, np.int32),
        row_indices=np.arange(start, num, dtype=np.int32)[:, None],
        sources=_NO_IDS,
        copy_groups=_NO_IDS,
        copy_indices=_NO_IDS,
    )
    return load, True


def find_targets(
    load: Load,
    groups: tuple[GroupSpec, ...],
    block_ids: Sequence[Sequence[int]],
    num_tokens: int,
) -> tuple[Ids, Ids]:
    """Look up the device blocks that a load is to write.

    Args:
        load: The load.
        groups: The groups of the model's layers.
        block_ids: The request's device blocks, for each group.
        num_tokens: How much of the prefix is wanted.

    Returns:
        What `Load.targets` and `Load.copy_targets` are to be.

    Raises:
        ValueError: If a table has no block where one is to be loaded, or one has two
            places there.
    """
    tables = [np.array(own, np.int32) for own in block_ids]

    # All that was offered, of the only group.
    num_offered = load.num_computed_tokens + load.num_tokens
    is_plain = len(groups) == load.row_indices.shape[1] == 1
    is_plain &= num_tokens == num_offered

    def blocks_at(of_group: Ids, indices: Ids) -> Ids:
        if not indices.size:
            return indices
        if is_plain and indices.max() < tables[0].size:
            blocks = tables[0][indices]
            if (blocks != NULL_BLOCK).all():
                return blocks
        blocks = np.full(indices.shape, NO_BLOCK, np.int32)
        for group, (spec, own) in enumerate(zip(groups, tables, strict=True)):
            wanted = (indices >= 0) & (indices < num_tokens // spec.block_size)
            if len(groups) > 1:
                wanted &= of_group == group
            wanted_indices = indices[wanted]
            is_absent = wanted_indices >= own.size
            if not is_absent.any():
                blocks[wanted] = found = own[wanted_indices]
                is_absent = found == NULL_BLOCK
            if is_absent.any():
                absent = wanted_indices[is_absent]
                raise ValueError(
                    f"block {absent[0]} of group {group} of request "
                    f"{shown(load.request_id)} is to be loaded, but its block table, "
                    f"of {own.size} blocks, has none there."
                )
        return blocks

    targets = blocks_at(load.row_groups[:, None], load.row_indices)
    copy_targets = blocks_at(load.copy_groups, load.copy_indices)
    written = np.sort(np.concatenate([targets.ravel(), copy_targets]))
    is_again = (written[1:] == written[:-1]) & (written[1:] != NO_BLOCK)
    if is_again.any():
        raise ValueError(
            f"block {written[1:][is_again][0]} stands more than once in the block "
            f"table of request {shown(load.request_id)}, where blocks are to be "
            "loaded; each needs its own."
        )
    return targets, copy_targets


def mark_skipped(
    groups: tuple[GroupSpec, ...],
    pool: DeviceBlockPool,
    keys: Sequence[Sequence[BlockKey]],
    tables: Sequence[Sequence[int]],
    num_local: int | None,
    num_external: int,
    load: Load | None,
) -> list[list[int]]:
    """Find the blocks of a prefix that nothing is written to; mark them in the pool.

    The next token does not read them: they are outside the window, in another chunk,
    or hold older states. So they are neither loaded nor copied, nor computed.

    Args:
        groups: The groups of the model's layers.
        pool: The device's blocks. Of those in `tables`, just the ones that are found
            are `unwritten` afterwards.
        keys: The request's keys, for each group.
        tables: Its device blocks, for each group.
        num_local: Tokens that were found on the device; None if nobody looked, as the
            request runs already. Then nothing is found here.
        num_external: Tokens that come to them.
        load: How they come; None if there are none.

    Returns:
        The tables, with NULL_BLOCK in place of what is found behind `num_local`.
    """
    if num_local is None or all(isinstance(spec, FullAttention) for spec in groups):
        return [list(table) for table in tables]
    written = _NO_IDS
    if load is not None:
        written = np.concatenate([load.written_blocks, load.copy_targets])
    answer = []
    unwritten: list[int] = []
    skipped: list[int] = []
    for spec, own_keys, table in zip(groups, keys, tables, strict=True):
        start = num_local // spec.block_size
        end = (num_local + num_external) // spec.block_size
        if isinstance(spec, FullAttention):
            start = end = 0  # All of it is read.
        head, tail = np.array(table[:end], np.int32), list(table[end:])
        # What the request computes may be in a block that has had another place.
        is_unwritten = ~np.isin(head, [NULL_BLOCK, *written.tolist(), *tail])
        # An engine may have put blocks of its own where the device was not searched.
        found = np.flatnonzero(is_unwritten[: min(start, len(own_keys))])
        if found.size:
            found_keys = [own_keys[index] for index in found.tolist()]
            is_unwritten[found] = ~pool.holds(head[found], found_keys)
        unwritten += head[is_unwritten].tolist()
        is_unwritten[:start] = False
        skipped += head[is_unwritten].tolist()
        answer.append([*np.where(is_unwritten, NULL_BLOCK, head).tolist(), *tail])
    if pool.unwritten:
        pool.unwritten.difference_update(*tables)
    pool.unwritten.update(unwritten)
    if load is not None:
        load.skipped = skipped
    return answer


def flat_ids(each: Iterable[Ids | None]) -> tuple[int, ...]:
    """List the ids of several arrays in a row."""
    flat: list[int] = []
    for ids in each:
        if ids is not None:
            flat += ids.ravel().tolist()
    return tuple(flat)


def split_load(load: Load, targets: Ids, copy_targets: Ids) -> tuple[Load, Load | None]:
    """Split a load into what has targets and what was offered in vain, if anything."""

    def part(rows: NDArray[np.bool_], copies: NDArray[np.bool_]) -> Load:
        own = dataclasses.replace(
            load,
            host_blocks=load.host_blocks[rows],
            row_groups=load.row_groups[rows],
            row_indices=load.row_indices[rows],
            sources=load.sources[copies],
            copy_groups=load.copy_groups[copies],
            copy_indices=load.copy_indices[copies],
        )
        own.aim(targets[rows], copy_targets[copies])
        return own

    rows, copies = (targets != NO_BLOCK).any(axis=1), copy_targets != NO_BLOCK
    if rows.all() and copies.all():
        load.aim(targets, copy_targets)
        return load, None
    return part(rows, copies), part(~rows, ~copies)
