"""The results of a replay as a page of HTML that needs nothing but itself.

It is read by eye, light or dark as the reader's system is, wide or narrow, by keyboard,
and by those who hear it: every chart is a drawing with a name, a description and a
table of its figures, and nothing is said by colour alone.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Iterable, Sequence
from html import escape

import jax

from jaxkv import __version__
from jaxkv.tools.pictures import spread, with_minus
from jaxkv.tools.replay.measures import (
    BASELINE,
    Cell,
    Comparison,
    Measure,
    format_percent,
    format_share,
)
from jaxkv.tools.replay.report import facts_of, label_of, parts_of
from jaxkv.tools.replay.run import OPTIMUM

_NUM_COLOURS = 7
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2 1 2 1 2")


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of a chart.

    Attributes:
        name: What stands at its end.
        look: The number of its colour, shape and dashes; -1 for the optimum.
        values: A value for each capacity.
    """

    name: str
    look: int
    values: list[float]


@dataclasses.dataclass(frozen=True)
class _Sheet:
    """The size of a drawing, in units that are about pixels.

    Attributes:
        kind: Which of the two it is, a class of the style sheet.
        width: Of the whole.
        height: Of the whole.
        left: Room for what stands at the axis of values.
        right: Room for the names of the lines.
        font: Size of the letters.
        has_values: Whether there is room for the last values beside the names.
    """

    kind: str
    width: int
    height: int
    left: int
    right: int
    font: int
    has_values: bool


_SHEETS = (
    _Sheet("wide", 760, 380, 46, 172, 14, True),
    _Sheet("narrow", 328, 330, 40, 108, 12, False),
)
_TOP, _BOTTOM = 14, 52


def render_page(comparison: Comparison, command: str) -> str:
    """Write a page of HTML about a comparison, made by a command line."""
    lead = _main_measure(comparison)
    measures = [lead, *(each for each in comparison.measures if each is not lead)]
    sections = [_section(comparison, each.key, each) for each in measures]
    gain = _gain_section(comparison, lead) if comparison.rivals else ""
    title = f"Cache policies on {comparison.trace.name}"
    heading = escape(title).replace("_", "_<wbr>")
    facts = [*facts_of(comparison.trace), *parts_of(comparison)]
    listed = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts)
    links = [(each.key, each.what) for each in measures]
    if gain:
        links.insert(1, ("gain", f"What is gained over {BASELINE}"))
        sections.insert(1, gain)
    links += [("reading", "How to read this")]
    contents = "".join(f'<li><a href="#{i}">{escape(t)}</a></li>' for i, t in links)
    versions = f"jaxkv {__version__}, jax {jax.__version__}, {platform.machine()}"
    return _PAGE.format(
        title=escape(title),
        heading=heading,
        style=_STYLE,
        finding=escape(_finding(comparison, lead)),
        facts=listed,
        contents=contents,
        sections="".join(sections) + _refused_section(comparison),
        reading=_reading(comparison),
        command=escape(command),
        versions=escape(versions),
    )


def _main_measure(comparison: Comparison) -> Measure:
    """Return the measure that the page begins with: tokens, if they are known."""
    for measure in comparison.measures:
        if measure.key.startswith("tokens"):
            return measure
    return comparison.measures[0]


def _finding(comparison: Comparison, measure: Measure) -> str:
    """Say in a sentence or two which policy finds most."""
    names = comparison.real_policies
    capacities = comparison.capacities
    if not names:
        return "Only the optimum was replayed, which no real cache can be."
    wins = {n: sum(n in measure.best(c) for c in capacities) for n in names}
    first = max(wins, key=lambda name: wins[name])
    of = (
        "the only capacity" if len(capacities) == 1 else f"{len(capacities)} capacities"
    )
    what = measure.what[0].lower() + measure.what[1:]
    if len(names) == 1:
        at = capacities[-1]
        ratio = format_percent(measure.ratios[Cell(first, at)])
        return f"{first}: {what} come to {ratio} at {at:,} blocks."
    text = f"Of {len(names)} policies, {first} has the most {what}, at "
    text += of if len(capacities) == 1 else f"{wins[first]} of {of}"
    if BASELINE not in names or first == BASELINE:
        return f"{text}."
    leads = {
        c: measure.ratios[Cell(first, c)] - measure.ratios[Cell(BASELINE, c)]
        for c in capacities
    }
    at = max(leads, key=lambda capacity: leads[capacity])
    share = format_share(at, comparison.trace)
    ours, theirs = (measure.ratios[Cell(name, at)] for name in (first, BASELINE))
    return (
        f"{text}. Its greatest lead over {BASELINE} is {100 * leads[at]:.2f} points, "
        f"at {at:,} blocks ({share} of the different ones): {format_percent(ours)} "
        f"against {format_percent(theirs)}."
    )


