"""The thread that owns an engine: one thread dispatches all work on a pool."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Owner:
    """The thread that owns an engine and its worker; none before the first transfer."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # Held by the thread that is inside a call.
        # Not its number, which a later thread may get again.
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Make the calling thread the owner if there is none."""
        if self._thread is None:
            self._thread = threading.current_thread()

    def adopt(self) -> None:
        """Make the calling thread the owner, or refuse if another is inside a call."""
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(
                "adopt() was called while another thread is inside a call of the "
                "engine: call it after that call has returned."
            )
        try:
            self._thread = threading.current_thread()
        finally:
            self.lock.release()

    def check(self, thread: threading.Thread) -> None:
        """Refuse any thread except the owner."""
        if self._thread is not thread and self._thread is not None:
            raise RuntimeError(
                f"the engine belongs to thread {self._thread.name!r} and was called by "
                f"thread {thread.name!r}: one thread must dispatch all work on a pool, "
                "since its order keeps the bytes right. To continue on another thread, "
                "call adopt() there first."
            )


class _Owned(Protocol):
    owner: Owner


_S = TypeVar("_S", bound=_Owned)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def owned(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Refuse calls by any thread except the owner, and `adopt` during a call."""

    @functools.wraps(method)
    def call(self: _S, /, *args: _P.args, **named: _P.kwargs) -> _R:
        owner, thread = self.owner, threading.current_thread()
        owner.check(thread)  # Another thread is refused without waiting for the lock.
        with owner.lock:
            owner.check(thread)  # The engine may have been adopted meanwhile.
            return method(self, *args, **named)

    return call
