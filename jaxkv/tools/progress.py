"""Progress of a command: a bar on a terminal, lines elsewhere or without rich."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jaxkv._util import one_line
from jaxkv.tools.console import OnProgress, make_console
from jaxkv.tools.process import is_within_line

_MIN_COLUMNS_FOR_BARS = 60


@contextmanager
def show_progress(*, is_quiet: bool = False) -> Iterator[OnProgress]:
    """Show the progress of a run: a bar on a terminal with rich, else a line each.

    Yields a function to call with a label, the amount done and the total. Labels that
    differ only after ": " share a bar or line.
    """
    if is_quiet:
        yield lambda label, done, total: None
        return
    console = make_console(stderr=True) if importlib.util.find_spec("rich") else None
    if console is None or not console.is_terminal:
        with _show_lines() as on_progress:
            yield on_progress
        return

    from rich import progress as bars
    from rich.table import Column

    columns: list[bars.ProgressColumn] = [
        bars.TextColumn("{task.description}", markup=False, table_column=Column()),
        bars.TaskProgressColumn(table_column=Column(no_wrap=True)),
        bars.TimeElapsedColumn(table_column=Column(no_wrap=True)),
    ]
    if console.width >= _MIN_COLUMNS_FOR_BARS:
        columns.insert(1, bars.BarColumn(bar_width=None if console.width < 80 else 40))
        columns.append(bars.TimeRemainingColumn(table_column=Column(no_wrap=True)))
    # Lines for a file must not be drawn above the bar, on the terminal of stderr.
    is_drawn = sys.stdout is not None and sys.stdout.isatty()
    progress = bars.Progress(
        *columns, console=console, transient=True, redirect_stdout=is_drawn
    )
    tasks: dict[str, bars.TaskID] = {}
    totals: dict[str, int] = {}

    def show(label: str, done: int, total: int) -> None:
        label = one_line(label)
        name = label.partition(": ")[0]
        if name not in tasks:
            # What had no total was a phase, and is over. Bars of other threads stay.
            for phase in [name for name in tasks if not totals[name]]:
                progress.remove_task(tasks.pop(phase))
            for task in progress.tasks:
                progress.update(task.id, visible=not task.finished)
            tasks[name] = progress.add_task(label, total=None)
        totals[name] = total
        # Without a total the bar pulses.
        shown_total = total if done else None
        progress.update(
            tasks[name], description=label, completed=done, total=shown_total
        )

    with progress:
        yield show


@contextmanager
def _show_lines() -> Iterator[OnProgress]:
    """Write a line for each label; it grows with each quarter that is done."""
    quarters: dict[str, int] = {}

    def show(label: str, done: int, total: int) -> None:
        label = one_line(label.partition(": ")[0])
        if label not in quarters:
            start = "\n" if is_within_line.is_set() else ""
            print(f"{start}{label} ...", end="", file=sys.stderr, flush=True)
            is_within_line.set()
            quarters[label] = 0
        quarter = 4 * done // total if total else 0
        if quarter > quarters[label] and label == list(quarters)[-1]:
            quarters[label] = quarter
            end = "\n" if quarter == 4 else ""  # The output may follow.
            print(f" {25 * quarter}%", end=end, file=sys.stderr, flush=True)
            if end:
                is_within_line.clear()

    try:
        yield show
    finally:
        if is_within_line.is_set():
            is_within_line.clear()
            print(file=sys.stderr)
