"""The test of the mode "fused": the real one on the CPU, and fake failures."""

import dataclasses
import inspect
import json
import sys

import jax
import pytest
from jaxlib import xla_client

from jaxkv.transfer import probe
from tests.rigs.device_cases import only_on_cpu


@pytest.fixture(autouse=True)
def forget():
    """Clear the cached results for each test."""
    probe._probe_once.cache_clear()
    yield
    probe._probe_once.cache_clear()


@pytest.fixture
def commands(monkeypatch):
    """Keep the commands that would be run, and let them succeed."""
    seen = []

    def run(command, **options):
        seen.append((command, options))
        return probe.subprocess.CompletedProcess(command, 0, f"noise\n{probe._OK}\n")

    monkeypatch.setattr(probe.subprocess, "run", run)
    return seen


def child(code, timeout_s=60.0):
    return probe._run_child([sys.executable, "-c", code], "gpu", timeout_s)


def test_fused_may_be_used_on_the_cpu(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")  # must not reach the child
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")
    result = probe.probe_fused("cpu")
    assert result == probe.ProbeResult(
        True,
        "Mode 'fused' was tested on cpu in a separate process, which read back all "
        "bytes that it saved.",
    )
    monkeypatch.setattr(probe.subprocess, "run", None)  # is not called again
    assert probe.probe_fused("cpu") is result


@only_on_cpu
def test_a_missing_device_is_given_as_the_reason():
    result = probe.probe_fused("gpu")
    assert not result.ok
    assert "failed with exit status 1 (RuntimeError: Unknown backend" in result.reason


def test_all_bit_patterns_come_back():
    assert probe.count_changed("cpu") == (0, 2 << 16)


def test_values_that_come_back_changed_are_counted(monkeypatch, capsys):
    def load(*args):
        leaves, token = loads(*args)
        return [leaves[0], leaves[1].at[3, 0, 0].set(1)], token

    loads = probe._load
    monkeypatch.setattr(probe, "_load", load)
    monkeypatch.setattr(probe, "_write_no_core_file", lambda: None)
    probe.main("cpu")
    assert capsys.readouterr().out == f"{probe._CHANGED} 1 of 131072\n"


def test_host_memory_that_is_not_recycled_is_a_failure(monkeypatch):
    jit = jax.jit

    def without_donation(function, **options):
        return jit(function, **(options | {"donate_argnums": ()}))

    monkeypatch.setattr(probe.jax, "jit", without_donation)
    with pytest.raises(RuntimeError, match="was not recycled"):
        probe.count_changed("cpu")


CASES = {
    "import os; os.abort()": "was ended by SIGABRT. Use mode 'staged'.",
    "import os, sys\nsys.stderr.write('F1 a.cc:7] Check failed: b\\n*** stack\\n');"
    "sys.stderr.flush(); os.abort()": "ended by SIGABRT (F1 a.cc:7] Check failed: b).",
    "import os; os.kill(os.getpid(), 9)": "was ended by SIGKILL",
    "raise SystemExit(3)": "failed with exit status 3. Use mode 'staged'.",
    "raise MemoryError('no room')": "failed with exit status 1 (MemoryError: no room).",
    "import sys; sys.exit('odd\\nend')": "failed with exit status 1 (end).",
    "": "gave no answer, but printed ''.",
    "print('jaxkv probe: unchanged?')": "printed 'jaxkv probe: unchanged?'.",
    "import sys; sys.stdout.buffer.write(b'\\xff' * 999)": "printed '\ufffd\ufffd",
    f"print('{probe._CHANGED} 252 of 131072')": "read back other bytes than it "
    "saved: 252 of 131072 values differ. Use mode 'staged'.",
    f"print('{probe._OK}'); raise SystemExit(4)": "failed with exit status 4",
}


def test_a_failing_child_is_given_as_the_reason():
    for code, text in CASES.items():
        result = child(code)
        assert not result.ok, code
        start = "Mode 'fused' was tested on gpu in a separate process, which "
        assert result.reason.startswith(start)
        assert text in result.reason
        assert len(result.reason) < 500
    never_ends = child("import time; time.sleep(600)", timeout_s=1.0)
    missing = probe._run_child(["/no/such/python"], "gpu", 60.0)
    assert not never_ends.ok
    assert not missing.ok
    assert "did not finish within 1 s. Use mode 'staged'." in never_ends.reason
    assert "could not be started: [Errno 2] No such file" in missing.reason


def test_nothing_is_run_for_another_platform_or_a_wrong_timeout(commands):
    for platform in ("tpu", "unheard of"):
        result = probe.probe_fused(platform)
        assert not result.ok
        assert f"cannot be tested on {platform}, whose devices may" in result.reason
        assert result.reason.endswith("use mode 'staged'.")
    for timeout_s in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"timeout_s=.* more than 0 seconds\."):
            probe.probe_fused("cpu", timeout_s=timeout_s)
    assert commands == []


def test_a_result_that_is_cached_cannot_be_changed():
    result = probe.ProbeResult(True, "it was tested")
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.ok = False


def test_each_platform_is_tested_once_in_a_child_that_preallocates_nothing(
    commands, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path, "/added/later"])
    for name in probe._IGNORED_SWITCHES:
        monkeypatch.setenv(name, "1")
    preallocates = {
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE",
    }
    for name in preallocates:
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for platform in ("cpu", "gpu", "cpu", "gpu"):
        assert probe.probe_fused(platform, timeout_s=7).ok
    assert [command[-1] for command, _ in commands] == ["cpu", "gpu"]
    assert {options["timeout"] for _, options in commands} == {7.0}
    assert json.loads(commands[0][0][-2]) == sys.path
    on_cpu, on_gpu = (options["env"] for _, options in commands)
    assert {on_gpu[name] for name in preallocates} == {"false"}
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "3"
    assert on_cpu["JAX_PLATFORMS"] == "cpu"
    # The configuration of this process counts, not its present environment.
    assert on_gpu["JAX_PLATFORMS"] == jax.config.jax_platforms
    assert not on_gpu.keys() & set(probe._IGNORED_SWITCHES)


def test_the_child_writes_no_core_file(monkeypatch):
    resource = pytest.importorskip("resource")
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (7, 9))
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    probe._write_no_core_file()
    assert limits == [(resource.RLIMIT_CORE, (0, 9))]
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    probe._write_no_core_file()


TFRT = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def test_the_client_with_one_stream_is_refused(monkeypatch):
    message = f"{TFRT}=.* makes XLA .* unset it, or set"
    for value in ("1", " 1 ", "2", "true", "True", "yes"):
        with pytest.raises(ValueError, match=message):
            probe.check_client("gpu", {TFRT: value})
        probe.check_client("cpu", {TFRT: value})
        probe.check_client("tpu", {TFRT: value})
    for environ in ({}, {TFRT: "0"}, {TFRT: "false"}, {TFRT: ""}):
        probe.check_client("gpu", environ)
    monkeypatch.setenv(TFRT, "1")
    with pytest.raises(ValueError, match=f"{TFRT}='1'"):
        probe.check_client("gpu")


def test_jaxlib_still_has_the_variable_and_its_default(monkeypatch):
    options = xla_client.generate_pjrt_gpu_plugin_options
    assert TFRT in inspect.getsource(options)
    monkeypatch.delenv(TFRT, raising=False)
    assert options()["use_tfrt_gpu_client"] is False
