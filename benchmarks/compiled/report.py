"""The compilers' figures as tables, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.compiled.plan import CompileConfig, Program
from benchmarks.compiled.records import (
    BlockCost,
    Figures,
    Result,
    Row,
    block_costs,
    rows_of,
)
from benchmarks.compiled.run import CompileRecord
from jaxkv._util import size_text
from jaxkv.tools.console import make_console, print_lines, print_table
from jaxkv.tools.machine import versions

MARKERS = ("<!-- benchmarks.compiled -->", "<!-- end of benchmarks.compiled -->")
"""The lines of a Markdown file that the tables go between."""

# Of a core, on average over the whole check.
_SECONDS_A_PROGRAM = 0.7
_COMPILERS = ("libtpu", "jax-cuda12-pjrt")
_NO_PADDING = "1.00, 1.00"
_PAGE_WIDTH = 88


def print_plan(config: CompileConfig, num_programs: int) -> None:
    """Print what is going to be compiled, and how long that takes."""
    blocks = ", ".join(map(str, config.blocks))
    lines = [
        f"Targets      {', '.join(target.device for target in config.targets)}",
        f"Compilers    {_versions_text()}",
        f"Programs     {num_programs}: {' and '.join(config.modes)}, {blocks} blocks",
        f"Duration     about {_duration(num_programs * _SECONDS_A_PROGRAM)} of a core",
    ]
    for i, pool in enumerate((*config.pools, *config.examples)):
        lines.append(f"{'' if i else 'Pools':12} {pool.name}: {pool.text}")
    print_lines(lines)


def print_results(record: CompileRecord) -> None:
    """Print the figures of each program, what a block costs, and what is broken."""
    console = make_console()

    def say(text: str = "", style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    rows = rows_of(record.results)
    for target in record.config.targets:
        chosen = [row for row in rows if row.target == target.name]
        if chosen:
            _print_programs(target.device, chosen)
    say()
    for line in _notes(record):
        say(line, style="dim")
    _print_costs(block_costs(record.results))
    if record.broken:
        say()
        say("Broken bounds", style="bold")
        for line in broken_lines(rows):
            say(line)
    if record.known:
        say()
        say("Known breaks, which fail no run", style="bold")
        for line in known_lines(record.known):
            say(line)
    say()
    say(summary(record))


def summary(record: CompileRecord) -> str:
    """Summarize the run in one line."""
    names = ", ".join(target.name for target in record.config.targets)
    judged = [r for r in record.results if not r.program.is_example]
    broken = len(record.broken)
    outcome = f"{broken} break a bound" if broken else "every bound holds"
    if record.known:
        outcome += f", but for {len(record.known)} known breaks"
    return f"{len(judged)} programs for {names} in {record.seconds:.0f} s: {outcome}"


def broken_lines(rows: Iterable[Row]) -> list[str]:
    """List the broken bounds, a line per program."""
    lines = []
    for row in rows:
        broken = [result for result in row.results if result.fails]
        if broken:
            blocks = ", ".join(str(result.program.num_blocks) for result in broken)
            worst = max(broken, key=lambda result: len(result.broken))
            lines.append(
                f"{row.target}, {row.pool}, {_name(row)} of {blocks} blocks: "
                f"{'; '.join(worst.broken)}"
            )
    return lines


def known_lines(results: Iterable[Result]) -> list[str]:
    """List the known breaks and their reasons, a line per pool."""
    counts: dict[tuple[str, str], int] = {}
    for result in results:
        key = result.program.pool.name, str(result.known)
        counts[key] = counts.get(key, 0) + 1
    return [
        f"{pool}, {count} programs: {reason}"
        for (pool, reason), count in counts.items()
    ]


def _duration(seconds: float) -> str:
    """Format a duration roughly.

    >>> _duration(42), _duration(610)
    ('42 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _print_programs(title: str, rows: Sequence[Row]) -> None:
    names = "bytes", "temp", "kernels", "alias", "host", "coll.", "leaf", "s"

    def row(program: Row) -> list[str]:
        mark = "!" if program.is_broken else " "
        return [f"{mark} {_name(program)}", *_cells(program)]

    print_table(
        (title, *names),
        (
            (pool, map(row, group))
            for pool, group in itertools.groupby(rows, lambda program: program.pool)
        ),
        style_of=lambda label: "red" if label.startswith("!") else None,
    )


def _cells(row: Row) -> list[str]:
    """Make the cells of a program: the worst over all numbers of blocks."""
    if not row.figures:
        return ["did not compile"]

    def worst(value: Callable[[Figures], float]) -> float:
        return max(value(figures) for figures in row.figures)

    has_loops = any(figures.loops for figures in row.figures)
    takes_pool = row.kind in ("load", "copy")
    alias = min(figures.alias_ratio for figures in row.figures)
    collectives = worst(lambda figures: len(figures.collectives))
    whole_leaf = worst(lambda figures: len(figures.whole_leaf))
    return [
        _ratio(row.bytes_ratio) + ("+" if has_loops and row.bytes_ratio else ""),
        _ratio(worst(lambda figures: figures.temp_ratio)),
        f"{worst(lambda figures: figures.kernels):.0f}",
        _ratio(alias) if takes_pool else "-",
        _ratio(worst(lambda figures: figures.host_ratio))
        if row.mode == "fused" and row.kind != "copy"
        else "-",
        f"{collectives:.0f}" if collectives else "-",
        f"{whole_leaf:.0f}" if whole_leaf else "-",
        f"{worst(lambda figures: figures.compile_s):.1f}",
    ]


def _print_costs(costs: Sequence[BlockCost]) -> None:
    names = "bytes", "device", "host", "blocks", "save", "load"

    def row(cost: BlockCost) -> tuple[str, ...]:
        return (
            f"  {cost.pool}",
            _size(cost.block_bytes),
            _size(cost.device_bytes),
            "?" if cost.host_bytes is None else _size(cost.host_bytes),
            str(cost.num_blocks),
            _time(cost.save_s),
            _time(cost.load_s),
        )

    print_table(
        ("What a block costs", *names),
        (
            (target, map(row, group))
            for target, group in itertools.groupby(costs, lambda cost: cost.target)
        ),
    )


def _notes(record: CompileRecord) -> list[str]:
    blocks = ", ".join(map(str, record.config.blocks))
    return [
        f"Each figure is the worst for {blocks} blocks on one device. !: it breaks a "
        "bound; pools for comparison have none.",
        "bytes: what XLA estimates that a program reads and writes, over twice what it "
        "moves, for 8 blocks or more. +: it has loops, whose body XLA counts once, so "
        "temp and leaf say more. A Pallas kernel counts as what it declares to move. "
        "XLA estimates nothing for GPUs.",
        "temp: memory that it takes besides, over what it moves; alias: what a load "
        "writes in place, over the pool; host: bytes between host and device, over "
        "what it moves; leaf: operations on a whole leaf that are not in place; s: CPU "
        "time to compile.",
        "save and load: XLA's estimate of the device's time for the blocks, in the "
        f"mode {record.config.modes[-1]}; host and device: with padding.",
    ]


def to_json(record: CompileRecord) -> dict[str, Any]:
    """Convert a record for ``json.dump``."""
    config = record.config
    return {
        "versions": versions(*_COMPILERS),
        "seconds": record.seconds,
        "targets": [dataclasses.asdict(target) for target in config.targets],
        "pools": [dataclasses.asdict(p) for p in (*config.pools, *config.examples)],
        "blocks": list(config.blocks),
        "modes": list(config.modes),
        "results": [
            {
                **_program_json(result.program),
                "error": result.error,
                "broken": list(result.broken),
                "known_break": result.known,
                **(_figures_json(result.figures) if result.figures else {}),
            }
            for result in record.results
        ],
        "block_costs": [
            dataclasses.asdict(cost) for cost in block_costs(record.results)
        ],
    }


def _program_json(program: Program) -> dict[str, Any]:
    return {
        "target": program.target.name,
        "pool": program.pool.name,
        "mode": program.mode,
        "program": program.kind,
        "num_blocks": program.num_blocks,
        "bounds_apply": not program.is_example,
    }


def _figures_json(figures: Figures) -> dict[str, Any]:
    return {
        **dataclasses.asdict(figures),
        "bytes_ratio": figures.bytes_ratio,
        "temp_ratio": figures.temp_ratio,
        "alias_ratio": figures.alias_ratio,
        "host_ratio": figures.host_ratio,
    }


def to_markdown(record: CompileRecord) -> str:
    """Convert to Markdown what matters to who chooses a chip or a layout."""
    names = [target.name for target in record.config.targets]
    costs = {(c.target, c.pool): c for c in block_costs(record.results)}
    pools = list(dict.fromkeys(pool for _, pool in costs))
    by_program: dict[tuple[str, str, str], Row] = {
        (row.target, row.pool, row.kind): row
        for row in rows_of(record.results)
        if row.mode == record.config.modes[-1]
    }
    blocks = next(iter(costs.values())).num_blocks if costs else 0
    head = f"{' | '.join(names)} |"
    dashes = "---|" * len(names)
    lines = [
        *_wrapped(
            f"Saves and loads of {blocks} blocks in the mode "
            f"`{record.config.modes[-1]}`: the bytes that a program reads and writes "
            "over the least there can be, its kernels (k), and XLA's estimate of its "
            "time on the device. Where two are given, a save and a load differ."
        ),
        "",
        f"| pool | a block | {head}",
        f"|---|---|{dashes}",
    ]
    for pool in pools:
        size = next(
            _size(c.block_bytes) for (_, name), c in costs.items() if name == pool
        )
        cells = []
        for target in names:
            both = [by_program.get((target, pool, kind)) for kind in ("gather", "load")]
            # Once, if they are alike.
            texts = dict.fromkeys(_move_cell(move, blocks) for move in both)
            cells.append("; ".join(texts))
        lines.append(f"| {pool} | {size} | {' | '.join(cells)} |")
    padded = [
        f"| {pool} | {' | '.join(cells)} |"
        for pool in pools
        for cells in [[_padding_cell(costs.get((target, pool))) for target in names]]
        if any(cell not in ("-", _NO_PADDING) for cell in cells)
    ]
    if padded:
        lines += [
            "",
            *_wrapped(
                "Where padding takes memory: how many times its bytes a block takes on "
                "the device, and on the host. Blocks of the other pools take what they "
                "have."
            ),
            "",
            f"| pool | {head}",
            f"|---|{dashes}",
            *padded,
        ]
    judged = [r for r in record.results if not r.program.is_example]
    moves = [r.program for r in judged if r.program.kind != "copy"]
    numbers = sorted({program.num_blocks for program in moves})
    broken = len(record.broken)
    outcome = f"{broken} of them break a bound" if broken else "they keep every bound"
    if record.known:
        outcome += f", but for {len(record.known)} that are known to break one"
    lines += [
        "",
        *_wrapped(
            f"{len(judged)} programs were compiled, for {', '.join(map(str, numbers))} "
            f"blocks, and {outcome}; {_versions_text()}."
        ),
    ]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _PAGE_WIDTH)


