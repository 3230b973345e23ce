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
call the rest. If the inner policy may refuse an eviction although enough blocks are
idle (`always_evicts` is false, as for vLLM's ARC), one call must evict all victims, as
an eviction cannot be undone. If it refuses, it is called again without priorities.

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
from jax import Array, lax

from jaxkv._util import check_type, kept
from jaxkv.compiling import compiled, empty, filled, functions_of, inlined, lesser
from jaxkv.policies import clock
from jaxkv.policies.base import EvictResult, InsertResult, Policy
from jaxkv.policies.clock import later
from jaxkv.policies.facts import (
    HALF_LIFE_MS,
    MARK,
    NOW_MS,
    PRIORITY,
    RETAIN,
    TTL_MS,
)
from jaxkv.policies.native import NativePolicy, register_native
from jaxkv.policies.xla import after, full
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

_PRIORITY_BITS = MAX_PRIORITY.bit_length()


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


def find(inner: Policy, state: RetainedState, keys: Array, count: Array) -> Array:
    """Find the block of each key; see `Policy.find`."""
    return inner.find(state.inner, keys, count)


@compiled
def native_find(state: Any, keys: Any, entries: Any, block_ids: Any) -> None:
    """In-place form of `find`."""
    functions_of(state.inner).find(state.inner, keys, entries, block_ids)


def touch(
    inner: Policy, state: RetainedState, keys: Array, count: Array, ready: Array
) -> RetainedState:
    """Record a use of each key; see `Policy.touch`."""
    touched = inner.touch(state.inner, keys, count, ready)
    return dataclasses.replace(state, inner=touched)


@compiled
def native_touch(state: Any, variant: int, entries: Any, is_use: Any) -> None:
    """In-place form of `touch`."""
    functions_of(state.inner).touch(state.inner, variant >> 1, entries, is_use)


def insert(
    inner: Policy, state: RetainedState, keys: Array, block_ids: Array
) -> InsertResult:
    """Add new keys, with priority 0; see `Policy.insert`."""
    result = inner.insert(state.inner, keys, block_ids)
    blocks = jnp.where(result.inserted, block_ids, state.priorities.shape[0])
    priorities = state.priorities.at[blocks].set(ORDINARY, mode="drop")
    state = dataclasses.replace(state, inner=result.state, priorities=priorities)
    return InsertResult(state, result.inserted)


@compiled
def native_insert(state: Any, variant: int, keys: Any, block_ids: Any) -> None:
    """In-place form of `insert`."""
    functions_of(state.inner).insert(state.inner, variant >> 1, keys, block_ids)
    for block in block_ids:
        if block != NO_BLOCK:
            state.priorities[block] = ORDINARY


def remove(
    inner: Policy, state: RetainedState, keys: Array, block_ids: Array
) -> RetainedState:
    """Forget keys; see `Policy.remove`."""
    removed = inner.remove(state.inner, keys, block_ids)
    return _drop(dataclasses.replace(state, inner=removed), block_ids)


@compiled
def native_remove(state: Any, entries: Any, block_ids: Any) -> None:
    """In-place form of `remove`."""
    functions_of(state.inner).remove_blocks(state.inner, entries, block_ids)
    for row in range(entries.shape[0]):
        if entries[row] >= 0:
            _set_priority(state, block_ids[row], NOT_HELD)


def note(
    inner: Policy,
    state: RetainedState,
    kind: int,
    keys: Array,
    count: Array,
    positions: Array,
    facts: Array,
) -> tuple[RetainedState, Array]:
    """Set priorities, or pass the event to the inner policy; see `Policy.note`."""
    state = _set_time(state, facts[NOW_MS])
    if kind == RETAIN:
        return _retain(inner, state, keys, count, facts), facts[MARK]
    if inner.note is None:
        return state, facts[MARK]
    after_note, mark = inner.note(state.inner, kind, keys, count, positions, facts)
    return dataclasses.replace(state, inner=after_note), mark


@compiled
def native_note(state: Any, kind: int, keys: Any, positions: Any, facts: Any) -> Any:
    """In-place form of `note`."""
    inner, mark = state.inner, np.int64(facts[MARK])
    clock.set_time(state, facts[NOW_MS])
    if kind == RETAIN:
        _native_retain(state, keys, facts)
    else:
        mark = np.int64(functions_of(inner).note(inner, kind, keys, positions, facts))
    return mark


def _retain(
    inner: Policy, state: RetainedState, keys: Array, count: Array, facts: Array
) -> RetainedState:
    """Set the priority of the keys' blocks: 0 to 99, or `RELEASE`."""
    num_blocks = state.priorities.shape[0]
    blocks = inner.find(state.inner, keys, count)
    blocks = jnp.where(blocks == NO_BLOCK, num_blocks, blocks)
    old = state.priorities.at[blocks].get(mode="fill", fill_value=ORDINARY)
    old_terms = state.terms.at[blocks].get(mode="fill", fill_value=0)
    terms = jnp.stack([facts[NOW_MS], facts[HALF_LIFE_MS], facts[TTL_MS]])
    terms, priority = terms.astype(jnp.uint32), facts[PRIORITY]
    current = _decayed(priority, terms, state.now_ms)
    is_higher = (current > 0) & (current >= _decayed(old, old_terms, state.now_ms))
    is_set = is_higher | (priority < 0)
    blocks = after(jnp.where(is_set, blocks, num_blocks), old, old_terms)
    with_terms = jnp.where(is_higher, blocks, num_blocks)
    new = jnp.maximum(priority, ORDINARY)
    priorities = state.priorities.at[blocks].set(new, mode="drop")
    return dataclasses.replace(
        state,
        priorities=priorities,
        terms=state.terms.at[with_terms].set(terms, mode="drop"),
        counts=_counts(priorities),
    )


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


def evict(
    inner: Policy, state: RetainedState, num: Array, ref_cnt: Array, width: int
) -> EvictResult:
    """Evict the idle blocks of the lowest priorities; see `Policy.evict`."""
    priorities_now = _decayed(state.priorities, state.terms, state.now_ms)
    is_idle = (priorities_now >= 0) & (ref_cnt == 0)
    is_enough = jnp.sum(is_idle, dtype=jnp.int32) >= num

    # Find the highest priority among the victims by bisection.
    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) // 2
        reaches = jnp.sum(is_idle & (priorities_now <= middle), dtype=jnp.int32) >= num
        low = jnp.where(reaches, low, middle + 1)
        return low, jnp.where(reaches, middle, high)

    ends = jnp.int32(ORDINARY), jnp.int32(MAX_PRIORITY)
    _, limit = lax.fori_loop(0, _PRIORITY_BITS, halve, ends)
    num_below = jnp.sum(is_idle & (priorities_now < limit), dtype=jnp.int32)
    if inner.always_evicts:
        limits = limit - 1, limit
    else:
        num_below, limits = num, (limit, jnp.int32(MAX_PRIORITY))
    rows = jnp.arange(width, dtype=jnp.int32)

    # A loop of two rounds, so that the inner policy is compiled once.
    def evict_part(
        step: Array, carry: tuple[PyTree, Array, Array, Array]
    ) -> tuple[PyTree, Array, Array, Array]:
        inner_state, block_ids, keys, num_left = carry
        wanted = jnp.where(step == 0, jnp.minimum(num_below, num_left), num_left)
        is_above = (ref_cnt == 0) & (priorities_now > jnp.where(step == 0, *limits))
        shielded = jnp.where(is_above, SHIELD, ref_cnt)
        result = inner.evict(inner_state, wanted, shielded, width)
        num_evicted = jnp.where(result.ok, wanted, 0)
        at = jnp.where(rows < num_evicted, rows + num - num_left, width)
        return (
            result.state,
            block_ids.at[at].set(result.block_ids, mode="drop"),
            keys.at[at].set(result.keys, mode="drop"),
            num_left - num_evicted,
        )

    no_blocks = jnp.full((width,), NO_BLOCK, jnp.int32)
    no_keys = jnp.zeros((width, 8), jnp.uint32)
    start = state.inner, no_blocks, no_keys, jnp.where(is_enough, num, 0)
    inner_state, block_ids, keys, num_left = lax.fori_loop(0, 2, evict_part, start)
    ok = is_enough & (num_left == 0)
    # Drop priorities that have ended, so that later evictions need not decay them.
    has_ended = (state.priorities > 0) & (priorities_now == ORDINARY) & ok & (num > 0)
    priorities = jnp.where(has_ended, ORDINARY, state.priorities)
    state = dataclasses.replace(state, inner=inner_state, priorities=priorities)
    return EvictResult(_drop(state, block_ids), block_ids, keys, ok)


