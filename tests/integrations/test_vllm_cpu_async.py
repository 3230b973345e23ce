"""The real vLLM with asynchronous scheduling, under pressure.

Steps of few tokens and few blocks: requests are left out of steps and preempted, which
is where tpu-inference drops tokens. Each run is a process, as in `test_vllm_cpu`; what
it answers is compared with a synchronous engine without a connector.
"""

import concurrent.futures
import json

import numpy as np
import pytest

from tests.integrations.vllm_cpu.comparison import (
    DRAFTED,
    LATENTS,
    check_same_answers,
    hit_tokens,
    metric_of,
    server,
    tokens_of,
)
from tests.integrations.vllm_cpu.run import transfer_config, under_pressure

LONG_SEEDS = 10
MODELS = {
    "llama": {"model": "llama-float32", "num_blocks": 48},
    "windows": {"model": "hybrid-float32", "num_blocks": 72},
    "bfloat16": {"model": "llama-bfloat16", "num_blocks": 48, "is_fixed": True},
    "latents": LATENTS | {"num_blocks": 24},
    "states": {"model": "deltas-float32", "num_blocks": 40},
}
MODELS |= {
    drafts["method"]: {
        "model": model,
        "num_blocks": 64,
        "is_fixed": True,
        "engine": {"speculative_config": drafts},
    }
    for model, drafts in DRAFTED
}

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def run_pressure(
    lab, name, seeds, *, is_async=False, num_tokens=64, drafts=None, **options
):
    model = MODELS[name]
    engine = {
        "async_scheduling": is_async,
        "max_num_seqs": 8,
        "max_num_batched_tokens": num_tokens,
        "speculative_config": drafts,
        **model.get("engine", {}),
    }
    options |= model | {"engine": engine}
    return lab.run("pressure", seeds=seeds, **options)


