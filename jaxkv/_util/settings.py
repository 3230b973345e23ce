"""Settings: each is declared once, as a field of a `Settings` dataclass.

The field's `Key` determines its checks, messages, docstring and row in the tables of
the documentation. A `Fault` has the names of its settings as data, so that a caller can
replace a name, or add the environment variable.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import re
import string
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from jaxkv._util import FLAGS, hint, parse_bytes, shown, size_text, whole

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
"""The parts that use a key: `TransferEngine`, `OffloadScheduler`, `OffloadWorker`, the
store (`open_storage`), `EventPublisher` and `OffloadMetrics` of `jaxkv.observe`,
`TraceRecorder`, and the strict parts of `jaxkv.strict`."""

# Values of these types, passed by mistake instead of a text, may contain a secret.
_MAY_HOLD_TEXT = (bytes, bytearray, os.PathLike, Sequence, Mapping, Set)


class Fault(str):
    """A sentence about settings, with their names as data.

    `text` has ``{name}`` for the name of a setting, and ``{}`` for each of `values`.

    >>> Fault("{mode}={} needs {storage}.", "x").renamed({"mode": "how"})
    'how=x needs storage.'
    """

    text: str
    values: tuple[object, ...]
    names: tuple[str, ...]  # As they occur in `text`.

    def __new__(cls, text: str, *values: object) -> Fault:
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name]
        spelled = dict(zip(names, names, strict=True))
        fault = super().__new__(cls, text.format(*values, **spelled))
        fault.text, fault.values, fault.names = text, values, tuple(names)
        return fault

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.text, *self.values

    def renamed(self, names: Mapping[str, str]) -> str:
        """Return the sentence with other names of settings."""
        spelled = {name: names.get(name, name) for name in self.names}
        return self.text.format(*self.values, **spelled)


def exclusion(
    first: str, value: object, second: str, other: object, reason: str
) -> Fault:
    """Return the fault that two settings exclude one another."""
    text = f"{{{first}}}={{}} and {{{second}}}={{}} exclude one another: {{}}"
    return Fault(text, value, other, reason)


class ConfigError(ValueError):
    """A configuration with faults.

    Attributes:
        faults: A sentence for each fault.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(
            fault if isinstance(fault, Fault) else Fault("{}", fault)
            for fault in faults
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.faults,)


@dataclasses.dataclass(frozen=True)
class Key:
    """The description of a setting and of its valid values."""

    scope: Scope
    about: str  # Description in Markdown.
    unit: str  # Unit of the values; empty for names and flags.
    expected: str  # Describes valid values in messages; empty if they are names.
    check: Callable[[Any], Any]  # Converts a value; raises ValueError or TypeError.
    parse: Callable[[str], Any] = str  # Converts a text for `check`.
    may_be_none: bool = False  # As text: ``none``.
    names: Callable[[], Sequence[str]] = tuple  # The valid values, if they are names.
    is_secret: bool = False  # Whether messages hide the value.
    show: Callable[[str], str] = str  # Removes secrets from a value.

    def read(self, value: Any, *, is_text: bool = False) -> Any:
        """Convert a value from Python or JSON, or a text from the environment."""
        if is_text:
            value = value.strip()
        is_none = value.lower() == "none" if is_text else value is None
        if is_none and self.may_be_none:
            return None
        try:
            return self.check(self.parse(value) if is_text else value)
        except (TypeError, ValueError, LookupError, OverflowError, RecursionError):
            names = list(self.names())
            expected = f"one of {', '.join(names)}" if names else self.expected
            or_none = ", or None" if self.may_be_none else ""
            closest = hint(value.lower(), names) if isinstance(value, str) else ""
            raise ValueError(
                f"{self.shown(value)} must be {expected}{or_none}{closest}"
            ) from None

    def shown(self, value: object) -> str:
        """Format a value for a message, without secrets."""
        if isinstance(value, str):
            return "..." if self.is_secret else shown(self.show(value))
        has_secrets = self.is_secret or self.show is not str
        if has_secrets and isinstance(value, _MAY_HOLD_TEXT):
            return f"<{type(value).__name__}>"
        return shown(value)


_T = TypeVar("_T")


def declare(default: _T, key: Key) -> _T:
    """Declare a field, typed as its default; it may be None if the default is None."""
    if default is None:
        key = dataclasses.replace(key, may_be_none=True)
    return dataclasses.field(
        default=default, repr=not key.is_secret, metadata={"key": key}
    )


def size(default: _T, scope: Scope, about: str, *, minimum: int = 1) -> _T:
    """Declare a size in bytes, such as ``"8GiB"``."""

    def check(value: Any) -> int:
        num_bytes = parse_bytes(value)
        if num_bytes < minimum:
            raise ValueError
        return num_bytes

    expected = "a size such as 64MiB, 1GiB or a number of bytes"
    if minimum > 1:
        expected += f", at least {minimum}"
    return declare(default, Key(scope, about, "bytes", expected, check))


