"""What messages say to install is what pyproject.toml declares."""

import tomllib
from pathlib import Path

from jaxkv._util.extras import EXTRAS, PLATFORMS

ROOT = Path(__file__).parents[1]
OF_DEVELOPERS = {"test", "dev", "docs", "mutants"}


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        extra: [line for line in lines if not line.startswith("jaxkv[")]
        for extra, lines in project["optional-dependencies"].items()
        if extra not in OF_DEVELOPERS
    }
    known = EXTRAS | PLATFORMS
    assert {extra: list(known[extra].values()) for extra in known} == declared


def test_no_message_names_an_extra_to_pip():
    """Until a package index has jaxkv, pip could not find it there."""
    for path in (ROOT / "jaxkv").rglob("*.py"):
        assert 'install "jaxkv[' not in path.read_text(), path
