"""Pools that are ready late, and pools that fail."""

import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import kernels, tickets
from tests.transfer.numbered import numbered_pool


@pytest.fixture(autouse=True)
def own_programs(request):
    """Let a test that patches something share its programs with no other test."""
    patches = "monkeypatch" in request.fixturenames
    if patches:
        kernels.shared_copier.cache_clear()
    yield
    if patches:
        kernels.shared_copier.cache_clear()


@pytest.fixture(scope="session")
def delayed():
    """Make a pool that is ready some seconds later, however fast the machine is."""

    @jax.jit
    def step(num_products, pool):
        # Matrix products: XLA:CPU runs cheap programs before it returns.
        mean = jnp.full((64, 64), 1 / 64, jnp.float32)
        product = jax.lax.fori_loop(0, num_products, lambda _, x: x @ mean, mean)
        zero = product[0, 0] * 0
        return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), pool)

    def duration_s(num_products):
        start_s = time.perf_counter()
        jax.block_until_ready(step(num_products, numbered_pool()))
        return time.perf_counter() - start_s

    duration_s(1)
    products_per_s = 2000 / min(duration_s(2000) for _ in range(5))
    return lambda pool, seconds: step(int(seconds * products_per_s), pool)


def fault(*args):
    raise RuntimeError("a fault of the device")


def callback(function):
    """f32[]: the value of `function` when the program runs."""
    return jax.pure_callback(function, jax.ShapeDtypeStruct((), jnp.float32))


@pytest.fixture
def broken(delayed):
    """Make a pool whose arrays fail some time later."""

    def step(pool, function):
        zero = callback(function)
        return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), pool)

    step = jax.jit(step, static_argnames="function")

    def broken(pool, seconds=0.2):
        program = step.lower(pool, fault).compile()
        while True:
            try:
                return program(delayed(pool, seconds))
            except jax.errors.JaxRuntimeError:
                seconds *= 2  # It was not late, and XLA:CPU ran it at once.

    yield broken
    # At exit jax waits for the last callback of a device, which must succeed.
    jax.block_until_ready(step(numbered_pool(), lambda: np.zeros((), np.float32)))


@pytest.fixture
def gate(monkeypatch):
    """While it is shut no piece is ready, however fast the machine is."""
    is_ready = tickets.Piece.is_ready
    gate = types.SimpleNamespace(shut=False)
    monkeypatch.setattr(
        tickets.Piece, "is_ready", lambda piece: not gate.shut and is_ready(piece)
    )
    return gate
