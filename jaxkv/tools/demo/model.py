"""A small decoder-only transformer over a paged KV pool, with random weights.

Its layers attend to everything, to a window of the last tokens, or alternate between
both. Layers of a kind form a group with its own block table. One pool serves all
groups, as in vLLM: it has as many layer slots as a group has layers, and a block holds
the KV of one group at a time.

Letters in shapes, in addition to `jaxkv.types`:

    C   groups of layers
    N   sequences in one call
    T   tokens of each sequence in one call
    M   entries of a block table
    S   positions that a token may attend to: M * block_size, or all
    H   query heads;  G: query heads that share one key head;  K: key heads
    D   size of a head
    V   size of the vocabulary

Everything is float32 at the highest matmul precision, so that the greedy answer is the
same whether a KV block is computed in one chunk, in several, or token by token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxkv.search.groups import FullAttention, GroupSpec, SlidingWindow

Pool: TypeAlias = tuple[dict[str, Array], ...]
"""A layer slot's ``{"k", "v"}``, each f32[num_blocks, block_size, K, D]."""

Attend: TypeAlias = Callable[[int, Array, Array, Array], Array]
"""``(layer, q, k, v) -> out``, q and out of [N, T, H, D], k and v of [N, T, K, D]."""

SCORE_GAIN = 10.0
"""Variance of the attention scores; 1 is usual for weights before training.

Untrained weights attend to everything about equally, and an average over thousands of
positions hardly changes with a wrong KV block. With sharp attention one wrong block
changes the answer, so equal answers mean equal KV.
"""

EMBED_STD = 0.5
"""Small compared with the layers' outputs, so that context outweighs the last token."""

_einsum = functools.partial(jnp.einsum, precision="highest")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of the model.

    The defaults hold 2 KiB of KV per token and prefill 3,000 to 6,000 tokens per second
    on two CPU cores.
    """

    vocab_size: int = 256  # Tokens are bytes
    num_layers: int = 4  # Transformer layers; an even number in a hybrid
    d_model: int = 384  # Width of the residual stream
    num_heads: int = 12  # Query heads
    num_kv_heads: int = 2  # Key and value heads, each shared by several query heads
    head_dim: int = 32  # Size of a head; even, for the rotary embedding
    d_ff: int = 1152  # Width of the MLP
    max_seq_tokens: int = 4096  # Maximum sequence length
    # Rotary wavelengths go from 2 pi tokens up to almost this times that
    rope_base: float = 10_000.0
    # Attention of the layers: all to everything ("full"), all to the last
    # `window_tokens` ("window"), or alternating, the first to everything ("hybrid").
    layers: Literal["full", "window", "hybrid"] = "full"
    # Tokens that a token in a window layer attends to, itself included
    window_tokens: int = 512

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group of layers in tokens; None for everything.

        Layer i is in group ``i % len(windows)``.
        """
        return {
            "full": (None,),
            "window": (self.window_tokens,),
            "hybrid": (None, self.window_tokens),
        }[self.layers]

    def groups(self, block_size: int) -> tuple[GroupSpec, ...]:
        """Return the groups as jaxkv's specs, for blocks of `block_size` tokens."""
        return tuple(
            FullAttention(block_size)
            if window is None
            else SlidingWindow(block_size, window)
            for window in self.windows
        )

    @property
    def layers_per_group(self) -> int:
        return self.num_layers // len(self.windows)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers_per_group * self.num_kv_heads * self.head_dim * 4