def check_markers(path: pathlib.Path) -> None:
    """Refuse a file that has one of `MARKERS` only, or the second before the first."""
    start, end = MARKERS
    text = path.read_text(encoding="utf-8")
    if (start in text or end in text) and end not in text.partition(f"{start}\n")[2]:
        raise ValueError(f"{str(path)!r} must have {start!r}, and {end!r} after it")


def write_markdown(path: pathlib.Path, text: str) -> None:
    """Write Markdown to a file: between `MARKERS` if it has them, else all of it."""
    start, end = MARKERS
    old = path.read_text(encoding="utf-8")
    if start in old:
        head, _, rest = old.partition(f"{start}\n")
        tail = rest.partition(end)[2]
        text = f"{head}{start}\n\n{text}\n{end}{tail}"
    path.write_text(text, encoding="utf-8")


def _move_cell(row: Row | None, blocks: int) -> str:
    if row is None:
        return "-"
    chosen = [r for r in row.results if r.program.num_blocks == blocks]
    figures = chosen[0].figures if chosen else None
    if figures is None:
        return "does not compile" if chosen else "-"
    texts = []
    if figures.bytes_ratio is not None:
        texts.append(f"{_ratio(figures.bytes_ratio)}x")
    texts.append(f"{figures.kernels} k")
    if figures.estimated_s is not None:
        texts.append(_time(figures.estimated_s))
    return ", ".join(texts)


