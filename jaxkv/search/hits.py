"""The longest prefix that can be used, over masks of the groups' resident blocks.

A prefix can be used if every group holds the blocks that its next token reads
(`jaxkv.search.groups`). vLLM 0.19.1 searches one kind of attention after the other,
each within the length left by the last one, until no length shrinks. Here no such loop
is needed: a prefix's own blocks alone determine whether it can be used, wherever a
search began. So lengths are tried from the longest on, by differences of running
counts, and vLLM's loop ends at the first length that all groups can use.

For full attention and one other kind, vLLM leaves the loop after one pass. The result
is the same: the other kind's length is within full attention's, and both can use it.
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
    """The longest prefix that can be used, and the blocks of it that are needed."""

    num_tokens: int  # A multiple of the groups' `alignment`.
    # bool[n_g] for each group: the blocks that the next token reads. The others need
    # not be loaded: they are outside the window, in another chunk, older states, or
    # beyond the prefix.
    needed: list[NDArray[np.bool_]]


def find_longest_hit(
    groups: tuple[GroupSpec, ...], masks: Sequence[NDArray[np.bool_]], max_tokens: int
) -> Hit:
    """Find the longest prefix that every group can use, as vLLM 0.19.1 finds it.

    The work is linear in the number of blocks. `masks` has a bool[n_g] for each group:
    which full blocks of the sequence are in some tier.

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
        return _leading(groups[0], masks[0], max_tokens)
    specs, step = _specs(groups)
    covered = [m.shape[0] * g.block_size for g, m in zip(groups, masks, strict=True)]
    # Hits end after a whole number of steps, so only such lengths are tried.
    max_steps = max(min(max_tokens, *covered), 0) // step
    offsets = np.array([0, *itertools.accumulate(map(len, masks))], np.int64)
    is_resident = masks[0] if len(masks) == 1 else np.concatenate(masks)
    needed = np.empty(len(is_resident), np.bool_)
    num_tokens = _find_longest(
        specs, offsets, np.ascontiguousarray(is_resident), max_steps, step, needed
    )
    bounds = itertools.pairwise(offsets.tolist())
    return Hit(num_tokens, [needed[start:stop] for start, stop in bounds])


def _leading(group: FullAttention, mask: NDArray[np.bool_], max_tokens: int) -> Hit:
    """Find the longest prefix if there is only full attention."""
    num = 0
    if mask.size and mask[0]:
        num = int(mask.argmin()) or mask.size  # The first False, if there is one.
        num = min(num, max(max_tokens, 0) // group.block_size)
    needed = np.zeros(mask.size, np.bool_)
    needed[:num] = True
    return Hit(num * group.block_size, [needed])


@functools.lru_cache(maxsize=64)
def _specs(groups: tuple[GroupSpec, ...]) -> tuple[NDArray[np.int64], int]:
    """Return groups for compiled functions, and the step of hits in tokens."""
    check_groups(groups)
    return np.array([_spec(group) for group in groups], np.int64), alignment(groups)


def _spec(group: GroupSpec) -> tuple[int, int, int]:
    """Return a group's kind, its block size, and the blocks of its window or chunk."""
    match group:
        case FullAttention(size):
            return _FULL, size, 0
        case SlidingWindow(size, window):
            # The next token is in its own window; vLLM needs a block to hit even if
            # the window has one token.
            return _WINDOW, size, max(1, -(-(window - 1) // size))
        case ChunkedLocal(size, chunk):
            return _CHUNKED, size, chunk // size
        case Mamba(size):
            return _MAMBA, size, 0


@compiled
def _find_longest(
    specs: Any, offsets: Any, is_resident: Any, max_steps: int, step: int, needed: Any
) -> Any:
    """Return in tokens the longest prefix whose next token can be computed.

    A row of `specs` i64[G, 3] has a group's kind, its block size in tokens, and the
    blocks of its window or chunk. Group g has the rows `offsets[g]:offsets[g + 1]` of
    `is_resident` bool[n] and of `needed` bool[n], which is written: the blocks that the
    next token reads. Lengths up to `max_steps` steps of `step` tokens are tried.
    """
    num_groups = specs.shape[0]
    # The number of missing blocks of a group before each of its blocks.
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
    """Return the first block that is read of a prefix that ends before block `end`."""
    kind, span = specs[group, 0], specs[group, 2]
    if kind == _WINDOW:
        return greater(end - span, 0)
    if kind == _CHUNKED:
        # No block, if the prefix ends with a chunk.
        return end - end % span
    if kind == _MAMBA:
        return greater(end - 1, 0)
    return 0
