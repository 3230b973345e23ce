"""The command line: ``jaxkv demo``.

Nothing heavy is imported before it is needed, so that ``jaxkv --help`` is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from jaxkv import __version__
from jaxkv.demo.records import DemoConfig

EXIT_OK, EXIT_MISMATCH, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
}


class UsageError(Exception):
    """Something that the user can put right, in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after ``jaxkv``; those of the process if None.

    Returns:
        The exit code: 0 if all went well, 1 if offloading changed an answer, 2 if
        the command line cannot be right, 130 after an interrupt.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _make_parsers()
    word = argv[0] if argv else "--help"
    name = f"jaxkv {word}" if word in commands else "jaxkv"
    try:
        if word not in commands:
            _check_known(word, parser, list(commands))
            parser.parse_args([word])  # answers --help or --version, and exits
        args, unknown = commands[word].parse_known_args(argv[1:])
        if unknown:
            _check_known(unknown[0], commands[word], [])
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except UsageError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _make_parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """Make the parser, and the parser of each command by its name."""
    parser = _Parser(
        prog="jaxkv",
        description="KV-cache offloading for JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    choice = parser.add_subparsers(metavar="command")
    demo = choice.add_parser(
        "demo",
        help="see what offloading does, on this machine, in about a minute",
        description=(
            "Ask several turns of questions about long documents, of a small model "
            "whose device pool is several times too small for their KV. Do it with "
            "offloading off and on; compare times and check that every token is the "
            "same."
        ),
        allow_abbrev=False,
    )
    _add_demo_options(demo)
    return parser, {"demo": demo}


def _add_demo_options(parser: argparse.ArgumentParser) -> None:
    default = DemoConfig()
    for field, minimum, explanation in (
        ("conversations", 1, "conversations, each about a document of its own"),
        ("turns", 1, "questions in each conversation"),
        ("document_tokens", 1, "length of a document, in tokens of one byte"),
        ("answer_tokens", 1, "tokens generated for each question"),
        ("device_blocks", 1, f"KV blocks of {default.block_size} tokens on the device"),
        ("seed", 0, "seed of the weights and of the choice of documents"),
    ):
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            type=_whole_number(minimum),
            default=getattr(default, field),
            metavar="N",
            help=f"{explanation} (default: %(default)s)",
        )
    parser.add_argument(
        "--host-bytes",
        type=parse_bytes,
        default="256MiB",
        metavar="SIZE",
        help="host memory for KV, such as 64MiB, 1GiB or a number of bytes "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE.png",
        help="draw the time to first token, turn by turn (default: no picture)",
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="write all figures to a file (default: no file)",
    )
    parser.set_defaults(run=_demo)


