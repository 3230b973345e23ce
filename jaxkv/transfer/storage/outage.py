"""Calls that find out when a store that is down answers again."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jaxkv.transfer.storage.workers import start_thread

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0


class Outage:
    """Asks a store or a node that is down whether it answers, one call at a time.

    A thread makes the first call at once, and pauses twice as long before each further
    one, up to 10 s. A call that hangs is the only one until it returns. `ask` returns
    whether the store has answered, and `on_answer` is called once it has.

    >>> answered = threading.Event()
    >>> outage = Outage("store", lambda: True, answered.set)
    >>> outage.begin()
    >>> answered.wait(10.0)
    True
    """

    def __init__(
        self, name: str, ask: Callable[[], bool], on_answer: Callable[[], object]
    ) -> None:
        self._name = name
        self._ask, self._on_answer = ask, on_answer
        self._lock = threading.Lock()
        self._wakes = threading.Condition(self._lock)
        self._is_on = self._has_thread = False

    def begin(self) -> None:
        """Begin to ask; StoreError if no thread can start."""
        with self._lock:
            if not self._has_thread:
                start_thread(f"{self._name} outage", self._run)
                self._has_thread = True
            self._is_on = True

    def end(self) -> None:
        """Stop asking."""
        with self._lock:
            self._is_on = False
            self._wakes.notify_all()

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self._lock:
                self._wakes.wait_for(lambda: not self._is_on, pause_s)
                if not self._is_on:
                    self._has_thread = False
                    return
            if self._ask():
                self.end()
                self._on_answer()
            pause_s = min(max(2 * pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
