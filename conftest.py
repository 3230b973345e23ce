"""Test set-up, for tests/ and for the doctests of jaxkv/ alike.

JAXKV_TEST_PLATFORM=cuda (or tpu) runs the tests there; without it they run on the
CPU backend, which every machine has. There XLA optimizes little, for it compiles in a
quarter of the time then, and the suite compiles thousands of programs; with
JAX_DISABLE_MOST_OPTIMIZATIONS=0, and in long tests, it compiles as it does for users.
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported; in the environment, so that child processes have it too.
os.environ["JAX_PLATFORMS"] = ",".join(
    dict.fromkeys([os.environ.get("JAXKV_TEST_PLATFORM", "cpu"), "cpu"])
)

import hypothesis
import jax
import pytest

PLATFORM = os.environ.get("JAXKV_TEST_PLATFORM", "cpu")
_OPTIMIZES_LITTLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_QUICK_TO_COMPILE = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run: a red test is red again, here and in CI.
hypothesis.settings.register_profile(
    "jaxkv", deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("jaxkv")

# Have the garbage collector look less often: what is collected and imported here stays,
# and what JAX traces is quickly made and seldom garbage.
gc.set_threshold(50_000, 20, 20)

_GIB_PER_WORKER = 4

# The files that take longest, begun first: one that begins late has a process work long
# after the others have nothing left.
_LONGEST = (
    "tests/tiers/test_host_differential.py",
    # This one needs nothing that Numba compiles, so no two processes compile the same
    # at once: the first does, and most others find it.
    "tests/transfer/test_bits.py",
    "tests/tools/demo/test_storage.py",
    "tests/transfer/storage/test_stores.py",
    "tests/tools/demo/test_recorded_demo.py",
    "tests/test_code_cache.py",
    "tests/policies/test_contract.py",
    "tests/transfer/test_processes.py",
    "tests/explorer/test_explorer.py",
    "tests/scheduling/test_storage_processes.py",
    "tests/transfer/test_sharded.py",
    "tests/integrations/test_prefix_storage.py",
    "tests/tools/demo/test_engine.py",
    "tests/scheduling/test_record_processes.py",
    "tests/integrations/test_vllm.py",
)
_COMPILED = pytest.StashKey[str]()
_MANY_MAPS = 15_000


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Choose how many processes share the tests, as many as have cores and memory."""
    if PLATFORM != "cpu":
        return 1  # There is one accelerator.
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, memory_bytes // (_GIB_PER_WORKER << 30), 8))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a platform that is not there; keep what is compiled for this run.

    What one process has compiled the others find, and so does the process itself once
    it has dropped it (`few_programs`).
    """
    if PLATFORM != "cpu" and jax.default_backend() == "cpu":
        # JAX would quietly take the CPU.
        raise pytest.UsageError(f"JAXKV_TEST_PLATFORM={PLATFORM} finds only the CPU.")
    if hasattr(config.option, "loadscopereorder"):
        # pytest-xdist would begin with the files of the most tests, the quickest.
        config.option.loadscopereorder = False
    is_long = "long" in config.option.markexpr
    if PLATFORM == "cpu" and not is_long and _OPTIMIZES_LITTLE not in os.environ:
        _optimize_little()
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # Such as in the processes that share the tests.
    config.stash[_COMPILED] = folder = tempfile.mkdtemp(prefix="jaxkv-tests-")
    for name, value in (
        ("jax_compilation_cache_dir", folder),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def _optimize_little() -> None:
    """Have XLA compile quickly: here, in workers of pytest-xdist, and in children."""
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ[_OPTIMIZES_LITTLE] = "1"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK_TO_COMPILE}".strip()
    # XLA ends a process that gives it a flag that its version does not have.
    known = subprocess.run(
        [sys.executable, "-c", "from jaxlib import _jax; _jax.CompileOptions()"],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
        check=False,
    )
    if known.returncode == 0:
        os.environ["XLA_FLAGS"] = flags


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what was compiled."""
    if _COMPILED in config.stash:
        shutil.rmtree(config.stash[_COMPILED], ignore_errors=True)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Begin with what takes longest; leave out long tests unless `-m` names them.

    GPU tests are skipped where there is no GPU.
    """
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))
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


def pytest_collection_finish() -> None:
    """Spare the garbage collector what is imported: it stays, and is most there is."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Drop compiled programs after a file, when there are many.

    Each maps some memory of its own, and a process may have 65,530 maps on Linux: the
    suite compiles so much that LLVM would crash for want of another.
    """
    yield
    if _num_maps() > _MANY_MAPS:
        gc.unfreeze()
        jax.clear_caches()
        gc.collect()
        gc.freeze()


def _num_maps() -> float:
    """Count the memory maps of this process; there are many where none can tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return float("inf")


@pytest.fixture(scope="session")
def shared_traces() -> Path:
    """Recorded request traces, which lie beside the checkout where there are any."""
    path = Path(__file__).resolve().parent.parent / "shared" / "traces"
    if not path.is_dir():
        pytest.skip("no traces beside the checkout (../shared/traces)")
    return path


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Listen from here on: what earlier tests left may log when it is collected.

    What is left then is not looked at again, or each of these tests would look at all
    that was traced and compiled before: most of the time of a quick one.
    """
    gc.collect()
    gc.freeze()
    caplog.clear()
    return caplog


@pytest.fixture
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever colours and widths the environment asks for."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
