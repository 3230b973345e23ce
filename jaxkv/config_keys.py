"""The keys of a configuration: what their values are, in Python and as text.

A key that may be None is written ``none`` as text, as in the environment. What is
refused is told with the value, with what would be right, and with the nearest name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

from jaxkv.names import nearest
from jaxkv.policies import policy_names
from jaxkv.transfer.codecs import Quantised
from jaxkv.transfer.kernels import MODES
from jaxkv.units import parse_bytes

Scope: TypeAlias = Literal[
    "engine", "scheduler", "engine, scheduler", "worker", "events", "metrics"
]
"""Which parts a key reaches: `TransferEngine`, `OffloadScheduler`, `OffloadWorker`, and
`EventPublisher` and `OffloadMetrics` of `jaxkv.observe`."""

PREFIX = "JAXKV_"
"""What the names of the environment's variables begin with."""

# Of the tests of this project, and no part of a configuration.
_TEST_PREFIX = "JAXKV_TEST_"

_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


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
        unit: Of its values; empty for names and flags.
        scope: Which parts it reaches.
        expected: What its values are, for messages; empty if they are names.
        check: Gives a Python value as it is kept; raises ValueError or TypeError.
        parse: Reads a text, which `check` is to see next; raises ValueError.
        may_be_none: Whether None is one of them.
        names: What there is, if its values are names.
    """

    unit: str
    scope: Scope
    expected: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str
    may_be_none: bool = False
    names: Callable[[], Sequence[str]] = tuple

    def kept(self, value: object) -> Any:
        """Give a value as it is kept.

        Raises:
            ValueError: It is none, with what would be right.
        """
        if value is None and self.may_be_none:
            return None
        try:
            return self.check(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(self._refusal(value)) from None

    def read(self, text: str) -> Any:
        """Give the value that a text stands for.

        Raises:
            ValueError: It stands for none, with what would be right.
        """
        text = text.strip()
        if self.may_be_none and text.lower() == "none":
            return None
        try:
            return self.check(self.parse(text))
        except (TypeError, ValueError):
            raise ValueError(self._refusal(text)) from None

    def _refusal(self, value: object) -> str:
        names = list(self.names())
        expected = f"one of {', '.join(names)}" if names else self.expected
        near = nearest(value.lower(), names) if isinstance(value, str) else None
        return (
            f"{value!r} must be {expected}"
            + (", or None" if self.may_be_none else "")
            + (f": did you mean {near}?" if near else "")
        )


def _size(scope: Scope, *, may_be_none: bool = False) -> Key:
    """Make a key for a size in bytes, such as ``"8GiB"``."""
    expected = "a size such as 64MiB, 1GiB or a number of bytes"
    return Key("bytes", scope, expected, parse_bytes, may_be_none=may_be_none)


def _number(
    unit: str,
    scope: Scope,
    least: int,
    *,
    most: int | None = None,
    may_be_none: bool = False,
) -> Key:
    """Make a key for a whole number from `least` on, perhaps up to `most`."""

    def check(value: Any) -> int:
        whole = operator.index(value)
        too_large = most is not None and whole > most
        if isinstance(value, bool) or whole < least or too_large:
            raise ValueError
        return whole

    expected = f"a whole number from {least}" + (f" to {most}" if most else "")
    return Key(unit, scope, expected, check, _parse_int, may_be_none)


def _seconds(scope: Scope, *, may_be_none: bool = False) -> Key:
    """Make a key for a time."""

    def check(value: Any) -> float:
        if isinstance(value, bool | str) or not 0 < value < math.inf:
            raise ValueError
        return float(value)

    return Key("s", scope, "a number of seconds above 0", check, float, may_be_none)


def _flag(scope: Scope) -> Key:
    """Make a key that is true or false."""

    def check(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return Key("", scope, "true or false", check, _parse_flag)


def _name(
    scope: Scope, names: Callable[[], Sequence[str]], *, may_be_none: bool = False
) -> Key:
    """Make a key for one of several names."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in names():
            raise ValueError
        return value

    return Key("", scope, "", check, may_be_none=may_be_none, names=names)


