"""The promises of every policy.

These tests run for every policy of the registry, and with priorities around one that
may refuse and one that listens to requests. A policy without pure functions is tried by
its native ones, on copies of the state. For another policy, write a test file that
takes them over and names the maker:

    from tests.policies.test_contract import *  # noqa: F403

    @pytest.fixture
    def make():
        return make_mine
"""

import functools
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.compiling import Bound, copy_to_numpy
from jaxkv.keys import keys_to_words
from jaxkv.policies import get_policy_maker, make_retained, policy_names
from jaxkv.policies.base import EvictResult, InsertResult

NUM_BLOCKS = 6
WIDTH = 4
WRAPPED = ("arc", "hazard")


@functools.cache
def jitted(policy):
    """The same policy with every function compiled, once for all tests."""
    if not policy.is_pure:
        return on_copies(policy)
    evict = jax.jit(policy.evict, static_argnums=3)
    compiled = {
        name: jax.jit(getattr(policy, name))
        for name in ("find", "touch", "insert", "remove")
    }
    return policy._replace(evict=evict, **compiled)


def on_copies(policy):
    """A policy whose native functions look like pure ones."""
    native = policy.native

    def rows(state, keys, count):
        keys = np.asarray(keys)[: int(count)].copy()
        keys.flags.writeable = False
        entries, blocks = np.full((2, len(keys)), -1, np.int32)
        native.find(Bound(state), keys, entries, blocks)
        return entries, blocks

    def find(state, keys, count):
        blocks = rows(copy_to_numpy(state), keys, count)[1]
        return np.pad(blocks, (0, len(keys) - len(blocks)), constant_values=-1)

    def touch(state, keys, count, ready):
        state = copy_to_numpy(state)
        entries, _ = rows(state, keys, count)
        is_use = np.array(ready)[: len(entries)].copy()
        native.touch(Bound(state), entries, is_use)
        return state

    def insert(state, keys, block_ids):
        state, keys = copy_to_numpy(state), np.array(keys)
        keys.flags.writeable = False
        ids = np.array(block_ids, np.int64)
        native.insert(Bound(state), keys, ids)
        return InsertResult(state, ids != -1)

    def remove(state, keys, block_ids):
        state, ids = copy_to_numpy(state), np.array(block_ids, np.int32)
        entries, _ = rows(state, keys, len(ids))
        entries[ids == -1] = -1
        removed = native.remove_blocks
        if removed is None:
            native.remove(Bound(state), entries)
        else:
            removed(Bound(state), entries, ids)
        return state

    def evict(state, num, ref_cnt, width):
        state, ref_cnt = copy_to_numpy(state), np.array(ref_cnt)
        num, ids = int(num), np.full(width, -1, np.int32)
        keys = np.zeros((width, 8), np.uint32)
        ok = native.evict(Bound(state), num, ref_cnt, ids[:num], keys)
        return EvictResult(state, ids if ok else np.full_like(ids, -1), keys, ok)

    return policy._replace(
        find=find, touch=touch, insert=insert, remove=remove, evict=evict
    )


NAMES = [*policy_names(), *(f"{name}, retained" for name in WRAPPED)]
PURE = [name for name in policy_names() if get_policy_maker(name)(1, 1).is_pure]


@pytest.fixture(params=NAMES)
def make(request):
    name, _, retained = request.param.partition(", ")
    make_one = get_policy_maker(name)
    if not retained:
        return make_one
    return lambda num_blocks, max_batch: make_retained(make_one(num_blocks, max_batch))


# What costs seconds for each policy, and depends little on which it is: the one with
# the largest state is tried.
one_policy = pytest.mark.parametrize(
    "make",
    [
        name if name == "arc" else pytest.param(name, marks=pytest.mark.long)
        for name in PURE
    ],
    indirect=True,
)


@pytest.fixture
def eager(make):
    return make(NUM_BLOCKS, 64)


@pytest.fixture
def policy(eager):
    return jitted(eager)


def make_keys(*numbers):
    keys = np.zeros((WIDTH, 8), np.uint32)
    keys[: len(numbers)] = np.array(numbers, np.uint32)[:, None] + 1
    return jnp.asarray(keys), jnp.int32(len(numbers))


