"""The real vLLM with tpu-inference's runner, on the CPU, with jaxkv and without.

Each run is a process (`vllm_cpu.run`), with random small models. What a run answers
with jaxkv is compared with what one without a connector answers: every token, and the
log-probabilities. .ci/vllm makes the environment, and runs this there.
"""

import concurrent.futures
import contextlib
import functools
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

from tests.integrations.vllm_cpu.lab import environ

WAIT_S = 900
LONG = pytest.mark.long
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
# Each group of layers has blocks of its own.
HYBRID = {"model": "hybrid-float32", "num_blocks": 80}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None
    or importlib.util.find_spec("tpu_inference") is None,
    reason="no vLLM with tpu-inference (.ci/vllm has an environment)",
)


class Lab:
    """A folder with models, and runs in processes, each done once."""

    def __init__(self, folder):
        self.folder = folder
        make = "import pathlib; from vllm_cpu import lab; lab.make_lab(pathlib.Path())"
        self.run_code(make)

    def environ(self, **more):
        """The environment of a run."""
        multiprocessing = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return {**os.environ, **environ(self.folder), **multiprocessing, **more}

    def run_code(self, code):
        """Run some Python in the folder; return what it printed."""
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            cwd=self.folder,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def run_both(self, scenario, **options):
        """Run a scenario without a connector and with jaxkv, at the same time."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = pool.submit(self.run, scenario, extra={}, **options)
            expected = self.run(scenario, **options)
            return expected, found.result()

    def run(self, scenario, *, fault="", num_processes=1, num_devices=1, **options):
        """Run a scenario; return its answers, its metrics and what it logged."""
        return self._run(
            *(scenario, json.dumps(options, sort_keys=True)),
            *(fault, num_processes, num_devices),
        )

    @functools.cache  # noqa: B019
    def _run(self, scenario, options, fault, num_processes, num_devices):
        done = subprocess.run(
            [sys.executable, "-m", "vllm_cpu.run", scenario, ".", options],
            cwd=self.folder,
            env=self.environ(
                JAXKV_VLLM_FAULT=fault,
                # Only vLLM's own models take adapters.
                MODEL_IMPL_TYPE="vllm" if "enable_lora" in options else "auto",
                VLLM_ENABLE_V1_MULTIPROCESSING=str(num_processes - 1),
                XLA_FLAGS=f"--xla_force_host_platform_device_count={num_devices}",
            ),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        log = done.stdout + done.stderr
        results = [line for line in log.splitlines() if line.startswith("RESULT ")]
        assert len(results) == 1, log[-8000:]
        return json.loads(results[0].removeprefix("RESULT ")) | {"log": log}


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    return Lab(tmp_path_factory.mktemp("lab"))


def tokens_of(result):
    return [answer["tokens"] for answer in result["answers"]]


def hit_tokens(result):
    return result["metrics"].get("vllm:external_prefix_cache_hits", 0)


def check_same_answers(found, expected, tolerance=1e-3):
    """Compare tokens, all, and log-probabilities."""
    assert len({tuple(tokens) for tokens in tokens_of(expected)}) > 3
    assert tokens_of(found) == tokens_of(expected)
    for one, other in zip(found["answers"], expected["answers"], strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=tolerance)


SERVED = {
    "float32": {"model": "llama-float32"},
    "hybrid": HYBRID,
    "tp 2": {
        "model": "llama-float32",
        "engine": {"tensor_parallel_size": 2},
        "num_devices": 2,
    },
    "bfloat16": {"model": "llama-bfloat16"},
}
TOLERANCE = {"bfloat16": 0.1}


@pytest.mark.parametrize(
    "name", [*list(SERVED)[:3], pytest.param("bfloat16", marks=LONG)]
)
def test_answers_are_those_of_an_engine_without_a_connector(lab, name):
    options = SERVED[name]
    expected, found = lab.run_both("conversations", **options)
    check_same_answers(found, expected, TOLERANCE.get(name, 1e-3))
    assert hit_tokens(found) > 500
    assert hit_tokens(expected) == 0


@pytest.mark.parametrize(
    "extra",
    [
        {"blocks_per_chunk": 4},
        {"eviction_policy": "arc", "num_cpu_blocks": 40},
        {"store_threshold": 2, "delay_shared_loads": True},
        {"staging_bytes": "2MiB"},
    ],
)
@pytest.mark.long
def test_answers_are_the_same_under_other_rules(lab, extra):
    found = lab.run("conversations", model="llama-float32", extra=extra)
    check_same_answers(found, lab.run("conversations", model="llama-float32"))
    assert hit_tokens(found) > 0


def test_the_comparison_fails_where_loaded_blocks_are_zero(lab):
    """The control: what is loaded is read, and wrong bytes show."""
    expected = lab.run("conversations", model="llama-float32")
    found = lab.run("conversations", model="llama-float32", extra={}, fault="zeros")
    assert hit_tokens(found) > 1000
    with pytest.raises(AssertionError):
        check_same_answers(found, expected)


def test_answers_are_the_same_where_every_second_load_fails(lab):
    expected = lab.run("conversations", model="llama-float32")
    found = lab.run("conversations", model="llama-float32", extra={}, fault="failures")
    check_same_answers(found, expected)
    assert hit_tokens(found) > 1000
    assert "failed loads" in found["log"] or "KV load failure" in found["log"]


def test_the_core_may_have_a_process_of_its_own(lab):
    expected = lab.run("conversations", model="llama-float32")
    found = lab.run("conversations", model="llama-float32", extra={}, num_processes=2)
    check_same_answers(found, expected)
    assert hit_tokens(found) > 1000
    # Lines of jaxkv come through that process's log.
    assert "(EngineCore" in found["log"]
    assert "setting aside" in found["log"]


def test_salts_are_kept_apart(lab):
    expected, found = lab.run_both("salts", model="llama-float32")
    check_same_answers(found, expected)
    cached = [answer["cached"] for answer in found["answers"]]
    per_round = [sum(cached[9 * n : 9 * n + 3]) for n in range(4)]
    # Under a new salt nothing is found; under the old one it is.
    assert per_round[:3] == [0, 0, 0]
    assert per_round[3] >= 3 * 128


@pytest.mark.long
def test_adapters_are_kept_apart(lab):
    options = {"model": "llama-float32", "engine": LORA}
    expected, found = lab.run_both("adapters", **options)
    check_same_answers(found, expected)
    assert hit_tokens(found) > 1000
    rounds = [tokens_of(expected)[9 * n : 9 * n + 3] for n in range(6)]
    assert rounds[:3] == rounds[3:]
    assert rounds[0] != rounds[1] != rounds[2] != rounds[0], "adapters that do nothing"


def test_resets_and_pools_made_anew_leave_the_answers_as_they_are(lab):
    """The scenario itself checks when the host has what."""
    found = lab.run("resets", model="llama-float32", extra={})
    assert hit_tokens(found) > 1000
    assert "the KV caches were dropped" in found["log"]


def test_new_weights_are_never_served_the_kv_of_old_ones(lab):
    expected, found = lab.run_both("new_weights", model="llama-float32")
    check_same_answers(found, expected)
    assert "the KV caches were dropped" in found["log"]


@pytest.mark.long
def test_aborts_leave_nothing_behind(lab):
    """The scenario itself counts free blocks."""
    expected, found = lab.run_both("aborts", model="llama-float32")
    check_same_answers(found, expected)
    assert hit_tokens(found) > 1000


@pytest.mark.long
def test_lazy_stores_are_refused_with_the_reason(lab):
    with pytest.raises(AssertionError, match="lazy_offload=true is not supported"):
        lab.run("conversations", model="llama-float32", extra={"lazy_offload": True})


def test_the_attention_of_the_plugin_is_that_of_tpu_inference(lab):
    printed = lab.run_code("from vllm_cpu import check_attention as c; c.main()")
    assert "6 batches alike" in printed


@contextlib.contextmanager
def server(lab, log, *options):
    """Run ``vllm serve``; give a function that asks it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = (
        "import sys\nfrom vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script = lab.folder / "vllm_main.py"
    script.write_text(command)
    words = ["serve", "llama-float32", "--dtype", "float32", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--no-async-scheduling", "--block-size", "16"]
    words += ["--num-gpu-blocks-override", "48", "--max-model-len", "512"]
    words += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, script, *words, *options],
            cwd=lab.folder,
            env=lab.environ(
                VLLM_SERVER_DEV_MODE="1", VLLM_ENABLE_V1_MULTIPROCESSING="1"
            ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            data,
            {"Content-Type": "application/json"},
            method="GET" if body is None else "POST",
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.read().decode()

    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert child.poll() is None, log.read_text()[-8000:]
            assert time.monotonic() < deadline, log.read_text()[-8000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                ask("/health")
                break
            time.sleep(0.5)
        yield ask
    finally:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_vllm_serve_has_the_hits_and_what_jaxkv_counts_in_its_metrics(lab, tmp_path):
    config = {
        "kv_connector": "TPUOffloadConnector",
        "kv_connector_module_path": "jaxkv.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"num_cpu_blocks": 400},
    }
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (6, 160)).tolist()
    log = tmp_path / "log"
    with server(lab, log, "--kv-transfer-config", json.dumps(config)) as ask:

        def answers():
            return [
                json.loads(
                    ask(
                        "/v1/completions",
                        {
                            "model": "llama-float32",
                            "prompt": prompt,
                            "max_tokens": 8,
                            "temperature": 0,
                            "ignore_eos": True,
                        },
                    )
                )["choices"][0]["text"]
                for prompt in prompts
            ]

        def metric(name):
            page = ask("/metrics")
            values = [
                float(line.rsplit(" ", 1)[1])
                for line in page.splitlines()
                if line.startswith(name + "{")
            ]
            assert values, f"{name} is not in /metrics"
            return sum(values)

        first = answers()
        assert len(set(first)) > 3
        # Of tokens, those up to the last full block of each prompt.
        assert metric("vllm:external_prefix_cache_hits_total") == 0
        assert answers() == first
        hits = metric("vllm:external_prefix_cache_hits_total")
        assert hits >= 4 * 144
        assert metric("jaxkv:kv_offload_blocks_loaded_total") == hits / 16
        assert metric("vllm:kv_offload_load_bytes_total") > 0
        assert metric("vllm:kv_offload_store_size_count") > 0
        assert metric("jaxkv:kv_offload_host_blocks") == 400
        assert metric("jaxkv:kv_offload_host_blocks_held") >= 60
        assert metric("vllm:kv_offload_lookup_sync_delay_seconds_count") >= 12
        while not json.loads(ask("/reset_prefix_cache?reset_external=true", {}))[
            "success"
        ]:
            time.sleep(0.1)
        assert answers() == first
        assert metric("vllm:external_prefix_cache_hits_total") == hits
    said = log.read_text()
    assert "host tier of 400 blocks" in said
