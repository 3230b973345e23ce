"""The demo's model as jitted steps over a donated KV pool, and what runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from jaxkv.tools.demo.model import ModelConfig, Pool, Transformer, paged_hidden
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.types import NULL_BLOCK

Weights: TypeAlias = tuple[Array, ...]
Tables: TypeAlias = Sequence[Sequence[int]]
"""Block ids of a sequence for each group of layers."""


class StepResult(NamedTuple):
    """The result of a step."""

    pool: Pool  # The KV pool, in the memory of the donated one
    logits: Array  # f32[V] or f32[N, V]. Scores of the next token.
    next_token: Array  # i32[] or i32[N]. The best one; the lowest id of equals.


class Steps(NamedTuple):
    """The model, ready to run; made by `make_steps`.

    Both functions are jitted, with one compilation for each pair of T or N and M,
    and `pool` is donated. They return before the work is done.
    """

    config: ModelConfig  # The shape of the model
    model: Transformer  # The model itself, for `reference_forward`
    # Compute T tokens of a sequence: (pool, tokens i32[T], start i32[], num_tokens
    # i32[], block_table i32[C, M]). The first `num_tokens` count, from `start` on; a
    # table has a row for each group of layers, and any entries where nothing is read.
    prefill_chunk: Callable[..., StepResult]
    # Compute a token of each of N sequences: (pool, tokens i32[N], positions i32[N],
    # block_tables i32[C, N, M]). Positions are negative in rows of padding.
    decode: Callable[[Pool, ArrayLike, ArrayLike, ArrayLike], StepResult]


def make_steps(config: ModelConfig, seed: int) -> Steps:
    model = Transformer(config, nnx.Rngs(seed))
    graph, state = nnx.split(model)
    # A plain tuple of arrays crosses the jit boundary without running any Python.
    weights, structure = jax.tree.flatten(state)

    def restore(weights: Weights) -> Transformer:
        state = jax.tree.unflatten(structure, weights)
        restored: Transformer = nnx.merge(graph, state)
        return restored

    def result(pool: Pool, logits: Array) -> StepResult:
        return StepResult(pool, logits, jnp.argmax(logits, axis=-1).astype(jnp.int32))

    def prefill_chunk(
        weights: Weights,
        pool: Pool,
        tokens: Array,
        start: Array,
        num_tokens: Array,
        block_table: Array,
    ) -> StepResult:
        model = restore(weights)
        index = jnp.arange(tokens.size, dtype=jnp.int32)
        positions = jnp.where(index < num_tokens, start + index, -1)
        pool, hidden = paged_hidden(
            model, pool, tokens[None], positions[None], block_table[:, None]
        )
        last = jax.lax.dynamic_slice_in_dim(hidden[0], num_tokens - 1, 1)
        return result(pool, model.logits(last)[0])

    def decode(
        weights: Weights, pool: Pool, tokens: Array, positions: Array, tables: Array
    ) -> StepResult:
        model = restore(weights)
        pool, hidden = paged_hidden(
            model, pool, tokens[:, None], positions[:, None], tables
        )
        return result(pool, model.logits(hidden[:, 0]))

    bound = tuple(weights)
    return Steps(
        config,
        model,
        functools.partial(jax.jit(prefill_chunk, donate_argnums=1), bound),
        functools.partial(jax.jit(decode, donate_argnums=1), bound),
    )


class Runner:
    """Runs the model in few shapes. Does not allocate blocks."""

    def __init__(self, steps: Steps, config: EngineConfig) -> None:
        self._steps, self._config = steps, config
        # Two sizes: each is compiled, but one for all would waste work.
        largest = -(-config.max_seq_tokens // config.block_size)
        self._table_sizes = sorted({-(-largest // 2), largest})

    def prefill(
        self, pool: Pool, chunk: Sequence[int], start: int, tables: Tables
    ) -> StepResult:
        """Compute tokens of a sequence, the first at `start`; do not wait for them."""
        size = next(size for size in self._config.chunk_sizes if size >= len(chunk))
        return self._steps.prefill_chunk(
            pool,
            np.array([*chunk, *[0] * (size - len(chunk))], np.int32),
            np.int32(start),
            np.int32(len(chunk)),
            self._pad([tables], start + len(chunk), rows=1)[:, 0],
        )

    def decode(
        self,
        pool: Pool,
        tokens: Sequence[int],
        positions: Sequence[int],
        tables: Sequence[Tables],
    ) -> tuple[Pool, list[int]]:
        rows = self._config.concurrency
        num_padding = rows - len(tokens)
        result = self._steps.decode(
            pool,
            np.array([*tokens, *[0] * num_padding], np.int32),
            np.array([*positions, *[-1] * num_padding], np.int32),
            self._pad(tables, max(positions) + 1, rows),
        )
        return result.pool, np.asarray(result.next_token).tolist()[: len(tokens)]

    def warm_up(self, pool: Pool) -> Pool:
        """Compile everything that a run needs. Writes only the null block."""
        rows, chunk_sizes = self._config.concurrency, self._config.chunk_sizes
        for size in self._table_sizes:
            tables = np.full((self._num_groups, rows, size), NULL_BLOCK, np.int32)
            for num_tokens in chunk_sizes:
                tokens = np.zeros(num_tokens, np.int32)
                pool = self._steps.prefill_chunk(
                    pool, tokens, np.int32(0), np.int32(1), tables[:, 0]
                ).pool
            pool = self._steps.decode(
                pool, np.zeros(rows, np.int32), np.full(rows, -1, np.int32), tables
            ).pool
        return pool

    @property
    def _num_groups(self) -> int:
        return len(self._steps.config.windows)

    def _pad(
        self, tables: Sequence[Tables], num_tokens: int, rows: int
    ) -> NDArray[np.int32]:
        """Make block tables i32[C, rows, M], with M enough for `num_tokens`."""
        needed = -(-num_tokens // self._config.block_size)
        size = next(size for size in self._table_sizes if size >= needed)
        padded = np.full((self._num_groups, rows, size), NULL_BLOCK, np.int32)
        for row, by_group in enumerate(tables):
            for group, block_ids in enumerate(by_group):
                block_ids = block_ids[:size]
                padded[group, row, : len(block_ids)] = block_ids
        return padded
