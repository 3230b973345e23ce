"""Sizes written by people, suggestions for misspelt names, closable resources."""

from __future__ import annotations

import abc
import difflib
import fractions
import operator
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self, SupportsIndex, TypeVar

# Characters of a value or name that a message shows.
_MOST_SHOWN = 100
_MOST_SHORT = 4  # Letters of a name of which each one counts.

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
}
# Shifts of units, the largest first.
_BINARY_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))

FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
"""What flags are called in the environment, in lower case."""

_Part = TypeVar("_Part")


substitutes: dict[type, type] = {}
"""The strict class of each part; `jaxkv.strict` adds them when it is imported."""


def is_strict() -> bool:
    """Return whether the environment variable `JAXKV_STRICT` is a true flag."""
    return FLAGS.get(os.environ.get("JAXKV_STRICT", "").lower(), False)


def strict_class(cls: type[_Part]) -> type[_Part]:
    """Return the class to make a part of: the strict one where `JAXKV_STRICT` is set.

    Raises:
        RuntimeError: The variable was set only after jaxkv was imported.
    """
    if not is_strict():
        return cls
    if not substitutes:
        raise RuntimeError(
            "JAXKV_STRICT was set after jaxkv was imported, without its strict parts: "
            "set it before, or import jaxkv.strict."
        )
    return substitutes.get(cls, cls)


def parse_bytes(size: str | SupportsIndex) -> int:
    """Parse a size such as ``64MiB``, ``1.5 GB`` or ``4096``.

    Args:
        size: A number with a unit (of 1024 as in ``MiB`` or of 1000 as in ``MB``), or
            bytes as a number without a unit or an int.

    Returns:
        Bytes, at least 1. A fraction of a byte is dropped.

    Raises:
        ValueError: `size` is not a size, or less than one byte.

    >>> parse_bytes("64MiB")
    67108864
    >>> parse_bytes(4096)
    4096
    """
    num_bytes = _parse_text(size) if isinstance(size, str) else _parse_int(size)
    if num_bytes < 1:
        raise ValueError(
            f"{shown(size)} must be a size such as 64MiB, 1GiB or a number of bytes"
        )
    return num_bytes


def check_whole(
    least: int | None, most: int | None = None, /, **values: object
) -> None:
    """Refuse what is no whole number from `least` on, or above `most`.

    Args:
        least: The smallest that will do; None for any.
        most: The largest; None for any.
        values: The numbers, by the names that the caller knows them by.

    Raises:
        ValueError: One is another kind of value, or less, or more.

    >>> check_whole(1, num_blocks=8)
    >>> check_whole(1, num_blocks=8.0)
    Traceback (most recent call last):
    ValueError: num_blocks=8.0 must be a whole number from 1 on.
    """
    for name, value in values.items():
        number = whole(value)
        if number is None:
            start = "" if least is None else f" from {least} on"
            raise ValueError(f"{name}={shown(value)} must be a whole number{start}.")
        if least is not None and number < least:
            raise ValueError(f"{name}={shown(value)} must be at least {least}.")
        if most is not None and number > most:
            raise ValueError(f"{name}={shown(value)} must be at most {most}.")


def whole(value: object) -> int | None:
    """Read any kind of int, which a flag is not; None for other values."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # An array of several numbers.
        return None


def gib(num_bytes: int) -> str:
    """Format bytes in GiB, for messages.

    >>> gib(3 << 29)
    '1.50 GiB'
    """
    return f"{num_bytes / 2**30:.2f} GiB"


def size_text(num_bytes: int, space: str = " ") -> str:
    """Format bytes in the largest unit that gives a whole number.

    >>> size_text(64 << 10), size_text(1536 << 10, ""), size_text(1000)
    ('64 KiB', '1536KiB', '1000 bytes')
    """
    for shift, unit in _BINARY_UNITS:
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{space}{unit}"
    return f"{num_bytes} bytes"


def rounded_size(num_bytes: float) -> str:
    """Format bytes in the largest unit that leaves at least 1, with three digits.

    >>> rounded_size(3 << 29), rounded_size(154664960), rounded_size(1000)
    ('1.5 GiB', '148 MiB', '1,000 B')
    """
    for shift, unit in _BINARY_UNITS:
        if num_bytes >= 1 << shift:
            return f"{three_digits(num_bytes / (1 << shift))} {unit}"
    return f"{num_bytes:,.0f} B"


def three_digits(value: float) -> str:
    """Format a number with three digits, or all of a large one.

    >>> three_digits(25.0), three_digits(0.1234), three_digits(12345.6)
    ('25', '0.123', '12,346')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_text(seconds: float) -> str:
    """Format seconds.

    >>> time_text(0.0), time_text(0.00021), time_text(0.1234), time_text(12.34)
    ('0 s', '0.21 ms', '123 ms', '12.3 s')
    """
    if not seconds:
        return "0 s"
    if seconds < 0.9995:
        return f"{three_digits(1e3 * seconds)} ms"
    return f"{three_digits(seconds)} s"