def _text(scope: Scope, expected: str, pattern: str, *, may_be_none: bool) -> Key:
    """Make a key for a text of a pattern."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError
        return value

    return Key("", scope, expected, check, may_be_none=may_be_none)


def _address(scope: Scope) -> Key:
    """Make a key for an address of ZeroMQ."""
    expected = "an address such as tcp://127.0.0.1:5557 or ipc:///run/kv"
    pattern = r"tcp://\S+:(\*|[0-9]{1,5})|ipc://\S+"
    return _text(scope, expected, pattern, may_be_none=True)


def _parse_int(text: str) -> int:
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise ValueError
    return int(text)


def _parse_flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError
    return _FLAGS[text.lower()]


KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "host_bytes": _size("engine", may_be_none=True),
        "num_host_blocks": _number(
            "host blocks", "engine, scheduler", 1, may_be_none=True
        ),
        "blocks_per_host_block": _number("device blocks", "engine, scheduler", 1),
        "cache_policy": _name("scheduler", policy_names),
        "mode": _name("scheduler", lambda: ("eager", "lazy")),
        "max_num_batched_tokens": _number("tokens", "scheduler", 1),
        "store_threshold": _number("requests", "scheduler", 0),
        "prompt_only": _flag("scheduler"),
        "max_offload_tokens": _number("tokens", "scheduler", 1, may_be_none=True),
        "delay_shared_loads": _flag("scheduler"),
        "max_blocks_in_flight": _number(
            "device blocks", "scheduler", 1, may_be_none=True
        ),
        "gate": _flag("scheduler"),
        "copy_on_device": _flag("scheduler"),
        "flush_on_preemption": _flag("scheduler"),
        "remember_losses": _number("host blocks", "scheduler", 0),
        "world_size": _number("workers", "scheduler", 1),
        "enable_events": _flag("scheduler"),
        "transfer_mode": _name("engine", lambda: MODES, may_be_none=True),
        "staging_bytes": _size("engine"),
        "extent_bytes": _size("engine", may_be_none=True),
        "layer_groups": _number("parts", "engine", 1),
        "compression": _name("engine", lambda: get_args(Quantised), may_be_none=True),
        "deadline_s": _seconds("worker", may_be_none=True),
        "report_after_steps": _number("steps", "worker", 1, may_be_none=True),
        "check_plans": _flag("worker"),
        "agreement_timeout_s": _seconds("worker"),
        "events_endpoint": _address("events"),
        "events_replay_endpoint": _address("events"),
        "events_topic": _text("events", "a text", "(?s:.*)", may_be_none=False),
        "metrics_port": _number("", "metrics", 0, most=65535, may_be_none=True),
        "metrics_address": _text(
            "metrics", "an address such as 127.0.0.1", r"\S+", may_be_none=False
        ),
    }
)
"""All keys; docs/configuration.md says what each is for."""


def variable_of(key: str) -> str:
    """Name the variable of the environment that sets a key.

    >>> variable_of("host_bytes")
    'JAXKV_HOST_BYTES'
    """
    return PREFIX + key.upper()


def unknown(
    given: Iterable[object], kind: str, spell: Callable[[str], str] = str
) -> list[str]:
    """Say of what names no key what it may have been meant to be.

    Args:
        given: What names keys.
        kind: What to call one of them.
        spell: How they spell a key.
    """
    known = [spell(key) for key in KEYS]
    faults = []
    for word in given:
        if word not in known:
            plain = str(word).lower().removeprefix(PREFIX.lower())
            near = nearest(plain, list(KEYS))
            hint = (
                f"did you mean {spell(near)}?"
                if near
                else f"there is {', '.join(known)}"
            )
            faults.append(f"unknown {kind} {word}: {hint}")
    return faults


def variables_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that are meant for a configuration, in order."""
    return {
        variable: environ[variable]
        for variable in sorted(environ)
        if variable.startswith(PREFIX) and not variable.startswith(_TEST_PREFIX)
    }


def read_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Read the values of keys from variables.

    Returns:
        The values, and what is wrong with the variables.
    """
    variables = variables_of(environ)
    faults = unknown(variables, "variable", variable_of)
    values = {}
    for name, key in KEYS.items():
        text = variables.get(variable_of(name), "").strip()
        try:
            if text:
                values[name] = key.read(text)
        except ValueError as error:
            faults.append(f"{variable_of(name)}={error}")
    return values, faults


def with_variables(fault: str, used: Set[str]) -> str:
    """Say of which of its values the environment is the source."""
    words = [word for word in KEYS if word in used and f"{word}=" in fault]
    named = [variable_of(word) for word in words]
    return f"{fault} ({', '.join(named)} in the environment)" if named else fault


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Read a JSON object; bytes are taken for UTF-8.

    Raises:
        ConfigError: It is none, or has a key more than once.
    """
    try:
        values = json.loads(text, object_pairs_hook=_distinct)
    except ConfigError:
        raise
    except ValueError as error:  # of the syntax, or of the encoding
        raise ConfigError([f"this is not JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{values!r} must be a JSON object of keys and values"])
    return cast(dict[str, Any], values)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [key_name for key_name, _ in pairs]
        twice = sorted({word for word in names if names.count(word) > 1})
        raise ConfigError([f"key {word} is there more than once" for word in twice])
    return values
