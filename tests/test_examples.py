"""The examples run as they stand, and print what README says they print."""

import contextlib
import functools
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import yaml

from jaxkv.integrations.vllm.config import read_extra_config
from jaxkv.transfer.limits import pinned_pool

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {
    "events.py": "batch 1: CPU, 1 blocks, tokens 48..63, after a block, adapter None",
    "jetstream_prefix_cache.py": "the same answers: True",
    "metrics.py": "vllm:external_prefix_cache_hits_total {'engine': '0'} 1600.0",
    "integrate_manager.py": "turn 3: 28 of 30 tokens from the host",
    "integrate_own_pool.py": "blocks came from the host: True",
    "integrate_prefix_store.py": "another user: 20 of 23 tokens from the host",
    "integrate_scheduler.py": "21 blocks came from the host",
    "memory_tier.py": "3 blocks went down; answers: [(None, False), (4, True)]",
    "quickstart.py": "2 blocks back: k = 1.0, v = 2.0",
    "storage.py": "engine 2, prompt 0: (",
    "vllm_connector.py": "32 of 40 tokens from the host: [[1, 2], [1, 2]] in blocks",
}
# Those that need packages of their own, or do not end by themselves, and their tests.
ELSEWHERE = {
    "event_subscriber.py": "tests/observe/test_subscriber_faults.py",
    "maxtext_offload.py": "tests/integrations/test_maxtext_engine.py",
    "prefill_proxy.py": "tests/test_prefill_proxy.py",
    "serve_metrics.py": "tests/observe/test_prometheus.py",
    "sglang_server.py": "tests/integrations/test_sglang.py",
    "toy_engine.py": "tests/integrations/test_engine_hooks.py",
    "toy_model.py": "tests/rigs/wrong_engines.py",
}


@functools.cache  # Some tests read what another one has read.
def run(example, strict="0"):
    """Run an example in this process, which has imported its modules."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        # As users have them.
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        contextlib.redirect_stdout(printed),
    ):
        patch.setenv("JAXKV_STRICT", strict)
        patch.syspath_prepend(ROOT / "examples")
        patch.setattr(sys, "argv", [example])
        runpy.run_path(str(ROOT / "examples" / example), run_name="__main__")
    return printed.getvalue()


def test_an_example_runs_and_an_integrated_engine_gives_the_same_tokens():
    for example, line in EXPECTED.items():
        assert line in run(example), example
        if example.startswith("integrate_"):
            for printed in (run(example), run(example, strict="1")):
                assert printed.endswith("tokens are identical: True\n"), example


def test_the_replay_of_the_example_of_events_has_all_messages_and_not_only_the_first():
    batches = [line.split(":")[0] for line in run("events.py").splitlines()]
    assert sorted(set(batches)) == ["batch 0", "batch 1", "batch 2"]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=() if name == "quickstart.py" else pytest.mark.long)
        for name in sorted(EXPECTED)
    ],
)
def test_runs_in_a_process_of_its_own(example):
    command = [sys.executable, "-W", "error", ROOT / "examples" / example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert EXPECTED[example] in done.stdout


def test_every_example_is_tested():
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert examples == EXPECTED.keys() | ELSEWHERE.keys()
    for example, test in ELSEWHERE.items():
        assert Path(example).stem in (ROOT / test).read_text(encoding="utf-8")


def test_the_second_engine_finds_what_the_first_has_stored():
    lines = run("storage.py").splitlines()
    first, second = (
        [line.split(": ")[1].split("), ") for line in lines if line.startswith(name)]
        for name in ("engine 1", "engine 2")
    )
    assert [answer for answer, _ in first] == [answer for answer, _ in second]
    assert {tokens for _, tokens in second} == {"576 of 600 tokens by way of the host"}


def test_readme_shows_the_quickstart_as_it_is():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    source = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert source.split('"""\n\n', 1)[1] in readme


def test_the_manifest_of_two_hosts_gives_vllm_settings_that_it_takes():
    """Its fields were checked against LeaderWorkerSet's schema when it was written."""
    text = (ROOT / "examples" / "vllm_hosts.yaml").read_text(encoding="utf-8")
    group = yaml.safe_load(text)["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[f"{role}Template"]["spec"] for role in ("leader", "worker"))
    assert leader["nodeSelector"] == worker["nodeSelector"]
    (server,), (follower,) = leader["containers"], worker["containers"]
    for name in ("image", "env", "resources", "volumeMounts"):
        assert server[name] == follower[name]
    command = server["args"][0]
    config = json.loads(re.search("--kv-transfer-config '(.*?)'", command, re.S)[1])
    offload, _ = read_extra_config(config["kv_connector_extra_config"])
    variables = {variable["name"]: variable["value"] for variable in server["env"]}
    assert variables["TPU_MULTIHOST_BACKEND"] == "ray"
    # An eighth more is spare room.
    share = offload.host_bytes // group["size"]
    limit = pinned_pool("tpu", variables)
    assert share + share // 8 < limit.num_bytes
    # A chip of v7x has two devices.
    chips = int(server["resources"]["limits"]["google.com/tpu"])
    assert f"--tensor-parallel-size {2 * chips * group['size']} " in command
