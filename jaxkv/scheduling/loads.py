"""Blocks on their way back to the device, from the query to the last report."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import shown
from jaxkv.keys.mark import KeyMark
from jaxkv.scheduling.listening import Listeners
from jaxkv.scheduling.moves import Budget, Ledger, Move, Report
from jaxkv.scheduling.protocol import NO_EVENT, Request
from jaxkv.scheduling.requests import Requests
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.stats import OffloadStats
from jaxkv.search.groups import FullAttention, GroupSpec, alignment
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from jaxkv.types import NO_BLOCK, NULL_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)
NO_LOADS: dict[str, Any] = {
    "load_event": NO_EVENT,
    "load_device_blocks": (),
    "load_host_blocks": (),
    "load_event_to_reqs": {},
}
"""The fields of `OffloadMetadata` about loads, in a step without any."""
_ONE = np.int32(1)


@dataclasses.dataclass(eq=False, kw_only=True)
class Load(Move[Ids]):
    """What one request gets from the host, and from elsewhere on the device.

    A row is a host block, which holds m device blocks. r rows, c copies. The sources
    are i32[r], the targets i32[r, m], of which there are none until the allocation,
    with NO_BLOCK for a part that is not wanted.

    Attributes:
        request_id: Whose it is.
        num_computed_tokens: What the request had when it asked.
        num_tokens: What it was offered beyond that.
        marks: The request's keys up to the end of what it was offered, for each group.
        row_groups: i32[r]. The group of layers of each row.
        row_indices: i32[r, m]. Which of the request's blocks in that group its parts
            are; NO_BLOCK for a part that is not wanted.
        copy_sources: i32[c]. Device blocks to be copied.
        copy_groups: i32[c]. The group of layers of each.
        copy_indices: i32[c]. Which of the request's blocks in that group it is.
        copy_targets: i32[c]. Device blocks that are written; none until the allocation.
        request: The request, once it has taken the offer.
        is_awaited: Whether the request waits for a report, which comes even if it takes
            no more of the offer than copies.
        is_taken: Whether the request has its device blocks.
        skipped: Device blocks of what was offered that nothing is written to.
        written_blocks: i32[w]. Device blocks that the transfer writes.
    """

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    marks: list[KeyMark]
    row_groups: Ids
    row_indices: Ids
    copy_sources: Ids
    copy_groups: Ids
    copy_indices: Ids
    copy_targets: Ids = dataclasses.field(default_factory=lambda: NO_IDS)
    request: Request | None = None
    is_awaited: bool = False
    is_taken: bool = False
    skipped: Sequence[int] = ()
    written_blocks: Ids = dataclasses.field(default_factory=lambda: NO_IDS)

    @property
    def name(self) -> str:
        """What workers call it."""
        return self.request_id

    @property
    def num_blocks(self) -> int:
        """How many device blocks it writes."""
        return len(self.written_blocks)

    def is_of(self, keys: Sequence[Sequence[BlockKey]]) -> bool:
        """Whether it is still of its request, which has these keys now."""
        return all(map(KeyMark.is_in, self.marks, keys))

    def aim(self, targets: Ids, copy_targets: Ids) -> None:
        """Note the device blocks that are written."""
        self.targets, self.copy_targets = targets, copy_targets
        self.written_blocks = targets[targets != NO_BLOCK]
        self.is_taken = True


class Loads:
    """The loads of all requests.

    Every block of a load is held: on the host from the query on, so that nothing can
    evict what was offered; on the device from the allocation on; both until all workers
    have reported it.

    Args:
        groups: The groups of the model's layers.
        host: The host tier.
        rules: What the engine chose.
        stats: Where loads that arrive and loads that fail are counted.
        requests: The requests.
        listeners: Notified of loads that end.

    Attributes:
        by_request: What each request was offered or gets.
        in_flight: Those that have left.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        host: BlockIndex,
        rules: OffloadRules,
        requests: Requests,
        stats: OffloadStats,
        listeners: Listeners,
    ) -> None:
        self._listeners = listeners
        self._groups = groups
        self._host = host
        self._rules = rules
        self._stats = stats
        self._requests = requests
        self.by_request: dict[str, Load] = {}
        # Those that were taken and have not left, in the order in which they were:
        # those with a transfer, and those with nothing but copies.
        self._waiting: OrderedDict[str, Load] = OrderedDict()
        self._copying: dict[str, Load] = {}
        self.in_flight: Ledger[Load] = Ledger("the load of request", rules.world_size)
        # How many loads read each host block, and the device blocks of those that wait.
        self._num_readers = np.zeros(host.num_blocks, np.int32)
        self._num_blocks_waiting = 0
        is_all_read = all(isinstance(group, FullAttention) for group in groups)
        # How many tokens an offer may be cut by; None if it may not.
        self._step = alignment(groups) if is_all_read else None

    def __len__(self) -> int:
        return len(self.by_request)

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The loads' part of `InTransit`; for any thread."""
        # Several requests may load one host block.
        num_read = int(np.count_nonzero(self._num_readers))
        return self._num_blocks_waiting, self.in_flight.num_blocks, num_read

    def blocks_awaited(self) -> set[int]:
        """List the device blocks of loads that requests wait for."""
        awaited = [load for load in self.by_request.values() if load.is_awaited]
        return {block for load in awaited for block in load.written_blocks.tolist()}

    def offer(
        self,
        pool: DeviceBlockPool,
        request_id: str,
        load: Load | None,
        is_awaited: bool,
    ) -> None:
        """Hold what a request is offered now, in place of what it was offered before.

        Args:
            pool: The device's blocks.
            request_id: The request; it has no load in flight.
            load: What it is offered; None for nothing.
            is_awaited: Whether it has to wait for that.
        """
        self.drop(pool, request_id)
        if load is None:
            return
        self._host.pin(load.sources)
        np.add.at(self._num_readers, load.sources, _ONE)
        if load.copy_sources.size:
            pool.pin(load.copy_sources, is_offer=True)
        load.is_awaited = is_awaited
        self.by_request[request_id] = load

    def take(
        self,
        pool: DeviceBlockPool,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        tables: Sequence[Sequence[int]],
        num_external_tokens: int,
    ) -> Load | None:
        """Note where what was offered is to go; give what was taken of it."""
        load = self.by_request.get(request.request_id)
        if load is not None and load.is_taken:
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
        if not load.is_of(keys):
            raise ValueError(
                f"{num_external_tokens=} of request {shown(request.request_id)} cannot "
                "be loaded: its block keys were rewritten since the offer, which is of "
                "other tokens. Call get_num_new_matched_tokens() again."
            )
        num_tokens = load.num_computed_tokens + num_external_tokens
        targets = find_targets(load, self._groups, tables, num_tokens)
        taken, left = load, None
        if num_external_tokens < offered:
            taken, left = split_load(load, *targets)
        else:
            load.aim(*targets)
        taken.request = request
        pool.pin(taken.written_blocks)
        if taken.copy_targets.size:
            pool.pin(taken.copy_targets)
        if load.copy_sources.size:
            pool.pin(taken.copy_sources)
            pool.unpin(load.copy_sources, is_offer=True)
        if left is not None:
            self._release([left])
        self.by_request[request.request_id] = taken
        queue = self._waiting if taken.num_blocks else self._copying
        queue[request.request_id] = taken
        self._num_blocks_waiting += taken.num_blocks
        return taken

    @property
    def has_waiting(self) -> bool:
        """Whether a load has been taken and has not left."""
        return bool(self._waiting or self._copying)

    def issue(self, pool: DeviceBlockPool, budget: Budget) -> dict[str, Any]:
        """Send out loads that have been taken, in the order in which they were.

        A load that is larger than the budget leaves if nothing else is in flight.

        Returns:
            The fields of `OffloadMetadata` about loads, and about copies, which are
            done in this step.
        """
        ready = list(self._copying.values())
        self._copying.clear()
        while self._waiting:
            load = next(iter(self._waiting.values()))
            # What the step itself writes cannot be put off: the request runs in it.
            is_too_large = load.num_blocks > budget.num_left and budget.in_flight
            if is_too_large and not self._rules.load_in_step:
                budget.num_left = 0  # Neither loads nor stores may overtake it.
                break
            budget.take(load.num_blocks)
            self._waiting.popitem(last=False)
            self._num_blocks_waiting -= load.num_blocks
            ready.append(load)
        if not ready:
            return NO_LOADS
        leaving = [load for load in ready if load.is_awaited or load.sources.size]
        copying = [load for load in ready if load.copy_sources.size]
        event = self.in_flight.issue(leaving)
        for load in ready:
            if load.event == NO_EVENT:
                del self.by_request[load.request_id]
        for load in copying:
            self._stats.num_copied += load.copy_sources.size
            # Whatever overwrites a source comes later, on the device too.
            pool.unpin(load.copy_sources)
            if load.event == NO_EVENT:
                pool.unpin(load.copy_targets)
        names = tuple([load.request_id for load in leaving])
        return {
            "load_event": event,
            "load_device_blocks": _flat([load.targets for load in leaving]),
            "load_host_blocks": _flat([load.sources for load in leaving]),
            "load_event_to_reqs": {event: names} if names else {},
            "copy_from_blocks": _flat([load.copy_sources for load in copying]),
            "copy_to_blocks": _flat([load.copy_targets for load in copying]),
            "load_sizes": tuple([len(load.sources) for load in leaving]),
            "load_in_step": self._rules.load_in_step and bool(names),
        }

    def report(
        self, pool: DeviceBlockPool, reports: Sequence[Report]
    ) -> tuple[list[str], list[str]]:
        """Note what workers reported.

        Returns:
            The requests that wait for a load that is now there; and those whose loads
            have failed, on one worker or more, or brought what the request had before
            its keys were rewritten.

        Raises:
            ValueError: If no report of such a load is due. Then nothing changes.
        """
        self.in_flight.check(reports)
        over = self.in_flight.report(reports)
        answers: tuple[list[str], list[str]] = [], []
        for load in over:
            if load.ok:
                self._stats.num_loads += 1
                self._stats.num_loaded += load.num_blocks
            else:
                self._stats.num_loads_failed += 1
            if load.is_stale:
                continue
            is_useless = not load.ok
            if load.is_awaited and load.request is not None:
                is_useless |= not load.is_of(self._requests.of(load.request))
            if is_useless:
                # Now the request computes all that it was to get.
                pool.unwritten.difference_update(load.skipped)
            if load.is_awaited or is_useless:
                answers[is_useless].append(load.request_id)
        self._end(pool, over)
        return answers

    def drop(self, pool: DeviceBlockPool, request_id: str) -> None:
        """Release a load that its request abandons; one in flight once it ends."""
        load = self.by_request.get(request_id)
        if load is None:
            return
        if load.event != NO_EVENT:
            load.is_stale = True
            return
        if load.copy_sources.size:
            pool.unpin(load.copy_sources, is_offer=not load.is_taken)
        self._end(pool, [load])

    def _end(self, pool: DeviceBlockPool, loads: Sequence[Load]) -> None:
        """Let go of all blocks of loads, but of sources of copies."""
        if not loads:
            return
        self._release(loads)
        for notify in self._listeners.released:
            lost = [load.keys for load in loads if not load.ok]
            notify([load.request_id for load in loads], lost)
        targets = [
            ids
            for load in loads
            for ids in (load.written_blocks, load.copy_targets)
            if ids.size
        ]
        if targets:
            pool.unpin(joined(targets))
        for load in loads:
            del self.by_request[load.request_id]
            if not load.ok:
                # The next request that asks computes them, and stores them anew.
                self._host.discard(load.keys)
            if self._waiting.pop(load.request_id, None) is not None:
                self._num_blocks_waiting -= load.num_blocks
            self._copying.pop(load.request_id, None)

    def _release(self, loads: Sequence[Load]) -> None:
        """Let go of the host blocks of loads."""
        rows = joined([load.sources for load in loads])
        if rows.size:
            self._host.unpin(rows)
            np.subtract.at(self._num_readers, rows, _ONE)


