"""Groups of layers (KV cache groups): which blocks of a prefix the next token reads.

Layers that keep KV of the same tokens, in blocks of the same size, share block tables
and form a group. A hybrid model has several groups. Each kind of attention requires
other blocks of a prefix to be resident before the next token can be computed.
`jaxkv.search.hits` finds the longest prefix whose required blocks are resident.
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
                raise TypeError(
                    f"{name}={shown(size)} of {type(self).__name__} must be an int."
                )
            if not 1 <= size < 1 << 31:
                raise ValueError(f"{name}={size} of {self} must be in [1, 2**31).")


@dataclasses.dataclass(frozen=True)
class FullAttention(_Group):
    """Every token attends to all tokens before it.

    Attributes:
        block_size: Tokens per block.
    """


@dataclasses.dataclass(frozen=True)
class SlidingWindow(_Group):
    """Every token attends to the last `window` tokens, including itself.

    Attributes:
        block_size: Tokens per block.
        window: Tokens in the window.
    """

    window: int


@dataclasses.dataclass(frozen=True)
class ChunkedLocal(_Group):
    """Every token attends to the tokens before it in its own chunk.

    Attributes:
        block_size: Tokens per block.
        chunk: Tokens per chunk, a multiple of `block_size`.
    """

    chunk: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # vLLM allows any chunk: a hit may then end within a chunk whose blocks are
        # missing, and the next token reads garbage.
        if self.chunk % self.block_size:
            raise ValueError(
                f"{self} must have a chunk that is a multiple of its block_size."
            )


@dataclasses.dataclass(frozen=True)
class Mamba(_Group):
    """Every token reads only the state that the token before it left.

    Attributes:
        block_size: Tokens from one saved state to the next.
    """


GroupSpec: TypeAlias = FullAttention | SlidingWindow | ChunkedLocal | Mamba
"""A group's kind and sizes. Hashable, as a static argument of jitted functions."""


def as_groups(groups: int | GroupSpec | Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """Return checked groups; an int is the block size of one full-attention group.

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
    """Raise ValueError if groups cannot be searched together; vLLM rejects them too."""
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
    """Return the unit of hits in tokens: every hit ends with a block of each group.

    >>> alignment((FullAttention(16), Mamba(24)))
    48
    """
    return math.lcm(*(group.block_size for group in groups))


def first_block_read(group: GroupSpec, num_tokens: int) -> int:
    """Return the first block that the token after `num_tokens` reads.

    >>> first_block_read(SlidingWindow(16, 100), 160)
    3
    """
    match group:
        case SlidingWindow(size, window):
            return max(num_tokens - window + 1, 0) // size
        case ChunkedLocal(size, chunk):
            return num_tokens // chunk * chunk // size
        case Mamba(size):
            return max(num_tokens - 1, 0) // size
    return 0


def lazy_target_blocks(
    groups: tuple[GroupSpec, ...], max_num_batched_tokens: int
) -> int:
    """Return how many device blocks lazy offloading keeps ready for eviction.

    vLLM 0.19.1's `SimpleCPUOffloadScheduler` has the same rule: twice the blocks that
    one request needs if a step computes `max_num_batched_tokens` of its tokens.

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
    """Return how many blocks of a device's KV cache fit into the host memory.

    vLLM 0.19.1's `SimpleCPUOffloadScheduler` has the same rule. The result is 1 if the
    memory is too small for a block.

    Args:
        host_bytes: Host memory of the tier, for all workers together.
        device_bytes: Device memory of one worker's KV cache, over all groups.
        num_device_blocks: Blocks in one worker's KV cache.
        world_size: Workers that share the host memory.

    Example:
        >>> num_host_blocks(8 << 30, device_bytes=1 << 30, num_device_blocks=512)
        4096
    """
    check_whole(1, host_bytes=host_bytes, device_bytes=device_bytes)
    check_whole(1, num_device_blocks=num_device_blocks, world_size=world_size)
    return max(1, num_device_blocks * (host_bytes // world_size) // device_bytes)
