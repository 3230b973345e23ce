"""What all pictures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GREY = "#555555"


def make_figure(width: float, height: float, dpi: int = 150) -> Any:
    """Make an empty figure, of a size in inches."""
    # Slow to import, and used only here. A bare Figure needs no display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def plain_axes(axes: Any) -> None:
    """Leave axes no lines but those that help to read values."""
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


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
