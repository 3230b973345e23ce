"""The cost of a model's tokens: bytes of KV, parameters, FLOPs of prefill.

All of it follows from the shapes in a Hugging Face ``config.json``. Each parameter of a
matrix that a token passes is a multiplication and an addition; attention multiplies its
query with the key of each token that it sees, and the weights with their values. Left
out, each well under 1%: norms, biases, activations, softmax, and the output layer,
which a prefill needs for its last token only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxkv._util import shown
from jaxkv.tools.model_config import (
    check_dtype,
    dtype_of,
    find_config,
    kv_shape_of,
    number_of,
)

_MAX_LAYERS = 10_000
_MAX_KV_BYTES = 1 << 30
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
# By kind of layer: the key of the window that limits attention.
_WINDOWS = {_FULL: None, _SLIDING: "sliding_window", _CHUNKED: "attention_chunk_size"}


@dataclasses.dataclass(frozen=True)
class AttentionLayers:
    """Layers with the same attention."""

    num_layers: int
    kv_bytes_per_token: int  # Bytes of KV of a token in one layer
    pair_flops: int  # FLOPs of one layer for a token and one that it sees
    window: int | None = None  # Tokens that a token sees, with itself; None for all
    is_chunked: bool = False  # Whether windows begin at multiples of their size
    num_kv_heads: int = 0  # Which devices share; 0 for a latent, which each has

    def bytes_on(self, num_devices: int) -> int:
        """Return the KV bytes of a token on each device that shares the heads.

        A device has at least one head, and all of a latent.
        """
        num_bytes = self.num_layers * self.kv_bytes_per_token
        if not self.num_kv_heads:
            return num_bytes
        heads = -(-self.num_kv_heads // num_devices)
        return num_bytes // self.num_kv_heads * heads

    def count_pairs(self, num_tokens: ArrayLike) -> NDArray[np.int64]:
        """Count the tokens that the first tokens of a prompt see, over all of these.

        Shapes: num_tokens: int[...].
        """
        n: NDArray[np.int64] = np.asarray(num_tokens, np.int64)
        if self.window is None:
            return _triangle(n)
        size = self.window
        if self.is_chunked:
            return n // size * (size * (size + 1) // 2) + _triangle(n % size)
        short = np.minimum(n, size)
        return _triangle(short) + (n - short) * size

    def count_needed(self, num_tokens: ArrayLike) -> NDArray[np.int64]:
        """Count the tokens whose KV is needed to go on after a prefix.

        Shapes: num_tokens: int[...].
        """
        n = np.asarray(num_tokens, np.int64)
        if self.window is None:
            return n
        # The next token is one of those in its window.
        return n % self.window if self.is_chunked else np.minimum(n, self.window - 1)


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """The cost of a model's tokens."""

    name: str  # For display
    kv_dtype: str
    num_parameters: int  # Parameters of all matrices
    # That a token of a prompt uses: of the experts the chosen ones, and neither
    # embedding nor output layer.
    num_prefill_parameters: int
    layers: tuple[AttentionLayers, ...]  # The layers, by attention
    weight_bytes: int | None = None  # Bytes of all parameters; None if unknown
    notes: tuple[str, ...] = ()  # What the configuration does not say

    @property
    def kv_bytes_per_token(self) -> int:
        return self.kv_bytes_per_token_on(1)

    def kv_bytes_per_token_on(self, num_devices: int) -> int:
        """Return the bytes of a token's KV on each of the devices that share it."""
        return sum(layer.bytes_on(num_devices) for layer in self.layers)

    def load_bytes(
        self, start: ArrayLike, stop: ArrayLike, num_devices: int = 1
    ) -> NDArray[np.int64]:
        """Return the bytes that a device loads to go on after a prefix.

        That is the KV of the tokens from `start` on, the device having those before;
        of a layer with a window, only what the next token sees.

        Returns i64[...]. Shapes: start: int[...]; stop: int[...].
        """
        length = np.asarray(stop, np.int64) - np.asarray(start, np.int64)
        total = np.zeros(length.shape, np.int64)
        for layer in self.layers:
            num_needed = np.minimum(layer.count_needed(stop), length)
            total = total + layer.bytes_on(num_devices) * num_needed
        return total

    def prefill_flops(self, start: ArrayLike, stop: ArrayLike) -> NDArray[np.float64]:
        """Return the FLOPs to compute tokens of a prompt, those before being there.

        Returns f64[...]. Shapes: start: int[...]; stop: int[...].
        """
        first, last = np.asarray(start, np.int64), np.asarray(stop, np.int64)
        flops = 2.0 * self.num_prefill_parameters * (last - first)
        for layer in self.layers:
            pairs = layer.count_pairs(last) - layer.count_pairs(first)
            flops = flops + float(layer.num_layers * layer.pair_flops) * pairs
        return np.asarray(flops, np.float64)


