"""Draw the dashboard: the picture in docs/metrics.md.

    python -m benchmarks.dashboard FILE [SECONDS]

runs examples/serve_metrics.py and a Prometheus for a while, and draws what the panels
of examples/grafana.json show of it: a preview of changes without
Grafana.
"""

import math
import signal
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jaxkv.tools.pictures import COLOURS
from tests.observe.dashboard import (
    EXAMPLES,
    WAIT_S,
    dashboard_panels,
    prometheus,
    source,
)

MAX_LINES = 6
GREY, RULE = COLOURS["soft"][0], COLOURS["rule"][0]
LINES = [COLOURS[f"s{number}"][0] for number in range(7)]


def _short(value, unit):
    """Write a value as Grafana does."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s" and 0 < value < 1:
        return f"{1e3 * value:.3g} ms"
    prefix, after = (
        "",
        {"bytes": "B", "Bps": "B/s", "s": "s", "ops": "/s"}.get(unit, ""),
    )
    for larger in "kMGT" if value >= 1000 else "":
        if value < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{value:.3g} {prefix}{after}".rstrip()


def _draw_panel(axes, panel, series):
    """Draw the series of a panel: a number, or lines over time."""
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    axes.set_title(panel["title"], loc="left", fontsize=9, fontweight="bold")
    if panel["type"] == "stat":
        axes.set_axis_off()
        last = _short(series[0][1][-1][1], unit) if series else "no data"
        axes.text(0.5, 0.5, last, ha="center", va="center", fontsize=20, color=LINES[0])
        return
    if len(series) > MAX_LINES:  # More could not be distinguished.
        series = [line for line in series if any(value for _, value in line[1])]
    is_stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    below = {}
    for number, (name, points) in enumerate(series):
        if is_stacked:
            points = [
                (time_s, value + below.get(time_s, 0)) for time_s, value in points
            ]
            below = dict(points)
        colour = LINES[number % len(LINES)]
        axes.plot(*zip(*points, strict=True), label=name, color=colour, linewidth=1)
    highest = max((value for _, points in series for _, value in points), default=0)
    axes.set_ylim(bottom=0, top=1.03 * defaults.get("max", highest) or 1)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: _short(value, unit))
    axes.tick_params(labelsize=7, colors=GREY)
    axes.grid(color=RULE, linewidth=0.6)
    for side in axes.spines.values():
        side.set_color(RULE)
    if series:
        below_axes = {"loc": "upper left", "bbox_to_anchor": (0, -0.14), "ncols": 3}
        axes.legend(fontsize=7, frameon=False, borderaxespad=0, **below_axes)
    else:
        axes.text(0.5, 0.5, "all 0", color=GREY, transform=axes.transAxes, ha="center")


def draw(panels, series_of, path):
    """Draw panels at their places; `series_of` returns the series of a query."""
    width, cell_in = 24, 0.42
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(13, cell_in * bottom), dpi=72)
    for panel in panels:
        x, y, w, h = (panel["gridPos"][name] for name in "xywh")
        if panel["type"] == "row":
            where = 0.01, 1 - (y + 0.7) / bottom
            figure.text(*where, panel["title"], fontsize=11, color=LINES[0])
            continue
        box = (
            (x + 1.2) / width,
            1 - (y + h - 2.1) / bottom,
            (w - 1.5) / width,
            max(1, h - 3.1) / bottom,
        )
        series = []
        for target in panel["targets"]:
            for result in series_of(target["expr"]):
                name = target.get("legendFormat", "")
                for label, value in result["metric"].items():
                    name = name.replace("{{" + label + "}}", value)
                points = [(float(at), float(value)) for at, value in result["values"]]
                series.append(
                    (name, [pair for pair in points if math.isfinite(pair[1])])
                )
        _draw_panel(figure.add_axes(box), panel, [line for line in series if line[1]])
    figure.savefig(path)


def main(file, seconds="120"):
    """Run the example and a Prometheus for some seconds, and draw the dashboard."""
    with (
        tempfile.TemporaryDirectory() as folder,
        source([str(EXAMPLES / "serve_metrics.py"), "0"], Path(folder)) as served,
    ):
        with prometheus(served[2], Path(folder)) as ask:
            start = time.time() + 20  # The rates look back so far.
            for rest in range(int(seconds) + 20, 0, -10):
                print(f"{rest} s more", file=sys.stderr)
                time.sleep(min(rest, 10))
            end = time.time()
            zero = start

            def series_of(query):
                series = ask(query, start=start, end=end, step=1)
                for result in series:
                    result["values"] = [
                        (at - zero, value) for at, value in result["values"]
                    ]
                return series

            draw(dashboard_panels(), series_of, file)
        served[0].send_signal(signal.SIGINT)
        served[0].wait(WAIT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
