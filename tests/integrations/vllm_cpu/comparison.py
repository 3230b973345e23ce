"""Runs of the real vLLM in processes, and comparisons of their answers."""

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from multiprocessing import forkserver
from unittest import mock

import numpy as np

from .lab import environ

WAIT_S = 1800
# Scenarios that share a process unless an option is special, because it takes longer to
# start than to run them. The last one changes the weights.
PLAIN = {"model": "llama-float32"}
SHARED = ("conversations", "salts", "resets", "new_weights")
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
EAGLE = {"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}
COPY = EAGLE | {"model": "copy"}
# Models with each way to draft that has layers.
DRAFTED = (
    ("deep-bfloat16", EAGLE),
    ("deep-bfloat16", EAGLE | {"method": "dflash", "model": "flash"}),
    ("predictor-float32", {"method": "mtp", "num_speculative_tokens": 3}),
)
# Latents as tpu-inference asks for them; its pages have 32 tokens, or a multiple. With
# latents that are not quantised its weights, and so all answers, are NaN.
LATENTS = {
    "model": "latents-float32",
    "engine": {
        "block_size": 32,
        "kv_cache_dtype": "fp8",
        "additional_config": {
            "sharding": {"sharding_strategy": {"enable_dp_attention": True}}
        },
    },
    "variables": {
        "NEW_MODEL_DESIGN": "1",
        "DISABLE_MLA_Q_ACTIVATION_QUANTIZATION": "1",
    },
}


class Lab:
    """A folder with models, and runs in processes, each done once.

    All processes that share the tests keep the answers of runs in `results`.
    """

    def __init__(self, folder, results):
        self.folder = folder
        self.results = results
        make = "import pathlib; from vllm_cpu import lab; lab.make_lab(pathlib.Path())"
        self.run_code(make)

    def environ(self, **variables):
        defaults = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Runs share compiled programs, and a model runs for long.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        }
        return {**os.environ, **environ(self.folder), **defaults, **variables}

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

    def run_both(self, scenario, *, extra=None, **options):
        """Run a scenario without a connector and with jaxkv, at the same time."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            actual = pool.submit(self.run, scenario, extra=extra or {}, **options)
            expected = self.run(scenario, **options)
            return expected, actual.result()

    def run(
        self,
        scenario,
        *,
        fault="",
        num_processes=1,
        num_devices=1,
        num_hosts=1,
        **options,
    ):
        """Run a scenario; return its answers, its metrics and what it logged.

        Each of several hosts has `num_devices`.
        """
        is_plain = not fault and num_processes == num_devices == num_hosts == 1
        is_plain &= options in (PLAIN, PLAIN | {"extra": {}})
        names = SHARED if is_plain and scenario in SHARED else (scenario,)
        results = self._run(
            *(names, json.dumps(options, sort_keys=True)),
            *(fault, num_processes, num_devices, num_hosts),
        )
        return results[names.index(scenario)]

    @functools.cache  # noqa: B019
    def _run(self, *arguments):
        """Run once in all the processes that share the tests."""
        name = hashlib.sha256(repr(arguments).encode()).hexdigest()
        path = self.results / f"{name}.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_text(json.dumps(self._run_now(*arguments)))
            return json.loads(path.read_text())

    def _run_now(self, names, *arguments):
        done = self.complete(names, *arguments)
        *outputs, rest = re.split(r"^RESULT (.*)\n", done.stdout, flags=re.MULTILINE)
        assert len(outputs) == 2 * len(names), done.stdout[-8000:]
        return [
            json.loads(result) | {"log": log + rest}
            for log, result in zip(outputs[::2], outputs[1::2], strict=True)
        ]

    def complete(
        self, names, options, fault="", num_processes=1, num_devices=1, num_hosts=1
    ):
        """Run a process to its end, however it ends; return what it printed."""
        variables = {
            "JAXKV_VLLM_FAULT": fault,
            # Only vLLM's own models take adapters.
            "MODEL_IMPL_TYPE": "vllm" if "enable_lora" in options else "auto",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(num_processes - 1),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
            "JAXKV_VLLM_HOSTS": str(num_hosts) if num_hosts > 1 else "",
            # Forked workers need not import vLLM again.
            "VLLM_WORKER_MULTIPROC_METHOD": "fork" if num_hosts > 1 else "spawn",
        }
        own = json.loads(options).get("variables", {})
        variables = self.environ(**variables | own)
        arguments = "+".join(names), ".", options
        if not own and num_hosts == 1:
            return self._fork(variables, arguments)
        return subprocess.run(
            [sys.executable, "-m", "vllm_cpu.run", *arguments],
            cwd=self.folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )

    def _fork(self, variables, arguments):
        """Run in a process that has imported vLLM already."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["vllm_cpu.forked"])
        with mock.patch.dict(os.environ, self.environ()):
            forkserver.ensure_running()
        with tempfile.NamedTemporaryFile("r") as output:
            job = {"JOB": (self.folder, variables, arguments, output.name)}
            # Another package `tests` hides this one there.
            process = context.Process(
                target=runpy.run_module, args=("vllm_cpu.forked", job, "__main__")
            )
            process.start()
            process.join(WAIT_S)
            if process.is_alive():
                process.kill()
                process.join()
            return subprocess.CompletedProcess(
                arguments, process.exitcode, output.read()
            )


def tokens_of(result):
    return [answer["tokens"] for answer in result["answers"]]


def hit_tokens(result):
    return result["metrics"].get("vllm:external_prefix_cache_hits", 0)


def check_same_answers(actual, expected, tolerance=1e-3):
    """Compare all tokens and log-probabilities."""
    assert len({tuple(tokens) for tokens in tokens_of(expected)}) > 3
    assert tokens_of(actual) == tokens_of(expected)
    for ours, theirs in zip(actual["answers"], expected["answers"], strict=True):
        np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=tolerance)


def texts_of(ask, prompts, headers=None):
    """Send prompts to a server one by one; return the texts of the answers."""
    body = {"model": ask.model, "max_tokens": 8, "temperature": 0}
    body["ignore_eos"] = True
    answers = [
        ask("/v1/completions", body | {"prompt": prompt}, headers) for prompt in prompts
    ]
    return [json.loads(answer)["choices"][0]["text"] for answer in answers]


@contextlib.contextmanager
def server(lab, log, *options, model="llama-float32"):
    """Run ``vllm serve``; yield a function that sends requests, with URL and model."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = (
        "import sys\nfrom vllm.entrypoints.cli.main import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script = lab.folder / "vllm_main.py"
    script.write_text(command)
    words = ["serve", model, "--dtype", "float32", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--block-size", "16"]
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

    def ask(path, body=None, headers=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            data,
            {"Content-Type": "application/json"} | (headers or {}),
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
        ask.url, ask.model = f"http://127.0.0.1:{port}", model
        yield ask
    finally:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def metric_of(page, name, engine=""):
    """Sum a metric of a page of ``/metrics``, of all engines or of one."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith(name + "{") and f'engine="{engine}' in line
    ]
    assert values, f"{name} is not in /metrics"
    return sum(values)
