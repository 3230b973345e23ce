"""Which tests a mutant is given to: those that reach its line, the cheapest first."""

import ast
import collections
import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

# What the decorators of compiled functions are called.
_COMPILING = {"compiled", "inlined"}

# A test of the room itself is likelier to notice than one of a room above.
_FOREIGN = 4.0


class Reach:
    """The map that `tests.mutants.reach` wrote to a folder, of the tree of a root."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.seconds: dict[str, float] = {}
        self._lines: dict[str, dict[int, set[str]]] = {}
        self._calls: dict[str, set[str]] = collections.defaultdict(set)
        self._with_children: set[str] = set()
        for file in sorted(folder.glob("*.json.gz")):
            with gzip.open(file, "rt") as stream:
                part = json.load(stream)
            names = [name for name, _ in part["tests"]]
            self.seconds.update(part["tests"])
            for path, lines in part["lines"].items():
                of_path = self._lines.setdefault(path, {})
                for line, tests in lines.items():
                    of_path.setdefault(int(line), set()).update(names[i] for i in tests)
            for call, tests in part["calls"].items():
                self._calls[call].update(names[i] for i in tests)
            self._with_children.update(part["with_children"])
        self._native = _Native(root)
        self._imports = {
            path: _imported(root / path)
            for path in self._lines
            if (root / path).exists()
        }

    def tests(self, path: str, lines: Iterable[int]) -> set[str]:
        of_path = self._lines.get(path, {})
        selected = set().union(*(of_path.get(line, set()) for line in lines))
        selected |= self._calling(path, lines)
        return selected or self._of_file(path, of_path)

    def with_children(self, room: str) -> set[str]:
        files = _files_of(room)
        return {test for test in self._with_children if test.startswith(files)}

    def is_compiled(self, path: str) -> bool:
        return path.startswith("jaxkv/compiling/") or self._native.has_functions(path)

    def _of_file(self, path: str, of_path: dict[int, set[str]]) -> set[str]:
        selected = set().union(*of_path.values())
        selected |= self._calling(path, None)
        if selected:
            return selected
        importing = [p for p, names in self._imports.items() if _module(path) in names]
        return set().union(
            *(tests for p in importing for tests in self._lines[p].values())
        )

    def _calling(self, path: str, lines: Iterable[int] | None) -> set[str]:
        """Name the tests that have a compiled function of a file called."""
        module = _module(path)
        entries = self._native.reaching(path, lines)
        calling: set[str] = set()
        for call, tests in self._calls.items():
            if not call.startswith("state ") and call in entries:
                calling |= tests
        # A policy's functions are called only for its state.
        of_policy = self._calls.get(f"state {module}")
        return calling if of_policy is None else calling & of_policy


class _Native:
    """The calls between compiled functions, by name."""

    def __init__(self, root: Path) -> None:
        self._spans: dict[str, list[tuple[int, int, str]]] = {}
        self._used: dict[str, set[str]] = collections.defaultdict(set)
        self._entries: set[str] = set()
        for file in sorted((root / "jaxkv").rglob("*.py")):
            path = file.relative_to(root).as_posix()
            spans = self._spans[path] = []
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if not (isinstance(node, ast.FunctionDef) and _is_compiled(node)):
                    continue
                spans.append((node.lineno, node.end_lineno or node.lineno, node.name))
                self._entries.add(f"{_module(path)}.{node.name}")
                self._used[node.name].update(_names(node))

    def has_functions(self, path: str) -> bool:
        return bool(self._spans.get(path))

    def reaching(self, path: str, lines: Iterable[int] | None) -> set[str]:
        """Return the functions that reach the one at some lines, or any one."""
        wanted = {
            name
            for first, last, name in self._spans.get(path, [])
            if lines is None or any(first <= line <= last for line in lines)
        }
        if not wanted and lines is not None:
            return set()
        while callers := {
            name
            for name, used in self._used.items()
            if name not in wanted and used & wanted
        }:
            wanted |= callers
        return {entry for entry in self._entries if entry.split(".")[-1] in wanted}


def order(
    reach: Reach, tests: set[str], room: str, budget_s: float
) -> tuple[list[str], int]:
    """Sort tests by the order of their trial; return how many are left out.

    Files that take least come first, and in each the cheapest test: a file's tests stay
    together, because what it compiles is dropped after it. The dearest tests beyond
    `budget_s` are left out, except for one.
    """
    left_s = budget_s
    files: dict[str, list[str]] = collections.defaultdict(list)
    num_kept = 0
    for test in sorted(tests, key=lambda test: (reach.seconds[test], test)):
        left_s -= reach.seconds[test]
        if left_s < 0 and num_kept:
            break
        files[test.split("::")[0]].append(test)
        num_kept += 1

    def cost(file: str) -> float:
        total_s = sum(reach.seconds[test] for test in files[file])
        return total_s * (1.0 if file.startswith(_files_of(room)) else _FOREIGN)

    kept = [test for file in sorted(files, key=cost) for test in files[file]]
    return kept, len(tests) - num_kept


def _files_of(room: str) -> tuple[str, ...]:
    module = f"tests/test_{room.removeprefix('_')}.py"
    return f"tests/{room}/", f"jaxkv/{room}/", f"jaxkv/{room}.py", module


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


def _is_compiled(node: ast.FunctionDef) -> bool:
    return any(_COMPILING & set(_names(decorator)) for decorator in node.decorator_list)


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
