"""The real vLLM with tpu-inference's runner, on the CPU, with jaxkv and without.

Each run is a process (`vllm_cpu.run`), with random small models. What a run answers
with jaxkv is compared with a run without a connector: every token, and the
log-probabilities. .ci/vllm makes the environment, and runs this there.
"""

import json
import time

import numpy as np
import pytest

from tests.integrations.vllm_cpu.comparison import (
    COPY,
    DRAFTED,
    LATENTS,
    LORA,
    check_same_answers,
    hit_tokens,
    metric_of,
    server,
    texts_of,
    tokens_of,
)
from tests.integrations.vllm_cpu.run import transfer_config

LONG = pytest.mark.long
# Each group of layers has blocks of its own.
HYBRID = {
    "model": "hybrid-float32",
    "num_blocks": 80,
    "extra": {"store_batch_blocks": 8},
}
SERVED = {
    "float32": {"model": "llama-float32"},
    "hybrid": HYBRID,
    "latents": LATENTS | {"num_blocks": 24},
    "states": {"model": "deltas-float32", "num_blocks": 64},
    "tp 2": {
        "model": "llama-float32",
        "engine": {"tensor_parallel_size": 2},
        "num_devices": 2,
    },
    "bfloat16": {"model": "llama-bfloat16"},
    "experts": {"model": "experts-float32"},
}
LONG_SERVED = ("latents", "bfloat16", "experts")
DRAFTS = {
    drafts["method"]: {"model": model, "engine": {"speculative_config": drafts}}
    for model, drafts in DRAFTED
}
ADAPTER_LOADS = (
    "first",
    "unchanged",
    "rewritten, not loaded",
    "loaded in place",
    "unchanged since",
    "loaded by the request",
    "removed and added",
    "an id that is taken",
)
TOLERANCE = {"bfloat16": 0.1}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=LONG if name in LONG_SERVED else ()) for name in SERVED],
)
def test_answers_are_those_of_an_engine_without_a_connector(lab, name):
    options = SERVED[name]
    expected, actual = lab.run_both("conversations", **options)
    check_same_answers(actual, expected, TOLERANCE.get(name, 1e-3))
    assert hit_tokens(actual) > 500
    assert hit_tokens(expected) == 0


@pytest.mark.long
def test_answers_are_the_same_with_async_scheduling(lab):
    """Without the pressure of `test_vllm_cpu_async`: .ci/vllm-versions runs it."""
    options = {"engine": {"async_scheduling": True}, "extra": {}}
    expected = lab.run("conversations", model="llama-float32")
    actual = lab.run("conversations", model="llama-float32", **options)
    check_same_answers(actual, expected)
    assert hit_tokens(actual) > 500


@pytest.mark.parametrize(
    "extra",
    [
        {"blocks_per_chunk": 4},
        {"eviction_policy": "arc", "num_cpu_blocks": 40},
        {"eviction_policy": "hazard", "num_cpu_blocks": 40, "shadow": "lru*2"},
        {"store_threshold": 2, "delay_shared_loads": True},
        {"staging_bytes": "2MiB"},
    ],
)
@pytest.mark.long
def test_answers_are_the_same_under_other_rules(lab, extra):
    actual = lab.run("conversations", model="llama-float32", extra=extra)
    check_same_answers(actual, lab.run("conversations", model="llama-float32"))
    assert hit_tokens(actual) > 0


@pytest.mark.parametrize("name", ["float32", pytest.param("latents", marks=LONG)])
def test_the_comparison_fails_where_loaded_blocks_are_zero(lab, name):
    """The control: what is loaded is read, and wrong bytes show."""
    expected = lab.run("conversations", **SERVED[name])
    actual = lab.run("conversations", extra={}, fault="zeros", **SERVED[name])
    assert hit_tokens(actual) > 500
    assert tokens_of(actual) != tokens_of(expected)


@pytest.mark.long
def test_compressed_blocks_change_answers_a_little(lab):
    expected = lab.run("conversations", model="llama-float32")
    actual = lab.run(
        "conversations", model="llama-float32", extra={"compression": "int8"}
    )
    assert hit_tokens(actual) > 1000
    pairs = zip(actual["answers"], expected["answers"], strict=True)
    alike = [(a, b) for a, b in pairs if a["tokens"] == b["tokens"]]
    # The first six were not loaded.
    assert 8 <= len(alike) < 18
    for ours, exact in alike:
        np.testing.assert_allclose(ours["logprobs"], exact["logprobs"], atol=0.3)


def test_answers_are_the_same_where_every_second_load_fails(lab):
    expected = lab.run("conversations", model="llama-float32")
    actual = lab.run("conversations", model="llama-float32", extra={}, fault="failures")
    check_same_answers(actual, expected)
    assert hit_tokens(actual) > 1000
    assert "failed loads" in actual["log"] or "KV load failure" in actual["log"]


def share_of_same_drafts(actual, expected):
    made, wanted = actual["observed"]["drafts"], expected["observed"]["drafts"]
    both = made.keys() & wanted.keys()
    assert len(both) > 100
    return sum(made[key] == wanted[key] for key in both) / len(both)


