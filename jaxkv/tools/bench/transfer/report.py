"""The results of a transfer measurement as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, BinaryIO

from jaxkv._util import size_text
from jaxkv.tools.bench.transfer.plan import Plan
from jaxkv.tools.bench.transfer.records import (
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
from jaxkv.tools.console import print_facts, print_table
from jaxkv.tools.machine import machine, quartiles
from jaxkv.tools.pictures import (
    COLOURS,
    make_figure,
    name_axes,
    plain_axes,
    save_picture,
)
from jaxkv.transfer.tickets import Direction

_COLOURS = {ENGINE: COLOURS[0], PER_BLOCK: COLOURS[1], NUMPY: COLOURS[4]}
_LIMIT_COLOUR = "#b4b4b4"


def print_plan(config: TransferConfig, plan: Plan) -> None:
    """Print the cases to measure, and those left out."""
    where = machine()
    cache_bytes = where["last_level_cache_bytes"]
    cache = size_text(cache_bytes) if isinstance(cache_bytes, int) else "unknown"
    pool = (
        f"{config.num_layers} layers of bfloat16, {size_text(plan.working_set_bytes)}; "
        "as much host memory for each design"
    )
    facts = [
        ("Device", f"{where['device']}, {where['num_cpus']} CPUs ({where['cpu']})"),
        ("Pool", pool),
        ("Cache", cache),
        *(("Left out", line) for line in plan.left_out),
    ]
    print_facts(facts, 13)


def print_results(record: TransferRecord) -> None:
    """Print the speed of each design, beside the limit."""
    columns = ["best / p50"]
    for direction in DIRECTIONS:
        columns += [f"{direction}, GB/s", f"of {record.limit}"]
    sections = [
        (
            f"{size_text(result.case.num_bytes)} in "
            f"{size_text(result.case.block_bytes)}",
            _rows(record, result),
        )
        for result in record.results
    ]
    print_table(columns, sections, _notes(record))


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
    notes = [units_note(record.config.rounds)]
    if record.step_s is not None:
        note = (
            "hidden by a step: how much of a transfer's time a step of "
            f"{1e3 * record.step_s:.0f} ms hides, p50."
        )
        if record.limit == "np.copyto":
            note += " Here both share the cores, so it says little."
        notes.append(note)
    return notes


def units_note(rounds: int) -> str:
    """Say what the figures of a table are."""
    return (
        "GB are 10^9 bytes. best: the fastest round; p50: the median of "
        f"{rounds} rounds, of ratios too."
    )


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
    """Draw GB/s of each size of a transfer: a panel per direction and block size.

    Bars are medians; a thin line goes from each up to the best round.
    """
    blocks = sorted({result.case.block_bytes for result in record.results})
    sizes = sorted({result.case.num_bytes for result in record.results})
    figure = make_figure(max(7.2, 1.2 + 3 * len(blocks)), 6.4, dpi=110)
    panels = figure.subplots(
        len(DIRECTIONS), len(blocks), sharex=True, sharey=True, squeeze=False
    )
    for row, direction in zip(panels, DIRECTIONS, strict=True):
        for axes, block_bytes in zip(row, blocks, strict=True):
            chosen = [r for r in record.results if r.case.block_bytes == block_bytes]
            _draw_panel(axes, sizes, chosen, direction, record.limit)
            below = "bytes in one transfer" if direction == DIRECTIONS[-1] else ""
            name_axes(axes, f"{direction}, blocks of {size_text(block_bytes)}", below)
        row[0].set_ylabel("GB/s")
    for axes in panels[-1]:
        axes.set_xticks(range(len(sizes)), [size_text(size) for size in sizes])
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    facts = f"bars: median round; thin lines: best round; {record.limit}: the limit"
    save_picture(figure, _headline(record), facts, file)


def _headline(record: TransferRecord) -> str:
    """Say in a few words what it shows."""
    if ENGINE not in record.results[0].designs_s:
        return "How fast blocks move between device and host"
    saved, loaded = (
        max(_speed(each, ENGINE, way).p50_gb_per_s for each in record.results)
        for way in DIRECTIONS
    )
    return (
        f"The engine saves up to {_number(saved)} GB/s and loads up to "
        f"{_number(loaded)} GB/s"
    )


def _draw_panel(
    axes: Any,
    sizes: list[int],
    results: list[CaseResult],
    direction: Direction,
    limit: str,
) -> None:
    """Draw all designs for one block size in one direction."""
    names = [limit, *results[0].designs_s]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, p50, best = [], [], []
        for result in results:
            seconds = {**result.designs_s, limit: result.limit_s}[name][direction]
            reached = speed(result.case.num_bytes, seconds)
            shift = (number - (len(names) - 1) / 2) * width
            places.append(sizes.index(result.case.num_bytes) + shift)
            p50.append(reached.p50_gb_per_s)
            best.append(reached.best_gb_per_s)
        colour = _COLOURS.get(name, _LIMIT_COLOUR)
        axes.bar(places, p50, 0.9 * width, color=colour, label=name)
        axes.vlines(places, p50, best, color=colour, linewidth=1.5)
    plain_axes(axes)
