"""Ends a process whose thread is stuck in a call that no exception can interrupt."""

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

# A shorter limit would end a process that compiles a program for its first transfer.
_MIN_LIMIT_S = 30.0
_MARGIN_S = 5.0


class _Watch:
    """The watched call. The thread has no reference to the `Watchdog` itself."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.describe: Callable[[], str] = str
        self.is_ending = threading.Event()


def end_process(message: str) -> NoReturn:
    """Print the message and the stack of each thread, and end the process at once.

    No exit handler runs, because it could wait for the devices. jax ends the process
    the same way when its coordination service fails.
    """
    out = sys.__stderr__
    if out is not None:
        out.write(f"jaxkv.scheduling.worker.worker.AgreementError: {message}\n")
        out.flush()
        faulthandler.dump_traceback(out)
    os._exit(1)


class Watchdog:
    """Ends the process if a call takes too long.

    jax's runtime queues a bounded number of programs. If the devices wait for a process
    that has stalled, a call into the runtime may block indefinitely, and only the end
    of the process stops it. A call may take `timeout_s` plus a margin, or 30 s if that
    is longer. `end` is called with the message and must not return.
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
        """Limit the time of a `with` block; `describe` makes the message.

        If no thread can be started, the block has no limit, and the next one retries.
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
            self._watch.describe = str  # Drop the reference to the owner.

    def beat(self) -> None:
        """Restart the time limit, because the watched call has made progress."""
        if self._watch.since_s is not None:
            self._watch.since_s = time.monotonic()


def _run(watch: _Watch, limit_s: float, end: Callable[[str], object]) -> None:
    while not watch.is_ending.wait(min(limit_s / 10, 1.0)):
        since_s = watch.since_s
        if since_s is not None and time.monotonic() - since_s > limit_s:
            end(watch.describe())
            return
