"""The options of a command: its help text is their declaration.

A line such as ``  --seed N  seed of the weights (default: 0)`` declares an option
that takes a value. The name of the value chooses its parser (`_PARSERS`, or one that
the command names), and ``NAME,...`` takes several values, which may be repeated. An
option without a value is a flag. ``  -q, --quiet  text`` adds a short name.
``  TRACE...  text`` declares arguments, ``  [URL]  text`` one that may be missing. The
text goes on in lines that are indented further.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from jaxkv._util import did_you_mean, parse_bytes, shown, size_text

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
FORMATS = ("table", "json")
_MAX_NUMBER = 1e24
_ENTRY = re.compile(r"^  (\S.*?)  +(.*(?:\n   .*)*)$", re.MULTILINE)
_ENTRY_PARTS = re.compile(r"(?:(-\w), )?(\S+)(?: (.*))?")  # Short name, name and value.
_WIDTH, _COLUMN = 80, 26


class CommandError(Exception):
    """An error that ends a command, in one line."""

    exit_code = EXIT_FAILED


class UsageError(CommandError):
    """An error in the command line, which the user can correct."""

    exit_code = EXIT_USAGE


class Args(SimpleNamespace):
    """A parsed command line: an attribute for each option and argument."""


class Command(NamedTuple):
    """A command: its options, and a function that returns its exit code."""

    usage: Usage
    run: Callable[[Args], int]


def whole_number_from(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        # At most nine digits: enough, and the limit for a seed of the weights.
        if re.fullmatch(r"\d{1,9}", text) and int(text) >= minimum:
            return int(text)
        raise ValueError(
            f"{shown(text)} must be a whole number from {minimum} to 999999999"
        )

    return parse


def number_from(
    minimum: float, limits_text: str, maximum: float = _MAX_NUMBER
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        is_number = re.fullmatch(r"\d{1,18}(\.\d{1,9})?([eE][+-]?\d{1,2})?", text)
        if is_number and minimum <= float(text) < maximum:
            return float(text)
        raise ValueError(
            f"{shown(text)} must be a number {limits_text}, such as 25 or 0.4"
        )

    return parse


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    return partial(_parse_name, choices)


def _parse_name(choices: Sequence[str], text: str) -> str:
    if text in choices:
        return text
    raise ValueError(f"unknown {shown(text)}: {did_you_mean(text, choices)}")


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "N": whole_number_from(1),
    "X": number_from(1e-9, "above 0"),
    "SIZE": parse_bytes,
    "FILE": Path,
    "FILE.svg": Path,
    "FORMAT": one_of(FORMATS),
}
"""By the name of a value; other values are text."""


class Option(NamedTuple):
    """An option; `value` names its value, empty for a flag."""

    name: str
    value: str
    parse: Callable[[str], Any]
    about: str

    @property
    def field(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def choices(self) -> Sequence[str]:
        """The names that it takes; empty if it takes others."""
        return self.parse.args[0] if isinstance(self.parse, partial) else ()


class Usage:
    """The options of a command.

    `text` declares them, in groups. `parsers` are by option, where the value's name
    does not say it all. `defaults` are by field of `Args`; help states them, and the
    text states what happens without the other options.
    """

    def __init__(
        self,
        name: str,
        description: str,
        text: str,
        parsers: Mapping[str, Callable[[str], Any]] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._description, self._text = description, text.strip("\n")
        self.defaults = dict(defaults or {})
        self._argument = ""
        self.options: dict[str, Option] = {}
        self._short: dict[str, str] = {}
        for entry, about in _ENTRY.findall(text):
            short, name, value = _match(entry).groups("")
            if not name.startswith("-"):
                self._argument = name
                continue
            by_value = _PARSERS.get(value.removesuffix(",..."), str)
            parse = (parsers or {}).get(name, by_value)
            option = Option(name, value, parse, " ".join(about.split()))
            if self.defaults.get(option.field) and "(default" not in about:
                text = _default_text(option, self.defaults[option.field])
                option = option._replace(about=f"{option.about} (default: {text})")
            self.options[name] = option
            if short:
                self._short[short] = name
        self._takes_many = self._argument.endswith("...")

    @property
    def help(self) -> str:
        line = " ".join(
            filter(None, ("usage:", self.name, self._argument, "[options]"))
        )
        entries = _ENTRY.sub(self._render, self._text)
        return f"{line}\n\n{textwrap.fill(self._description, _WIDTH)}\n\n{entries}"

    def _render(self, entry: re.Match[str]) -> str:
        option = self.options.get(_match(entry[1])[2])
        about = option.about if option else " ".join(entry[2].split())
        left, indent = f"  {entry[1]:{_COLUMN - 3}} ", " " * _COLUMN
        if len(left) > _COLUMN:
            left = f"{left.rstrip()}\n{indent}"
        return left + f"\n{indent}".join(
            textwrap.wrap(about, _WIDTH - _COLUMN, break_on_hyphens=False)
        )

    def parse(self, words: Sequence[str]) -> Args:
        values: dict[str, Any] = {
            option.field: None if option.value else False
            for option in self.options.values()
        }
        values |= self.defaults
        arguments: list[str] = []
        lists: dict[str, list[Any]] = {}
        rest = iter(words)
        for word in rest:
            if word.startswith("-") and word != "-":
                name, equals, text = word.partition("=")
                option = self._find(name)
                if not option.value:
                    if equals:
                        raise UsageError(f"{name}: it takes no value")
                    values[option.field] = True
                    continue
                if not equals:
                    text = next(rest, "--")
                    if text.startswith("--"):
                        raise UsageError(f"{name}: expected one argument")
                value = _parse_value(option, text)
                if option.value.endswith(",..."):
                    lists.setdefault(option.field, []).extend(value)
                    value = lists[option.field]
                values[option.field] = value
            else:
                arguments.append(word)
        max_arguments = len(arguments) if self._takes_many else bool(self._argument)
        if len(arguments) > max_arguments:
            unexpected = arguments[max_arguments]
            raise UsageError(f"unexpected argument {shown(unexpected)}")
        if self._argument:
            name = self._argument.strip("[.]")
            if not arguments and not self._argument.startswith("["):
                raise UsageError(f"missing {name}: `{self.name} --help` explains it")
            one = arguments[0] if arguments else None
            values[name.lower()] = arguments if self._takes_many else one
        return Args(**values)

    def _find(self, name: str) -> Option:
        name = self._short.get(name, name)
        if name not in self.options:
            names = ["-h", "--help", *self.options]
            raise UsageError(
                f"unknown option {shown(name)}: {did_you_mean(name, names)}"
            )
        return self.options[name]


def _match(entry: str) -> re.Match[str]:
    match = _ENTRY_PARTS.fullmatch(entry)
    assert match is not None, entry
    return match


def _default_text(option: Option, default: Any) -> str:
    values = default if isinstance(default, tuple) else (default,)
    if option.value.startswith("SIZE"):
        values = tuple(size_text(size, "") for size in values)
    return ",".join(map(str, values))


def _parse_value(option: Option, text: str) -> Any:
    try:
        if option.value.endswith(",..."):
            return [option.parse(part.strip()) for part in text.split(",")]
        return option.parse(text)
    except ValueError as error:
        raise UsageError(f"{option.name}: {error}") from error


def check_belongs(args: Args, names: Sequence[str], to: str, value: object) -> None:
    """Refuse options that refine another one, if that is not given."""
    if not value:
        check_absent(args, names, f"{{}}: it belongs to {to}")


def check_absent(args: Args, names: Sequence[str], why: str) -> None:
    """Refuse options that contradict others; "{}" in `why` stands for the option."""
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(why.format(f"--{name.replace('_', '-')}"))