def run_both(lab, name, seeds, **options):
    """Run synchronously without a connector, and at once asynchronously with one."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        options = {"extra": {}} | options
        actual = pool.submit(run_pressure, lab, name, seeds, is_async=True, **options)
        return run_pressure(lab, name, seeds), actual.result()


def check_pressure(actual, seeds, min_preemptions=5):
    """Check that each seed had enough preemptions, and restored tokens."""
    assert len(tokens_of(actual)) == 60 * seeds
    assert len(actual["preemptions"]) == seeds
    assert min(actual["preemptions"]) >= min_preemptions, actual["preemptions"]
    assert min(actual["restored"]) > 0, actual["restored"]
    assert hit_tokens(actual) > 1000 * seeds
    assert actual["log"].count("tokens that tpu-inference drops are restored") == 1


def test_no_token_is_dropped_with_async_scheduling(lab):
    # Blocks wait to be stored together; the default needs a larger pool.
    expected, actual = run_both(lab, "llama", 2, extra={"store_batch_blocks": 6})
    check_same_answers(actual, expected)
    check_pressure(actual, 2)


def test_the_comparison_fails_where_dropped_tokens_are_not_restored(lab):
    """The control: without the restorer the same requests have wrong answers."""
    expected = tokens_of(run_pressure(lab, "llama", 2))[:60]
    actual = run_pressure(lab, "llama", 1, is_async=True, extra={}, fault="lost tokens")
    assert sum(actual["preemptions"]) >= 5
    assert tokens_of(actual) != expected


@pytest.mark.parametrize(
    "is_async", [True, pytest.param(False, marks=pytest.mark.long)]
)
def test_log_probabilities_of_prompts_are_right_or_absent(lab, is_async):
    """tpu-inference returned memory that no step had written, which ended vLLM."""

    def run(num_blocks, is_async, **options):
        engine = {"max_num_seqs": 8, "async_scheduling": is_async}
        options |= {"model": "llama-float32", "num_blocks": num_blocks}
        return lab.run("prompt_logprobs", engine=engine, **options)

    expected = run(400, False)
    actual = run(40, is_async, extra={"store_batch_blocks": 4})
    assert tokens_of(actual) == tokens_of(expected)
    assert hit_tokens(actual) > 1000
    assert sum(actual["preemptions"]) > 0
    num_right, pairs = 0, (r["observed"]["prompt logprobs"] for r in (actual, expected))
    for user, (ours, right) in enumerate(zip(*pairs, strict=True)):
        if user % 16 == 3 and ours == [[None], 1]:
            continue  # A prefix was cached.
        if user % 2:
            assert ours[1] == right[1] == len(right[0])
            np.testing.assert_allclose(ours[0][1:], right[0][1:], atol=1e-3)
            num_right += 1
        else:
            assert ours == right == [[], 0]
    assert num_right >= 28


@pytest.mark.long
def test_latents_are_the_same_under_pressure(lab):
    expected, actual = run_both(lab, "latents", 2)
    # A token's latents have 8 bits. The last bit depends on how a prompt is cut into
    # chunks.
    check_same_answers(actual, expected, 0.01)
    check_pressure(actual, 2)


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "dflash", "mtp"])
def test_answers_with_a_draft_model_are_the_same_under_pressure(lab, method):
    expected, actual = run_both(lab, method, 1)
    check_same_answers(actual, expected)
    assert sum(actual["preemptions"]) > 0
    assert hit_tokens(actual) > 1000


@pytest.mark.long
def test_states_are_the_same_under_pressure(lab):
    expected, actual = run_both(lab, "states", 2)
    check_same_answers(actual, expected)
    check_pressure(actual, 2)
    # A block of attention has 16 tokens of f32[4, 1, 128]; the rest are states.
    attention_bytes = hit_tokens(actual) // 16 * 16 * 4 * 128 * 4
    assert actual["metrics"]["vllm:kv_offload_load_bytes"] > 2 * attention_bytes
    # States are read, not only the KV of attention.
    spoilt = run_pressure(
        lab, "states", 2, is_async=True, extra={}, fault="zero states"
    )
    assert tokens_of(spoilt) != tokens_of(expected)
    failing = run_pressure(lab, "states", 2, is_async=True, extra={}, fault="failures")
    check_same_answers(failing, expected)
    check_pressure(failing, 2)


@pytest.mark.long
def test_requests_that_are_preempted_by_a_reset_keep_their_tokens(lab):
    """Without the restorer this ends in an assertion of tpu-inference's."""
    options = {"model": "llama-float32", "num_blocks": 64}
    expected = lab.run("interruptions", interrupts=False, **options)
    actual = lab.run(
        "interruptions",
        interrupts=True,
        engine={"async_scheduling": True},
        extra={"store_threshold": 9},  # A load would put a step in between.
        **options,
    )
    assert tokens_of(actual) == tokens_of(expected)
    assert sum(actual["preemptions"]) >= 5


@pytest.mark.long
def test_the_engine_ends_rather_than_answer_wrongly_where_ids_stop(lab):
    with pytest.raises(AssertionError, match="runs again after a step without it"):
        run_pressure(lab, "llama", 1, is_async=True, extra={}, fault="no ids")


@pytest.mark.long
def test_no_token_is_dropped_where_every_second_load_fails(lab):
    actual = run_pressure(lab, "llama", 2, is_async=True, extra={}, fault="failures")
    check_same_answers(actual, run_pressure(lab, "llama", 2))
    check_pressure(actual, 2)
    assert "failed loads" in actual["log"] or "KV load failure" in actual["log"]


