"""Helpers for settings and messages (sizes, values, misspelt names), and `Resource`."""

from __future__ import annotations

import abc
import difflib
import fractions
import functools
import math
import numbers
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Self, SupportsIndex, TypeVar

_MAX_SHOWN = 100  # Characters of a value or name in a message.
_MAX_SHORT = 4  # Two valid names of so few letters may be close: int4 and int8.

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", start=1)},
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", start=1)},
}
# The shift of each unit, the largest first.
_BINARY_UNITS = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))

FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
"""The spellings of flags in the environment, in lower case."""

_Part = TypeVar("_Part")
_Made = TypeVar("_Made")
_Args = ParamSpec("_Args")

substitutes: dict[type, type] = {}
"""The strict class of each part; importing `jaxkv.strict` adds them."""


def is_strict() -> bool:
    """Return whether the environment variable `JAXKV_STRICT` is a true flag."""
    return FLAGS.get(os.environ.get("JAXKV_STRICT", "").lower(), False)


def strict_class(cls: type[_Part]) -> type[_Part]:
    """Return the class of a part, or its strict class if `JAXKV_STRICT` is set."""
    if not is_strict():
        return cls
    if not substitutes:
        raise RuntimeError(
            "JAXKV_STRICT was set after jaxkv was imported without its strict parts: "
            "set it before, or import jaxkv.strict."
        )
    return substitutes.get(cls, cls)


def parse_bytes(size: str | SupportsIndex) -> int:
    """Parse a size such as ``64MiB``, ``1.5 GB`` or ``4096`` into whole bytes."""
    if isinstance(size, str):
        pattern = r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)"
        match = re.fullmatch(pattern, size.strip().lower())
        unit = _UNITS.get(match[2], 0) if match else 0
        # A float would round sizes of more than 53 bits.
        num_bytes = int(fractions.Fraction(match[1]) * unit) if match else None
    else:
        num_bytes = whole(size)
    if not num_bytes or num_bytes < 1:
        raise ValueError(
            f"{shown(size)} must be a size such as 64MiB, 1GiB or a number of bytes"
        )
    return num_bytes


def check_whole(
    minimum: int | None, maximum: int | None = None, /, **values: object
) -> None:
    """Raise ValueError unless all values are whole numbers within bounds.

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


def check_type(kind: Any, expected: str, /, **values: object) -> None:
    """Raise TypeError unless all values are of a type, or of one of a union.

    >>> check_type(str | None, "a path or None", record=7)
    Traceback (most recent call last):
    TypeError: record=7 must be a path or None.
    """
    for name, value in values.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name}={shown(value)} must be {expected}.")


def check_seconds(**values: Any) -> None:
    """Raise ValueError unless all values are finite numbers above 0."""
    for name, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(
                f"{name}={shown(value)} must be a number of seconds above 0."
            )


def whole(value: object) -> int | None:
    """Convert an integer of any type; None for other values, and for bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # An array of several integers.
        return None


def gib(num_bytes: int) -> str:
    """Format bytes in GiB, as in ``1.50 GiB``."""
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
    """Format bytes with three digits, in the largest unit that they reach.

    >>> rounded_size(3 << 29), rounded_size(154664960), rounded_size(1000)
    ('1.5 GiB', '148 MiB', '1,000 B')
    """
    for shift, unit in _BINARY_UNITS:
        if num_bytes >= 1 << shift:
            return f"{three_digits(num_bytes / (1 << shift))} {unit}"
    return f"{num_bytes:,.0f} B"


def three_digits(value: float) -> str:
    """Format a number with three significant digits, or all digits before the point.

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


def nearest(word: str, names: Sequence[str]) -> str | None:
    """Return the name closest to a word; None if no name is close.

    >>> nearest("lur", ["lru", "arc"])
    'lru'
    >>> nearest("lfu", ["lru", "arc"])  # Not a misspelt lru.
    """
    # A much longer word is not close to any name, and the comparison would take long.
    if len(word) > 4 * max(map(len, names), default=0):
        return None
    for name in difflib.get_close_matches(word, names):
        # A misspelt short name may only omit, add or reorder letters.
        letters, valid_letters = Counter(word), Counter(name)
        is_long = min(len(word), len(name)) > _MAX_SHORT
        if is_long or letters <= valid_letters or valid_letters <= letters:
            return name
    return None


def hint(word: str, names: Sequence[str]) -> str:
    """Return ": did you mean NAME?" for the name closest to a word, or ""."""
    name = nearest(word, names)
    return f": did you mean {name}?" if name else ""


def did_you_mean(
    word: str, names: Sequence[str], spell: Callable[[str], str] = str
) -> str:
    """Suggest the name closest to a word, or list all names, formatted by `spell`."""
    if name := nearest(word, names):
        return f"did you mean {spell(name)}?"
    return f"choose from {', '.join(map(spell, names))}"


def shown(value: object) -> str:
    """Format a value for a message: in one line, truncated if it is long.

    >>> shown("lru"), shown("a" * 1000)[:60]
    ("'lru'", "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...aaaaaaa")
    """
    if isinstance(value, str | bytes) and len(value) > 2 * _MAX_SHOWN:
        # Truncate before `repr` escapes every character.
        text = f"{value[:_MAX_SHOWN]!r}...{value[-_MAX_SHOWN:]!r}"
    else:
        try:
            text = repr(value)
        except Exception:  # Nesting too deep, too many digits, or a faulty `__repr__`.
            text = f"<{type(value).__name__}>"
    return _cut(one_line(text))


def one_line(text: str) -> str:
    """Format a text in one line, with unprintable characters escaped."""
    line = " ".join(text.splitlines())
    if line.isprintable():
        return line
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in line
    )


def shown_name(name: object) -> str:
    """Format a name for a message, without quotes if it is printable."""
    is_plain = isinstance(name, str) and name.isprintable()
    return _cut(str(name)) if is_plain else shown(name)


def _cut(text: str) -> str:
    if len(text) <= _MAX_SHOWN:
        return text
    half = _MAX_SHOWN // 2
    return f"{text[:half]}...{text[-half:]}"


def kept(make: Callable[_Args, _Made]) -> Callable[_Args, _Made]:
    """Make a value once per arguments; `make` refuses those that are not hashable."""
    cached: Callable[..., _Made] = functools.cache(make)

    @functools.wraps(make)
    def make_or_get(*args: _Args.args, **named: _Args.kwargs) -> _Made:
        try:
            return cached(*args, **named)
        except TypeError:
            return make(*args, **named)

    return make_or_get


class Resource(abc.ABC):
    """A resource that a ``with`` statement closes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release all resources; no other call may follow."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
