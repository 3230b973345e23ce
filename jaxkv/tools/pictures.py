"""Figures to show, and the one style of all pictures.

A `Chart` is what a command has found: this file draws it, `page.py` writes it as HTML
and `console.py` prints it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, BinaryIO, NamedTuple

COLOURS = ("#0b6285", "#b3401f", "#4a6b14", "#7a3f94", "#855600", "#33418f", "#a0245f")
GREY = "#555555"
INK = "#000000"
RULE = "#e4e4e4"
_MARKERS = "os^Dv*P|"
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)))


class Line(NamedTuple):
    """A line of a chart, and a row of its table."""

    name: str  # What stands at its end
    values: Sequence[float]  # One for each place
    # Colour, dashes and marker, as ``Axes.plot`` takes them; None to have it in tables
    # only.
    look: dict[str, Any] | None = None
    marked: Collection[int] = ()  # The indices of the places whose values stand out


class Places(NamedTuple):
    """The x axis of a chart, from left to right."""

    title: str  # What the places are, with their unit
    sizes: Sequence[int]  # Where they lie on the axis, which is logarithmic
    names: Sequence[str]  # Each in words
    notes: Sequence[str]  # What else stands below each name; empty for nothing


class Scale(NamedTuple):
    """Formatters of values."""

    at_axis: Callable[[float], str]
    in_short: Callable[[float], str]  # At the end of a line
    in_full: Callable[[float], str]  # In tables and tips
    has_zero: bool = False  # Whether a line is drawn at 0


class Chart(NamedTuple):
    """Figures of several lines at the same places."""

    key: str  # For machines: letters, digits and "_"
    what: str  # What the values are, in a few words
    title: str  # The same with the whole, or the baseline
    caption: str  # The same with their unit
    places: Places  # Where the values stand
    lines: Sequence[Line]  # At least one
    scale: Scale  # How values are written
    about: str = ""  # What it shows, in a sentence; empty for a table alone

    @property
    def drawn(self) -> list[tuple[Line, dict[str, Any]]]:
        """The lines that are drawn, each with its look."""
        return [(line, line.look) for line in self.lines if line.look is not None]


def look_of(number: int) -> dict[str, Any]:
    """Choose the look of a line of a chart."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": _DASHES[number // 2 % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def make_figure(width: float, height: float, dpi: int = 150) -> Any:
    """Make an empty figure, of a size in inches."""
    # Slow to import, and used only here. A bare Figure needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.12, h_pad=0.1, wspace=0.03)
    return figure


def save_picture(figure: Any, title: str, facts: str, file: BinaryIO) -> None:
    """Write a figure as PNG with a title, and facts below it."""
    figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(facts, x=0.015, ha="left", fontsize=9, color=GREY)
    figure.savefig(file, format="png")


def draw_charts(
    grid: Sequence[Sequence[Chart]],
    below: str,
    size: tuple[float, float],
    mark: dict[str, Any] | None = None,
) -> Any:
    """Draw rows of charts."""
    figure = make_figure(*size, dpi=110)
    panels = figure.subplots(len(grid), len(grid[0]), squeeze=False)
    for axes, chart in zip(panels.flat, itertools.chain(*grid), strict=True):
        draw_lines(axes, chart)
        name_axes(axes, chart.what, below)
        for line in chart.lines if mark else ():
            for place in line.marked:
                at = chart.places.sizes[place], line.values[place]
                axes.plot(*([coordinate] for coordinate in at), **mark or {})
    return figure


def name_axes(axes: Any, title: str, below: str) -> None:
    """Write what axes show above them, and what the places are below them."""
    axes.set_title(title, loc="left", fontsize=10.5, pad=10)
    axes.set_xlabel(below, fontsize=9)


def plain_axes(axes: Any) -> None:
    """Remove all lines of axes except the grid for values."""
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def draw_lines(
    axes: Any,
    chart: Chart,
    *,
    font: float = 9,
    num_labels: float = 9,
    has_values: bool = True,
) -> None:
    """Draw lines, with their names at their ends."""
    sizes, scale = chart.places.sizes, chart.scale
    lines = [line for line, _ in chart.drawn]
    for number, (line, look) in enumerate(chart.drawn):
        axes.plot(
            sizes,
            line.values,
            linewidth=1.8,
            markersize=5,
            gid=f"line-{number}",
            **look,
        )
    flat = [value for line in lines for value in line.values]
    low, high = min(0.0, *flat), max(0.0, *flat)
    room = 0.08 * (high - low) or 1.0
    axes.set_ylim(low - room * (low < 0), high + room)
    if low < 0 or scale.has_zero:
        axes.axhline(0, color=GREY, linewidth=1, zorder=1, gid="zero")
    axes.set_xscale("log")
    # So that the first name below the axis stays clear of the values beside it.
    margin = (sizes[-1] / sizes[0]) ** 0.04 * 1.02
    axes.set_xlim(sizes[0] / margin, sizes[-1] * margin)
    _label_places(axes, chart.places, num_labels)
    axes.yaxis.set_major_formatter(lambda value, _: with_minus(scale.at_axis(value)))
    texts = [
        line.name + f"  {with_minus(scale.in_short(line.values[-1]))}" * has_values
        for line in lines
    ]
    _label_ends(axes, chart, texts, font)
    plain_axes(axes)


def _label_ends(axes: Any, chart: Chart, texts: Sequence[str], font: float) -> None:
    """Write texts beside the ends of lines, without overlaps."""
    low, high = axes.get_ylim()
    gap = min(0.0069 * font, 1 / len(texts)) * (high - low)
    ends = [line.values[-1] for line, _ in chart.drawn]
    heights = spread(ends, gap, low + gap / 2, high - gap / 2)
    for (_, look), text, end, height in zip(
        chart.drawn, texts, ends, heights, strict=True
    ):
        colour = look["color"]
        axes.annotate(
            text,
            (chart.places.sizes[-1], end),
            xytext=(1.05, height),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
            va="center",
            color=colour,
            fontsize=font,
            fontweight="normal" if colour == GREY else "bold",
            annotation_clip=False,
        )


def _label_places(axes: Any, places: Places, num_labels: float) -> None:
    """Write the names of places under the axis where there is room."""
    room = math.log(places.sizes[-1] / places.sizes[0]) / num_labels
    shown: list[int] = []
    for number, size in enumerate(places.sizes):
        if not shown or math.log(size / places.sizes[shown[-1]]) >= room:
            shown.append(number)
    notes = places.notes or [""] * len(places.sizes)
    axes.set_xticks(
        [places.sizes[number] for number in shown],
        [f"{places.names[number]}\n{notes[number]}".rstrip() for number in shown],
    )
    axes.set_xticks([], minor=True)


def spread(
    heights: Sequence[float], gap: float, low: float, high: float
) -> list[float]:
    """Move heights apart, so that labels do not overlap, and between two bounds.

    >>> spread([5.0, 1.0, 1.5], gap=1.0, low=0.0, high=5.0)
    [5.0, 1.0, 2.0]
    """
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    placed = dict.fromkeys(order, 0.0)
    last = low - gap
    for number in order:
        last = placed[number] = max(heights[number], last + gap)
    last = high + gap
    for number in reversed(order):
        last = placed[number] = min(placed[number], last - gap)
    return [placed[number] for number in range(len(heights))]


def with_minus(text: str) -> str:
    """Write numbers below 0 with a minus, which is longer than a hyphen."""
    return text.replace("-", "\N{MINUS SIGN}")
