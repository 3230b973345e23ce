"""The command line: ``jaxkv demo``, ``replay``, ``bench``, ``doctor``.

Nothing heavy is imported before it is needed, so that ``jaxkv --help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxkv import __version__
from jaxkv._util import did_you_mean
from jaxkv.cli import bench, demo, doctor, replay
from jaxkv.cli.options import EXIT_INTERRUPTED, EXIT_USAGE, UsageError

_COMMANDS = {"demo": demo, "replay": replay, "bench": bench, "doctor": doctor}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after ``jaxkv``; those of the process if None.

    Returns:
        The exit code: 0 on success, 1 if offloading changed an answer or a byte or the
        doctor found something wrong, 2 for a wrong command line, 130 after an
        interrupt.
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
        run: Callable[[argparse.Namespace], int] = _COMMANDS[word].run
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
    """Make the main parser, and the parser of each command by name."""
    parser = _Parser(
        prog="jaxkv",
        description="KV-cache offloading for JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    choice = parser.add_subparsers(metavar="command")
    parsers = {}
    for name, command in _COMMANDS.items():
        parsers[name] = choice.add_parser(
            name,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            allow_abbrev=False,
        )
        command.add_options(parsers[name])
    return parser, parsers


def _check_known(
    word: str, parser: argparse.ArgumentParser, commands: list[str]
) -> None:
    """Refuse a word that `parser` does not know, with a suggestion."""
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
    raise UsageError(f"unknown {kind} {word!r}: {did_you_mean(word, known)}")


if __name__ == "__main__":
    sys.exit(main())
