"""The pools of a model, from its configuration."""

import json

import pytest

from jaxkv.tools.bench.compiled.models import pools_of_model
from jaxkv.tools.model_config import read_config

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def shapes(config, **kwargs):
    return [
        (pool.shape, pool.num_leaves, pool.dtype)
        for pool in pools_of_model(config, 16, 2048, **kwargs)
    ]


def test_grouped_heads():
    assert shapes(LLAMA) == [
        ((2048, 16, 8, 2, 128), 32, "bfloat16"),
        ((2048, 16, 8, 128), 64, "bfloat16"),
    ]


def test_heads_of_64_share_the_lanes():
    packed, apart = shapes({**LLAMA, "head_dim": 64})
    assert packed[0] == (2048, 16, 4, 2, 128)
    assert apart[0] == (2048, 16, 8, 64)


def test_other_heads_are_padded_in_the_layout_of_tpu_inference():
    packed, apart = shapes({**LLAMA, "head_dim": 80})
    assert packed[0] == (2048, 16, 8, 2, 128)
    assert apart[0] == (2048, 16, 8, 80)


def test_every_query_head_is_a_kv_head_unless_the_model_says_otherwise():
    config = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
    assert shapes(config)[1][0] == (2048, 16, 32, 128)


def test_a_latent_cache_is_one_leaf_a_layer():
    assert shapes(DEEPSEEK) == [
        ((2048, 8, 2, 640), 61, "bfloat16"),
        ((2048, 16, 576), 61, "bfloat16"),
    ]


def test_small_elements_are_packed_more():
    packed, _ = shapes(LLAMA, dtype="float8_e4m3fn")
    assert packed[0] == (2048, 16, 4, 4, 128)
    latent, _ = shapes(DEEPSEEK, dtype="float32")
    assert latent[0] == (2048, 16, 1, 640)


def test_the_dtype_is_the_models_unless_given():
    assert shapes({**LLAMA, "torch_dtype": "torch.float16"})[0][2] == "float16"
    assert shapes({**LLAMA, "dtype": "float32"})[0][2] == "float32"
    assert shapes(LLAMA, dtype="int8")[0][2] == "int8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "configuration has no 'num_hidden_layers'$"),
        (
            {"num_key_value_heads": None, "num_attention_heads": None},
            "has no 'num_key_value_heads' or 'num_attention_heads'$",
        ),
        ({"hidden_size": None}, "has no 'hidden_size', nor 'head_dim'$"),
        ({"hidden_size": 4100}, "hidden_size=4100 must be a multiple of num_atten"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers='32' must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number"),
        ({"kv_lora_rank": 512}, "has no 'qk_rope_head_dim'$"),
        ({"torch_dtype": "fast"}, "'fast' is no dtype, such as bfloat16"),
        ({"torch_dtype": "int4"}, "'int4' is no dtype of numbers of whole bytes"),
    ],
)
def test_a_configuration_that_does_not_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes({**LLAMA, **changes})


def test_a_file_or_its_folder_can_be_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert read_config(path) == read_config(tmp_path) == LLAMA


def test_the_language_model_of_a_larger_one_is_found(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vision_config": {}, "text_config": LLAMA}))
    assert shapes(read_config(path)) == shapes(LLAMA)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is no JSON"), ("[]", "must hold a JSON object")]
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(path)
