"""The pure functions of the manager: traced, scanned, vmapped, refused.

`test_host_differential.py` compares their decisions with the native functions, for each
policy; `tests/policies/test_contract.py` has each policy scanned and vmapped.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.policies import get_policy_maker
from jaxkv.tiers import host_state

NUM_BLOCKS = 5
WIDTH = 4

lookup, touch, prepare_load, complete_load, prepare_store, complete_store, fused = (
    jax.jit(function, static_argnums=0)
    for function in (
        host_state.lookup,
        host_state.touch,
        host_state.prepare_load,
        host_state.complete_load,
        host_state.prepare_store,
        host_state.complete_store,
        host_state.request_step,
    )
)
complete_step = jax.jit(host_state.complete_step)


@pytest.fixture
def policy():
    return get_policy_maker("lru")(NUM_BLOCKS, 64)


def batch(*numbers):
    keys = np.zeros((WIDTH, 8), np.uint32)
    keys[: len(numbers)] = np.array(numbers, np.uint32)[:, None] + 1
    return jnp.asarray(keys), jnp.int32(len(numbers))


def test_a_key_given_thousands_of_times_is_not_evicted():
    """Regression: so often counted as being read, its count came round to 0."""
    policy = get_policy_maker("lru")(2, 1 << 13)
    state, _ = prepare_store(policy, host_state.init(policy), *batch(1, 2))
    state, _ = complete_store(policy, state, *batch(1, 2), jnp.bool_(True))
    keys = np.full(((1 << 12) + 1, 8), 2, np.uint32)
    keys[-1] = 9
    state, answer = prepare_store(policy, state, jnp.asarray(keys), np.int32(len(keys)))
    assert answer.evicted_keys[0].tolist() == [3] * 8  # key 2; the batch has key 1
    assert int(lookup(policy, state, *batch(1))) == 1


def request_step(policy, state, keys, count):
    """Serve a request as an engine would: load what is there, store the rest."""
    hits = host_state.lookup(policy, state, keys, count)
    state = host_state.touch(policy, state, keys, count)
    state, _ = host_state.prepare_load(policy, state, keys, hits)
    state, answer = host_state.prepare_store(policy, state, keys, count)
    state, _ = host_state.complete_store(policy, state, keys, count, jnp.bool_(True))
    state, _ = host_state.complete_load(policy, state, keys, hits)
    return state, (hits, answer.num_evicted, answer.block_ids)


def requests(num):
    rng = np.random.default_rng(num)
    starts = rng.integers(0, 6, num)
    keys = [batch(*range(s, s + WIDTH))[0] for s in starts]
    return jnp.stack(keys), jnp.asarray(rng.integers(1, WIDTH + 1, num), jnp.int32)


def test_scans_and_vmaps_over_caches_with_donation_equal_calls_one_by_one(policy):
    num_caches = 3
    keys, counts = requests(8 * num_caches)
    keys, counts = (
        np.asarray(array).reshape(num_caches, 8, *array.shape[1:])
        for array in (keys, counts)
    )

    def replay(state, keys, counts):
        return jax.lax.scan(
            lambda s, x: request_step(policy, s, *x), state, (keys, counts)
        )

    # NumPy, as JAX would compile for every shape.
    first = jax.tree.map(np.array, host_state.init(policy))
    states = jax.tree.map(lambda leaf: np.stack([leaf] * num_caches), first)
    together = jax.jit(jax.vmap(replay), donate_argnums=0)
    together = together(jax.device_put(states), keys, counts)
    together = jax.tree.map(np.asarray, together)
    step = jax.jit(chex.assert_max_traces(request_step, n=1), static_argnums=0)
    num_hits = 0
    for cache in range(num_caches):
        state, answers = first, []
        for key, count in zip(keys[cache], counts[cache], strict=True):
            state, answer = step(policy, state, key, count)
            answers.append(answer)
            num_hits += int(answer[0])
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *answers)
        single = jax.tree.map(lambda leaf, cache=cache: leaf[cache], together)
        chex.assert_trees_all_equal(single, (state, stacked))
    assert num_hits


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_a_request_step_equals_its_parts(name):
    policy = get_policy_maker(name)(NUM_BLOCKS, 64)
    keys, counts = requests(30)
    whole = apart = host_state.init(policy)
    refused = 0
    for number, (key, count) in enumerate(zip(keys, counts, strict=True)):
        whole, answer = fused(policy, whole, key, count)
        hits = lookup(policy, apart, key, count)
        apart = touch(policy, apart, key, count)
        apart, load = prepare_load(policy, apart, key, hits)
        apart, store = prepare_store(policy, apart, key, count)
        chex.assert_trees_all_equal(whole, apart)
        assert int(answer.num_hits) == int(hits)
        is_hit = np.arange(key.shape[0]) < int(hits)
        assert (
            answer.block_ids == np.where(is_hit, load.block_ids, store.block_ids)
        ).all()
        chex.assert_trees_all_equal(answer.evicted_keys, store.evicted_keys)
        assert answer[1:3] == store[:2]
        refused += int(answer.num_evicted) < 0
        if number % 7 == 3:
            continue  # leave these in flight, so that some later ones are refused
        whole, done = complete_step(whole, answer.block_ids, answer.num_hits)
        assert done
        # NumPy, as JAX would compile for every number of keys.
        new = np.flatnonzero(np.asarray(store.block_ids) != -1)
        own_keys = np.zeros((WIDTH, 8), np.uint32)
        own_keys[: new.size] = np.asarray(key)[new]
        apart, _ = complete_store(
            policy, apart, own_keys, jnp.int32(new.size), jnp.bool_(True)
        )
        apart, _ = complete_load(policy, apart, key, hits)
        chex.assert_trees_all_equal(whole, apart)
    assert refused
