"""Arrays that are ready late; a folder in which the real vLLM runs."""

import importlib.util

import pytest

from tests.transfer.conftest import delayed  # noqa: F401


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A folder with models, and runs of the real vLLM, each done once."""
    if not all(map(importlib.util.find_spec, ("vllm", "tpu_inference"))):
        pytest.skip("no vLLM with tpu-inference (.ci/vllm has an environment)")
    from tests.integrations.vllm_cpu.comparison import Lab

    return Lab(tmp_path_factory.mktemp("lab"))