def _section(comparison: Comparison, name: str, measure: Measure) -> str:
    """Write a measure's chart and table."""
    lines = [
        _Line(
            label_of(policy, comparison.admission),
            _look(comparison, policy),
            [100 * measure.ratios[Cell(policy, c)] for c in comparison.capacities],
        )
        for policy in comparison.policies
    ]
    rows = []
    if measure.device is not None:
        cells = [(format_percent(measure.device), False)] * len(comparison.capacities)
        rows.append(("device alone", cells))
    for policy in comparison.policies:
        cells = [
            (
                format_percent(measure.ratios[Cell(policy, c)]),
                policy in measure.best(c),
            )
            for c in comparison.capacities
        ]
        rows.append((label_of(policy, comparison.admission), cells))
    about = _describe(comparison, measure)
    figure = _figure(comparison, name, measure.title, about, lines)
    table = _table(comparison, name, f"{measure.title}, in percent", rows)
    return _wrap(name, measure.title, figure + table)


def _gain_section(comparison: Comparison, measure: Measure) -> str:
    """Write by how much each policy is better or worse than the baseline."""
    lines, rows = [], []
    for policy in comparison.rivals:
        gains = [
            100 * (measure.ratios[Cell(policy, c)] - measure.ratios[Cell(BASELINE, c)])
            for c in comparison.capacities
        ]
        lines.append(_Line(policy, _look(comparison, policy), gains))
        cells = [
            (_signed(gain), policy in measure.best(c))
            for gain, c in zip(gains, comparison.capacities, strict=True)
        ]
        rows.append((policy, cells))
    what = measure.what[0].lower() + measure.what[1:]
    title = f"What is gained over {BASELINE}"
    unit = f"{measure.what}: percentage points more (+) or less than {BASELINE}"
    about = f"Above the line at 0, a policy has more {what} than {BASELINE}."
    figure = _figure(comparison, "gain", unit, about, lines)
    return _wrap("gain", title, figure + _table(comparison, "gain", unit, rows))


def _refused_section(comparison: Comparison) -> str:
    by_cell, capacities = comparison.by_cell, comparison.capacities
    rows = []
    for policy in comparison.policies:
        counts = [by_cell[Cell(policy, c)].num_refused for c in capacities]
        if any(counts):
            rows.append((policy, [(f"{count:,}", False) for count in counts]))
    if not rows:
        return ""
    title = f"Stores refused, of {comparison.trace.num_requests:,} requests"
    return _wrap("refused", title, _table(comparison, "refused", title, rows))


def _describe(comparison: Comparison, measure: Measure) -> str:
    """Say in words what a chart shows at its ends."""
    parts = []
    capacities = comparison.capacities
    for capacity in dict.fromkeys((capacities[0], capacities[-1])):
        best = measure.best(capacity)
        if best:
            ratio = format_percent(measure.ratios[Cell(best[0], capacity)])
            parts.append(f"{', '.join(best)} at {capacity:,} blocks, with {ratio}")
    if not parts:
        return f"{measure.what}, against the capacity."
    return f"Best: {'; '.join(parts)}."


