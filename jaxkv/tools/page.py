"""A report as a page of HTML that needs nothing but itself.

It is read by eye, light or dark as the reader's system is, wide or narrow, by keyboard,
and with a screen reader: every chart is a drawing with a name, a description and a
table of its figures, and nothing is said by colour alone.
"""

from __future__ import annotations

import io
import pathlib
import platform
import re
from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import Any, NamedTuple

import jax

from jaxkv import __version__
from jaxkv.tools.pictures import (
    COLOURS,
    GREY,
    INK,
    RULE,
    Chart,
    draw_lines,
    make_figure,
    with_minus,
)


class Section(NamedTuple):
    """A part of a page."""

    name: str  # Its anchor
    title: str  # What the reader sees above it
    inside: str  # HTML


class _Sheet(NamedTuple):
    """The size of a drawing and its letters, in units that are about pixels.

    There is room for `num_labels` places below the axis, and with `has_values` for the
    last values beside the names.
    """

    kind: str
    width: int
    height: int
    font: int
    num_labels: int
    has_values: bool


_TEMPLATE = pathlib.Path(__file__).with_suffix(".html")
_SHEETS = (
    _Sheet("wide", 760, 380, 13, 9, True),
    _Sheet("narrow", 328, 330, 12, 3, False),
)
# Colours of pictures, by their names in the style sheet, which has dark ones too.
_VARIABLES = {
    **{colour: f"s{number}" for number, colour in enumerate(COLOURS)},
    GREY: "optimum",
    INK: "ink",
    RULE: "rule",
}


def render_page(
    title: str,
    finding: str,
    facts: Iterable[tuple[str, str]],
    sections: Sequence[Section],
    command: str,
) -> str:
    """Write a page."""
    listed = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts)
    contents = "".join(
        f'<li><a href="#{section.name}">{escape(section.title)}</a></li>'
        for section in sections
    )
    versions = f"jaxkv {__version__}, jax {jax.__version__}, {platform.machine()}"
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        heading=escape(title).replace("_", "_<wbr>"),
        finding=finding,
        facts=listed,
        contents=contents,
        sections="".join(map(_render_section, sections)),
        command=code("The command", command),
        versions=escape(versions),
    )


def _render_section(section: Section) -> str:
    name = section.name
    return (
        f'<section id="{name}" aria-labelledby="{name}-h">'
        f'<h2 id="{name}-h">{escape(section.title)}</h2>{section.inside}</section>\n'
    )


def paragraphs(lines: Iterable[str], kind: str = "") -> str:
    """Write texts as paragraphs, of a class of the style sheet."""
    opened = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{opened}{escape(line)}</p>" for line in lines)


def code(label: str, text: str) -> str:
    """Write lines of code, with a label for screen readers."""
    return f'<pre tabindex="0" aria-label="{label}"><code>{escape(text)}</code></pre>'


def bullets(items: Iterable[str]) -> str:
    """Write a list, of HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def section(chart: Chart, mark: str, title: str = "") -> Section:
    """Write a chart and its table as a part of a page."""
    inside = _drawn(chart) + _table(chart, mark)
    return Section(chart.key, title or chart.title, inside)


def _table(chart: Chart, mark: str) -> str:
    """Write a table that scrolls by itself where it is too wide."""
    places, name = chart.places, chart.key
    notes = places.notes or [""] * len(places.names)
    columns = "".join(
        f'<th scope="col">{escape(place)} '
        f'<span class="share">{escape(note)}</span></th>'
        for place, note in zip(places.names, notes, strict=True)
    )
    body = ""
    for line in chart.lines:
        texts = "".join(
            f"<td>{escape(with_minus(chart.scale.in_full(value)))}"
            f"{f' <strong>{mark}</strong>' if place in line.marked else ''}</td>"
            for place, value in enumerate(line.values)
        )
        body += f'<tr><th scope="row">{escape(line.name)}</th>{texts}</tr>'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}-c">'
        f'<table id="{name}-t"><caption id="{name}-c"><span>{escape(chart.caption)}'
        "</span></caption>"
        f'<thead><tr><th scope="col">{escape(places.title)}</th>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _drawn(chart: Chart) -> str:
    """Draw a chart, if it is one, for wide and for narrow windows."""
    if not chart.about:
        return ""
    name = chart.key
    drawings = "".join(_drawing(chart, sheet) for sheet in _SHEETS)
    return (
        f'<figure id="{name}-f" tabindex="0" aria-labelledby="{name}-fc" '
        f'aria-describedby="{name}-c">{drawings}'
        f'<figcaption id="{name}-fc">{escape(chart.about)} '
        "All figures are in the table below.</figcaption></figure>"
    )


def _drawing(chart: Chart, sheet: _Sheet) -> str:
    """Draw lines as SVG that takes its colours from the page."""
    from matplotlib import rc_context

    file, name = io.StringIO(), f"{chart.key}-{sheet.kind}"
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # Parts have the same names each time.
        "font.size": sheet.font - 1,
        "xtick.major.pad": 9,
    }
    with rc_context(style):
        figure = make_figure(sheet.width / 72, sheet.height / 72)
        draw_lines(
            figure.add_subplot(),
            chart,
            font=sheet.font,
            num_labels=sheet.num_labels,
            has_values=sheet.has_values,
        )
        figure.savefig(file, format="svg", transparent=True, dpi=72)
    svg = file.getvalue()
    # Without what belongs to a file of its own.
    svg = svg[svg.index("<g ") : svg.rindex("</g>")] + "</g>"
    svg = re.sub(r' clip-path="[^"]*"| font-family: [^";]*;?', "", svg)
    svg = re.sub(r' (?:xlink:)?(id="|href="#)', rf" \1{name}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    unit = chart.places.title.partition(", ")[2]
    titles = (
        f"{line.name}, {f'{place} {unit}'.rstrip()}: "
        f"{with_minus(chart.scale.in_full(value))}"
        for line, _ in chart.drawn
        for place, value in zip(chart.places.names, line.values, strict=True)
    )
    svg = re.sub(
        "<use(.*?)/>",
        lambda use: (
            f'<use class="mark"{use[1]}><title>{escape(next(titles))}</title></use>'
        ),
        svg,
    )
    return (
        f'<svg class="{sheet.kind}" viewBox="0 0 {sheet.width} {sheet.height}" '
        f'role="img" aria-labelledby="{name}-st {name}-sd"><title id="{name}-st">'
        f'{escape(chart.title)}</title><desc id="{name}-sd">{escape(chart.about)}'
        f"</desc>{svg}</svg>"
    )
