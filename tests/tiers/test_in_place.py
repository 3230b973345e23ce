"""The manager's functions update a donated state in place: no copy of a large array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.policies import get_policy_maker
from jaxkv.tiers import host_state

NUM_BLOCKS = 1 << 14
BATCH = 16
POLICIES = ("lru", "arc")
COPY = re.compile(r"= \w+\[([\d,]+)\]\S* copy\(")


def large_copies(compiled):
    """List the copies of large arrays that every call makes."""
    text = compiled.as_text()
    return [
        line.strip()
        for line in text.split("\nENTRY ")[1].splitlines()
        if (match := COPY.search(line))
        and np.prod([int(size) for size in match[1].split(",")]) >= NUM_BLOCKS
    ]


def compile_with(function, policy):
    state = jax.eval_shape(lambda: host_state.init(policy))
    keys = jax.ShapeDtypeStruct((BATCH, 8), np.uint32)
    count = jax.ShapeDtypeStruct((), np.int32)
    arguments = [keys, count]
    if function is host_state.complete_store:
        arguments.append(jax.ShapeDtypeStruct((), np.bool_))
    jitted = jax.jit(function, static_argnums=0, donate_argnums=1)
    return jitted.lower(policy, state, *arguments).compile()


# A request step touches, loads and stores; what it contains is tried alone with one.
@pytest.mark.parametrize(
    ("function", "policy"),
    [
        *[(host_state.request_step, policy) for policy in POLICIES],
        (host_state.complete_store, "arc"),
        (host_state.touch, "lru"),
        (host_state.prepare_store, "lru"),
        (host_state.complete_load, "lru"),
    ],
)
def test_a_donated_state_is_updated_in_place(function, policy):
    compiled = compile_with(function, get_policy_maker(policy)(NUM_BLOCKS, 4096))
    assert large_copies(compiled) == []


def test_a_copy_would_be_seen():
    def forked(policy, state, keys, count):
        touched = host_state.touch(policy, state, keys, count)
        return touched, state.ref_cnt + jnp.int32(1), state.policy.order.places

    policy = get_policy_maker("lru")(NUM_BLOCKS, 4096)
    assert large_copies(compile_with(forked, policy))