def _reading(comparison: Comparison) -> str:
    """Explain what the page says."""
    items = [
        "<strong>Found</strong> is what lies in the cache as part of a request's "
        "prefix: up to the first block that is missing. Nobody can use what follows.",
        "<strong>Capacity</strong> is the host's, in blocks, and as a share of the "
        "different blocks of the trace.",
        "<strong>Best</strong> stands at the policy that has the most at a capacity, "
        "and at no policy where all have the same.",
    ]
    if OPTIMUM in comparison.policies:
        bound = (
            "No policy can find more, and none can be expected to find as much."
            if comparison.admission is None
            else "It stores all blocks, and the policies what the admission lets pass."
        )
        items.append(f"<strong>The optimum</strong> knows the future. {bound}")
    if comparison.prefill_flops is not None:
        items.append(
            "<strong>Prefill saved</strong> counts what the model need not compute: a "
            "token far back in a prompt saves more, as it attends to more before it."
        )
    if comparison.device_blocks is not None:
        items.append(
            "<strong>The device</strong> keeps what was used last and is asked first. "
            "The host stores what was computed, and is asked for what continues the "
            "device's prefix."
        )
    return "".join(f"<li>{item}</li>" for item in items)


def _look(comparison: Comparison, policy: str) -> int:
    """Number the policies; the optimum is -1."""
    if policy == OPTIMUM:
        return -1
    return comparison.real_policies.index(policy)


def _wrap(name: str, title: str, inside: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-h">'
        f'<h2 id="{name}-h">{escape(title)}</h2>{inside}</section>\n'
    )


def _table(
    comparison: Comparison,
    name: str,
    caption: str,
    rows: Iterable[tuple[str, list[tuple[str, bool]]]],
) -> str:
    """Write a table that scrolls by itself where it is too wide."""
    columns = "".join(
        f'<th scope="col">{c:,} <span class="share">'
        f"{format_share(c, comparison.trace)}</span></th>"
        for c in comparison.capacities
    )
    body = ""
    for title, cells in rows:
        texts = "".join(
            f"<td>{escape(text)}{' <strong>best</strong>' if best else ''}</td>"
            for text, best in cells
        )
        body += f'<tr><th scope="row">{escape(title)}</th>{texts}</tr>'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}-c">'
        f'<table id="{name}-t"><caption id="{name}-c"><span>{escape(caption)}</span>'
        "</caption>"
        f'<thead><tr><th scope="col">Capacity, blocks</th>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _figure(
    comparison: Comparison, name: str, title: str, about: str, lines: Sequence[_Line]
) -> str:
    """Write a chart, once for wide and once for narrow windows."""
    drawn = "".join(
        _draw(comparison, f"{name}-{sheet.kind}", title, about, lines, sheet)
        for sheet in _SHEETS
    )
    return (
        f'<figure id="{name}-f" tabindex="0" aria-labelledby="{name}-fc" '
        f'aria-describedby="{name}-c">{drawn}'
        f'<figcaption id="{name}-fc">{escape(about)} All figures are in the table '
        "below.</figcaption></figure>"
    )


