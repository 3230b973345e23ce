"""Charts of figures, and their drawings: one SVG each, for light and dark.

A `Chart` is what a command has measured. This file draws it, `page.py` writes it as
HTML, and `console.py` prints it. A drawing takes its colours from variables of a style
sheet (`PALETTE`). Points lie at percentages of the plot's width, so that a page can
show the drawing in a window of any width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

COLOURS = {
    "paper": ("#ffffff", "#14181c"),
    "ink": ("#1b1f23", "#e9ecef"),
    "soft": ("#535b63", "#b3bac1"),
    "rule": ("#d4d9de", "#39414a"),
    "s0": ("#0b6285", "#6cc5e8"),
    "s1": ("#b3401f", "#ff9d7d"),
    "s2": ("#4a6b14", "#a8d26a"),
    "s3": ("#7a3f94", "#d4a5ea"),
    "s4": ("#855600", "#e8bd5a"),
    "s5": ("#33418f", "#aab6ff"),
    "s6": ("#a0245f", "#ff9cc4"),
}
"""The light and the dark form of each colour."""

_LIGHT, _DARK = (
    "".join(f"--{name}:{pair[scheme]};" for name, pair in COLOURS.items())
    for scheme in (0, 1)
)
PALETTE = f"""\
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
.chart text {{ fill: currentColor; }}
.chart .name {{ font-weight: 600; }}
.chart .line {{ fill: none; stroke: currentColor; stroke-width: 2;
  stroke-linejoin: round; vector-effect: non-scaling-stroke; }}
.chart .mark, .chart .dot {{ fill: currentColor; }}
.chart .dot {{ opacity: .35; }}
.chart .rule {{ stroke: currentColor; }}
.chart .ring {{ fill: none; stroke: currentColor; stroke-width: 1.6; }}
"""

_MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-4.8L4.5 3.6h-9z",
    "M0-5.2L4.4 0L0 5.2L-4.4 0z",
    "M0 4.8L4.5-3.6h-9z",
    "M0-5.8L1.5-1.9L5.5-1.8L2.3.7L3.4 4.6L0 2.3L-3.4 4.6L-2.3.7L-5.5-1.8L-1.5-1.9z",
    "M-1.7-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
    "M-1.2-5.4h2.4v10.8h-2.4z",
)
_DASHES = ("none", "11 4", "4 3", "13 4 4 4")
_NUM_COLOURS = 7
_FONT_PX = 13
_LETTER_PX = 7.8  # Few letters are wider, in any font.
_NARROW_PX = 320  # The drawing's width on a phone.


class Look(NamedTuple):
    """The look of a line."""

    colour: str  # A variable of `PALETTE`
    dashes: str  # Lengths in pixels, as SVG takes them
    mark: str  # The outline of a mark around (0, 0), as an SVG path


LIMIT = Look("soft", "2 4", "M-5-1h10v2h-10z")
"""The look of what nothing can exceed."""


class Line(NamedTuple):
    """A line of a chart, and a row of its table."""

    name: str  # What stands at its end
    values: Sequence[float]  # One for each place
    look: Look | None = None  # None for a row of tables only
    marked: Collection[int] = ()  # The indices of the places whose values stand out
    dots: Sequence[Sequence[float]] = ()  # Further values at each place, drawn faintly


class Places(NamedTuple):
    """The x axis of a chart, from left to right."""

    title: str  # What the places are, with their unit
    sizes: Sequence[int]  # Where they lie on the axis
    names: Sequence[str]  # Each in words
    notes: Sequence[str] = ()  # What else stands below each name; empty for nothing
    is_even: bool = False  # Whether they are equally spaced; else by their logarithms

    @property
    def shares(self) -> list[float]:
        """The position of each place, from 0 to 1."""
        if len(self.sizes) == 1:
            return [0.5]
        at: list[float] = list(range(len(self.sizes)))
        if not self.is_even:
            at = [math.log(size) for size in self.sizes]
        return [0.03 + 0.97 * (x - at[0]) / (at[-1] - at[0]) for x in at]


class Scale(NamedTuple):
    """Formatters of values."""

    at_axis: Callable[[float], str]
    in_short: Callable[[float], str]  # At the end of a line
    in_full: Callable[[float], str]  # In tables and tips


class Chart(NamedTuple):
    """Figures of several lines at the same places."""

    key: str  # For machines: letters, digits and "_"
    title: str  # What the values are
    places: Places  # Where the values stand
    lines: Sequence[Line]  # At least one
    scale: Scale  # How values are written
    about: str = ""  # What it shows, in a sentence; empty for a table alone

    @property
    def drawn(self) -> list[tuple[Line, Look]]:
        return [(line, line.look) for line in self.lines if line.look is not None]

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value that is drawn, and 0."""
        values = [0.0]
        for line, _ in self.drawn:
            values += [*line.values, *itertools.chain(*line.dots)]
        return min(values), max(values)


