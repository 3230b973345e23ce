"""A model's Hugging Face configuration: a few by name, others from their files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxkv._util import did_you_mean, shown, shown_name
from jaxkv._util.files import read_input

_LIMIT = 1 << 30  # Larger than any size of a model.
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


def find_config(model: str) -> tuple[str, Mapping[str, Any]]:
    if model in NAMED_MODELS:
        return model, NAMED_MODELS[model]
    path = pathlib.Path(model)
    if not path.exists() and "/" not in model and not model.endswith(".json"):
        hint = did_you_mean(model, list(NAMED_MODELS))
        raise FileNotFoundError(
            f"{shown(model)} is neither a file nor a known model: {hint}"
        )
    config = read_config(path)
    name = path.name if path.is_dir() or path.name != "config.json" else ""
    name = name or path.absolute().parent.name
    return shown_name(name.removesuffix(".json")), config


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    """Read a ``config.json``; of a folder, the one in it."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_input(path, 16 << 20).decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(str(path))} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{shown(str(path))} must hold a JSON object")
    # Multimodal models keep the language model's part apart.
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def number_of(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of several keys that is there, which must be a size."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value < _LIMIT:
            raise ValueError(
                f"{key}={shown(value)} must be a whole number from 1 to {_LIMIT - 1}"
            )
        return value
    raise ValueError(f"the model's configuration has no {' or '.join(map(repr, keys))}")


class KvShape(NamedTuple):
    """The KV of a token in one layer: a key and a value a head, or a latent of MLA."""

    num_heads: int  # 0 for a latent
    head_dim: int  # Numbers of a head, or of the latent with the rotary part of its key

    @property
    def num_values(self) -> int:
        return max(2 * self.num_heads, 1) * self.head_dim


def kv_shape_of(config: Mapping[str, Any]) -> KvShape:
    if config.get("kv_lora_rank") is not None:
        rank = number_of(config, "kv_lora_rank")
        return KvShape(0, rank + number_of(config, "qk_rope_head_dim"))
    num_heads = number_of(config, "num_key_value_heads", "num_attention_heads")
    if config.get("head_dim") is not None:
        return KvShape(num_heads, number_of(config, "head_dim"))
    try:
        hidden = number_of(config, "hidden_size")
        heads = number_of(config, "num_attention_heads")
    except ValueError as error:
        raise ValueError(f"{error}, nor 'head_dim'") from error
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden} must be a multiple of num_attention_heads={heads}, "
            "or head_dim be given"
        )
    return KvShape(num_heads, hidden // heads)


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the name of the model's dtype, bfloat16 if it is not there."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return check_dtype(str(name).removeprefix("torch."))


def check_dtype(name: str) -> str:
    """Return a dtype's name if it is one of whole bytes."""
    try:
        dtype = jnp.dtype(name)
    except TypeError as error:
        raise ValueError(
            f"{shown(name)} is no dtype, such as bfloat16 or int8"
        ) from error
    if dtype.kind not in "fiuV" or "int4" in name or "int2" in name:
        raise ValueError(f"{shown(name)} is no dtype of numbers of whole bytes")
    return name