def parse_bytes(text: str) -> int:
    """Read a size such as ``64MiB``, ``1.5 GB`` or ``4096``.

    >>> parse_bytes("64MiB")
    67108864
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([a-z]*)", text.strip().lower())
    if match and match[2] in _UNITS:
        num_bytes = int(float(match[1]) * _UNITS[match[2]])
        if num_bytes >= 1:
            return num_bytes
    raise argparse.ArgumentTypeError(
        f"{text!r} must be a size such as 64MiB, 1GiB or a number of bytes"
    )


def _whole_number(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # Nine digits at most: what a seed of the weights may be, and plenty.
        if re.fullmatch(r"\d{1,9}", text) and int(text) >= minimum:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a whole number from {minimum} to 999999999"
        )

    return parse


def _check_known(
    word: str, parser: argparse.ArgumentParser, commands: list[str]
) -> None:
    """Refuse a word that `parser` does not know, with what may have been meant."""
    options = [option for a in parser._actions for option in a.option_strings]
    word = word.partition("=")[0]
    if word.startswith("-"):
        kind, known = "option", options
    elif commands:
        kind, known = "command", commands
    else:
        raise UsageError(f"unexpected {word!r}: a value must follow an option's name")
    if word in known:
        return
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
    raise UsageError(f"unknown {kind} {word!r}: {hint}")


def _demo(args: argparse.Namespace) -> int:
    names = {field.name for field in dataclasses.fields(DemoConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    config = dataclasses.replace(DemoConfig(), **given)
    _check_files(args)
    _check_extra()

    from rich.console import Console

    from jaxkv.demo import report, run, workload

    try:
        run.check_config(config)
        workload.make_conversations(config)
        _check_memory(config)
    except ValueError as error:
        raise UsageError(error) from error

    console = Console()
    console.print(_what_will_run(config), highlight=False, soft_wrap=True)
    with _progress() as on_progress:
        record = run.run_demo(config, on_progress)
    report.print_report(record, console)
    if args.plot:
        report.plot_ttft(record, args.plot)
    if args.json:
        text = json.dumps(report.to_json(record), indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return EXIT_OK if record.tokens_identical else EXIT_MISMATCH


def _check_files(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before minutes are spent on them."""
    if args.plot and args.plot.suffix.lower() != ".png":
        raise UsageError(f"--plot: {str(args.plot)!r} must end in .png")
    for option, path in (("--plot", args.plot), ("--json", args.json)):
        if path is None:
            continue
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise UsageError(
                f"{option}: cannot write {str(path)!r} ({error.strerror}); name a "
                f"file in a folder that exists and that you may write to"
            ) from error
        if not existed:
            path.unlink()


def _check_extra() -> None:
    wanted = ("flax", "rich", "matplotlib")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f'the demo needs {", ".join(missing)}: pip install "jaxkv[demo]"'
        )


def _check_memory(config: DemoConfig) -> None:
    from jaxkv.demo.model import ModelConfig

    block_bytes = config.block_size * ModelConfig().kv_bytes_per_token
    wanted = config.device_blocks * block_bytes + config.host_bytes
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return  # this system does not say
    if wanted > memory_bytes:
        raise UsageError(
            f"the device pool and the host tier would take {wanted / 2**30:.1f} GiB, "
            f"but this machine has {memory_bytes / 2**30:.1f} GiB: ask for fewer "
            f"--device-blocks or --host-bytes"
        )


def _what_will_run(config: DemoConfig) -> str:
    from jaxkv.demo.model import ModelConfig
    from jaxkv.demo.run import max_seq_tokens

    token_bytes = ModelConfig().kv_bytes_per_token
    total = config.conversations * max_seq_tokens(config) * token_bytes
    pool = config.device_blocks * config.block_size * token_bytes
    fit = (
        f"{total / pool:.1f} times too small"
        if total > pool
        else "enough for it all; fewer --device-blocks show more"
    )
    return (
        f"Conversations  {config.conversations} of {config.turns} turns, about "
        f"documents of {config.document_tokens:,} tokens\n"
        f"KV of them all {total / 2**20:.1f} MiB at most\n"
        f"Device pool    {pool / 2**20:.1f} MiB, {config.device_blocks} blocks of "
        f"{config.block_size} tokens: {fit}\n"
        f"Host memory    {config.host_bytes / 2**20:.1f} MiB"
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show how far a run is: a bar on a terminal, else a line for each label."""
    from rich.console import Console
    from rich.progress import Progress, TaskID, TimeElapsedColumn

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    columns = *Progress.get_default_columns()[:2], TimeElapsedColumn()
    progress = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )

    def show(label: str, done: int, total: int) -> None:
        if label not in tasks:
            for earlier in tasks.values():
                progress.update(earlier, visible=False)
            tasks[label] = progress.add_task(label, total=None)
            if not console.is_terminal:
                console.print(f"{label} ...")
        # Without a total the bar pulses, which suits whatever cannot be counted.
        progress.update(tasks[label], completed=done, total=total if done else None)

    with progress:
        yield show


if __name__ == "__main__":
    sys.exit(main())
