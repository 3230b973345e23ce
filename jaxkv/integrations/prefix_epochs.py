"""The state when each thread began to compute a prompt, for its later save."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from jaxkv.keys.hashing import TokenIds, token_bytes

T = TypeVar("T")

_MAX_PROMPTS = 1024


class BegunPrompts(Generic[T]):
    """Values that each thread recorded for the prompts that it began to compute.

    A thread finds only its own values, as two threads may compute the same prompt, one
    before and one after the weights change. Memory per thread: digests of the last 1024
    prompts, 0.3 MiB, and the tokens of the last prompt.

    >>> begun = BegunPrompts()
    >>> begun.record("adapter", [1, 2, 3], 5)
    >>> begun.find("adapter", [1, 2, 3, 4]), begun.find("adapter", [1, 2])
    (5, 5)
    >>> begun.find("another", [1, 2, 3]), begun.find("adapter", [1, 3])
    (None, None)
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def record(self, scope: Hashable, tokens: TokenIds, value: T) -> None:
        """Record that this thread begins to compute a prompt, perhaps once more."""
        data = token_bytes(tokens)
        if not data:
            return  # All prompts begin with the empty one.
        values = self._values()
        key = scope, len(data), hashlib.sha256(data).digest()
        values.pop(key, None)
        values[key] = value
        if len(values) > _MAX_PROMPTS:
            del values[next(iter(values))]
        self._thread.last = scope, data, value

    def find(self, scope: Hashable, tokens: TokenIds) -> T | None:
        """Return the value of the prompt that has most in common with saved tokens.

        It is the prompt itself; or this thread's last prompt, if it begins with the
        saved tokens; or the longest prompt that the saved tokens begin with.
        """
        data, values = token_bytes(tokens), self._values()
        lengths = {length for key_scope, length, _ in values if key_scope == scope}
        hasher, length, value = hashlib.sha256(), 0, None
        for end in sorted(end for end in lengths if end <= len(data)):
            hasher.update(data[length:end])
            length = end
            value = values.get((scope, end, hasher.digest()), value)
        if (scope, len(data), hasher.digest()) in values:
            return value
        last_scope, last_data, last = getattr(self._thread, "last", (None, b"", None))
        if last_scope == scope and last_data.startswith(data):
            return last
        return value

    def _values(self) -> dict[tuple[Hashable, int, bytes], T]:
        values: dict[tuple[Hashable, int, bytes], T]
        values = self._thread.__dict__.setdefault("values", {})
        return values
