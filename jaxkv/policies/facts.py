"""The facts about a request that a policy may use: a vector of eight numbers.

`Policy.note` gets them as i32[8], `NativePolicy.note` as eight ints. To add a fact, add
an index here, set it in `jaxkv/tiers/index.py`, and read it in the policy.
"""

from __future__ import annotations

from typing import TypeAlias

BEGIN, FINISH, RETAIN = range(3)
"""Events of a note: a request begins, has finished, or gives its blocks a priority."""

NOW_MS, NUM_TOKENS, NUM_OUTPUT, STOP, MARK, PRIORITY, HALF_LIFE_MS, TTL_MS = range(8)
"""Indices of the facts. Facts that an event does not have are 0.

NOW_MS: Milliseconds of a clock with any origin, modulo 2**32; for `RETAIN`, the time
    when the priority was given.
NUM_TOKENS: For `BEGIN`: the request's tokens so far.
NUM_OUTPUT, STOP: For `FINISH`: generated tokens, -1 if unknown; index in `types.STOPS`.
MARK: For `FINISH`: the `mark` that the policy returned for `BEGIN`.
PRIORITY, HALF_LIFE_MS, TTL_MS: For `RETAIN`: see `jaxkv.policies.retained`.
"""

Facts: TypeAlias = tuple[int, int, int, int, int, int, int, int]


def begun(now_ms: int, num_tokens: int) -> Facts:
    """Return the facts of `BEGIN`."""
    return now_ms, num_tokens, 0, 0, 0, 0, 0, 0


def finished(now_ms: int, num_output: int, stop: int, mark: int) -> Facts:
    """Return the facts of `FINISH`."""
    return now_ms, 0, num_output, stop, mark, 0, 0, 0


def retained(now_ms: int, priority: int, half_life_ms: int, ttl_ms: int) -> Facts:
    """Return the facts of `RETAIN`."""
    return now_ms, 0, 0, 0, 0, priority, half_life_ms, ttl_ms
