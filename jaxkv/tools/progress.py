"""Progress of a command: a bar on a terminal, lines elsewhere or without rich."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jaxkv.tools.console import OnProgress, make_console

_MIN_COLUMNS_FOR_BARS = 60


@contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Show the progress of a run: a bar on a terminal with rich, else a line per label.

    Returns A function to call with a label, the amount done and the total.
    """
    console = make_console(stderr=True) if importlib.util.find_spec("rich") else None
    if console is None or not console.is_terminal:
        seen = set()

        def tell(label: str, done: int, total: int) -> None:
            if label not in seen:
                seen.add(label)
                print(f"{label} ...", file=sys.stderr)

        yield tell
        return

    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", table_column=Column()),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
    ]
    if console.width >= _MIN_COLUMNS_FOR_BARS:
        columns.insert(1, BarColumn(bar_width=None if console.width < 80 else 40))
    progress = Progress(*columns, console=console, transient=True)
    tasks: dict[str, TaskID] = {}
    totals: dict[str, int] = {}

    def show(label: str, done: int, total: int) -> None:
        if label not in tasks:
            # What had no total was a phase, and is over. Bars of other threads stay.
            for phase in [name for name in tasks if not totals[name]]:
                progress.remove_task(tasks.pop(phase))
            for task in progress.tasks:
                progress.update(task.id, visible=not task.finished)
            tasks[label] = progress.add_task(label, total=None)
        totals[label] = total
        # Without a total the bar pulses.
        progress.update(tasks[label], completed=done, total=total if done else None)

    with progress:
        yield show
