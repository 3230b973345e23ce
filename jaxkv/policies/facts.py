"""The facts about a request that a policy may use: a vector of nine numbers.

`Policy.note` gets them as i32[9], `NativePolicy.note` as nine ints. To add a fact, add
an index here, set it in `jaxkv/tiers/index.py`, and read it in the policy.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jaxkv._util import shown

BEGIN, FINISH, RETAIN = range(3)
"""Events of a note: a request begins, has finished, or gives its blocks a priority."""

NOW_MS, NUM_TOKENS, NUM_OUTPUT, STOP, MARK = range(5)
PRIORITY, HALF_LIFE_MS, TTL_MS, KIND = range(5, 9)
"""Indices of the facts. Facts that an event does not have are 0.

NOW_MS: Milliseconds of a clock with any origin, modulo 2**32; for `RETAIN`, the time
    when the priority was given.
NUM_TOKENS: For `BEGIN`: the request's tokens so far.
NUM_OUTPUT, STOP: For `FINISH`: generated tokens, -1 if unknown; index in `types.STOPS`.
MARK: For `FINISH`: the `mark` that the policy returned for `BEGIN`.
PRIORITY, HALF_LIFE_MS, TTL_MS: For `RETAIN`: see `jaxkv.policies.retained`.
KIND: For `BEGIN`: the request's kind plus 1; 0 if it has none.
"""

MAX_KIND = 255
"""The highest `kind` of a request: an opaque number that a caller gives to requests
whose prefixes are used again alike, such as that of a route, a tenant or a tool."""

Facts: TypeAlias = tuple[int, int, int, int, int, int, int, int, int]


def check_kind(kind: Any) -> int | None:
    """Return a request's kind or None; raise ValueError if it is neither."""
    if kind is not None and not (type(kind) is int and 0 <= kind <= MAX_KIND):
        raise ValueError(
            f"kind={shown(kind)} must be a whole number from 0 to {MAX_KIND}, or None."
        )
    number: int | None = kind
    return number


def begun(now_ms: int, num_tokens: int, kind: int | None = None) -> Facts:
    """Return the facts of `BEGIN`."""
    return now_ms, num_tokens, 0, 0, 0, 0, 0, 0, 0 if kind is None else kind + 1


def finished(now_ms: int, num_output: int, stop: int, mark: int) -> Facts:
    """Return the facts of `FINISH`."""
    return now_ms, 0, num_output, stop, mark, 0, 0, 0, 0


def retained(now_ms: int, priority: int, half_life_ms: int, ttl_ms: int) -> Facts:
    """Return the facts of `RETAIN`."""
    return now_ms, 0, 0, 0, 0, priority, half_life_ms, ttl_ms, 0
