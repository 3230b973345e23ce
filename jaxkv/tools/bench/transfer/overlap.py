"""How much of a transfer a running model step hides."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.bench.transfer.designs import EngineDesign, Ids, raise_errors
from jaxkv.tools.bench.transfer.paged_pool import PagedPool, Pool
from jaxkv.tools.bench.transfer.plan import device_cycle, host_cycle
from jaxkv.tools.bench.transfer.records import DIRECTIONS, Overlap
from jaxkv.transfer.memory import compiler_options, wait_for
from jaxkv.transfer.tickets import Direction

_STEP_S = 0.010
_MAX_STEPS = 4
_MAX_ROUNDS = 7


class Step:
    """Simulates a model's step: matrix products, then a write to the pool.

    Like a serving step it takes the pool, donated, and writes to it, so it runs after
    every load issued before it, and before every save issued after it.

    Args:
        pool: A pool with the layout of later ones; not kept.
        scratch_block: The block that steps write to.
    """

    def __init__(self, pool: Pool, scratch_block: int):
        platform = jax.devices()[0].platform
        size = 512 if platform == "cpu" else 4096
        key = jax.random.key(0)
        self._matrix = jax.random.normal(key, (size, size), jnp.float32) / size**0.5
        self._num_products = 1

        def step(pool: Pool, matrix: jax.Array, num_products: int) -> Pool:
            # tanh keeps the numbers in range for any number of products.
            value = jax.lax.fori_loop(
                0, num_products, lambda _, value: jnp.tanh(value @ matrix), matrix
            )
            written = jnp.sum(value).astype(pool[0].dtype)
            return [pool[0].at[scratch_block].set(written), *pool[1:]]

        self._step = jax.jit(
            step, donate_argnums=0, compiler_options=compiler_options(platform)
        )

    def __call__(self, pool: Pool) -> Pool:
        """Start a step and return at once, with the new pool."""
        pool = self._step(pool, self._matrix, self._num_products)
        return pool

    def calibrate(self, pool: Pool) -> tuple[Pool, float]:
        """Make a step take about 10 ms on this machine.

        Returns:
            The pool, and the seconds of a step.
        """
        pool, _ = self._time(pool)  # compiles
        while True:
            times_s = []
            for _ in range(3):
                pool, duration_s = self._time(pool)
                times_s.append(duration_s)
            step_s = min(times_s)
            if step_s >= 0.8 * _STEP_S:
                return pool, step_s
            factor = min(8.0, _STEP_S / step_s)
            self._num_products = max(
                self._num_products + 1, round(self._num_products * factor)
            )

    def _time(self, pool: Pool) -> tuple[Pool, float]:
        start_s = time.perf_counter()
        pool = self(pool)
        wait_for(pool)
        return pool, time.perf_counter() - start_s


class OverlapTimer:
    """Times steps and the engine's transfers, alone and together.

    Args:
        paged: The pool.
        design: The engine. All its host blocks hold bytes.
        host_tags: u32[host blocks]. Their tags, see `PagedPool`; updated.
        step: A calibrated step.
        num_blocks: Blocks of one transfer; each step has one.
        mean_run: See `host_cycle`.
    """

    def __init__(
        self,
        paged: PagedPool,
        design: EngineDesign,
        host_tags: NDArray[np.uint32],
        step: Step,
        num_blocks: int,
        mean_run: int | None = None,
    ):
        self._paged, self._design, self._step = paged, design, step
        self._host_tags = host_tags
        self._num_blocks = num_blocks
        # Transfers in flight together need separate blocks.
        self._num_steps = max(1, min(_MAX_STEPS, paged.num_blocks // num_blocks))
        self._device_ids = device_cycle(paged.num_blocks, seed=10)
        self._host_ids = host_cycle(paged.num_blocks, mean_run, seed=11)

    def measure(self, rounds: int) -> dict[Direction, Overlap]:
        """Time all combinations in turn.

        Args:
            rounds: Number of rounds; few are enough, as each has several steps.
        """
        kinds: list[tuple[Direction | None, bool]] = [
            (None, True),
            ("save", False),
            ("save", True),
            ("load", False),
            ("load", True),
        ]
        seconds: dict[tuple[Direction | None, bool], list[float]]
        seconds = {kind: [] for kind in kinds}
        for kind in kinds:
            self._time(*kind)
        for number in range(min(rounds, _MAX_ROUNDS)):
            for place in range(len(kinds)):
                kind = kinds[(number + place) % len(kinds)]
                seconds[kind].append(self._time(*kind))
        return {
            direction: Overlap(
                num_steps=self._num_steps,
                steps_s=seconds[None, True],
                transfers_s=seconds[direction, False],
                both_s=seconds[direction, True],
            )
            for direction in DIRECTIONS
        }

    def _time(self, direction: Direction | None, with_steps: bool) -> float:
        total = self._num_steps * self._num_blocks
        device_ids = self._device_ids.next(total).reshape(self._num_steps, -1)
        host_ids = self._host_ids.next(total).reshape(self._num_steps, -1)
        transfer = self._transfer(direction)
        engine, pool = self._design.engine, self._paged.leaves
        start_s = time.perf_counter()
        for devices, hosts in zip(device_ids, host_ids, strict=True):
            pool = transfer(engine.advance(pool), devices, hosts)
            if with_steps:
                pool = self._step(pool)
            raise_errors(engine.poll())
        pool = self._design.drain(pool)
        wait_for(pool)
        duration_s = time.perf_counter() - start_s
        self._paged.leaves = pool
        if direction == "save":
            self._host_tags[host_ids] = self._paged.tags[device_ids]
        elif direction == "load":
            self._paged.tags[device_ids] = self._host_tags[host_ids]
        return duration_s

    def _transfer(
        self, direction: Direction | None
    ) -> Callable[[Pool, Ids, Ids], Pool]:
        engine = self._design.engine

        def save(pool: Pool, device_ids: Ids, host_ids: Ids) -> Pool:
            engine.save(pool, device_ids, host_ids)
            return pool

        def load(pool: Pool, device_ids: Ids, host_ids: Ids) -> Pool:
            pool, _ = engine.load(pool, host_ids, device_ids)
            return pool

        def nothing(pool: Pool, device_ids: Ids, host_ids: Ids) -> Pool:
            return pool

        return {"save": save, "load": load, None: nothing}[direction]
