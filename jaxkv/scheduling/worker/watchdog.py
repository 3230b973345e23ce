"""Ends a process whose thread is stuck where no exception reaches it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

# Less would end a process that compiles a program for its first transfer.
_MIN_LIMIT_S = 30.0
_MARGIN_S = 5.0


class _Watch:
    """The call that the thread watches, apart from the `Watchdog`, so that is freed."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.describe: Callable[[], str] = str
        self.is_ending = threading.Event()


def end_process(message: str) -> NoReturn:
    """Write the message and the stack of each thread, and end the process at once.

    jax does the same when its coordination service fails: exit handlers would also wait
    for the devices.
    """
    out = sys.__stderr__
    if out is not None:
        out.write(f"jaxkv.scheduling.worker.worker.AgreementError: {message}\n")
        out.flush()
        faulthandler.dump_traceback(out)
    os._exit(1)


class Watchdog:
    """Ends the process if a call takes too long.

    A call into jax's runtime may block indefinitely once the devices wait for a process
    that has stalled, because a queue of programs is bounded. Its thread cannot be
    interrupted, only ended with its process. A call may take `timeout_s` plus a margin,
    and at least 30 s. `end` is called with the message and does not return.
    """

    def __init__(
        self, timeout_s: float, end: Callable[[str], object] = end_process
    ) -> None:
        self.limit_s = max(timeout_s + _MARGIN_S, _MIN_LIMIT_S)
        self._watch = _Watch()
        self._end = end
        self._is_watching = False
        weakref.finalize(self, self._watch.is_ending.set)

    @contextlib.contextmanager
    def watch(self, describe: Callable[[], str]) -> Iterator[None]:
        """Watch over a call; `describe` makes the message if it does not return.

        If no thread can be started, this call is not watched; the next one tries again.
        """
        if not self._is_watching:
            with contextlib.suppress(RuntimeError, MemoryError):
                threading.Thread(
                    target=_run,
                    args=(self._watch, self.limit_s, self._end),
                    name="jaxkv watchdog",
                    daemon=True,
                ).start()
                self._is_watching = True
        self._watch.describe = describe
        self._watch.since_s = time.monotonic()
        try:
            yield
        finally:
            self._watch.since_s = None
            self._watch.describe = str  # `describe` may refer to this object's owner.

    def beat(self) -> None:
        """Restart the time limit: the call has made progress."""
        if self._watch.since_s is not None:
            self._watch.since_s = time.monotonic()


def _run(watch: _Watch, limit_s: float, end: Callable[[str], object]) -> None:
    while not watch.is_ending.wait(min(limit_s / 10, 1.0)):
        since_s = watch.since_s
        if since_s is not None and time.monotonic() - since_s > limit_s:
            end(watch.describe())
            return
