"""A plugin of pytest that writes a map: which tests reach which line.

Coverage sees the lines of Python, but no compiled functions: for those the map lists
the calls of each test from Python, with the policy of the state. Child
processes it does not see either: the map names the tests that start some.

Each run adds a file to the folder, so that a map can be made in parts, and what takes
long left out:

    JAXKV_MUTANTS_MAP=folder pytest -p tests.mutants.reach tests/tiers tests/search
"""

import collections
import functools
import gzip
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxkv import compiling
from jaxkv.compiling import parts

ROOT = Path(__file__).resolve().parents[2]

# A test with a child process that imports jaxkv uses more than this in children.
_MIN_CHILD_S = 0.3


class Recorder:
    """Counts what each test reaches, while pytest runs."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self._folder = folder
        self._test = ""
        self._tests: list[str] = []
        self._failed: set[str] = set()
        self._seconds: dict[str, float] = collections.Counter()
        self._with_children: set[str] = set()
        self._calls: dict[str, set[str]] = collections.defaultdict(set)
        self._coverage = coverage.Coverage(
            data_file=None, source=[str(ROOT / "jaxkv")], config_file=False
        )
        self._coverage.start()
        self._watch_compiled_functions()

    def _watch_compiled_functions(self) -> None:
        """Record each call of a function that was made ready, and its states."""
        make = compiling.entry_point

        def watched(function: Any, *arguments: Any) -> Any:
            ready = make(function, *arguments)
            name = f"{function.py_func.__module__}.{function.py_func.__name__}"
            states = [a.state for a in arguments if isinstance(a, compiling.Bound)]
            modules = {m for state in states for m in modules_of(state)}
            notes = [name, *(f"state {module}" for module in sorted(modules))]

            @functools.wraps(function.py_func)
            def call(*args: Any) -> Any:
                if self._test:
                    for note in notes:
                        self._calls[note].add(self._test)
                return ready(*args)

            return call

        compiling.entry_point = parts.entry_point = watched

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test = item.nodeid
        self._tests.append(item.nodeid)
        self._coverage.switch_context(item.nodeid)
        began = os.times()  # Processor time, because others may use the machine, too.
        result = yield
        ended = os.times()
        in_children_s = sum(ended[2:4]) - sum(began[2:4])
        self._seconds[item.nodeid] = sum(ended[:2]) - sum(began[:2]) + in_children_s
        if in_children_s > _MIN_CHILD_S:
            self._with_children.add(item.nodeid)
        self._test = ""
        self._coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)  # It would fail for any change.

    def pytest_unconfigure(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        passed = [test for test in self._tests if test not in self._failed]
        number = {test: index for index, test in enumerate(passed)}
        lines: dict[str, dict[int, list[int]]] = {}
        for path in sorted(data.measured_files()):
            lines[str(Path(path).relative_to(ROOT))] = {
                line: sorted(
                    number[context] for context in contexts if context in number
                )
                for line, contexts in sorted(data.contexts_by_lineno(path).items())
            }
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._folder / f"{time.time_ns()}.json.gz"
        with gzip.open(target, "wt") as file:
            json.dump(
                {
                    "tests": [[test, round(self._seconds[test], 3)] for test in passed],
                    "with_children": [
                        test for test in passed if test in self._with_children
                    ],
                    "lines": lines,
                    "calls": {
                        name: sorted(number[test] for test in tests if test in number)
                        for name, tests in self._calls.items()
                    },
                },
                file,
            )


def modules_of(state: Any) -> Iterable[str]:
    """Name the modules of the dataclasses that a state consists of."""
    yield type(state).__module__
    for value in vars(state).values():
        if hasattr(value, "__dataclass_fields__"):
            yield from modules_of(value)


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(Path(os.environ["JAXKV_MUTANTS_MAP"]))
    config.pluginmanager.register(recorder, "mutants-reach")
