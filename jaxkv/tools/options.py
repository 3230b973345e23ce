"""Shared by the commands: one-line errors, option values, files."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NoReturn, TypeVar

from jaxkv import _util as units
from jaxkv._util import did_you_mean, shown, size_text
from jaxkv._util.extras import pip_install

_Value = TypeVar("_Value")

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


class CommandError(Exception):
    """An error that ends a command, in one line."""

    exit_code = EXIT_FAILED


class UsageError(CommandError):
    """An error in the command line, which the user can correct."""

    exit_code = EXIT_USAGE


def parse_bytes(text: str) -> int:
    """Parse a size such as ``64MiB``, ``1.5 GB`` or ``4096``.

    >>> parse_bytes("64MiB")
    67108864
    """
    try:
        return units.parse_bytes(text)
    except ValueError as error:
        # argparse shows the text of this error only.
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_whole_number_from(minimum: int) -> Callable[[str], int]:
    """Make a parser of whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        # At most nine digits: enough, and the limit for a seed of the weights.
        if re.fullmatch(r"\d{1,9}", text) and int(text) >= minimum:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"{shown(text)} must be a whole number from {minimum} to 999999999"
        )

    return parse


parse_rounds = parse_whole_number_from(3)
"""Parse a number of rounds: fewer have no useful quartiles."""


def parse_port(text: str) -> int:
    """Parse the number of a port; 0 is for any that is free.

    >>> parse_port("9400")
    9400
    """
    if re.fullmatch(r"[0-9]{1,5}", text) and int(text) < 1 << 16:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"{shown(text)} must be a port, from 0 (any that is free) to 65535"
    )


def parse_list_of(parse: Callable[[str], _Value]) -> Callable[[str], list[_Value]]:
    """Make a parser of values between commas."""

    def parse_all(text: str) -> list[_Value]:
        return [parse(part) for part in split_commas(text)]

    return parse_all


def split_commas(text: str) -> list[str]:
    """Split the values of an option that takes several.

    >>> split_commas("lru, arc")
    ['lru', 'arc']
    """
    return [part.strip() for part in text.split(",")]


