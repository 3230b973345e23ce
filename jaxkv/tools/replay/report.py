"""The results of a replay as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxkv import __version__
from jaxkv.tools.console import make_console
from jaxkv.tools.replay.run import OPTIMUM, ReplayResult
from jaxkv.tools.replay.traces import Trace

_CEILING = f"{OPTIMUM} (ceiling)"
_COLOURS = ("#1b6f8a", "#c8553d", "#6a8d3a", "#8a5a9e", "#c9952b", "#3f4f9e", "#a3476b")
_GREY = "#555555"


def print_trace(trace: Trace) -> None:
    """Print a summary of the trace."""
    span_s = (trace.time_ms[-1] - trace.time_ms[0]) / 1000
    lines = [
        f"Trace         {trace.name}",
        f"Requests      {trace.num_requests:,} in {span_s:,.0f} s",
        f"Blocks        {trace.num_block_refs:,} asked for, "
        f"{trace.num_unique_blocks:,} different",
    ]
    if trace.input_tokens is not None:
        size = f" in blocks of {trace.block_size}" if trace.block_size else ""
        lines.append(f"Input tokens  {trace.input_tokens.sum():,}{size}")
    make_console().print("\n".join(lines), highlight=False, soft_wrap=True)


def print_results(trace: Trace, results: Sequence[ReplayResult]) -> None:
    """Print how much each policy found at each capacity.

    Args:
        trace: The replayed trace.
        results: The results; every policy at the same capacities.
    """
    from rich.table import Table

    capacities, by_policy = _group(results)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("Capacity, blocks", style="bold")
    for capacity in capacities:
        table.add_column(f"{capacity:,}", justify="right")
    shares = [_share(capacity, trace) for capacity in capacities]
    table.add_row("  of the different blocks", *shares)

    def add_section(
        title: str, cell: Callable[[ReplayResult], str], rows: Sequence[str]
    ) -> None:
        table.add_row()
        table.add_row(title)
        for name in rows:
            cells = [cell(by_policy[name][c]) for c in capacities]
            style = "dim" if name == OPTIMUM else None
            table.add_row(f"  {_label(name)}", *cells, style=style)

    names = list(by_policy)
    asked = results[0].num_block_refs
    add_section(
        f"Prefix blocks found, of {asked:,}",
        lambda result: _percent(result.block_hit_ratio),
        names,
    )
    if results[0].token_hit_ratio is not None:
        add_section(
            f"Prefix tokens found, of {results[0].input_tokens:,}",
            lambda result: _percent(result.token_hit_ratio),
            names,
        )
    refusing = [n for n in names if any(r.num_refused for r in by_policy[n].values())]
    if refusing:
        add_section(
            f"Stores refused, of {trace.num_requests:,} requests",
            lambda result: f"{result.num_refused:,}",
            refusing,
        )
    console = make_console()
    console.print()
    console.print(table)


def to_json(trace: Trace, results: Sequence[ReplayResult]) -> dict[str, Any]:
    """Convert results for ``json.dump``.

    Args:
        trace: The replayed trace.
        results: The results.
    """
    return {
        "trace": {
            "name": trace.name,
            "num_requests": trace.num_requests,
            "num_block_refs": trace.num_block_refs,
            "num_unique_blocks": trace.num_unique_blocks,
            "block_size": trace.block_size,
        },
        "results": [
            _figures_of(result)
            | {
                "block_hit_ratio": result.block_hit_ratio,
                "token_hit_ratio": result.token_hit_ratio,
            }
            for result in results
        ],
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            "jaxkv": __version__,
            "jax": jax.__version__,
        },
    }


def plot_results(
    trace: Trace, results: Sequence[ReplayResult], path: str | pathlib.Path
) -> None:
    """Draw the hit ratio against the capacity, a line for each policy.

    Args:
        trace: The replayed trace.
        results: The results; every policy at the same capacities.
        path: The PNG file to write.
    """
    # Slow to import, and used only here. A bare Figure needs no display.
    from matplotlib.figure import Figure

    capacities, by_policy = _group(results)
    figure = Figure(figsize=(7.2, 4.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    ends = []
    colours = iter(_COLOURS * len(by_policy))
    for name, of_capacity in by_policy.items():
        percents = [100 * of_capacity[c].block_hit_ratio for c in capacities]
        if name == OPTIMUM:
            colour = _GREY
            axes.plot(capacities, percents, "o--", color=colour, linewidth=1.4, ms=3)
            axes.fill_between(
                capacities, percents, 100, color="#f1f1f1", linewidth=0, zorder=0
            )
        else:
            colour = next(colours)
            axes.plot(
                capacities, percents, color=colour, linewidth=2, marker="o", ms=4.5
            )
        ends.append((percents[-1], _label(name), colour))
    highest = max(100 * r.block_hit_ratio for r in results)
    axes.set_ylim(0, min(100.0, 1.12 * highest) or 1)
    axes.set_xscale("log")
    axes.set_xlim(capacities[0] / 1.06, capacities[-1] * 1.06)
    _label_capacities(axes, capacities, trace)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    axes.set_xlabel("capacity: blocks, and share of the different blocks")
    axes.set_ylabel("prefix blocks found")
    _label_ends(axes, ends)
    axes.set_title(
        "How much of each prefix is found",
        loc="left",
        pad=24,
        fontsize=13,
        fontweight="bold",
    )
    axes.annotate(
        f"{trace.name}: {trace.num_requests:,} requests for "
        f"{trace.num_block_refs:,} blocks",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 9),
        textcoords="offset points",
        fontsize=9,
        color=_GREY,
    )
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)
    figure.savefig(path)


def _label_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name and last value at its end, without overlaps."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.062
    # Labels that would overlap are stacked, centred on the mean end of their lines.
    piles: list[list[tuple[float, str, str]]] = []
    for end in sorted(ends):
        pile = [end]
        while piles and _bottom(pile, gap) < _bottom(piles[-1], gap) + gap * len(
            piles[-1]
        ):
            pile = piles.pop() + pile
        piles.append(pile)
    for pile in piles:
        for place, (percent, label, colour) in enumerate(pile):
            axes.annotate(
                f"{label}  {percent:.1f}%",
                (1, _bottom(pile, gap) + place * gap),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                fontsize=9,
                fontweight="normal" if colour == _GREY else "bold",
                annotation_clip=False,
            )


def _bottom(pile: list[tuple[float, str, str]], gap: float) -> float:
    """Compute the height of the lowest label of a stack."""
    return sum(end[0] for end in pile) / len(pile) - gap * (len(pile) - 1) / 2


def _label_capacities(axes: Any, capacities: list[int], trace: Trace) -> None:
    """Write capacities under the axis where there is room."""
    room = math.log(capacities[-1] / capacities[0]) / 9
    shown: list[int] = []
    for capacity in capacities:
        if not shown or math.log(capacity / shown[-1]) >= room:
            shown.append(capacity)
    axes.set_xticks(shown, [f"{c:,}\n{_share(c, trace)}" for c in shown])
    axes.set_xticks([], minor=True)


def _group(
    results: Sequence[ReplayResult],
) -> tuple[list[int], dict[str, dict[int, ReplayResult]]]:
    """Return the capacities, and the results by policy and capacity."""
    by_policy: dict[str, dict[int, ReplayResult]] = {}
    for result in results:
        by_policy.setdefault(result.policy, {})[result.capacity_blocks] = result
    return sorted({result.capacity_blocks for result in results}), by_policy


def _figures_of(result: ReplayResult) -> dict[str, Any]:
    """Return the fields of a result, but for the arrays."""
    return {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(result)
        if field.name != "hits_by_request"
    }


def _label(policy: str) -> str:
    return _CEILING if policy == OPTIMUM else policy


def _share(capacity_blocks: int, trace: Trace) -> str:
    """Format a capacity as a share of the trace's different blocks."""
    percent = 100 * capacity_blocks / trace.num_unique_blocks
    return f"{round(percent, 1 if percent >= 0.1 else 4):g}%"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.2f}%"
