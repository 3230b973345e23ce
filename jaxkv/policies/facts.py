"""The facts about a request that a policy may use: one row of numbers.

`Policy.note` gets them as i32[8], its native twin as eight ints. A new fact has its
place here; `jaxkv/tiers/index.py` writes it, and a policy reads it.
"""

from __future__ import annotations

from typing import TypeAlias

BEGIN, FINISH, RETAIN = range(3)
"""Kinds of notes: a request begins; it has finished; its blocks get a priority."""

NOW_MS, NUM_TOKENS, NUM_OUTPUT, STOP, MARK, PRIORITY, HALF_LIFE_MS, TTL_MS = range(8)
"""Places of the facts.

NOW_MS: The time in milliseconds since any moment, modulo 2**32; of `RETAIN`, when the
    priority was given.
NUM_TOKENS: Of `BEGIN`: tokens that the request asks for.
NUM_OUTPUT, STOP, MARK: Of `FINISH`: tokens that it generated, -1 if unknown; an index
    of `jaxkv.types.STOPS`; what `BEGIN` returned.
PRIORITY, HALF_LIFE_MS, TTL_MS: Of `RETAIN`: see `jaxkv.policies.retained`.
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
