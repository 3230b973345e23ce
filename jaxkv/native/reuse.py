"""How soon blocks of each class are used again: `jaxkv.policies.reuse`, in place."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native.compiling import compiled, highest_bit, inlined

NUM_BINS = 28
"""Half octaves of the age; the last has no end."""

UNIT = 16
"""What one use counts, so that a decay leaves something of few."""

SHRINK = 200 * UNIT
"""How much the uses of all classes count in each."""

PRIOR = 1 * UNIT
"""What is taken to have been used again in each bin before anything was seen, ..."""

PRIOR_TOUCHES = 2 * NUM_BINS * PRIOR
"""... and of how many uses: blocks are the less worth, the older they are."""

DECAY_BITS = 8
"""At every rebuild all counts lose one in 256."""

MOST = 1 << 28
"""Counts are halved when they come to more than this in all."""

WIDTHS = np.array([2] + [1 << (b - 1) // 2 for b in range(1, NUM_BINS)], np.float32)
"""f32[28]. How long each bin is, in 512 ms; powers of two, so that products are exact
and no compiler can round a sum of them otherwise."""

_FINE = 8  # Bits of the part of a bin that has gone by.


@inlined
def bin_of(age_ms: int) -> Any:
    """Tell the bin of an age, and the part of it that has gone by, in 1/256."""
    bits, age_bin, part = np.int64(age_ms), np.int64(0), np.int64(0)
    if bits < 1024:
        part = bits >> 2
    else:
        top = np.int64(highest_bit(np.uint64(bits)))
        age_bin = 2 * (top - 10) + ((bits >> (top - 1)) & 1) + 1
        part = (bits & ((1 << (top - 1)) - 1)) >> (top - 1 - _FINE)
        if age_bin >= NUM_BINS - 1:
            age_bin = np.int64(NUM_BINS - 1)
            part = np.int64(0)
    return age_bin, part


@inlined
def count(table: Any, of_class: int, age_ms: int) -> None:
    """Record that a block of a class was used again at an age."""
    age_bin, _ = bin_of(age_ms)
    table.reuses[of_class, age_bin] += UNIT


@inlined
def value_of(table: Any, of_class: int, age_ms: int) -> Any:
    """Tell what a block of a class and an age is worth."""
    age_bin, part = bin_of(age_ms)
    here = np.int64(table.index[of_class, age_bin])
    there = np.int64(table.index[of_class, age_bin + 1])
    return here + ((there - here) >> _FINE) * part


@compiled
def rebuild(table: Any) -> None:
    """Let the counts decay, and compute what blocks are worth by them."""
    num_classes = table.touches.shape[0]
    total_touches, total_reuses = np.int64(0), np.int64(0)
    for of_class in range(num_classes):
        total_touches += table.touches[of_class] >> 1
        for age_bin in range(NUM_BINS):
            total_reuses += table.reuses[of_class, age_bin] >> 1
    halving = 1 if max(total_touches, total_reuses) > MOST >> 1 else 0
    shares = np.zeros(NUM_BINS, np.int64)
    touches = np.int64(PRIOR_TOUCHES)
    for of_class in range(num_classes):
        num = table.touches[of_class] >> halving
        table.touches[of_class] = num - (num >> DECAY_BITS)
        touches += table.touches[of_class]
        for age_bin in range(NUM_BINS):
            num = table.reuses[of_class, age_bin] >> halving
            table.reuses[of_class, age_bin] = num - (num >> DECAY_BITS)
            shares[age_bin] += table.reuses[of_class, age_bin]
    for age_bin in range(NUM_BINS):
        share = np.float32(shares[age_bin] + PRIOR) / np.float32(touches)
        shares[age_bin] = np.int64(share * np.float32(SHRINK))
    empty: Any = np.int64(-1)  # A class that nothing is known of; all such are alike.
    for of_class in range(num_classes):
        is_empty = table.touches[of_class] == 0
        for age_bin in range(NUM_BINS):
            is_empty &= table.reuses[of_class, age_bin] == 0
        if is_empty and empty >= 0:
            for age_bin in range(NUM_BINS + 1):
                table.index[of_class, age_bin] = table.index[empty, age_bin]
        else:
            _fill_row(table, of_class, shares)
            if is_empty:
                empty = of_class


@compiled
def _fill_row(table: Any, of_class: int, shares: Any) -> None:
    """Compute what blocks of a class are worth, at each bin's beginning."""
    reuses = np.empty(NUM_BINS, np.int64)
    held = np.empty(NUM_BINS, np.float32)
    left: Any = np.int64(table.touches[of_class] + SHRINK)
    for age_bin in range(NUM_BINS):
        num = table.reuses[of_class, age_bin] + shares[age_bin]
        reuses[age_bin] = num
        held[age_bin] = (
            np.float32(max(left - (num >> 1), (num >> 1) + 1)) * WIDTHS[age_bin]
        )
        left -= num
    best = np.zeros(NUM_BINS + 1, np.float32)
    for age_bin in range(NUM_BINS):
        num, time = np.int64(0), np.float32(0)
        for stop in range(age_bin, NUM_BINS):
            num += reuses[stop]
            time += held[stop]
            best[age_bin] = max(best[age_bin], np.float32(num) / time)
    best[NUM_BINS] = best[NUM_BINS - 1]
    bits = best.view(np.int32)
    for age_bin in range(NUM_BINS + 1):
        table.index[of_class, age_bin] = bits[age_bin]