def percent_text(part: float, whole: float) -> str:
    """Format a share in percent.

    >>> percent_text(1, 8), percent_text(0, 0)
    ('12.5%', '0.0%')
    """
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def _parse_text(text: str) -> int:
    """Parse a size; 0 if it is malformed."""
    match = re.fullmatch(
        r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", text.strip().lower()
    )
    if not match or match[2] not in _UNITS:
        return 0
    # Not a float: it would round sizes of more than 53 bits.
    return int(fractions.Fraction(match[1]) * _UNITS[match[2]])


def _parse_int(number: SupportsIndex) -> int:
    """Convert any kind of int; 0 if it is not one."""
    try:
        return 0 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return 0


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Return the known name most like a word; None if none is like it.

    >>> nearest("lur", ["lru", "arc"])
    'lru'
    >>> nearest("lfu", ["lru", "arc"])  # It is no misspelt lru.
    """
    # What is much longer is like none, and would take long to compare.
    if len(word) > 4 * max(map(len, known), default=0):
        return None
    near = difflib.get_close_matches(word, known)
    return next((name for name in near if _may_be_meant(word, name)), None)


def _may_be_meant(word: str, name: str) -> bool:
    """Whether a word that is like a name may be the name misspelt.

    One letter makes another name of a short one, as of lfu and lru, int4 and int8: then
    letters may only be missing, too many or in another order.
    """
    if min(len(word), len(name)) > _MOST_SHORT:
        return True
    own, meant = Counter(word), Counter(name)
    return own <= meant or meant <= own


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Suggest the known name most like a word, or list all names.

    >>> did_you_mean("lur", ["lru", "arc"])
    'did you mean lru?'
    """
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"choose from {', '.join(known)}"


def shown(value: object) -> str:
    """Write a value for a message: on one line, and cut if it is long.

    >>> shown("lru"), shown("a" * 1000)[:60]
    ("'lru'", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaa")
    """
    if isinstance(value, str | bytes) and len(value) > 2 * _MOST_SHOWN:
        # Before each of its characters is quoted.
        text = f"{value[:_MOST_SHOWN]!r}...{value[-_MOST_SHOWN:]!r}"
    else:
        try:
            text = repr(value)
        # It is nested too deeply, an int of more digits than Python writes, or of a
        # class that cannot be written.
        except Exception:
            text = f"<{type(value).__name__}>"
    return _cut(one_line(text))


def one_line(text: str) -> str:
    """Write a text in one line, what cannot be printed being escaped."""
    line = " ".join(text.splitlines())
    if line.isprintable():
        return line
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in line
    )


def read_file(path: str, max_bytes: int) -> bytes | None:
    """Read a file up to a size; None if the path is no plain file.

    A pipe would keep its reader waiting, and a device has no end.

    Raises:
        OSError: The file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(max_bytes)


def shown_name(name: object) -> str:
    """Write a name for a message: as it is, if that can be read."""
    is_plain = isinstance(name, str) and name.isprintable()
    return _cut(str(name)) if is_plain else shown(name)


def _cut(text: str) -> str:
    """Leave the middle of a long text out."""
    if len(text) <= _MOST_SHOWN:
        return text
    half = _MOST_SHOWN // 2
    return f"{text[:half]}...{text[-half:]}"


class Resource(abc.ABC):
    """Closed at the end of a ``with`` statement, also after an exception."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release what is held; no calls after this."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
