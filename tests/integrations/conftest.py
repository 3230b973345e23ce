"""Fixtures that close objects after a test, and the folder of the real vLLM."""

import contextlib
import importlib.util

import pytest

# Files that import an engine.
collect_ignore = []
if importlib.util.find_spec("tpu_inference") is None:
    collect_ignore += ["vllm_cpu/forked.py", "vllm_cpu/hosts.py"]
if importlib.util.find_spec("sgl_jax") is None:
    collect_ignore += [f"sglang_cpu/{name}.py" for name in ("rig", "scenes", "table")]


@pytest.fixture
def closing():
    """Return a function that closes its argument after the test, and returns it."""
    with contextlib.ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture(scope="session")
def lab(tmp_path_factory, worker_id):
    """A folder with models, and runs of the real vLLM, each done once."""
    if not all(map(importlib.util.find_spec, ("vllm", "tpu_inference"))):
        pytest.skip("no vLLM with tpu-inference (.ci/vllm has an environment)")
    from tests.integrations.vllm_cpu.comparison import Lab

    # Of this process alone, or of all that share the tests.
    base = tmp_path_factory.getbasetemp()
    results = (base if worker_id == "master" else base.parent) / "results"
    results.mkdir(exist_ok=True)
    return Lab(tmp_path_factory.mktemp("lab"), results)
