"""One request's load: what it lacks of its prefix, where that is, where it goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv.blocks import NULL_BLOCK, DeviceBlockPool
from jaxkv.connector import NO_EVENT, BlockTable, Request, tables_by_group
from jaxkv.groups import FullAttention, GroupSpec
from jaxkv.host_tier import HostTier
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.search import Match, search
from jaxkv.types import NO_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int32]
_NO_IDS: Ids = np.empty(0, np.int32)


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
        is_wanted: Whether the request still waits for it.
        skipped: Device blocks of what was offered that nothing is written to.
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
    copy_targets: Ids = dataclasses.field(default_factory=_NO_IDS.copy)
    event: int = NO_EVENT
    num_reports: int = 0
    has_failed: bool = False
    is_wanted: bool = True
    skipped: Sequence[int] = ()

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

    @property
    def written_blocks(self) -> Ids:
        """Device blocks that the transfer writes."""
        return _NO_IDS if self.targets is None else self.targets[self.targets >= 0]


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
        groups, match.needed, match.device_blocks, match.host_blocks, strict=True
    ):
        missing = needed.copy()
        missing[: num_computed_tokens // spec.block_size] = False
        # A copy on the device costs next to nothing beside a transfer.
        copied = np.flatnonzero(missing & (on_device != NO_BLOCK)).astype(np.int32)
        copies.append(copied)
        sources.append(on_device[copied])
        missing[copied] = False
        missing = np.pad(missing, (0, -missing.size % factor))
        indices = np.arange(missing.size, dtype=np.int32)
        parts = np.where(missing, indices, NO_BLOCK).reshape(-1, factor)
        of_group = np.flatnonzero((parts != NO_BLOCK).any(axis=1))
        rows.append(on_host[of_group * factor])
        row_indices.append(parts[of_group])
    numbers = np.arange(len(groups), dtype=np.int32)
    return Load(
        request_id,
        num_computed_tokens,
        match.num_tokens - num_computed_tokens,
        keys,
        np.concatenate(rows),
        row_groups=np.repeat(numbers, [len(own) for own in rows]),
        row_indices=np.concatenate(row_indices),
        sources=np.concatenate(sources),
        copy_groups=np.repeat(numbers, [len(own) for own in copies]),
        copy_indices=np.concatenate(copies),
    )


def find_offer(
    groups: tuple[GroupSpec, ...],
    host: HostTier,
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
        factor, most = rules.blocks_per_host_block, request.num_tokens - 1
        tiers = pool if rules.copy_on_device else None, host
        match = search(groups, keys, most, *tiers, factor, max_device_tokens)
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


def find_targets(
    load: Load, groups: tuple[GroupSpec, ...], table: BlockTable, num_tokens: int
) -> tuple[Ids, Ids]:
    """Look up the device blocks that a load is to write.

    Args:
        load: The load.
        groups: The groups of the model's layers.
        table: The request's device blocks.
        num_tokens: How much of the prefix is wanted.

    Returns:
        What `Load.targets` and `Load.copy_targets` are to be.

    Raises:
        ValueError: If the table has no block where one is to be loaded.
    """
    tables = tables_by_group(table, len(groups))

    def blocks_at(of_group: Ids, indices: Ids) -> Ids:
        blocks = np.full(indices.shape, NO_BLOCK, np.int32)
        for group, spec in enumerate(groups):
            wanted = (of_group == group) & (indices != NO_BLOCK)
            wanted &= indices < num_tokens // spec.block_size
            own = np.array(tables[group], np.int32)
            absent = indices[wanted & (indices >= own.size)]
            if not absent.size:
                blocks[wanted] = own[indices[wanted]]
                absent = indices[wanted & (blocks == NULL_BLOCK)]
            if absent.size:
                raise ValueError(
                    f"block {absent[0]} of group {group} of request "
                    f"{load.request_id!r} is to be loaded, but its block table, of "
                    f"{own.size} blocks, has none there."
                )
        return blocks

    return (
        blocks_at(load.row_groups[:, None], load.row_indices),
        blocks_at(load.copy_groups, load.copy_indices),
    )


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
    return tuple(i for ids in each if ids is not None for i in ids.reshape(-1).tolist())


def split_load(load: Load, targets: Ids, copy_targets: Ids) -> tuple[Load, Load]:
    """Split a load into what has targets and what was offered in vain."""

    def part(rows: NDArray[np.bool_], copies: NDArray[np.bool_]) -> Load:
        return dataclasses.replace(
            load,
            host_blocks=load.host_blocks[rows],
            row_groups=load.row_groups[rows],
            row_indices=load.row_indices[rows],
            sources=load.sources[copies],
            copy_groups=load.copy_groups[copies],
            copy_indices=load.copy_indices[copies],
            targets=targets[rows],
            copy_targets=copy_targets[copies],
        )

    rows, copies = (targets != NO_BLOCK).any(axis=1), copy_targets != NO_BLOCK
    return part(rows, copies), part(~rows, ~copies)
