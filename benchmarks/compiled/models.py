"""The pools of a model, from its Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from benchmarks.compiled.pools import LANES, PoolShape, align
from jaxkv.tools.model_config import dtype_of, kv_shape_of, number_of


def pools_of_model(
    config: Mapping[str, Any],
    block_size: int,
    num_blocks: int,
    dtype: str | None = None,
) -> tuple[PoolShape, ...]:
    """Return a model's pool as tpu-inference lays it out, and as plain arrays.

    The latter are k and v apart, or the latent of MLA.
    """
    layers = number_of(config, "num_hidden_layers")
    dtype = dtype or dtype_of(config)
    packing = max(1, 4 // jnp.dtype(dtype).itemsize)
    heads, head_dim = kv_shape_of(config)
    if not heads:
        rows = align(block_size, packing) // packing
        padded = (num_blocks, rows, packing, align(head_dim, LANES))
        latent = (num_blocks, block_size, head_dim)
        return (
            PoolShape("tpu-inference, MLA", padded, layers, dtype=dtype),
            PoolShape("latent", latent, layers, dtype=dtype),
        )
    apart = (num_blocks, block_size, heads, head_dim)
    if head_dim == LANES // 2:
        # tpu-inference puts K and V of a head side by side, which fills the lanes.
        pairs = align(heads, packing) // packing
    else:
        pairs = align(2 * heads, packing) // packing
    packed = (num_blocks, block_size, pairs, packing, align(head_dim, LANES))
    return (
        PoolShape("tpu-inference", packed, layers, dtype=dtype),
        PoolShape("k and v apart", apart, 2 * layers, dtype=dtype),
    )
