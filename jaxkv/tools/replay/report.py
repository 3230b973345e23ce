"""The results of a replay as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from jaxkv.tools.console import make_console, make_table, print_lines
from jaxkv.tools.machine import versions
from jaxkv.tools.pictures import GREY, make_figure, plain_axes, spread, with_minus
from jaxkv.tools.replay.admission import Admission
from jaxkv.tools.replay.measures import (
    BASELINE,
    Cell,
    Comparison,
    Measure,
    format_flops,
    format_percent,
    format_share,
)
from jaxkv.tools.replay.run import OPTIMUM, ReplayResult
from jaxkv.tools.replay.traces import Recording, Trace

_COLOURS = ("#0b6285", "#b3401f", "#4a6b14", "#7a3f94", "#855600", "#33418f", "#a0245f")
_MARKERS = "os^Dv*P|"
_DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (7, 2, 2, 2)))


def print_trace(trace: Trace) -> None:
    """Print a summary of the trace."""
    width = max(len(name) for name, _ in facts_of(trace)) + 2
    print_lines(f"{name:{width}}{value}" for name, value in facts_of(trace))


def facts_of(trace: Trace) -> list[tuple[str, str]]:
    """List what a trace is, each with a name."""
    span_s = (trace.time_ms[-1] - trace.time_ms[0]) / 1000
    facts = [
        ("Trace", trace.name),
        ("Requests", f"{trace.num_requests:,} in {span_s:,.0f} s"),
        (
            "Blocks",
            f"{trace.num_block_refs:,} asked for, {trace.num_unique_blocks:,} "
            "different",
        ),
    ]
    if trace.input_tokens is not None:
        size = f" in blocks of {trace.block_size}" if trace.block_size else ""
        facts.append(("Input tokens", f"{trace.input_tokens.sum():,}{size}"))
    if trace.recording is not None:
        facts += _facts_of_run(trace, trace.recording)
    return facts


def _facts_of_run(trace: Trace, run: Recording) -> Iterator[tuple[str, str]]:
    """Say what the run that was recorded found, and what the trace lacks of it."""
    num_tokens = 0 if trace.input_tokens is None else int(trace.input_tokens.sum())
    found = [
        f"{num:,} tokens on the {tier} ({format_percent(num / (num_tokens or 1))})"
        for tier, num, tokens in (
            ("device", run.num_device_hit_tokens, run.device_tokens),
            ("host", run.num_host_hit_tokens, run.host_tokens),
        )
        if (tokens >= 0).any()
    ]
    ran = [] if run.policy is None else [run.policy]
    for tier, num in (("host", run.host_blocks), ("device", run.device_blocks)):
        if num is not None:
            ran.append(f"{num:,} {tier} blocks")
    if found:
        yield "Found then", "; ".join(filter(None, [", ".join(found), ", ".join(ran)]))
    if run.num_lost:
        yield "Not there", f"{run.num_lost:,} requests, which could not be recorded"
    for note in run.notes:
        yield "Note", note


def parts_of(comparison: Comparison) -> list[tuple[str, str]]:
    """List what a comparison has of a model, a device and an admission, with names."""
    parts = []
    if comparison.admission is not None:
        parts.append(("Admission", comparison.admission.text))
    if comparison.model is not None:
        model = comparison.model
        notes = "".join(f"; {note}" for note in model.notes)
        text = f"{model.name}, {model.num_parameters / 1e9:,.1f} billion parameters"
        if comparison.prefill_flops is not None:
            text += f"; {format_flops(comparison.prefill_flops)} to prefill all prompts"
        parts.append(("Model", text + notes))
    device = comparison.results[0].device
    if device is not None:
        shares = [
            f"{format_percent(measure.device)} of {what}"
            for measure in comparison.measures
            if measure.device is not None
            for what in [_DEVICE_SHARES[measure.key]]
        ]
        text = f"{device.num_blocks:,} blocks, LRU; alone {', '.join(shares)}"
        num_cut = device.num_cut(comparison.trace)
        if num_cut:
            text += f"; {num_cut:,} requests do not fit, and are cut to its size"
        parts.append(("Device", text))
    return parts


_DEVICE_SHARES = {
    "blocks_both": "the blocks",
    "tokens_both": "the tokens",
    "flops_both": "prefill",
}


def print_results(comparison: Comparison) -> None:
    """Print how much each policy found at each capacity."""
    trace, capacities = comparison.trace, comparison.capacities
    table = make_table()
    table.add_column("Capacity, blocks", style="bold")
    for capacity in capacities:
        table.add_column(f"{capacity:,}", justify="right")
    shares = [format_share(capacity, trace) for capacity in capacities]
    table.add_row("  of the different blocks", *shares)

    def add_section(
        title: str, cell: Callable[[Cell], str], rows: Sequence[str]
    ) -> None:
        table.add_row()
        table.add_row(title)
        for name in rows:
            cells = [cell(Cell(name, capacity)) for capacity in capacities]
            style = "dim" if name == OPTIMUM else None
            table.add_row(
                f"  {label_of(name, comparison.admission)}", *cells, style=style
            )

    for measure in comparison.measures:
        ratios = measure.ratios

        def cell(cell: Cell, ratios: Mapping[Cell, float] = ratios) -> str:
            return format_percent(ratios[cell])

        # With a device, the totals, which stand above, would not fit the column.
        is_alone = comparison.device_blocks is None
        title = measure.title if is_alone else measure.what
        add_section(title, cell, comparison.policies)
    by_cell = comparison.by_cell
    refusing = [
        name
        for name in comparison.policies
        if any(by_cell[Cell(name, capacity)].num_refused for capacity in capacities)
    ]
    if refusing:
        add_section(
            f"Stores refused, of {trace.num_requests:,} requests",
            lambda cell: f"{by_cell[cell].num_refused:,}",
            refusing,
        )
    console = make_console()
    parts = parts_of(comparison)
    if parts:
        width = max(len(name) for name, _ in facts_of(trace)) + 2
        print_lines(f"{name:{width}}{value}" for name, value in parts)
    console.print()
    console.print(table)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Convert results for ``json.dump``."""
    trace, model = comparison.trace, comparison.model
    figures: dict[str, Any] = {
        "trace": {
            "name": trace.name,
            "num_requests": trace.num_requests,
            "num_block_refs": trace.num_block_refs,
            "num_unique_blocks": trace.num_unique_blocks,
            "block_size": trace.block_size,
        },
        "results": [_figures_of(comparison, each) for each in comparison.results],
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
        },
        "versions": versions(),
    }
    if trace.recording is not None:
        run = trace.recording
        figures["recording"] = {
            "num_device_hit_tokens": run.num_device_hit_tokens,
            "num_host_hit_tokens": run.num_host_hit_tokens,
            "policy": run.policy,
            "host_blocks": run.host_blocks,
            "device_blocks": run.device_blocks,
            "num_lost": run.num_lost,
            "notes": list(run.notes),
        }
    if model is not None:
        figures["model"] = {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "num_prefill_parameters": model.num_prefill_parameters,
            "prefill_flops": comparison.prefill_flops,
            "notes": list(model.notes),
        }
    if comparison.admission is not None:
        figures["admission"] = dataclasses.asdict(comparison.admission)
    device = comparison.results[0].device
    if device is not None:
        figures["device"] = {
            "num_blocks": device.num_blocks,
            "num_requests_cut": device.num_cut(trace),
            **_amounts(comparison, device.hits, ""),
        }
    return figures


