"""Sizes in messages and settings, hints for misspelt names, closable resources."""

from __future__ import annotations

import abc
import difflib
import fractions
import operator
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, SupportsIndex, TypeVar

# A message shows this many characters of a value or name.
_MAX_SHOWN = 100
_MAX_SHORT = 4  # In a name of so few letters each one counts.

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
"""The words for flags in the environment, in lower case."""

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
    """Parse a size such as ``64MiB``, ``1.5 GB`` or ``4096`` into bytes.

    A fraction of a byte is dropped.

    Raises:
        ValueError: `size` is not a size, or less than one byte.

    >>> parse_bytes("64MiB")
    67108864
    >>> parse_bytes(4096)
    4096
    """
    num_bytes = _parse_text(size) if isinstance(size, str) else whole(size)
    if not num_bytes or num_bytes < 1:
        raise ValueError(
            f"{shown(size)} must be a size such as 64MiB, 1GiB or a number of bytes"
        )
    return num_bytes


def check_whole(
    minimum: int | None, maximum: int | None = None, /, **values: object
) -> None:
    """Raise ValueError unless all values are whole numbers within bounds.

    >>> check_whole(1, num_blocks=8)
    >>> check_whole(1, num_blocks=8.0)
    Traceback (most recent call last):
    ValueError: num_blocks=8.0 must be a whole number from 1 on.
    """
    for name, value in values.items():
        number = whole(value)
        if number is None:
            start = "" if minimum is None else f" from {minimum} on"
            raise ValueError(f"{name}={shown(value)} must be a whole number{start}.")
        if minimum is not None and number < minimum:
            raise ValueError(f"{name}={shown(value)} must be at least {minimum}.")
        if maximum is not None and number > maximum:
            raise ValueError(f"{name}={shown(value)} must be at most {maximum}.")


def whole(value: object) -> int | None:
    """Convert any kind of int; None for other values, flags included."""
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
    # A float would round sizes of more than 53 bits.
    return int(fractions.Fraction(match[1]) * _UNITS[match[2]])


def nearest(word: str, names: Sequence[str]) -> str | None:
    """Return the name most like a word; None if none is.

    >>> nearest("lur", ["lru", "arc"])
    'lru'
    >>> nearest("lfu", ["lru", "arc"])  # Not a misspelt lru.
    """
    # A much longer word is like none of them, and would take long to compare.
    if len(word) > 4 * max(map(len, names), default=0):
        return None
    near = difflib.get_close_matches(word, names)
    return next((name for name in near if _may_be_meant(word, name)), None)


def _may_be_meant(word: str, name: str) -> bool:
    """Return whether a word that is like a name may be the name misspelt.

    Short names may differ in one letter, such as lfu and lru, or int4 and int8. So
    there letters may only be missing, superfluous or in another order.
    """
    if min(len(word), len(name)) > _MAX_SHORT:
        return True
    letters, meant = Counter(word), Counter(name)
    return letters <= meant or meant <= letters


def hint(word: str, names: Sequence[str]) -> str:
    """Return ": did you mean NAME?" for the name most like a word, or "".

    >>> hint("lur", ["lru", "arc"])
    ': did you mean lru?'
    """
    near = nearest(word, names)
    return f": did you mean {near}?" if near else ""


def did_you_mean(
    word: str, names: Sequence[str], spell: Callable[[str], str] = str
) -> str:
    """Suggest the name most like a word, or list all names, as `spell` writes them.

    >>> did_you_mean("lur", ["lru", "arc"], str.upper)
    'did you mean LRU?'
    """
    near = nearest(word, names)
    if near:
        return f"did you mean {spell(near)}?"
    return f"choose from {', '.join(map(spell, names))}"


def shown(value: object) -> str:
    """Write a value for a message: in one line, and cut if it is long.

    >>> shown("lru"), shown("a" * 1000)[:60]
    ("'lru'", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaa")
    """
    if isinstance(value, str | bytes) and len(value) > 2 * _MAX_SHOWN:
        # Cut before each of its characters is quoted.
        text = f"{value[:_MAX_SHOWN]!r}...{value[-_MAX_SHOWN:]!r}"
    else:
        try:
            text = repr(value)
        # Such as too deep nesting, too many digits, or a class with a faulty `repr`.
        except Exception:
            text = f"<{type(value).__name__}>"
    return _cut(one_line(text))


def one_line(text: str) -> str:
    """Write a text in one line, with unprintable characters escaped."""
    line = " ".join(text.splitlines())
    if line.isprintable():
        return line
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in line
    )


def read_file(path: str, max_bytes: int) -> bytes | None:
    """Read a file up to a size; None if the path is no plain file.

    A pipe would block its reader, and a device has no end.
    """
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(max_bytes)


def shown_name(name: object) -> str:
    """Write a name for a message, without quotes if it is printable."""
    is_plain = isinstance(name, str) and name.isprintable()
    return _cut(str(name)) if is_plain else shown(name)


def _cut(text: str) -> str:
    """Cut the middle of a long text."""
    if len(text) <= _MAX_SHOWN:
        return text
    half = _MAX_SHOWN // 2
    return f"{text[:half]}...{text[-half:]}"


class Resource(abc.ABC):
    """Closed at the end of a ``with`` statement, also after an exception."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources; no other call may follow."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
