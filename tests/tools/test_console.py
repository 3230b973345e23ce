"""Tables and progress on terminals of any width."""

import io

import pytest
from rich.console import Console

from jaxkv.tools import progress
from jaxkv.tools.progress import show_progress


@pytest.mark.parametrize("width", [40, 80])
def test_a_phase_leaves_the_progress_when_the_next_one_begins(width, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True)
    monkeypatch.setattr(progress, "make_console", lambda stderr: console)
    with show_progress() as on_progress:
        on_progress("compiling", 0, 0)
        on_progress("asking, 51,269 blocks", 0, 96)
        on_progress("asking, 51,269 blocks", 48, 96)
        console.file = file = io.StringIO()
        on_progress("measuring", 0, 0)
    shown = file.getvalue()
    assert "compiling" not in shown
    assert "measuring" in shown
    assert "51,269 blocks" in shown
