"""The results of a transfer measurement as a table, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from jaxkv._util import size_text
from jaxkv.tools.bench.transfer.plan import Plan
from jaxkv.tools.bench.transfer.records import (
    DIRECTIONS,
    ENGINE,
    CaseResult,
    Ratio,
    Speed,
    TransferConfig,
    TransferRecord,
    ratio,
    speed,
)
from jaxkv.tools.console import print_facts, print_table
from jaxkv.tools.machine import machine
from jaxkv.tools.pictures import (
    LIMIT,
    Chart,
    Line,
    Places,
    Scale,
    draw_picture,
    look_of,
)
from jaxkv.transfer.tickets import Direction

Row: TypeAlias = list[str]


def print_plan(config: TransferConfig, plan: Plan) -> None:
    where = machine()
    cache_bytes = where["last_level_cache_bytes"]
    cache = size_text(cache_bytes) if isinstance(cache_bytes, int) else "unknown"
    pool = (
        f"{config.num_layers} layers of bfloat16, {size_text(plan.working_set_bytes)}; "
        "as much host memory per design"
    )
    facts = [
        ("Device", f"{where['device']}, {where['num_cpus']} CPUs ({where['cpu']})"),
        ("Pool", pool),
        ("Cache", cache),
        *(("Left out", line) for line in plan.left_out),
    ]
    print_facts(facts, 13)


def print_results(
    record: TransferRecord,
    more_rows: Callable[[CaseResult], Iterable[Row]] = lambda result: (),
) -> None:
    """Print the speed of each design next to the limit."""

    def rows(result: CaseResult) -> list[Row]:
        num_bytes, limit_s = result.case.num_bytes, result.limit_s

        def design_row(name: str) -> Row:
            seconds = result.designs_s[name]
            return make_row(
                name,
                lambda d: speed_text(speed(num_bytes, seconds[d])),
                lambda d: ratio_text(ratio(seconds[d], limit_s[d])),
            )

        limit = make_row(
            record.limit, lambda d: speed_text(speed(num_bytes, limit_s[d]))
        )
        return [limit, *map(design_row, result.designs_s), *more_rows(result)]

    columns = ["best / p50"]
    for direction in DIRECTIONS:
        columns += [f"{direction}, GB/s", f"of {record.limit}"]
    sections = [(_name_of(result), rows(result)) for result in record.results]
    print_table(columns, sections, [units_note(record.config.rounds)])


def make_row(
    label: str,
    value: Callable[[Direction], str],
    share: Callable[[Direction], str] = lambda direction: "",
) -> Row:
    """Make a row of the table: a value and its share of the limit, both ways."""
    cells = ((value(d), share(d)) for d in DIRECTIONS)
    return [f"  {label}", *itertools.chain.from_iterable(cells)]


def _name_of(result: CaseResult) -> str:
    case = result.case
    return f"{size_text(case.num_bytes)} in {size_text(case.block_bytes)}"


def units_note(rounds: int) -> str:
    return (
        "GB are 10^9 bytes. best: the fastest round; p50: the median of "
        f"{rounds} rounds, of ratios too."
    )


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
    return {
        "machine": machine(),
        "config": dataclasses.asdict(record.config),
        "limit": record.limit,
        "mode": record.mode,
        "working_set_bytes": record.working_set_bytes,
        "step_s": None,
        "left_out": list(record.left_out),
        "results": [_result_json(result) for result in record.results],
    }


def _result_json(result: CaseResult) -> dict[str, Any]:
    num_bytes, limit_s = result.case.num_bytes, result.limit_s

    def design(seconds: Any) -> dict[str, Any]:
        return {
            d: {
                **dataclasses.asdict(speed(num_bytes, seconds[d])),
                "of_limit": dataclasses.asdict(ratio(seconds[d], limit_s[d])),
            }
            for d in DIRECTIONS
        }

    # Rivals are measured by `benchmarks/transfer.py` alone.
    return {
        "size_bytes": num_bytes,
        "block_bytes": result.case.block_bytes,
        "num_blocks": result.case.num_blocks,
        "limit": {
            d: dataclasses.asdict(speed(num_bytes, limit_s[d])) for d in DIRECTIONS
        },
        "designs": {
            name: design(design_s) for name, design_s in result.designs_s.items()
        },
        "engine_over": {},
        "overlap": None,
    }


def draw_results(record: TransferRecord) -> str:
    """Draw GB/s against the size of a transfer, for each direction and block size."""
    blocks = sorted({result.case.block_bytes for result in record.results})
    grid = [[_chart_of(record, d, size) for size in blocks] for d in DIRECTIONS]
    return draw_picture(
        _headline(record),
        f"lines: median round; dots: best round; {record.limit}: the limit",
        grid,
        "bytes in one transfer",
        panel=(440, 330),
        has_one_scale=True,
    )


def _chart_of(record: TransferRecord, direction: Direction, block_bytes: int) -> Chart:
    """Show the speed of the limit, and of the designs, with blocks of a size."""
    results = [r for r in record.results if r.case.block_bytes == block_bytes]
    sizes = [result.case.num_bytes for result in results]
    looks = {record.limit: LIMIT}
    looks |= {name: look_of(n) for n, name in enumerate(results[0].designs_s)}
    lines = []
    for name, look in looks.items():
        seconds = [{**r.designs_s, record.limit: r.limit_s}[name] for r in results]
        speeds = [
            speed(num_bytes, by_way[direction])
            for num_bytes, by_way in zip(sizes, seconds, strict=True)
        ]
        medians = [reached.p50_gb_per_s for reached in speeds]
        bests = [[reached.best_gb_per_s] for reached in speeds]
        lines.append(Line(name, medians, look, dots=bests))
    places = Places("Transfer", sizes, list(map(size_text, sizes)), is_even=True)
    what = f"{direction}, GB/s, blocks of {size_text(block_bytes)}"
    scale = Scale("{:g}".format, _number, _number)
    return Chart(direction, what, what, what, places, lines, scale)


def _headline(record: TransferRecord) -> str:
    if ENGINE not in record.results[0].designs_s:
        return "How fast blocks move between device and host"
    saved, loaded = (
        max(
            speed(
                result.case.num_bytes, result.designs_s[ENGINE][direction]
            ).p50_gb_per_s
            for result in record.results
        )
        for direction in DIRECTIONS
    )
    return (
        f"The engine saves up to {_number(saved)} GB/s and loads up to "
        f"{_number(loaded)} GB/s"
    )