METHODS = pytest.mark.parametrize(
    "name", ["eagle3", pytest.param("dflash", marks=LONG)]
)


@METHODS
def test_drafts_are_those_of_an_engine_without_a_connector(lab, name):
    expected, actual = lab.run_both("drafts", **DRAFTS[name])
    assert tokens_of(actual) == tokens_of(expected)
    assert hit_tokens(actual) > 1000
    assert share_of_same_drafts(actual, expected) > 0.97


@pytest.mark.long
@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_differ_where_loaded_blocks_of_the_draft_model_are_zero(lab, name):
    """The control: a draft model reads what is loaded, and answers stay the same."""
    expected = lab.run("drafts", **DRAFTS[name])
    actual = lab.run("drafts", extra={}, fault="zero drafts", **DRAFTS[name])
    assert tokens_of(actual) == tokens_of(expected)
    assert share_of_same_drafts(actual, expected) < 0.9


@pytest.mark.long
def test_as_many_drafts_are_accepted_as_without_a_connector(lab):
    """240 requests: a draft model that copies its target has 88% accepted in both."""
    engine = {"speculative_config": COPY, "max_num_seqs": 8}
    options = {"model": "shallow-bfloat16", "num_blocks": 64, "engine": engine}
    expected, actual = lab.run_both("acceptance", seeds=4, **options)
    spoilt = lab.run("acceptance", seeds=1, extra={}, fault="zero drafts", **options)
    assert tokens_of(actual) == tokens_of(expected)
    assert len(tokens_of(actual)) == 240
    assert hit_tokens(actual) > 20_000
    wanted, share, without_loads = map(share_of_accepted, (expected, actual, spoilt))
    assert wanted > 0.8
    assert abs(share - wanted) < 0.01
    # The control: drafts need what is loaded.
    assert without_loads < 0.1


def share_of_accepted(run):
    """The share of drafts that are accepted in the second and third turns."""
    turns = run["observed"]["turns"]
    made, accepted = np.array([turns[1::3], turns[2::3]]).sum(axis=(0, 1))
    return accepted / made


def test_the_core_may_have_a_process_of_its_own(lab):
    expected = lab.run("conversations", model="llama-float32")
    actual = lab.run("conversations", model="llama-float32", extra={}, num_processes=2)
    check_same_answers(actual, expected)
    assert hit_tokens(actual) > 1000
    # Lines of jaxkv come through that process's log.
    assert "(EngineCore" in actual["log"]
    assert "of host memory" in actual["log"]


def test_salts_are_kept_apart(lab):
    expected, actual = lab.run_both("salts", model="llama-float32")
    check_same_answers(actual, expected)
    cached = [answer["cached"] for answer in actual["answers"]]
    per_round = [sum(cached[9 * n : 9 * n + 3]) for n in range(4)]
    # Under a new salt nothing is found; under the old one it is.
    assert per_round[:3] == [0, 0, 0]
    assert per_round[3] >= 3 * 128


@pytest.mark.long
def test_adapters_are_kept_apart(lab):
    options = {"model": "llama-float32", "engine": LORA}
    expected, actual = lab.run_both("adapters", **options)
    check_same_answers(actual, expected)
    assert hit_tokens(actual) > 1000
    rounds = [tokens_of(expected)[9 * n : 9 * n + 3] for n in range(6)]
    assert rounds[:3] == rounds[3:]
    assert rounds[0] != rounds[1] != rounds[2] != rounds[0], "adapters that do nothing"


def test_limits_retention_and_event_localities(lab):
    extra = {"num_cpu_blocks": 80, "retention": True, "eviction_policy": "own_lru"}
    extra["cache_policy_module_path"] = "vllm_cpu.own_policy"
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    engine = {"kv_events_config": events}
    result = lab.run("wishes", model="llama-float32", extra=extra, engine=engine)
    assert "policy own_lru" in result["log"]
    observed = result["observed"]
    assert ["CPU", "LOCAL"] in observed.pop("localities")
    assert observed == {
        "of a limited store": 32,
        "of a limited load": 64,
        "of what is kept": 144,
        "of others": 0,
    }


def test_a_request_waits_for_blocks_that_a_store_is_about_to_free(lab):
    options = {"num_blocks": 24, "engine": {"max_model_len": 256}}
    result = lab.run("frees", model="llama-float32", extra={}, **options)
    assert result["observed"]["waits"] > 3
    assert result["observed"]["is waiting"]
    assert result["preemptions"] == [0]


def test_resets_and_pools_made_anew_leave_the_answers_as_they_are(lab):
    """The scenario itself checks when the host has what."""
    result = lab.run("resets", model="llama-float32", extra={})
    assert hit_tokens(result) > 1000
    assert "the KV caches were dropped" in result["log"]


