"""Test set-up, for tests/ and for the doctests of jaxkv/ alike.

JAXKV_TEST_PLATFORM=cuda (or tpu) runs the tests there; without it they run on the
CPU backend, which every machine has.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported; in the environment, so that child processes have it too.
os.environ["JAX_PLATFORMS"] = ",".join(
    dict.fromkeys([os.environ.get("JAXKV_TEST_PLATFORM", "cpu"), "cpu"])
)

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run: a red test is red again, here and in CI.
hypothesis.settings.register_profile(
    "jaxkv", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxkv")


def pytest_configure() -> None:
    """Refuse a platform that is not there: jax would quietly take the CPU."""
    platform = os.environ.get("JAXKV_TEST_PLATFORM", "cpu")
    if platform != "cpu" and jax.default_backend() == "cpu":
        raise pytest.UsageError(f"JAXKV_TEST_PLATFORM={platform} finds only the CPU.")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out long tests unless `-m` names them; skip GPU tests without a GPU."""
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    # Ask for a GPU only where a test wants one: the question starts the backends.
    if gpu and not any(device.platform == "gpu" for device in jax.devices()):
        reason = "no GPU (JAXKV_TEST_PLATFORM=cuda runs the tests on one)"
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Give up compiled programs file by file.

    Each maps some memory of its own, and a process may have 65,530 maps on Linux: the
    suite compiles so much that LLVM would crash for want of another.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Recorded request traces, which lie beside the checkout where there are any."""
    path = Path(__file__).resolve().parent.parent / "shared" / "traces"
    if not path.is_dir():
        pytest.skip("no traces beside the checkout (../shared/traces)")
    return path


@pytest.fixture
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever colours and widths the environment asks for."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
