"""Logs of outages: a line at the start and a line at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_MIN_PAUSE_S = 60.0  # Between two warnings.


class OutageLog:
    """Logs start and end of an outage, in lines that begin with `fails` and `works`.

    An outage that begins within a minute of the last warning is not logged.
    """

    def __init__(
        self,
        log: logging.Logger,
        fails: str,
        works: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._fails, self._works, self._clock = log, fails, works, clock
        self._warned_s = float("-inf")
        self._is_open = False  # Whether there is an outage that was logged.

    def begin(self, why: object) -> None:
        """Record a failure; log it if it begins an outage."""
        now_s = self._clock()
        if not self._is_open and now_s >= self._warned_s + _MIN_PAUSE_S:
            self._is_open, self._warned_s = True, now_s
            self._log.warning("%s (%s).", self._fails, why)

    def end(self) -> None:
        """Record a success; log it if it ends an outage."""
        if self._is_open:
            self._is_open = False
            after_s = self._clock() - self._warned_s
            self._log.info("%s again after %.0f s.", self._works, after_s)
