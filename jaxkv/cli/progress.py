"""Progress of a command: a bar on a terminal, lines elsewhere or without rich."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jaxkv.tools.console import OnProgress, make_console


@contextmanager
def show_progress() -> Iterator[OnProgress]:
    """Show the progress of a run: a bar on a terminal with rich, else a line per label.

    Yields:
        A function to call with a label, the amount done and the total.
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

    from rich.progress import Progress, TaskID, TimeElapsedColumn

    tasks: dict[str, TaskID] = {}
    columns = *Progress.get_default_columns()[:2], TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)

    def show(label: str, done: int, total: int) -> None:
        if label not in tasks:
            for earlier in progress.tasks:
                # Bars of other threads stay.
                progress.update(earlier.id, visible=not earlier.finished)
            tasks[label] = progress.add_task(label, total=None)
        # Without a total the bar pulses.
        progress.update(tasks[label], completed=done, total=total if done else None)

    with progress:
        yield show
