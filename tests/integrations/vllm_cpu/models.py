"""Small models with random weights, made here: nothing is fetched."""

import json

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 512, 256, 4, 2, 128, 2
# tpu-inference takes the hidden size of a head for the size in a draft's cache.
DRAFT_HEADS = HIDDEN // HEAD_DIM


COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=512,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    max_position_embeddings=4096,
    bos_token_id=256,
    eos_token_id=257,
    pad_token_id=257,
)
UNTIED = dict(num_hidden_layers=LAYERS, tie_word_embeddings=False)
DEEP = UNTIED | {"num_hidden_layers": 7}
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=256)
# The names of the configuration and the model in transformers, and what is not common.
KINDS = {
    "llama": ("LlamaConfig", "Llama", UNTIED),
    # EAGLE-3 needs seven layers, to read three of them.
    "deep": ("LlamaConfig", "Llama", DEEP),
    # Its first layer does all, so that a draft model may copy it.
    "shallow": ("LlamaConfig", "Llama", DEEP | {"num_attention_heads": DRAFT_HEADS}),
    "experts": (
        *("Qwen3MoeConfig", "Qwen3Moe"),
        UNTIED | EXPERTS | dict(num_experts=4, norm_topk_prob=True),
    ),
    # With a layer for multi-token prediction.
    "predictor": (
        *("Glm4MoeConfig", "Glm4Moe"),
        EXPERTS | dict(num_hidden_layers=LAYERS, n_routed_experts=4),
    ),
    # Without experts; the latents are as wide as the real ones.
    "latents": (
        *("DeepseekV2Config", "DeepseekV2"),
        UNTIED
        | dict(first_k_dense_replace=LAYERS, q_lora_rank=None, kv_lora_rank=512)
        | dict(qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, head_dim=64)
        | dict(num_key_value_heads=HEADS),
    ),
    # Three gated delta nets and a layer of attention.
    "deltas": (
        *("Qwen3_5TextConfig", "Qwen3_5"),
        UNTIED
        | dict(linear_num_key_heads=2, linear_num_value_heads=8)
        | dict(linear_key_head_dim=64, linear_value_head_dim=64)
        | dict(num_hidden_layers=2 * LAYERS)
        | dict(layer_types=[*["linear_attention"] * 3, "full_attention"]),
    ),
    # Its layers attend in turn to all tokens and to a window of 32.
    "hybrid": (
        *("Gemma3TextConfig", "Gemma3"),
        dict(num_hidden_layers=2 * LAYERS, sliding_window=32)
        | dict(layer_types=["sliding_attention", "full_attention"] * LAYERS)
        | dict(query_pre_attn_scalar=HEAD_DIM),
    ),
}


