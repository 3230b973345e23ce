"""Hazard: evicts, and declines to store, the blocks with the lowest expected hit rate.

LRU knows only when a block was last used. This policy learns from requests how soon the
blocks of each class are used again, and evicts accordingly.

* The class of a block: of its last request, the turn in the conversation (1; 2; 3 or 4;
  5 or more), the share of its blocks that are new, in quarters, the tokens it generated
  (unknown; less than 64, 256 or 1024; more) and its stop reason, if known. Then
  whether the block was known before, how long the conversation had paused, and the
  request's `kind`, if it has one. Output and stop reason are known when the request
  finishes; until then, a block has a class without.
* The turn: if no block has followed the request's deepest known block yet, the request
  continues that block's conversation, one turn later. Otherwise its turn is 1.
* Learning: `jaxkv.policies.reuse` counts reuse by class and age. It also counts reuse
  of evicted keys while `jaxkv.policies.ghosts` remembers them.
* Eviction: the block with the lowest value is evicted first; of equal values, the
  deepest block. A block's value is at least the value of each block after it in its
  prefix, because these are useless without it.
* Admission: of a batch of new blocks, in order, each is stored if it is worth more than
  the next victim; from the first that is not, all are declined. Both are valued now: a
  victim's value in the queue would be out of date, and too high.

A queue holds the next victims, as many as are wanted and 1/16 of all blocks; a block
that is used leaves it. If too few are left, all values are computed anew. An entry is a
block id.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv._util import check_whole, kept
from jaxkv.compiling import (
    Bound,
    compiled,
    copy_items,
    copy_row,
    copy_to_numpy,
    empty,
    filled,
    greater,
    highest_bit,
    inlined,
    lesser,
)
from jaxkv.keys import words_to_keys
from jaxkv.policies import clock
from jaxkv.policies import directory as directory_lib
from jaxkv.policies import ghosts as ghosts_lib
from jaxkv.policies import reuse as reuse_lib
from jaxkv.policies.base import Policy
from jaxkv.policies.directory import Directory
from jaxkv.policies.facts import (
    BEGIN,
    FINISH,
    KIND,
    MARK,
    NOW_MS,
    NUM_OUTPUT,
    NUM_TOKENS,
    STOP,
)
from jaxkv.policies.ghosts import Ghosts
from jaxkv.policies.lru import native_find
from jaxkv.policies.native import NativePolicy, register_native
from jaxkv.policies.reuse import ReuseTable
from jaxkv.types import NO_BLOCK

NUM_SHARES = 4
"""Classes by the share of new blocks in a request."""

MAX_TURNS = 5
TURN_BUCKETS = np.array([0, 0, 1, 2, 2, 3], np.int32)
"""i32[6]. Class by turn: 1; 2; 3 or 4; 5 or more."""

OUTPUT_STEPS = (64, 256, 1024)
NUM_OUTPUTS = 2 + len(OUTPUT_STEPS)
"""Classes by tokens generated: unknown; less than 64, 256 or 1024; more."""

MAX_PAUSE_LOG = 11
"""A conversation's pause counts by its seconds: less than 1, 3, 15, 63, 255, 1023 or
more; 0 is for none."""

# The mark of a request: pause (3 bits), share (2), class by turn (2), turn (3), kind
# plus 1 (9).
PAUSE_MASK = 7
SHARE_SHIFT = 3
SHARE_MASK = NUM_SHARES - 1
BUCKET_SHIFT = 5
BUCKET_MASK = 3
MARK_TURN_SHIFT = 7
MARK_KIND_SHIFT = 10

# The code of a class: its request's facts plus 1, then 4 bits for the pause plus 1, 2
# for `NEW` or `KNOWN`, and 9 for the kind plus 1 (see `reuse.HINT_BITS`); 0 for a class
# without that fact. Negative for a class by what is known when a request begins.
NEW, KNOWN = 1, 2
KNOWN_SHIFT = reuse_lib.KIND_BITS
PAUSE_SHIFT = reuse_lib.HINT_BITS
REQUEST_SHIFT = 15

# A label: the row of a class (11 bits), turn (3 bits), and whether a block ever
# followed (1 bit).
ROW_MASK = reuse_lib.NUM_ROWS - 1
TURN_SHIFT = 11
TURN_MASK = 7
CHILD = 1 << 14

MAX_ROWS_WITH_KINDS = reuse_lib.NUM_ROWS // 4 * 3
"""Classes by kind stop here, so that callers with many kinds leave room for others."""

NO_LABEL = -1
NO_PARENT = -1
FIRST_LABEL = 1 << TURN_SHIFT
"""The label of blocks that are inserted before the first request begins."""

REBUILD_EVERY = 64
"""Requests between two rebuilds of the reuse table's index."""

