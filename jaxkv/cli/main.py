"""The command line: ``jaxkv demo``, ``replay``, ``bench``, ``doctor``.

Nothing heavy is imported before it is needed, so that ``jaxkv --help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Mapping, Sequence
from typing import NoReturn

from jaxkv import __version__
from jaxkv._util import did_you_mean
from jaxkv.cli import bench, demo, doctor, replay
from jaxkv.cli.options import EXIT_INTERRUPTED, EXIT_USAGE, UsageError

_COMMANDS: Mapping[str, types.ModuleType] = {
    "demo": demo,
    "replay": replay,
    "bench": bench,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after ``jaxkv``; those of the process if None.

    Returns:
        The exit code: 0 on success, 1 if offloading changed an answer or a byte, a
        compiled program broke a bound or the doctor found something wrong, 2 for a
        wrong command line, 130 after an interrupt.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _make_parsers()
    word = argv[0] if argv else "--help"
    name = f"jaxkv {word}" if word in commands else "jaxkv"
    try:
        if word not in commands:
            _check_known(word, parser, list(commands))
            parser.parse_args([word])  # answers --help or --version, and exits
        command, parser, words = _COMMANDS[word], commands[word], argv[1:]
        if hasattr(command, "COMMANDS"):
            command, parser = _choose(command, parser, words)
            words = words[1:]
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _check_known(unknown[0], parser, [])
        exit_code: int = command.run(args)
        return exit_code
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
    return parser, _add_commands(parser, _COMMANDS, "command")


def _add_commands(
    parser: _Parser, commands: Mapping[str, types.ModuleType], metavar: str
) -> dict[str, _Parser]:
    """Add the parsers of commands; return them by name."""
    choice = parser.add_subparsers(metavar=metavar)
    parsers: dict[str, _Parser] = {}
    for name, command in commands.items():
        parsers[name] = choice.add_parser(
            name,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            allow_abbrev=False,
        )
        if hasattr(command, "add_options"):
            command.add_options(parsers[name])
    return parsers


def _choose(
    group: types.ModuleType, parser: _Parser, words: list[str]
) -> tuple[types.ModuleType, _Parser]:
    """Return the command of a group that the first word names, and its parser."""
    known: Mapping[str, types.ModuleType] = group.COMMANDS
    parsers = _add_commands(parser, known, group.METAVAR)
    word = words[0] if words else ""
    if word in known:
        for other in (name for name in known if name != word):
            own, others = _options(parsers[word]), _options(parsers[other])
            for option in (given.partition("=")[0] for given in words[1:]):
                if option in others and option not in own:
                    raise UsageError(f"{option}: it belongs to {parsers[other].prog}")
        return known[word], parsers[word]
    if word in _options(parser):
        parser.parse_args([word])  # answers --help, and exits
    if not word or word.startswith("-"):
        raise UsageError(f"name {group.QUESTION}: there is {', '.join(known)}")
    hint = did_you_mean(word, list(known))
    raise UsageError(f"{group.METAVAR}: unknown {word!r}: {hint}")


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for a in parser._actions for option in a.option_strings]


def _check_known(
    word: str, parser: argparse.ArgumentParser, commands: list[str]
) -> None:
    """Refuse a word that `parser` does not know, with a suggestion."""
    word = word.partition("=")[0]
    if word.startswith("-"):
        kind, known = "option", _options(parser)
    elif commands:
        kind, known = "command", commands
    else:
        raise UsageError(f"unexpected {word!r}: a value must follow an option's name")
    if word in known:
        return
    raise UsageError(f"unknown {kind} {word!r}: {did_you_mean(word, known)}")


if __name__ == "__main__":
    sys.exit(main())
