"""Draw the dashboard: the picture in docs/metrics.md.

    python -m benchmarks.dashboard FILE.png [SECONDS]

runs examples/serve_metrics.py and a Prometheus for a while, and draws the panels of
examples/grafana.json as Grafana's light theme shows them, except that names stand
beside their lines: a preview of changes without Grafana.
"""

import io
import itertools
import math
import signal
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from jaxkv.tools.pictures import spread
from tests.observe.dashboard import (
    EXAMPLES,
    WAIT_S,
    dashboard_panels,
    prometheus,
    source,
)

# Pixels of a page; the picture has twice as many.
WIDTH, ROW_PX, HEADER_PX, GAP_PX = 704, 18.5, 8, 2
COLUMNS = 24
CANVAS, PANEL, BORDER, GRID, TEXT, FAINT = (
    *("#f4f5f5", "#ffffff", "#e0e2e4"),
    *("#ecedef", "#24292e", "#6e7076"),
)
# Grafana's, dark enough for text. The panels fix the colours of most series.
COLOURS = ("#1f60c4", "#37872d", "#c15c17", "#8f3bb8", "#c4162a", "#6e7076")
TITLE_PX, LABEL_PX, TICK_PX, STAT_PX = 10.5, 9.5, 9, 22
MAX_LABEL_CHARS, MAX_LINES = 14, 6
# A matplotlib point is a pixel at this resolution.
PX_PER_IN = 72


