"""Output on a terminal or in a pipe: lines, and tables in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from jaxkv._util import one_line

if TYPE_CHECKING:
    from jaxkv.tools.pictures import Chart, Line

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a label, the amount done and the total; 0 of 0 if that is not known."""

# The longest figure still fits beside a label.
_MIN_COLUMNS = 40


def plain(text: str) -> str:
    """Escape all that would move a terminal's cursor or change it, except newlines."""
    return "\n".join(map(one_line, text.split("\n")))


def print_plain(lines: Iterable[str]) -> None:
    """Print lines without control characters, and without rich."""
    print(plain("\n".join(lines)))


def make_console(*, stderr: bool = False) -> Any:
    """Make a console that loses nothing where COLUMNS is 0 or 5.

    A reader who is gone is a `BrokenPipeError`, as for `print`: rich would exit with 1.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise

    console = PlainConsole(stderr=stderr)
    if console.width >= _MIN_COLUMNS:
        return console
    return PlainConsole(stderr=stderr, width=_MIN_COLUMNS)


def print_table(
    columns: Sequence[str],
    sections: Iterable[tuple[str | None, Iterable[Sequence[str]]]],
    notes: Iterable[str] = (),
    *,
    head: Sequence[str] = (),
    gap: int = 2,
    style_of: Callable[[str], str | None] = lambda label: None,
    console: Any = None,
) -> None:
    """Print a table without lines, and notes below it.

    Figures are never cut or broken: what does not fit beside the labels stands in
    another table below.
    """
    from rich.table import Table

    console = console or make_console()
    columns, head = list(map(plain, columns)), list(map(plain, head))
    listed = [
        (title and plain(title), [list(map(plain, row)) for row in rows])
        for title, rows in sections
    ]
    every = [columns, head, *(row for _, rows in listed for row in rows)]
    widths = [
        max(len(row[column]) for row in every if column < len(row)) + gap
        for column in range(len(columns))
    ]
    for shown in _groups(widths, console.width):
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        table.add_column(columns[0], style="bold")
        for name in columns[shown]:
            table.add_column(name, justify="right", no_wrap=True)
        if head:
            table.add_row(head[0], *head[shown])
        for title, rows in listed:
            table.add_row()
            if title is not None:
                table.add_row(title)
            for row in rows:
                table.add_row(row[0], *row[shown], style=style_of(row[0]))
        console.print()
        console.print(table, markup=False)
    for number, line in enumerate(notes):
        if not number:
            console.print()
        console.print(
            plain(line), style="dim", highlight=False, soft_wrap=True, markup=False
        )


def print_charts(
    charts: Sequence[Chart],
    head: str,
    *,
    mark: str = "",
    style_of: Callable[[str], str | None] = lambda label: None,
) -> None:
    """Print charts of the same places as one table."""
    places, room, unit = charts[0].places, " " * len(mark), f" {head}"

    def cells(chart: Chart, line: Line) -> Iterator[str]:
        for place, value in enumerate(line.values):
            text = chart.scale.in_full(value)
            yield text + (mark if place in line.marked else room)

    print_table(
        [places.title, *(f"{name}{room}" for name in places.names)],
        [
            (
                chart.title,
                [(f"  {line.name}", *cells(chart, line)) for line in chart.lines],
            )
            for chart in charts
        ],
        head=[f"  {head}", *(note.removesuffix(unit) + room for note in places.notes)],
        gap=2 - len(mark),
        style_of=style_of,
    )


def _groups(widths: Sequence[int], room: int) -> list[slice]:
    """Divide the columns of figures among tables that fit; labels may be wrapped."""
    room -= min(widths[0], room // 2)
    groups, first = [], 1
    for column in range(2, len(widths)):
        if sum(widths[first : column + 1]) > room:
            groups.append(slice(first, column))
            first = column
    return [*groups, slice(first, len(widths))]


def print_facts(facts: Iterable[tuple[str, str]], width: int) -> None:
    print_lines(f"{name:{width}}{text}" for name, text in facts)


def print_lines(lines: Iterable[str], *, is_code: bool = False) -> None:
    """Print lines as they are; nothing in them is markup."""
    console = make_console()
    console.print(
        plain("\n".join(lines)),
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=is_code or not console.is_terminal,
    )
