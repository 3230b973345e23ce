"""A console for tables, however narrow the terminal says that it is."""

from __future__ import annotations

from typing import Any

# Narrower, rich leaves figures out; a terminal breaks lines that are too long for it.
_LEAST_COLUMNS = 80


def make_console(*, stderr: bool = False) -> Any:
    """Make a console that loses nothing where COLUMNS is 0 or 5."""
    from rich.console import Console

    console = Console(stderr=stderr)
    if console.width >= _LEAST_COLUMNS:
        return console
    return Console(stderr=stderr, width=_LEAST_COLUMNS)
