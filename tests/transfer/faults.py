"""Arrays that are ready late, and arrays that fail after they were made."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

from tests.rigs.device_cases import ON_CPU
from tests.rigs.waiting import WAIT_S

FAULT = "a fault of the device"
_released = threading.Event()


def _raise():
    raise RuntimeError(FAULT)


def _succeed():
    return np.zeros((), np.float32)


def _wait():
    if threading.current_thread() is threading.main_thread() or not _released.wait(
        WAIT_S
    ):
        raise RuntimeError("nobody can release it")
    return np.zeros((), np.float32)


@jax.jit
def _late_zero(num_products):
    mean = jnp.full((64, 64), 1 / 64, jnp.float32)
    mean = jax.lax.fori_loop(0, num_products, lambda _, x: x @ mean, mean)
    return mean[0, 0] * 0


@jax.jit
def _gpu_zero():
    """Keep a GPU busy; a loop of unknown length would keep the caller waiting."""
    x = jnp.full((4096, 4096), 1 / 4096, jnp.float32)
    return jax.lax.fori_loop(0, 2000, lambda _, y: y @ x, x)[0, 0] * 0


@jax.jit
def _add(zero, pool):
    # An addition would change NaNs, and XLA:CPU removes the addition of a known zero.
    return jax.tree.map(lambda leaf: jnp.where(zero == 0, leaf, leaf * 0), pool)


def _call_back(function, zero, pool):
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    return _add(zero + jax.pure_callback(function, kind), pool)


_compiled = {}


def _run(function, pool, num_products=20_000):
    """Run a program whose argument is late, so that it does not run at once."""
    leaves, treedef = jax.tree.flatten(pool)
    key = (function, treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
    if key not in _compiled:
        program = jax.jit(functools.partial(_call_back, function))
        _compiled[key] = program.lower(_late_zero(1), pool).compile()
    while True:
        try:
            return _compiled[key](_late_zero(num_products), pool)
        except jax.errors.JaxRuntimeError:
            num_products *= 2  # XLA:CPU has called back in this thread.


def held(pool):
    """Return a pool that is ready after `release`; on a GPU, after a while."""
    _released.clear()
    return _run(_wait, pool) if ON_CPU else _add(_gpu_zero(), pool)


def release():
    _released.set()


def broken(pool):
    """Return a pool whose arrays fail later."""
    return _run(_raise, pool)


def recover(pool):
    """Make the last callback succeed: jax waits for it at exit, and would raise."""
    jax.block_until_ready(_run(_succeed, pool, 1))
