"""The commands: help, one-line errors and exit codes."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Mapping, Sequence

from jaxkv import __version__
from jaxkv._util import did_you_mean, one_line, shown
from jaxkv.tools import COMMANDS, SUBCOMMANDS, command_name
from jaxkv.tools.files import formatted_output
from jaxkv.tools.process import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, OUTPUT_ERRORS
from jaxkv.tools.usage import (
    EXIT_FAILED,
    EXIT_OK,
    Command,
    CommandError,
    Usage,
    UsageError,
)

_HELP = "-h", "--help"
_VERSION = "-V", "--version"
_COMPLETION = "--completion"


def run(argv: Sequence[str]) -> int:
    """Run a command; see `jaxkv.tools.main.main`."""
    name = command_name(argv)
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
    words = list(argv) or ["--help"]
    if words[0] == "help":
        words = [*words[1:], "--help"]
    word, *rest = words
    if word in _HELP:
        text = _list_commands("jaxkv", "KV-cache offloading for JAX.", COMMANDS)
        return _show(
            f"{text}\n`jaxkv --version` prints the version, `{_COMPLETION}` a script "
            "for bash and zsh."
        )
    if word in _VERSION:
        return _show(f"jaxkv {__version__}")
    if word == _COMPLETION:
        from jaxkv.tools.completion import completion_script

        return _show(completion_script(load_usages()))
    if word not in COMMANDS:
        raise _unknown(word, [*COMMANDS], [*_HELP, *_VERSION, _COMPLETION])
    if siblings := SUBCOMMANDS.get(word):
        if rest[:1] and rest[0] in _HELP:
            text = "A namespace has the blocks of one model, layout and secret."
            return _show(_list_commands(f"jaxkv {word}", text, siblings))
        command, rest = _choose(word, rest), rest[1:]
    else:
        command = load_commands(word)[""]
    if any(option in rest for option in _HELP):
        return _show(command.usage.help)
    args = command.usage.parse(rest)
    args.command_line = shlex.join(["jaxkv", *map(_without_password, argv)])
    with formatted_output(args):
        return command.run(args)


def load_commands(word: str) -> Mapping[str, Command]:
    """Import a command; return it, or its subcommands by name."""
    module = importlib.import_module(f"jaxkv.tools.{word}.command")
    if word in SUBCOMMANDS:
        commands: Mapping[str, Command] = module.COMMANDS
        return commands
    return {"": Command(module.USAGE, module.run)}


def load_usages() -> dict[str, Usage]:
    return {
        f"{word} {name}".rstrip(): command.usage
        for word in COMMANDS
        for name, command in load_commands(word).items()
    }


def _without_password(word: str) -> str:
    if "://" not in word:
        return word
    from jaxkv.transfer.storage.store_url import shown_url

    return shown_url(word)


def _show(text: str) -> int:
    print(text)
    return EXIT_OK


def _list_commands(name: str, about: str, commands: Mapping[str, str]) -> str:
    lines = [f"usage: {name} COMMAND [options]", "", about, "", "commands:"]
    lines += [f"  {word:10}{summary}" for word, summary in commands.items()]
    return "\n".join([*lines, "", f"`{name} COMMAND --help` lists the options."])


def _choose(word: str, words: Sequence[str]) -> Command:
    """Return the subcommand that the first word names."""
    names, name = SUBCOMMANDS[word], words[0] if words else ""
    if not name or (name.startswith("-") and name not in names):
        raise UsageError(f"name one of these: {', '.join(names)}")
    if name not in names:
        raise _unknown(name, [*names], [])
    commands = load_commands(word)
    options = commands[name].usage.options
    for sibling in commands.values():
        for option in (text.partition("=")[0] for text in words[1:]):
            if option in sibling.usage.options and option not in options:
                raise UsageError(f"{option}: it belongs to {sibling.usage.name}")
    return commands[name]


def _unknown(word: str, names: Sequence[str], options: Sequence[str]) -> UsageError:
    kind = "command"
    if word.startswith("-"):
        kind, names, word = "option", options, word.partition("=")[0]
    return UsageError(f"unknown {kind} {shown(word)}: {did_you_mean(word, names)}")
