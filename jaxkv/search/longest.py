"""Compiled search for the longest prefix that all groups of a model can use."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.compiling import compiled, empty, greater

FULL, WINDOW, CHUNKED, MAMBA = range(4)
"""Kinds of attention; see `jaxkv.search.groups`."""


@compiled
def find_longest(
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
    if kind == WINDOW:
        return greater(end - span, 0)
    if kind == CHUNKED:
        # No block, if the prefix ends with a chunk.
        return end - end % span
    if kind == MAMBA:
        return greater(end - 1, 0)
    return 0
