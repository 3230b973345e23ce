"""The manager's functions update a donated state in place: no copy of a large array."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import manager
from jaxkv.policies import get_policy_maker
from jaxkv.ragged import in_order

NUM_BLOCKS = 1 << 14
BATCH = 16
COPY = re.compile(r"= \w+\[([\d,]+)\]\S* copy\(")


def large_copies(compiled, *, compactions=False):
    """List the copies of large arrays that every call makes, or compactions too."""
    text = compiled.as_text()
    return [
        line.strip()
        for line in (text if compactions else text.split("\nENTRY ")[1]).splitlines()
        if (match := COPY.search(line))
        and np.prod([int(size) for size in match[1].split(",")]) >= NUM_BLOCKS
    ]


def compile_with(function, policy):
    state = jax.eval_shape(lambda: manager.init(policy, NUM_BLOCKS))
    keys = jax.ShapeDtypeStruct((BATCH, 8), np.uint32)
    count = jax.ShapeDtypeStruct((), np.int32)
    arguments = [keys, count]
    if function is manager.complete_store:
        arguments.append(jax.ShapeDtypeStruct((), np.bool_))
    jitted = jax.jit(function, static_argnums=0, donate_argnums=1)
    return jitted.lower(policy, state, *arguments).compile()


@pytest.mark.parametrize("policy", ["lru", "arc", "arc_fixed"])
@pytest.mark.parametrize(
    "function",
    [
        manager.touch,
        manager.complete_load,
        manager.prepare_store,
        manager.complete_store,
        manager.request_step,
    ],
)
def test_a_donated_state_is_updated_in_place(function, policy):
    compiled = compile_with(function, get_policy_maker(policy)(NUM_BLOCKS, 4096))
    assert large_copies(compiled) == []


@pytest.mark.parametrize("policy", ["lru", "arc", "arc_fixed"])
def test_a_request_among_many_copies_no_more_than_alone(policy):
    policy = get_policy_maker(policy)(NUM_BLOCKS, 4096)
    state = jax.eval_shape(lambda: manager.init(policy, NUM_BLOCKS))
    serve = in_order(functools.partial(manager.request_step, policy), BATCH)
    many = jax.jit(serve, donate_argnums=0).lower(
        state,
        jax.ShapeDtypeStruct((4 * BATCH, 8), np.uint32),
        jax.ShapeDtypeStruct((5,), np.int32),
        jax.ShapeDtypeStruct((), np.int32),
    )
    alone = compile_with(manager.request_step, policy)
    assert len(large_copies(many.compile(), compactions=True)) <= len(
        large_copies(alone, compactions=True)
    )


def test_a_copy_would_be_seen():
    def forked(policy, state, keys, count):
        touched = manager.touch(policy, state, keys, count)
        return touched, state.ref_cnt + jnp.int32(1), state.policy.order.places

    policy = get_policy_maker("lru")(NUM_BLOCKS, 4096)
    assert large_copies(compile_with(forked, policy))
