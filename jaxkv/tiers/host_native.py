"""In-place forms of the host tier's transitions; see `jaxkv.tiers.host_state`.

Every function takes a `Bound` of a `HostState`, and keys as u32[K, 8]. Its result is
bit-identical to the result of the pure function of the same name. On bad input a
function changes nothing. Output arrays come last; block ids are i64[K] unless noted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.compiling import (
    compiled,
    copy_items,
    copy_row,
    empty,
    filled,
    functions_of,
    greater,
    inlined,
    lesser,
    same_row,
)
from jaxkv.policies import directory as directory_lib
from jaxkv.tiers import device_native
from jaxkv.types import NO_BLOCK, NOT_READY, NULL_BLOCK

_PROTECTION = 1 << 30
"""A bit of `ref_cnt`, set for blocks that hold keys of the batch, to not evict them."""


@compiled
def find(state: Any, keys: Any, block_ids: Any) -> None:
    """Write the block of each key (i32[K]), NO_BLOCK if it has none."""
    entries = empty(keys.shape[0], np.int32)
    policy = state.policy
    functions_of(policy).find(policy, keys, entries, block_ids)


@compiled
def find_readable(state: Any, keys: Any, block_ids: Any) -> None:
    """Like `find`, with NO_BLOCK for blocks whose store is in flight."""
    entries = empty(keys.shape[0], np.int32)
    functions_of(state.policy).find(state.policy, keys, entries, block_ids)
    for row in range(keys.shape[0]):
        if not _is_readable(state, block_ids[row]):
            block_ids[row] = NO_BLOCK


@compiled
def lookup(state: Any, keys: Any) -> Any:
    """Return how many leading keys have readable blocks."""
    num_keys = keys.shape[0]
    entries, block_ids = _two_rows(num_keys)
    start, width = 0, 8
    # Look up growing parts: no key after the first miss needs a look-up.
    while start < num_keys:
        stop = lesser(start + width, num_keys)
        functions_of(state.policy).find(
            state.policy, keys[start:stop], entries[start:stop], block_ids[start:stop]
        )
        for row in range(start, stop):
            if not _is_readable(state, block_ids[row]):
                return row
        start, width = stop, 4 * width
    return num_keys


@compiled
def touch(state: Any, keys: Any, counts_as_use: Any) -> None:
    """Record a use of each key; without `counts_as_use`, only reorder the keys."""
    entries, block_ids = _two_rows(keys.shape[0])
    functions_of(state.policy).find(state.policy, keys, entries, block_ids)
    is_use = filled(keys.shape[0], False, np.bool_)
    if counts_as_use:
        _mark_readable(state, block_ids, is_use)
    functions_of(state.policy).touch(state.policy, entries, is_use)


@compiled
def note(state: Any, keys: Any, kind: int, positions: Any, facts: Any) -> Any:
    """Pass an event of a request to the policy; see `NativePolicy.note`."""
    policy = state.policy
    return functions_of(policy).note(policy, kind, keys, positions, facts)


@compiled
def prepare_load(state: Any, keys: Any, block_ids: Any) -> Any:
    """Pin each key's block, and write it; NO_BLOCK if the key is absent.

    Return the first row whose block is not readable, -1 if all were pinned.
    """
    _find_wide(state, keys, block_ids)
    for row in range(keys.shape[0]):
        if not _is_readable(state, block_ids[row]):
            return row
    for block in block_ids:
        state.ref_cnt[block] += 1
    return -1


@compiled
def complete_load(state: Any, keys: Any, block_ids: Any) -> Any:
    """Unpin each key's block, and write it; NO_BLOCK if the key is absent.

    Return the first row whose block has fewer pins than the batch releases, -1 if all
    were unpinned.
    """
    _find_wide(state, keys, block_ids)
    return _lower(state.ref_cnt, block_ids)


@compiled
def pin(ref_cnt: Any, block_ids: Any) -> Any:
    """Pin blocks if all are readable; return whether they are."""
    if find_outside(block_ids, 0, ref_cnt.shape[0]) >= 0:
        return False
    for block in block_ids:
        if ref_cnt[block] < 0:
            return False
    for block in block_ids:
        ref_cnt[block] += 1
    return True


@compiled
def find_outside(numbers: Any, start: int, end: int) -> Any:
    """Return the first row of i64[K] that is not in [start, end), -1 for none."""
    for row in range(numbers.shape[0]):
        if not start <= numbers[row] < end:
            return row
    return -1


@compiled
def complete_step(ref_cnt: Any, block_ids: Any, num_hits: int, min_id: int) -> Any:
    """Complete loads of the first `num_hits` blocks and stores of the others.

    NO_BLOCK is skipped. The smallest valid id is `min_id`: 0, or NO_BLOCK. Return False
    and change nothing if an id is out of range, or if one of the loads or stores is not
    in progress.
    """
    if not 0 <= num_hits <= block_ids.shape[0]:
        return False
    if find_outside(block_ids, min_id, ref_cnt.shape[0]) >= 0:
        return False
    if _lower(ref_cnt, block_ids[:num_hits]) >= 0:
        return False
    for row in range(num_hits, block_ids.shape[0]):
        block = block_ids[row]
        if block == NO_BLOCK:
            continue
        if ref_cnt[block] != NOT_READY:
            for completed in block_ids[num_hits:row]:
                if completed != NO_BLOCK:
                    ref_cnt[completed] = NOT_READY
            for hit in block_ids[:num_hits]:
                if hit != NO_BLOCK:
                    ref_cnt[hit] += 1
            return False
        ref_cnt[block] = 0
    return True


@compiled
def prepare_store(
    state: Any,
    keys: Any,
    may_decline: Any,
    block_ids: Any,
    evicted_keys: Any,
) -> Any:
    """Allocate a block for every absent key; evict others if none is free.

    Write each key's new block, NO_BLOCK if the key is present or repeats an earlier
    one, and the evicted keys (u32[K, 8]) in the order of eviction. Return the number of
    keys to store, of evicted keys, -1 if there was no room, and of declined keys.
    """
    entries, present = _two_rows(keys.shape[0])
    functions_of(state.policy).find(state.policy, keys, entries, present)
    return _store(state, keys, present, 0, may_decline, block_ids, evicted_keys)


@compiled
def place_from(
    device: Any,
    state: Any,
    keys: Any,
    sources: Any,
    is_head: Any,
    block_ids: Any,
    evicted_keys: Any,
) -> Any:
    """Run `prepare_store`, and pin the device blocks of the keys to store.

    `sources` (i64[K]) has each key's device block. If one does not have its key, change
    nothing and return 0, -1, 0. If the keys begin a prefix (`is_head`), reorder them.
    """
    for row in range(keys.shape[0]):
        block = sources[row]
        if not (
            NULL_BLOCK < block < device.ref_cnt.shape[0]
            and device.has_key[block]
            and same_row(device.directory.keys, block, keys, row)
        ):
            return 0, -1, 0
    num_stored, num_evicted, num_declined = prepare_store(
        state, keys, True, block_ids, evicted_keys
    )
    if num_evicted < 0:
        return 0, -1, 0
    for row in range(keys.shape[0]):
        if block_ids[row] != NO_BLOCK:
            device_native.add_pins(device, sources[row], 1)
    if is_head:
        touch(state, keys, False)
    return num_stored, num_evicted, num_declined


@compiled
def next_victims(
    device: Any,
    state: Any,
    num: int,
    block_ids: Any,
    copies: Any,
    rows: Any,
    keys: Any,
    same_keys: Any,
) -> Any:
    """Write the device's next victims as `device_native.next_victims` does.

    In addition, look up the victims whose copy the device does not know. If the host
    has a copy, record it on the device, and drop the victim from `rows` and `keys`.
    `same_keys` is `keys`, read-only.
    """
    num_victims, num_unknown = device_native.next_victims(
        device, num, block_ids, copies, rows, keys
    )
    entries, held = _two_rows(num_unknown)
    unknown = same_keys[:num_unknown]
    functions_of(state.policy).find(state.policy, unknown, entries, held)
    num_uncopied = 0
    for row in range(num_unknown):
        victim = rows[row]
        if held[row] == NO_BLOCK:
            rows[num_uncopied] = victim
            copy_row(keys, num_uncopied, keys, row)
            num_uncopied += 1
        else:
            copies[victim] = held[row]
            device.copies[block_ids[victim]] = held[row]
    return num_victims, num_uncopied


@compiled
def complete_store(state: Any, keys: Any, success: Any, ended: Any) -> Any:
    """Complete stores in flight; write which rows ended (bool[K]); return their number.

    Unless `success`, free their blocks. Keys that are absent or ready are skipped.
    """
    entries, block_ids = _two_rows(keys.shape[0])
    functions_of(state.policy).find(state.policy, keys, entries, block_ids)
    num_ended = 0
    for row in range(keys.shape[0]):
        block = block_ids[row]
        ended[row] = block != NO_BLOCK and state.ref_cnt[block] == NOT_READY
        if ended[row]:
            state.ref_cnt[block] = 0
            num_ended += 1
    if not success:
        _forget(state, entries, block_ids, ended)
    return num_ended


@compiled
def discard(state: Any, keys: Any, is_idle: Any) -> None:
    """Free the blocks that no load or store uses; write which rows (bool[K])."""
    entries, block_ids = _two_rows(keys.shape[0])
    functions_of(state.policy).find(state.policy, keys, entries, block_ids)
    for row in range(keys.shape[0]):
        block = block_ids[row]
        is_idle[row] = block != NO_BLOCK and state.ref_cnt[block] == 0
        if is_idle[row]:
            state.ref_cnt[block] = NOT_READY  # So that a repeated key is skipped.
    for row in range(keys.shape[0]):
        if is_idle[row]:
            state.ref_cnt[block_ids[row]] = 0
    _forget(state, entries, block_ids, is_idle)


@compiled
def request_step(state: Any, keys: Any, block_ids: Any, evicted_keys: Any) -> Any:
    """Serve a request: pin the hits, its readable prefix; allocate for other keys.

    Write the blocks of the hits, and then what `prepare_store` writes. Return the
    number of hits, of keys to store, of evicted keys, -1 if there was no room, and of
    declined keys.
    """
    num_keys = keys.shape[0]
    entries, present = _two_rows(num_keys)
    functions_of(state.policy).find(state.policy, keys, entries, present)
    is_ready = empty(num_keys, np.bool_)
    _mark_readable(state, present, is_ready)
    num_hits = 0
    while num_hits < num_keys and is_ready[num_hits]:
        num_hits += 1
    functions_of(state.policy).touch(state.policy, entries, is_ready)
    num_stored, num_evicted, num_declined = _store(
        state, keys, present, num_hits, True, block_ids, evicted_keys
    )
    copy_items(block_ids, 0, present, num_hits)
    return num_hits, num_stored, num_evicted, num_declined


@inlined
def _two_rows(num_keys: int) -> Any:
    """Return empty arrays for the entries and the blocks of keys: i32[K] each."""
    return empty(num_keys, np.int32), empty(num_keys, np.int32)


@inlined
def _find_wide(state: Any, keys: Any, block_ids: Any) -> None:
    """Write the block of each key to i64[K]."""
    entries, narrow_ids = _two_rows(keys.shape[0])
    functions_of(state.policy).find(state.policy, keys, entries, narrow_ids)
    copy_items(block_ids, 0, narrow_ids, narrow_ids.shape[0])


@inlined
def _is_readable(state: Any, block: int) -> Any:
    return block != NO_BLOCK and state.ref_cnt[block] >= 0


@compiled
def _mark_readable(state: Any, block_ids: Any, flags: Any) -> None:
    for row in range(block_ids.shape[0]):
        flags[row] = _is_readable(state, block_ids[row])


@compiled
def _lower(ref_cnt: Any, block_ids: Any) -> Any:
    """Unpin blocks, or change nothing and return the first row with too few pins."""
    for row in range(block_ids.shape[0]):
        block = block_ids[row]
        if block != NO_BLOCK:
            ref_cnt[block] -= 1
    bad = -1
    for row in range(block_ids.shape[0] - 1, -1, -1):
        block = block_ids[row]
        if block == NO_BLOCK or ref_cnt[block] < 0:
            bad = row
    if bad >= 0:
        for block in block_ids:
            if block != NO_BLOCK:
                ref_cnt[block] += 1
    return bad


@compiled
def _store(
    state: Any,
    keys: Any,
    present: Any,
    num_hits: Any,
    may_decline: Any,
    block_ids: Any,
    evicted_keys: Any,
) -> Any:
    """Allocate blocks for keys without one in `present` (i32[K]); pin the hits."""
    num_keys = keys.shape[0]
    ref_cnt, pool = state.ref_cnt, state.pool
    is_missing = empty(num_keys, np.bool_)
    for row in range(num_keys):
        is_missing[row] = present[row] == NO_BLOCK
    num_missing = directory_lib.mark_first(keys, is_missing)
    num_blocks = ref_cnt.shape[0]
    num_free = pool.num_freed[()] + num_blocks - pool.num_allocated[()]
    for row in range(num_hits):
        ref_cnt[present[row]] += 1
    num_declined = 0
    num_evicted = greater(num_missing - num_free, 0)
    victims = empty(num_evicted, np.int32)
    if num_evicted:
        # Protect the blocks of this batch's keys. A block in flight stays at -1.
        for block in present:
            if block != NO_BLOCK:
                ref_cnt[block] |= _PROTECTION
        if may_decline:
            num_admitted = functions_of(state.policy).admit(
                state.policy, keys, is_missing, num_free, ref_cnt
            )
            num_declined = num_missing - num_admitted
            num_missing = num_admitted
            num_evicted = greater(num_missing - num_free, 0)
        has_evicted = functions_of(state.policy).evict(
            state.policy, num_evicted, ref_cnt, victims, evicted_keys
        )
        for block in present:
            if block != NO_BLOCK and ref_cnt[block] >= 0:
                ref_cnt[block] &= ~_PROTECTION
        if not has_evicted:
            for row in range(num_keys):
                block_ids[row] = NO_BLOCK
            return 0, -1, 0

    # Allocate never-used blocks first, then victims, then freed blocks.
    num_fresh = lesser(num_missing, num_blocks - pool.num_allocated[()])
    fresh, height = pool.num_allocated[()], pool.num_freed[()]
    rank = 0
    for row in range(num_keys):
        block_ids[row] = NO_BLOCK
        if not is_missing[row]:
            continue
        depth = rank - num_fresh
        if depth < 0:
            block_ids[row] = fresh + rank
        elif depth < num_evicted:
            block_ids[row] = victims[num_evicted - 1 - depth]
        else:
            block_ids[row] = pool.freed[height + num_evicted - 1 - depth]
        rank += 1
    pool.num_allocated[()] = fresh + num_fresh
    pool.num_freed[()] = height + num_evicted - (num_missing - num_fresh)
    allocated = empty(num_keys, np.int64)
    copy_items(allocated, 0, block_ids, num_keys)
    functions_of(state.policy).insert(state.policy, keys, block_ids)
    num_stored = 0
    for row in range(num_keys):
        if block_ids[row] != NO_BLOCK:
            ref_cnt[block_ids[row]] = NOT_READY
            num_stored += 1
        elif allocated[row] != NO_BLOCK:
            _free(pool, allocated[row])
    return num_stored, num_evicted, num_declined


@compiled
def _forget(state: Any, entries: Any, block_ids: Any, flags: Any) -> None:
    """Remove the flagged keys (bool[K]) and free their blocks."""
    for row in range(entries.shape[0]):
        if flags[row]:
            _free(state.pool, block_ids[row])
        else:
            entries[row] = directory_lib.NO_ENTRY
    functions_of(state.policy).remove_blocks(state.policy, entries, block_ids)


@inlined
def _free(pool: Any, block: int) -> None:
    pool.freed[pool.num_freed[()]] = block
    pool.num_freed[()] += 1
