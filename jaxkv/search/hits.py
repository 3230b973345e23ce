"""The longest usable prefix, from masks of the groups' resident blocks.

A prefix is usable if every group has the blocks that the next token reads
(`jaxkv.search.groups`). vLLM 0.19.1 searches one kind of attention after another, each
within the length that the previous search found, until no length shrinks. That loop is
unnecessary, because whether a length is usable does not depend on other lengths: here,
lengths are tried from the longest on, by differences of running counts of missing
blocks. Both find the longest length that all groups can use.

For full attention and one other kind, vLLM stops after one pass, with the same result:
the other kind's length is not above full attention's, so both can use it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.compiling import compiled, empty, greater
from jaxkv.search.groups import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    Mamba,
    SlidingWindow,
    alignment,
    check_groups,
)

_FULL, _WINDOW, _CHUNKED, _MAMBA = range(4)


class Hit(NamedTuple):
    """The longest usable prefix, and its blocks that must be resident."""

    num_tokens: int  # A multiple of the groups' `alignment`.
    # bool[n_g] for each group: the blocks that the next token reads. Other blocks need
    # no load: they are outside the window, in another chunk, older states, or beyond
    # the prefix.
    needed: list[NDArray[np.bool_]]


def find_longest_hit(
    groups: tuple[GroupSpec, ...], masks: Sequence[NDArray[np.bool_]], max_tokens: int
) -> Hit:
    """Find the longest prefix usable by every group, with the result of vLLM 0.19.1.

    Takes time linear in the blocks. `masks` has a bool[n_g] for each group: whether
    each full block of the sequence is in any tier.

    >>> groups = (FullAttention(16), SlidingWindow(16, window=20))
    >>> full = np.array([True, True, True, True, False])
    >>> window = np.array([False, True, True, False, True])
    >>> hit = find_longest_hit(groups, (full, window), max_tokens=79)
    >>> hit.num_tokens, [mask.tolist().count(True) for mask in hit.needed]
    (48, [3, 2])
    """
    if len(masks) != len(groups):
        raise ValueError(f"{len(masks)=} must be {len(groups)}, one for each group.")
    for index, mask in enumerate(masks):
        if mask.ndim != 1:
            raise ValueError(f"masks[{index}].shape={mask.shape} must be (n,).")
        if mask.dtype != np.bool_:
            raise TypeError(f"masks[{index}].dtype={mask.dtype} must be bool.")
    if len(groups) == 1 and isinstance(groups[0], FullAttention):
        return _find_full(groups[0], masks[0], max_tokens)
    specs, step = _encoded(groups)
    covered = [m.shape[0] * g.block_size for g, m in zip(groups, masks, strict=True)]
    # A hit is a multiple of `step`, so only these lengths are tried.
    max_steps = max(min(max_tokens, *covered), 0) // step
    offsets = np.array([0, *itertools.accumulate(map(len, masks))], np.int64)
    is_resident = masks[0] if len(masks) == 1 else np.concatenate(masks)
    needed = np.empty(len(is_resident), np.bool_)
    num_tokens = _find_longest(
        specs, offsets, np.ascontiguousarray(is_resident), max_steps, step, needed
    )
    bounds = itertools.pairwise(offsets.tolist())
    return Hit(num_tokens, [needed[start:stop] for start, stop in bounds])


def _find_full(group: FullAttention, mask: NDArray[np.bool_], max_tokens: int) -> Hit:
    """Find the longest prefix of a single full-attention group."""
    num = 0
    if mask.size and mask[0]:
        num = int(mask.argmin()) or mask.size  # The first False, if there is one.
        num = min(num, max(max_tokens, 0) // group.block_size)
    needed = np.zeros(mask.size, np.bool_)
    needed[:num] = True
    return Hit(num * group.block_size, [needed])


@functools.lru_cache(maxsize=64)
def _encoded(groups: tuple[GroupSpec, ...]) -> tuple[NDArray[np.int64], int]:
    """Return the groups as numbers, and the alignment of hits in tokens."""
    check_groups(groups)
    return np.array([_encode(group) for group in groups], np.int64), alignment(groups)


def _encode(group: GroupSpec) -> tuple[int, int, int]:
    """Return a group's kind, block size in tokens, and blocks per window or chunk."""
    match group:
        case FullAttention(size):
            return _FULL, size, 0
        case SlidingWindow(size, window):
            # The window includes the next token. vLLM requires at least one resident
            # block, even for a window of one token.
            return _WINDOW, size, max(1, -(-(window - 1) // size))
        case ChunkedLocal(size, chunk):
            return _CHUNKED, size, chunk // size
        case Mamba(size):
            return _MAMBA, size, 0


@compiled
def _find_longest(
    specs: Any, offsets: Any, is_resident: Any, max_steps: int, step: int, needed: Any
) -> Any:
    """Return the tokens of the longest usable prefix, at most `max_steps * step`.

    A row of `specs` i64[G, 3] has a group's kind, its block size in tokens, and the
    blocks of its window or chunk. Group g has the rows `offsets[g]:offsets[g + 1]` of
    `is_resident` bool[n] and of `needed` bool[n]. Writes `needed`: the blocks that the
    next token reads.
    """
    num_groups = specs.shape[0]
    # For each block of a group and its end: the group's missing blocks before it.
    missing = empty(is_resident.shape[0] + num_groups, np.int64)
    for group in range(num_groups):
        at = offsets[group] + group
        missing[at] = 0
        for row in range(offsets[group], offsets[group + 1]):
            missing[at + 1] = missing[at] + (not is_resident[row])
            at += 1
    num_tokens = 0
    for length in range(max_steps * step, 0, -step):
        is_hit = True
        for group in range(num_groups):
            start = offsets[group] + group
            end = length // specs[group, 1]
            first = _first_needed(specs, group, end)
            is_hit &= missing[start + end] == missing[start + first]
        if is_hit:
            num_tokens = length
            break
    for group in range(num_groups):
        end = num_tokens // specs[group, 1]
        first = _first_needed(specs, group, end)
        for row in range(offsets[group], offsets[group + 1]):
            needed[row] = first <= row - offsets[group] < end
    return num_tokens


@compiled
def _first_needed(specs: Any, group: int, end: int) -> Any:
    """Return the first block read by the token after a prefix of `end` blocks."""
    kind, span = specs[group, 0], specs[group, 2]
    if kind == _WINDOW:
        return greater(end - span, 0)
    if kind == _CHUNKED:
        # No block is read if the prefix ends with a chunk.
        return end - end % span
    if kind == _MAMBA:
        return greater(end - 1, 0)
    return 0
