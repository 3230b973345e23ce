"""Retention: a request's hint to keep its blocks longer than others."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from jaxkv._util import hint, shown
from jaxkv.policies.retained import MAX_HALVINGS, MAX_PRIORITY

_MAX_S = 2_000_000
"""Policies have times as 32-bit milliseconds, whose differences need the sign bit."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """A temporary priority, which keeps blocks longer than others.

    Blocks are evicted after all blocks of a lower priority; blocks without retention
    have priority 0. Nothing is pinned: if no blocks of a lower priority are left, they
    are evicted too.
    TensorRT-LLM's `KvCacheRetentionConfig` is similar.

    Attributes:
        priority: From 0 to 99.
        half_life_s: Seconds until the priority halves, rounded down; None for no
            decay. The priority is 0 after 2,000,000 s (23 days) at the latest.
        ttl_s: Seconds after which the priority is 0; None for no limit. `half_life_s`
            or `ttl_s` is required.
        num_tokens: Number of leading tokens whose blocks get the priority, such as a
            system prompt; None for all.

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
                "half_life_s=None and ttl_s=None: one must be a number of seconds, so "
                "that the priority ends."
            )
        if self.num_tokens is not None and _whole(self.num_tokens) < 0:
            raise ValueError(
                f"num_tokens={shown(self.num_tokens)} must be a whole number from 0, "
                "or None."
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Retention:
        """Return a retention from a mapping of its fields, such as a JSON object.

        Raises:
            ValueError: If it is not a mapping, or a key or a value is wrong.

        Example:
            >>> Retention.of({"priority": 80, "ttl_s": 60}).ttl_s
            60
        """
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, Mapping):
            raise ValueError(f"{shown(values)} must be a mapping, of {names}.")
        for name in values:
            if name not in names:
                end = hint(str(name), names) or "."
                raise ValueError(f"{shown(name)} must be one of {names}{end}")
        return cls(**values)

    @property
    def half_life_ms(self) -> int:
        """The half-life, 0 for none."""
        return round(1000 * (self.half_life_s or 0))

    @property
    def ttl_ms(self) -> int:
        """The time to live, 0 for none; it also ends a half-life decay at `_MAX_S`."""
        max_ms = 1000 * _MAX_S
        if self.ttl_s is None and MAX_HALVINGS * self.half_life_ms > max_ms:
            return max_ms
        return round(1000 * (self.ttl_s or 0))

    @property
    def lifetime_ms(self) -> int:
        """The time until the priority is 0."""
        times = self.ttl_ms, MAX_HALVINGS * self.half_life_ms
        return min(time_ms for time_ms in times if time_ms)


def check_retention(retention: object) -> None:
    """Raise TypeError unless it is a `Retention` or None."""
    if retention is not None and not isinstance(retention, Retention):
        raise TypeError(
            f"retention={shown(retention)} must be a jaxkv.Retention, or None."
        )


def _whole(value: Any) -> int:
    """Return a whole number as int; -1 if the value is not one."""
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
