"""Retention by priority, in place; `jaxkv.policies.retained` says what it is."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxkv.native import clock, policy
from jaxkv.native.compiling import compiled, inlined
from jaxkv.native.policy import NativePolicy
from jaxkv.types import NO_BLOCK

MOST_PRIORITY = 99
MOST_HALVINGS = 7
"""After these nothing is left of any priority."""

ORDINARY = 0
NOT_HELD = -1
RELEASE = -1
"""What is given as a priority to have blocks be ordinary, whatever theirs is."""

CHUNK = 64
"""Blocks that are counted together, so that few retained ones are found soon."""

GIVEN, HALF_LIFE, TIME_TO_LIVE = 0, 1, 2
NUM_TERMS = 3
"""What is known of a priority: when it was given, its half-life and its time to live,
in milliseconds; 0 for none of the latter two."""

SHIELD = 1 << 29
"""The reference count that the inner policy sees of a block that it is not to evict."""

_NUM_PRIORITIES = MOST_PRIORITY + 1


@compiled
def find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Find the block of each key; see `NativePolicy.find`."""
    policy.find(state.inner, keys, entries, block_ids)


@compiled
def touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """Record a use of each key; see `NativePolicy.touch`."""
    policy.touch(state.inner, variant >> 1, entries, is_use)


@compiled
def insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """Add new keys, which are ordinary; see `NativePolicy.insert`."""
    policy.insert(state.inner, variant >> 1, keys, block_ids)
    for block in block_ids:
        if block != NO_BLOCK:
            state.priorities[block] = ORDINARY


@compiled
def remove(state: Any, entries: Any, block_ids: Any) -> None:
    """Forget entries and their blocks; see `NativePolicy.remove_blocks`."""
    policy.remove(state.inner, entries, block_ids)
    for row in range(entries.shape[0]):
        if entries[row] >= 0:
            _put(state, block_ids[row], NOT_HELD)


@compiled
def retain(
    state: Any,
    keys: Any,
    priority: int,
    half_life_ms: int,
    ttl_ms: int,
    given_ms: int,
) -> None:
    """Give blocks a priority; see `NativePolicy.retain`."""
    clock.tell(state, given_ms)
    now: Any = np.int64(state.now_ms[()])
    entries = np.empty(keys.shape[0], np.int32)
    block_ids = np.empty(keys.shape[0], np.int32)
    policy.find(state.inner, keys, entries, block_ids)
    own = decayed(priority, clock.age_of(now, given_ms), half_life_ms, ttl_ms)
    for block in block_ids:
        if block == NO_BLOCK:
            continue
        if priority < 0:
            _put(state, block, ORDINARY)
        elif own > 0 and own >= priority_of(state, block, now):
            _put(state, block, priority)
            state.terms[block, GIVEN] = given_ms & clock.TIME_MASK
            state.terms[block, HALF_LIFE] = half_life_ms
            state.terms[block, TIME_TO_LIVE] = ttl_ms


@compiled
def begin(state: Any, keys: Any, positions: Any, now_ms: int, num_tokens: int) -> Any:
    """Note the time of a request's beginning; see `NativePolicy.begin`."""
    clock.tell(state, now_ms)
    return policy.begin(state.inner, keys, positions, now_ms, num_tokens)


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
    """Note the time of a request's end; see `NativePolicy.finish`."""
    clock.tell(state, now_ms)
    policy.finish(state.inner, keys, positions, now_ms, num_output_tokens, stop, mark)


