"""The longest prefix that all groups of a model can use, over masks of their blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.compiling import compiled, empty, greater

FULL, WINDOW, CHUNKED, MAMBA = range(4)
"""Kinds of attention; see `jaxkv.search.groups`."""


@compiled
def find_longest(
    specs: Any, offsets: Any, is_there: Any, max_steps: int, step: int, needed: Any
) -> Any:
    """Find the longest prefix of which every group has what the next token reads.

    Args:
        specs: i64[G, 3]. Of each group its kind, its block size in tokens, and how
            many blocks its window or chunk has.
        offsets: i64[G + 1]. Where the blocks of each group begin in the rows below.
        is_there: bool[n]. Which blocks can be had, one group after the other.
        max_steps: The longest length to try, in steps.
        step: Tokens; lengths are multiples of it.
        needed: bool[n]. Written: the blocks that the next token reads.

    Returns:
        The length in tokens.
    """
    num_groups = specs.shape[0]
    # How many blocks of a group are missing before each.
    missing = empty(is_there.shape[0] + num_groups, np.int64)
    for group in range(num_groups):
        at = offsets[group] + group
        missing[at] = 0
        for row in range(offsets[group], offsets[group + 1]):
            missing[at + 1] = missing[at] + (not is_there[row])
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
    """Tell from which block on a prefix that ends before block `end` is read."""
    kind, span = specs[group, 0], specs[group, 2]
    if kind == WINDOW:
        return greater(end - span, 0)
    if kind == CHUNKED:
        # Nothing at all, for a prefix that ends with a chunk.
        return end - end % span
    if kind == MAMBA:
        return greater(end - 1, 0)
    return 0