def _draw(
    comparison: Comparison,
    name: str,
    title: str,
    about: str,
    lines: Sequence[_Line],
    sheet: _Sheet,
) -> str:
    """Draw lines against the capacity as SVG."""
    capacities = comparison.capacities
    right, bottom = sheet.width - sheet.right, sheet.height - _BOTTOM
    values = [value for line in lines for value in line.values]
    ticks = _ticks(min(0.0, *values), max(0.0, *values))
    low, high = ticks[0], ticks[-1]
    span = math.log(capacities[-1] / capacities[0])

    def x_of(capacity: int) -> float:
        share = math.log(capacity / capacities[0]) / span if span else 0.5
        return sheet.left + 8 + share * (right - sheet.left - 16)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - _TOP)

    is_signed = low < 0
    parts = []
    for tick in ticks:
        y = y_of(tick)
        kind = "zero" if tick == 0 else "grid"
        text = f"{tick:+g}" if is_signed and tick else f"{tick:g}"
        text = with_minus(text)
        parts.append(
            f'<path class="{kind}" d="M{sheet.left} {y:.1f}H{right}"/>'
            f'<text class="tick" x="{sheet.left - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end">{text}{"" if is_signed else "%"}</text>'
        )
    last_x = -math.inf
    for capacity in capacities:
        x = x_of(capacity)
        if x - last_x < 5.1 * sheet.font:
            continue
        last_x = x
        parts.append(
            f'<path class="grid" d="M{x:.1f} {bottom}v5"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">'
            f"{capacity:,}</text>"
            f'<text class="tick" x="{x:.1f}" y="{bottom + 38}" text-anchor="middle">'
            f"{format_share(capacity, comparison.trace)}</text>"
        )
    gap = min(sheet.font + 4, (bottom - _TOP) / len(lines))
    heights = spread([y_of(line.values[-1]) for line in lines], gap, _TOP, bottom)
    for line, label_y in zip(lines, heights, strict=True):
        points = [
            (x_of(c), y_of(v)) for c, v in zip(capacities, line.values, strict=True)
        ]
        is_optimum = line.look < 0
        look = "best-possible" if is_optimum else f"s{line.look % _NUM_COLOURS}"
        dash = "1 4" if is_optimum else _DASHES[line.look // 2 % len(_DASHES)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        shapes = "".join(
            f'<path class="mark" d="{_shape(line.look, x, y)}">'
            f"<title>{escape(line.name)}, {c:,} blocks: "
            f"{_signed(v) if is_signed else f'{v:.2f}%'}</title></path>"
            for (x, y), c, v in zip(points, capacities, line.values, strict=True)
        )
        end_x, end_y = points[-1]
        text = escape(OPTIMUM if is_optimum else line.name)
        if sheet.has_values:
            last = line.values[-1]
            text += f" {_signed(last)}" if is_signed else f" {last:.1f}%"
        parts.append(
            f'<g class="{look}"><path class="line" stroke-dasharray="{dash}" '
            f'd="M{path}"/>{shapes}'
            f'<path class="lead" d="M{end_x + 6:.1f} {end_y:.1f}L{right + 10} '
            f'{label_y:.1f}h6"/>'
            f'<path class="mark" d="{_shape(line.look, right + 22, label_y)}"/>'
            f'<text x="{right + 31}" y="{label_y + 0.35 * sheet.font:.1f}">{text}'
            "</text></g>"
        )
    return (
        f'<svg class="{sheet.kind}" viewBox="0 0 {sheet.width} {sheet.height}" '
        f'font-size="{sheet.font}" role="img" '
        f'aria-labelledby="{name}-st {name}-sd"><title id="{name}-st">{escape(title)}'
        f'</title><desc id="{name}-sd">{escape(about)}</desc>{"".join(parts)}</svg>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Choose round values from `low` or less to `high` or more."""
    rough = max(high - low, 0.01) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * number, 10) for number in range(first, last + 1)]


def _shape(look: int, x: float, y: float) -> str:
    """Draw the mark of a line: each has another shape."""
    r = 4.2
    if look < 0:  # A dash.
        return f"M{x - r:.1f} {y - 1:.1f}h{2 * r}v2h{-2 * r}z"
    kind = look % 8
    corners: Sequence[tuple[float, float]]
    if kind == 0:
        return f"M{x - r:.1f} {y:.1f}a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z"
    if kind == 1:
        corners = ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85))
    elif kind == 2:
        corners = ((0, -1.2), (1.1, 0.8), (-1.1, 0.8))
    elif kind == 3:
        corners = ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0))
    elif kind == 4:
        corners = ((0, 1.2), (1.1, -0.8), (-1.1, -0.8))
    elif kind == 5:  # A star.
        corners = [
            (size * math.sin(turn * math.pi / 5), -size * math.cos(turn * math.pi / 5))
            for turn in range(10)
            for size in ((1.5, 0.6)[turn % 2],)
        ]
    elif kind == 6:  # A plus.
        a, b = 0.42, 1.25
        corners = (
            *((-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)),
            *((a, b), (-a, b), (-a, a), (-b, a), (-b, -a), (-a, -a)),
        )
    else:  # A bar.
        corners = ((-0.45, -1.3), (0.45, -1.3), (0.45, 1.3), (-0.45, 1.3))
    return (
        "M" + "L".join(f"{x + r * dx:.1f} {y + r * dy:.1f}" for dx, dy in corners) + "z"
    )