@compiled
def native_evict(
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
) -> Any:
    """In-place form of `evict`."""
    inner = state.inner
    inner_variant = variant >> 1
    num_retained = 0
    for count in state.counts:
        num_retained += count
    if num == 0 or num_retained == 0:
        is_done = functions_of(inner).evict(
            inner, inner_variant, num, ref_cnt, block_ids, keys
        )
    else:
        _shield(state, ref_cnt, ORDINARY)
        is_done = functions_of(inner).evict(
            inner, inner_variant, num, ref_cnt, block_ids, keys
        )
        _unshield(state, ref_cnt)
        if not is_done:
            is_done = _evict_retained(state, variant, num, ref_cnt, block_ids, keys)
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
    state: Any, variant: int, num: int, ref_cnt: Any, block_ids: Any, keys: Any
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
    inner_variant = variant >> 1
    if variant & 1:
        _shield(state, ref_cnt, limit - 1)
        is_done = functions_of(inner).evict(
            inner, inner_variant, num_below, ref_cnt, block_ids, keys
        )
        _unshield(state, ref_cnt)
        if is_done:
            _shield(state, ref_cnt, limit)
            is_done = functions_of(inner).evict(
                inner,
                inner_variant,
                num - num_below,
                ref_cnt,
                block_ids[num_below:],
                keys[num_below:],
            )
            _unshield(state, ref_cnt)
        return is_done
    # One call for all, as the inner policy may refuse a second one.
    _shield(state, ref_cnt, limit)
    is_done = functions_of(inner).evict(
        inner, inner_variant, num, ref_cnt, block_ids, keys
    )
    _unshield(state, ref_cnt)
    if not is_done:
        is_done = functions_of(inner).evict(
            inner, inner_variant, num, ref_cnt, block_ids, keys
        )
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


