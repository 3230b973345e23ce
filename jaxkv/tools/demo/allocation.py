"""Allocates the device blocks of the engine's requests.

A request has a block table for each group of layers, which grows as tokens are computed
or loaded. In a group with a sliding window, entries that no later token attends to
become the null block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from jaxkv.search.groups import GroupSpec, SlidingWindow
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tools.demo.request import EngineRequest
from jaxkv.types import NULL_BLOCK


@dataclasses.dataclass(frozen=True)
class Extension:
    """New entries for a request's block tables."""

    request: EngineRequest
    num_null: tuple[int, ...]  # New null entries of each group; they come first
    num_fresh: tuple[int, ...]  # New entries with a block of each group

    @property
    def num_blocks(self) -> int:
        """Blocks to allocate."""
        return sum(self.num_fresh)


def plan_extension(
    groups: Sequence[GroupSpec], request: EngineRequest, num_tokens: int
) -> Extension:
    """Compute the entries that a request needs in addition for `num_tokens`."""
    num_null, num_fresh = [], []
    for group, block_ids in zip(groups, request.block_ids_by_group, strict=True):
        have, needed = len(block_ids), -(-num_tokens // group.block_size)
        first = max(have, first_needed(group, request.num_present_tokens))
        num_null.append(first - have)
        num_fresh.append(max(needed - first, 0))
    return Extension(request, tuple(num_null), tuple(num_fresh))


def extend(
    pool: DeviceBlockPool, extensions: Sequence[Extension]
) -> list[list[list[int]]]:
    """Allocate the blocks of all extensions in one call, and enter them.

    Returns the new entries for each extension and group.
    """
    fresh = iter(pool.allocate(sum(extension.num_blocks for extension in extensions)))
    added = []
    for extension in extensions:
        entries = [
            [NULL_BLOCK] * num_null + [next(fresh) for _ in range(num_fresh)]
            for num_null, num_fresh in zip(
                extension.num_null, extension.num_fresh, strict=True
            )
        ]
        tables = extension.request.block_ids_by_group
        for table, new in zip(tables, entries, strict=True):
            table += new
        added.append(entries)
    return added


def release_unneeded(
    pool: DeviceBlockPool,
    groups: Sequence[GroupSpec],
    requests: Iterable[EngineRequest],
) -> None:
    """Free the blocks that no later token attends to."""
    unneeded: list[int] = []
    for request in requests:
        for group, table in zip(groups, request.block_ids_by_group, strict=True):
            # Backwards from the window, to where an earlier call stopped.
            index = min(first_needed(group, request.num_present_tokens), len(table))
            while index and table[index - 1] != NULL_BLOCK:
                index -= 1
                unneeded.append(table[index])
                table[index] = NULL_BLOCK
    if unneeded:
        pool.free(unneeded)


def release_all(pool: DeviceBlockPool, request: EngineRequest) -> None:
    """Free all blocks of a request, tail first, so that its head is evicted last."""
    longest = max(map(len, request.block_ids_by_group))
    pool.free(
        [
            table[index]
            for index in reversed(range(longest))
            for table in request.block_ids_by_group
            if index < len(table)
        ]
    )
    for table in request.block_ids_by_group:
        table.clear()


def first_needed(group: GroupSpec, num_present: int) -> int:
    """Return the first block of a group that the token after `num_present` needs."""
    if not isinstance(group, SlidingWindow):
        return 0
    # A window of one token needs no block, but hits need one, see `jaxkv.search.hits`.
    window = max(group.window, 2)
    return max(num_present - window + 1, 0) // group.block_size


def max_blocks_held(groups: Sequence[GroupSpec], num_tokens: int, chunk: int) -> int:
    """Bound the blocks that a request holds, which grows by `chunk` to `num_tokens`."""
    total = 0
    for group in groups:
        num_blocks = -(-num_tokens // group.block_size)
        if isinstance(group, SlidingWindow):
            # The tokens of two steps, since blocks are freed one step later, and the
            # window before them, at any offset in a block.
            span = max(group.window, 2) - 2 + 2 * chunk
            num_blocks = min(num_blocks, -(-span // group.block_size) + 1)
        total += num_blocks
    return total