def _figures_of(comparison: Comparison, result: ReplayResult) -> dict[str, Any]:
    """Return the fields of a result, but for the arrays, and what follows from them."""
    figures = {
        field.name: getattr(result, field.name)
        for field in dataclasses.fields(result)
        if field.name not in ("hits_by_request", "stores_by_request", "device")
    } | {
        "block_hit_ratio": result.block_hit_ratio,
        "token_hit_ratio": result.token_hit_ratio,
    }
    saved = comparison.flops_of(result.hits_by_request)
    if saved is not None:
        figures["saved_prefill_flops"] = saved
        figures["saved_prefill_ratio"] = saved / (comparison.prefill_flops or 1.0)
    if result.device is not None:
        figures |= _amounts(comparison, result.device.hits, "device_")
        both = _amounts(comparison, result.hits_by_request, "host_")
        local = _amounts(comparison, result.device.hits, "host_")
        figures |= {name: both[name] - local[name] for name in both}
    return figures


def _amounts(
    comparison: Comparison, hits: NDArray[np.int64], where: str
) -> dict[str, Any]:
    """Return what blocks found (i64[R]) come to."""
    amounts: dict[str, Any] = {f"num_{where}hit_blocks": int(hits.sum())}
    tokens, flops = comparison.tokens_of(hits), comparison.flops_of(hits)
    if tokens is not None:
        amounts[f"{where}hit_tokens"] = int(tokens.sum())
    if flops is not None:
        amounts[f"{where}saved_prefill_flops"] = flops
    return amounts