TICK_MS = 1024
"""How far each `touch` advances the clock until `note` sets the time."""

FLOPS_TOKENS = 30_000
"""Context in tokens at which attention costs as much as the rest of the model."""

UNKNOWN_BLOCK_TOKENS = 1 << 20

_NUM_BUCKETS = 1 << 12
_SORT_RUN = 32

NUM_GHOSTS = 1 << 16
"""Evicted keys that are remembered."""

_QUEUE_SHARE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HazardState:
    """The resident blocks, and reuse statistics. B blocks."""

    directory: Directory  # Maps each key to its block.
    labels: NDArray[np.int32]
    """i32[B]. Class and turn of the last request that used the block, and whether a
    block ever followed; -1 where the block holds no key."""
    last_ms: NDArray[np.uint32]  # u32[B]. The time of the block's last use.
    depths: NDArray[np.int32]
    """i32[B]. Blocks before it in its prefix; at first, in its insert."""
    parents: NDArray[np.int32]  # i32[B]. The block before it in its prefix, or -1.
    ghosts: Ghosts  # The labels of evicted and declined keys.
    reuse: ReuseTable  # Reuse statistics of each class.
    queue: NDArray[np.int32]  # i32[B]. The next victims, in order.
    queue_ends: NDArray[np.int32]  # i32[2]. The positions of the next victim, the end.
    is_queued: NDArray[np.bool_]
    """bool[B]. Whether the block is queued, and not used since."""
    now_ms: NDArray[np.uint32]  # u32[]. The time of the last `note`.
    has_time: NDArray[np.bool_]  # bool[]. Whether `note` has set the time.
    num_begun: NDArray[np.int32]  # i32[]. Requests begun since the last rebuild.
    current: NDArray[np.int32]  # i32[]. The label of the request that began last.
    block_tokens: NDArray[np.int32]  # i32[]. Tokens per block, estimated from requests.
    by_flops: NDArray[np.bool_]  # bool[]. Whether a block's depth raises its value.


def init(num_blocks: int, num_ghosts: int, by_flops: bool) -> HazardState:
    """Make an empty cache of `num_blocks`."""
    return HazardState(
        directory=directory_lib.init(num_blocks),
        labels=np.full(num_blocks, NO_LABEL, np.int32),
        last_ms=np.zeros(num_blocks, np.uint32),
        depths=np.zeros(num_blocks, np.int32),
        parents=np.full(num_blocks, NO_PARENT, np.int32),
        ghosts=ghosts_lib.init(num_ghosts),
        reuse=reuse_lib.init(),
        queue=np.zeros(num_blocks, np.int32),
        queue_ends=np.zeros(2, np.int32),
        is_queued=np.zeros(num_blocks, np.bool_),
        now_ms=np.array(0, np.uint32),
        has_time=np.array(False, np.bool_),
        num_begun=np.array(0, np.int32),
        current=np.array(FIRST_LABEL, np.int32),
        block_tokens=np.array(UNKNOWN_BLOCK_TOKENS, np.int32),
        by_flops=np.array(by_flops, np.bool_),
    )


@compiled
def native_touch(state: Any, entries: Any, is_use: Any) -> None:
    """Record a use of each entry.

    The policy learns from `note` only. Until the first `note` sets the time, each call
    advances the clock, so that eviction is close to LRU.
    """
    if not state.has_time[()] and entries.shape[0] > 0:
        state.now_ms[()] = (np.int64(state.now_ms[()]) + TICK_MS) & clock.TIME_MASK
    for entry in entries:
        if entry >= 0:
            state.last_ms[entry] = state.now_ms[()]
            state.is_queued[entry] = False


