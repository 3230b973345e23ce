"""The compilers' figures as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import pathlib
import textwrap
from collections.abc import Iterable
from typing import Any

from benchmarks.compiled.plan import CompileConfig, Program
from benchmarks.compiled.records import Result
from benchmarks.compiled.run import CompileRecord
from jaxkv._util import size_text
from jaxkv.tools.console import print_lines
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
        f"Programs     {num_programs}, of {blocks} blocks",
        f"Duration     about {_duration(num_programs * _SECONDS_A_PROGRAM)} of a core",
    ]
    for i, pool in enumerate((*config.pools, *config.examples)):
        lines.append(f"{'' if i else 'Pools':12} {pool.name}: {pool.text}")
    print_lines(lines)


def print_results(record: CompileRecord) -> None:
    """Print the tables, the broken bounds and the known breaks."""
    lines = ["", *to_markdown(record).splitlines()]
    if record.broken:
        lines += ["", "Broken bounds", *broken_lines(record.broken)]
    if record.known:
        lines += ["", "Known breaks, which fail no run", *known_lines(record.known)]
    print_lines([*lines, "", summary(record)], is_code=True)


def summary(record: CompileRecord) -> str:
    """Summarize the run in one line."""
    names = ", ".join(target.name for target in record.config.targets)
    judged = [r for r in record.results if not r.program.is_example]
    broken = len(record.broken)
    outcome = f"{broken} break a bound" if broken else "every bound holds"
    if record.known:
        outcome += f", but for {len(record.known)} known breaks"
    return f"{len(judged)} programs for {names} in {record.seconds:.0f} s: {outcome}"


def broken_lines(results: Iterable[Result]) -> list[str]:
    """List the broken bounds, a line for all numbers of blocks of a program."""
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        if result.fails:
            groups.setdefault(_key(result.program), []).append(result)
    lines = []
    for key, broken in groups.items():
        blocks = ", ".join(str(result.program.num_blocks) for result in broken)
        worst = max(broken, key=lambda result: len(result.broken))
        lines.append(f"{', '.join(key)} of {blocks} blocks: {'; '.join(worst.broken)}")
    return lines


def _key(program: Program) -> tuple[str, str, str]:
    return program.target.name, program.pool.name, program.kind


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


def to_json(record: CompileRecord) -> dict[str, Any]:
    config = record.config
    return {
        "versions": versions(*_COMPILERS),
        "seconds": record.seconds,
        "targets": [dataclasses.asdict(target) for target in config.targets],
        "pools": [dataclasses.asdict(p) for p in (*config.pools, *config.examples)],
        "blocks": list(config.blocks),
        "results": [_result_json(result) for result in record.results],
    }


def _result_json(result: Result) -> dict[str, Any]:
    program, figures = result.program, result.figures
    written: dict[str, Any] = {
        "target": program.target.name,
        "pool": program.pool.name,
        "program": program.kind,
        "num_blocks": program.num_blocks,
        "bounds_apply": not program.is_example,
        "error": result.error,
        "broken": list(result.broken),
        "known_break": result.known,
    }
    if figures is not None:
        written |= dataclasses.asdict(figures)
        for name in ("bytes_ratio", "temp_ratio", "alias_ratio"):
            written[name] = getattr(figures, name)
    return written


def to_markdown(record: CompileRecord) -> str:
    """Convert to Markdown what matters to who chooses a chip or a layout."""
    names = [target.name for target in record.config.targets]
    moves = [r for r in record.results if r.program.kind in ("gather", "load")]
    numbers = sorted({move.program.num_blocks for move in moves if move.figures})
    # The smallest number of blocks from 8 on, or else the largest.
    blocks = next((n for n in numbers if n >= 8), numbers[-1] if numbers else 0)
    chosen = {_key(r.program): r for r in moves if r.program.num_blocks == blocks}
    pools = {r.program.pool.name: r.figures for r in chosen.values() if r.figures}

    def both(target: str, pool: str) -> list[Result | None]:
        return [chosen.get((target, pool, kind)) for kind in ("gather", "load")]

    head = f"{' | '.join(names)} |"
    dashes = "---|" * len(names)
    lines = [
        *_wrapped(
            f"Saves and loads of {blocks} blocks in the mode `staged`: the bytes that "
            "a program reads and writes over the least there can be, its kernels (k), "
            "and XLA's estimate of its time on the device. Where two are given, a save "
            "and a load differ."
        ),
        "",
        f"| pool | a block | {head}",
        f"|---|---|{dashes}",
    ]
    for pool, figures in pools.items():
        cells = []
        for target in names:
            # Once, if they are alike.
            texts = dict.fromkeys(map(_move_cell, both(target, pool)))
            cells.append("; ".join(texts))
        lines.append(f"| {pool} | {_size(figures.block_bytes)} | {' | '.join(cells)} |")
    padded = [
        f"| {pool} | {' | '.join(cells)} |"
        for pool in pools
        for cells in [[_padding_cell(both(name, pool)) for name in names]]
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
    numbers = sorted({r.program.num_blocks for r in judged})
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


def _move_cell(move: Result | None) -> str:
    if move is None:
        return "-"
    if move.figures is None:
        return "does not compile"
    figures, texts = move.figures, []
    if figures.bytes_ratio is not None:
        texts.append(f"{_ratio(figures.bytes_ratio)}x")
    texts.append(f"{figures.kernels} k")
    if figures.estimated_s is not None:
        texts.append(_time(figures.estimated_s))
    return ", ".join(texts)


def _padding_cell(moves: list[Result | None]) -> str:
    for move in moves:
        if move is not None and move.figures is not None:
            figures = move.figures
            num_bytes = figures.block_bytes * move.program.num_blocks
            device = f"{figures.moved_bytes / num_bytes:.2f}"
            if figures.extent_host_bytes is None:
                return device
            return f"{device}, {figures.extent_host_bytes / num_bytes:.2f}"
    return "-"


def _ratio(value: float) -> str:
    """Format a ratio with about three digits.

    >>> _ratio(1.0049), _ratio(582.01)
    ('1.00', '582')
    """
    return f"{value:.2f}" if value < 9.995 else f"{value:.{1 if value < 99.5 else 0}f}"


def _time(seconds: float) -> str:
    """Format an estimated time.

    >>> _time(0.000182), _time(0.0119)
    ('182 us', '11.9 ms')
    """
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
