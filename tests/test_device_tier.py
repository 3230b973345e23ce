"""The functions of the device tier: what they leave alone, and what they cost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import device_programs as programs
from jaxkv import device_tier, prefix_cache
from jaxkv.types import NO_BLOCK
from tests.test_in_place import BATCH, NUM_BLOCKS, large_copies

WIDTH = 8
allocate = jax.jit(device_tier.allocate, static_argnums=2)
free, pin, unpin, touch, cache, evict, find, reset = map(
    jax.jit,
    (
        device_tier.free,
        device_tier.pin,
        device_tier.unpin,
        device_tier.touch,
        device_tier.cache,
        device_tier.evict,
        device_tier.find,
        device_tier.reset,
    ),
)
IDS = jax.ShapeDtypeStruct((BATCH,), np.int32)
KEYS = jax.ShapeDtypeStruct((BATCH, 8), np.uint32)
COUNT = jax.ShapeDtypeStruct((), np.int32)


def ids_of(*block_ids):
    padded = np.full(WIDTH, NO_BLOCK, np.int32)
    padded[: len(block_ids)] = block_ids
    return jnp.asarray(padded)


def keys_of(*numbers):
    keys = np.zeros((WIDTH, 8), np.uint32)
    keys[: len(numbers), 3] = numbers
    return jnp.asarray(keys)


@pytest.fixture(scope="module")
def tier():
    """Blocks 1 to 5 of 8 held, 1 to 3 cached, 5 pinned."""
    tier = device_tier.init(8, max_batch=WIDTH)
    tier, ok, given = allocate(tier, jnp.int32(5), WIDTH)
    assert ok
    assert given.block_ids.tolist() == [1, 2, 3, 4, 5, -1, -1, -1]
    tier, answer = cache(tier, given.block_ids, keys_of(7, 8, 7, 0, 0))
    assert answer.added[:5].all()
    tier, _ = evict(tier, ids_of(4, 5))
    return pin(tier, ids_of(5))


@pytest.mark.parametrize(
    ("function", "arguments", "is_refused"),
    [
        (allocate, (np.int32(3), WIDTH), lambda ok, given: not ok),
        (free, (ids_of(1, 2, 1),), lambda bad: bad.any()),
        (unpin, (ids_of(5, 4),), lambda bad: bad.any()),
        (
            cache,
            (ids_of(4, 1), keys_of(9, 9)),
            lambda answer: answer.bad.tolist() == [False, True] + [False] * 6,
        ),
        (
            cache,
            (ids_of(4, 5, 4), keys_of(9, 9, 8)),
            lambda answer: answer.bad.tolist() == [False, False, True] + [False] * 5,
        ),
        (reset, (), lambda ok: not ok),
    ],
)
def test_a_refusal_leaves_the_state_bit_for_bit(tier, function, arguments, is_refused):
    state, *answer = function(tier, *arguments)
    assert is_refused(*answer)
    chex.assert_trees_all_equal(state, tier)


def test_what_stands_for_no_block_is_ignored(tier):
    foreign = ids_of(0, NO_BLOCK, 8, 100, -5)
    for function in (touch, pin):
        chex.assert_trees_all_equal(function(tier, foreign), tier)
    for function in (free, unpin):
        state, bad = function(tier, foreign)
        chex.assert_trees_all_equal(state, tier)
        assert not bad.any()
    state, answer = cache(tier, foreign, keys_of(1, 2, 3, 4, 5))
    chex.assert_trees_all_equal(state, tier)
    assert not (answer.bad | answer.added).any()
    state, given = evict(tier, foreign)
    chex.assert_trees_all_equal(state, tier)
    assert not given.has_key.any()


def test_who_finds_no_room_in_the_directory_is_not_cached(monkeypatch):
    # A directory of one bucket: with the ninth key it is full.
    monkeypatch.setattr(prefix_cache.directory_lib, "_MAX_LOAD", 4.0)
    tier = device_tier.init(16, max_batch=16)
    tier, _, given = allocate(tier, jnp.int32(12), 16)
    keys = np.zeros((16, 8), np.uint32)
    keys[:, 0] = [*range(1, 10), 9, 1, 2, *[0] * 4]
    tier, answer = cache(tier, given.block_ids, jnp.asarray(keys))
    assert not answer.bad.any()
    # Neither the ninth key nor its duplicate; but the duplicates of the others are.
    assert answer.added.tolist() == [True] * 8 + [False] * 2 + [True] * 2 + [False] * 4
    found = find(tier, jnp.asarray(keys), jnp.int32(12))
    assert found.tolist() == [*range(1, 9), -1, -1, 1, 2, *[-1] * 4]
    device_tier.check(tier)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("ALLOCATE_WITH_KEYS", (COUNT,)),
        ("TOUCH", (IDS,)),
        ("FREE", (IDS,)),
        ("PIN", (IDS,)),
        ("UNPIN", (IDS,)),
        ("CACHE", (IDS, KEYS)),
        ("EVICT", (IDS,)),
    ],
)
def test_a_donated_state_is_updated_in_place(name, batch):
    program = getattr(programs, name)
    state = jax.eval_shape(lambda: device_tier.init(NUM_BLOCKS, 4096))
    fixed = {name: getattr(state, name) for name in programs._FIELDS}
    changing = {name: fixed.pop(name) for name in program.changes}
    width = BATCH if batch == (COUNT,) else None
    lowered = programs._compiled.lower(program, width, fixed, changing, *batch)
    # Nor do duplicates copy anything; that a compaction of the queue does is known.
    has_compactions = name == "FREE"
    assert not large_copies(lowered.compile(), compactions=not has_compactions)
