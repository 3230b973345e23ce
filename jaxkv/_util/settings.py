"""Settings: each is declared once, as a field of a `Settings` dataclass.

The field's `Key` says what its values are, in Python and as text, which parts they
reach and what they are for. Checks, messages, docstrings and the tables of the
documentation come from there. A dataclass may inherit the settings of others. A message
names a setting as ``name=value``, so that a caller that calls it by another name, such
as an environment's variable, can say so.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import operator
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, TypeAlias, TypeVar, cast

from jaxkv._util import FLAGS, nearest, parse_bytes, shown, size_text

Scope: TypeAlias = Literal[
    "engine",
    "scheduler",
    "engine, scheduler",
    "worker",
    "storage",
    "events",
    "metrics",
    "record",
    "strict",
]
"""Which parts a key reaches: `TransferEngine`, `OffloadScheduler`, `OffloadWorker`, the
store behind the host (`open_storage`), `EventPublisher` and `OffloadMetrics` of
`jaxkv.observe`, `TraceRecorder`, and the strict ones of `jaxkv.strict`."""


# In place of a text, these may have a secret in them.
_MAY_HOLD_TEXT = (bytes, bytearray, os.PathLike, Sequence, Mapping, Set)


class ConfigError(ValueError):
    """A configuration that cannot be right.

    Attributes:
        faults: What is wrong with it, each in a sentence.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


@dataclasses.dataclass(frozen=True)
class Key:
    """What a key of a configuration takes.

    Attributes:
        scope: Which parts it reaches.
        about: What it is for, in Markdown.
        unit: Of its values; empty for names and flags.
        expected: What its values are, for messages; empty if they are names.
        check: Gives a Python value as it is kept; raises ValueError or TypeError.
        parse: Reads a text, which `check` is to see next; raises ValueError.
        may_be_none: Whether None is one of them, as text ``none``.
        names: What there is, if its values are names.
        is_secret: Whether values are hidden in messages.
        show: Gives a value without its secrets.
    """

    scope: Scope
    about: str
    unit: str
    expected: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    may_be_none: bool = False
    names: Callable[[], Sequence[str]] = tuple
    is_secret: bool = False
    show: Callable[[str], str] = str

    def read(self, given: Any, *, is_text: bool = False) -> Any:
        """Give a value as it is kept.

        Args:
            given: From Python or JSON; or a text that stands for it.
            is_text: Whether it is the latter, as in the environment.

        Raises:
            ValueError: It is no such value, with what would be right.
        """
        if is_text:
            given = given.strip()
        is_none = given.lower() == "none" if is_text else given is None
        if is_none and self.may_be_none:
            return None
        try:
            return self.check(self.parse(given) if is_text else given)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise ValueError(self._refusal(given)) from None

    def shown(self, value: object) -> str:
        """Write a value for a message, without what must stay hidden."""
        if isinstance(value, str):
            return "..." if self.is_secret else shown(self.show(value))
        hides = self.is_secret or self.show is not str
        if hides and isinstance(value, _MAY_HOLD_TEXT):
            return f"<{type(value).__name__}>"
        return shown(value)

    def _refusal(self, value: object) -> str:
        names = list(self.names())
        expected = f"one of {', '.join(names)}" if names else self.expected
        near = nearest(value.lower(), names) if isinstance(value, str) else None
        return (
            f"{self.shown(value)} must be {expected}"
            + (", or None" if self.may_be_none else "")
            + (f": did you mean {near}?" if near else "")
        )


_T = TypeVar("_T")


def declare(default: _T, key: Key) -> _T:
    """Declare a field, which may be None if that is its default.

    As `dataclasses.field`, it says that it gives the default, for type checkers.
    """
    if default is None:
        key = dataclasses.replace(key, may_be_none=True)
    return dataclasses.field(
        default=default, repr=not key.is_secret, metadata={"key": key}
    )


def size(default: _T, scope: Scope, about: str, *, least: int = 1) -> _T:
    """Declare a size in bytes, such as ``"8GiB"``, from `least` on."""

    def check(value: Any) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes < least:
            raise ValueError
        return num_bytes

    expected = "a size such as 64MiB, 1GiB or a number of bytes"
    if least > 1:
        expected += f", at least {least}"
    return declare(default, Key(scope, about, "bytes", expected, check))