def short(value, unit):
    """Write a value as Grafana does."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s" and 0 < value < 1:
        return f"{1e3 * value:.3g} ms"
    suffix = {"bytes": "B", "Bps": "B/s", "s": "s", "ops": "/s"}.get(unit, "")
    prefix = ""
    for larger in "kMGT" if value >= 1000 else "":
        if value < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{value:.3g} {prefix}{suffix}".rstrip()


class Canvas:
    """A figure whose places are pixels from its upper left corner."""

    def __init__(self, height):
        self._height = height
        self._figure = Figure((WIDTH / PX_PER_IN, height / PX_PER_IN), facecolor=CANVAS)

    def _place(self, x, y, w, h):
        size = WIDTH, self._height
        return x / size[0], 1 - (y + h) / size[1], w / size[0], h / size[1]

    def box(self, x, y, w, h):
        left, bottom, w, h = self._place(x, y, w, h)
        style = {"facecolor": PANEL, "edgecolor": BORDER, "linewidth": 0.8}
        place = {"transform": self._figure.transFigure, "zorder": -1}
        box = Rectangle((left, bottom), w, h, **style, **place)
        self._figure.patches.append(box)

    def text(self, x, y, text, size, **style):
        """Write a line whose middle is at `y`."""
        left, bottom, _, _ = self._place(x, y, 0, 0)
        style = {"va": "center", "color": TEXT} | style
        self._figure.text(left, bottom, text, fontsize=size, **style)

    def axes(self, x, y, w, h):
        """Add axes without frame."""
        axes = self._figure.add_axes(self._place(x, y, w, h), facecolor="none")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=TICK_PX, labelcolor=FAINT, pad=2)
        return axes

    def save(self, path):
        """Write a small PNG: a drawing has few colours."""
        file = io.BytesIO()
        self._figure.savefig(file, dpi=2 * PX_PER_IN, format="png")
        image = Image.open(file).convert("RGB")
        image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def colours_of(panel):
    """Return the colours that the panel fixes, by the names of series."""
    return {
        override["matcher"]["options"]: item["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for item in override["properties"]
        if item["id"] == "color"
    }


def merged(series):
    """Join series of equal values: one line with the names of all."""
    by_values = {}
    for name, points in series:
        by_values.setdefault(tuple(points), []).append(name)
    return [(", ".join(names), list(points)) for points, names in by_values.items()]


def draw_stat(canvas, panel, series, x, y, w, h):
    """Draw the last value, above its history."""
    defaults = panel["fieldConfig"]["defaults"]
    points = series[0][1] if series else []
    text = short(points[-1][1], defaults["unit"]) if points else "no data"
    colour = defaults["color"]["fixedColor"]
    for mapping in defaults.get("mappings", ()):
        shown = mapping["options"].get(text)
        text, colour = (shown["text"], shown["color"]) if shown else (text, colour)
    has_graph = panel["options"]["graphMode"] == "area" and len(points) > 1
    middle = y + 20 + (h - 20) * (0.32 if has_graph else 0.42)
    style = {"ha": "center", "color": colour, "fontweight": "bold"}
    canvas.text(x + w / 2, middle, text, min(STAT_PX, h / 4), **style)
    if has_graph:
        axes = canvas.axes(x + 1, y + h * 0.68, w - 2, h * 0.31)
        times, values = zip(*points, strict=True)
        axes.plot(times, values, color=colour, linewidth=1)
        axes.fill_between(times, values, color=colour, alpha=0.12, linewidth=0)
        axes.set_xlim(times[0], times[-1])
        axes.set_ylim(0, 1.1 * max(values) or 1)
        axes.set_axis_off()


def draw_lines(canvas, panel, series, x, y, w, h):
    """Draw series over time, with their names at their ends."""
    defaults = panel["fieldConfig"]["defaults"]
    custom, unit = defaults["custom"], defaults["unit"]
    is_stacked = custom["stacking"]["mode"] == "normal"
    if not any(value for _, points in series for _, value in points):
        names = [name for name, _ in series]
        about = ", ".join(names) if len(names) <= 4 else f"{len(names)} series"
        text = textwrap.fill(f"{about}: 0" if names else "no data", 30)
        canvas.text(x + w / 2, y + h / 2 + 8, text, LABEL_PX, ha="center", color=FAINT)
        return
    fixed, spare = colours_of(panel), itertools.cycle(COLOURS)
    if not is_stacked:
        if len(series) > MAX_LINES:
            series = [item for item in series if any(value for _, value in item[1])]
        series = merged(series)
    labels = [textwrap.wrap(name, MAX_LABEL_CHARS) for name, _ in series]
    label_px = 6 * max(len(line) for lines in labels for line in lines) + 10
    axes = canvas.axes(x + 48, y + 24, w - 48 - label_px, h - 24 - 20)
    below, ends, colours = {}, [], []
    for name, points in series:
        colour = fixed.get(name.partition(", ")[0]) or next(spare)
        times = [time_s for time_s, _ in points]
        bottom = [below.get(time_s, 0.0) for time_s in times]
        tops = [low + value for low, (_, value) in zip(bottom, points, strict=True)]
        alpha = custom["fillOpacity"] / 100
        axes.fill_between(times, bottom, tops, color=colour, alpha=alpha, linewidth=0)
        axes.plot(times, tops, color=colour, linewidth=1.2)
        ends.append((bottom[-1] + tops[-1]) / 2 if is_stacked else tops[-1])
        if is_stacked:
            below = dict(zip(times, tops, strict=True))
        colours.append(colour)
    highest = max(below.values(), default=0) if is_stacked else 0
    highest = max(highest, *(value for _, points in series for _, value in points))
    top = defaults.get("max", 1.06 * highest)
    axes.set_ylim(0, top)
    last_s = max(time_s for _, points in series for time_s, _ in points)
    axes.set_xlim(0, last_s)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: short(value, unit))
    # The first label would touch the lowest value's, and the last one a name.
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 3, 6, 10], prune="both"))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes_px = h - 44
    gap = 1.15 * LABEL_PX * max(map(len, labels)) / axes_px * top
    heights = spread(ends, gap, 0.0, top)
    for lines, height, colour in zip(labels, heights, colours, strict=True):
        axes.text(
            1.0 + 5 / (w - 48 - label_px),
            height / top,
            "\n".join(lines),
            transform=axes.transAxes,
            va="center",
            color=colour,
            fontsize=LABEL_PX,
            linespacing=1.0,
        )


def draw(panels, series_of, path):
    """Draw panels at their places; `series_of` returns the series of a query."""
    rows = [panel["gridPos"]["y"] for panel in panels if panel["type"] == "row"]
    end = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    canvas = Canvas(end * ROW_PX + len(rows) * HEADER_PX + 4)
    for panel in panels:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        num_headers = sum(row < y for row in rows)
        top = y * ROW_PX + num_headers * HEADER_PX
        if panel["type"] == "row":
            middle = top + (ROW_PX + HEADER_PX) / 2 + 1
            title = f"\N{BLACK DOWN-POINTING SMALL TRIANGLE} {panel['title']}"
            canvas.text(6, middle, title, TITLE_PX + 1, fontweight="bold")
            continue
        left = x * WIDTH / COLUMNS + GAP_PX
        box = left, top + GAP_PX, w * WIDTH / COLUMNS - 2 * GAP_PX, h * ROW_PX - 4
        canvas.box(*box)
        title = textwrap.shorten(panel["title"], int(box[2] / 6), placeholder=" ...")
        canvas.text(left + 7, top + 13, title, TITLE_PX)
        series = []
        for target in panel["targets"]:
            for result in series_of(target["expr"]):
                name = target.get("legendFormat", "")
                for label, value in result["metric"].items():
                    name = name.replace("{{" + label + "}}", value)
                points = [(float(at), float(value)) for at, value in result["values"]]
                points = [point for point in points if math.isfinite(point[1])]
                series += [(name, points)] * bool(points)
        draw_panel = draw_stat if panel["type"] == "stat" else draw_lines
        draw_panel(canvas, panel, series, *box)
    canvas.save(path)


def main(file, seconds="120"):
    """Run the example and a Prometheus for some seconds, and draw the dashboard."""
    with (
        tempfile.TemporaryDirectory() as folder,
        source([str(EXAMPLES / "serve_metrics.py"), "0"], Path(folder)) as served,
    ):
        print("compiling", file=sys.stderr)
        while "serving prompts" not in served[1].read_text():
            time.sleep(1)
        with prometheus(served[2], Path(folder)) as ask:
            start = time.time() + 20  # The rates look back so far.
            for rest in range(int(seconds) + 20, 0, -10):
                print(f"{rest} s more", file=sys.stderr)
                time.sleep(min(rest, 10))
            end = time.time()
            zero = start

            def series_of(query):
                results = ask(query, start=start, end=end, step=1)
                for result in results:
                    result["values"] = [
                        (at - zero, value) for at, value in result["values"]
                    ]
                return results

            draw(dashboard_panels(), series_of, file)
        served[0].send_signal(signal.SIGINT)
        served[0].wait(WAIT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