def _signed(points: float) -> str:
    """Write percentage points with their sign; none for 0."""
    text = f"{points:+.2f}"
    return "0.00" if float(text) == 0 else with_minus(text)


_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f23; --soft: #535b63;
  --rule: #d4d9de; --zero: #6b737b; --panel: #f4f6f8; --shade: #0000002e;
  --link: #0b57a4; --focus: #0b57a4; --s0: #0b6285; --s1: #b3401f; --s2: #4a6b14;
  --s3: #7a3f94; --s4: #855600; --s5: #33418f; --s6: #a0245f; --optimum: #535b63; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e9ecef;
  --soft: #b3bac1; --rule: #39414a; --zero: #8d969f; --panel: #1d2329;
  --shade: #ffffff3d; --link: #8cc4ff; --focus: #8cc4ff; --s0: #6cc5e8;
  --s1: #ff9d7d; --s2: #a8d26a; --s3: #d4a5ea; --s4: #e8bd5a; --s5: #aab6ff;
  --s6: #ff9cc4; --optimum: #b3bac1; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 56rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1rem 0 .5rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 .75rem; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; }
.skip { position: absolute; left: -100rem; padding: .5rem 1rem;
  background: var(--paper); }
.skip:focus { left: 1rem; top: .5rem; z-index: 1; }
.finding { font-size: 1.1rem; margin: .5rem 0 1.25rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem;
  margin: 0; padding: 1rem; background: var(--panel); border-radius: .5rem; }
dt { color: var(--soft); }
dd { margin: 0; }
nav ul { padding-left: 1.2rem; columns: 19rem; }
figure { margin: 0 0 1rem; }
figcaption { color: var(--soft); font-size: .9rem; }
svg { display: block; width: 100%; height: auto; font-family: inherit; }
svg.narrow { display: none; }
svg text { fill: var(--ink); }
svg .tick { fill: var(--soft); }
.grid { stroke: var(--rule); fill: none; }
.zero { stroke: var(--zero); fill: none; stroke-width: 1.5; }
.line { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; }
.lead { fill: none; stroke: var(--c); stroke-width: .8; opacity: .7; }
.mark { fill: var(--c); stroke: var(--paper); stroke-width: .8; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
.s6 { --c: var(--s6); } .best-possible { --c: var(--optimum); }
.scroll { overflow-x: auto; background:
  linear-gradient(to left, var(--paper) 30%, transparent) right / 2.5rem 100%
  no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / .7rem 100% no-repeat; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .25rem 0 .5rem; }
caption span { display: inline-block; position: sticky; left: 0;
  max-width: calc(100vw - 2rem); }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--rule); vertical-align: baseline; }
thead th { font-weight: 600; }
th:first-child { text-align: left; position: sticky; left: 0; font-weight: 600;
  background: var(--paper); }
td strong { display: block; font-size: .8rem; line-height: 1.1; }
.share { display: block; font-weight: 400; color: var(--soft); font-size: .85rem; }
pre { overflow-x: auto; padding: .75rem 1rem; background: var(--panel);
  border-radius: .5rem; white-space: pre-wrap; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--rule); color: var(--soft); }
@media (max-width: 40rem) { svg.wide { display: none; } svg.narrow { display: block; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
  th, td { padding: .35rem .4rem; } 
  th:first-child { white-space: normal; overflow-wrap: normal; } }
@media print { .skip, nav { display: none; } figure, table { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the results</a>
<header>
<h1>{heading}</h1>
<p class="finding">{finding}</p>
<dl>{facts}</dl>
</header>
<nav aria-label="On this page"><ul>{contents}</ul></nav>
<main id="main" tabindex="-1">
{sections}<section id="reading" aria-labelledby="reading-h">
<h2 id="reading-h">How to read this</h2>
<ul>{reading}</ul>
</section>
</main>
<footer>
<p>Made by {versions}, with this command:</p>
<pre tabindex="0" aria-label="The command"><code>{command}</code></pre>
</footer>
</body>
</html>
"""
