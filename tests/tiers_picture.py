"""Draws where blocks live and what moves them: the picture of README.

    python -m tests.tiers_picture

writes docs/tiers.svg. `tests/test_docs.py` compares it with what is drawn here.
"""

from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "tiers.svg"


class Tier(NamedTuple):
    name: str
    medium: str
    fate: str
    columns: int
    rows: int
    x: int
    width: int
    # The blocks of the conversation that returns, by their place in the grid.
    returning: tuple[int, ...]


TIERS = (
    Tier("Device", "HBM", "fast, and always full", 4, 2, 0, 150, (5,)),
    Tier("Host", "pinned memory", "many times as large", 8, 4, 275, 230, (9, 10, 11)),
    Tier(
        "Store",
        "folder, S3, Redis, ...",
        "shared, and survives restarts",
        10,
        5,
        630,
        250,
        (22, 23, 24),
    ),
)
LEGEND = "KV blocks of a returning user: copied back, not computed again"
BLOCK, PITCH = 12, 16
TOP, HEIGHT, WIDTH = 34, 178, 880
STYLE = """
text { font: 13px system-ui, -apple-system, sans-serif; fill: #59636e; }
.name { font-size: 16px; font-weight: 600; fill: #1f2328; }
.tier { fill: #f6f8fa; stroke: #d0d7de; }
.block { fill: #c8d1da; }
.returning { fill: #0b6285; }
.move { stroke: #59636e; stroke-width: 1.5; fill: none; }
.load { stroke: #0b6285; stroke-width: 2; fill: none; }
.middle { text-anchor: middle; }
.word { font-weight: 600; fill: #1f2328; }
.load-word { font-weight: 600; fill: #0b6285; }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1; }
  .name, .word { fill: #f0f6fc; }
  .tier { fill: #151b23; stroke: #3d444d; }
  .block { fill: #3d4650; }
  .returning { fill: #5fb8dc; }
  .move { stroke: #9198a1; }
  .load { stroke: #5fb8dc; }
  .load-word { fill: #5fb8dc; }
}
"""


def draw_text(x, y, kind, text):
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def draw_tier(tier):
    """Draw a tier: its name, its blocks, and what it is like."""
    middle = tier.x + tier.width // 2
    yield (
        f'<rect class="tier" x="{tier.x + 1}" y="{TOP}" width="{tier.width - 2}" '
        f'height="{HEIGHT}" rx="8"/>'
    )
    yield draw_text(middle, TOP + 26, "name middle", tier.name)
    yield draw_text(middle, TOP + 45, "middle", tier.medium)
    left = middle - (tier.columns * PITCH - (PITCH - BLOCK)) // 2
    top = TOP + 102 - tier.rows * PITCH // 2
    for place in range(tier.columns * tier.rows):
        kind = "block returning" if place in tier.returning else "block"
        x = left + place % tier.columns * PITCH
        y = top + place // tier.columns * PITCH
        yield (
            f'<rect class="{kind}" x="{x}" y="{y}" width="{BLOCK}" height="{BLOCK}" '
            'rx="2"/>'
        )
    yield draw_text(middle, TOP + HEIGHT - 16, "middle", tier.fate)


def draw_move(left, right, y, direction, kind, words):
    """Draw an arrow between two tiers, with its verb above and what moves below."""
    start, end = (left, right) if direction > 0 else (right, left)
    yield f'<path class="{kind}" d="M{start} {y}H{end}"/>'
    back = end - 6 * direction
    yield f'<path class="{kind}" d="M{back} {y - 5}L{end} {y}L{back} {y + 5}"/>'
    verb, what = words
    middle = (left + right) // 2
    of_verb = "load-word" if kind == "load" else "word"
    yield draw_text(middle, y - 9, f"{of_verb} middle", verb)
    yield draw_text(middle, y + 18, "middle", what)


def draw():
    """Return the picture, as SVG."""
    lines = [line for tier in TIERS for line in draw_tier(tier)]
    device, host, store = TIERS
    gaps = [
        (device.x + device.width + 8, host.x - 8),
        (host.x + host.width + 8, store.x - 8),
    ]
    save, load = TOP + 52, TOP + 124
    lines += draw_move(*gaps[0], save, 1, "move", ("save", "as steps run"))
    lines += draw_move(*gaps[0], load, -1, "load", ("load", "shared prefix"))
    lines += draw_move(*gaps[1], save, 1, "move", ("write", "what is reused"))
    lines += draw_move(*gaps[1], load, -1, "load", ("read", "shared prefix"))
    lines.append(
        f'<rect class="returning" x="1" y="8" width="{BLOCK}" height="{BLOCK}" rx="2"/>'
    )
    lines.append(draw_text(BLOCK + 8, 19, "load-word", LEGEND))
    height = TOP + HEIGHT + 2
    svg = "http://www.w3.org/2000/svg"
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="{svg}" {size} role="img">',
            "<title>KV blocks move between device, host and store</title>",
            f"<style>{STYLE}</style>",
            *lines,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
