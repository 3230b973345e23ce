"""A report as a page of HTML that needs nothing but itself.

It is read by eye, light or dark as the reader's system is, wide or narrow, by keyboard,
and by those who hear it: every chart is a drawing with a name, a description and a
table of its figures, and nothing is said by colour alone.
"""

from __future__ import annotations

import io
import platform
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

import jax

from jaxkv import __version__
from jaxkv.tools.pictures import (
    COLOURS,
    GREY,
    INK,
    RULE,
    Line,
    Places,
    Scale,
    draw_lines,
    make_figure,
    with_minus,
)


class Section(NamedTuple):
    """A part of a page.

    Attributes:
        name: Its anchor.
        title: What the reader sees above it.
        inside: HTML.
    """

    name: str
    title: str
    inside: str


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
    """Write a page.

    Args:
        title: What it is about.
        finding: HTML of what the reader should know first.
        facts: What the report is about, each with a name.
        sections: The rest, in order.
        command: The command line that made it.
    """
    listed = "".join(f"<dt>{escape(n)}</dt><dd>{escape(v)}</dd>" for n, v in facts)
    contents = "".join(
        f'<li><a href="#{each.name}">{escape(each.title)}</a></li>' for each in sections
    )
    versions = f"jaxkv {__version__}, jax {jax.__version__}, {platform.machine()}"
    return _PAGE.format(
        title=escape(title),
        heading=escape(title).replace("_", "_<wbr>"),
        style=_STYLE,
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
    """Write lines as they are typed, with a name for those who hear them."""
    return f'<pre tabindex="0" aria-label="{label}"><code>{escape(text)}</code></pre>'


def bullets(items: Iterable[str]) -> str:
    """Write a list, of HTML."""
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def table(
    name: str,
    caption: str,
    places: Places,
    rows: Iterable[tuple[str, Sequence[tuple[str, str]]]],
) -> str:
    """Write a table that scrolls by itself where it is too wide.

    Args:
        name: The anchor of what it belongs to.
        caption: What the figures are.
        places: Its columns.
        rows: A name, then for each column a text and what marks it, which may be empty.
    """
    notes = places.notes or [""] * len(places.names)
    columns = "".join(
        f'<th scope="col">{escape(each)} <span class="share">{escape(note)}</span></th>'
        for each, note in zip(places.names, notes, strict=True)
    )
    body = ""
    for title, cells in rows:
        texts = "".join(
            f"<td>{escape(text)}{f' <strong>{mark}</strong>' if mark else ''}</td>"
            for text, mark in cells
        )
        body += f'<tr><th scope="row">{escape(title)}</th>{texts}</tr>'
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{name}-c">'
        f'<table id="{name}-t"><caption id="{name}-c"><span>{escape(caption)}</span>'
        "</caption>"
        f'<thead><tr><th scope="col">{escape(places.title)}</th>{columns}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def chart(
    name: str,
    title: str,
    about: str,
    places: Places,
    lines: Sequence[Line],
    scale: Scale,
) -> str:
    """Write a chart, once for wide and once for narrow windows; a table follows it.

    Args:
        name: The anchor of what it belongs to.
        title: What it shows.
        about: What it shows, in a sentence.
        places: Where its values stand.
        lines: Its lines.
        scale: How values are written.
    """
    drawn = "".join(
        _drawing(f"{name}-{sheet.kind}", title, about, places, lines, scale, sheet)
        for sheet in _SHEETS
    )
    return (
        f'<figure id="{name}-f" tabindex="0" aria-labelledby="{name}-fc" '
        f'aria-describedby="{name}-c">{drawn}'
        f'<figcaption id="{name}-fc">{escape(about)} All figures are in the table '
        "below.</figcaption></figure>"
    )


def _drawing(
    name: str,
    title: str,
    about: str,
    places: Places,
    lines: Sequence[Line],
    scale: Scale,
    sheet: _Sheet,
) -> str:
    """Draw lines as SVG that takes its colours from the page."""
    from matplotlib import rc_context

    file = io.StringIO()
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
            places,
            lines,
            scale,
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
    unit = places.title.partition(", ")[2]
    titles = (
        f"{line.name}, {f'{place} {unit}'.rstrip()}: {with_minus(scale.in_full(value))}"
        for line in lines
        for place, value in zip(places.names, line.values, strict=True)
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
        f'{escape(title)}</title><desc id="{name}-sd">{escape(about)}</desc>{svg}</svg>'
    )


_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f23; --soft: #535b63;
  --rule: #d4d9de; --panel: #f4f6f8; --shade: #0000002e;
  --link: #0b57a4; --focus: #0b57a4; --s0: #0b6285; --s1: #b3401f; --s2: #4a6b14;
  --s3: #7a3f94; --s4: #855600; --s5: #33418f; --s6: #a0245f; --optimum: #535b63; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e9ecef;
  --soft: #b3bac1; --rule: #39414a; --panel: #1d2329;
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
svg path, svg use { stroke-linejoin: round; stroke-linecap: butt; }
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
{finding}
<dl>{facts}</dl>
</header>
<nav aria-label="On this page"><ul>{contents}</ul></nav>
<main id="main" tabindex="-1">
{sections}</main>
<footer>
<p>Made by {versions}, with this command:</p>
{command}
</footer>
</body>
</html>
"""
