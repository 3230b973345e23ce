"""Loads: blocks that move to the device, from the lookup to the last report."""

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
from jaxkv.search.groups import FullAttention, GroupSpec, alignment, first_block_read
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import NO_BLOCK, NULL_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int32]
NO_IDS: Ids = np.empty(0, np.int32)
NO_LOADS: dict[str, Any] = {
    "load_event": NO_EVENT,
    "load_device_blocks": (),
    "load_host_blocks": (),
    "load_event_to_reqs": {},
}
"""The fields of `OffloadMetadata` for loads, in a step without loads."""
_ONE = np.int32(1)


@dataclasses.dataclass(eq=False, kw_only=True)
class Load(Move[Ids]):
    """The blocks that one request loads from the host.

    It has r rows (host blocks) of m device blocks each. `sources` are i32[r];
    `targets` are i32[r, m], empty until the allocation, with NO_BLOCK for device blocks
    that are not loaded.
    """

    request_id: str
    num_computed_tokens: int  # The request's computed tokens before the load.
    num_tokens: int  # Tokens offered after these.
    marks: list[KeyMark]  # For each group, the keys up to the end of the offer.
    row_groups: Ids  # i32[r], the group of each row.
    row_indices: Ids  # i32[r, m], indices into the block table of the group.
    request: Request | None = None  # Set once the request has taken the offer.
    is_taken: bool = False  # Whether the request has its device blocks.
    skipped: Sequence[int] = ()  # Device blocks of the offer that stay unwritten.
    # i32[w], device blocks that the transfer writes.
    written_blocks: Ids = dataclasses.field(default_factory=lambda: NO_IDS)

    @property
    def name(self) -> str:
        """The request id, which names the load in reports."""
        return self.request_id

    @property
    def num_blocks(self) -> int:
        """The number of device blocks that the transfer writes."""
        return len(self.written_blocks)

    def is_of(self, keys: Sequence[Sequence[BlockKey]]) -> bool:
        """Whether the load still fits its request, whose current keys are `keys`."""
        return all(map(KeyMark.is_in, self.marks, keys))

    def set_targets(self, targets: Ids) -> None:
        """Set the device blocks to write, and mark the load as taken."""
        self.targets = targets
        self.written_blocks = targets[targets != NO_BLOCK]
        self.is_taken = True


