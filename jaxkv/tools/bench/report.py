"""The results of a transfer measurement as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, BinaryIO

from jaxkv._util import size_text
from jaxkv.tools.bench.plan import Plan
from jaxkv.tools.bench.records import (
    DIRECTIONS,
    ENGINE,
    NUMPY,
    PER_BLOCK,
    CaseResult,
    Ratio,
    Speed,
    TransferConfig,
    TransferRecord,
    ratio,
    speed,
)
from jaxkv.tools.console import make_console, make_table, print_lines
from jaxkv.tools.machine import machine, quartiles
from jaxkv.tools.pictures import GREY, make_figure, plain_axes
from jaxkv.transfer.tickets import Direction

_COLOURS = {ENGINE: "#1b6f8a", PER_BLOCK: "#c8553d", NUMPY: "#c9952b"}


def print_plan(config: TransferConfig, plan: Plan) -> None:
    """Print the cases to measure, and those left out."""
    where = machine()
    cache_bytes = where["last_level_cache_bytes"]
    lines = [
        f"Device       {where['device']}, {where['num_cpus']} CPUs ({where['cpu']})",
        f"Pool         {config.num_layers} layers of bfloat16, "
        f"{size_text(plan.working_set_bytes)}; as much host memory for each design",
        "Cache        "
        + (f"{size_text(cache_bytes)}" if isinstance(cache_bytes, int) else "unknown"),
        *(f"Left out     {line}" for line in plan.left_out),
    ]
    print_lines(lines)


def print_results(record: TransferRecord) -> None:
    """Print the speed of each design, beside the limit."""
    table = make_table()
    table.add_column("best / p50", style="bold")
    for direction in DIRECTIONS:
        table.add_column(f"{direction}, GB/s", justify="right")
        table.add_column(f"of {record.limit}", justify="right")
    for result in record.results:
        table.add_row()
        size, block = result.case.num_bytes, result.case.block_bytes
        table.add_row(f"{size_text(size)} in {size_text(block)}")
        for row in _rows(record, result):
            table.add_row(*row)
    console = make_console()
    console.print()
    console.print(table)
    console.print()
    for line in _notes(record):
        console.print(line, highlight=False, soft_wrap=True, style="dim")


def _rows(record: TransferRecord, result: CaseResult) -> list[list[str]]:
    """Make the rows of one case: a label, then two cells for each direction."""

    def row(label: str, cells: Callable[[Direction], tuple[str, str]]) -> list[str]:
        return [f"  {label}", *(cell for d in DIRECTIONS for cell in cells(d))]

    def of_design(name: str) -> Callable[[Direction], tuple[str, str]]:
        return lambda d: (
            speed_text(_speed(result, name, d)),
            ratio_text(_over_limit(result, name, d)),
        )

    def of_rival(name: str) -> Callable[[Direction], tuple[str, str]]:
        return lambda d: (ratio_text(_over_rival(result, name, d)), "")

    def limit(direction: Direction) -> tuple[str, str]:
        num_bytes = result.case.num_bytes
        return speed_text(speed(num_bytes, result.limit_s[direction])), ""

    def hidden(direction: Direction) -> tuple[str, str]:
        p50 = result.overlap[direction].hidden[1]
        return f"{100 * min(1.0, max(0.0, p50)):.0f}%", ""

    rows = [row(record.limit, limit)]
    rows += [row(name, of_design(name)) for name in result.designs_s]
    rows += [row(f"{ENGINE} : {name}", of_rival(name)) for name in _rivals(result)]
    if result.overlap:
        rows.append(row("hidden by a step", hidden))
    return rows


def _notes(record: TransferRecord) -> list[str]:
    notes = [
        "GB are 10^9 bytes. best: the fastest round; p50: the median of "
        f"{record.config.rounds} rounds, of ratios too."
    ]
    if record.step_s is not None:
        note = (
            "hidden by a step: how much of a transfer's time a step of "
            f"{1e3 * record.step_s:.0f} ms hides, p50."
        )
        if record.limit == "np.copyto":
            note += " Here both share the cores, so it says little."
        notes.append(note)
    return notes


def _rivals(result: CaseResult) -> list[str]:
    names = list(result.designs_s)
    return [name for name in names if name != ENGINE] if ENGINE in names else []


def _speed(result: CaseResult, name: str, direction: Direction) -> Speed:
    return speed(result.case.num_bytes, result.designs_s[name][direction])


def _over_limit(result: CaseResult, name: str, direction: Direction) -> Ratio:
    return ratio(result.designs_s[name][direction], result.limit_s[direction])


def _over_rival(result: CaseResult, name: str, direction: Direction) -> Ratio:
    designs_s = result.designs_s
    return ratio(designs_s[ENGINE][direction], designs_s[name][direction])


def speed_text(value: Speed) -> str:
    """Format the speed of the best round and of the median."""
    return f"{_number(value.best_gb_per_s)} / {_number(value.p50_gb_per_s)}"


def ratio_text(value: Ratio) -> str:
    """Format the ratio of the best rounds and the median of ratios."""
    return f"{_number(value.best)} / {_number(value.p50)}"


def _number(value: float) -> str:
    """Format a number with about three digits.

    >>> _number(0.0512), _number(7.25), _number(48.25)
    ('0.05', '7.25', '48.2')
    """
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def to_json(record: TransferRecord) -> dict[str, Any]:
    """Convert a record for ``json.dump``."""
    return {
        "machine": machine(),
        "config": dataclasses.asdict(record.config),
        "limit": record.limit,
        "mode": record.mode,
        "working_set_bytes": record.working_set_bytes,
        "step_s": record.step_s,
        "left_out": list(record.left_out),
        "results": [_result_json(result) for result in record.results],
    }


def _result_json(result: CaseResult) -> dict[str, Any]:
    def each(cell: Callable[[Direction], dict[str, Any]]) -> dict[str, Any]:
        return {direction: cell(direction) for direction in DIRECTIONS}

    def of_design(name: str) -> dict[str, Any]:
        return each(
            lambda d: {
                **dataclasses.asdict(_speed(result, name, d)),
                "of_limit": dataclasses.asdict(_over_limit(result, name, d)),
            }
        )

    def of_rival(name: str) -> dict[str, Any]:
        return each(lambda d: dataclasses.asdict(_over_rival(result, name, d)))

    def overlap(direction: Direction) -> dict[str, Any]:
        times = result.overlap[direction]
        return {
            "hidden_fraction": times.hidden,
            "num_steps": times.num_steps,
            "steps_s": quartiles(times.steps_s),
            "transfers_s": quartiles(times.transfers_s),
            "both_s": quartiles(times.both_s),
        }

    num_bytes = result.case.num_bytes
    return {
        "size_bytes": num_bytes,
        "block_bytes": result.case.block_bytes,
        "num_blocks": result.case.num_blocks,
        "limit": each(
            lambda d: dataclasses.asdict(speed(num_bytes, result.limit_s[d]))
        ),
        "designs": {name: of_design(name) for name in result.designs_s},
        "engine_over": {name: of_rival(name) for name in _rivals(result)},
        "overlap": each(overlap) if result.overlap else None,
    }


def plot_results(record: TransferRecord, file: BinaryIO) -> None:
    """Draw GB/s against the size of a transfer: a panel per block size and direction.

    Lines are medians; a band goes from each up to the best round.
    """
    blocks = sorted({result.case.block_bytes for result in record.results})
    figure = make_figure(max(7.2, 1.2 + 2.7 * len(blocks)), 5.6)
    panels = figure.subplots(
        len(DIRECTIONS), len(blocks), sharex=True, sharey=True, squeeze=False
    )
    for axes_row, direction in zip(panels, DIRECTIONS, strict=True):
        for axes, block_bytes in zip(axes_row, blocks, strict=True):
            chosen = [r for r in record.results if r.case.block_bytes == block_bytes]
            _draw_panel(axes, chosen, direction, record.limit)
        axes_row[0].set_ylabel(f"{direction}, GB/s")
    for axes, block_bytes in zip(panels[0], blocks, strict=True):
        axes.set_title(f"blocks of {size_text(block_bytes)}", fontsize=10)
    sizes = sorted({result.case.num_bytes for result in record.results})
    for axes in panels[-1]:
        axes.set_xscale("log")
        axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=45)
        axes.set_xticks([], minor=True)
        axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    panels[0][0].set_ylim(bottom=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
    )
    figure.suptitle(
        "Blocks between device and host: median to best round",
        x=0.02,
        ha="left",
        fontsize=13,
        fontweight="bold",
    )
    figure.savefig(file, format="png")


def _draw_panel(
    axes: Any, results: list[CaseResult], direction: Direction, limit: str
) -> None:
    """Draw all designs for one block size in one direction."""
    lines = [(limit, [r.limit_s[direction] for r in results])]
    for name in results[0].designs_s:
        lines.append((name, [r.designs_s[name][direction] for r in results]))
    sizes = [result.case.num_bytes for result in results]
    for name, seconds in lines:
        pairs = list(zip(sizes, seconds, strict=True))
        p50 = [size / statistics.median(times) / 1e9 for size, times in pairs]
        best = [size / min(times) / 1e9 for size, times in pairs]
        colour = _COLOURS.get(name, GREY)
        style = "o-" if name in _COLOURS else "o--"
        axes.plot(sizes, p50, style, color=colour, linewidth=1.8, ms=4, label=name)
        axes.fill_between(sizes, p50, best, color=colour, alpha=0.15, linewidth=0)
    plain_axes(axes)
