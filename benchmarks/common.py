"""Shared by the benchmarks: command line, figures, garbage, child processes.

Importing it lets a script import this checkout, `tests` included. It imports jaxkv only
where it is called, as a process that answers may measure another checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
_ANSWER = "answer: "

sys.path.insert(0, str(ROOT))


def make_parser(
    doc: str, *, rounds: int | None = None, beside: bool = False
) -> argparse.ArgumentParser:
    """Make the parser of a benchmark."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, metavar="R")
    if beside:
        parser.add_argument("--beside", type=pathlib.Path, metavar="CHECKOUT")
        parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    return parser


def show_machine(**settings: Any) -> dict[str, Any]:
    """Print the machine and the versions of the figures; return them."""
    from jaxkv.tools.machine import machine

    where = {**machine(), **settings}
    print(*(f"{key} {value}" for key, value in where.items()), sep=", ")
    return where


def write_figures(path: str | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, if there is a file to write them to."""
    if path:
        text = json.dumps(figures, indent=1)
        pathlib.Path(path).write_text(f"{text}\n", encoding="utf-8")


@contextlib.contextmanager
def old_garbage_left_alone() -> Iterator[None]:
    """Exempt existing objects from garbage collection, as in a server."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def random_keys(rng: np.random.Generator, num: int) -> list[bytes]:
    """Make random keys of blocks."""
    data = rng.bytes(32 * num)
    return [data[i : i + 32] for i in range(0, len(data), 32)]


def compared(ours_us: Sequence[float], theirs_us: Sequence[float]) -> dict[str, Any]:
    """Return the quartiles of the rounds of both sides, and of their ratios."""
    ratios = [b / a for a, b in zip(ours_us, theirs_us, strict=True)]
    return {
        "jaxkv_us": quartiles(ours_us),
        "twin_us": quartiles(theirs_us),
        "twin_over_jaxkv": quartiles(ratios),
    }


def compared_text(row: Mapping[str, Any]) -> str:
    """Write the medians of both sides, and their ratio with its quartiles."""
    ours, theirs = row["jaxkv_us"][1], row["twin_us"][1]
    return f"{ours:9.1f} /{theirs:9.1f}   {spread(row['twin_over_jaxkv'], 6)}"


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(values, n=4)


def spread(quartiles: Sequence[float], width: int = 0, digits: int = 2) -> str:
    """Write a median with its quartiles."""
    low, middle, high = quartiles
    return f"{middle:{width}.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def start(
    script: str, *args: str, env: Mapping[str, str], log: pathlib.Path | None = None
) -> subprocess.Popen[str]:
    """Start a script with --serve and two words, to be asked."""
    with open(log or os.devnull, "w", encoding="utf-8") as errors:
        return subprocess.Popen(
            [sys.executable, script, "--serve", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors if log else None,
            text=True,
            env={**os.environ, **env},
        )


def ask(process: subprocess.Popen[str], *question: Any) -> dict[str, Any]:
    """Send a question to a process, and return its answer."""
    assert process.stdin
    assert process.stdout
    print(json.dumps(question), file=process.stdin, flush=True)
    for line in process.stdout:
        if line.startswith(_ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(_ANSWER))
            return answer
    raise RuntimeError("the process that was asked has ended")


def questions() -> Iterator[Any]:
    """Yield what this process is asked."""
    yield from map(json.loads, sys.stdin)


def answer(figures: Mapping[str, Any]) -> None:
    """Answer the last question."""
    # On a line of its own, whatever a library has printed.
    print(f"\n{_ANSWER}{json.dumps(figures)}", flush=True)
