"""Reuse statistics: how soon blocks of each class are used again, and their value.

For each class, the table counts the blocks used, and the blocks used again by their age
at that time. The value of a block is the highest hit rate that can be gained by keeping
it until some age `stop`:

    max over stop of  (reuses up to stop) / (time that blocks are held up to stop)

This is the Gittins index (1979), which generalises the hit density of LHD (NSDI 2018).

Classes form a tree: each fact about a block splits a class. Blocks are counted in the
finest one. The statistics of a class are its own and, with a fixed weight, its parent's
share: what is seldom seen is judged by what it has in common with the rest. So a fact
that stops to matter costs little.

The last fact may be a hint: a `kind` that the caller gives. There the parent's share
counts at other odds. They are multiplied by the odds of reuse of all blocks with this
hint, divided by the odds that their classes without it predict. So a hint that is right
is soon trusted in every class, and one that says nothing costs little.

A second tree has the classes by the facts that are known when a request begins. Each
class of the first tree also counts for one of these (`begins`).

All processes of an engine must decide alike, whatever compiled their code. So counts
change by whole numbers, factors in sums are powers of two, and sums have a fixed order.
Values are the bits of a float32. The bits, as integers, sort like the float and are
nearly its logarithm; they are interpolated between bins.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv.compiling import (
    Bound,
    compiled,
    empty,
    filled,
    greater,
    highest_bit,
    inlined,
    lesser,
)

NUM_BINS = 28
"""Bins of the age at reuse: half octaves, the last unbounded."""

NUM_ROWS = 2048
"""Classes that have statistics. Others count for their parents."""

KIND_BITS = 9
"""Low bits of a code that are a class's kind; 0 for a class without a hint."""

HINT_BITS = 11
"""Low bits of a code that are its hint: kind, and whether the block was known."""

ROOT = 0
"""The row of the class of all blocks."""

SHRINK = 1024
"""The weight of the parent's statistics, in uses: of a few requests, as all blocks of
one are used again together."""

HINT_WEIGHT = 256
"""The weight of the odds without a hint, in uses."""

PRIOR = 32
"""The prior weight of reuses in each bin. With it alone, a block is worth less the
longer it is not used, as for LRU."""

PRIOR_TOUCHES = 2 * NUM_BINS * PRIOR
"""The prior weight of uses, so high that a block's value falls with its age."""

DECAY = 1 / 256
"""The part of all counts that each rebuild takes away."""