def look_of(number: int) -> Look:
    return Look(
        f"s{number % _NUM_COLOURS}",
        _DASHES[number // 2 % len(_DASHES)],
        _MARKS[number % len(_MARKS)],
    )


def draw_picture(
    title: str,
    facts: str,
    charts: Sequence[Chart],
    below: str,
    *,
    has_rings: bool = False,
) -> str:
    """Draw charts side by side as an SVG file; marked values may have rings."""
    width, height, top = 640, 380, 44
    inside = _tag("title", escape(title)) + _tag("style", PALETTE)
    inside += _tag("rect", width="100%", height="100%", style="fill:var(--paper)")
    inside += _tag("text", escape(title), class_="name", x=8, y=28, font_size=18)
    for column, chart in enumerate(charts):
        below_px = 56 if chart.places.notes else 40
        plot = _Plot(chart, width, height - below_px - 46)
        inside += _tag(
            "svg",
            _tag("text", escape(chart.title), class_="name", x=8 - plot.left, y=-18)
            + _tag("text", escape(below), x="50%", y=plot.height + below_px, **_MID)
            + plot.draw(has_rings),
            x=column * width + plot.left,
            y=top + 34,
            width=plot.width,
            height=plot.height,
            overflow="visible",
        )
    width, height = width * len(charts), top + height + 32
    inside += _tag("text", escape(facts), x=8, y=height - 12, **_colour("soft"))
    style = f"color:var(--ink);font:{_FONT_PX}px system-ui,sans-serif"
    box = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    name = "http://www.w3.org/2000/svg"
    return _tag("svg", inside, xmlns=name, class_="chart", style=style, **box) + "\n"


def draw_inline(chart: Chart, head: str, **attributes: str) -> str:
    """Draw a chart as an SVG element for a page, which sets its width.

    The element is the plot. What surrounds it lies in its margins.
    """
    plot = _Plot(chart, 760, 300)
    style = f"--left:{plot.left}px;--wide:{plot.left + plot.wide}px;"
    style += f"--narrow:{plot.left + plot.narrow}px"
    sized = {"class_": "chart", "height": plot.height, "style": style, **attributes}
    return _tag("svg", head + plot.draw(), **sized)


def _tag(name: str, inside: str = "", /, **attributes: object) -> str:
    """Write an element; "_" stands for "-" in names, and is dropped at their end."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{value}"'
        for key, value in attributes.items()
    )
    return f"<{name}{listed}>{inside}</{name}>"


def _colour(name: str) -> dict[str, str]:
    return {"style": f"color:var(--{name})"}


_MID = {"text_anchor": "middle"}
_OPEN = {"overflow": "visible"}


class _Plot:
    """The area of a chart where its lines are, and its margins, in pixels."""

    def __init__(self, chart: Chart, width: int, height: int) -> None:
        low, high = chart.bounds
        high = high if high > low else low + 1
        room = 0.08 * (high - low)
        self.chart, self.height = chart, height
        self.low, self.high = low - room * (low < 0), high + room
        self.ticks = [
            (value, with_minus(chart.scale.at_axis(value)))
            for value in _ticks(self.low, self.high)
        ]
        names = [line.name for line, _ in chart.drawn]
        self.ends = [
            with_minus(chart.scale.in_short(line.values[-1])) for line, _ in chart.drawn
        ]
        self.left = 18 + _width([name for _, name in self.ticks])
        # To the right, with values beside the names, and without.
        self.wide = 28 + _width(list(map(" ".join, zip(names, self.ends, strict=True))))
        self.narrow = 22 + _width(names)
        self.width = width - self.left - self.wide

    def draw(self, has_rings: bool = False) -> str:
        drawn = "".join(
            self._rule(value, "rule")
            + _tag(
                "text", escape(name), x=-8, y=self._y(value) + 4.5, text_anchor="end"
            )
            for value, name in self.ticks
        )
        if self.low < 0:
            drawn += self._rule(0, "soft", "zero")
        lines = (
            _tag(
                "g", "".join(self._line(line, look, has_rings)), **_colour(look.colour)
            )
            for line, look in self.chart.drawn
        )
        return drawn + "".join([*self._place_names(), *lines, self._line_names()])

    def _y(self, value: float) -> float:
        return round(self.height * (self.high - value) / (self.high - self.low), 1)

    def _rule(self, value: float, colour: str, kind: str = "") -> str:
        ends = {"x2": "100%", "y1": self._y(value), "y2": self._y(value)}
        return _tag("line", class_=f"rule {kind}", **ends, **_colour(colour))

    def _line(self, line: Line, look: Look, has_rings: bool) -> Iterator[str]:
        places, scale = self.chart.places, self.chart.scale
        heights = [self._y(value) for value in line.values]
        percents = [round(100 * share, 2) for share in places.shares]
        points = " ".join(f"{x},{y}" for x, y in zip(percents, heights, strict=True))
        yield _tag(
            "svg",
            _tag(
                "polyline", class_="line", points=points, stroke_dasharray=look.dashes
            ),
            viewBox=f"0 0 100 {self.height}",
            height=self.height,
            preserveAspectRatio="none",
            **_OPEN,
        )
        for x, values in zip(percents, line.dots, strict=False):
            for value in values:
                yield _tag("circle", class_="dot", cx=f"{x}%", cy=self._y(value), r=3)
        unit = places.title.partition(", ")[2]
        for place, (x, y) in enumerate(zip(percents, heights, strict=True)):
            tip = f"{line.name}, {f'{places.names[place]} {unit}'.rstrip()}: "
            tip += with_minus(scale.in_full(line.values[place]))
            mark = _tag("title", escape(tip))
            mark = _tag("path", mark, class_="mark", d=look.mark)
            if has_rings and place in line.marked:
                mark += _tag("circle", class_="ring", r=10, **_colour("ink"))
            yield _tag("svg", mark, x=f"{x}%", y=y, **_OPEN)

    def _line_names(self) -> str:
        gap = min(1.3 * _FONT_PX, self.height / len(self.ends))
        ends = [self._y(line.values[-1]) for line, _ in self.chart.drawn]
        heights = spread(ends, gap, gap / 2, self.height - gap / 2)
        start = "6" if len(self.chart.places.sizes) > 1 else "-48%"
        drawn = ""
        for (line, look), text, end, height in zip(
            self.chart.drawn, self.ends, ends, heights, strict=True
        ):
            name = _tag("tspan", escape(line.name), class_="name")
            name += _tag("tspan", escape(text), class_="wide", dx=6)
            y = round(height, 1)
            drawn += _tag(
                "g",
                _tag("line", class_="rule", x1=start, y1=end, x2=14, y2=y)
                + _tag("text", name, x=18, y=round(y + 4.5, 1)),
                **_colour(look.colour),
            )
        return _tag("svg", drawn, x="100%", **_OPEN)

    def _place_names(self) -> Iterator[str]:
        """Write the names of places under the axis where there is room."""
        places = self.chart.places
        notes = places.notes or [""] * len(places.names)
        texts = list(zip(places.names, notes, strict=True))
        needed = [_width(pair) for pair in texts]
        shown = _spaced(range(len(texts)), places.shares, needed, self.width)
        narrow_width = _NARROW_PX - self.left - self.narrow
        in_narrow = _spaced(shown, places.shares, needed, narrow_width)
        for number in shown:
            x, (name, note) = f"{100 * places.shares[number]:.2f}%", texts[number]
            text = escape(name) + _tag("tspan", escape(note), x=x, dy=17) * bool(note)
            kind = "" if number in in_narrow else "wide"
            yield _tag("text", text, class_=kind, x=x, y=self.height + 20, **_MID)


def _spaced(
    numbers: Iterable[int], shares: Sequence[float], needed: list[int], width: float
) -> list[int]:
    """Return the places whose labels do not overlap, from the last one on."""
    shown: list[int] = []
    for number in sorted(numbers, reverse=True):
        if shown:
            room = width * (shares[shown[-1]] - shares[number])
            if room < (needed[number] + needed[shown[-1]]) / 2 + 4:
                continue
        shown.append(number)
    return shown


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round values.

    >>> _ticks(-0.1, 2.6)
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    """
    unit: float = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(n * unit for n in (1, 2, 2.5, 5, 10) if 5.6 * n * unit >= high - low)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def _width(texts: Sequence[str]) -> int:
    return math.ceil(_LETTER_PX * max(map(len, texts)))


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
    return text.replace("-", "\N{MINUS SIGN}")
