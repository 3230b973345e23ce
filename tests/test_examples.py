"""The examples run as they stand, and print what README says they print."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "events.py": "batch 1: CPU, 1 blocks, tokens 48..63, after a block, adapter None",
    "jetstream_prefix_cache.py": "the same answers: True",
    "metrics.py": "vllm:external_prefix_cache_hits_total {'engine': '0'} 1600.0",
    "quickstart.py": "2 blocks back: k = 1.0, v = 2.0",
    "serve.py": "round 2, prompt 0: (",
    "storage.py": "engine 2, prompt 0: (",
    "vllm_connector.py": "32 of 40 tokens from the host: [[1, 2], [1, 2]] in blocks",
}
# Examples that need packages of their own, or do not end, and the tests that run them.
ELSEWHERE = {
    "maxtext_offload.py": "tests/integrations/test_maxtext_engine.py",
    "serve_metrics.py": "tests/observe/test_prometheus.py",
}


@functools.cache  # Some tests read what another one has read.
def run(example):
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / example],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", sorted(EXPECTED))
def test_runs(example):
    assert EXPECTED[example] in run(example)


def test_the_replay_of_the_example_of_events_has_all_messages_and_not_only_the_first():
    batches = [line.split(":")[0] for line in run("events.py").splitlines()]
    assert sorted(set(batches)) == ["batch 0", "batch 1", "batch 2"]


def test_every_example_is_tested():
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert examples == EXPECTED.keys() | ELSEWHERE.keys()
    for example, test in ELSEWHERE.items():
        assert example in (ROOT / test).read_text(encoding="utf-8")


def test_serving_again_brings_prompts_back_with_the_same_answer():
    lines = run("serve.py").splitlines()
    first, second = (
        [line.split(": ")[1].split("), ") for line in lines if line.startswith(name)]
        for name in ("round 1", "round 2")
    )
    assert [answer for answer, _ in first] == [answer for answer, _ in second]
    assert {said for _, said in second} == {"576 of 600 tokens from the host"}


def test_the_second_engine_finds_what_the_first_has_stored():
    lines = run("storage.py").splitlines()
    first, second = (
        [line.split(": ")[1].split("), ") for line in lines if line.startswith(name)]
        for name in ("engine 1", "engine 2")
    )
    assert [answer for answer, _ in first] == [answer for answer, _ in second]
    told = {said for _, said in second}
    assert told == {"576 of 600 tokens by way of the host"}


def test_readme_shows_the_quickstart_as_it_is():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    source = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert source.split('"""\n\n', 1)[1] in readme
