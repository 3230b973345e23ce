"""The costs of a model's tokens, against published counts and plain sums."""

import json

import numpy as np
import pytest

from jaxkv.tools.model_config import NAMED_MODELS
from jaxkv.tools.plan.model_costs import (
    find_model_costs,
    make_model_costs,
    plain_costs,
)

LLAMA_8B, LLAMA_70B, QWEN3_8B, QWEN3_32B, DEEPSEEK_V3 = NAMED_MODELS.values()
SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads"),
    *("num_key_value_heads", "intermediate_size", "vocab_size"),
)


def config(model_type, sizes, **fields):
    return {"model_type": model_type, **dict(zip(SIZES, sizes, strict=False)), **fields}


MIXTRAL_8X7B = config(
    *("mixtral", (32, 4096, 32, 8, 14336, 32000)),
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
)
QWEN2_5_7B = config(
    *("qwen2", (28, 3584, 28, 4, 18944, 152064)),
    **{"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28},
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = config(
    *("qwen3_moe", (48, 2048, 32, 4, 6144, 151936)),
    **{"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128},
    **{"num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []},
    **{"sliding_window": None, "use_sliding_window": False},
)
# Its text_config lacks the vocabulary.
GEMMA3_27B = config(
    *("gemma3_text", (62, 5376, 32, 16, 21504)), head_dim=128, sliding_window=1024
)
GEMMA3_1B = config(
    *("gemma3_text", (26, 1152, 4, 1, 6912, 262144)),
    **{"head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6},
)
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | config(
    *("deepseek_v2", (27, 2048, 16, 16, 10944, 102400)),
    **{"moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2},
    **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None},
)

# Parameters in the weights files; those of norms, biases and gates, which are not
# matrices, per layer; and those outside the layers.
PUBLISHED = {
    "Llama 3.1 8B": (LLAMA_8B, 8_030_261_248, 2 * 4096, 4096),
    "Llama 3.1 70B": (LLAMA_70B, 70_553_706_496, 2 * 8192, 8192),
    "Qwen3 8B": (QWEN3_8B, 8_190_735_360, 2 * 4096 + 2 * 128, 4096),
    "Qwen3 32B": (QWEN3_32B, 32_762_123_264, 2 * 5120 + 2 * 128, 5120),
    "Mixtral 8x7B": (MIXTRAL_8X7B, 46_702_792_704, 2 * 4096, 4096),
    "Qwen2.5 7B": (QWEN2_5_7B, 7_615_616_512, 2 * 3584 + 36 * 128, 3584),
    "Qwen3 30B A3B": (QWEN3_30B_A3B, 30_532_122_624, 2 * 2048 + 2 * 128, 2048),
    "Gemma 3 1B": (GEMMA3_1B, 999_885_952, 4 * 1152 + 2 * 256, 1152),
    "Gemma 3 27B": (GEMMA3_27B, 27_009_346_304, 4 * 5376 + 2 * 128, 5376),
    # 58 layers have 256 router biases each.
    "DeepSeek V3": (
        DEEPSEEK_V3,
        671_026_419_200,
        2 * 7168 + 1536 + 512,
        7168 + 58 * 256,
    ),
    "DeepSeek V2 Lite": (DEEPSEEK_V2_LITE, 15_706_484_224, 2 * 2048 + 512, 2048),
}


def test_all_parameters_but_norms_and_biases_are_those_of_the_weights_files():
    for name, (model, published, in_layer, once) in PUBLISHED.items():
        costs = make_model_costs(model)
        vectors = model["num_hidden_layers"] * in_layer + once
        assert costs.num_parameters == published - vectors, name
        assert vectors < 0.0005 * published, name
        assert costs.notes == (), name


def test_bytes_of_a_tokens_kv():
    for model, kv_bytes in [
        (LLAMA_8B, 128 << 10),
        (LLAMA_70B, 320 << 10),
        (QWEN2_5_7B, 56 << 10),
        (QWEN3_30B_A3B, 96 << 10),
        (GEMMA3_27B, 62 * 2 * 16 * 128 * 2),
        (DEEPSEEK_V3, 61 * 576 * 2),
    ]:
        assert make_model_costs(model).kv_bytes_per_token == kv_bytes
    assert make_model_costs(LLAMA_8B, "float8_e4m3fn").kv_bytes_per_token == 64 << 10
    in_float32 = {**LLAMA_8B, "dtype": "float32", "torch_dtype": "bfloat16"}
    assert make_model_costs(in_float32).kv_bytes_per_token == 256 << 10


def test_devices_share_the_heads_but_not_less_than_one_and_not_a_latent():
    llama, deepseek = make_model_costs(LLAMA_8B), make_model_costs(DEEPSEEK_V3)
    of_llama = [llama.kv_bytes_per_token_on(n) >> 10 for n in (1, 2, 3, 8, 16)]
    assert of_llama == [128, 64, 48, 16, 16]
    assert deepseek.kv_bytes_per_token_on(8) == deepseek.kv_bytes_per_token
    assert llama.load_bytes(0, 1000, 8) == 1000 * (16 << 10)
    # Only the KV bytes per token of such a model are known.
    costs = plain_costs(1000)
    assert costs.kv_bytes_per_token == costs.kv_bytes_per_token_on(1) == 1000
    assert costs.load_bytes([0, 5], [7, 7]).tolist() == [7000, 2000]
    assert costs.prefill_flops(0, 100) == 0


def seen(position, window, is_chunked):
    """Count the tokens that a position attends to, one by one."""
    first = 0
    if window and is_chunked:
        first = position // window * window
    elif window:
        first = max(0, position - window + 1)
    return len(range(first, position + 1))


SMALL = config("llama", (6, 24, 4, 2, 40, 100), head_dim=8)
# What changes SMALL, and the window of each layer.
WINDOW = {"sliding_window": 5}
LAYER_TYPES = ["sliding_attention"] * 2 + ["full_attention"] * 4
WINDOWS = (
    ({}, [None] * 6),
    (WINDOW, [5] * 6),
    ({"model_type": "mistral", "sliding_window": None}, [None] * 6),
    (WINDOW | {"model_type": "gemma2"}, [5, None] * 3),
    (WINDOW | {"model_type": "cohere2", SIZES[0]: 8}, [5, 5, 5, None] * 2),
    (WINDOW | {"model_type": "gemma3_text"}, [5] * 5 + [None]),
    (WINDOW | {"sliding_window_pattern": 3}, [5, 5, None] * 2),
    (
        WINDOW
        | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4},
        [None] * 4 + [5] * 2,
    ),
    (WINDOW | {"layer_types": LAYER_TYPES}, [5, 5] + [None] * 4),
    (WINDOW | {"model_type": "gpt_oss"}, [5, None] * 3),
    ({"model_type": "llama4_text", "attention_chunk_size": 5}, [5, 5, 5, None, 5, 5]),
)


@pytest.mark.parametrize(("changes", "windows"), WINDOWS)
def test_flops_and_loads_are_those_of_each_token_and_layer_together(changes, windows):
    costs = make_model_costs({**SMALL, **changes})
    is_chunked = "attention_chunk_size" in changes
    matrices = 24 * 8 * 4 * 2 + 24 * 8 * 2 * 2 + 3 * 24 * 40

    def flops(start, stop):
        """2 FLOPs per parameter, and 2 * 2 * 8 per head and attended token."""
        total = 0
        for position in range(start, stop):
            for window in windows:
                pairs = seen(position, window, is_chunked)
                total += 2 * matrices + 4 * 2 * 2 * 8 * pairs
        return total

    spans = [(0, 0), (0, 1), (0, 5), (0, 17), (3, 4), (4, 11), (5, 10), (16, 40)]
    starts, stops = np.array(spans).T
    expected = [flops(start, stop) for start, stop in spans]
    assert costs.prefill_flops(starts, stops).tolist() == expected
    # A load brings the part of the prefix that the next token attends to.
    for num_tokens in range(13):
        needed = [seen(num_tokens, window, is_chunked) - 1 for window in windows]
        assert costs.load_bytes(0, num_tokens) == sum(needed) * 2 * 2 * 8 * 2
        # The device may hold the first tokens of that part.
        for start in range(num_tokens + 1):
            rest = sum(min(num_tokens - start, num_seen) for num_seen in needed)
            assert costs.load_bytes(start, num_tokens) == rest * 2 * 2 * 8 * 2


def test_layers_without_experts_are_counted_as_such():
    base = SMALL | {"num_experts": 4, "num_experts_per_tok": 2}
    base["moe_intermediate_size"] = 10
    dense, expert, router = 3 * 24 * 40, 3 * 24 * 10, 24 * 4
    attention = 6 * (24 * 8 * 4 * 2 + 24 * 8 * 2 * 2)

    def check(changes, num_sparse, shared=0):
        costs = make_model_costs({**base, **changes})
        fixed = attention + (6 - num_sparse) * dense
        sparse = router + 3 * 24 * shared
        assert costs.num_prefill_parameters == fixed + num_sparse * (
            sparse + 2 * expert
        )
        assert costs.num_parameters == 2 * 2400 + fixed + num_sparse * (
            sparse + 4 * expert
        )

    check({}, 6)
    check({"first_k_dense_replace": 2}, 4)
    check({"mlp_only_layers": [0, 5], "decoder_sparse_step": 1}, 4)
    check({"decoder_sparse_step": 2}, 3)
    check({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 2)
    check({"mlp_layer_types": ["dense"] + ["sparse"] * 5}, 5)
    check({"n_shared_experts": 3}, 6, shared=30)
    check({"shared_expert_intermediate_size": 7}, 6, shared=7)


def test_a_vision_models_language_part_is_read_and_named_by_its_folder(tmp_path):
    folder = tmp_path / "gemma-3-27b-it"
    folder.mkdir()
    config = {"model_type": "gemma3", "vision_config": {}, "text_config": GEMMA3_27B}
    (folder / "config.json").write_text(json.dumps(config))
    costs = find_model_costs(str(folder / "config.json"))
    assert costs == find_model_costs(str(folder))
    assert costs.name == "gemma-3-27b-it"
    assert costs.num_parameters == make_model_costs(GEMMA3_27B).num_parameters
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA_8B))
    assert find_model_costs(str(tmp_path / "llama.json")).name == "llama"
    costs = make_model_costs({**LLAMA_8B, "model_type": "novel"})
    assert costs.num_parameters == make_model_costs(LLAMA_8B).num_parameters
    assert costs.notes == (
        "model_type 'novel' is not known and taken to be built like Llama",
    )


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1}
REFUSED = (
    ({"num_hidden_layers": None}, r"has no 'num_hidden_layers'; .*--kv-bytes-per"),
    ({"intermediate_size": None}, "has no 'intermediate_size'; add what is miss"),
    ({"num_attention_heads": None}, "has no 'num_attention_heads'"),
    ({"hidden_size": "4096"}, "hidden_size='4096' must be a whole number"),
    ({"layer_types": ["full_attention"]}, "must have an entry for each of the 32"),
    (
        {"layer_types": ["linear_attention"] * 32},
        "layer of type 'linear_attention' is not known here; jaxkv plan takes",
    ),
    ({"mamba_d_state": 16}, "mamba_d_state=16: a model with layers that keep a st"),
    ({"num_kv_shared_layers": 10}, "layers that keep different KV is not known"),
    ({"kv_lora_rank": 512}, "has no 'qk_rope_head_dim'"),
    ({"sliding_window": 0}, "sliding_window=0 must be a whole number from 1"),
    (
        {"num_experts": 4, "num_experts_per_tok": 5},
        "num_experts_per_tok=5 must be at most the 4 experts",
    ),
    ({"num_experts": 4}, "has no 'num_experts_per_tok' or 'experts_per_token'"),
    ({"torch_dtype": "fast"}, "'fast' is no dtype"),
    (
        EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": 3},
        "mlp_only_layers=3 must be a list of layers",
    ),
    ({"num_hidden_layers": 10**6}, "num_layers=1000000 must be at most 10000"),
    ({"vocab_size": 10**400}, "vocab_size=1000.*0 must be a whole number"),
    ({"head_dim": 10**8}, "bytes of KV a token are more than"),
    (
        EXPERTS | {"first_k_dense_replace": "3"},
        "first_k_dense_replace='3' must be a whole number",
    ),
)


def test_a_configuration_that_does_not_do_is_refused():
    for changes, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make_model_costs({**LLAMA_8B, **changes})
