"""Compiles the programs of a plan, in processes of their own, and judges them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

import jaxkv
from benchmarks.compiled.bounds import broken_bounds, known_break
from benchmarks.compiled.plan import CompileConfig, Program, programs
from benchmarks.compiled.records import Figures, Reply, Result
from benchmarks.compiled.targets import Backend, environment
from jaxkv.tools.console import OnProgress

_WORKER = "benchmarks.compiled.worker"


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """The results of a run."""

    config: CompileConfig  # What was compiled
    results: tuple[Result, ...]  # What became of each program
    seconds: float  # How long all of it took

    @property
    def broken(self) -> tuple[Result, ...]:
        """The results that break a bound and are not known to, or did not compile."""
        return tuple(result for result in self.results if result.fails)

    @property
    def known(self) -> tuple[Result, ...]:
        """The results that break a bound, as is known."""
        return tuple(r for r in self.results if r.broken and not r.fails)


def run_compile(config: CompileConfig, on_progress: OnProgress) -> CompileRecord:
    started = time.monotonic()
    results: list[Result] = []
    for target, group in itertools.groupby(programs(config), lambda p: p.target):
        chosen = list(group)
        on_progress(target.device, 0, len(chosen))
        for done, result in enumerate(_results(target.backend, chosen), 1):
            results.append(result)
            on_progress(target.device, done, len(chosen))
    return CompileRecord(config, tuple(results), time.monotonic() - started)


def judge(program: Program, figures: Figures | None, error: str | None) -> Result:
    """Make the result of a program from the compiler's answer."""
    if figures is None:
        return Result(program, None, error, (f"did not compile: {error}",))
    broken = () if program.is_example else broken_bounds(program, figures)
    reason = known_break(program) if broken else None
    return Result(program, figures, error, broken, reason)


def _results(backend: Backend, chosen: Sequence[Program]) -> Iterator[Result]:
    """Yield the results of programs of one backend, in their order."""
    left = list(chosen)
    while left:
        # A compiler that ends its process costs the program that it was at.
        for reply in _replies(backend, tuple(left)):
            yield judge(left.pop(0), *reply)


def _replies(backend: Backend, chosen: tuple[Program, ...]) -> Iterator[Reply]:
    """Yield a worker's replies; if it ends early, a last one of why."""
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", _WORKER]
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(backend),
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            try:
                pickle.dump(list(chosen), worker.stdin)
                worker.stdin.close()
            except BrokenPipeError:
                pass  # It has ended already; the reason follows below.
            for _ in chosen:
                try:
                    reply: Reply = pickle.load(worker.stdout)
                except (EOFError, pickle.UnpicklingError):
                    code = worker.wait()
                    yield None, f"the process ended with {code}: {_last_line(errors)}"
                    return
                yield reply
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()


def _environment(backend: Backend) -> dict[str, str]:
    """Make the environment of a worker, which must find this jaxkv."""
    root = str(pathlib.Path(jaxkv.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    python_path = root if not path else os.pathsep.join([root, path])
    return {**os.environ, **environment(backend), "PYTHONPATH": python_path}


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:300]