@compiled
def native_note(state: Any, kind: int, keys: Any, positions: Any, facts: Any) -> Any:
    """Learn from the beginning or the end of a request."""
    mark: Any = np.int64(facts[MARK])
    if kind == BEGIN:
        mark = np.int64(_native_begin(state, keys, positions, facts))
    elif kind == FINISH:
        _native_finish(state, keys, positions, facts)
    return mark


@compiled
def _native_begin(state: Any, keys: Any, positions: Any, facts: Any) -> Any:
    num_rows = keys.shape[0]
    clock.set_time(state, facts[NOW_MS])
    now: Any = np.int64(state.now_ms[()])
    state.num_begun[()] += 1
    if state.num_begun[()] == REBUILD_EVERY:
        state.num_begun[()] = 0
        reuse_lib.rebuild(state.reuse)
    num_blocks: Any = 0
    for row in range(num_rows):
        num_blocks = greater(num_blocks, positions[row] + 1)
    if num_rows:
        block_tokens: Any = np.int64(facts[NUM_TOKENS]) // num_blocks
        state.block_tokens[()] = lesser(
            np.int64(state.block_tokens[()]), greater(block_tokens, 1)
        )

    entries = empty(num_rows, np.int32)
    directory_lib.native_find(state.directory, keys, entries)
    slots = filled(num_rows, -1, np.int64)
    tags = empty(num_rows, np.uint32)
    labels = empty(num_rows, np.int32)
    num_new, num_known, is_leading = 0, 0, True
    deepest: Any = np.int64(0)
    deepest_ms: Any = np.int64(0)
    is_known = empty(num_rows, np.bool_)
    _fetch_ghosts(state, keys, entries, tags)
    for row in range(num_rows):
        entry = entries[row]
        label: Any = np.int64(NO_LABEL)
        last: Any = np.int64(0)
        if entry >= 0:
            label = np.int64(state.labels[entry])
            last = np.int64(state.last_ms[entry])
        else:
            slot = ghosts_lib.native_find(state.ghosts, tags[row])
            if slot >= 0:
                label = ghosts_lib.label_at(state.ghosts, slot)
                last = ghosts_lib.last_ms_at(state.ghosts, slot)
                slots[row] = slot
            else:
                slots[row] = ghosts_lib.native_choose(state.ghosts, tags[row], now)
        is_leading &= label >= 0 and (positions[row] > 0 or row == 0)
        if label >= 0:
            age = clock.age_of(now, last)
            reuse_lib.count(state.reuse, label & ROW_MASK, age)
            if is_leading:
                num_known += 1
                deepest, deepest_ms = label, last
        else:
            num_new += 1
        is_known[row] = label >= 0
        labels[row] = greater(label, 0) & CHILD

    turn: Any = np.int64(1)
    pause: Any = np.int64(0)
    if num_known:
        seconds = clock.age_of(now, deepest_ms) // 1000 + 1
        pause = (
            1 + lesser(np.int64(highest_bit(np.uint64(seconds))), MAX_PAUSE_LOG) // 2
        )
        if not deepest & CHILD:
            turn = lesser(((deepest >> TURN_SHIFT) & TURN_MASK) + 1, MAX_TURNS)
    share = lesser(NUM_SHARES * num_new // greater(num_rows, 1), NUM_SHARES - 1)
    facts_of_turn = TURN_BUCKETS[turn] << BUCKET_SHIFT | turn << MARK_TURN_SHIFT
    mark = pause | share << SHARE_SHIFT | facts_of_turn
    mark |= np.int64(facts[KIND]) << MARK_KIND_SHIFT
    of_class = filled(KNOWN + 1, -1, np.int64)
    for row in range(num_rows):
        was_known = KNOWN if is_known[row] else NEW
        if of_class[was_known] < 0:
            of_class[was_known] = _begin_row(state, mark, was_known)
        labels[row] |= of_class[was_known] | turn << TURN_SHIFT
    state.current[()] = _begin_row(state, mark, NEW) | turn << TURN_SHIFT
    _native_write_labels(state, positions, entries, slots, tags, labels)
    return mark


@compiled
def _begin_row(state: Any, mark: int, was_known: int) -> Any:
    """Return the row of a block's class by what is known when its request begins."""
    bucket, share = mark >> BUCKET_SHIFT & BUCKET_MASK, mark >> SHARE_SHIFT & SHARE_MASK
    code = -((bucket * NUM_SHARES + share + 1) << REQUEST_SHIFT)
    return _nested_row(state, code, mark, was_known, -1, -1)


@compiled
def _final_row(state: Any, mark: int, stop: int, output: int, was_known: int) -> Any:
    """Return the row of a block's class when its request has finished."""
    bucket, share = mark >> BUCKET_SHIFT & BUCKET_MASK, mark >> SHARE_SHIFT & SHARE_MASK
    number = ((stop * NUM_OUTPUTS + output) * 4 + bucket) * NUM_SHARES + share
    begin = _begin_row(state, mark & (1 << MARK_KIND_SHIFT) - 1, was_known)
    code, of_kind = (number + 1) << REQUEST_SHIFT, _begin_row(state, mark, was_known)
    return _nested_row(state, code, mark, was_known, begin, of_kind)


@compiled
def _nested_row(
    state: Any, code: int, mark: int, was_known: int, begin: int, begin_of_kind: int
) -> Any:
    """Return the row of a class by the request, the block, the pause and the kind."""
    table, max_rows, sign = state.reuse, reuse_lib.NUM_ROWS, 1 if code > 0 else -1
    row = reuse_lib.row_of(table, code, reuse_lib.ROOT, -1, max_rows)
    code += sign * (was_known << KNOWN_SHIFT)
    row = reuse_lib.row_of(table, code, row, -1, max_rows)
    code += sign * ((mark & PAUSE_MASK) + 1 << PAUSE_SHIFT)
    row = reuse_lib.row_of(table, code, row, begin, max_rows)
    kind = mark >> MARK_KIND_SHIFT
    if kind:
        code += sign * kind
        row = reuse_lib.row_of(table, code, row, begin_of_kind, MAX_ROWS_WITH_KINDS)
    return row


@inlined
def _was_known(state: Any, label: int) -> Any:
    """Return whether a block of this label was known when its request began."""
    code = np.int64(state.reuse.codes[label & ROW_MASK])
    code = greater(code, -code)
    return KNOWN if code >> KNOWN_SHIFT & 3 == KNOWN else NEW


@compiled
def _native_finish(state: Any, keys: Any, positions: Any, facts: Any) -> None:
    num_rows = keys.shape[0]
    clock.set_time(state, facts[NOW_MS])
    now: Any = np.int64(state.now_ms[()])
    output: Any = np.int64(0)
    if facts[NUM_OUTPUT] >= 0:
        output = np.int64(1)
        for step in OUTPUT_STEPS:
            output += facts[NUM_OUTPUT] >= step
    mark: Any = np.int64(facts[MARK])
    stop: Any = np.int64(facts[STOP])
    turn = mark >> MARK_TURN_SHIFT & TURN_MASK

    entries = empty(num_rows, np.int32)
    directory_lib.native_find(state.directory, keys, entries)
    slots = filled(num_rows, -1, np.int64)
    tags = empty(num_rows, np.uint32)
    of_class = filled(KNOWN + 1, -1, np.int64)
    labels = empty(num_rows, np.int32)
    _fetch_ghosts(state, keys, entries, tags)
    for row in range(num_rows):
        entry = entries[row]
        label: Any = np.int64(NO_LABEL)
        if entry >= 0:
            label = np.int64(state.labels[entry])
            state.depths[entry] = -1
            state.parents[entry] = NO_PARENT
        else:
            slots[row] = ghosts_lib.native_find(state.ghosts, tags[row])
            if slots[row] >= 0:
                label = ghosts_lib.label_at(state.ghosts, slots[row])
            else:
                slots[row] = ghosts_lib.native_choose(state.ghosts, tags[row], now)
        was_known = NEW
        if label >= 0:
            was_known = _was_known(state, label)
        if of_class[was_known] < 0:
            of_class[was_known] = _final_row(state, mark, stop, output, was_known)
        state.reuse.touches[of_class[was_known]] += 1.0
        followed = greater(label, 0) & CHILD
        labels[row] = followed | of_class[was_known] | turn << TURN_SHIFT
    for row in range(num_rows):
        entry = entries[row]
        if entry >= 0:
            state.depths[entry] = greater(state.depths[entry], positions[row])
            if row > 0 and positions[row] > 0:
                state.parents[entry] = greater(state.parents[entry], entries[row - 1])
    _native_write_labels(state, positions, entries, slots, tags, labels)


@compiled
def native_insert(state: Any, keys: Any, block_ids: Any) -> None:
    """Add new keys; the block of a key with a ghost gets its label and time."""
    directory_lib.native_insert(state.directory, keys, block_ids)
    num_rows = block_ids.shape[0]
    slots = filled(num_rows, -1, np.int64)
    for row in range(num_rows):
        block = block_ids[row]
        if block != NO_BLOCK:
            tag = directory_lib.tag_of(state.directory, keys, row)
            slots[row] = ghosts_lib.native_find(state.ghosts, tag)
            label, last = np.int64(state.current[()]), np.int64(state.now_ms[()])
            if slots[row] >= 0:
                label = ghosts_lib.label_at(state.ghosts, slots[row])
                if state.has_time[()]:
                    last = ghosts_lib.last_ms_at(state.ghosts, slots[row])
            state.labels[block] = label
            state.last_ms[block] = last
            state.depths[block] = row
            state.parents[block] = block_ids[row - 1] if row else NO_PARENT
    for slot in slots:
        if slot >= 0:
            ghosts_lib.clear_at(state.ghosts, slot)


@compiled
def native_remove(state: Any, entries: Any) -> None:
    """Forget keys without leaving ghosts."""
    for entry in entries:
        if entry >= 0:
            directory_lib.native_remove(state.directory, entry)
            state.labels[entry] = NO_LABEL
            state.is_queued[entry] = False


@compiled
def native_admit(
    state: Any, keys: Any, wanted: Any, num_free: int, ref_cnt: Any
) -> Any:
    """Decline blocks that are worth no more than what they would evict."""
    num_rows = wanted.shape[0]
    num_wanted = 0
    for row in range(num_rows):
        num_wanted += wanted[row]
    if not state.has_time[()]:
        return num_wanted
    values = filled(num_rows, -1, np.int64)
    highest: Any = np.int64(-1)
    last_label, last_last = np.int64(-1), np.int64(-1)
    for row in range(num_rows - 1, -1, -1):
        if wanted[row]:
            tag = directory_lib.tag_of(state.directory, keys, row)
            slot = ghosts_lib.native_find(state.ghosts, tag)
            label: Any = np.int64(state.current[()])
            last: Any = np.int64(state.now_ms[()])
            if slot >= 0:
                label = ghosts_lib.label_at(state.ghosts, slot)
                last = ghosts_lib.last_ms_at(state.ghosts, slot)
            if label != last_label or last != last_last:  # Else it is the same again.
                highest = greater(highest, _value_now(state, label, last))
                last_label, last_last = label, last
            values[row] = highest
    is_fresh = False
    row, num_admitted = 0, 0
    position = np.int64(state.queue_ends[0])
    while row < num_rows:
        if wanted[row] and num_admitted >= num_free:
            position = _next_victim(state, position, ref_cnt)
            if position >= state.queue_ends[1]:
                if is_fresh or not _refill(state, num_wanted - num_free, ref_cnt):
                    return num_wanted  # Too few idle blocks: `evict` will refuse.
                is_fresh = True
                row, num_admitted = 0, 0
                position = np.int64(state.queue_ends[0])
                continue
            victim = state.queue[position]
            label = np.int64(state.labels[victim])
            last = np.int64(state.last_ms[victim])
            if values[row] <= _value_now(state, label, last):
                break
            position += 1
        num_admitted += wanted[row]
        row += 1
    for declined in range(row, num_rows):
        wanted[declined] = False
    return num_admitted


@inlined
def _value_now(state: Any, label: int, last_ms: Any) -> Any:
    """Return the value of a block, without later blocks and its depth."""
    now: Any = np.int64(state.now_ms[()])
    age = clock.age_of(now, last_ms)
    return reuse_lib.value_of(state.reuse, label & ROW_MASK, age)


@compiled
def _next_victim(state: Any, position: Any, ref_cnt: Any) -> Any:
    """Return the queue's next position with an idle block, or its end."""
    while position < state.queue_ends[1]:
        block = state.queue[position]
        if state.is_queued[block] and ref_cnt[block] == 0:
            break
        position += 1
    return position


@compiled
def native_evict(state: Any, num: int, ref_cnt: Any, block_ids: Any, keys: Any) -> Any:
    """Evict the blocks with the lowest values."""
    if num == 0:
        return True
    victims = block_ids[:num]
    is_fresh = False
    num_found, position = 0, np.int64(state.queue_ends[0])
    while num_found < num:
        position = _next_victim(state, position, ref_cnt)
        if position < state.queue_ends[1]:
            victims[num_found] = state.queue[position]
            num_found += 1
            position += 1
        else:
            if is_fresh or not _refill(state, num, ref_cnt):
                return False
            is_fresh = True
            num_found, position = 0, np.int64(state.queue_ends[0])
    state.queue_ends[0] = position

    now: Any = np.int64(state.now_ms[()])
    slots = empty(num, np.int64)
    tags = empty(num, np.uint32)
    labels = empty(num, np.int32)
    last_ms = empty(num, np.uint32)
    directory = state.directory
    for row in range(num):
        block = victims[row]
        slot = directory.slots[block]
        tags[row] = directory.tags[
            slot // directory_lib.SLOTS_PER_BUCKET,
            slot % directory_lib.SLOTS_PER_BUCKET,
        ]
        ghosts_lib.fetch(state.ghosts, tags[row])
    for row in range(num):
        block = victims[row]
        slots[row] = ghosts_lib.native_choose(state.ghosts, tags[row], now)
        labels[row], last_ms[row] = state.labels[block], state.last_ms[block]
        copy_row(keys, row, directory.keys, block)
    ghosts_lib.native_write(state.ghosts, slots, tags, labels, last_ms)
    native_remove(state, victims)
    return True


@inlined
def parent_of(state: Any, block: int) -> Any:
    """Return the block before a block in its prefix, NO_PARENT if it was evicted."""
    parent = np.int64(state.parents[block])
    # Since then, the parent's block may have been reused for another key.
    if parent >= 0 and (
        state.labels[parent] < 0 or state.depths[parent] != state.depths[block] - 1
    ):
        parent = np.int64(NO_PARENT)
    return parent


def snapshot(state: HazardState) -> dict[str, Any]:
    """Describe a state. For the host, not for jit.

    Returns:
        "order", the keys in the order of eviction; "now_ms", the time; "ghosts", the
        number of evicted and declined keys remembered; and "touches", the decayed
        number of blocks used by class, as a code.
    """
    values = np.empty(len(state.labels), np.int64)
    _write_values(Bound(copy_to_numpy(state)), values)
    held = np.flatnonzero(np.asarray(state.labels) >= 0)
    depths = np.asarray(state.depths)
    in_order = held[np.lexsort((held, -depths[held], values[held]))]
    return {
        "order": words_to_keys(np.asarray(state.directory.keys)[in_order]),
        "now_ms": int(state.now_ms),
        "ghosts": ghosts_lib.count(state.ghosts),
        "touches": reuse_lib.touches_of(state.reuse),
    }


@kept
def make_hazard(
    num_blocks: int,
    max_batch: int = 4096,
    *,
    objective: Literal["hits", "flops"] = "hits",
    num_ghosts: int = NUM_GHOSTS,
) -> Policy:
    """Make the policy that learns how soon blocks are used again.

    Args:
        num_blocks: Blocks of the tier.
        max_batch: Maximum keys in one call.
        objective: "hits" maximises block hits; "flops" maximises prefill FLOPs saved: a
            block deep in a long prompt, whose attention costs more, is worth more.
        num_ghosts: Evicted keys to remember, rounded up to a power of two, at least 4.

    Returns:
        The policy. Equal arguments give the same object, so that functions traced
        with it are shared.

    Raises:
        ValueError: If a number is less than 1, or the objective is unknown.

    Example:
        >>> make_hazard(num_blocks=4).listens
        True
    """
    check_whole(1, num_blocks=num_blocks, max_batch=max_batch, num_ghosts=num_ghosts)
    if objective not in ("hits", "flops"):
        raise ValueError(f"{objective=} must be 'hits' or 'flops'.")
    return Policy(
        num_blocks=num_blocks,
        max_batch=max_batch,
        init=functools.partial(init, num_blocks, num_ghosts, objective == "flops"),
        snapshot=snapshot,
        native=NATIVE,
    )


@compiled
def _native_write_labels(
    state: Any, positions: Any, entries: Any, slots: Any, tags: Any, labels: Any
) -> None:
    """Write a request's labels and time to its blocks, and to ghosts of absent keys.

    `labels` (i32[K]) are read and written.
    """
    num_rows = entries.shape[0]
    now_ms = state.now_ms[()]
    num_absent = 0
    for row in range(num_rows):
        followed = CHILD if row + 1 < num_rows and positions[row + 1] > 0 else 0
        entry = entries[row]
        if entry >= 0:
            # A key that occurs twice is followed if any of its rows is.
            state.labels[entry] = state.labels[entry] & CHILD | followed | labels[row]
            state.last_ms[entry] = now_ms
            state.is_queued[entry] = False
        else:
            labels[row] |= followed
            num_absent += 1
    if num_absent:
        ghosts_lib.native_write(
            state.ghosts, slots, tags, labels, filled(1, now_ms, np.uint32)
        )


@compiled
def _fetch_ghosts(state: Any, keys: Any, entries: Any, tags: Any) -> None:
    """Compute the tags (u32[K]) of keys without an entry, and prefetch their ghosts."""
    for row in range(entries.shape[0]):
        if entries[row] < 0:
            tags[row] = directory_lib.tag_of(state.directory, keys, row)
            ghosts_lib.fetch(state.ghosts, tags[row])


@compiled
def _write_values(state: Any, values: Any) -> None:
    """Write each block's value, with later blocks (i64[B]); -1 for no key."""
    num_blocks = values.shape[0]
    now: Any = np.int64(state.now_ms[()])
    block_tokens: Any = np.int64(state.block_tokens[()])
    base = empty(1, np.float32)
    bits = base.view(np.int32)
    base[0] = np.float32(FLOPS_TOKENS)
    base_bits = np.int64(bits[0])
    for block in range(num_blocks):
        label = state.labels[block]
        values[block] = -1
        if label < 0:
            continue
        age = clock.age_of(now, state.last_ms[block])
        values[block] = reuse_lib.value_of(state.reuse, label & ROW_MASK, age)
        if state.by_flops[()]:
            # Bits of floats are nearly their logarithms: adding them multiplies.
            tokens: Any = lesser(np.int64(state.depths[block]) * block_tokens, 1 << 29)
            base[0] = np.float32(FLOPS_TOKENS + tokens)
            values[block] += bits[0] - base_bits
    for block in range(num_blocks):
        value = values[block]
        if value < 0:
            continue
        parent = parent_of(state, block)
        while parent >= 0 and values[parent] < value:
            values[parent] = value
            parent = parent_of(state, parent)


@compiled
def _refill(state: Any, num: int, ref_cnt: Any) -> Any:
    """Queue the idle blocks of the lowest values, `num` and more; False if too few."""
    num_blocks = ref_cnt.shape[0]
    num_idle = 0
    for block in range(num_blocks):
        num_idle += state.labels[block] >= 0 and ref_cnt[block] == 0
    if num_idle < num:
        return False
    values = empty(num_blocks, np.int64)
    _write_values(state, values)
    num_chosen = lesser(num_idle, num + 1 + (num_blocks - 1) // _QUEUE_SHARE)
    chosen = _native_choose_lowest(state, values, ref_cnt, num_chosen)
    for block in range(num_blocks):
        state.is_queued[block] = False
    copy_items(state.queue, 0, chosen, num_chosen)
    for position in range(num_chosen):
        state.is_queued[chosen[position]] = True
    state.queue_ends[0], state.queue_ends[1] = 0, num_chosen
    return True


@compiled
def _native_choose_lowest(state: Any, values: Any, ref_cnt: Any, num: int) -> Any:
    """Find the `num` idle blocks of the lowest `values` (i64[B]), in order: i32[M].

    The deepest of equal ones goes first. At least `num` blocks must be idle; the result
    may have more than `num`. Values are at least 0 for blocks that hold a key.
    """
    num_blocks = values.shape[0]
    low, high, num_idle = np.int64(1) << 62, np.int64(0), 0
    blocks = empty(num_blocks, np.int32)
    ranks = empty(num_blocks, np.int64)
    for block in range(num_blocks):
        if values[block] >= 0 and ref_cnt[block] == 0:
            rank = values[block] << 31 | (0x7FFFFFFF - np.int64(state.depths[block]))
            blocks[num_idle], ranks[num_idle] = block, rank
            low, high = lesser(low, rank), greater(high, rank)
            num_idle += 1
    # Count ranks in buckets of equal width, then again within the last bucket needed,
    # until it adds few blocks to the chosen ones. (np.partition and np.argsort would be
    # faster, but compile in 79 s instead of 4.)
    while True:
        shift = np.int64(0)
        while (high - low) >> shift >= _NUM_BUCKETS:
            shift += 1
        places, num_below = filled(_NUM_BUCKETS, 0, np.int64), 0
        for row in range(num_idle):
            if ranks[row] < low:
                num_below += 1
            elif ranks[row] <= high:
                places[(ranks[row] - low) >> shift] += 1
        last, so_far = np.int64(0), num_below + places[0]
        while so_far < num:
            last += 1
            so_far += places[last]
        if so_far - num <= greater(num, _SORT_RUN) or shift == 0:
            break
        low = low + (last << shift)
        high = lesser(high, low + (np.int64(1) << shift) - 1)
    end = low + ((last + 1) << shift)

    num_left = 0
    for row in range(num_idle):
        if ranks[row] < end:
            blocks[num_left], ranks[num_left] = blocks[row], ranks[row]
            num_left += 1
    _sort(ranks[:num_left], blocks[:num_left])
    return blocks[:num_left]


@compiled
def _sort(ranks: Any, blocks: Any) -> None:
    """Sort both arrays (i64[n], i32[n]) by rank, stably."""
    num_rows = ranks.shape[0]
    for first in range(0, num_rows, _SORT_RUN):
        for row in range(first + 1, lesser(first + _SORT_RUN, num_rows)):
            rank, block, at = ranks[row], blocks[row], row
            while at > first and ranks[at - 1] > rank:
                ranks[at], blocks[at] = ranks[at - 1], blocks[at - 1]
                at -= 1
            ranks[at], blocks[at] = rank, block
    # Merge sorted runs, doubling their length each time.
    left_ranks, left_blocks = empty(num_rows, np.int64), empty(num_rows, np.int32)
    width = _SORT_RUN
    while width < num_rows:
        for first in range(0, num_rows - width, 2 * width):
            for row in range(width):
                left_ranks[row] = ranks[first + row]
                left_blocks[row] = blocks[first + row]
            row, right, end = 0, first + width, lesser(first + 2 * width, num_rows)
            for at in range(first, end):
                if row == width:
                    break
                if right < end and ranks[right] < left_ranks[row]:
                    ranks[at], blocks[at] = ranks[right], blocks[right]
                    right += 1
                else:
                    ranks[at], blocks[at] = left_ranks[row], left_blocks[row]
                    row += 1
        width *= 2


NATIVE = NativePolicy(
    native_find,
    native_touch,
    native_insert,
    native_remove,
    native_evict,
    note=native_note,
    admit=native_admit,
)


register_native(HazardState, NATIVE)
