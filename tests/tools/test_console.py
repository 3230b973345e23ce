"""Tables and progress on terminals of any width."""

import io

import pytest
from rich.console import Console

from jaxkv.tools import progress
from jaxkv.tools.console import print_table
from jaxkv.tools.progress import show_progress


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_figure_is_whole_whatever_the_width(width):
    file = io.StringIO()
    figures = [f"{1000 + column:,}.5 MiB" for column in range(7)]
    print_table(
        ["Host memory", *(f"{2**column} GiB" for column in range(7))],
        [("Time saved per request, 95th percentile", [("  arc_fixed", *figures)])],
        head=["  blocks", *(str(column) for column in range(7))],
        console=Console(file=file, width=width),
    )
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(line.strip() for line in lines)
    for text in (*figures, "64 GiB"):
        assert shown.count(text) == 1


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