def plain_costs(kv_bytes_per_token: int) -> ModelCosts:
    """Make the costs of a model if only its bytes of KV are known.

    Its parameters and FLOPs are 0.
    """
    if not 1 <= kv_bytes_per_token <= _MAX_KV_BYTES:
        raise ValueError(f"{kv_bytes_per_token=} must be from 1 to {_MAX_KV_BYTES}")
    layers = (AttentionLayers(1, kv_bytes_per_token, 0),)
    return ModelCosts("a model", "", 0, 0, layers)


def find_model_costs(model: str, kv_dtype: str | None = None) -> ModelCosts:
    """Compute what the tokens of a model cost.

    >>> find_model_costs("llama-3.1-8b").kv_bytes_per_token
    131072
    """
    name, config = find_config(model)
    return make_model_costs(config, kv_dtype, name)


def make_model_costs(
    config: Mapping[str, Any], kv_dtype: str | None = None, name: str = "model"
) -> ModelCosts:
    """Compute what a model's tokens cost.

    >>> llama_3_8b = {
    ...     "model_type": "llama",
    ...     "num_hidden_layers": 32,
    ...     "hidden_size": 4096,
    ...     "num_attention_heads": 32,
    ...     "num_key_value_heads": 8,
    ...     "intermediate_size": 14336,
    ...     "vocab_size": 128256,
    ... }
    >>> costs = make_model_costs(llama_3_8b)
    >>> costs.kv_bytes_per_token, costs.num_parameters
    (131072, 8029995008)
    >>> [f"{costs.prefill_flops(at, at + 1000):.3g}" for at in (0, 9000)]
    ['1.42e+13', '1.89e+13']
    """
    kind = config.get("model_type")
    family = kind if isinstance(kind, str) else ""
    # Null stands for a default.
    values = {key: value for key, value in config.items() if value is not None}
    config = {**_DEFAULTS.get(family, {}), **values}
    _refuse(config, family)
    notes = []
    if family not in _FAMILIES:
        named = f"model_type {shown(kind)}" if kind else "a model without model_type"
        notes.append(f"{named} is not known and taken to be built like Llama")
    num_layers = number_of(config, "num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise ValueError(f"{num_layers=} must be at most {_MAX_LAYERS}")
    hidden = number_of(config, "hidden_size")
    dtype = check_dtype(kv_dtype) if kv_dtype else dtype_of(config)
    attention, per_layer = _attention(config, hidden, dtype)
    kinds = _layer_kinds(config, family, num_layers)
    layers = tuple(
        _attention_of(kind, kinds.count(kind), attention, config)
        for number, kind in enumerate(kinds)
        if kind not in kinds[:number]
    )
    kv_bytes = num_layers * attention.kv_bytes_per_token
    if kv_bytes > _MAX_KV_BYTES:
        raise ValueError(
            f"{kv_bytes} bytes of KV a token are more than the {_MAX_KV_BYTES} of any "
            "model"
        )
    all_mlp, active_mlp = _mlps(config, family, num_layers, hidden)
    vocabulary = number_of(config, "vocab_size") * hidden
    is_tied = config.get("tie_word_embeddings", family.startswith(_TIED))
    ends = vocabulary if is_tied else 2 * vocabulary
    num_parameters = ends + num_layers * per_layer + all_mlp
    return ModelCosts(
        name=name,
        kv_dtype=dtype,
        num_parameters=num_parameters,
        num_prefill_parameters=num_layers * per_layer + active_mlp,
        layers=layers,
        weight_bytes=num_parameters * _weight_bits(config) // 8,
        notes=tuple(notes),
    )


def _weight_bits(config: Mapping[str, Any]) -> int:
    """Return the bits of a parameter: of the model's dtype, unless it is quantized."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return 8 * jnp.dtype(dtype_of(config)).itemsize
    bits = quantization.get("bits")
    if isinstance(bits, int) and 1 <= bits <= 32:
        return bits
    return 4 if quantization.get("quant_method") in ("awq", "gptq", "mxfp4") else 8


_FAMILIES = frozenset(
    (
        *("llama", "llama4", "llama4_text", "smollm3", "internlm2", "exaone4"),
        *("mistral", "ministral", "mixtral", "phi3", "granite", "granitemoe"),
        *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl"),
        *("qwen2_5_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_text"),
        *("qwen3_vl_moe_text", "gemma", "gemma2", "gemma3", "gemma3_text"),
        *("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4", "glm4_moe", "gpt_oss"),
        *("olmo2", "olmoe", "cohere", "cohere2"),
    )
)
"""Values of model_type that are built as this file says: with a gated MLP."""

_TIED = ("gemma", "cohere")
"""Families whose output layer is the embedding unless their configuration says no."""

# Defaults that configurations of these families omit.
_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma": {"head_dim": 256},
}

# One in this many layers sees all tokens, the others a window.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}

_STATE = "layers that keep a state in place of the KV"
_UNEVEN = "layers that keep different KV"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("ssm_cfg", "state_size", "ssm_state_size", "mamba_d_state"),
            *("mamba_num_heads", "linear_num_key_heads", "linear_attn_config"),
            *("layers_block_type", "hybrid_override_pattern", "attn_type_list"),
            *("rwkv_version", "lru_width"),
        ),
        _STATE,
    ),
    **dict.fromkeys(
        ("num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads"),
        _UNEVEN,
    ),
    "index_topk": "attention that chooses what it sees",
}
"""Keys of what this file does not know."""

_HINT = "jaxkv plan takes the bytes of a token's KV in its place (--kv-bytes-per-token)"


def _refuse(config: Mapping[str, Any], family: str) -> None:
    """Refuse what is built otherwise, or not described."""
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ValueError(
                f"{key}={shown(config[key])}: a model with {what} is not known here; "
                f"{_HINT}"
            )
    wanted = "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"
    missing = [key for key in wanted if key not in config]
    if not {"intermediate_size", "moe_intermediate_size"} & config.keys():
        missing.append("intermediate_size")
    if missing:
        raise ValueError(
            f"the model's configuration (model_type {shown(family)}) has no "
            f"{', '.join(map(repr, missing))}; add what is missing; {_HINT}"
        )


def _attention(
    config: Mapping[str, Any], hidden: int, dtype: str
) -> tuple[AttentionLayers, int]:
    heads, kv = number_of(config, "num_attention_heads"), kv_shape_of(config)
    kv_bytes = kv.num_values * jnp.dtype(dtype).itemsize
    if kv.num_heads:
        parameters = 2 * hidden * kv.head_dim * (heads + kv.num_heads)
        pair_flops = 4 * heads * kv.head_dim
        layer = AttentionLayers(1, kv_bytes, pair_flops, num_kv_heads=kv.num_heads)
        return layer, parameters
    rank, rope = (
        number_of(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim")
    )
    key_dim = number_of(config, "qk_nope_head_dim") + rope
    value_dim = number_of(config, "v_head_dim")
    if "q_lora_rank" in config:
        query_rank = number_of(config, "q_lora_rank")
        queries = query_rank * (hidden + heads * key_dim)
    else:
        queries = hidden * heads * key_dim
    down = hidden * (rank + rope)
    up = rank * heads * (key_dim - rope + value_dim)
    parameters = queries + down + up + heads * value_dim * hidden
    pair_flops = 2 * heads * (key_dim + value_dim)
    return AttentionLayers(1, kv_bytes, pair_flops), parameters


def _attention_of(
    kind: Any, num_layers: int, attention: AttentionLayers, config: Mapping[str, Any]
) -> AttentionLayers:
    if not isinstance(kind, str) or kind not in _WINDOWS:
        raise ValueError(f"a layer of type {shown(kind)} is not known here; {_HINT}")
    key = _WINDOWS[kind]
    window = None if key is None else number_of(config, key)
    return dataclasses.replace(
        attention, num_layers=num_layers, window=window, is_chunked=kind == _CHUNKED
    )


def _layer_kinds(config: Mapping[str, Any], family: str, num_layers: int) -> list[Any]:
    layers = range(num_layers)
    if "layer_types" in config:
        return _per_layer(config, "layer_types", num_layers)
    if family.startswith("llama4"):
        # Every fourth layer, which has no rotary embedding, sees all.
        has_ropes: list[Any] = [(layer + 1) % 4 != 0 for layer in layers]
        if config.get("no_rope_layers"):
            has_ropes = _per_layer(config, "no_rope_layers", num_layers)
        return [_CHUNKED if has_rope else _FULL for has_rope in has_ropes]
    if family == "gpt_oss":
        return [_FULL if layer % 2 else _SLIDING for layer in layers]
    if "sliding_window" not in config or config.get("use_sliding_window") is False:
        return [_FULL] * num_layers
    if family in _PATTERNS or "sliding_window_pattern" in config:
        key = "sliding_window_pattern"
        every = number_of(config, key) if key in config else _PATTERNS[family]
        return [_SLIDING if (layer + 1) % every else _FULL for layer in layers]
    if family.startswith("qwen"):
        if not config.get("use_sliding_window"):
            return [_FULL] * num_layers
        first = _count(config, "max_window_layers", 28)
        return [_SLIDING if layer >= first else _FULL for layer in layers]
    return [_SLIDING] * num_layers


def _mlps(
    config: Mapping[str, Any], family: str, num_layers: int, hidden: int
) -> tuple[int, int]:
    """Return the parameters of all MLPs, and those that a token uses."""
    keys = "num_local_experts", "num_experts", "n_routed_experts"
    if not any(key in config for key in keys):
        parameters = num_layers * 3 * hidden * number_of(config, "intermediate_size")
        return parameters, parameters
    num_experts = number_of(config, *keys)
    chosen = number_of(config, "num_experts_per_tok", "experts_per_token")
    if chosen > num_experts:
        raise ValueError(
            f"num_experts_per_tok={chosen} must be at most the {num_experts} experts"
        )
    width = number_of(config, "moe_intermediate_size", "intermediate_size")
    if family.startswith("llama4"):
        shared = width
    elif "shared_expert_intermediate_size" in config:
        shared = _count(config, "shared_expert_intermediate_size")
    else:
        shared = width * _count(config, "n_shared_experts")
    is_sparse = _sparse_layers(config, family, num_layers)
    num_dense = num_layers - sum(is_sparse)
    dense = 0
    if num_dense:
        dense = (
            3 * hidden * number_of(config, "intermediate_size_mlp", "intermediate_size")
        )
    router = hidden * num_experts
    expert = 3 * hidden * width
    fixed = num_dense * dense + sum(is_sparse) * (router + 3 * hidden * shared)
    return (
        fixed + sum(is_sparse) * num_experts * expert,
        fixed + sum(is_sparse) * chosen * expert,
    )


def _sparse_layers(
    config: Mapping[str, Any], family: str, num_layers: int
) -> list[bool]:
    layers = range(num_layers)
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return [kind == "sparse" for kind in kinds]
    if family.startswith("llama4"):
        every = _count(config, "interleave_moe_layer_step", 1) or 1
        chosen = _list(config, "moe_layers") or range(every - 1, num_layers, every)
        return [layer in chosen for layer in layers]
    if "decoder_sparse_step" in config:
        every = _count(config, "decoder_sparse_step") or 1
        dense = _list(config, "mlp_only_layers")
        return [(layer + 1) % every == 0 and layer not in dense for layer in layers]
    first = _count(config, "first_k_dense_replace")
    every = _count(config, "moe_layer_freq", 1) or 1
    return [layer >= first and layer % every == 0 for layer in layers]


def _per_layer(config: Mapping[str, Any], key: str, num_layers: int) -> list[Any]:
    values = config[key]
    if not isinstance(values, list) or len(values) != num_layers:
        raise ValueError(
            f"{key}={shown(values)} must have an entry for each of the {num_layers} "
            "layers"
        )
    return values


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    value = config.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key}={shown(value)} must be a list of layers")
    return value


def _count(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """Return a number that may be 0, or not be there."""
    value = config.get(key, default)
    return 0 if value == 0 and type(value) is int else number_of({key: value}, key)


def _triangle(n: NDArray[np.int64]) -> NDArray[np.int64]:
    total: NDArray[np.int64] = n * (n + 1) // 2
    return total
