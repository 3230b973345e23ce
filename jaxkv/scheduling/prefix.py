"""The blocks of a request in the order of its tokens, whatever group they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.search.groups import GroupSpec
from jaxkv.types import BlockKey


class Rows(NamedTuple):
    """Host blocks of a request, from the head of the prefix on. n rows, of m blocks.

    Attributes:
        keys: Key of each row.
        device_keys: Keys of the device blocks of all rows.
        device_blocks: These blocks.
        groups: int[n]. The group of each row; None if there is only one group.
    """

    keys: Sequence[BlockKey]
    device_keys: Sequence[BlockKey]
    device_blocks: Sequence[int] | NDArray[np.int64]
    groups: NDArray[np.intp] | None


def row_keys(
    specs: tuple[GroupSpec, ...],
    keys: Sequence[Sequence[BlockKey]],
    blocks_per_host_block: int,
) -> Sequence[BlockKey]:
    """List the keys of a request's host blocks so that a part is the prefix's head.

    Args:
        specs: The groups of the model's layers.
        keys: The request's keys, for each group.
        blocks_per_host_block: Device blocks in a host block, whose key is the last's.
    """
    if len(specs) == blocks_per_host_block == 1:
        return keys[0]
    counts = [len(own) for own in keys]
    no_tables: list[list[int]] = [[] for _ in keys]
    first = [0] * len(keys)
    return rows_of(specs, keys, no_tables, first, counts, blocks_per_host_block).keys


def host_keys(
    keys: Sequence[Sequence[BlockKey]], blocks_per_host_block: int
) -> tuple[Sequence[BlockKey], list[int]]:
    """List the keys of a request's host blocks, one group after the other.

    Args:
        keys: The request's keys, for each group.
        blocks_per_host_block: Device blocks in a host block, whose key is the last's.

    Returns:
        The keys, and how many come before each in its group.
    """
    factor = blocks_per_host_block
    if len(keys) == factor == 1:
        return keys[0], list(range(len(keys[0])))
    told = [own[factor - 1 :: factor] for own in keys]
    positions = [position for own in told for position in range(len(own))]
    return [key for own in told for key in own], positions


def rows_of(
    specs: tuple[GroupSpec, ...],
    keys: Sequence[Sequence[BlockKey]],
    tables: Sequence[Sequence[int]],
    first: Sequence[int],
    last: Sequence[int],
    blocks_per_host_block: int,
) -> Rows:
    """List blocks of a request so that a part of the list is the head of its prefix.

    Args:
        specs: The groups of the model's layers.
        keys: The request's keys, for each group.
        tables: Its device blocks, for each group.
        first: The first block that is meant, for each group; a whole row.
        last: The block after the last one.
        blocks_per_host_block: Device blocks in a row, whose key is the last one's.
    """
    factor = blocks_per_host_block
    if len(specs) == 1:
        own, table = keys[0], tables[0]
        if first[0] or last[0] < len(own):
            own = own[first[0] : last[0]]
        row_keys = own if factor == 1 else own[factor - 1 :: factor]
        return Rows(row_keys, own, table[first[0] : last[0]], None)
    # Several groups go with rows of one block (`check_groups`).
    ends = [
        (np.arange(start, max(start, stop)) + 1) * spec.block_size
        for spec, start, stop in zip(specs, first, last, strict=True)
    ]
    order = np.argsort(np.concatenate(ends), kind="stable")
    groups = np.repeat(np.arange(len(specs)), [len(own) for own in ends])[order]
    parts = [slice(start, stop) for start, stop in zip(first, last, strict=True)]
    all_keys = [key for own, part in zip(keys, parts, strict=True) for key in own[part]]
    blocks = [b for table, part in zip(tables, parts, strict=True) for b in table[part]]
    in_order = [all_keys[row] for row in order.tolist()]
    in_tables = [blocks[row] for row in order.tolist()] if blocks else []
    return Rows(in_order, in_order, in_tables, groups)
