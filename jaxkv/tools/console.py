"""Output on a terminal or in a pipe: lines, and tables in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a label, the amount done and the total; 0 of 0 if that is not known."""

# Narrower, rich leaves figures out; a terminal breaks lines that are too long for it.
_LEAST_COLUMNS = 80


def make_console(*, stderr: bool = False) -> Any:
    """Make a console that loses nothing where COLUMNS is 0 or 5.

    A reader who is gone is a `BrokenPipeError`, as for `print`: rich would exit with 1.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise

    console = PlainConsole(stderr=stderr)
    if console.width >= _LEAST_COLUMNS:
        return console
    return PlainConsole(stderr=stderr, width=_LEAST_COLUMNS)


def make_table(*, gap: int = 2) -> Any:
    """Make a table without lines, with `gap` blanks between its columns."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are: nothing in them is markup, and none is wrapped."""
    make_console().print(
        "\n".join(lines), markup=False, emoji=False, highlight=False, soft_wrap=True
    )
