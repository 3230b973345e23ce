"""Arrays that fail after they were made, as when a device has a fault."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

FAULT = "a fault of the device"


def _raise():
    raise RuntimeError(FAULT)


def _succeed():
    return np.zeros((), np.float32)


@jax.jit
def _late_zero(num_products):
    mean = jnp.full((64, 64), 1 / 64, jnp.float32)
    mean = jax.lax.fori_loop(0, num_products, lambda _, x: x @ mean, mean)
    return mean[0, 0] * 0


def _call_back(function, zero, pool):
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    zero += jax.pure_callback(function, kind)
    # An addition would change NaNs, and XLA:CPU removes the addition of a known zero.
    return jax.tree.map(lambda leaf: jnp.where(zero == 0, leaf, leaf * 0), pool)


_compiled = {}


def _run(function, zero, pool):
    """Run a program, compiled before its arguments are made."""
    leaves, treedef = jax.tree.flatten(pool)
    key = (function, treedef, *[(leaf.shape, leaf.dtype) for leaf in leaves])
    if key not in _compiled:
        program = jax.jit(functools.partial(_call_back, function))
        _compiled[key] = program.lower(_late_zero(1), pool).compile()
    return _compiled[key](zero(), pool)


def broken(pool):
    """Return a pool whose arrays fail later."""
    # The argument is late: otherwise XLA:CPU would call back at once, and raise.
    return _run(_raise, lambda: _late_zero(20_000), pool)


def recover(pool):
    """Let the last callback succeed: jax waits for it at exit, and would raise."""
    jax.block_until_ready(_run(_succeed, lambda: _late_zero(1), pool))
