"""The real vLLM with a store behind the host: starts anew, and is warm.

Each run is a process, as in `test_vllm_cpu`. Its answers are compared with an engine
without a connector.
"""

import json
import shutil

import numpy as np
import pytest

from tests.integrations.vllm_cpu.comparison import (
    LORA,
    check_same_answers,
    hit_tokens,
    metric_of,
    server,
    texts_of,
    tokens_of,
)
from tests.integrations.vllm_cpu.run import transfer_config
from tests.test_prefill_proxy import proxy

USERS = 6


def run(lab, folder, number, **options):
    """Run conversations over a store; `number` distinguishes runs of one folder."""
    extra = {
        "storage": f"file://{folder}",
        "storage_write": "through",
        "storage_deadline_s": 60 + number,
    }
    return lab.run(
        options.pop("scenario", "conversations"),
        extra=extra,
        num_processes=2,
        **options,
    )


def first_cached(result):
    """Return the tokens that the first prompts hit."""
    return sum(answer["cached"] for answer in result["answers"][:USERS])


@pytest.mark.parametrize(
    "name",
    ["llama-float32", pytest.param("hybrid-float32", marks=pytest.mark.long)],
)
def test_a_second_process_finds_what_the_first_has_computed(lab, tmp_path, name):
    options = {"model": name}
    if name.startswith("hybrid"):
        options["num_blocks"] = 80
    expected = lab.run("conversations", **options)
    cold = run(lab, tmp_path, 1, **options)
    warm = run(lab, tmp_path, 2, **options)
    check_same_answers(cold, expected)
    check_same_answers(warm, expected)
    assert first_cached(cold) == 0
    assert first_cached(warm) >= USERS * 128
    assert hit_tokens(warm) > hit_tokens(cold)
    assert f"storage file://{tmp_path}" in warm["log"]


def test_other_weights_at_the_same_path_find_nothing(lab, tmp_path):
    from tests.integrations.vllm_cpu import models

    path = lab.folder / "replaced-float32"
    shutil.copytree(lab.folder / "llama-float32", path)
    before = run(lab, tmp_path / "store", 1, model=path.name)
    assert list((tmp_path / "store").rglob("*.0"))
    shutil.rmtree(path)
    models.make_model(path, "llama", "float32", seed=1)
    expected = lab.run("conversations", model=path.name)
    actual = run(lab, tmp_path / "store", 2, model=path.name)
    check_same_answers(actual, expected)
    assert tokens_of(actual) != tokens_of(before)
    assert first_cached(actual) == 0


@pytest.mark.long
def test_adapters_are_kept_apart_in_the_store(lab, tmp_path):
    options = {"model": "llama-float32", "engine": LORA, "scenario": "adapters"}
    expected = lab.run("adapters", model="llama-float32", engine=LORA)
    for number in range(2):
        actual = run(lab, tmp_path, number, **options)
        check_same_answers(actual, expected)
    assert first_cached(actual) > 0


@pytest.mark.long
def test_one_vllm_computes_prompts_and_another_decodes(lab, tmp_path):
    """Through the example of a proxy; the first one is killed in the middle."""
    prompts = np.random.default_rng(0).integers(0, 256, (6, 160)).tolist()
    stored = {
        "storage": f"file://{tmp_path}/store",
        "storage_deadline_s": 60,
        "storage_await_s": 20,
    }

    def transfers(**extra):
        return "--kv-transfer-config", json.dumps(transfer_config(stored | extra))

    def serve(name, *options):
        return server(lab, tmp_path / name, *options)

    def by_way_of(post, prompts):
        def ask(path, body):
            return post(json.dumps(body).encode(), path)[1]

        return texts_of(ask, prompts)

    with serve("alone") as ask:
        expected = texts_of(ask, prompts)
    assert len(set(expected)) > 1
    with serve("decode", *transfers(storage_list_s=0)) as decode:
        with (
            serve("prefill", *transfers(storage_write="through")) as prefill,
            proxy(prefill.url, decode.url) as post,
        ):
            texts = by_way_of(post, prompts[:4])
        # The prefill server is gone: no request waits for its blocks.
        with proxy(prefill.url, decode.url) as post:
            texts += by_way_of(post, prompts[4:])
        page = decode("/metrics")
    assert texts == expected
    # The last block is computed: its logits are needed.
    assert metric_of(page, "vllm:external_prefix_cache_hits_total") == 4 * 144
