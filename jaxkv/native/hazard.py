"""Evict by the hazard of reuse, in place; `jaxkv.policies.hazard` says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native import clock, reuse
from jaxkv.native import directory as directory_lib
from jaxkv.native import ghosts as ghosts_lib
from jaxkv.native.compiling import compiled, copy_items, inlined
from jaxkv.native.policy import NativePolicy
from jaxkv.types import NO_BLOCK

NUM_SHARES = 4
"""How many of a request's blocks were new, in quarters."""

MOST_TURNS = 5
TURN_BUCKETS = np.array([0, 0, 1, 2, 2, 3], np.int32)
"""i32[6]. Turns 1, 2, 3 and 4, and 5 and more."""

NUM_ASKED = 4 * NUM_SHARES
"""Classes of a request as it begins: by its turn, and by its share of new blocks."""

ASKED_MASK = NUM_ASKED - 1
"""Whatever a caller gives back as a mark, it is one of these classes."""

OUTPUT_STEPS = (64, 256, 1024)
NUM_OUTPUTS = 2 + len(OUTPUT_STEPS)
"""Classes by the output: not known (yet), and of less than 64, 256, 1024 or more."""

NUM_CLASSES = 3 * NUM_OUTPUTS * NUM_ASKED

# A note: 8 bits of the class, 3 of the turn, and whether a block followed.
CLASS_MASK = 255
TURN_SHIFT = 8
TURN_MASK = 7
CHILD = 1 << 11

NO_NOTE = -1
NO_PARENT = -1
FIRST_NOTE = 1 << TURN_SHIFT
"""The note of a block of which nobody told."""

REBUILD_EVERY = 64
"""Requests from one rebuild of the index to the next."""

TICK_MS = 1024
"""How far the clock goes with each `touch` as long as nobody has told the time."""

FLOPS_TOKENS = 30_000
"""Where the attention of a token costs as much as the rest of the model."""

UNKNOWN_SIZE = 1 << 20

_NUM_BUCKETS = 1 << 12
_FEW = 32


