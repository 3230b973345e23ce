"""One search of all tiers for the longest prefix of a request.

vLLM 0.19.1 searches the device first, and the host only after the device's prefix. If
the device evicted a block in the middle of a prefix, reuse ends there unless the host
has all later blocks. Here each later block may be in any tier below the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_whole, shown
from jaxkv.search.groups import GroupSpec, as_groups
from jaxkv.search.hits import find_longest_hit
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.pools import DevicePool
from jaxkv.types import NO_BLOCK, NULL_BLOCK, BlockKey

Ids: TypeAlias = NDArray[np.int32]
Keys: TypeAlias = Sequence[BlockKey]


class Source(NamedTuple):
    """A tier, or another holder of blocks, for a search."""

    find: Callable[[Keys], Ids]  # Returns the block of each key, i32[n], or NO_BLOCK.
    # A request's blocks per block of the tier, whose key is that of the last of them.
    blocks_per_row: int = 1
    max_tokens: int | None = None  # Has only blocks of the first tokens; None for all.


class Match(NamedTuple):
    """The longest usable prefix, and the blocks found in each source."""

    num_tokens: int
    # By source, then by group: i32[n], the block of each key, or NO_BLOCK.
    block_ids: list[list[Ids]]
    needed: list[NDArray[np.bool_]]  # bool[n] for each group; see `Hit.needed`.


def source_of(tier: BlockIndex | DeviceBlockPool, blocks_per_row: int = 1) -> Source:
    """Make a source from a tier."""
    return Source(tier.find, blocks_per_row)


def first_tokens(num_tokens: int) -> Source:
    """Make a source that has NULL_BLOCK for each block of the first tokens."""

    def find(keys: Keys) -> Ids:
        return np.full(len(keys), NULL_BLOCK, np.int32)

    return Source(find, max_tokens=num_tokens)


def find_cached_prefix(
    pool: DeviceBlockPool,
    groups: tuple[GroupSpec, ...],
    keys_by_group: Sequence[Keys],
    max_tokens: int,
) -> tuple[int, list[list[int]]]:
    """Find the longest prefix of a request in the device tier alone.

    Args:
        pool: The device's blocks.
        groups: The groups of the model's layers.
        keys_by_group: Keys of the request's full blocks, for each group.
        max_tokens: The maximum length of the prefix in tokens.

    Returns:
        Its length in tokens, and for each group its blocks in order, NULL_BLOCK for a
        block that the next token does not read. `pool.touch` pins them.

    Raises:
        TypeError: If `keys_by_group` has no lists of keys, or `max_tokens` is not an
            int.
        ValueError: If there is not one list for each group, or the keys or the pool
            are known to have another block size.
    """
    groups = as_groups(groups)
    check_keys_by_group(groups, keys_by_group)
    check_whole(None, max_tokens=max_tokens)
    check_pool(pool, groups)
    match = search(groups, keys_by_group, max_tokens, [source_of(pool)])
    block_ids = []
    for group, ids, needed in zip(
        groups, match.block_ids[0], match.needed, strict=True
    ):
        end = match.num_tokens // group.block_size
        block_ids.append(np.where(needed, ids, NULL_BLOCK)[:end].tolist())
    return match.num_tokens, block_ids


def check_keys_by_group(
    groups: tuple[GroupSpec, ...],
    keys_by_group: Sequence[Keys],
    name: str = "keys_by_group",
    request_id: str | None = None,
) -> None:
    """Refuse anything except a list of keys for each group, in constant time."""
    if not _is_list(keys_by_group) or len(keys_by_group) != len(groups):
        error: type[Exception] = ValueError if _is_list(keys_by_group) else TypeError
        raise error(
            f"{name}={shown(keys_by_group)}{_of(request_id)} must have a list for each "
            f"of the {len(groups)} groups, such as [request.block_keys] for one."
        )
    for group, (spec, keys) in enumerate(zip(groups, keys_by_group, strict=True)):
        check_keys(spec, keys, f"{name}[{group}]", request_id)


def check_keys(group: GroupSpec, keys: Keys, name: str, request_id: str | None) -> None:
    """Refuse anything except a list of keys of a group's blocks, in constant time."""
    if not _is_list(keys) or (len(keys) and not isinstance(keys[0], bytes)):
        raise TypeError(
            f"{name}={shown(keys)}{_of(request_id)} must be a list of keys, which are "
            "bytes."
        )
    size = getattr(keys, "block_size", group.block_size)
    if size != group.block_size:
        raise ValueError(
            f"{name}{_of(request_id)} has keys of blocks of {size} tokens, but {group} "
            f"has {group.block_size}: Namespace, groups and pool must have the same "
            "block size."
        )


