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
_LEAST_LIMIT_S = 30.0
_MARGIN_S = 5.0


class _Watch:
    """What the thread sees; it holds no `Watchdog`, so that one can be forgotten."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self.say: Callable[[], str] = str
        self.is_ending = threading.Event()


def end_process(message: str) -> NoReturn:
    """Say why, and where each thread is, and end the process at once.

    As jax does when its coordination service fails: what would run at exit waits for
    the devices, too.
    """
    out = sys.__stderr__
    if out is not None:
        out.write(f"jaxkv.scheduling.worker.worker.AgreementError: {message}\n")
        out.flush()
        faulthandler.dump_traceback(out)
    os._exit(1)


class Watchdog:
    """Ends the process if a call takes too long.

    A call into jax's runtime may block for ever once the devices wait for a process
    that has stalled: XLA:CPU may run cheap programs before it returns, and a queue of
    programs has an end. A thread in such a call cannot be
    interrupted, only ended with its process.

    Args:
        timeout_s: How long what can be interrupted takes at most; the call is given
            some more, and 30 s in any case.
        end: What to do with the message; does not return.
    """

    def __init__(
        self, timeout_s: float, end: Callable[[str], object] = end_process
    ) -> None:
        self.limit_s = max(timeout_s + _MARGIN_S, _LEAST_LIMIT_S)
        self._watch = _Watch()
        self._end = end
        self._is_watching = False
        weakref.finalize(self, self._watch.is_ending.set)

    @contextlib.contextmanager
    def watch(self, say: Callable[[], str]) -> Iterator[None]:
        """Watch over a call; `say` is what to say of it if it does not return.

        Without a thread nothing watches this call; the next one tries again.
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
        self._watch.say = say
        self._watch.since_s = time.monotonic()
        try:
            yield
        finally:
            self._watch.since_s = None
            self._watch.say = str  # It may refer to the owner of this.

    def beat(self) -> None:
        """Note that the call goes on; the time begins anew."""
        if self._watch.since_s is not None:
            self._watch.since_s = time.monotonic()


def _run(watch: _Watch, limit_s: float, end: Callable[[str], object]) -> None:
    while not watch.is_ending.wait(min(limit_s / 10, 1.0)):
        since_s = watch.since_s
        if since_s is not None and time.monotonic() - since_s > limit_s:
            end(watch.say())
            return
