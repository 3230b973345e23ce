"""The state in which each thread began to compute a prompt, for its later save."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from jaxkv.keys.hashing import TokenIds, token_bytes

T = TypeVar("T")

_MAX_PROMPTS = 1024


class BegunPrompts(Generic[T]):
    """Values that each thread noted for the prompts that it began to compute.

    A thread finds only its notes, as two threads may compute the same prompt, one
    before and one after the weights change. Memory per thread: digests of the last 1024
    prompts, 0.3 MiB, and the tokens of the last prompt.

    Example:
        >>> begun = BegunPrompts()
        >>> begun.note("adapter", [1, 2, 3], 5)
        >>> begun.find("adapter", [1, 2, 3, 4]), begun.find("adapter", [1, 2])
        (5, 5)
        >>> begun.find("another", [1, 2, 3]), begun.find("adapter", [1, 3])
        (None, None)
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def note(self, scope: Hashable, tokens: TokenIds, value: T) -> None:
        """Note that this thread begins to compute a prompt; replaces its older note."""
        data = token_bytes(tokens)
        if not data:
            return  # All prompts begin with the empty one.
        notes = self._notes()
        name = scope, len(data), hashlib.sha256(data).digest()
        notes.pop(name, None)
        notes[name] = value
        if len(notes) > _MAX_PROMPTS:
            del notes[next(iter(notes))]
        self._thread.last = scope, data, value

    def find(self, scope: Hashable, tokens: TokenIds) -> T | None:
        """Return the note of the prompt that has most in common with saved tokens.

        That is the prompt itself; or this thread's last prompt, if the saved tokens are
        its beginning; or the longest prompt with which the saved tokens begin.
        """
        data, notes = token_bytes(tokens), self._notes()
        lengths = {length for other, length, _ in notes if other == scope}
        hasher, length, found = hashlib.sha256(), 0, None
        for end in sorted(end for end in lengths if end <= len(data)):
            hasher.update(data[length:end])
            length = end
            found = notes.get((scope, end, hasher.digest()), found)
        if (scope, len(data), hasher.digest()) in notes:
            return found
        last_scope, last_data, last = getattr(self._thread, "last", (None, b"", None))
        if last_scope == scope and last_data.startswith(data):
            return last
        return found

    def _notes(self) -> dict[tuple[Hashable, int, bytes], T]:
        notes: dict[tuple[Hashable, int, bytes], T]
        notes = self._thread.__dict__.setdefault("notes", {})
        return notes
