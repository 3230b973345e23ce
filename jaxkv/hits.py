"""How long a prefix the tiers hold, for all groups of a model together.

A prefix can be used if every group holds what its kind of attention reads from there
on (`jaxkv.groups`). vLLM 0.19.1 searches one kind after the other, each within the
length that the one before has left, until no length shrinks. Here one fact takes the
place of that loop: whether a prefix can be used depends on its own blocks alone, and
not on where a search began. So all lengths are judged at once, by differences of
running counts, and the longest that suits every group is the one at which the loop
ends.

vLLM leaves the loop after a single pass where there are full attention and one kind
more. That changes no answer: what the other kind leaves is a part of what full
attention has, and suits the other kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxkv.groups import (
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    Mamba,
    SlidingWindow,
    alignment,
    check_groups,
)
from jaxkv.policies.counting import running_count


class Hit(NamedTuple):
    """The longest prefix that can be used, and what it consists of.

    Attributes:
        num_tokens: i32[]. Its length; a multiple of `alignment` of the groups.
        needed: One bool[n_g] for each group. The blocks whose contents the next token
            reads. The others need not be loaded: they are outside the window, in
            another chunk, older states, or beyond the prefix.
    """

    num_tokens: Array
    needed: tuple[Array, ...]


def find_longest_hit(
    groups: tuple[GroupSpec, ...], masks: Sequence[Array], max_tokens: ArrayLike
) -> Hit:
    """Find the longest prefix that every group can use.

    The answers are those of vLLM 0.19.1's `find_longest_cache_hit`. The work is linear
    in the number of blocks. Under `jax.jit`, `groups` is a static argument.

    Args:
        groups: What `as_groups` gives.
        masks: One bool[n_g] for each group: which blocks of the sequence can be had,
            from any tier. Padding is false, and so is a block that is not full.
        max_tokens: i32[]. Most tokens that the prefix may have; at most those of the
            sequence. Below 1, there is no hit.

    Raises:
        TypeError: A mask is not of bool.
        ValueError: The groups cannot be searched together, or the masks are not one
            for each group, of one dimension.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkv.groups import FullAttention, SlidingWindow
        >>> groups = (FullAttention(16), SlidingWindow(16, window=20))
        >>> full = jnp.array([True, True, True, True, False])
        >>> window = jnp.array([False, True, True, False, True])
        >>> hit = find_longest_hit(groups, (full, window), max_tokens=79)
        >>> int(hit.num_tokens)
        48
        >>> [mask.tolist().count(True) for mask in hit.needed]
        [3, 2]
    """
    check_groups(groups)
    _check_masks(groups, masks)
    max_tokens = jnp.asarray(max_tokens, jnp.int32)
    # Hits end after a whole number of steps, so only such lengths are judged.
    step = alignment(groups)
    covered = [m.shape[0] * g.block_size for g, m in zip(groups, masks, strict=True)]
    steps = jnp.arange(1, min(covered) // step + 1, dtype=jnp.int32)
    is_hit = steps <= max_tokens // step
    for group, mask in zip(groups, masks, strict=True):
        ends = steps * (step // group.block_size)
        missing = _count_missing(mask)
        is_hit &= missing[ends] == missing[_first_needed(group, ends)]
    num_tokens = jnp.max(jnp.where(is_hit, steps, 0), initial=0) * step
    needed = []
    for group, mask in zip(groups, masks, strict=True):
        blocks = jnp.arange(mask.shape[0], dtype=jnp.int32)
        end = num_tokens // group.block_size
        needed.append((_first_needed(group, end) <= blocks) & (blocks < end))
    return Hit(num_tokens, tuple(needed))


def _count_missing(mask: Array) -> Array:
    """Count the missing blocks before each.

    Args:
        mask: bool[n].

    Returns:
        i32[m], m > n.
    """
    # Whole words of 32 are counted faster.
    num = mask.shape[0] + 1
    return running_count(jnp.pad(~mask, (1, -num % 32)))


def _first_needed(group: GroupSpec, end: Array) -> Array:
    """Tell from which block on a prefix that ends before block `end` is read.

    Args:
        group: The kind of attention.
        end: i32[...]. Blocks of the prefix, at least 0.

    Returns:
        i32[...]. At most `end`. Below 0 only for an empty prefix.
    """
    match group:
        case FullAttention():
            return jnp.zeros_like(end)
        case SlidingWindow(block_size, window):
            # The next token is in its own window. vLLM asks for a block even where the
            # window is one token wide, so that there is something to hit.
            num_blocks = max(1, -(-(window - 1) // block_size))
            return jnp.maximum(end - num_blocks, 0)
        case ChunkedLocal(block_size, chunk):
            # Nothing at all, for a prefix that ends with a chunk.
            return end - end % (chunk // block_size)
        case Mamba():
            return end - 1


def _check_masks(groups: tuple[GroupSpec, ...], masks: Sequence[Array]) -> None:
    """Refuse masks that do not belong to the groups."""
    if len(masks) != len(groups):
        raise ValueError(f"{len(masks)=} must be {len(groups)}, one for each group.")
    for index, mask in enumerate(masks):
        if mask.ndim != 1:
            raise ValueError(f"masks[{index}].shape={mask.shape} must be (n,).")
        if mask.dtype != jnp.bool_:
            raise TypeError(f"masks[{index}].dtype={mask.dtype} must be bool.")
