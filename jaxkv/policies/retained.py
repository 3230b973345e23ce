"""Retention by priority: keeps some blocks longer than others, under any policy.

A block may get a priority from 1 to 99, with a half-life, a time to live, or both; all
other blocks have priority 0. Blocks of lower priority are evicted first. A priority
halves after each half-life, rounded down, and is 0 after the time to live. Nothing is
pinned: if too few blocks of priority 0 are idle, retained blocks are evicted too, the
lowest priority first.

This policy wraps another one, the inner policy, which chooses among blocks of one
priority. The inner policy sees no priorities: blocks to be kept are hidden from it by a
high reference count. Usually one call of it suffices. If victims have several
priorities, a first call evicts all idle blocks below the highest of these, and a second
call the rest.

If a block gets a second priority, the higher of the two at that time is kept, or the
second if they are equal. The last `note` sets the time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv._util import check_type, kept
from jaxkv.compiling import (
    Bound,
    compiled,
    copy_to_numpy,
    empty,
    filled,
    functions_of,
    inlined,
    lesser,
)
from jaxkv.policies import clock
from jaxkv.policies.base import Policy
from jaxkv.policies.facts import HALF_LIFE_MS, MARK, NOW_MS, PRIORITY, RETAIN, TTL_MS
from jaxkv.policies.native import NativePolicy, register_native
from jaxkv.policies.xla import full
from jaxkv.types import NO_BLOCK, PyTree

MAX_PRIORITY = 99
MAX_HALVINGS = 7
"""Any priority is 0 after this many half-lives."""

ORDINARY = 0
NOT_HELD = -1
RELEASE = -1
"""As a priority, it ends the retention of blocks."""

CHUNK = 64
"""Blocks per item of `RetainedState.counts`, so that scans skip chunks at 0."""

START, HALF_LIFE, TIME_TO_LIVE = 0, 1, 2
NUM_TERMS = 3
"""The terms of a priority: its start, half-life and time to live, in milliseconds; 0
for no half-life or no time to live."""

SHIELD = 1 << 29
"""The reference count that hides a block from the inner policy's eviction."""

_NUM_PRIORITIES = MAX_PRIORITY + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RetainedState:
    """The inner policy's state, and the priorities of blocks."""

    inner: PyTree  # The inner policy's state.
    priorities: Array
    """i32[B]. The block's priority at its start; -1 where the block holds no key."""
    terms: Array
    """u32[B, 3]. Start, half-life and time to live, in milliseconds; stale where the
    priority is not above 0."""
    counts: Array  # i32[B / 64]. Blocks per chunk with a priority above 0.
    now_ms: Array  # u32[]. The time of the last `note`.
    has_time: Array  # bool[]. Whether `note` has set the time.