def number(
    default: _T,
    scope: Scope,
    about: str,
    *,
    unit: str,
    least: int,
    most: int | None = None,
) -> _T:
    """Declare a whole number from `least` on, perhaps up to `most`."""

    def check(value: Any) -> int:
        whole = operator.index(value)
        too_large = most is not None and whole > most
        if isinstance(value, bool) or whole < least or too_large:
            raise ValueError
        return whole

    expected = f"a whole number from {least}" + (f" to {most}" if most else "")
    return declare(default, Key(scope, about, unit, expected, check, _parse_int))


def seconds(
    default: _T,
    scope: Scope,
    about: str,
    *,
    or_none: bool = False,
    or_zero: bool = False,
) -> _T:
    """Declare a time."""

    def check(value: Any) -> float:
        is_right = not isinstance(value, bool | str) and 0 <= value < math.inf
        if not is_right or not (value or or_zero):
            raise ValueError
        return float(value)

    expected = f"a number of seconds {'from 0 on' if or_zero else 'above 0'}"
    return declare(default, Key(scope, about, "s", expected, check, float, or_none))


def flag(default: _T, scope: Scope, about: str) -> _T:
    """Declare what is true or false."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return declare(default, Key(scope, about, "", "true or false", check, _parse_flag))


def name(
    default: _T,
    scope: Scope,
    about: str,
    *,
    names: Callable[[], Sequence[str]],
) -> _T:
    """Declare one of several names."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names():
            raise ValueError
        return value

    return declare(default, Key(scope, about, "", "", check, names=names))


def text(
    default: _T,
    scope: Scope,
    about: str,
    *,
    expected: str = "a text of valid Unicode",
    pattern: str = "(?s:.*)",
    show: Callable[[str], str] = str,
) -> _T:
    """Declare a text of a pattern, whose group `port`, if any, is below 65536."""

    def check(value: Any) -> str:
        match = re.fullmatch(pattern, value)
        if not match or int(match.groupdict().get("port") or 0) > 65535:
            raise ValueError
        value.encode()  # Refuses a lone surrogate, which cannot be sent.
        return cast(str, value)

    return declare(default, Key(scope, about, "", expected, check, show=show))


def same(cls: type[Settings], word: str) -> Any:
    """Declare a field as other settings have it."""
    field = cls.__dataclass_fields__[word]
    return declare(field.default, field.metadata["key"])


def _parse_int(text: str) -> int:
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


def _parse_flag(text: str) -> bool:
    if text.lower() not in FLAGS:
        raise ValueError
    return FLAGS[text.lower()]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that are checked when they are made, and kept as their keys say.

    Raises:
        ConfigError: Values are wrong, with all that are; or do not go together.
    """

    def __post_init__(self) -> None:
        faults = []
        for word, key in keys_of(type(self)).items():
            try:
                value = key.read(getattr(self, word))
            except ValueError as error:
                faults.append(f"{word}={error}")
            else:
                object.__setattr__(self, word, value)
        faults = faults or list(self._contradictions())
        if faults:
            raise ConfigError(faults)

    def _contradictions(self) -> Iterator[str]:
        """Say which values, each right by itself, do not go together."""
        yield from ()


def keys_of(cls: type[Settings]) -> dict[str, Key]:
    """Give the keys of settings by name, in the order of the fields."""
    return {field.name: field.metadata["key"] for field in dataclasses.fields(cls)}


_Cls = TypeVar("_Cls", bound=type[Settings])


def documented(cls: _Cls) -> _Cls:
    """Add what each setting is to the docstring of its class."""
    rows = (
        textwrap.fill(f"{word}: {key.about}", 80, subsequent_indent="    ")
        for word, key in keys_of(cls).items()
    )
    attributes = textwrap.indent("\n".join(rows), "    ").replace("`null`", "None")
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{attributes}"
    return cls


def table_of(
    rows: Mapping[str, tuple[Key, object, str]], *, has_scope: bool = True
) -> str:
    """Write a table of settings for the documentation.

    Args:
        rows: For each name its key, its default, and what it does, in Markdown, where
            that is not what the key says.
        has_scope: Whether the settings of a part stand together, under its name. A
            setting that reaches several parts is with the last of them.
    """
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    groups: dict[str, list[str]] = {}
    for word, (key, default, about) in rows.items():
        unit = f", {key.unit}" if key.unit else ""
        if key.unit == "bytes" and isinstance(default, int):
            default, unit = size_text(default, ""), ""
        group = groups.setdefault(key.scope.split(", ")[-1] if has_scope else "", [])
        shown_default = f"`{json.dumps(default)}`{unit}"
        group.append(f"| `{word}` | {shown_default} | {about or key.about} |")
    for scope, group in groups.items():
        lines += [f"| **{scope.capitalize()}** |"] * has_scope + group
    return "\n".join(lines)