def number(
    default: _T,
    scope: Scope,
    about: str,
    *,
    unit: str = "",
    minimum: int = 1,
    maximum: int | None = None,
) -> _T:
    """Declare a whole number."""

    def check(value: Any) -> int:
        num = whole(value)
        if num is None or num < minimum or (maximum is not None and num > maximum):
            raise ValueError
        return num

    limit = f" to {maximum}" if maximum else ""
    expected = f"a whole number from {minimum}{limit}"
    return declare(default, Key(scope, about, unit, expected, check, _parse_int))


def seconds(
    default: _T,
    scope: Scope,
    about: str,
    *,
    or_none: bool = False,
    or_zero: bool = False,
) -> _T:
    """Declare a duration."""

    def check(value: Any) -> float:
        is_valid = not isinstance(value, bool | str) and 0 <= value < math.inf
        if not is_valid or not (value or or_zero):
            raise ValueError
        return float(value)

    expected = f"a number of seconds {'from 0 on' if or_zero else 'above 0'}"
    return declare(default, Key(scope, about, "s", expected, check, float, or_none))


def flag(default: _T, scope: Scope, about: str) -> _T:
    """Declare a flag, true or false."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    def parse(text: str) -> bool:
        return FLAGS[text.lower()]

    return declare(default, Key(scope, about, "", "true or false", check, parse))


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


class Text(NamedTuple):
    """A kind of text, by a pattern. Its group `port`, if any, must be below 65536."""

    expected: str = "a text of valid Unicode"
    pattern: str = "(?s:.*)"


_ANY_TEXT = Text()


def text(
    default: _T,
    scope: Scope,
    about: str,
    kind: Text = _ANY_TEXT,
    show: Callable[[str], str] = str,
) -> _T:
    """Declare a text."""

    def check(value: Any) -> str:
        match = re.fullmatch(kind.pattern, value)
        if not match or int(match.groupdict().get("port") or 0) > 65535:
            raise ValueError
        value.encode()  # Refuse lone surrogates, which cannot be sent.
        return cast(str, value)

    return declare(default, Key(scope, about, "", kind.expected, check, show=show))


def same(cls: type[Settings], key_name: str) -> Any:
    """Declare the same field as another `Settings` class."""
    field = cls.__dataclass_fields__[key_name]
    return declare(field.default, field.metadata["key"])


def _parse_int(text: str) -> int:
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that are checked and converted at construction."""

    def __post_init__(self) -> None:
        faults = []
        for setting, key in keys_of(type(self)).items():
            try:
                value = key.read(getattr(self, setting))
            except ValueError as error:
                faults.append(Fault(f"{{{setting}}}={{}}", error))
            else:
                object.__setattr__(self, setting, value)
        faults = faults or list(self._contradictions())
        if faults:
            raise ConfigError(faults)

    def _contradictions(self) -> Iterator[Fault]:
        """Yield a fault for each contradiction between valid values."""
        yield from ()


def keys_of(cls: type[Settings]) -> dict[str, Key]:
    """Return the keys of settings by name, in the order of the fields."""
    return {field.name: field.metadata["key"] for field in dataclasses.fields(cls)}


_Cls = TypeVar("_Cls", bound=type[Settings])


def documented(cls: _Cls) -> _Cls:
    """Add the description of each setting to the docstring of its class."""
    rows = (
        textwrap.fill(f"{setting}: {key.about}", 80, subsequent_indent="    ")
        for setting, key in keys_of(cls).items()
    )
    attributes = textwrap.indent("\n".join(rows), "    ").replace("`null`", "None")
    cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{attributes}"
    return cls


def table_of(
    rows: Mapping[str, tuple[Key, object, str]], *, has_scope: bool = True
) -> str:
    """Return a table of settings for the documentation.

    A row has a setting's key, its default, and a description, "" for the key's. With
    `has_scope`, settings are grouped by the last part that uses them.
    """
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    groups: dict[str, list[str]] = {}
    for setting, (key, default, about) in rows.items():
        unit = f", {key.unit}" if key.unit else ""
        if key.unit == "bytes" and isinstance(default, int):
            default, unit = size_text(default, ""), ""
        group = groups.setdefault(key.scope.split(", ")[-1] if has_scope else "", [])
        shown_default = f"`{json.dumps(default)}`{unit}"
        group.append(f"| `{setting}` | {shown_default} | {about or key.about} |")
    for scope, group in groups.items():
        lines += [f"| **{scope.capitalize()}** |"] * has_scope + group
    return "\n".join(lines)