def init(inner: Policy) -> RetainedState:
    """Make an empty cache of as many blocks as `inner` has."""
    num_blocks = inner.num_blocks
    return RetainedState(
        inner=inner.init(),
        priorities=full((num_blocks,), NOT_HELD, jnp.int32),
        terms=full((num_blocks, NUM_TERMS), 0, jnp.uint32),
        counts=full((-(-num_blocks // CHUNK),), 0, jnp.int32),
        now_ms=full((), 0, jnp.uint32),
        has_time=full((), False, jnp.bool_),
    )


@compiled
def native_find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """Find the block of each key."""
    functions_of(state.inner).find(state.inner, keys, entries, block_ids)


@compiled
def native_touch(state: Any, entries: Any, is_use: Any) -> None:
    """Record a use of each entry."""
    functions_of(state.inner).touch(state.inner, entries, is_use)


@compiled
def native_insert(state: Any, keys: Any, block_ids: Any) -> None:
    """Add new keys, with priority 0."""
    functions_of(state.inner).insert(state.inner, keys, block_ids)
    for block in block_ids:
        if block != NO_BLOCK:
            state.priorities[block] = ORDINARY


@compiled
def native_remove(state: Any, entries: Any, block_ids: Any) -> None:
    """Forget keys."""
    functions_of(state.inner).remove_blocks(state.inner, entries, block_ids)
    for row in range(entries.shape[0]):
        if entries[row] >= 0:
            _set_priority(state, block_ids[row], NOT_HELD)


@compiled
def native_note(state: Any, kind: int, keys: Any, positions: Any, facts: Any) -> Any:
    """Set priorities, or pass the event to the inner policy."""
    inner, mark = state.inner, np.int64(facts[MARK])
    clock.set_time(state, facts[NOW_MS])
    if kind == RETAIN:
        _native_retain(state, keys, facts)
    else:
        mark = np.int64(functions_of(inner).note(inner, kind, keys, positions, facts))
    return mark


@compiled
def _native_retain(state: Any, keys: Any, facts: Any) -> None:
    now: Any = np.int64(state.now_ms[()])
    priority, start_ms = facts[PRIORITY], facts[NOW_MS]
    half_life_ms, ttl_ms = facts[HALF_LIFE_MS], facts[TTL_MS]
    entries = empty(keys.shape[0], np.int32)
    block_ids = empty(keys.shape[0], np.int32)
    functions_of(state.inner).find(state.inner, keys, entries, block_ids)
    current = decayed(priority, clock.age_of(now, start_ms), half_life_ms, ttl_ms)
    for block in block_ids:
        if block == NO_BLOCK:
            continue
        if priority < 0:
            _set_priority(state, block, ORDINARY)
        elif current > 0 and current >= priority_of(state, block, now):
            _set_priority(state, block, priority)
            state.terms[block, START] = start_ms & clock.TIME_MASK
            state.terms[block, HALF_LIFE] = half_life_ms
            state.terms[block, TIME_TO_LIVE] = ttl_ms


@compiled
def native_evict(state: Any, num: int, ref_cnt: Any, block_ids: Any, keys: Any) -> Any:
    """Evict the idle blocks of the lowest priorities."""
    inner = state.inner
    num_retained = 0
    for count in state.counts:
        num_retained += count
    if num == 0 or num_retained == 0:
        is_done = functions_of(inner).evict(inner, num, ref_cnt, block_ids, keys)
    else:
        _shield(state, ref_cnt, ORDINARY)
        is_done = functions_of(inner).evict(inner, num, ref_cnt, block_ids, keys)
        _unshield(state, ref_cnt)
        if not is_done:
            is_done = _evict_retained(state, num, ref_cnt, block_ids, keys)
        if is_done:
            _drop_ended(state)
    if is_done:
        for block in block_ids[:num]:
            _set_priority(state, block, NOT_HELD)
    return is_done


@inlined
def decayed(priority: int, age_ms: int, half_life_ms: int, ttl_ms: int) -> Any:
    """Return a priority after `age_ms`."""
    current = np.int64(priority)
    if current > 0:
        if ttl_ms > 0 and age_ms >= ttl_ms:
            current = np.int64(ORDINARY)
        elif half_life_ms > 0:
            current >>= lesser(age_ms // half_life_ms, MAX_HALVINGS)
    return current


@inlined
def priority_of(state: Any, block: int, now_ms: int) -> Any:
    """Return the priority of a block at a time; NOT_HELD if it holds no key."""
    priority: Any = state.priorities[block]
    half_life: Any = np.int64(state.terms[block, HALF_LIFE])
    ttl: Any = np.int64(state.terms[block, TIME_TO_LIVE])
    age = clock.age_of(now_ms, state.terms[block, START])
    return decayed(priority, age, half_life, ttl)


@inlined
def _set_priority(state: Any, block: int, priority: int) -> None:
    """Write a block's priority, and update its chunk's count."""
    state.counts[block // CHUNK] += np.int32(priority > 0) - np.int32(
        state.priorities[block] > 0
    )
    state.priorities[block] = priority


@compiled
def _shield(state: Any, ref_cnt: Any, limit: int) -> None:
    """Hide idle blocks whose priority is above `limit` from the inner policy."""
    now: Any = np.int64(state.now_ms[()])
    num_blocks = ref_cnt.shape[0]
    for chunk in range(state.counts.shape[0]):
        if state.counts[chunk] > 0:
            stop = lesser((chunk + 1) * CHUNK, num_blocks)
            for block in range(chunk * CHUNK, stop):
                is_idle = ref_cnt[block] == 0
                if is_idle and priority_of(state, block, now) > limit:
                    ref_cnt[block] = SHIELD


@compiled
def _unshield(state: Any, ref_cnt: Any) -> None:
    num_blocks = ref_cnt.shape[0]
    for chunk in range(state.counts.shape[0]):
        if state.counts[chunk] > 0:
            stop = lesser((chunk + 1) * CHUNK, num_blocks)
            for block in range(chunk * CHUNK, stop):
                if ref_cnt[block] == SHIELD:
                    ref_cnt[block] = 0


@compiled
def _evict_retained(
    state: Any, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """Evict retained blocks too, because ordinary ones are too few or were refused."""
    inner = state.inner
    now: Any = np.int64(state.now_ms[()])
    idle_counts = filled(_NUM_PRIORITIES, 0, np.int64)
    num_idle = 0
    for block in range(ref_cnt.shape[0]):
        if ref_cnt[block] == 0 and state.priorities[block] >= 0:
            idle_counts[priority_of(state, block, now)] += 1
            num_idle += 1
    if num_idle < num:
        return False
    limit: Any = np.int64(0)
    num_below: Any = np.int64(0)
    while num_below + idle_counts[limit] < num:
        num_below += idle_counts[limit]
        limit += 1
    _shield(state, ref_cnt, limit - 1)
    is_done = functions_of(inner).evict(inner, num_below, ref_cnt, block_ids, keys)
    _unshield(state, ref_cnt)
    if is_done:
        _shield(state, ref_cnt, limit)
        is_done = functions_of(inner).evict(
            inner, num - num_below, ref_cnt, block_ids[num_below:], keys[num_below:]
        )
        _unshield(state, ref_cnt)
    return is_done


@compiled
def _drop_ended(state: Any) -> None:
    """Drop the priorities that have ended."""
    now: Any = np.int64(state.now_ms[()])
    num_blocks = state.priorities.shape[0]
    for chunk in range(state.counts.shape[0]):
        if state.counts[chunk] > 0:
            stop = lesser((chunk + 1) * CHUNK, num_blocks)
            for block in range(chunk * CHUNK, stop):
                is_retained = state.priorities[block] > 0
                if is_retained and priority_of(state, block, now) == ORDINARY:
                    _set_priority(state, block, ORDINARY)


@compiled
def _priority_now(state: Any, block: int) -> Any:
    now: Any = np.int64(state.now_ms[()])
    return priority_of(state, block, now)


def snapshot(inner: Policy, state: RetainedState) -> dict[str, Any]:
    """Describe a state. For the host, not for jit.

    Returns:
        The inner policy's snapshot, and "num_retained", the blocks whose priority is
        above 0 now.
    """
    bound = Bound(copy_to_numpy(state))
    retained = np.flatnonzero(bound.state.priorities > 0).tolist()
    num_retained = sum(_priority_now(bound, block) > 0 for block in retained)
    return inner.snapshot(state.inner) | {"num_retained": num_retained}


@kept
def make_retained(inner: Policy) -> Policy:
    """Make a policy that evicts by priority, and by `inner` within a priority.

    Args:
        inner: The policy to wrap.

    Returns:
        The policy, whose `note` sets priorities of blocks. Equal arguments give the
        same object.

    Raises:
        ValueError: If `inner` retains blocks already, or has no native functions.

    Example:
        >>> from jaxkv.policies import make_lru
        >>> make_retained(make_lru(num_blocks=4)).retains
        True
    """
    check_type(Policy, "a Policy", inner=inner)
    if inner.retains:
        raise ValueError("the policy retains blocks already; wrap it once.")
    if inner.native is None:
        raise ValueError("the policy has no native functions, which retention needs.")
    return Policy(
        num_blocks=inner.num_blocks,
        max_batch=inner.max_batch,
        init=functools.partial(init, inner),
        snapshot=functools.partial(snapshot, inner),
        native=NATIVE,
        retains=True,
    )


NATIVE = NativePolicy(
    native_find,
    native_touch,
    native_insert,
    native_remove,
    native_evict,
    note=native_note,
    remove_blocks=native_remove,
)


register_native(RetainedState, NATIVE)
