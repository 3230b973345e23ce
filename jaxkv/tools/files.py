"""The files that a command line names, and the packages that a command needs."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv._util import shown
from jaxkv._util.extras import pip_install
from jaxkv._util.files import open_file, replace_file, resolved
from jaxkv.tools.usage import FORMATS, Args, CommandError, UsageError

OUTPUT_OPTIONS = """\
  -q, --quiet  show no progress
  -o, --output FILE  write the output to a file (default: stdout)
  --format FORMAT  table or json (default: by the suffix of FILE, else table)
  --json FILE  also write all figures as JSON"""
PLOT_OPTION = """\
  --plot FILE.svg  also draw {}"""
HTML_OPTION = """\
  --html FILE  also write a self-contained HTML report"""


def check_files(args: Args) -> None:
    """Refuse files that cannot be written, or would be lost, before a long run."""
    plot = getattr(args, "plot", None)
    if plot and plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot: {shown(str(plot))} must end in .svg")
    names: dict[str, str] = {}
    for name, path in (
        *(("TRACE", path) for path in getattr(args, "trace", ())),
        ("--model", getattr(args, "model", None)),
    ):
        if path and os.path.isfile(path):
            names[os.path.realpath(path)] = name
    for option in ("--output", "--plot", "--json", "--html"):
        path = getattr(args, option[2:], None)
        if path is None:
            continue
        _check_file(option, path)
        if path.exists() and not path.is_file():
            continue  # /dev/null, for example, may be named twice.
        name = names.setdefault(os.path.realpath(path), option)
        if name != option:
            raise UsageError(
                f"{option}: {shown(str(path))} is the file of {name} too, which "
                "would be lost; name another"
            )


def _check_file(option: str, path: Path) -> None:
    try:
        target, existed = resolved(path), path.exists()
        is_special = existed and not path.is_file()
        place, opener = (path, None) if is_special else (target, open_file)
        open(place, "ab", opener=opener).close()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no name of a file"
        raise UsageError(
            f"{option}: cannot write {shown(str(path))} ({why}); name a "
            f"file in a folder that exists and that you may write to"
        ) from error
    if not existed:
        os.unlink(target)  # A link to it stays.


@contextlib.contextmanager
def formatted_output(args: Args) -> Iterator[None]:
    """Write what is printed in this context as --output and --format say."""
    path, format_name = args.output, args.format
    if format_name is None:
        suffix = "" if path is None else path.suffix[1:].lower()
        format_name = suffix if suffix in FORMATS else "table"
    if format_name == "table" and path is None:
        yield
        return
    args.figures, printed = None, io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    text = printed.getvalue()
    if format_name != "table":
        text = _as_json(args.figures() if args.figures else {})
    if path is None:
        print(text, end="")
    else:
        write_file("--output", path, text.encode("utf-8", "replace"))


def _as_json(figures: Mapping[str, Any]) -> str:
    return f"{json.dumps(figures, indent=2)}\n"


def write_files(
    args: Args,
    figures: Callable[[], Mapping[str, object]],
    draw: Callable[[], str] | None = None,
    page: Callable[[str], str] | None = None,
) -> None:
    """Write the files of --json, --plot and --html, if the command line names them.

    `page` makes the report from the text of the command line.
    """
    if draw is not None and args.plot:
        write_file("--plot", args.plot, draw().encode("utf-8", "replace"))
    args.figures = figures
    if args.json:
        write_file("--json", args.json, _as_json(figures()).encode())
    if page is not None and args.html:
        text = page(args.command_line)
        write_file("--html", args.html, text.encode("utf-8", "replace"))


def write_file(option: str, path: Path, data: bytes) -> None:
    """Write all of a file, or keep the old one: UsageError if the disk is full."""
    try:
        has_stdout = sys.__stdout__ is not None and path.exists()
        if has_stdout and os.path.samestat(path.stat(), os.fstat(1)):
            with open(1, "wb", closefd=False) as file:  # After what is there already.
                file.write(data)
            return
        target, mode = resolved(path), None
        if path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
            if not path.is_file() or not os.access(os.path.dirname(target), os.W_OK):
                # What must not be replaced, such as a pipe, or cannot be.
                path.write_bytes(data)
                return
        replace_file(target, data, 0o666, exact_mode=mode)
    except BrokenPipeError:
        raise  # The reader of the pipe has closed it.
    except OSError as error:
        raise UsageError(
            f"{option}: cannot write {shown(str(path))} ({error.strerror})"
        ) from error


def check_extra(
    what: str, packages: Sequence[str] = ("rich",), extra: str = "demo"
) -> None:
    """Refuse to continue without the packages of an extra that `what` needs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{what} needs {', '.join(missing)}: {pip_install(extra)}")
