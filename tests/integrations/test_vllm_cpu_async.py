"""The real vLLM with asynchronous scheduling, under pressure.

Steps of few tokens and few blocks: requests are left out of steps and preempted, which
is where tpu-inference drops tokens. Each run is a process, as in `test_vllm_cpu`; what
it answers is compared with what a synchronous engine without a connector answers.
"""

import concurrent.futures

import pytest

from tests.integrations.vllm_cpu.comparison import (
    check_same_answers,
    hit_tokens,
    tokens_of,
)

LONG_SEEDS = 10
MODELS = {
    "llama": {"model": "llama-float32", "num_blocks": 48},
    "windows": {"model": "hybrid-float32", "num_blocks": 72},
    "states": {"model": "deltas-float32", "num_blocks": 40},
}

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


def run_pressure(lab, name, seeds, *, is_async=False, drafts=None, **options):
    model = MODELS[name]
    engine = {
        "async_scheduling": is_async,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "speculative_config": drafts,
        **model.get("engine", {}),
    }
    options |= model | {"engine": engine}
    return lab.run("pressure", seeds=seeds, **options)


def run_both(lab, name, seeds, **options):
    """Run it synchronously without a connector, and at once asynchronously with one."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        options = {"extra": {}} | options
        found = pool.submit(run_pressure, lab, name, seeds, is_async=True, **options)
        return run_pressure(lab, name, seeds), found.result()


def check_pressure(found, seeds, least=5):
    """Each seed preempted at least so often, and had tokens restored."""
    assert len(tokens_of(found)) == 60 * seeds
    assert len(found["preemptions"]) == seeds
    assert min(found["preemptions"]) >= least, found["preemptions"]
    assert min(found["restored"]) > 0, found["restored"]
    assert hit_tokens(found) > 1000 * seeds
    assert found["log"].count("tokens that tpu-inference drops are restored") == 1


def test_no_token_is_dropped_with_async_scheduling(lab):
    # Blocks wait to be stored together; the default needs a larger pool.
    expected, found = run_both(lab, "llama", 2, extra={"store_batch_blocks": 6})
    check_same_answers(found, expected)
    check_pressure(found, 2)


def test_the_comparison_fails_where_dropped_tokens_are_not_restored(lab):
    """The control: without the cure the same requests have wrong answers."""
    expected = tokens_of(run_pressure(lab, "llama", 2))[:60]
    found = run_pressure(lab, "llama", 1, is_async=True, extra={}, fault="lost tokens")
    assert sum(found["preemptions"]) >= 5
    assert tokens_of(found) != expected


@pytest.mark.long
def test_states_are_the_same_under_pressure(lab):
    expected, found = run_both(lab, "states", 2)
    check_same_answers(found, expected)
    check_pressure(found, 2)
    # Of a block of attention, 16 tokens of f32[4, 1, 128]; the rest are states.
    attention_bytes = hit_tokens(found) // 16 * 16 * 4 * 128 * 4
    assert found["metrics"]["vllm:kv_offload_load_bytes"] > 2 * attention_bytes
    # They are read, and not only what attention has.
    spoilt = run_pressure(
        lab, "states", 2, is_async=True, extra={}, fault="zero states"
    )
    assert tokens_of(spoilt) != tokens_of(expected)
    failing = run_pressure(lab, "states", 2, is_async=True, extra={}, fault="failures")
    check_same_answers(failing, expected)
    check_pressure(failing, 2)


@pytest.mark.long
def test_the_engine_ends_rather_than_answer_wrongly_where_ids_stop(lab):
    with pytest.raises(AssertionError, match="runs again after a step without it"):
        run_pressure(lab, "llama", 1, is_async=True, extra={}, fault="no ids")


@pytest.mark.parametrize("name", ["llama", "windows"])
@pytest.mark.long
def test_no_token_is_dropped_in_600_requests(lab, name):
    expected, found = run_both(lab, name, LONG_SEEDS)
    check_same_answers(found, expected)
    # With windows, fewer requests run at a time on as many blocks.
    check_pressure(found, LONG_SEEDS, least=1 if name == "windows" else 5)


def test_rejected_drafts_are_never_served(lab):
    found = run_pressure(lab, "llama", 2, drafts=NGRAM, extra={})
    assert tokens_of(found) == tokens_of(run_pressure(lab, "llama", 2))
    assert min(found["preemptions"]) >= 5, found["preemptions"]
    assert hit_tokens(found) > 2000
    # Nearly all of them, as weights are random.
    assert found["metrics"]["vllm:spec_decode_num_draft_tokens"] > 1000
