"""The pools of a model, from its Hugging Face configuration."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxkv.tools.bench.compiled.pools import LANES, PoolShape, align


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    """Read a ``config.json``; of a folder, the one in it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON object.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object")
    # Models that see or hear keep the language model's part apart.
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def pools_of_model(
    config: Mapping[str, Any],
    block_size: int,
    num_blocks: int,
    dtype: str | None = None,
) -> tuple[PoolShape, ...]:
    """Lay out a model's KV as the engines do.

    Args:
        config: The model's configuration.
        block_size: Tokens of a block.
        num_blocks: Blocks of the pool.
        dtype: Name of the dtype of the cache; None for the model's own.

    Returns:
        tpu-inference's layout, and the plain one: k and v apart, or the latent of MLA.

    Raises:
        ValueError: The configuration lacks a key, or has an unusable one.

    Example:
        >>> config = {
        ...     "num_hidden_layers": 2,
        ...     "num_attention_heads": 8,
        ...     "num_key_value_heads": 2,
        ...     "hidden_size": 512,
        ... }
        >>> [pool.shape for pool in pools_of_model(config, 16, 100)]
        [(100, 16, 1, 2, 128), (100, 16, 2, 64)]
    """
    layers = _number(config, "num_hidden_layers")
    dtype = dtype or _dtype(config)
    packing = max(1, 4 // jnp.dtype(dtype).itemsize)
    if "kv_lora_rank" in config and config["kv_lora_rank"] is not None:
        size = _number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")
        rows = align(block_size, packing) // packing
        padded = (num_blocks, rows, packing, align(size, LANES))
        latent = (num_blocks, block_size, size)
        return (
            PoolShape("tpu-inference, MLA", padded, layers, dtype=dtype),
            PoolShape("latent", latent, layers, dtype=dtype),
        )
    heads = _number(config, "num_key_value_heads", "num_attention_heads")
    head_dim = _head_dim(config)
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


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return _number(config, "head_dim")
    try:
        hidden = _number(config, "hidden_size")
        heads = _number(config, "num_attention_heads")
    except ValueError as error:
        raise ValueError(f"{error}, nor 'head_dim'") from error
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}, "
            "or head_dim be given"
        )
    return hidden // heads


def _number(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of several keys that is there, which must be a size."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{key}={value!r} must be a whole number from 1")
        return value
    raise ValueError(f"the model's configuration has no {' or '.join(map(repr, keys))}")


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return check_dtype(str(name).removeprefix("torch."))


def check_dtype(name: str) -> str:
    """Return a dtype's name if it is one of whole bytes.

    Raises:
        ValueError: It is none.
    """
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise ValueError(f"{name!r} is no dtype, such as bfloat16 or int8") from error
    if dtype.kind not in "fiuV" or "int4" in name or "int2" in name:
        raise ValueError(f"{name!r} is no dtype of numbers of whole bytes")
    return name