def _padding_cell(cost: BlockCost | None) -> str:
    if cost is None:
        return "-"
    device = f"{cost.device_bytes / cost.block_bytes:.2f}"
    if cost.host_bytes is None:
        return device
    return f"{device}, {cost.host_bytes / cost.block_bytes:.2f}"


def _name(row: Row) -> str:
    return "copy" if row.kind == "copy" else f"{row.mode} {row.kind}"


def _ratio(value: float | None) -> str:
    """Format a ratio with about three digits.

    >>> _ratio(1.0049), _ratio(582.01), _ratio(None)
    ('1.00', '582', '-')
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.{1 if value < 99.5 else 0}f}"


def _time(seconds: float | None) -> str:
    """Format an estimated time.

    >>> _time(0.000182), _time(0.0119), _time(None)
    ('182 us', '11.9 ms', '?')
    """
    if seconds is None:
        return "?"
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def _size(num_bytes: float) -> str:
    """Format bytes.

    >>> _size(65536), _size(20480), _size(1.5)
    ('64 KiB', '20 KiB', '2 B')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    exact = size_text(round(num_bytes))
    if len(exact) <= 8:
        return exact
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return exact


def _versions_text() -> str:
    installed = versions(*_COMPILERS)
    names = [name for name in ("jax", *_COMPILERS) if name in installed]
    return ", ".join(f"{name} {installed[name]}" for name in names)
