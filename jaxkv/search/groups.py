"""Kinds of attention: which blocks of a prefix the next token still reads.

Layers that keep the same tokens in blocks of the same size share their block tables and
form a group. A model has one group or several (a hybrid model). The kinds differ in how
much of a prefix must be resident before its next token can be computed; the search for
the longest such prefix is in `jaxkv.search.hits`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

from jaxkv._util import check_whole, shown


@dataclasses.dataclass(frozen=True)
class _Group:
    block_size: int

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"{name}={shown(size)} of {self} must be an int.")
            if not 1 <= size < 1 << 31:
                raise ValueError(f"{name}={size} of {self} must be in [1, 2**31).")


@dataclasses.dataclass(frozen=True)
class FullAttention(_Group):
    """Every token reads all tokens before it.

    Attributes:
        block_size: Tokens in a block.
    """


@dataclasses.dataclass(frozen=True)
class SlidingWindow(_Group):
    """Every token reads the last `window` tokens, itself among them.

    Attributes:
        block_size: Tokens in a block.
        window: Tokens in the window.
    """

    window: int


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(_Group):
    """Every token reads the tokens before it in its own chunk.

    Attributes:
        block_size: Tokens in a block.
        chunk: Tokens in a chunk; whole blocks.
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # vLLM allows any chunk: a hit may then end within a chunk without its blocks,
        # and the next token reads garbage.
        if self.chunk % self.block_size:
            raise ValueError(
                f"{self} must have a chunk that is a multiple of its block_size."
            )


@dataclasses.dataclass(frozen=True)
class Mamba(_Group):
    """Every token reads the state after the token before it.

    Attributes:
        block_size: Tokens from one kept state to the next.
    """


GroupSpec: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | Mamba
"""The kind of a group. Hashable: a static argument of jitted functions."""


def as_groups(groups: int | GroupSpec | Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """Check the groups of a model; return a tuple. A size is one full-attention group.

    >>> as_groups(16)
    (FullAttention(block_size=16),)
    """
    if isinstance(groups, int) and not isinstance(groups, bool):
        return (FullAttention(groups),)
    if isinstance(groups, GroupSpec):
        return (groups,)
    if isinstance(groups, str) or not isinstance(groups, Sequence):
        raise TypeError(
            f"groups={shown(groups)} must be a block size, a group such as "
            "FullAttention(16), or a sequence of groups."
        )
    for index, group in enumerate(groups):
        if not isinstance(group, GroupSpec):
            raise TypeError(
                f"groups[{index}]={shown(group)} must be one of FullAttention, "
                "SlidingWindow, ChunkedLocal and Mamba."
            )
    checked = tuple(groups)
    check_groups(checked)
    return checked


def check_groups(groups: tuple[GroupSpec, ...]) -> None:
    """Refuse groups that cannot be searched together, as vLLM does."""
    if not groups:
        raise ValueError(f"{groups=} must hold at least one group.")
    if alignment(groups) >= 1 << 31:
        raise ValueError(
            f"{alignment(groups)}, the least common multiple of the block sizes in "
            f"{groups=}, must be less than 2**31."
        )
    for group in groups:
        if isinstance(group, ChunkedLocal) and group.block_size != alignment(groups):
            raise ValueError(
                f"{group} must have a block_size of {alignment(groups)}, the least "
                f"common multiple of the block sizes in {groups=}."
            )


def alignment(groups: tuple[GroupSpec, ...]) -> int:
    """Return the step of hits in tokens: they end at block ends of all groups at once.

    >>> alignment((FullAttention(16), Mamba(24)))
    48
    """
    return math.lcm(*(group.block_size for group in groups))


def lazy_target_blocks(
    groups: tuple[GroupSpec, ...], max_num_batched_tokens: int
) -> int:
    """Return how many device blocks lazy offloading keeps ready for eviction.

    vLLM 0.19.1's `SimpleCPUOffloadScheduler` has the same rule: twice the blocks of a
    request that fills a step of `max_num_batched_tokens`.

    >>> lazy_target_blocks((FullAttention(16), SlidingWindow(16, 100)), 64)
    24
    """
    check_whole(1, max_num_batched_tokens=max_num_batched_tokens)
    num_blocks = 0
    for group in groups:
        match group:
            case Mamba():
                num_blocks += 2
            case SlidingWindow(block_size, window):
                num_blocks += -(-window // block_size) + 1
            case _:
                num_blocks += -(-max_num_batched_tokens // group.block_size)
    return 2 * num_blocks


def num_host_blocks(
    host_bytes: int, device_bytes: int, num_device_blocks: int, world_size: int = 1
) -> int:
    """Return the size of the host tier in blocks, from their size on the device.

    vLLM 0.19.1's `SimpleCPUOffloadScheduler` has the same rule. A budget that is too
    small for a block gives one block.

    Args:
        host_bytes: Host memory of the tier, for all workers together.
        device_bytes: Device memory of one worker's KV cache, over all groups.
        num_device_blocks: Blocks in this memory.
        world_size: Workers that share the host memory.

    Example:
        >>> num_host_blocks(8 << 30, device_bytes=1 << 30, num_device_blocks=512)
        4096
    """
    check_whole(1, host_bytes=host_bytes, device_bytes=device_bytes)
    check_whole(1, num_device_blocks=num_device_blocks, world_size=world_size)
    return max(1, num_device_blocks * (host_bytes // world_size) // device_bytes)