def make_model(folder, kind, dtype, seed=0):
    """Write a model of `KINDS` with a tokenizer of bytes."""
    import torch
    import transformers

    config_name, model_name, options = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**COMMON | options)
    model = getattr(transformers, f"{model_name}ForCausalLM")(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if kind == "shallow" and _is_silent(name):
                weights.zero_()
            elif weights.ndim == 2 or "experts" in name:
                # Large enough for answers that differ.
                weights.normal_(0, 0.0625 if "embed" in name else 0.15)
            elif name.endswith("A_log"):
                # States fade within tens or hundreds of tokens, not at once.
                weights.uniform_(0.002, 0.05).log_()
            elif kind == "hybrid" and "post_" in name:
                # Its head is its embedding: without louder layers it would only
                # repeat the last token, whatever it attends to.
                weights.fill_(3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if kind == "predictor":
        _add_predictor(folder)
    _make_tokenizer(folder)
    (folder / "generation_config.json").write_text("{}")


def _is_silent(name):
    """Return whether a weight writes the output of a layer after the first."""
    return ".layers.0." not in name and name.endswith(
        ("o_proj.weight", "down_proj.weight")
    )


def _add_predictor(folder):
    """Add a layer for multi-token prediction, like the last layer."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    last, added = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, added)] = weights[name].clone()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{added}{name}.weight"] = torch.ones(HIDDEN)
    head, embeddings = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    weights[f"{added}shared_head.head.weight"] = head.clone()
    weights[f"{added}embed_tokens.weight"] = embeddings.clone()
    weights[f"{added}eh_proj.weight"] = 0.1 * torch.randn(HIDDEN, 2 * HIDDEN)
    save_file(weights, path, metadata={"format": "pt"})


def make_draft(folder, target, *, is_copy=False):
    """Write an EAGLE-3 draft model of a Llama: one layer, with the target's head.

    Its layer is random, or reads embeddings only and is a copy of the target's first.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    config |= {
        "architectures": ["Eagle3LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "num_attention_heads": DRAFT_HEADS,
        "norm_before_residual": is_copy,
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    of_target = load_file(target / "model.safetensors")
    head = of_target["lm_head.weight"]
    shapes = {"fc": (HIDDEN, 3 * HIDDEN)}
    shapes |= {f"midlayer.self_attn.{n}_proj": (HIDDEN, 2 * HIDDEN) for n in "qkv"}
    shapes["midlayer.self_attn.o_proj"] = HIDDEN, HIDDEN
    shapes |= {f"midlayer.mlp.{n}_proj": (512, HIDDEN) for n in ("gate", "up")}
    shapes["midlayer.mlp.down_proj"] = HIDDEN, 512
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    weights = {
        f"{name}.weight": 0.1 * torch.randn(*shape) for name, shape in shapes.items()
    }
    weights |= {f"midlayer.{name}.weight": torch.ones(HIDDEN) for name in norms}
    weights["norm.weight"] = torch.ones(HIDDEN)
    if is_copy:
        for name in shapes.keys() - {"fc"}:
            copied = of_target[name.replace("midlayer", "model.layers.0") + ".weight"]
            width = shapes[name][1] - copied.shape[1]  # Of the hidden states.
            weights[f"{name}.weight"] = torch.nn.functional.pad(copied, (0, width))
        weights["midlayer.hidden_norm.weight"] = torch.zeros(HIDDEN)
    weights = {name: value.to(head.dtype) for name, value in weights.items()}
    no_shift = torch.zeros(VOCABULARY, dtype=torch.int64)
    weights |= {"lm_head.weight": head, "d2t": no_shift}
    save_file(weights, folder / "model.safetensors")


def make_flash_draft(folder, target):
    """Write a random DFlash draft model of a Llama, with the target's head."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = json.loads((target / "config.json").read_text())
    config |= {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 1,
        "num_attention_heads": DRAFT_HEADS,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 3, 5]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    shapes = {"fc": (HIDDEN, 3 * HIDDEN)}
    shapes |= {f"layers.0.self_attn.{n}_proj": (HIDDEN, HIDDEN) for n in "qkvo"}
    shapes |= {f"layers.0.mlp.{n}_proj": (512, HIDDEN) for n in ("gate", "up")}
    shapes["layers.0.mlp.down_proj"] = HIDDEN, 512
    weights = {name: 0.1 * torch.randn(*shape) for name, shape in shapes.items()}
    norms = [f"layers.0.{name}layernorm" for name in ("input_", "post_attention_")]
    weights |= {name: torch.ones(HIDDEN) for name in (*norms, "norm", "hidden_norm")}
    of_heads = (f"layers.0.self_attn.{name}_norm" for name in "qk")
    weights |= {name: torch.ones(HEAD_DIM) for name in of_heads}
    weights = {f"{k}.weight": v.to(torch.bfloat16) for k, v in weights.items()}
    save_file(weights, folder / "model.safetensors")


def make_adapter(folder, seed):
    """Write a LoRA adapter of the Llama."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    widths = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    weights = {}
    for layer in range(LAYERS):
        for name, width in widths.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{path}.lora_A.weight"] = torch.randn(8, HIDDEN) * 0.3
            weights[f"{path}.lora_B.weight"] = torch.randn(width, 8) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")


def _make_tokenizer(folder):
    """Write a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
