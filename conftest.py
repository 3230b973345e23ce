"""Test set-up, for tests/ and for the doctests of jaxkv/ alike.

JAXKV_TEST_PLATFORM=cuda (or tpu) runs the tests there; without it they run on the
CPU backend, which every machine has. There XLA optimizes little, for it compiles in a
quarter of the time then, and the suite compiles thousands of programs; with
JAX_DISABLE_MOST_OPTIMIZATIONS=0, and in long tests, it compiles as it does for users.

Machine code is kept between runs in the user's cache folder, for all checkouts: its
files are named by what they are made of, so that none is out of date. XDG_CACHE_HOME
names another folder, such as an empty one.
"""

import contextlib
import gc
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Before jax is imported; in the environment, so that child processes have it too.
os.environ["JAX_PLATFORMS"] = ",".join(
    dict.fromkeys([os.environ.get("JAXKV_TEST_PLATFORM", "cpu"), "cpu"])
)
if os.environ.get("JAXKV_TEST_PLATFORM", "cpu") != "cpu":
    # Children and the test of the mode "fused" need memory beside this process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

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
# For pytest-timeout: a test that takes longer hangs, however busy the machine is.
_MAX_TEST_S, _MAX_LONG_TEST_S = 600, 7200

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
    "tests/transfer/test_cost.py",
    "tests/tools/demo/test_engine.py",
    "tests/scheduling/test_record_processes.py",
    "tests/integrations/test_vllm.py",
)
_KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "jaxkv-tests")
_COMPILED = pytest.StashKey[Path]()
_MAX_KEPT_BYTES = 512 << 20
_MAX_RUN_S = 24 * 3600
_MANY_MAPS = 40_000


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Choose how many processes share the tests, as many as have cores and memory."""
    if PLATFORM != "cpu":
        return 1  # There is one accelerator.
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, memory_bytes // (_GIB_PER_WORKER << 30), 8))


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a platform that is not there; share what is compiled with other processes.

    A process that has dropped its programs (`few_programs`) finds them there, too.
    """
    if PLATFORM != "cpu" and jax.default_backend() == "cpu":
        # JAX would quietly take the CPU.
        raise pytest.UsageError(f"JAXKV_TEST_PLATFORM={PLATFORM} finds only the CPU.")
    if hasattr(config.option, "loadscopereorder"):
        # pytest-xdist would begin with the files of the most tests, the quickest.
        config.option.loadscopereorder = False
    is_long = "long" in config.option.markexpr
    os.environ.setdefault(
        "PYTEST_TIMEOUT", str(_MAX_LONG_TEST_S if is_long else _MAX_TEST_S)
    )
    if PLATFORM == "cpu" and not is_long and _OPTIMIZES_LITTLE not in os.environ:
        _optimize_little()
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # Such as in the processes that share the tests.
    config.stash[_COMPILED] = folder = _folder_of_programs()
    if folder.parent == _KEPT:  # Numba is not imported yet.
        os.environ.setdefault("NUMBA_CACHE_DIR", str(_KEPT))
    for name, value in (
        ("jax_compilation_cache_dir", str(folder)),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
        # By default XLA gets the run's folder as a flag, and flags are part of a name.
        ("jax_persistent_cache_enable_xla_caches", "none"),
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
    """Keep what was compiled for the next run."""
    if _COMPILED in config.stash:
        folder = config.stash[_COMPILED]
        with contextlib.suppress(ImportError, OSError):
            _keep_programs(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _folder_of_programs() -> Path:
    """Make a folder for this run's XLA programs, with those of earlier runs."""
    try:
        _kept_programs().mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=_KEPT))
        for path in _kept_programs().iterdir():
            os.link(path, folder / path.name)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="jaxkv-tests-"))
    return folder


def _kept_programs() -> Path:
    """Return the folder of XLA programs for this processor.

    Versions and flags are part of the names that jax gives to files.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        cpu = platform.processor()
    features = [line for line in cpu.split("\n") if re.match("model name|flags", line)]
    digest = hashlib.sha256("\n".join(features or [cpu]).encode())
    return _KEPT / f"xla-{digest.hexdigest()[:16]}"


def _keep_programs(folder: Path) -> None:
    """Keep the new programs of a folder, and delete the oldest if there are too many.

    jax writes files in place, so that a process that is killed may leave a part of one.
    """
    from jax._src.compilation_cache import decompress_executable

    kept = _kept_programs()
    for path in folder.iterdir():
        if not (kept / path.name).exists():
            with contextlib.suppress(Exception):
                decompress_executable(path.read_bytes())
                os.link(path, kept / path.name)
    files = [(path.stat(), path) for path in kept.iterdir()]
    files.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
    sizes = itertools.accumulate(stat.st_size for stat, _ in files)
    for total, (_, path) in zip(sizes, files, strict=True):
        if total > _MAX_KEPT_BYTES:
            path.unlink(missing_ok=True)
    for path in _KEPT.glob("run-*"):  # Such as of a run that was killed.
        if path.stat().st_mtime < time.time() - _MAX_RUN_S:
            shutil.rmtree(path, ignore_errors=True)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Begin with what takes longest; leave out long tests unless `-m` names them."""
    rank = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))
    for item in items:
        if item.nodeid.split("::")[0] in rank:
            item.add_marker("slow")
    if "long" not in config.option.markexpr:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


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