def joined(each: Sequence[Ids]) -> Ids:
    """Put arrays in a row, such as those of all groups."""
    return each[0] if len(each) == 1 else np.concatenate(each)


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
        What `Load.targets` and `Load.copy_targets` will be.

    Raises:
        ValueError: If a table has no block where one will be loaded, or one has two
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
        num_local: Tokens that were found on the device; None if it was not searched, as
            the request runs already. Then nothing is found here.
        num_external: Tokens that come to them.
        load: How they come; None if there are none.

    Returns:
        The tables, with NULL_BLOCK in place of what is found behind `num_local`.
    """
    if num_local is None:
        return [list(table) for table in tables]
    written = NO_IDS
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


def _flat(each: Sequence[Ids]) -> tuple[int, ...]:
    """List the ids of several arrays in a row."""
    flat: list[int] = []
    for ids in each:
        flat += ids.ravel().tolist()
    return tuple(flat)


def split_load(load: Load, targets: Ids, copy_targets: Ids) -> tuple[Load, Load | None]:
    """Split a load into what has targets and what was offered in vain, if anything."""

    def part(rows: NDArray[np.bool_], copies: NDArray[np.bool_]) -> Load:
        own = dataclasses.replace(
            load,
            keys=list(compress(load.keys, rows.tolist())),
            sources=load.sources[rows],
            row_groups=load.row_groups[rows],
            row_indices=load.row_indices[rows],
            copy_sources=load.copy_sources[copies],
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