def rope(x: Array, positions: Array, base: float) -> Array:
    """Rotate each half-split pair of `x` by its position.

    Returns f32[N, T, H, D]. Shapes: x: f32[N, T, H, D]; positions: i32[N, T].
    """
    half = x.shape[-1] // 2
    rates = base ** -(jnp.arange(half, dtype=x.dtype) / half)
    angles = positions[:, :, None, None].astype(x.dtype) * rates[None, None, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Grouped-query attention.

    Returns f32[N, T, H, D]. Meaningless where a token attends to nothing. Shapes: q:
    f32[N, T, H, D]; k: f32[N, S, K, D]; v: f32[N, S, K, D]; visible: bool[N, T, S].
    """
    N, T, H, D = q.shape
    K = k.shape[2]
    lowest = float(np.finfo(np.float32).min)

    def one(head: tuple[Array, Array, Array]) -> Array:
        q, k, v = head  # [N, G, T, D], [N, S, D], [N, S, D]
        scores = _einsum("ngtd,nsd->ngts", q, k) / D**0.5
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, lowest), axis=-1)
        out: Array = _einsum("ngts,nsd->ngtd", weights, v)
        return out

    # One key head at a time: its scores fit the cache of a CPU core, which is several
    # times as fast as all heads at once.
    grouped = q.reshape(N, T, K, H // K, D).transpose(2, 0, 3, 1, 4)
    out: Array = jax.lax.map(
        one, (grouped, k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3))
    )
    return out.transpose(1, 3, 0, 2, 4).reshape(N, T, H, D)


def _linear(
    num_in: int, num_out: int, rngs: nnx.Rngs, variance: float = 1.0
) -> nnx.Linear:
    return nnx.Linear(
        num_in,
        num_out,
        use_bias=False,
        precision="highest",
        kernel_init=nnx.initializers.variance_scaling(variance, "fan_in", "normal"),
        rngs=rngs,
    )


class Layer(nnx.Module):
    """Attention, then a gated MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.config = config
        self.attention_norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.q = _linear(config.d_model, q_size, rngs, SCORE_GAIN)
        self.k = _linear(config.d_model, kv_size, rngs)
        self.v = _linear(config.d_model, kv_size, rngs)
        self.out = _linear(q_size, config.d_model, rngs)
        self.mlp_norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.gate = _linear(config.d_model, config.d_ff, rngs)
        self.up = _linear(config.d_model, config.d_ff, rngs)
        self.down = _linear(config.d_ff, config.d_model, rngs)

    def __call__(
        self, x: Array, positions: Array, attend: Callable[[Array, Array, Array], Array]
    ) -> Array:
        """Add the output of this layer to `x`: f32[N, T, d_model]."""
        heads = (*x.shape[:2], -1, self.config.head_dim)
        y = self.attention_norm(x)
        q = rope(self.q(y).reshape(heads), positions, self.config.rope_base)
        k = rope(self.k(y).reshape(heads), positions, self.config.rope_base)
        v = self.v(y).reshape(heads)
        x = x + self.out(attend(q, k, v).reshape(*x.shape[:2], -1))
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Transformer(nnx.Module):
    """The model without its KV storage."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            embedding_init=nnx.initializers.normal(EMBED_STD),
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.unembed = _linear(config.d_model, config.vocab_size, rngs)

    def hidden(self, tokens: Array, positions: Array, attend: Attend) -> Array:
        """Run all layers.

        Returns f32[N, T, d_model]. Shapes: tokens: i32[N, T]; positions: i32[N, T].
        """
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, positions, functools.partial(attend, number))
        return x

    def logits(self, hidden: Array) -> Array:
        """Score the next token: f32[N, d_model] -> f32[N, V]."""
        return self.unembed(self.norm(hidden))


def visible_positions(queries: Array, keys: Array, window: int | None) -> Array:
    """Compute the positions that each token attends to.

    Returns bool[N, T, S]. Shapes: queries: i32[N, T]; keys: i32[S].
    """
    behind = queries[:, :, None] - keys[None, None]
    seen = behind >= 0
    return seen if window is None else seen & (behind < window)


def init_pool(config: ModelConfig, num_blocks: int, block_size: int) -> Pool:
    """Make an empty KV pool on the first device.

    Returns one ``{"k", "v"}`` for each layer of a group, each f32[num_blocks,
    block_size, num_kv_heads, head_dim].
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    device = jax.devices()[0]
    return tuple(
        {name: jnp.zeros(shape, jnp.float32, device=device) for name in ("k", "v")}
        for _ in range(config.layers_per_group)
    )


def paged_hidden(
    model: Transformer, pool: Pool, tokens: Array, positions: Array, tables: Array
) -> tuple[Pool, Array]:
    """Run all layers on sequences with their KV in the pool; write their new KV.

    Positions that a token attends to must have been written, or be among `positions`.

    Returns the pool, and f32[N, T, d_model], finite but meaningless at padding. Shapes:
    tokens: i32[N, T]; positions: i32[N, T]; tables: i32[C, N, M].
    """
    num_blocks, block_size = pool[0]["k"].shape[:2]
    C, N, M = tables.shape
    slots = jnp.arange(M * block_size)
    masks = [
        visible_positions(positions, slots, window) for window in model.config.windows
    ]
    # Masking scores is not enough: a weight of 0 times a NaN in another sequence's
    # block is NaN. Positions that no token may attend to are replaced by 0.
    seen = [mask.any(axis=1)[:, :, None, None] for mask in masks]

    row, offset = jnp.divmod(jnp.maximum(positions, 0), block_size)
    block = jnp.take_along_axis(tables, row[None], axis=2, mode="clip")
    # Out of range and dropped; -1 would wrap around to the last block.
    block = jnp.where(positions[None] >= 0, block, num_blocks)
    new_pool = list(pool)

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        slot, group = divmod(layer, C)
        leaves = {
            name: new_pool[slot][name].at[block[group], offset].set(value, mode="drop")
            for name, value in (("k", k), ("v", v))
        }
        new_pool[slot] = leaves

        def read(leaf: Array) -> Array:
            blocks = leaf.at[tables[group]].get(mode="clip")
            return jnp.where(seen[group], blocks.reshape(N, -1, *leaf.shape[2:]), 0.0)

        return attention(q, read(leaves["k"]), read(leaves["v"]), masks[group])

    hidden = model.hidden(tokens, positions, attend)
    return tuple(new_pool), hidden
