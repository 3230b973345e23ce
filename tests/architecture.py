"""Draws the rooms of `jaxkv/`, one floor on another: the picture of the architecture.

    python -m tests.architecture

writes docs/internals/architecture.svg. `tests/test_docs.py` compares it with the tree.
"""

import html
from pathlib import Path

from tests.test_layering import FLOORS

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "internals" / "architecture.svg"

ABOUT = {
    "tools": "the command line and its programs",
    "integrations": "adapters for vLLM, sglang-jax, MaxText",
    "jaxkv": "the public names",
    "config": "every setting; makes the parts",
    "observe": "KV events, Prometheus metrics",
    "strict": "parts that check an engine in its tests",
    "scheduling": "which blocks move in a step, and for which request",
    "search": "the longest prefix that the tiers hold",
    "tiers": "which block is where: on the device, the host, below",
    "policies": "which host block to evict",
    "transfer": "bytes between device, host and store",
    "keys": "block keys, hashed and packed",
    "types": "shared types",
    "_util": "sizes, settings, state",
    "compiling": "Numba, and its code on disk",
}
FILES = {"jaxkv": "__init__.py", "config": "config.py", "types": "types.py"}

MARGIN, WIDTH, HEIGHT, GAP = 62, 636, 44, 10
FOLDERS_HEIGHT = 14
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.paper { fill: #ffffff; }
.room { fill: #f3f6f9; stroke: #b6c0ca; }
.name { font-weight: 600; }
.folders { font: 9px ui-monospace, monospace; fill: #59636e; }
.lookup { stroke: #0b6285; fill: none; stroke-width: 2; }
.bytes { stroke: #b3401f; fill: none; stroke-width: 2; }
text.lookup { fill: #0b6285; stroke: none; text-anchor: middle; }
text.bytes { fill: #b3401f; stroke: none; text-anchor: middle; }
@media (prefers-color-scheme: dark) {
  text { fill: #e9ecef; }
  .paper { fill: #14181c; }
  .room { fill: #20262c; stroke: #4b555f; }
  .folders { fill: #a3adb7; }
  .lookup { stroke: #5fb8dc; }
  .bytes { stroke: #f0906c; }
  text.lookup { fill: #5fb8dc; }
  text.bytes { fill: #f0906c; }
}
"""


def folders_of(room):
    inits = (ROOT / "jaxkv" / room).glob("*/__init__.py")
    return sorted(f"{path.parent.name}/" for path in inits)


def draw_room(room, x, y, width, height):
    name, size = FILES.get(room, f"{room}/"), f'width="{width}" height="{height}"'
    lines = [
        f'<rect class="room" x="{x}" y="{y}" {size} rx="5"/>',
        f'<text class="name" x="{x + 10}" y="{y + 18}">{name}</text>',
        f'<text x="{x + 10}" y="{y + 35}">{html.escape(ABOUT[room])}</text>',
    ]
    if folders := folders_of(room):
        at, text = f'x="{x + 10}" y="{y + 50}"', " ".join(folders)
        assert 5.6 * len(text) < width - 20, f"{room}: its folders leave their box"
        lines.append(f'<text class="folders" {at}>{text}</text>')
    return lines


def draw_path(kind, text, x, start, stops, side):
    """Draw a path along a margin, from one room into rooms below it."""
    edge = MARGIN if side < 0 else MARGIN + WIDTH
    lines = [f'<path class="{kind}" d="M{edge} {start}H{x}V{stops[-1]}"/>']
    for y in stops:
        tip = edge + 7 * side
        lines.append(f'<path class="{kind}" d="M{x} {y}H{edge}M{tip} {y - 4}')
        lines[-1] += f'L{edge} {y}L{tip} {y + 4}"/>'
    at = x + (-8 if side < 0 else 16), (start + stops[-1]) // 2
    turn = f'transform="rotate(-90 {at[0]} {at[1]})"'
    lines.append(f'<text class="{kind}" x="{at[0]}" y="{at[1]}" {turn}>{text}</text>')
    return lines


def draw():
    top, lines, middle = 10, [], {}
    for floor in reversed(FLOORS):
        width = (WIDTH - GAP * (len(floor) - 1)) // len(floor)
        height = HEIGHT + FOLDERS_HEIGHT * any(map(folders_of, floor))
        for number, room in enumerate(floor):
            x = MARGIN + number * (width + GAP)
            lines += draw_room(room, x, top, width, height)
            middle[room] = top + height // 2
        top += height + GAP
    stops = [middle[room] for room in ("search", "tiers", "policies")]
    start = middle["scheduling"]
    lines += draw_path("lookup", "a lookup", MARGIN - 24, start, stops, -1)
    to = [middle["transfer"]]
    right = MARGIN + WIDTH + 24
    lines += draw_path("bytes", "a step's moves", right, start, to, 1)
    width = 2 * MARGIN + WIDTH
    size = f'width="{width}" height="{top}"'
    svg = "http://www.w3.org/2000/svg"
    lines = [
        f'<svg xmlns="{svg}" viewBox="0 0 {width} {top}" {size} role="img">',
        "<title>The rooms of jaxkv, one floor on another</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" {size}/>',
        *lines,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
