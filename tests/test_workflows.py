"""The workflows and `.ci/run` call sessions of noxfile.py, and nothing else."""

import ast
import re
import shlex
from pathlib import Path

import yaml

from tests.changed import find_command, read_commands

ROOT = Path(__file__).resolve().parent.parent
INSTALLS = ('pip install "nox[uv]"', "sudo .ci/programs")


def list_sessions():
    """Name the sessions of noxfile.py as nox does, with Python or parameter."""
    names, values = set(), {}
    for node in ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            values[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        if not decorators.startswith("nox.session"):
            continue
        if pythons := re.search(r"python=(\[.*?\])", decorators):
            names |= {f"{node.name}-{v}" for v in ast.literal_eval(pythons[1])}
        elif parameters := re.search(r"parametrize\('\w+', (\w+)", decorators):
            names |= {f"{node.name}({value})" for value in values[parameters[1]]}
        else:
            names.add(node.name)
    return names


def list_commands(workflow):
    """List what a workflow runs, for each row of its jobs' matrices."""
    for job in yaml.safe_load(workflow)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = matrix.get("include") or [
            {name: value} for name, values in matrix.items() for value in values
        ]
        for step in job["steps"]:
            for row in rows or [{}]:
                yield re.sub(
                    r"\$\{\{ matrix\.(\w+) \}\}",
                    lambda match, row=row: row[match[1]],
                    step.get("run", ""),
                )


def test_workflows_run_nox_sessions_and_short_installs_alone():
    sessions = list_sessions()
    called = set()
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        for command in filter(None, list_commands(path.read_text(encoding="utf-8"))):
            if command not in INSTALLS:
                program, flag, session, *rest = shlex.split(command)
                assert (program, flag) == ("nox", "--session"), f"{path}: {command}"
                assert session in sessions, f"{path}: {command}"
                assert rest[:1] in ([], ["--"]), f"{path}: {command}"
                called.add(session)
    assert sessions - called == {"changed"}


def test_ci_runs_sessions_that_exist():
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    array = re.search(r"^sessions=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    sessions = shlex.split(array[1])
    assert set(sessions) <= list_sessions()
    assert "tests" in sessions


def test_paths_of_sessions_exist():
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    paths = re.findall(r"\btests/[\w/.]+", text)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_file_of_the_library_has_a_command_that_checks_it():
    commands = read_commands()
    files = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxkv").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert [path for path in files if find_command(path, commands) is None] == []
    for path, command in commands.items():
        assert (ROOT / path).exists(), path
        for word in shlex.split(command):
            if "/" in word:
                assert list(ROOT.glob(word)), command
