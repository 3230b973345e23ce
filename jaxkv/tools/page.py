"""A report as a page of HTML that needs nothing but itself.

It is read by eye, light or dark as the reader's system is, wide or narrow, by keyboard,
and with a screen reader: every chart is a drawing with a name, a description and a
table of its figures, and nothing is said by colour alone.
"""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import NamedTuple

import jax

from jaxkv import __version__
from jaxkv.tools.pictures import PALETTE, Chart, draw_inline, with_minus


class Section(NamedTuple):
    """A part of a page."""

    name: str  # Its anchor
    title: str  # What the reader sees above it
    inside: str  # HTML


_TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


def render_page(
    title: str,
    finding: str,
    facts: Iterable[tuple[str, str]],
    sections: Sequence[Section],
    command: str,
) -> str:
    listed = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts)
    contents = "".join(
        f'<li><a href="#{section.name}">{escape(section.title)}</a></li>'
        for section in sections
    )
    versions = f"jaxkv {__version__}, jax {jax.__version__}, {platform.machine()}"
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        palette=PALETTE,
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
    opened = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{opened}{escape(line)}</p>" for line in lines)


def code(label: str, text: str) -> str:
    return f'<pre tabindex="0" aria-label="{label}"><code>{escape(text)}</code></pre>'


def bullets(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def section(chart: Chart, mark: str) -> Section:
    return Section(chart.key, chart.title, _drawn(chart) + _table(chart, mark))


def _table(chart: Chart, mark: str) -> str:
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
        f'<table id="{name}-t"><caption id="{name}-c"><span>{escape(chart.title)}'
        "</span></caption>"
        f'<thead><tr><th scope="col">{escape(places.title)}</th>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _drawn(chart: Chart) -> str:
    """Draw a chart, if it is one, with a name and a description."""
    if not chart.about:
        return ""
    name = chart.key
    return (
        f'<figure id="{name}-f" tabindex="0" aria-labelledby="{name}-fc" '
        f'aria-describedby="{name}-c">'
        + draw_inline(
            chart,
            f'<title id="{name}-st">{escape(chart.title)}</title>'
            f'<desc id="{name}-sd">{escape(chart.about)}</desc>',
            role="img",
            aria_labelledby=f"{name}-st {name}-sd",
        )
        + f'<figcaption id="{name}-fc">{escape(chart.about)} '
        "All figures are in the table below.</figcaption></figure>"
    )