def snapshot(inner: Policy, state: RetainedState) -> dict[str, Any]:
    """Describe a state. For the host, not for jit.

    Returns:
        The inner policy's snapshot, and "num_retained", the blocks whose priority is
        above 0 now.
    """
    terms = jnp.asarray(state.terms), jnp.asarray(state.now_ms)
    priorities_now = _decayed(jnp.asarray(state.priorities), *terms)
    num_retained = int((priorities_now > 0).sum())
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
        ValueError: If `inner` retains blocks already.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxkv.policies import make_lru
        >>> from jaxkv.policies.facts import RETAIN, retained
        >>> lru = make_retained(make_lru(num_blocks=4))
        >>> keys = jnp.arange(16, dtype=jnp.uint32).reshape(2, 8)
        >>> state, _ = lru.insert(lru.init(), keys, jnp.array([3, 1]))
        >>> facts = jnp.array(retained(0, 80, half_life_ms=60_000, ttl_ms=0))
        >>> state, _ = lru.note(state, RETAIN, keys, jnp.int32(1), facts[:2], facts)
        >>> evicted = lru.evict(state, jnp.int32(1), jnp.zeros(4, jnp.int32), 2)
        >>> evicted.block_ids.tolist()  # 3 is older, but retained
        [1, -1]
    """
    check_type(Policy, "a Policy", inner=inner)
    if inner.retains:
        raise ValueError("the policy retains blocks already; wrap it once.")
    native = None
    if inner.native is not None:
        variant = inner.native.variant << 1 | inner.always_evicts
        native = NATIVE._replace(variant=variant)
    functions: dict[str, Any] = {
        function.__name__: functools.partial(function, inner)
        for function in (
            init,
            find,
            touch,
            insert,
            remove,
            evict,
            snapshot,
            note,
        )
    }
    return Policy(
        num_blocks=inner.num_blocks,
        max_batch=inner.max_batch,
        native=native,
        always_evicts=inner.always_evicts,
        retains=True,
        **functions,
    )


def _decayed(priorities: Array, terms: Array, now_ms: Array) -> Array:
    """Return priorities at `now_ms` under `terms` (u32[..., 3]): i32[...]."""
    age_ms = now_ms - terms[..., START]
    half_life_ms, ttl_ms = terms[..., HALF_LIFE], terms[..., TIME_TO_LIVE]
    halvings = jnp.minimum(age_ms // jnp.maximum(half_life_ms, 1), MAX_HALVINGS)
    halvings = jnp.where(half_life_ms > 0, halvings, 0).astype(jnp.int32)
    has_ended = (ttl_ms > 0) & (age_ms >= ttl_ms)
    current = jnp.where(has_ended, ORDINARY, priorities >> halvings)
    return jnp.where(priorities > 0, current, priorities)


def _set_time(state: RetainedState, now_ms: Array) -> RetainedState:
    return dataclasses.replace(
        state,
        now_ms=later(state.now_ms, state.has_time, now_ms),
        has_time=jnp.ones_like(state.has_time),
    )


def _drop(state: RetainedState, block_ids: Array) -> RetainedState:
    """Record that blocks (i32[K]; NO_BLOCK is skipped) hold no key any more."""
    blocks = jnp.where(block_ids == NO_BLOCK, state.priorities.shape[0], block_ids)
    priorities = state.priorities.at[blocks].set(NOT_HELD, mode="drop")
    return dataclasses.replace(state, priorities=priorities, counts=_counts(priorities))


def _counts(priorities: Array) -> Array:
    """Count the retained blocks of each chunk: i32[B / 64]."""
    is_retained = jnp.pad(priorities > 0, (0, -priorities.size % CHUNK))
    return jnp.sum(is_retained.reshape(-1, CHUNK), axis=1, dtype=jnp.int32)


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