WIDTHS = np.array([2] + [1 << (b - 1) // 2 for b in range(1, NUM_BINS)], np.float64)
"""f64[28]. The width of each bin in 512 ms: powers of two, so that products are exact
and no compiler can round sums of them differently."""

_FRACTION_BITS = 8  # Of an age's position in its bin.
_NUM_PLACES = 2 * NUM_ROWS  # Of the hash table of rows.
_MULTIPLIER = 0x9E3779B1
_PLACE_SHIFT = 32 - (_NUM_PLACES.bit_length() - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReuseTable:
    """Counts of classes, one row each, and the values computed from them. R rows."""

    num_rows: NDArray[np.int32]  # i32[]. Rows in use; a parent's is before its child's.
    codes: NDArray[np.int32]  # i32[R]. The caller's code of the class.
    parents: NDArray[np.int32]  # i32[R]. The row of the class without one fact.
    begins: NDArray[np.int32]
    """i32[R]. The row of the other tree that the class counts for, -1 for none."""
    places: NDArray[np.int32]  # i32[2 R]. A hash table from codes to rows; 0 is empty.
    touches: NDArray[np.float64]  # f64[R]. Blocks that were used.
    reuses: NDArray[np.float64]  # f64[R, 28]. Blocks used again, by age at that time.
    index: NDArray[np.int32]
    """i32[R, 29]. The value of a block at the start of each bin, in uses per 512 ms, as
    the bits of a float32; the last column repeats the one before."""


def init() -> ReuseTable:
    """Make a table without counts, with one row for all blocks."""
    table = ReuseTable(
        num_rows=np.array(1, np.int32),
        codes=np.zeros(NUM_ROWS, np.int32),
        parents=np.zeros(NUM_ROWS, np.int32),
        begins=np.full(NUM_ROWS, -1, np.int32),
        places=np.zeros(_NUM_PLACES, np.int32),
        touches=np.zeros(NUM_ROWS),
        reuses=np.zeros((NUM_ROWS, NUM_BINS)),
        index=np.zeros((NUM_ROWS, NUM_BINS + 1), np.int32),
    )
    fill_index(Bound(table))
    return table


@compiled
def row_of(table: Any, code: int, parent: int, begin: int, max_rows: int) -> Any:
    """Return the row of a class by its code, not 0; add it if fewer rows are in use.

    Without room, return `parent`. `begin` is the row that the class counts for, or -1.
    """
    hashed = (np.int64(code) * _MULTIPLIER) & 0xFFFFFFFF
    place = hashed >> _PLACE_SHIFT
    row: Any = np.int64(table.places[place])
    while row > 0 and table.codes[row] != code:
        place = (place + 1) & (_NUM_PLACES - 1)
        row = np.int64(table.places[place])
    if row == 0:
        row = np.int64(table.num_rows[()])
        if row >= max_rows:
            return np.int64(parent)
        table.num_rows[()] += 1
        table.places[place] = row
        table.codes[row] = code
        table.parents[row] = parent
        table.begins[row] = begin
        for age_bin in range(NUM_BINS + 1):
            table.index[row, age_bin] = table.index[parent, age_bin]
    return row


@inlined
def bin_of(age_ms: int) -> Any:
    """Return the bin of an age, and its position there in 1/256."""
    bits, age_bin, fraction = np.int64(age_ms), np.int64(0), np.int64(0)
    if bits < 1024:
        fraction = bits >> 2
    else:
        top = np.int64(highest_bit(np.uint64(bits)))
        age_bin = 2 * (top - 10) + ((bits >> (top - 1)) & 1) + 1
        fraction = (bits & ((1 << (top - 1)) - 1)) >> (top - 1 - _FRACTION_BITS)
        if age_bin >= NUM_BINS - 1:
            age_bin = np.int64(NUM_BINS - 1)
            fraction = np.int64(0)
    return age_bin, fraction


@inlined
def count(table: Any, row: int, age_ms: int) -> None:
    """Count a reuse of a block of a class, at its age."""
    age_bin, _ = bin_of(age_ms)
    table.reuses[row, age_bin] += 1.0


@inlined
def value_of(table: Any, row: int, age_ms: int) -> Any:
    """Return the value of a block by its class and age."""
    age_bin, fraction = bin_of(age_ms)
    start = np.int64(table.index[row, age_bin])
    end = np.int64(table.index[row, age_bin + 1])
    return start + ((end - start) >> _FRACTION_BITS) * fraction


@compiled
def rebuild(table: Any) -> None:
    """Decay the counts, and compute the values of blocks from them."""
    for row in range(table.num_rows[()]):
        table.touches[row] -= table.touches[row] * DECAY
        for age_bin in range(NUM_BINS):
            table.reuses[row, age_bin] -= table.reuses[row, age_bin] * DECAY
    fill_index(table)


@compiled
def fill_index(table: Any) -> None:
    """Compute the values of blocks: classes add up to parents, then shrink to them."""
    num_rows: Any = np.int64(table.num_rows[()])
    touches = empty(num_rows, np.float64)
    shares = empty(num_rows * NUM_BINS, np.float64)  # At first, sums of reuses.
    totals = filled(num_rows, 0, np.float64)  # The same for all ages.
    hint_of = filled(num_rows, 0, np.int64)
    for row in range(num_rows):
        touches[row] = table.touches[row]
        for age_bin in range(NUM_BINS):
            shares[row * NUM_BINS + age_bin] = table.reuses[row, age_bin]
            totals[row] += table.reuses[row, age_bin]
        code: Any = greater(np.int64(table.codes[row]), -np.int64(table.codes[row]))
        if code & (1 << KIND_BITS) - 1:
            hint_of[row] = code & (1 << HINT_BITS) - 1
    for row in range(num_rows):
        if table.begins[row] >= 0:
            _add(touches, shares, table.begins[row], row)
    for row in range(num_rows - 1, ROOT, -1):
        # The second tree does not count for all blocks again.
        if table.parents[row] != ROOT or table.codes[row] > 0:
            _add(touches, shares, table.parents[row], row)
    for row in range(num_rows):
        if not hint_of[row]:
            _shrink(table, row, touches, shares, totals, 1.0)
    hints = filled(3 << HINT_BITS, 0, np.float64)  # Uses, reuses, and those expected.
    for row in range(num_rows):
        hint = 3 * hint_of[row]
        if hint and table.codes[row] > 0:
            hints[hint] += touches[row]
            hints[hint + 1] += totals[row]
            # A quotient, as a compiler might join a product and a sum.
            hints[hint + 2] += touches[row] / (1 / totals[table.parents[row]])
    for row in range(num_rows):
        if hint_of[row]:
            odds = _odds(hints, 3 * hint_of[row])
            _shrink(table, row, touches, shares, totals, odds)


@inlined
def _odds(hints: Any, hint: int) -> Any:
    """Return the odds of reuse with a hint, as a multiple of those without it."""
    num, num_used = hints[hint], hints[hint + 1]
    if num == 0:
        return 1.0
    chance = lesser(hints[hint + 2] / num, 1 - 2.0**-10)
    num_unused = greater(num - num_used, 0.0) + HINT_WEIGHT * (1 - chance)
    return (num_used + HINT_WEIGHT * chance) / num_unused / (chance / (1 - chance))


@compiled
def _shrink(
    table: Any, row: int, touches: Any, shares: Any, totals: Any, odds: float
) -> None:
    """Compute a class's shares, from its parent's at other odds, and its index."""
    parent: Any = table.parents[row]
    chance = lesser(totals[parent], 1.0)
    divisor = 1.0 if odds == 1 else (1 - chance) / odds + chance
    total = 0.0
    for age_bin in range(NUM_BINS):
        at = row * NUM_BINS + age_bin
        if row == ROOT:
            shares[at] = (shares[at] + PRIOR) / (touches[row] + PRIOR_TOUCHES)
        else:
            above = shares[parent * NUM_BINS + age_bin] / divisor
            shares[at] = (shares[at] + SHRINK * above) / (touches[row] + SHRINK)
        total += shares[at]
    totals[row] = total
    _fill_row(table, row, shares)


@compiled
def _add(touches: Any, sums: Any, to: int, row: int) -> None:
    touches[to] += touches[row]
    for age_bin in range(NUM_BINS):
        sums[to * NUM_BINS + age_bin] += sums[row * NUM_BINS + age_bin]


@compiled
def _fill_row(table: Any, row: int, shares: Any) -> None:
    """Compute a class's row of the index from its `shares` (f64[R * 28])."""
    held_time = empty(NUM_BINS, np.float64)
    survivors = 1.0
    for age_bin in range(NUM_BINS):
        half = shares[row * NUM_BINS + age_bin] / 2
        num_held = greater(survivors - half, half + 2.0**-20)
        held_time[age_bin] = num_held * WIDTHS[age_bin]
        survivors -= 2 * half
    best = filled(NUM_BINS + 1, 0, np.float32)
    for age_bin in range(NUM_BINS):
        num, time, highest = 0.0, 0.0, 0.0
        for stop in range(age_bin, NUM_BINS):
            num += shares[row * NUM_BINS + stop]
            time += held_time[stop]
            highest = greater(highest, num / time)
        best[age_bin] = np.float32(highest)
    best[NUM_BINS] = best[NUM_BINS - 1]
    bits = best.view(np.int32)
    for age_bin in range(NUM_BINS + 1):
        table.index[row, age_bin] = bits[age_bin]


def touches_of(table: ReuseTable) -> dict[int, float]:
    """Return the blocks used by the code of their class, where there were some."""
    used = np.flatnonzero(table.touches)
    return dict(
        zip(table.codes[used].tolist(), table.touches[used].tolist(), strict=True)
    )


def restored(
    num_rows: int, codes: Any, parents: Any, begins: Any, touches: Any, reuses: Any
) -> ReuseTable:
    """Make a table from the arrays of an earlier one, which are not trusted.

    Raises:
        ValueError: If they are not those of a table.
    """
    table = init()
    is_count = np.isfinite(touches).all() and np.isfinite(reuses).all()
    if not is_count or min(touches.min(), reuses.min()) < 0:
        raise ValueError("a count is not a number from 0.")
    bound = Bound(table)
    for row in range(1, num_rows):
        code, parent, begin = (int(array[row]) for array in (codes, parents, begins))
        if not (code and 0 <= parent < row and -1 <= begin < row):
            raise ValueError(f"row {row} is no class.")
        if row_of(bound, code, parent, begin, NUM_ROWS) != row:
            raise ValueError(f"row {row} is of a class that another row has.")
    table.touches[:num_rows] = touches[:num_rows]
    table.reuses[:num_rows] = reuses[:num_rows]
    fill_index(bound)
    return table