@pytest.mark.parametrize("name", ["llama", "windows", "llama, storage"])
@pytest.mark.long
def test_no_token_is_dropped_in_600_requests(lab, tmp_path, name):
    storage = {"storage": f"file://{tmp_path}", "storage_write": "through"}
    storage |= {"storage_deadline_s": 60, "num_cpu_blocks": 100}
    model, _, has_storage = name.partition(", ")
    extra = storage if has_storage else {}
    expected, actual = run_both(lab, model, LONG_SEEDS, extra=extra)
    check_same_answers(actual, expected)
    # With windows, fewer requests run at a time on as many blocks.
    check_pressure(actual, LONG_SEEDS, min_preemptions=1 if name == "windows" else 5)


def differences(actual, expected):
    """Return, for each answer that differs, the margin of its first wrong token.

    It is infinite if the token was not even the second likeliest in `expected`.
    """
    margins = []
    for answer, right in zip(actual["answers"], expected["answers"], strict=True):
        for place, token in enumerate(answer["tokens"]):
            if token != right["tokens"][place]:
                likely, rival = right["rivals"][place]
                margin = right["logprobs"][place] - likely
                margins.append(margin if rival == token else np.inf)
                break
    return margins


@pytest.mark.long
def test_bfloat16_differs_only_at_ties_and_no_more_than_by_chunking(lab):
    """Other chunks of a prompt round differently, without a connector too."""
    expected, actual = run_both(lab, "bfloat16", LONG_SEEDS)
    chunked = run_pressure(lab, "bfloat16", LONG_SEEDS, num_tokens=48)
    check_pressure(actual, LONG_SEEDS)
    control, offloaded = differences(chunked, expected), differences(actual, expected)
    print(f"{len(offloaded)} of 600 differ, by chunking {len(control)}")
    assert max(offloaded, default=0) <= max(control, default=0)
    # Both are counts of rare events.
    assert len(offloaded) <= len(control) + 3 * len(control) ** 0.5


@pytest.mark.long
def test_no_token_is_dropped_in_600_requests_over_http(lab, tmp_path):
    expected = run_pressure(lab, "llama", LONG_SEEDS)
    options = ("--kv-transfer-config", json.dumps(transfer_config({})))
    limits = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "42")
    answers_over_http = []
    log = tmp_path / "log"
    with (
        server(lab, log, *options, *limits) as http,
        concurrent.futures.ThreadPoolExecutor(20) as clients,
    ):

        def complete(prompt, num_tokens):
            body = {
                "model": "llama-float32",
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
                "return_token_ids": True,
            }
            (choice,) = json.loads(http("/v1/completions", body))["choices"]
            logprobs = choice["logprobs"]["token_logprobs"]
            return {"tokens": choice["token_ids"], "logprobs": logprobs}

        def ask(prompts, num_tokens):
            answers = list(clients.map(complete, prompts, num_tokens))
            answers_over_http.extend(answers)
            return [answer["tokens"] for answer in answers]

        for seed in range(LONG_SEEDS):
            under_pressure(seed, ask)
        preemptions = metric_of(http("/metrics"), "vllm:num_preemptions_total")
    check_same_answers({"answers": answers_over_http}, expected)
    # The arrival times, and so the preemptions, depend on the clock.
    assert preemptions >= 5 * LONG_SEEDS
    assert "tokens that tpu-inference drops are restored" in log.read_text()


def test_rejected_drafts_are_never_served(lab):
    actual = run_pressure(lab, "llama", 2, drafts=NGRAM, extra={})
    assert tokens_of(actual) == tokens_of(run_pressure(lab, "llama", 2))
    assert min(actual["preemptions"]) >= 5, actual["preemptions"]
    assert hit_tokens(actual) > 2000
    # Nearly all of them, as weights are random.
    assert actual["metrics"]["vllm:spec_decode_num_draft_tokens"] > 1000


@pytest.mark.long
def test_the_comparison_fails_where_blocks_loaded_beside_drafts_are_zero(lab):
    expected = tokens_of(run_pressure(lab, "llama", 2))[:60]
    actual = run_pressure(lab, "llama", 1, drafts=NGRAM, extra={}, fault="zeros")
    assert tokens_of(actual) != expected