def block_ids(*ids):
    return jnp.array([*ids, *[-1] * (WIDTH - len(ids))], jnp.int32)


def filled(policy):
    """Six blocks with keys 10, ..., 15, in this order of use."""
    state = policy.init()
    for first in (0, 3):
        ids = range(first, first + 3)
        keys, _ = make_keys(*(10 + i for i in ids))
        state = policy.insert(state, keys, block_ids(*ids)).state
    return state


def all_ready():
    return jnp.ones(WIDTH, bool)


def free_refs():
    return jnp.zeros(NUM_BLOCKS, jnp.int32)


def test_finds_what_was_inserted(policy):
    state = filled(policy)
    assert policy.find(state, *make_keys(12, 99, 15)).tolist() == [2, -1, 5, -1]


def test_ignores_padding(policy):
    state = filled(policy)
    keys, _ = make_keys(10, 11, 12)
    assert policy.find(state, keys, jnp.int32(1)).tolist() == [0, -1, -1, -1]
    touched = policy.touch(state, keys, jnp.int32(0), all_ready())
    chex.assert_trees_all_equal(touched, state)
    inserted = policy.insert(state, make_keys(90)[0], block_ids())
    chex.assert_trees_all_equal(inserted.state, state)
    assert not inserted.inserted.any()
    removed = policy.remove(state, keys, block_ids())
    chex.assert_trees_all_equal(removed, state)


def test_removed_keys_are_absent_and_can_come_back(policy):
    keys, count = make_keys(11, 13)
    state = policy.remove(filled(policy), keys, block_ids(1, 3))
    assert policy.find(state, keys, count).tolist() == [-1] * WIDTH
    state = policy.insert(state, keys, block_ids(3, 1)).state
    assert policy.find(state, keys, count).tolist() == [3, 1, -1, -1]


def test_evicts_only_what_nobody_reads(policy):
    ref_cnt = jnp.array([1, 0, -1, 0, 2, 0], jnp.int32)
    evicted = policy.evict(filled(policy), jnp.int32(3), ref_cnt, WIDTH)
    assert evicted.ok
    assert sorted(evicted.block_ids[:3].tolist()) == [1, 3, 5]
    keys = [int(key[0]) - 1 for key in evicted.keys]
    assert keys[:3] == [10 + i for i in evicted.block_ids[:3].tolist()]
    assert policy.find(evicted.state, *make_keys(11, 13, 15)).tolist() == [-1] * WIDTH


def test_eviction_is_all_or_nothing(policy):
    state = filled(policy)
    ref_cnt = free_refs().at[:4].set(1)
    evicted = policy.evict(state, jnp.int32(3), ref_cnt, WIDTH)
    assert not evicted.ok
    assert evicted.block_ids.tolist() == [-1] * WIDTH
    chex.assert_trees_all_equal(evicted.state, state)


def test_evicting_none_changes_nothing(policy):
    state = filled(policy)
    evicted = policy.evict(state, jnp.int32(0), free_refs(), WIDTH)
    assert evicted.ok
    chex.assert_trees_all_equal(evicted.state, state)


def session(policy, state, keys):
    """Touch some keys, evict a block and insert another key into it."""
    state = policy.touch(state, keys, jnp.int32(2), all_ready())
    evicted = policy.evict(state, jnp.int32(1), free_refs(), WIDTH)
    return policy.insert(evicted.state, keys + jnp.uint32(1000), evicted.block_ids)


@one_policy
def test_jit_equals_eager(eager):
    keys, _ = make_keys(10, 12)
    slow = session(eager, filled(eager), keys)
    fast = jax.jit(session, static_argnums=0)(eager, filled(eager), keys)
    chex.assert_trees_all_equal(fast, slow)
    chex.assert_trees_all_equal_shapes_and_dtypes(fast.state, eager.init())


