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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxkv.search import longest as native
from jaxkv.search.groups import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    Mamba,
    SlidingWindow,
    alignment,
    check_groups,
)


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
    """Find the longest prefix that every group can use.

    vLLM 0.19.1's `find_longest_cache_hit` returns the same. The work is linear in the
    number of blocks. `masks` has a bool[n_g] for each group of `as_groups`: which full
    blocks of the sequence are in some tier.

    Raises:
        TypeError: A mask is not of bool.
        ValueError: The groups cannot be searched together, or there is not one mask of
            one dimension for each.

    >>> groups = (FullAttention(16), SlidingWindow(16, window=20))
    >>> full = np.array([True, True, True, True, False])
    >>> window = np.array([False, True, True, False, True])
    >>> hit = find_longest_hit(groups, (full, window), max_tokens=79)
    >>> hit.num_tokens, [mask.tolist().count(True) for mask in hit.needed]
    (48, [3, 2])
    """
    _check_masks(groups, masks)
    if len(groups) == 1 and isinstance(groups[0], FullAttention):
        return _leading(groups[0], masks[0], max_tokens)
    specs, step = _specs(groups)
    covered = [m.shape[0] * g.block_size for g, m in zip(groups, masks, strict=True)]
    # Hits end after a whole number of steps, so only such lengths are tried.
    max_steps = max(min(max_tokens, *covered), 0) // step
    offsets = np.array([0, *itertools.accumulate(map(len, masks))], np.int64)
    is_resident = masks[0] if len(masks) == 1 else np.concatenate(masks)
    needed = np.empty(len(is_resident), np.bool_)
    num_tokens = native.find_longest(
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
    rows = [(*_kind_and_span(group), group.block_size) for group in groups]
    specs = np.array([(kind, size, span) for kind, span, size in rows], np.int64)
    return specs, alignment(groups)


def _kind_and_span(group: GroupSpec) -> tuple[int, int]:
    """Return the kind of a group, and the blocks of its window or chunk."""
    match group:
        case FullAttention():
            return native.FULL, 0
        case SlidingWindow(block_size, window):
            # The next token is in its own window. Even for a window of one token vLLM
            # needs a block, so that there is something to hit.
            return native.WINDOW, max(1, -(-(window - 1) // block_size))
        case ChunkedLocal(block_size, chunk):
            return native.CHUNKED, chunk // block_size
        case Mamba():
            return native.MAMBA, 0


def _check_masks(
    groups: tuple[GroupSpec, ...], masks: Sequence[NDArray[np.bool_]]
) -> None:
    """Refuse masks that do not fit the groups."""
    if len(masks) != len(groups):
        raise ValueError(f"{len(masks)=} must be {len(groups)}, one for each group.")
    for index, mask in enumerate(masks):
        if mask.ndim != 1:
            raise ValueError(f"masks[{index}].shape={mask.shape} must be (n,).")
        if mask.dtype != np.bool_:
            raise TypeError(f"masks[{index}].dtype={mask.dtype} must be bool.")