def plot_results(comparison: Comparison, file: BinaryIO) -> None:
    """Draw what is found against the capacity, a line for each policy.

    Beside it stands by how much each differs from LRU, if that is among them; below,
    the saved prefill if there is a model.
    """
    rows = _drawn(comparison)
    rivals = comparison.rivals
    has_gains = bool(rivals)
    width, height = 12.4 if has_gains else 7.2, 4.6 * len(rows) + 0.5
    figure = make_figure(width, height, dpi=110)
    rules = f"\n{comparison.admission.text}" if comparison.admission else ""
    figure.suptitle(
        f"{comparison.trace.name}: {comparison.trace.num_requests:,} requests for "
        f"{comparison.trace.num_block_refs:,} blocks{rules}",
        x=0.01,
        ha="left",
        fontsize=10,
        color=GREY,
    )
    axes = figure.subplots(len(rows), 1 + has_gains, squeeze=False)
    for row, measure in zip(axes, rows, strict=True):
        lines = {
            name: [100 * measure.ratios[Cell(name, c)] for c in comparison.capacities]
            for name in comparison.policies
        }
        _draw(row[0], comparison, lines, measure.what, "%")
        if not has_gains:
            continue
        gains = {
            name: [a - b for a, b in zip(values, lines[BASELINE], strict=True)]
            for name, values in lines.items()
            if name in rivals
        }
        title = f"Percentage points more than {BASELINE}"
        _draw(row[1], comparison, gains, title, " points")
    figure.savefig(file, format="png")


def _drawn(comparison: Comparison) -> list[Measure]:
    """Choose what a picture shows: tokens, or blocks without; and prefill."""
    kinds = {
        measure.key.removesuffix("_both"): measure for measure in comparison.measures
    }
    chosen = [kinds.get("tokens", kinds["blocks"])]
    return [*chosen, kinds["flops"]] if "flops" in kinds else chosen


def _draw(
    axes: Any,
    comparison: Comparison,
    lines: Mapping[str, Sequence[float]],
    title: str,
    unit: str,
) -> None:
    """Draw lines against the capacity, with their names at their ends."""
    capacities = comparison.capacities
    ends = []
    for name, values in lines.items():
        look: dict[str, Any] = {"color": GREY, "linestyle": (0, (1, 2)), "marker": "_"}
        if name != OPTIMUM:
            look = look_of(comparison.real_policies.index(name))
        axes.plot(capacities, values, linewidth=1.8, markersize=5, **look)
        ends.append((values[-1], label_of(name, comparison.admission), look["color"]))
    flat = [value for values in lines.values() for value in values]
    low, high = min(0.0, *flat), max(0.0, *flat)
    room = 0.08 * (high - low) or 1.0
    axes.set_ylim(low - room * (low < 0), high + room)
    if low < 0 or unit != "%":
        axes.axhline(0, color=GREY, linewidth=1, zorder=1)
    axes.set_xscale("log")
    axes.set_xlim(capacities[0] / 1.06, capacities[-1] * 1.06)
    _label_capacities(axes, capacities, comparison.trace)
    sign = "" if unit == "%" else "+"
    percent = "%" if unit == "%" else ""
    axes.yaxis.set_major_formatter(
        lambda value, _: with_minus(
            f"{value:{sign}g}{percent}" if value else f"0{percent}"
        )
    )
    axes.set_xlabel("capacity: blocks, and share of the different blocks")
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold")
    _label_ends(axes, ends, capacities[-1], f"{sign}.1f", percent)
    plain_axes(axes)


def look_of(number: int) -> dict[str, Any]:
    """Choose a policy's colour, dashes and marker, as ``Axes.plot`` takes them."""
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "linestyle": _DASHES[number // 2 % len(_DASHES)],
        "marker": _MARKERS[number % len(_MARKERS)],
    }


def _label_ends(
    axes: Any,
    ends: list[tuple[float, str, str]],
    last_capacity: int,
    form: str,
    percent: str,
) -> None:
    """Write each line's name and last value beside its end, without overlaps."""
    low, high = axes.get_ylim()
    gap = min(0.062, 1 / len(ends)) * (high - low)
    places = spread([end[0] for end in ends], gap, low + gap / 2, high - gap / 2)
    for (value, label, colour), place in zip(ends, places, strict=True):
        axes.annotate(
            # Not "-0.0".
            with_minus(f"{label}  {round(value, 1) + 0.0:{form}}{percent}"),
            (last_capacity, value),
            xytext=(1.05, place),
            textcoords=axes.get_yaxis_transform(),
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkA": 1,
                "shrinkB": 4,
                "relpos": (0, 0.5),
            },
            va="center",
            color=colour,
            fontsize=9,
            fontweight="normal" if colour == GREY else "bold",
            annotation_clip=False,
        )


def _label_capacities(axes: Any, capacities: list[int], trace: Trace) -> None:
    """Write capacities under the axis where there is room."""
    room = math.log(capacities[-1] / capacities[0]) / 9
    shown: list[int] = []
    for capacity in capacities:
        if not shown or math.log(capacity / shown[-1]) >= room:
            shown.append(capacity)
    axes.set_xticks(shown, [f"{c:,}\n{format_share(c, trace)}" for c in shown])
    axes.set_xticks([], minor=True)


def label_of(policy: str, admission: Admission | None = None) -> str:
    """Name a policy for a reader."""
    if policy != OPTIMUM:
        return policy
    # To leave blocks out can be better than to store all of them.
    return f"{OPTIMUM} ({'ceiling' if admission is None else 'stores all'})"