@compiled
def evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict the blocks of the lowest priorities; see `NativePolicy.evict`."""
    own = variant >> 1
    num_retained = 0
    for count in state.counts:
        num_retained += count
    if num == 0 or num_retained == 0:
        is_done = policy.evict(state.inner, own, num, ref_cnt, block_ids, keys)
    else:
        _shield(state, ref_cnt, ORDINARY)
        is_done = policy.evict(state.inner, own, num, ref_cnt, block_ids, keys)
        _lower_shields(state, ref_cnt)
        if not is_done:
            is_done = _evict_retained(state, variant, num, ref_cnt, block_ids, keys)
        if is_done:
            _forget_past(state)
    if is_done:
        for block in block_ids[:num]:
            _put(state, block, NOT_HELD)
    return is_done


@inlined
def decayed(priority: int, age_ms: int, half_life_ms: int, ttl_ms: int) -> Any:
    """Tell what is left of a priority."""
    left = np.int64(priority)
    if left > 0:
        if ttl_ms > 0 and age_ms >= ttl_ms:
            left = np.int64(ORDINARY)
        elif half_life_ms > 0:
            left >>= min(age_ms // half_life_ms, MOST_HALVINGS)
    return left


@inlined
def priority_of(state: Any, block: int, now_ms: int) -> Any:
    """Tell the priority of a block at a time; NOT_HELD where it holds no key."""
    priority: Any = state.priorities[block]
    half_life: Any = np.int64(state.terms[block, HALF_LIFE])
    ttl: Any = np.int64(state.terms[block, TIME_TO_LIVE])
    age = clock.age_of(now_ms, state.terms[block, GIVEN])
    return decayed(priority, age, half_life, ttl)


@inlined
def _put(state: Any, block: int, priority: int) -> None:
    """Write a block's priority, and count the retained ones of its chunk."""
    state.counts[block // CHUNK] += np.int32(priority > 0) - np.int32(
        state.priorities[block] > 0
    )
    state.priorities[block] = priority


@compiled
def _shield(state: Any, ref_cnt: Any, limit: int) -> None:
    """Have idle blocks above a priority look as if they were read."""
    now: Any = np.int64(state.now_ms[()])
    num_blocks = ref_cnt.shape[0]
    for chunk in range(state.counts.shape[0]):
        if state.counts[chunk] > 0:
            stop = min((chunk + 1) * CHUNK, num_blocks)
            for block in range(chunk * CHUNK, stop):
                is_idle = ref_cnt[block] == 0
                if is_idle and priority_of(state, block, now) > limit:
                    ref_cnt[block] = SHIELD


@compiled
def _lower_shields(state: Any, ref_cnt: Any) -> None:
    num_blocks = ref_cnt.shape[0]
    for chunk in range(state.counts.shape[0]):
        if state.counts[chunk] > 0:
            stop = min((chunk + 1) * CHUNK, num_blocks)
            for block in range(chunk * CHUNK, stop):
                if ref_cnt[block] == SHIELD:
                    ref_cnt[block] = 0


@compiled
def _evict_retained(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict where the ordinary blocks are too few, or where they were refused."""
    now: Any = np.int64(state.now_ms[()])
    numbers = np.zeros(_NUM_PRIORITIES, np.int64)
    num_idle = 0
    for block in range(ref_cnt.shape[0]):
        if ref_cnt[block] == 0 and state.priorities[block] >= 0:
            numbers[priority_of(state, block, now)] += 1
            num_idle += 1
    if num_idle < num:
        return False
    limit: Any = np.int64(0)
    num_below: Any = np.int64(0)
    while num_below + numbers[limit] < num:
        num_below += numbers[limit]
        limit += 1
    own = variant >> 1
    if variant & 1:
        _shield(state, ref_cnt, limit - 1)
        is_done = policy.evict(state.inner, own, num_below, ref_cnt, block_ids, keys)
        _lower_shields(state, ref_cnt)
        if is_done:
            _shield(state, ref_cnt, limit)
            is_done = policy.evict(
                state.inner,
                own,
                num - num_below,
                ref_cnt,
                block_ids[num_below:],
                keys[num_below:],
            )
            _lower_shields(state, ref_cnt)
        return is_done
    # It may refuse, and what was evicted before could not be had back: in one call.
    _shield(state, ref_cnt, limit)
    is_done = policy.evict(state.inner, own, num, ref_cnt, block_ids, keys)
    _lower_shields(state, ref_cnt)
    if not is_done:
        is_done = policy.evict(state.inner, own, num, ref_cnt, block_ids, keys)
    return is_done


@compiled
def _forget_past(state: Any) -> None:
    """Have blocks be ordinary of whose priority nothing is left."""
    now: Any = np.int64(state.now_ms[()])
    num_blocks = state.priorities.shape[0]
    for chunk in range(state.counts.shape[0]):
        if state.counts[chunk] > 0:
            stop = min((chunk + 1) * CHUNK, num_blocks)
            for block in range(chunk * CHUNK, stop):
                is_retained = state.priorities[block] > 0
                if is_retained and priority_of(state, block, now) == ORDINARY:
                    _put(state, block, ORDINARY)


NATIVE = NativePolicy(
    find,
    touch,
    insert,
    policy.no_remove,
    evict,
    begin=begin,
    finish=finish,
    retain=retain,
    remove_blocks=remove,
)
