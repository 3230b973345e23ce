"""Models that go by a name, for who has no ``config.json`` at hand."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxkv._util import did_you_mean, shown
from jaxkv.tools.replay.model_costs import (
    ModelCosts,
    make_model_costs,
    read_model_costs,
)

_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def _like_llama(family: str, *sizes: int) -> dict[str, Any]:
    return {"model_type": family, **dict(zip(_KEYS, sizes, strict=True))}


NAMED_MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama-3.1-8b": _like_llama("llama", 32, 4096, 32, 8, 128, 14336, 128256),
        "llama-3.1-70b": _like_llama("llama", 80, 8192, 64, 8, 128, 28672, 128256),
        "qwen3-8b": _like_llama("qwen3", 36, 4096, 32, 8, 128, 12288, 151936),
        "qwen3-32b": _like_llama("qwen3", 64, 5120, 64, 8, 128, 25600, 151936),
        "deepseek-v3": {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "vocab_size": 129280,
        },
    }
)
"""The sizes in their configurations, by name."""


def find_model_costs(model: str, kv_dtype: str | None = None) -> ModelCosts:
    """Compute what the tokens of a model cost.

    Args:
        model: A name of `NAMED_MODELS`, or a ``config.json`` or the folder with it.
        kv_dtype: Name of the dtype of the KV; None for the model's own.

    Raises:
        OSError: There is neither such a name nor such a file.
        ValueError: What is read describes no model.

    Example:
        >>> find_model_costs("llama-3.1-8b").kv_bytes_per_token
        131072
    """
    if model in NAMED_MODELS:
        return make_model_costs(NAMED_MODELS[model], kv_dtype, model)
    path = pathlib.Path(model)
    if not path.exists() and "/" not in model and not model.endswith(".json"):
        hint = did_you_mean(model, list(NAMED_MODELS))
        raise FileNotFoundError(
            f"there is no file {shown(model)}, nor such a name: {hint}"
        )
    return read_model_costs(path, kv_dtype)
