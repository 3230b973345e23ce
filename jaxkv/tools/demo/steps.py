"""The demo's model as jitted steps over a donated KV pool."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import ArrayLike

from jaxkv.tools.demo.model import ModelConfig, Pool, Transformer, paged_hidden
from jaxkv.transfer import StepLoads

Weights: TypeAlias = tuple[Array, ...]


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
    # ``(pool, tokens, start, num_tokens, block_table, loads=None)``. Compute T tokens
    # of one sequence. `tokens` is i32[T]; its first `num_tokens` (i32[], at least 1)
    # count; the first is at position `start` (i32[]); `block_table` is i32[C,
    # M], a row for each group of layers, with arbitrary entries past the sequence and
    # where no window reaches; `loads` is what comes from the host meanwhile.
    # `StepResult.logits` is f32[V], for the token after the last.
    prefill_chunk: Callable[..., StepResult]
    # ``(pool, tokens, positions, block_tables)``. Compute one token, i32[N], of each of
    # N sequences, at `positions` (i32[N], negative in rows of padding); `block_tables`
    # is i32[C, N, M], as above. `StepResult.logits` is f32[N, V], meaningless in rows
    # of padding.
    decode: Callable[[Pool, ArrayLike, ArrayLike, ArrayLike], StepResult]


def make_steps(config: ModelConfig, seed: int) -> Steps:
    """Make a model with random weights and the functions that run it."""
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
        loads: StepLoads | None = None,
    ) -> StepResult:
        model = restore(weights)
        index = jnp.arange(tokens.size, dtype=jnp.int32)
        positions = jnp.where(index < num_tokens, start + index, -1)
        pool, hidden = paged_hidden(
            model, pool, tokens[None], positions[None], block_table[:, None], loads
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
