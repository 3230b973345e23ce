"""A request's wish to keep its blocks longer than others."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from jaxkv._util import hint, shown
from jaxkv.policies.retained import MAX_HALVINGS, MAX_PRIORITY

_MAX_S = 2_000_000
"""Times on the array side have 32 bits of milliseconds, and two are compared."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Keep blocks longer than others: by a priority that passes.

    While it lasts, blocks are evicted after blocks of a lower priority; ordinary ones
    have 0. Nothing is pinned: where the others do not suffice, they are evicted all the
    same. In the spirit of TensorRT-LLM's `KvCacheRetentionConfig`.

    Attributes:
        priority: From 0 to 99.
        half_life_s: Seconds after which the priority has halved, rounded down; None if
            it does not. After 2,000,000 s (23 days) nothing is left in any case.
        ttl_s: Seconds after which nothing is left of it; None for no such time. One of
            the two is needed.
        num_tokens: Tokens of a request, from the first on, whose blocks get the
            priority, such as its system prompt; None for all.

    Raises:
        ValueError: If a value is out of range, or neither time is given.

    Example:
        >>> Retention(priority=80, half_life_s=600)
        Retention(priority=80, half_life_s=600, ttl_s=None, num_tokens=None)
        >>> Retention(priority=100, ttl_s=60)
        Traceback (most recent call last):
        ValueError: priority=100 must be a whole number from 0 to 99.
    """

    priority: int = 50
    half_life_s: float | None = None
    ttl_s: float | None = None
    num_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= _whole(self.priority) <= MAX_PRIORITY:
            raise ValueError(
                f"priority={shown(self.priority)} must be a whole number from 0 to "
                f"{MAX_PRIORITY}."
            )
        for name in ("half_life_s", "ttl_s"):
            if not _is_time(getattr(self, name)):
                raise ValueError(
                    f"{name}={shown(getattr(self, name))} must be a number of seconds "
                    f"from 0.001 to {_MAX_S}, or None."
                )
        if self.half_life_s is None and self.ttl_s is None:
            raise ValueError(
                "half_life_s=None and ttl_s=None: one must be a number of seconds, as "
                "no priority lasts for ever."
            )
        if self.num_tokens is not None and _whole(self.num_tokens) < 0:
            raise ValueError(
                f"num_tokens={shown(self.num_tokens)} must be a whole number from 0, "
                "or None."
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Retention:
        """Make one of keys and values, such as JSON has.

        Raises:
            ValueError: If it is no mapping, a key is unknown, or as for the class.

        Example:
            >>> Retention.of({"priority": 80, "ttl_s": 60}).ttl_s
            60
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, Mapping):
            raise ValueError(f"{shown(values)} must have keys, of {names}.")
        for name in values:
            if name not in names:
                near = hint(str(name), names) or "."
                raise ValueError(f"{shown(name)} must be one of {names}{near}")
        return cls(**values)

    @property
    def half_life_ms(self) -> int:
        """The half-life, 0 for none."""
        return round(1000 * (self.half_life_s or 0))

    @property
    def ttl_ms(self) -> int:
        """The time to live, 0 for none; halvings end after `_MAX_S`, too."""
        max_ms = 1000 * _MAX_S
        if self.ttl_s is None and MAX_HALVINGS * self.half_life_ms > max_ms:
            return max_ms
        return round(1000 * (self.ttl_s or 0))

    @property
    def lifetime_ms(self) -> int:
        """After how long nothing is left of it."""
        times = self.ttl_ms, MAX_HALVINGS * self.half_life_ms
        return min(time_ms for time_ms in times if time_ms)


def check_retention(retention: object) -> None:
    """Raise TypeError unless it is a `Retention` or None."""
    if retention is not None and not isinstance(retention, Retention):
        raise TypeError(
            f"retention={shown(retention)} must be a jaxkv.Retention, or None."
        )


def _whole(value: Any) -> int:
    """Read a whole number; -1 if it is none."""
    if isinstance(value, bool):
        return -1
    try:
        return operator.index(value)
    except TypeError:
        return -1


def _is_time(value: Any) -> bool:
    if value is None:
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0.001 <= value <= _MAX_S