def test_new_weights_are_never_served_the_kv_of_old_ones(lab):
    expected, actual = lab.run_both("new_weights", model="llama-float32")
    check_same_answers(actual, expected)
    # Right after answers, whose last blocks are on their way to the host.
    assert actual["observed"]["resets"] == [True] * 3
    for reason in (
        "vLLM's prefix cache is reset",
        "start_weight_update() was called",
        "arrays of the weights were replaced",
    ):
        assert f"{reason}: the host tier forgets its blocks" in actual["log"]


def test_the_comparison_fails_where_new_weights_are_not_noticed(lab):
    """The control: each way has its KV on the host."""
    expected = lab.run("new_weights", model="llama-float32")
    actual = lab.run("new_weights", model="llama-float32", extra={}, fault="blind")
    ways = [slice(n, n + 6) for n in range(0, 36, 6)]
    is_right = [tokens_of(actual)[way] == tokens_of(expected)[way] for way in ways]
    assert is_right == [True, True, False, False, False, False]


def test_an_adapter_that_is_loaded_again_is_never_served_kv_of_its_old_weights(lab):
    options = {"model": "llama-float32", "engine": LORA, "extra": {}}
    result = lab.run("new_adapters", **options)
    assert result["observed"]["wrong"] == []
    cached = dict(zip(ADAPTER_LOADS, result["observed"]["cached"], strict=True))
    assert [name for name, num in cached.items() if num] == [
        "unchanged",
        "unchanged since",
    ]


@pytest.mark.long
def test_the_comparison_fails_where_new_adapters_are_not_noticed(lab):
    options = {"model": "llama-float32", "engine": LORA, "extra": {}}
    with pytest.raises(AssertionError):
        lab.run("new_adapters", fault="blind", **options)


@pytest.mark.long
def test_aborts_leave_nothing_behind(lab):
    """The scenario itself counts free blocks."""
    expected, actual = lab.run_both("aborts", model="llama-float32")
    check_same_answers(actual, expected)
    assert hit_tokens(actual) > 1000


def test_the_kernels_of_the_plugin_are_those_of_tpu_inference(lab):
    printed = lab.run_code("from vllm_cpu import check_kernels as c; c.main()")
    assert "13 batches alike" in printed


def test_vllm_serve_has_the_hits_and_what_jaxkv_counts_in_its_metrics(lab, tmp_path):
    prompts = np.random.default_rng(0).integers(0, 256, (6, 160)).tolist()
    config, log = json.dumps(transfer_config({})), tmp_path / "log"
    with server(lab, log, "--kv-transfer-config", config) as ask:

        def metric(name):
            return metric_of(ask("/metrics"), name)

        first = texts_of(ask, prompts)
        assert len(set(first)) > 3
        # Of tokens, those up to the last full block of each prompt.
        assert metric("vllm:external_prefix_cache_hits_total") == 0
        assert texts_of(ask, prompts) == first
        hits = metric("vllm:external_prefix_cache_hits_total")
        assert hits >= 4 * 144
        assert metric("jaxkv:kv_offload_blocks_loaded_total") == hits / 16
        assert metric("vllm:kv_offload_load_bytes_total") > 0
        assert metric("vllm:kv_offload_store_size_count") > 0
        assert metric("jaxkv:kv_offload_host_blocks") == 400
        assert metric("vllm:kv_offload_config_info") == 1
        assert metric("jaxkv:kv_offload_host_blocks_held") >= 60
        assert metric("vllm:kv_offload_lookup_sync_delay_seconds_count") >= 12
        reset = "/reset_prefix_cache?reset_external=true"
        while not json.loads(ask(reset, {}))["success"]:
            time.sleep(0.1)
        assert texts_of(ask, prompts) == first
        assert metric("vllm:external_prefix_cache_hits_total") == hits
    assert "host tier of 400 blocks" in log.read_text()


@pytest.mark.parametrize(
    "model", ["llama-float32", pytest.param("experts-float32", marks=LONG)]
)
def test_each_engine_of_data_parallel_size_has_its_own_host_tier_files_and_label(
    lab, tmp_path, model
):
    prompts = np.random.default_rng(0).integers(0, 256, (6, 160)).tolist()
    extra = {"record": str(tmp_path / "asked-{rank}.jsonl")}
    extra |= {"eviction_policy": "hazard", "policy_state": str(tmp_path / "{rank}")}
    words = ["--data-parallel-size", "2"]
    words += ["--kv-transfer-config", json.dumps(transfer_config(extra))]
    with server(lab, tmp_path / "log", *words, model=model) as ask:
        first = texts_of(ask, prompts, {"X-data-parallel-rank": "1"})
        assert len(set(first)) > 3
        assert texts_of(ask, prompts, {"X-data-parallel-rank": "1"}) == first
        assert texts_of(ask, prompts[:1], {"X-data-parallel-rank": "0"}) == first[:1]
        page = ask("/metrics")
        loaded, held = (
            [metric_of(page, f"jaxkv:kv_offload_{name}", engine) for engine in "01"]
            for name in ("blocks_loaded_total", "host_blocks_held")
        )
    assert loaded[0] == 0
    assert loaded[1] >= 4 * 9
    assert held[1] > held[0] > 0
    assert all((tmp_path / f"asked-{rank}.jsonl").exists() for rank in range(2))
