"""The commands: which there are, their one-line errors and exit codes."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from jaxkv import __version__
from jaxkv._util import did_you_mean, one_line, shown
from jaxkv.tools import COMMANDS
from jaxkv.tools.options import EXIT_FAILED, CommandError, Parser, UsageError
from jaxkv.tools.process import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, OUTPUT_ERRORS


def run(argv: Sequence[str]) -> int:
    """Run a command; see `jaxkv.tools.main.main`."""
    word = argv[0] if argv else "--help"
    name = f"jaxkv {word}" if word in COMMANDS else "jaxkv"
    try:
        modules = {each: _import(each) for each in COMMANDS}
        parser, commands = _make_parsers(modules)
        if word not in commands:
            _check_known(word, parser, list(commands))
            parser.parse_args([word])  # answers --help or --version, and exits
        command, parser, words = modules[word], commands[word], argv[1:]
        if hasattr(command, "COMMANDS"):
            command, parser = _choose(command, parser, words)
            words, name = words[1:], parser.prog
        args, unknown = parser.parse_known_args(words)
        if unknown:
            _check_known(unknown[0], parser, [])
        args.command_line = shlex.join(["jaxkv", *argv])
        code: int = command.run(args)
        # What cannot be written is to be found out here. Whoever closed the output
        # before the process began wants none.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"{name}: error: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE  # Whoever read this has seen enough.
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        print(
            f"{name}: error: cannot write the output ({error.strerror})",
            file=sys.stderr,
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _import(word: str) -> ModuleType:
    return importlib.import_module(f"jaxkv.tools.{word}.command")


def _make_parsers(
    modules: Mapping[str, ModuleType],
) -> tuple[Parser, dict[str, Parser]]:
    """Make the main parser, and the parser of each command by name."""
    parser = Parser(
        prog="jaxkv",
        description="KV-cache offloading for JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    return parser, _add_commands(parser, modules, "command")


def _add_commands(
    parser: Parser, modules: Mapping[str, ModuleType], metavar: str
) -> dict[str, Parser]:
    """Add the parsers of commands; return them by name."""
    choice = parser.add_subparsers(metavar=metavar)
    parsers: dict[str, Parser] = {}
    for name, command in modules.items():
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
    group: ModuleType, parser: Parser, words: Sequence[str]
) -> tuple[ModuleType, Parser]:
    """Return the command of a group that the first word names, and its parser."""
    known: Mapping[str, ModuleType] = group.COMMANDS
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
        raise UsageError(f"name {group.QUESTION}: choose from {', '.join(known)}")
    hint = did_you_mean(word, list(known))
    raise UsageError(f"{group.METAVAR}: unknown {shown(word)}: {hint}")


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
        raise UsageError(f"unexpected argument {shown(word)}")
    if word in known:
        return
    raise UsageError(f"unknown {kind} {shown(word)}: {did_you_mean(word, known)}")