class Loads:
    """The loads of all requests.

    A load holds its blocks until all workers have reported it: host blocks from the
    lookup on, so that an offer cannot be evicted; device blocks from the allocation on.
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
        self._stats = stats
        self._requests = requests
        self.by_request: dict[str, Load] = {}  # Each request's offer or load.
        # Loads that were taken and not yet issued, in the order of taking.
        self._waiting: OrderedDict[str, Load] = OrderedDict()
        self.in_flight: Ledger[Load] = Ledger("the load of request", rules.world_size)
        # How many loads read each host block; how many device blocks `_waiting` has.
        self._num_readers = np.zeros(host.num_blocks, np.int32)
        self._num_blocks_waiting = 0
        is_all_read = all(isinstance(group, FullAttention) for group in groups)
        # An offer may be truncated to multiples of this many tokens; None if never.
        self._alignment = alignment(groups) if is_all_read else None

    def __len__(self) -> int:
        return len(self.by_request)

    @property
    def in_transit(self) -> tuple[int, int, int]:
        """The last three fields of `InTransit`, about loads; thread-safe."""
        # Several requests may load one host block.
        num_read = int(np.count_nonzero(self._num_readers))
        return self._num_blocks_waiting, self.in_flight.num_blocks, num_read

    def blocks_awaited(self) -> set[int]:
        """Return the device blocks of loads that requests wait for."""
        loads = self.by_request.values()
        return {block for load in loads for block in load.written_blocks.tolist()}

    def offer(self, pool: DevicePool, request_id: str, load: Load | None) -> None:
        """Hold a load (None for none) as an offer, in place of the previous one."""
        self.drop(pool, request_id)
        if load is None:
            return
        self._host.pin(load.sources)
        np.add.at(self._num_readers, load.sources, _ONE)
        self.by_request[request_id] = load

    def take(
        self,
        pool: DevicePool,
        request: Request,
        keys: Sequence[Sequence[BlockKey]],
        tables: Sequence[NDArray[np.int64]],
        num_external_tokens: int,
    ) -> Load | None:
        """Load the offer's first tokens into the block tables; return that load."""
        load = self.by_request.get(request.request_id)
        if load is not None and load.is_taken:
            if num_external_tokens:
                raise ValueError(
                    f"{num_external_tokens=} of request {shown(request.request_id)} "
                    "must be 0: it has taken an offer, whose load has not ended."
                )
            return None
        offered = load.num_tokens if load else 0
        # If not all blocks of a prefix are read, a shorter prefix may read others.
        multiple = self._alignment or max(offered, 1)
        if num_external_tokens % multiple or not 0 <= num_external_tokens <= offered:
            raise ValueError(
                f"{num_external_tokens=} of request {shown(request.request_id)} must "
                f"be a multiple of {multiple} up to {offered}, the offer."
            )
        if load is None:
            return None
        if num_external_tokens == 0:
            self.drop(pool, request.request_id)
            return None
        if not load.is_of(keys):
            raise ValueError(
                f"{num_external_tokens=} of request {shown(request.request_id)} cannot "
                "be loaded: its block keys were rewritten since the offer. Call "
                "get_num_new_matched_tokens() again."
            )
        num_tokens = load.num_computed_tokens + num_external_tokens
        targets = find_targets(load, self._groups, tables, num_tokens)
        declined: Load | None = None
        if num_external_tokens < offered:
            load, declined = split_load(load, targets)
        else:
            load.set_targets(targets)
        if not load.num_blocks:  # The next token reads none of the offer's blocks.
            del self.by_request[request.request_id]
            return load
        load.request = request
        pool.pin(load.written_blocks)
        if declined is not None:
            self._release([declined])
        self.by_request[request.request_id] = load
        self._waiting[request.request_id] = load
        self._num_blocks_waiting += load.num_blocks
        return load

    @property
    def has_waiting(self) -> bool:
        """Whether a load has been taken and not yet issued."""
        return bool(self._waiting)

    def issue(self, budget: Budget) -> dict[str, Any]:
        """Issue taken loads within the budget; return fields of `OffloadMetadata`."""
        ready: list[Load] = []
        while self._waiting:
            load = next(iter(self._waiting.values()))
            if load.num_blocks > budget.num_left and budget.in_flight:
                budget.num_left = 0  # Neither loads nor stores may overtake it.
                break
            budget.take(load.num_blocks)
            self._waiting.popitem(last=False)
            self._num_blocks_waiting -= load.num_blocks
            ready.append(load)
        if not ready:
            return NO_LOADS
        event = self.in_flight.issue(ready)
        return {
            "load_event": event,
            "load_device_blocks": _flat([load.targets for load in ready]),
            "load_host_blocks": _flat([load.sources for load in ready]),
            "load_event_to_reqs": {event: tuple([load.request_id for load in ready])},
            "load_sizes": tuple([len(load.sources) for load in ready]),
        }

    def report(
        self, pool: DevicePool, reports: Sequence[Report]
    ) -> tuple[list[str], list[str]]:
        """Apply reports; return requests that may use their load, and the others."""
        self.in_flight.check(reports)
        ended = self.in_flight.report(reports)
        answers: tuple[list[str], list[str]] = [], []
        for load in ended:
            if load.ok:
                self._stats.num_loads += 1
                self._stats.num_loaded += load.num_blocks
            else:
                self._stats.num_loads_failed += 1
            if load.is_stale:
                continue
            is_useless = not load.ok
            if load.request is not None:
                is_useless |= not load.is_of(self._requests.of(load.request))
            if is_useless:
                # The request computes all blocks of the offer, even the skipped ones.
                pool.unwritten.difference_update(load.skipped)
            else:
                self._requests.caps.pop(load.request_id, None)
            answers[is_useless].append(load.request_id)
        self._end(pool, ended)
        for notify in self._listeners.loaded:
            notify(*answers)
        return answers

    def drop(self, pool: DevicePool, request_id: str) -> None:
        """Release a request's offer or load; a load in flight once it ends."""
        load = self.by_request.get(request_id)
        if load is None:
            return
        if load.event != NO_EVENT:
            load.is_stale = True
            return
        self._end(pool, [load])

    def _end(self, pool: DevicePool, loads: Sequence[Load]) -> None:
        """End loads: release all their blocks."""
        if not loads:
            return
        self._release(loads)
        for notify in self._listeners.released:
            unloaded = [load.keys for load in loads if not load.ok]
            notify([load.request_id for load in loads], unloaded)
        written = [load.written_blocks for load in loads if load.num_blocks]
        if written:
            pool.unpin(joined(written))
        for load in loads:
            del self.by_request[load.request_id]
            if not load.ok:
                # The next request computes these blocks and stores them again.
                self._host.discard(load.keys)
            if self._waiting.pop(load.request_id, None) is not None:
                self._num_blocks_waiting -= load.num_blocks

    def _release(self, loads: Sequence[Load]) -> None:
        """Release the host blocks of loads."""
        rows = joined([load.sources for load in loads])
        if rows.size:
            self._host.unpin(rows)
            np.subtract.at(self._num_readers, rows, _ONE)


