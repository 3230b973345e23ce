"""A step that keeps the device busy, as a model does, and writes to the pool."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.transfer.memory import wait_for
from jaxkv.types import PyTree

_MAX_AHEAD = 2
_MAX_PRODUCTS = 1 << 16


class BusyStep:
    """Matrix products, then a write to a donated pool that has to wait for them.

    `write(pool, zero, *args)` writes; `zero` is a float32 0 that is known only when the
    products are done.
    """

    def __init__(
        self, write: Callable[..., PyTree], place: jax.sharding.Sharding
    ) -> None:
        size = 256 if jax.devices()[0].platform == "cpu" else 2048
        matrix = np.random.default_rng(0).standard_normal((size, size)) / size**0.5
        self._matrix = jax.device_put(jnp.asarray(matrix, jnp.float32), place)
        self._number = 1
        self._running: collections.deque[jax.Array] = collections.deque()

        def step(pool: PyTree, matrix: Any, number: Any, *args: Any) -> Any:
            product = jax.lax.fori_loop(
                0, number, lambda _, value: jnp.tanh(value @ matrix), matrix
            )
            # Not a constant to the compiler, as it does not know that tanh is below 2.
            zero = jnp.where(product[0, 0] < 2, 0.0, 1.0)
            return write(pool, zero, *args), zero

        self._step = jax.jit(step, donate_argnums=0)

    def __call__(self, pool: PyTree, *args: Any) -> PyTree:
        """Start a step, return the new pool; wait for the step before the last one.

        An engine also waits for tokens, and so is never many steps ahead.
        """
        pool, done = self._step(pool, self._matrix, self._number, *args)
        self._running.append(done)
        if len(self._running) > _MAX_AHEAD:
            wait_for(self._running.popleft())
        return pool

    def calibrate(
        self, step_s: float, pool: PyTree, *args: Any
    ) -> tuple[PyTree, float]:
        """Make a step take about `step_s`; return the pool and the median time."""
        took_s = 0.0
        while took_s < 0.8 * step_s and self._number < _MAX_PRODUCTS:
            factor = min(8.0, step_s / took_s) if took_s else 1.0
            self._number = round(self._number * factor) + bool(took_s)
            times_s = []
            for _ in range(4):
                start_s = time.perf_counter()
                pool = self(pool, *args)
                wait_for(pool)
                times_s.append(time.perf_counter() - start_s)
            took_s = statistics.median(times_s)
        return pool, took_s
