"""The pools of a model, from its configuration."""

import pytest

from benchmarks.compiled.models import pools_of_model
from jaxkv.tools.model_config import NAMED_MODELS

LLAMA = NAMED_MODELS["llama-3.1-8b"] | {"head_dim": None}
DEEPSEEK = NAMED_MODELS["deepseek-v3"]


def shapes(config, **kwargs):
    return [
        (pool.shape, pool.num_leaves, pool.dtype)
        for pool in pools_of_model(config, 16, 2048, **kwargs)
    ]


def test_pools_have_the_layouts_of_tpu_inference_and_of_separate_arrays():
    assert shapes(LLAMA) == [
        ((2048, 16, 8, 2, 128), 32, "bfloat16"),
        ((2048, 16, 8, 128), 64, "bfloat16"),
    ]
    # Heads of 64 share the lanes; other heads are padded.
    for head_dim, packed, apart in (
        (64, (2048, 16, 4, 2, 128), (2048, 16, 8, 64)),
        (80, (2048, 16, 8, 2, 128), (2048, 16, 8, 80)),
    ):
        pools = shapes({**LLAMA, "head_dim": head_dim})
        assert [shape for shape, *_ in pools] == [packed, apart]
    # Every query head is a KV head unless the model says otherwise.
    config = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
    assert shapes(config)[1][0] == (2048, 16, 32, 128)
    # A latent cache is one leaf a layer; small elements are packed more.
    assert shapes(DEEPSEEK) == [
        ((2048, 8, 2, 640), 61, "bfloat16"),
        ((2048, 16, 576), 61, "bfloat16"),
    ]
    assert shapes(LLAMA, dtype="float8_e4m3fn")[0][0] == (2048, 16, 4, 4, 128)
    assert shapes(DEEPSEEK, dtype="float32")[0][0] == (2048, 16, 1, 640)


def test_the_dtype_is_the_models_unless_given():
    assert shapes({**LLAMA, "torch_dtype": "torch.float16"})[0][2] == "float16"
    assert shapes({**LLAMA, "dtype": "float32"})[0][2] == "float32"
    assert shapes(LLAMA, dtype="int8")[0][2] == "int8"


def test_a_configuration_that_does_not_do_is_refused():
    for changes, message in (
        (
            {"num_key_value_heads": None, "num_attention_heads": None},
            "has no 'num_key_value_heads' or 'num_attention_heads'$",
        ),
        ({"hidden_size": None}, "has no 'hidden_size', nor 'head_dim'$"),
        ({"hidden_size": 4100}, "hidden_size=4100 must be a multiple of num_atten"),
        ({"torch_dtype": "int4"}, "'int4' is no dtype of numbers of whole bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            shapes({**LLAMA, **changes})
