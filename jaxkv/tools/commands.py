"""The commands: help, one-line errors and exit codes."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from jaxkv import __version__
from jaxkv._util import did_you_mean, one_line, shown
from jaxkv.tools import COMMANDS, SUBCOMMANDS
from jaxkv.tools.files import formatted_output
from jaxkv.tools.process import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, OUTPUT_ERRORS
from jaxkv.tools.usage import EXIT_FAILED, EXIT_OK, CommandError, UsageError
from jaxkv.transfer.storage.store_url import shown_url

_HELP = "-h", "--help"


def run(argv: Sequence[str]) -> int:
    """Run a command; see `jaxkv.tools.main.main`."""
    name = " ".join(["jaxkv", *[word for word in argv[:1] if word in COMMANDS]])
    if argv[1:] and argv[1] in SUBCOMMANDS.get(argv[0], ()):
        name += f" {argv[1]}"
    try:
        code = _run(argv)
        # Flush here, to report write errors. stdout is None if it was closed at start.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"{name}: error: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE  # The reader has closed the pipe.
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


def _run(argv: Sequence[str]) -> int:
    modules = import_commands()
    word = argv[0] if argv else "--help"
    if word in _HELP:
        text = _list_commands("jaxkv", "KV-cache offloading for JAX.", modules)
        return _show(f"{text}\n`jaxkv --version` prints the version.")
    if word == "--version":
        return _show(f"jaxkv {__version__}")
    if word not in modules:
        raise _unknown("command", word, [*modules], [*_HELP, "--version"])
    command, words = modules[word], argv[1:]
    if siblings := getattr(command, "COMMANDS", None):
        if words and words[0] in _HELP:
            text = _list_commands(f"jaxkv {word}", command.DESCRIPTION, siblings)
            return _show(text)
        command, words = _choose(siblings, words), words[1:]
    if any(option in words for option in _HELP):
        return _show(command.USAGE.help)
    args = command.USAGE.parse(words)
    # A report has the command; a password in a store's URL stays out of it.
    words = [shown_url(word) if "://" in word else word for word in argv]
    args.command_line = shlex.join(["jaxkv", *words])
    with formatted_output(args):
        code: int = command.run(args)
    return code


def import_commands() -> Mapping[str, ModuleType]:
    """Import the modules of all commands, by name."""
    return {
        name: importlib.import_module(f"jaxkv.tools.{name}.command")
        for name in COMMANDS
    }


def _show(text: str) -> int:
    print(text)
    return EXIT_OK


def _list_commands(
    name: str, description: str, modules: Mapping[str, ModuleType]
) -> str:
    lines = [f"usage: {name} COMMAND [options]", "", description, "", "commands:"]
    lines += [f"  {name:10}{module.SUMMARY}" for name, module in modules.items()]
    return "\n".join([*lines, "", f"`{name} COMMAND --help` lists the options."])


def _choose(siblings: Mapping[str, ModuleType], words: Sequence[str]) -> ModuleType:
    """Return the subcommand that the first word names."""
    word = words[0] if words else ""
    if not word or (word.startswith("-") and word not in siblings):
        raise UsageError(f"name one of these: {', '.join(siblings)}")
    if word not in siblings:
        raise _unknown("command", word, [*siblings], [])
    command = siblings[word]
    for sibling in siblings.values():
        for option in (word.partition("=")[0] for word in words[1:]):
            if option in sibling.USAGE.options and option not in command.USAGE.options:
                raise UsageError(f"{option}: it belongs to {sibling.USAGE.name}")
    return command


def _unknown(
    kind: str, word: str, names: Sequence[str], options: Sequence[str]
) -> UsageError:
    if word.startswith("-"):
        kind, names, word = "option", options, word.partition("=")[0]
    return UsageError(f"unknown {kind} {shown(word)}: {did_you_mean(word, names)}")