def joined(arrays: Sequence[Ids]) -> Ids:
    """Concatenate arrays, such as one per group."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def find_targets(
    load: Load,
    groups: tuple[GroupSpec, ...],
    tables: Sequence[NDArray[np.int64]],
    num_tokens: int,
) -> Ids:
    """Return the targets i32[r, m] of a load up to `num_tokens`, in blocks by group."""
    indices = load.row_indices
    targets = np.full(indices.shape, NO_BLOCK, np.int32)
    for group, (spec, table) in enumerate(zip(groups, tables, strict=True)):
        is_loaded = (indices >= 0) & (indices < num_tokens // spec.block_size)
        if len(groups) > 1:
            is_loaded &= load.row_groups[:, None] == group
        loaded = indices[is_loaded]
        is_absent = loaded >= table.size
        if not is_absent.any():
            targets[is_loaded] = ids = table[loaded]
            is_absent = ids == NULL_BLOCK
        if is_absent.any():
            raise ValueError(
                f"block {loaded[is_absent][0]} of group {group} of request "
                f"{shown(load.request_id)} cannot be loaded: its block table of "
                f"{table.size} blocks has none there."
            )
    written = np.sort(targets, axis=None)
    is_repeated = (written[1:] == written[:-1]) & (written[1:] != NO_BLOCK)
    if is_repeated.any():
        raise ValueError(
            f"block {written[1:][is_repeated][0]} is more than once in the block table "
            f"of request {shown(load.request_id)}, where blocks would be loaded: each "
            "needs its own device block."
        )
    return targets


def mark_skipped(
    groups: tuple[GroupSpec, ...],
    pool: DevicePool,
    keys: Sequence[Sequence[BlockKey]],
    tables: Sequence[NDArray[np.int64]],
    num_local: int | None,
    num_external: int,
    load: Load | None,
) -> list[list[int]]:
    """Find the blocks of a prefix that stay unwritten; mark them in the pool.

    The next token does not read them: they are outside the window, in another chunk,
    or hold older states. So they are neither loaded nor computed. Of the blocks in
    `tables`, exactly these are `unwritten` in the pool afterwards. A request that
    already runs (`num_local` is None) has none. Return the tables, with NULL_BLOCK for
    such blocks after the first `num_local` tokens.
    """
    if num_local is None:
        return [table.tolist() for table in tables]
    written = NO_IDS if load is None else load.written_blocks
    new_tables = []
    unwritten: list[int] = []
    skipped: list[int] = []
    for spec, group_keys, table in zip(groups, keys, tables, strict=True):
        start = num_local // spec.block_size
        end = (num_local + num_external) // spec.block_size
        if isinstance(spec, FullAttention):
            start = end = 0  # All blocks are read.
        head, tail = table[:end], table[end:].tolist()
        # The request may compute into a block that is also in the head of the table.
        is_unwritten = ~np.isin(head, [NULL_BLOCK, *written.tolist(), *tail])
        # Device hits are written if the pool holds their keys. Where none is read, an
        # engine may have put other blocks in their place.
        first = min(first_block_read(spec, num_local + num_external), start)
        is_unwritten[first:start] = False
        local = np.flatnonzero(is_unwritten[: min(first, len(group_keys))])
        if local.size:
            local_keys = [group_keys[index] for index in local.tolist()]
            is_unwritten[local] = ~pool.holds(head[local], local_keys)
        unwritten += head[is_unwritten].tolist()
        is_unwritten[:start] = False
        skipped += head[is_unwritten].tolist()
        new_tables.append([*np.where(is_unwritten, NULL_BLOCK, head).tolist(), *tail])
    if pool.unwritten:
        pool.unwritten.difference_update(np.concatenate(tables).tolist())
    pool.unwritten.update(unwritten)
    if load is not None:
        load.skipped = skipped
    return new_tables


def _flat(arrays: Sequence[Ids]) -> tuple[int, ...]:
    flat: list[int] = []
    for ids in arrays:
        flat += ids.ravel().tolist()
    return tuple(flat)


def split_load(load: Load, targets: Ids) -> tuple[Load, Load | None]:
    """Split a load: the blocks that have targets, and the others (None if none)."""

    def select(rows: NDArray[np.bool_]) -> Load:
        selected = dataclasses.replace(
            load,
            keys=list(compress(load.keys, rows.tolist())),
            sources=load.sources[rows],
            row_groups=load.row_groups[rows],
            row_indices=load.row_indices[rows],
        )
        selected.set_targets(targets[rows])
        return selected

    rows = (targets != NO_BLOCK).any(axis=1)
    if rows.all():
        load.set_targets(targets)
        return load, None
    return select(rows), select(~rows)
