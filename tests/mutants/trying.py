"""Tries changed trees: each in a process of its own, until something notices.

The process that tries is a copy (a fork) of one that has imported jax, numba and pytest
and nothing of jaxkv, which saves seconds for each.
"""

import contextlib
import hashlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# A run that uses less processor time than this in this long is stuck.
_MIN_CPU_S = 0.5
_IDLE_S = 150.0


class Killer(NamedTuple):
    """A program that ends with 0 if a tree is right."""

    name: str  # In the results.
    module: str  # As `python -m` runs it, in the tree.
    arguments: tuple[str, ...]
    timeout_s: float  # Of processor time. One that takes longer has noticed: it hangs.
    rooms: tuple[str, ...] = ()  # Whose changes it is for; all if there is none.


# Tried in this order after the tests that reach a line, each if the tree has its
# module. To add one, add a line here.
KILLERS = (
    Killer(
        "the long tests of both executors",
        "pytest",
        (
            *("-x", "-q", "tests/tiers/test_host_state.py"),
            "tests/policies/test_contract.py",
            "tests/tiers/test_host_differential.py",
        ),
        900.0,
        ("policies", "tiers"),
    ),
    Killer(
        "explorer",
        "tests.explorer",
        (
            *("--world", "pair", "store", "hybrid"),
            *("--states", "3000", "--out", "/dev/null"),
        ),
        300.0,
    ),
    Killer(
        "campaign",
        "tests.campaign",
        ("--engines", "paged", "--num-engines", "6", "--steps", "200"),
        300.0,
    ),
)


class Outcome(NamedTuple):
    is_killed: bool  # Something noticed.
    by: str  # A test, or the name of a killer.
    how: str  # What it said, in a line.
    seconds: float


class Workshop:
    """A folder for copies of a tree, their trials and their machine code.

    A copy lies in the same place each time: Numba finds its code by the source's place.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._tree = folder / "tree"
        self._pristine = folder / "pristine"
        shutil.rmtree(self._pristine, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                target = self._pristine / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, target)

    def make_tree(self, path: str = "", source: str = "") -> None:
        """Copy the tree afresh, with one file changed if one is named."""
        shutil.rmtree(self._tree, ignore_errors=True)
        shutil.copytree(self._pristine, self._tree)
        if path:
            file = self._tree / path
            file.write_text(source, encoding="utf-8")
            # Python finds what it compiled by the time and size of a source: no two
            # mutants may have the same.
            when = int.from_bytes(hashlib.sha256(source.encode()).digest()[:3], "big")
            os.utime(file, (when, when))

    def run_tests(
        self, tests: Sequence[str], timeout_s: float, *, native: bool, log: Path
    ) -> Outcome:
        report = self._folder / "failed"
        report.unlink(missing_ok=True)
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))

        def run() -> int:
            arguments = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *files]
            return pytest.main(arguments, plugins=[_Chosen(tests, report)])

        code, seconds = self._run(run, timeout_s, native, log)
        by = report.read_text() if report.exists() else ""
        by, _, how = by.partition("\n")
        if code is None:
            # The last that began, if it did.
            lines = log.read_text(errors="replace").splitlines()
            began = [line for line in lines if line.startswith("begins ")]
            by = began[-1].removeprefix("begins ") if began else "the imports"
            return Outcome(True, by, "hangs", seconds)
        if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            return Outcome(False, "", "", seconds)
        return Outcome(True, by or "the imports", how or f"exit code {code}", seconds)

    def run_killer(self, killer: Killer, *, native: bool, log: Path) -> Outcome | None:
        """Run a killer; None if the tree does not have it."""
        place = self._tree / killer.module.replace(".", "/") / "__main__.py"
        if killer.module != "pytest" and not place.exists():
            return None

        def run() -> int:
            sys.argv = [killer.module, *killer.arguments]
            try:
                runpy.run_module(killer.module, run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                return int(ended.code or 0)
            return 0

        code, seconds = self._run(run, killer.timeout_s, native, log)
        if code == 0:
            return Outcome(False, "", "", seconds)
        how = f"exit code {code}" if code is not None else "hangs"
        return Outcome(True, killer.name, how, seconds)

    def _run(
        self, run: Callable[[], int], timeout_s: float, native: bool, log: Path
    ) -> tuple[int | None, float]:
        """Run something in a copy of this process, in the tree; None if it hung."""
        began_s = time.monotonic()
        scratch = self._folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            code: Any = 70
            try:
                os.setsid()
                self._enter_tree(native, scratch, log)
                code = run()
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            finally:
                sys.stdout.flush()
                os._exit(int(code))
        status = None
        used_s, since_s = 0.0, began_s
        while status is None:
            time.sleep(0.2)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            status = None
            # By processor time, as others may use the machine, too.
            now_s = _processor_s(child)
            if now_s > used_s + _MIN_CPU_S:
                used_s, since_s = now_s, time.monotonic()
            if used_s > timeout_s or time.monotonic() - since_s > _IDLE_S:
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # And what it may have started.
        if status is None:
            os.waitpid(child, 0)
            return None, time.monotonic() - began_s
        return os.waitstatus_to_exitcode(status), time.monotonic() - began_s

    def _enter_tree(self, native: bool, scratch: Path, log: Path) -> None:
        """Make this process one that was started in the tree."""
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(self._tree)
        sys.path[0] = str(self._tree)
        # Machine code is kept under a stamp of all compiled functions: one that is of
        # a mutant would push out the right one.
        kept = scratch / "numba" if native else self._folder / "numba"
        os.environ |= {
            "PYTHONPATH": str(self._tree),
            "TMPDIR": str(scratch),
            "NUMBA_CACHE_DIR": str(kept),
        }
        import numba.core.config

        numba.core.config.CACHE_DIR = str(kept)
        tempfile.tempdir = None


def _processor_s(session: int) -> float:
    """Add up the processor time of all processes of a session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += sum(map(int, fields[11:15]))  # Its own, and its children's.
    return total / os.sysconf("SC_CLK_TCK")


def prepare(folder: Path) -> None:
    """Import what takes long, and have what XLA compiles kept: call it first of all."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPYCACHEPREFIX": str(folder / "pyc"),
    }
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder / "pyc"), False
    import jax
    import jax.experimental.pallas  # noqa: F401
    import numba  # noqa: F401

    loaded = [name for name in sys.modules if name.split(".")[0] == "jaxkv"]
    assert not loaded, f"{loaded} would be those of this tree, not of the mutants."


class _Chosen:
    """Has pytest run some tests alone, in their order, and notes what fails first."""

    def __init__(self, tests: Sequence[str], report: Path) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self._report = report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places),
            key=lambda item: self._places[item.nodeid],
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"\nbegins {nodeid}", flush=True)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self._report.exists():
            text = str(report.longrepr).strip().splitlines()
            errors = [line[2:].strip() for line in text if line.startswith("E ")]
            how = (errors or text[-1:] or [""])[0].replace(f"{os.getcwd()}/", "")
            self._report.write_text(f"{report.nodeid or 'the imports'}\n{how[:200]}")
