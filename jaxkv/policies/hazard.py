"""Hazard: evicts the blocks with the lowest expected hit rate.

LRU knows only when a block was last used. This policy learns from requests how soon the
blocks of each class of request are used again, and evicts accordingly.

* The class of a request: its turn in the conversation (1; 2; 3 or 4; 5 or more); the
  share of its blocks that are new, in quarters; the tokens it generated (unknown; less
  than 64, 256 or 1024; more); and its stop reason, if known. The last two are known
  when it finishes. All blocks of a request get its class and its time.
* The turn: if no block has followed the request's deepest known block yet, the request
  continues that block's conversation, one turn later. Otherwise its turn is 1.
* Learning: `jaxkv.policies.reuse` counts reuse by class and age. It also counts reuse
  of evicted keys while `jaxkv.policies.ghosts` remembers them.
* Eviction: the block with the lowest value is evicted first; of equal values, the
  deepest block. A block's value is at least the value of each block after it in its
  prefix, because these are useless without it.

A queue holds the next victims, up to 1/16 of all blocks; a block that is used leaves
it. If too few are left, all values are computed anew. An entry is a block id.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

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
    inlined,
    lesser,
)
from jaxkv.keys import words_to_keys
from jaxkv.policies import clock
from jaxkv.policies import directory as directory_lib
from jaxkv.policies import ghosts as ghosts_lib
from jaxkv.policies import reuse as reuse_lib
from jaxkv.policies.base import Held, Learned, Policy
from jaxkv.policies.directory import Directory
from jaxkv.policies.facts import (
    BEGIN,
    FINISH,
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
from jaxkv.policies.xla import full
from jaxkv.types import NO_BLOCK

NUM_SHARES = 4
"""Classes by the share of new blocks in a request."""

MAX_TURNS = 5
TURN_BUCKETS = np.array([0, 0, 1, 2, 2, 3], np.int32)
"""i32[6]. Class by turn: 1; 2; 3 or 4; 5 or more."""

NUM_BEGIN = 4 * NUM_SHARES
"""Classes of a request that begins: by its turn and its share of new blocks."""

BEGIN_MASK = NUM_BEGIN - 1
"""Selects the bits of a mark that are one of these classes."""

OUTPUT_STEPS = (64, 256, 1024)
NUM_OUTPUTS = 2 + len(OUTPUT_STEPS)
"""Classes by tokens generated: unknown; less than 64, 256 or 1024; more."""

NUM_CLASSES = 3 * NUM_OUTPUTS * NUM_BEGIN

# A label: class (8 bits), turn (3 bits), and whether a block ever followed (1 bit).
CLASS_MASK = 255
TURN_SHIFT = 8
TURN_MASK = 7
CHILD = 1 << 11

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
_MAX_VALUE = 0x7FFFFFFF


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HazardState:
    """The resident blocks, and reuse statistics. B blocks, a queue of Q = B / 16."""

    directory: Directory  # Maps each key to its block.
    labels: Array
    """i32[B]. Class and turn of the last request that used the block, and whether a
    block ever followed; -1 where the block holds no key."""
    last_ms: Array  # u32[B]. The time of the block's last use.
    depths: Array  # i32[B]. Blocks before it in its prefix; at first, in its insert.
    parents: Array  # i32[B]. The block before it in its prefix, or -1.
    ghosts: Ghosts  # The labels of evicted keys.
    reuse: ReuseTable  # Reuse statistics of each class.
    queue: Array  # i32[Q]. The next victims, in order; B as padding.
    queue_ends: Array  # i32[2]. The queue's positions of the next victim and the end.
    is_queued: Array  # bool[B]. Whether the block is queued, and not used since.
    now_ms: Array  # u32[]. The time of the last `note`.
    has_time: Array  # bool[]. Whether `note` has set the time.
    num_begun: Array  # i32[]. Requests that have begun since the last rebuild.
    current: Array  # i32[]. The label of the request that began last.
    block_tokens: Array  # i32[]. Tokens per block, estimated from requests.
    by_flops: Array  # bool[]. Whether a block's depth raises its value.


def init(num_blocks: int, num_ghosts: int, by_flops: bool) -> HazardState:
    """Make an empty cache of `num_blocks`."""
    return HazardState(
        directory=directory_lib.init(num_blocks),
        labels=full((num_blocks,), NO_LABEL, jnp.int32),
        last_ms=full((num_blocks,), 0, jnp.uint32),
        depths=full((num_blocks,), 0, jnp.int32),
        parents=full((num_blocks,), NO_PARENT, jnp.int32),
        ghosts=ghosts_lib.init(num_ghosts),
        reuse=reuse_lib.init(NUM_CLASSES),
        queue=full((-(-num_blocks // _QUEUE_SHARE),), num_blocks, jnp.int32),
        queue_ends=full((2,), 0, jnp.int32),
        is_queued=full((num_blocks,), False, jnp.bool_),
        now_ms=full((), 0, jnp.uint32),
        has_time=full((), False, jnp.bool_),
        num_begun=full((), 0, jnp.int32),
        current=full((), FIRST_LABEL, jnp.int32),
        block_tokens=full((), UNKNOWN_BLOCK_TOKENS, jnp.int32),
        by_flops=full((), by_flops, jnp.bool_),
    )


@compiled
def native_touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
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
        reuse_lib.native_rebuild(state.reuse)
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
            reuse_lib.native_count(state.reuse, label & CLASS_MASK, age)
            if is_leading:
                num_known += 1
                deepest = label
        else:
            num_new += 1
        labels[row] = greater(label, 0) & CHILD

    turn: Any = np.int64(1)
    if num_known and not deepest & CHILD:
        turn = lesser(((deepest >> TURN_SHIFT) & TURN_MASK) + 1, MAX_TURNS)
    share = lesser(NUM_SHARES * num_new // greater(num_rows, 1), NUM_SHARES - 1)
    mark = TURN_BUCKETS[turn] * NUM_SHARES + share | turn << TURN_SHIFT
    state.current[()] = mark
    _native_write_labels(state, positions, entries, slots, tags, labels, mark)
    return mark


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
    mark = facts[MARK]
    class_id = (facts[STOP] * NUM_OUTPUTS + output) * NUM_BEGIN + (mark & BEGIN_MASK)
    mark = class_id | (mark & TURN_MASK << TURN_SHIFT)
    state.reuse.touches[class_id] += reuse_lib.UNIT * num_rows

    entries = empty(num_rows, np.int32)
    directory_lib.native_find(state.directory, keys, entries)
    slots = filled(num_rows, -1, np.int64)
    tags = empty(num_rows, np.uint32)
    labels = empty(num_rows, np.int32)
    _fetch_ghosts(state, keys, entries, tags)
    for row in range(num_rows):
        entry = entries[row]
        label: Any = np.int64(NO_LABEL)
        if entry >= 0:
            state.depths[entry] = -1
            state.parents[entry] = NO_PARENT
        else:
            slots[row] = ghosts_lib.native_find(state.ghosts, tags[row])
            if slots[row] >= 0:
                label = ghosts_lib.label_at(state.ghosts, slots[row])
            else:
                slots[row] = ghosts_lib.native_choose(state.ghosts, tags[row], now)
        labels[row] = greater(label, 0) & CHILD
    for row in range(num_rows):
        entry = entries[row]
        if entry >= 0:
            state.depths[entry] = greater(state.depths[entry], positions[row])
            if row > 0 and positions[row] > 0:
                state.parents[entry] = greater(state.parents[entry], entries[row - 1])
    _native_write_labels(state, positions, entries, slots, tags, labels, mark)


@compiled
def native_insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
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
def native_evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict the blocks with the lowest values."""
    victims = block_ids[:num]
    num_found, position = 0, np.int64(state.queue_ends[0])
    while num_found < num and position < state.queue_ends[1]:
        block = state.queue[position]
        if state.is_queued[block] and ref_cnt[block] == 0:
            victims[num_found] = block
            num_found += 1
        position += 1
    if num_found == num:
        if num:
            state.queue_ends[0] = position
    elif not _refill(state, num, ref_cnt, victims):
        return False

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
        number of evicted keys remembered; and "touches", the decayed number of blocks
        that requests of each class used, in sixteenths.
    """
    values = np.empty(_num_blocks(state), np.int64)
    _write_values(Bound(copy_to_numpy(state)), values)
    held = np.flatnonzero(np.asarray(state.labels) >= 0)
    depths = np.asarray(state.depths)
    in_order = held[np.lexsort((held, -depths[held], values[held]))]
    return {
        "order": words_to_keys(np.asarray(state.directory.keys)[in_order]),
        "now_ms": int(state.now_ms),
        "ghosts": ghosts_lib.count(state.ghosts),
        "touches": tuple(np.asarray(state.reuse.touches).tolist()),
    }


def hand_over(state: HazardState) -> Held:
    """Return the resident blocks by time of last use; at equal times, deepest first."""
    held = np.flatnonzero(np.asarray(state.labels) >= 0)
    ages = np.asarray(state.now_ms) - np.asarray(state.last_ms)[held]
    ranks = (~ages).astype(np.uint64) << np.uint64(32)
    ranks |= (_MAX_VALUE - np.asarray(state.depths)[held]).astype(np.uint64)
    return Held(state.directory, held[np.argsort(ranks)].astype(np.int32))


def take_over(
    num_blocks: int,
    num_ghosts: int,
    by_flops: bool,
    held: Held,
    learned: Learned | None,
) -> HazardState:
    """Make a state of the blocks in `held`, in their order of use.

    Labels, times and reuse statistics are the shadow's; without one, blocks are equal.
    """
    blocks, state = held.blocks, init(num_blocks, num_ghosts, by_flops)
    # Of equal blocks the deepest is evicted first, so these depths keep the order of
    # use until a request begins.
    depths: Any = np.array(state.depths)
    depths[blocks] = np.arange(blocks.size, dtype=np.int32)[::-1]
    labels: Any = np.array(state.labels)
    labels[blocks] = FIRST_LABEL
    last_ms: Any = np.array(state.last_ms)
    if learned is not None:
        source = learned.state
        labels[blocks] = np.asarray(source.labels)[learned.blocks]
        last_ms[blocks] = np.asarray(source.last_ms)[learned.blocks]
        state = dataclasses.replace(
            state,
            ghosts=source.ghosts,
            reuse=reuse_lib.scaled(source.reuse, learned.scale),
            now_ms=source.now_ms,
            has_time=source.has_time,
            num_begun=source.num_begun,
            current=source.current,
        )
    return dataclasses.replace(
        state, directory=held.directory, labels=labels, last_ms=last_ms, depths=depths
    )


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
        always_evicts=True,
        hand_over=hand_over,
        take_over=functools.partial(
            take_over, num_blocks, num_ghosts, objective == "flops"
        ),
    )


def _num_blocks(state: HazardState) -> int:
    return state.labels.shape[0]


@compiled
def _native_write_labels(
    state: Any,
    positions: Any,
    entries: Any,
    slots: Any,
    tags: Any,
    labels: Any,
    mark: int,
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
            state.labels[entry] = (state.labels[entry] & CHILD) | followed | mark
            state.last_ms[entry] = now_ms
            state.is_queued[entry] = False
        else:
            labels[row] |= followed | mark
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
        values[block] = reuse_lib.native_value_of(state.reuse, label & CLASS_MASK, age)
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
def _refill(state: Any, num: int, ref_cnt: Any, victims: Any) -> Any:
    """Write the `num` idle blocks of the lowest values (i32[num]); queue the next."""
    num_blocks, queue_size = ref_cnt.shape[0], state.queue.shape[0]
    num_idle = 0
    for block in range(num_blocks):
        num_idle += state.labels[block] >= 0 and ref_cnt[block] == 0
    if num_idle < num:
        return False
    values = empty(num_blocks, np.int64)
    _write_values(state, values)
    num_chosen = lesser(num_idle, greater(num, queue_size))
    chosen = _native_choose_lowest(state, values, ref_cnt, num_chosen)
    for position in range(queue_size):
        if state.queue[position] < num_blocks:
            state.is_queued[state.queue[position]] = False
    copy_items(victims, 0, chosen, num)
    for position in range(queue_size):
        state.queue[position] = num_blocks
        if num + position < num_chosen:
            block = chosen[num + position]
            state.queue[position] = block
            state.is_queued[block] = True
    state.queue_ends[0], state.queue_ends[1] = 0, num_chosen - num
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
    # until it adds few blocks to the chosen ones. (np.partition and np.argsort would
    # take 0.34 to 0.85 of the time, but compile in 79 s instead of 4.)
    no_places = filled(_NUM_BUCKETS + 1, 0, np.int64)
    places = empty(_NUM_BUCKETS + 1, np.int64)
    while True:
        shift = np.int64(0)
        while (high - low) >> shift >= _NUM_BUCKETS:
            shift += 1
        copy_items(places, 0, no_places, _NUM_BUCKETS + 1)
        num_below = 0
        for row in range(num_idle):
            if ranks[row] < low:
                num_below += 1
            elif ranks[row] <= high:
                places[((ranks[row] - low) >> shift) + 1] += 1
        last, so_far = np.int64(0), num_below + places[1]
        while so_far < num:
            last += 1
            so_far += places[last + 1]
        if so_far - num <= greater(num, _SORT_RUN) or shift == 0:
            break
        low = low + (last << shift)
        high = lesser(high, low + (np.int64(1) << shift) - 1)
    end = low + ((last + 1) << shift)

    # Sort the blocks below `end` by buckets, then within each bucket.
    low, num_left = ranks[0], 0
    for row in range(num_idle):
        if ranks[row] < end:
            blocks[num_left], ranks[num_left] = blocks[row], ranks[row]
            low = lesser(low, ranks[row])
            num_left += 1
    shift = np.int64(0)
    while (end - 1 - low) >> shift >= _NUM_BUCKETS:
        shift += 1
    copy_items(places, 0, no_places, _NUM_BUCKETS + 1)
    for row in range(num_left):
        places[((ranks[row] - low) >> shift) + 1] += 1
    for bucket in range(_NUM_BUCKETS):
        places[bucket + 1] += places[bucket]
    sorted_blocks = empty(num_left, np.int32)
    sorted_ranks = empty(num_left, np.int64)
    for row in range(num_left):
        bucket = (ranks[row] - low) >> shift
        sorted_blocks[places[bucket]] = blocks[row]
        sorted_ranks[places[bucket]] = ranks[row]
        places[bucket] += 1
    start: Any = np.int64(0)
    for bucket in range(_NUM_BUCKETS):
        stop = places[bucket]
        _sort(sorted_ranks, sorted_blocks, start, stop)
        start = stop
    return sorted_blocks


@compiled
def _sort(ranks: Any, blocks: Any, start: int, stop: int) -> None:
    """Sort both arrays (i64[n], i32[n]) by rank from `start` to `stop`, stably."""
    for first in range(start, stop, _SORT_RUN):
        for row in range(first + 1, lesser(first + _SORT_RUN, stop)):
            rank, block, at = ranks[row], blocks[row], row
            while at > first and ranks[at - 1] > rank:
                ranks[at], blocks[at] = ranks[at - 1], blocks[at - 1]
                at -= 1
            ranks[at], blocks[at] = rank, block
    # Merge sorted runs, doubling their length each time.
    width = _SORT_RUN
    if stop - start <= width:
        return
    left_ranks, left_blocks = (
        empty(stop - start, np.int64),
        empty(stop - start, np.int32),
    )
    while width < stop - start:
        for first in range(start, stop - width, 2 * width):
            for row in range(width):
                left_ranks[row] = ranks[first + row]
                left_blocks[row] = blocks[first + row]
            row, right, end = 0, first + width, lesser(first + 2 * width, stop)
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
)


register_native(HazardState, NATIVE)