def check_names(option: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Refuse unknown names; return the names without repetitions."""
    for name in given:
        if name not in known:
            raise UsageError(
                f"{option}: unknown {shown(name)}: {did_you_mean(name, known)}"
            )
    return list(dict.fromkeys(given))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and whose options state their defaults."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise UsageError(message.removeprefix("argument "))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(value, list(action.choices))
            raise argparse.ArgumentError(action, f"unknown {shown(value)}: {hint}")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse's own does not tell of output that cannot be written.
        print(message, end="", file=sys.stderr if file is None else file)

    def value(
        self,
        usage: str,
        about: str,
        parse: Callable[[str], Any] = str,
        default: Any = None,
        *,
        otherwise: str = "none",
    ) -> None:
        """Add an option with a value, such as ``--port PORT``."""
        option, metavar = usage.split()
        text = otherwise if default is None else f"{default}"
        self.add_argument(
            option,
            type=parse,
            default=default,
            metavar=metavar,
            help=f"{about} (default: {text})".replace("%", "%%"),
        )

    def values(
        self,
        usage: str,
        about: str,
        parse: Callable[[str], Any] = str,
        *,
        otherwise: str,
    ) -> None:
        """Add an option with values between commas, which may be repeated."""
        option, metavar = usage.split()
        self.add_argument(
            option,
            action="extend",
            type=parse_list_of(parse),
            metavar=f"{metavar},...",
            help=f"{about}; may be repeated (default: {otherwise})".replace("%", "%%"),
        )

    def flag(self, option: str, about: str, otherwise: str) -> None:
        """Add an option without a value."""
        self.add_argument(
            option, action="store_true", help=f"{about} (default: {otherwise})"
        )

    def files(self, picture: str | None = None, *, has_page: bool = False) -> None:
        """Add --json; --plot, which draws `picture`; and --html. See `write_files`."""
        if picture:
            about = f"draw {picture}"
            self.value("--plot FILE.png", about, pathlib.Path, otherwise="no picture")
        add_json_option(self)
        if has_page:
            about = "write a report for a browser, which needs no network"
            self.value("--html FILE", about, pathlib.Path)


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="write all figures to a file (default: no file)",
    )


def sizes_text(sizes: Iterable[int]) -> str:
    """Write sizes as an option takes them.

    >>> sizes_text([65536, 1048576])
    '64KiB,1MiB'
    """
    return ",".join(size_text(size, "") for size in sizes)


def check_belongs(
    args: argparse.Namespace, names: Sequence[str], to: str, given: object
) -> None:
    """Refuse options that say more about one that is not given."""
    if not given:
        check_absent(args, names, f"{{}}: it belongs to {to}")


def check_absent(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Refuse options that contradict others; "{}" in `why` stands for the option."""
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(why.format(f"--{name.replace('_', '-')}"))


@contextlib.contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Refuse the model of --model if it cannot be read, or used, in this context."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None)
        text = f"cannot read {shown(model)} ({why})" if why else str(error)
        raise UsageError(f"--model: {text}") from error


def check_files(args: argparse.Namespace) -> None:
    """Refuse files that cannot be written, or would be lost, before a long run."""
    plot = getattr(args, "plot", None)
    if plot and plot.suffix.lower() != ".png":
        raise UsageError(f"--plot: {shown(str(plot))} must end in .png")
    taken: dict[str, str] = {}
    for name, path in (
        *(("TRACE", path) for path in getattr(args, "trace", ())),
        ("--model", getattr(args, "model", None)),
    ):
        if path and os.path.isfile(path):
            taken[os.path.realpath(path)] = name
    for option in ("--plot", "--json", "--html"):
        path = getattr(args, option[2:], None)
        check_file(option, path)
        if path is None or (path.exists() and not path.is_file()):
            continue  # Such as /dev/null, which takes all.
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            raise UsageError(
                f"{option}: {shown(str(path))} is the file of {other} too, which "
                "would be lost; name another"
            )


def check_file(option: str, path: pathlib.Path | None) -> None:
    """Refuse a file that cannot be written, if an option names one."""
    if path is None:
        return
    try:
        existed = path.exists()
        path.open("ab").close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no name of a file"
        raise UsageError(
            f"{option}: cannot write {shown(str(path))} ({why}); name a "
            f"file in a folder that exists and that you may write to"
        ) from error
    if not existed:
        path.unlink()


def write_files(
    args: argparse.Namespace,
    figures: Callable[[], Mapping[str, object]],
    draw: Callable[[BinaryIO], None] | None = None,
    page: Callable[[str], str] | None = None,
) -> None:
    """Write the files that a command line names."""
    if draw is not None and args.plot:
        picture = io.BytesIO()
        draw(picture)
        write_file("--plot", args.plot, picture.getvalue())
    if args.json:
        write_json(args.json, figures())
    if page is not None and args.html:
        text = page(args.command_line)
        write_file("--html", args.html, text.encode("utf-8", "replace"))


def write_json(path: pathlib.Path, figures: Mapping[str, object]) -> None:
    """Write figures to the file of --json."""
    write_file("--json", path, f"{json.dumps(figures, indent=2)}\n".encode())


def write_file(option: str, path: pathlib.Path, data: bytes) -> None:
    """Write the file of an option: all of it, or what was there stays."""
    path = path.resolve()
    part = path.with_name(f".{path.name[:60]}.{os.getpid()}.part")
    try:
        if path.exists() and (
            not path.is_file() or not os.access(path.parent, os.W_OK)
        ):
            # What must not be replaced, such as a pipe, or cannot be.
            path.write_bytes(data)
            return
        try:
            part.write_bytes(data)
            if path.exists():
                shutil.copymode(path, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{option}: cannot write {shown(str(path))} ({error.strerror})"
        ) from error


def packages_for(args: argparse.Namespace) -> list[str]:
    """List the packages that show the results of a command line."""
    drawn = getattr(args, "plot", None) or getattr(args, "html", None)
    return ["rich", "matplotlib"] if drawn else ["rich"]


def check_extra(what: str, packages: Sequence[str], extra: str = "demo") -> None:
    """Refuse to continue without the packages of an extra that `what` needs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{what} needs {', '.join(missing)}: {pip_install(extra)}")
