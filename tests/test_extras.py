"""Messages name the packages that pyproject.toml declares."""

import ast
import importlib
import sys
import tomllib
from pathlib import Path

import pytest

from jaxkv._util.extras import EXTRAS, PLATFORMS, pip_install
from tests.rigs.command_line import run_python

ROOT = Path(__file__).parents[1]
OF_DEVELOPERS = {"test", "dev", "docs", "mutants"}


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        extra: [line for line in lines if not line.startswith("jaxkv[")]
        for extra, lines in project["optional-dependencies"].items()
        if extra not in OF_DEVELOPERS
    }
    extras = EXTRAS | PLATFORMS
    assert {extra: list(extras[extra].values()) for extra in extras} == declared


def test_no_message_names_an_extra_to_pip():
    """Until a package index has jaxkv, pip could not find it there."""
    for path in (ROOT / "jaxkv").rglob("*.py"):
        assert 'install "jaxkv[' not in path.read_text(), path


def test_without_an_extra_the_error_says_how_to_install_it(monkeypatch):
    for missing, module, extra, message in (
        ("zmq", "sockets", "events", "Events over the network need pyzmq"),
        ("msgspec", "kv_events", "events", "Events on the wire need msgspec"),
        ("prometheus_client", "metrics", "metrics", "jaxkv.observe.metrics needs prom"),
    ):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, missing, None)
            context.delitem(sys.modules, f"jaxkv.observe.{module}", raising=False)
            with pytest.raises(ImportError, match=message) as raised:
                importlib.import_module(f"jaxkv.observe.{module}")
        assert pip_install(extra) in str(raised.value)


def test_the_library_imports_no_extra_of_the_events_and_metrics():
    done = run_python(
        "import sys, jaxkv, jaxkv.tools.main, jaxkv.observe.catalog\n"
        "print({'zmq', 'msgspec', 'prometheus_client'} & set(sys.modules))"
    )
    assert done.stdout == b"set()\n", done.stderr


def test_commands_need_no_more_than_their_extra_installs():
    """`jaxkv verify` asked for matplotlib, which the extra demo no longer has."""
    num_calls = 0
    for path in (ROOT / "jaxkv" / "tools").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and "check_extra" in ast.unparse(node.func):
                packages, extra = ("rich",), "demo"
                match [ast.literal_eval(argument) for argument in node.args[1:]]:
                    case [packages, extra]:
                        pass
                    case [packages]:
                        pass
                assert set(packages) <= EXTRAS[extra].keys(), path
                num_calls += 1
    assert num_calls == 3