def _of(request_id: str | None) -> str:
    return "" if request_id is None else f" of request {shown(request_id)}"


def check_pool(pool: DevicePool, groups: tuple[GroupSpec, ...]) -> None:
    """Refuse anything except a pool, and a pool known to have another block size."""
    names = [*DevicePool.__annotations__, *vars(DevicePool)]
    missing = [n for n in names if not n.startswith("_") and not hasattr(pool, n)]
    if missing:
        raise TypeError(
            f"pool={shown(pool)} must be a DeviceBlockPool, or another "
            f"jaxkv.DevicePool, such as BorrowedPool; it lacks {', '.join(missing)}."
        )
    size = getattr(pool, "block_size", 0)  # 0 if unknown.
    if size and size not in [group.block_size for group in groups]:
        raise ValueError(
            f"block_size={shown(size)} of the DeviceBlockPool must be the block_size "
            f"of one of {groups}."
        )


def _is_list(value: object) -> bool:
    """Return whether a value is a sequence, not a string."""
    cls = type(value)
    if cls is list:  # Faster than a check against an abstract class.
        return True
    if isinstance(value, str | bytes | bytearray | Mapping):
        return False
    return hasattr(cls, "__getitem__") and hasattr(cls, "__len__")


def search(
    groups: tuple[GroupSpec, ...],
    keys_by_group: Sequence[Keys],
    max_tokens: int,
    sources: Sequence[Source],
) -> Match:
    """Find the longest prefix of a request whose needed blocks are all in some source.

    `keys_by_group` has the keys of full blocks; the nearest of `sources` comes first.
    Nothing is pinned or changed.
    """
    max_per_row = max(source.blocks_per_row for source in sources)
    keys = []
    for group, all_keys in zip(groups, keys_by_group, strict=True):
        usable = max(max_tokens, 0) // group.block_size
        # The row of the last usable block may extend beyond it.
        usable += -usable % max_per_row
        keys.append(all_keys if usable >= len(all_keys) else all_keys[:usable])
    block_ids = [
        [_find(source, group, row) for group, row in zip(groups, keys, strict=True)]
        for source in sources
    ]
    masks = []
    for group_ids in zip(*block_ids, strict=True):
        mask = group_ids[0] != NO_BLOCK
        for ids in group_ids[1:]:
            mask |= ids != NO_BLOCK
        masks.append(mask)
    hit = find_longest_hit(groups, masks, max_tokens)
    return Match(hit.num_tokens, block_ids, hit.needed)


def _find(source: Source, group: GroupSpec, keys: Keys) -> Ids:
    """Return the block of each key in a source, i32[n]."""
    num, per_row = len(keys), source.blocks_per_row
    if source.max_tokens is not None:
        num = min(num, source.max_tokens // group.block_size)
    if per_row == 1 and num == len(keys):
        return source.find(keys)
    block_ids = np.full(len(keys), NO_BLOCK, np.int32)
    rows = source.find(keys[:num][per_row - 1 :: per_row])
    block_ids[: len(rows) * per_row] = np.repeat(rows, per_row)
    return block_ids
