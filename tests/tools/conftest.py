"""Fixtures of the tests of commands."""

import json

import pytest

from jaxkv.tools import main as cli


@pytest.fixture
def run_line(capsys, tmp_path):
    """Runs a command line; returns its output, its errors and its JSON."""
    path = tmp_path / "figures.json"

    def run(line, code=0, has_figures=True):
        options = ["--json", str(path)] if has_figures else []
        assert cli.main([*line.split(), *options]) == code
        out, err = capsys.readouterr()
        return out, err, json.loads(path.read_text()) if has_figures else None

    return run


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Runs a command line that must be refused, in an empty folder; gives the error."""
    monkeypatch.chdir(tmp_path)

    def run(line, code=2):
        before = sorted(tmp_path.rglob("*"))
        assert cli.main(line.split()) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 1000
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return run
