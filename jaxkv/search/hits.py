"""How long a prefix the tiers hold, for all groups of a model together.

A prefix can be used if every group holds what its kind of attention reads from there
on (`jaxkv.search.groups`). vLLM 0.19.1 searches one kind after the other, each within
the length that the one before has left, until no length shrinks. Here one fact takes
the place of that loop: whether a prefix can be used depends on its own blocks alone,
and not on where a search began. So lengths are judged one by one from the longest on,
by differences of running counts, and the first that suits every group is the one at
which vLLM's loop ends.

vLLM leaves the loop after a single pass where there are full attention and one kind
more. That changes no answer: what the other kind leaves is a part of what full
attention has, and suits the other kind.
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
    """The longest prefix that can be used, and what it consists of.

    Attributes:
        num_tokens: Its length; a multiple of `alignment` of the groups.
        needed: One bool[n_g] for each group. The blocks whose contents the next token
            reads. The others need not be loaded: they are outside the window, in
            another chunk, older states, or beyond the prefix.
    """

    num_tokens: int
    needed: list[NDArray[np.bool_]]


def find_longest_hit(
    groups: tuple[GroupSpec, ...], masks: Sequence[NDArray[np.bool_]], max_tokens: int
) -> Hit:
    """Find the longest prefix that every group can use.

    The answers are those of vLLM 0.19.1's `find_longest_cache_hit`. The work is linear
    in the number of blocks.

    Args:
        groups: What `as_groups` gives.
        masks: One bool[n_g] for each group: which blocks of the sequence can be had,
            from any tier. A block that is not full cannot.
        max_tokens: Most tokens that the prefix may have. Below 1, there is no hit.

    Raises:
        TypeError: A mask is not of bool.
        ValueError: The groups cannot be searched together, or the masks are not one
            for each group, of one dimension.

    Example:
        >>> import numpy as np
        >>> from jaxkv.search.groups import FullAttention, SlidingWindow
        >>> groups = (FullAttention(16), SlidingWindow(16, window=20))
        >>> full = np.array([True, True, True, True, False])
        >>> window = np.array([False, True, True, False, True])
        >>> hit = find_longest_hit(groups, (full, window), max_tokens=79)
        >>> hit.num_tokens
        48
        >>> [mask.tolist().count(True) for mask in hit.needed]
        [3, 2]
    """
    _check_masks(groups, masks)
    if len(groups) == 1 and isinstance(groups[0], FullAttention):
        return _leading(groups[0], masks[0], max_tokens)
    specs, step = _specs(groups)
    covered = [m.shape[0] * g.block_size for g, m in zip(groups, masks, strict=True)]
    # Hits end after a whole number of steps, so only such lengths are judged.
    max_steps = max(min(max_tokens, *covered), 0) // step
    offsets = np.array([0, *itertools.accumulate(map(len, masks))], np.int64)
    is_there = masks[0] if len(masks) == 1 else np.concatenate(masks)
    needed = np.empty(len(is_there), np.bool_)
    num_tokens = native.find_longest(
        specs, offsets, np.ascontiguousarray(is_there), max_steps, step, needed
    )
    bounds = itertools.pairwise(offsets.tolist())
    return Hit(num_tokens, [needed[start:stop] for start, stop in bounds])


def _leading(group: FullAttention, mask: NDArray[np.bool_], max_tokens: int) -> Hit:
    """Find the longest prefix where there is nothing but full attention."""
    num = 0
    if mask.size and mask[0]:
        num = int(mask.argmin()) or mask.size  # The first False, if there is one.
        num = min(num, max(max_tokens, 0) // group.block_size)
    needed = np.zeros(mask.size, np.bool_)
    needed[:num] = True
    return Hit(num * group.block_size, [needed])


@functools.lru_cache(maxsize=64)
def _specs(groups: tuple[GroupSpec, ...]) -> tuple[NDArray[np.int64], int]:
    """Give groups as compiled functions take them, and how far apart hits may end."""
    check_groups(groups)
    rows = [(*_kind_and_span(group), group.block_size) for group in groups]
    specs = np.array([(kind, size, span) for kind, span, size in rows], np.int64)
    return specs, alignment(groups)


def _kind_and_span(group: GroupSpec) -> tuple[int, int]:
    """Tell the kind of a group, and the blocks of its window or chunk."""
    match group:
        case FullAttention():
            return native.FULL, 0
        case SlidingWindow(block_size, window):
            # The next token is in its own window. vLLM asks for a block even where the
            # window is one token wide, so that there is something to hit.
            return native.WINDOW, max(1, -(-(window - 1) // block_size))
        case ChunkedLocal(block_size, chunk):
            return native.CHUNKED, chunk // block_size
        case Mamba():
            return native.MAMBA, 0


def _check_masks(
    groups: tuple[GroupSpec, ...], masks: Sequence[NDArray[np.bool_]]
) -> None:
    """Refuse masks that do not belong to the groups."""
    if len(masks) != len(groups):
        raise ValueError(f"{len(masks)=} must be {len(groups)}, one for each group.")
    for index, mask in enumerate(masks):
        if mask.ndim != 1:
            raise ValueError(f"masks[{index}].shape={mask.shape} must be (n,).")
        if mask.dtype != np.bool_:
            raise TypeError(f"masks[{index}].dtype={mask.dtype} must be bool.")
