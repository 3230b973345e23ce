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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from jaxkv.tools.usage import Args, Usage

ROOT = pathlib.Path(__file__).resolve().parent.parent
_ANSWER = "answer: "

sys.path.insert(0, str(ROOT))


def make_parser(
    doc: str, *, rounds: int | None = None, beside: bool = False
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, metavar="R")
    if beside:
        parser.add_argument("--beside", type=pathlib.Path, metavar="CHECKOUT")
        parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    return parser


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add the traces to replay, and the host's shares of their blocks in percent."""
    folder = ROOT.parent / "shared" / "traces"
    names = "mooncake_conversation", "cc_agentic_a"
    traces = [folder / f"{name}.jsonl.gz" for name in names]
    parser.add_argument("--traces", type=pathlib.Path, nargs="*", default=traces)
    parser.add_argument("--shares", type=float, nargs="+", default=[1, 3, 10, 30])


def run_command(
    usage: Usage, run: Callable[[Args], int], argv: Sequence[str] | None
) -> int:
    """Run a benchmark with the option syntax of jaxkv's commands."""
    from jaxkv.tools.files import formatted_output
    from jaxkv.tools.usage import EXIT_OK, CommandError

    words = sys.argv[1:] if argv is None else argv
    if "--help" in words:
        print(usage.help)
        return EXIT_OK
    try:
        args = usage.parse(words)
        with formatted_output(args):
            return run(args)
    except CommandError as error:
        print(f"{usage.name}: error: {error}", file=sys.stderr)
        return error.exit_code


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
    # On a line of its own, whatever a library has printed.
    print(f"\n{_ANSWER}{json.dumps(figures)}", flush=True)