@compiled
def find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Find the block of each key; see `NativePolicy.find`."""
    directory_lib.find(state.directory, keys, entries)
    copy_items(block_ids, 0, entries, entries.shape[0])


@compiled
def touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """Record a use of each key; see `NativePolicy.touch`."""
    if not state.is_told[()] and entries.shape[0] > 0:
        state.now_ms[()] = (np.int64(state.now_ms[()]) + TICK_MS) & clock.TIME_MASK
    for entry in entries:
        if entry >= 0:
            state.last_ms[entry] = state.now_ms[()]
            state.is_queued[entry] = False


@compiled
def begin(state: Any, keys: Any, positions: Any, now_ms: int, num_tokens: int) -> Any:
    """Learn from what a request uses again; see `NativePolicy.begin`."""
    num_rows = keys.shape[0]
    clock.tell(state, now_ms)
    now: Any = np.int64(state.now_ms[()])
    state.num_begun[()] += 1
    if state.num_begun[()] == REBUILD_EVERY:
        state.num_begun[()] = 0
        reuse.rebuild(state.reuse)
    num_blocks: Any = 0
    for row in range(num_rows):
        num_blocks = max(num_blocks, positions[row] + 1)
    if num_rows:
        size: Any = np.int64(num_tokens) // num_blocks
        state.block_tokens[()] = min(np.int64(state.block_tokens[()]), max(size, 1))

    entries = np.empty(num_rows, np.int32)
    directory_lib.find(state.directory, keys, entries)
    slots = np.full(num_rows, -1, np.int64)
    tags = np.empty(num_rows, np.uint32)
    notes = np.empty(num_rows, np.int32)
    num_new, num_known, is_leading = 0, 0, True
    deepest: Any = np.int64(0)
    _fetch_ghosts(state, keys, entries, tags)
    for row in range(num_rows):
        entry = entries[row]
        note: Any = np.int64(NO_NOTE)
        last: Any = np.int64(0)
        if entry >= 0:
            note = np.int64(state.notes[entry])
            last = np.int64(state.last_ms[entry])
        else:
            slot = ghosts_lib.find(state.ghosts, tags[row])
            if slot >= 0:
                note = ghosts_lib.note_at(state.ghosts, slot)
                last = ghosts_lib.last_at(state.ghosts, slot)
                slots[row] = slot
            else:
                slots[row] = ghosts_lib.choose(state.ghosts, tags[row], now)
        is_leading &= note >= 0 and (positions[row] > 0 or row == 0)
        if note >= 0:
            age = clock.age_of(now, last)
            reuse.count(state.reuse, note & CLASS_MASK, age)
            if is_leading:
                num_known += 1
                deepest = note
        else:
            num_new += 1
        notes[row] = max(note, 0) & CHILD

    turn: Any = np.int64(1)
    if num_known and not deepest & CHILD:
        turn = min(((deepest >> TURN_SHIFT) & TURN_MASK) + 1, MOST_TURNS)
    share = min(NUM_SHARES * num_new // max(num_rows, 1), NUM_SHARES - 1)
    mark = TURN_BUCKETS[turn] * NUM_SHARES + share | turn << TURN_SHIFT
    state.current[()] = mark
    _write_notes(state, positions, entries, slots, tags, notes, mark)
    return mark


@compiled
def finish(
    state: Any,
    keys: Any,
    positions: Any,
    now_ms: int,
    num_output_tokens: int,
    stop: int,
    mark: int,
) -> None:
    """Complete the class of a request's blocks; see `NativePolicy.finish`."""
    num_rows = keys.shape[0]
    clock.tell(state, now_ms)
    now: Any = np.int64(state.now_ms[()])
    output: Any = np.int64(0)
    if num_output_tokens >= 0:
        output = np.int64(1)
        for step in OUTPUT_STEPS:
            output += num_output_tokens >= step
    of_class = (stop * NUM_OUTPUTS + output) * NUM_ASKED + (mark & ASKED_MASK)
    mark = of_class | (mark & TURN_MASK << TURN_SHIFT)
    state.reuse.touches[of_class] += reuse.UNIT * num_rows

    entries = np.empty(num_rows, np.int32)
    directory_lib.find(state.directory, keys, entries)
    slots = np.full(num_rows, -1, np.int64)
    tags = np.empty(num_rows, np.uint32)
    notes = np.empty(num_rows, np.int32)
    _fetch_ghosts(state, keys, entries, tags)
    for row in range(num_rows):
        entry = entries[row]
        note: Any = np.int64(NO_NOTE)
        if entry >= 0:
            state.depths[entry] = -1
            state.parents[entry] = NO_PARENT
        else:
            slots[row] = ghosts_lib.find(state.ghosts, tags[row])
            if slots[row] >= 0:
                note = ghosts_lib.note_at(state.ghosts, slots[row])
            else:
                slots[row] = ghosts_lib.choose(state.ghosts, tags[row], now)
        notes[row] = max(note, 0) & CHILD
    for row in range(num_rows):
        entry = entries[row]
        if entry >= 0:
            state.depths[entry] = max(state.depths[entry], positions[row])
            if row > 0 and positions[row] > 0:
                state.parents[entry] = max(state.parents[entry], entries[row - 1])
    _write_notes(state, positions, entries, slots, tags, notes, mark)


@compiled
def insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """Add new keys; see `NativePolicy.insert`."""
    directory_lib.insert(state.directory, keys, block_ids)
    num_rows = block_ids.shape[0]
    slots = np.full(num_rows, -1, np.int64)
    for row in range(num_rows):
        block = block_ids[row]
        if block != NO_BLOCK:
            tag = directory_lib.tag_of(state.directory, keys, row)
            slots[row] = ghosts_lib.find(state.ghosts, tag)
            note, last = np.int64(state.current[()]), np.int64(state.now_ms[()])
            if slots[row] >= 0:
                note = ghosts_lib.note_at(state.ghosts, slots[row])
                if state.is_told[()]:
                    last = ghosts_lib.last_at(state.ghosts, slots[row])
            state.notes[block] = note
            state.last_ms[block] = last
            state.depths[block] = row
            state.parents[block] = block_ids[row - 1] if row else NO_PARENT
    for slot in slots:
        if slot >= 0:
            ghosts_lib.clear_at(state.ghosts, slot)


@compiled
def remove(state: Any, entries: Any) -> None:
    """Forget entries; see `NativePolicy.remove`."""
    for entry in entries:
        if entry >= 0:
            directory_lib.remove(state.directory, entry)
            state.notes[entry] = NO_NOTE
            state.is_queued[entry] = False