@pytest.mark.parametrize("make", PURE, indirect=True)
def test_traces_once_per_batch_size(policy):
    chex.clear_trace_counter()  # It would count the other policies' traces too.
    traced = jax.jit(chex.assert_max_traces(session, n=1), static_argnums=0)
    state, keys = policy.init(), make_keys(10, 11)[0]
    for _ in range(2):  # Without compiling: of a state that was made, then its own.
        state = traced.trace(policy, state, keys).out_info.state


@one_policy
def test_scans_and_vmaps_over_caches_with_donation(policy):
    num_caches = 3
    keys = jnp.stack(
        [
            jnp.stack([make_keys(10 + (i + cache) % 3, 11)[0] for i in range(3)])
            for cache in range(num_caches)
        ]
    )

    def scan(state, keys):
        def body(state, keys):
            result = session(policy, state, keys)
            return result.state, result.inserted

        return jax.lax.scan(body, state, keys)

    # NumPy, as JAX would compile for every shape.
    states = jax.tree.map(lambda leaf: np.stack([leaf] * num_caches), filled(policy))
    together = jax.jit(jax.vmap(scan), donate_argnums=0)(jax.device_put(states), keys)
    together = jax.tree.map(np.asarray, together)
    for cache in range(num_caches):
        state, inserted = filled(policy), []
        for batch in keys[cache]:
            result = session(policy, state, batch)
            state = result.state
            inserted.append(result.inserted)
        single = jax.tree.map(lambda leaf, cache=cache: leaf[cache], together)
        chex.assert_trees_all_equal(single, (state, np.stack(inserted)))


def check_copy(policy, state, copy):
    """Check that a copy of a state is as it is, and has the same future."""
    assert jax.tree.structure(copy) == jax.tree.structure(state)
    chex.assert_trees_all_equal(copy, jax.tree.map(np.asarray, state))
    keys, _ = make_keys(10, 12)
    copy = jax.tree.map(jnp.asarray, copy)
    chex.assert_trees_all_equal(
        session(policy, copy, keys), session(policy, state, keys)
    )


def test_state_survives_pickling(policy):
    state = filled(policy)
    copy = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))
    check_copy(policy, state, copy)


@one_policy
def test_state_survives_an_orbax_checkpoint(policy, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    state = filled(policy)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        copy = checkpointer.restore(tmp_path / "state", jax.eval_shape(policy.init))
    check_copy(policy, state, copy)


def held_in_snapshot(policy, state):
    """The block of each key that the snapshot shows, ghosts left out."""
    shown = policy.snapshot(state).values()
    keys = [key for part in shown if isinstance(part, list) for key in part]
    assert len(set(keys)) == len(keys)
    blocks = policy.find(state, jnp.asarray(keys_to_words(keys)), jnp.int32(len(keys)))
    return {k: b for k, b in zip(keys, blocks.tolist(), strict=True) if b != -1}


def test_snapshot_shows_every_block_once_and_changes_nothing(policy):
    state = filled(policy)
    before = jax.tree.map(np.array, state)
    names = [np.full(8, 11 + i, "<u4").tobytes() for i in range(NUM_BLOCKS)]
    assert held_in_snapshot(policy, state) == {key: i for i, key in enumerate(names)}
    chex.assert_trees_all_equal(jax.tree.map(np.array, state), before)

    evicted = policy.evict(state, jnp.int32(2), free_refs(), WIDTH)
    evicted_ids = evicted.block_ids[:2].tolist()
    assert held_in_snapshot(policy, evicted.state) == {
        key: i for i, key in enumerate(names) if i not in evicted_ids
    }
    assert held_in_snapshot(policy, policy.init()) == {}


def test_policy_knows_the_sizes_that_it_was_made_for(make):
    assert (make(8, 64).num_blocks, make(8, 64).max_batch) == (8, 64)


def test_equal_arguments_share_one_policy(make):
    assert make(8, 64) is make(8, 64)


@pytest.mark.parametrize(
    ("num_blocks", "max_batch", "match"),
    [(0, 8, "num_blocks=0 must"), (8, -1, "max_batch=-1 must")],
)
def test_refuses_sizes_below_one(make, num_blocks, max_batch, match):
    with pytest.raises(ValueError, match=match):
        make(num_blocks, max_batch)