@compiled
def evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict the blocks that are worth least; see `NativePolicy.evict`."""
    victims = block_ids[:num]
    found, position = 0, np.int64(state.queue_ends[0])
    while found < num and position < state.queue_ends[1]:
        block = state.queue[position]
        if state.is_queued[block] and ref_cnt[block] == 0:
            victims[found] = block
            found += 1
        position += 1
    if found == num:
        if num:
            state.queue_ends[0] = position
    elif not _refill(state, num, ref_cnt, victims):
        return False

    now: Any = np.int64(state.now_ms[()])
    slots = np.empty(num, np.int64)
    tags = np.empty(num, np.uint32)
    notes = np.empty(num, np.int32)
    last_ms = np.empty(num, np.uint32)
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
        slots[row] = ghosts_lib.choose(state.ghosts, tags[row], now)
        notes[row], last_ms[row] = state.notes[block], state.last_ms[block]
        directory_lib.copy_key(keys, row, directory.keys, block)
    ghosts_lib.write(state.ghosts, slots, tags, notes, last_ms)
    remove(state, victims)
    return True


@inlined
def parent_of(state: Any, block: int) -> Any:
    """Tell the block before a block in its prefix, NO_PARENT if it is not here."""
    parent = np.int64(state.parents[block])
    # Another block may have come in its place.
    if parent >= 0 and (
        state.notes[parent] < 0 or state.depths[parent] != state.depths[block] - 1
    ):
        parent = np.int64(NO_PARENT)
    return parent


@compiled
def _write_notes(
    state: Any,
    positions: Any,
    entries: Any,
    slots: Any,
    tags: Any,
    notes: Any,
    mark: int,
) -> None:
    """Give blocks the note of a request; `notes` (i32[K]) become those of all rows."""
    num_rows = entries.shape[0]
    now_ms = state.now_ms[()]
    num_absent = 0
    for row in range(num_rows):
        followed = CHILD if row + 1 < num_rows and positions[row + 1] > 0 else 0
        entry = entries[row]
        if entry >= 0:
            # Of a key that comes twice, every row that is followed counts.
            state.notes[entry] = (state.notes[entry] & CHILD) | followed | mark
            state.last_ms[entry] = now_ms
            state.is_queued[entry] = False
        else:
            notes[row] |= followed | mark
            num_absent += 1
    if num_absent:
        ghosts_lib.write(
            state.ghosts, slots, tags, notes, np.full(1, now_ms, np.uint32)
        )


@compiled
def _fetch_ghosts(state: Any, keys: Any, entries: Any, tags: Any) -> None:
    """Write the tags of keys that have no entry, and have their ghosts fetched."""
    for row in range(entries.shape[0]):
        if entries[row] < 0:
            tags[row] = directory_lib.tag_of(state.directory, keys, row)
            ghosts_lib.fetch(state.ghosts, tags[row])


@compiled
def _refill(state: Any, num: int, ref_cnt: Any, victims: Any) -> Any:
    """Find the blocks that are worth least, and put those beyond `num` in the queue."""
    num_blocks, room = ref_cnt.shape[0], state.queue.shape[0]
    values = np.empty(num_blocks, np.int64)
    num_idle = 0
    now: Any = np.int64(state.now_ms[()])
    size: Any = np.int64(state.block_tokens[()])
    base = np.empty(1, np.float32)
    bits = base.view(np.int32)
    base[0] = np.float32(FLOPS_TOKENS)
    base_bits = np.int64(bits[0])
    for block in range(num_blocks):
        note = state.notes[block]
        values[block] = -1
        if note < 0:
            continue
        num_idle += ref_cnt[block] == 0
        age = clock.age_of(now, state.last_ms[block])
        values[block] = reuse.value_of(state.reuse, note & CLASS_MASK, age)
        if state.by_flops[()]:
            tokens: Any = min(np.int64(state.depths[block]) * size, 1 << 29)
            base[0] = np.float32(FLOPS_TOKENS + tokens)
            values[block] += bits[0] - base_bits
    if num_idle < num:
        return False
    for block in range(num_blocks):
        value = values[block]
        if value < 0:
            continue
        parent = parent_of(state, block)
        while parent >= 0 and values[parent] < value:
            values[parent] = value
            parent = parent_of(state, parent)

    num_taken = min(num_idle, max(num, room))
    chosen = _choose_lowest(state, values, ref_cnt, num_taken)
    for position in range(room):
        if state.queue[position] < num_blocks:
            state.is_queued[state.queue[position]] = False
    copy_items(victims, 0, chosen, num)
    for position in range(room):
        state.queue[position] = num_blocks
        if num + position < num_taken:
            block = chosen[num + position]
            state.queue[position] = block
            state.is_queued[block] = True
    state.queue_ends[0], state.queue_ends[1] = 0, num_taken - num
    return True


@compiled
def _choose_lowest(state: Any, values: Any, ref_cnt: Any, num: int) -> Any:
    """Find the idle blocks with the lowest values, in order; the deepest of equal ones.

    Args:
        state: The state.
        values: i64[B]. Not negative for blocks that hold a key.
        ref_cnt: i32[B].
        num: How many, at most as many as there are.

    Returns:
        i32[M]. At least `num` blocks.
    """
    num_blocks = values.shape[0]
    least, most, num_idle = np.int64(1) << 62, np.int64(0), 0
    blocks = np.empty(num_blocks, np.int32)
    ranks = np.empty(num_blocks, np.int64)
    for block in range(num_blocks):
        if values[block] >= 0 and ref_cnt[block] == 0:
            rank = values[block] << 31 | (0x7FFFFFFF - np.int64(state.depths[block]))
            blocks[num_idle], ranks[num_idle] = block, rank
            least, most = min(least, rank), max(most, rank)
            num_idle += 1
    # Buckets of equal width, and those of the last of them again, until few blocks
    # but those that are chosen are left.
    places = np.zeros(_NUM_BUCKETS + 1, np.int64)
    while True:
        shift = np.int64(0)
        while (most - least) >> shift >= _NUM_BUCKETS:
            shift += 1
        places[:] = 0
        num_below = 0
        for row in range(num_idle):
            if ranks[row] < least:
                num_below += 1
            elif ranks[row] <= most:
                places[((ranks[row] - least) >> shift) + 1] += 1
        last, so_far = np.int64(0), num_below + places[1]
        while so_far < num:
            last += 1
            so_far += places[last + 1]
        if so_far - num <= max(num, _FEW) or shift == 0:
            break
        least = least + (last << shift)
        most = min(most, least + (np.int64(1) << shift) - 1)
    end = least + ((last + 1) << shift)

    # By buckets over all that are left, and then each bucket by itself.
    least, num_left = ranks[0], 0
    for row in range(num_idle):
        if ranks[row] < end:
            blocks[num_left], ranks[num_left] = blocks[row], ranks[row]
            least = min(least, ranks[row])
            num_left += 1
    shift = np.int64(0)
    while (end - 1 - least) >> shift >= _NUM_BUCKETS:
        shift += 1
    places[:] = 0
    for row in range(num_left):
        places[((ranks[row] - least) >> shift) + 1] += 1
    for bucket in range(_NUM_BUCKETS):
        places[bucket + 1] += places[bucket]
    sorted_blocks = np.empty(num_left, np.int32)
    sorted_ranks = np.empty(num_left, np.int64)
    for row in range(num_left):
        bucket = (ranks[row] - least) >> shift
        sorted_blocks[places[bucket]] = blocks[row]
        sorted_ranks[places[bucket]] = ranks[row]
        places[bucket] += 1
    start: Any = np.int64(0)
    for bucket in range(_NUM_BUCKETS):
        stop = places[bucket]
        if stop - start > _FEW:
            order = start + np.argsort(sorted_ranks[start:stop], kind="mergesort")
            sorted_blocks[start:stop] = sorted_blocks[order]
        else:
            _sort_few(sorted_ranks, sorted_blocks, start, stop)
        start = stop
    return sorted_blocks


@inlined
def _sort_few(ranks: Any, blocks: Any, start: int, stop: int) -> None:
    """Sort a part of two arrays by the first, and leave equal ones in their order."""
    for row in range(start + 1, stop):
        rank, block, at = ranks[row], blocks[row], row
        while at > start and ranks[at - 1] > rank:
            ranks[at], blocks[at] = ranks[at - 1], blocks[at - 1]
            at -= 1
        ranks[at], blocks[at] = rank, block


NATIVE = NativePolicy(find, touch, insert, remove, evict, begin=begin, finish=finish)
