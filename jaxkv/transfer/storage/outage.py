"""Calls that find out when a store, or a node of it, answers again."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from jaxkv._util.outage import OutageLog
from jaxkv.transfer.storage.store import StoreError
from jaxkv.transfer.storage.workers import start_thread

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0

_log = logging.getLogger(__name__)


class Outages:
    """Asks what is down whether it answers: nodes of a store, or all of it (``""``).

    A thread of each calls `ask` at once, which waits for an answer or raises an error,
    and pauses twice as long before each further call, up to 10 s. A call that hangs is
    the only one until it returns. `on_end` is called once there is an answer.

    A watched socket has the name of its `node`, and `since_s`, when its present call
    began. `end` ends that call.
    """

    def __init__(
        self,
        url: str,
        ask: Callable[[str], object],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.names: frozenset[str] = frozenset()  # Of all nodes.
        self._sockets: weakref.WeakSet[Any] = weakref.WeakSet()
        self.down: frozenset[str] = frozenset()
        self._url, self._ask, self._on_end = url, ask, on_end
        self._wakes, self._is_closed = threading.Condition(), False
        self._threads: set[str] = set()  # Names that have a thread.
        self._logs: dict[str, OutageLog] = {}

    def states(self) -> dict[str, bool]:
        """Return whether each node is up, by name."""
        down = self.down
        return {name: name not in down for name in sorted(self.names | down)}

    def check_up(self, name: str) -> None:
        """Raise a StoreError if a node is down."""
        if name in self.down:
            message = f"the node {name} does not answer"
            raise StoreError("unreachable", message, was_down=True)

    def give_up(self, age_s: float) -> bool:
        """Begin outages of nodes silent during most of `age_s`; whether any is down."""
        until_s = time.monotonic() - age_s / 2
        with self._wakes:
            silent = {sock.node for sock in self._sockets if sock.since_s <= until_s}
        for node in silent:
            self.begin(node, "no answer in time")
        return bool(self.down)

    def watch(self, sock: Any) -> None:
        """Add a socket of the store's calls."""
        with self._wakes:
            self._sockets.add(sock)

    def begin(self, name: str = "", why: str = "") -> bool:
        """Begin an outage, and end the calls of its node; False if no thread starts."""
        with self._wakes:
            if name in self.down or self._is_closed:
                return True
            if name not in self._threads:
                try:
                    start_thread(f"jaxkv storage outage {name}", self._run, name, why)
                except StoreError:
                    return False
                self._threads.add(name)
            self.down |= {name}
            calls = [sock for sock in self._sockets if sock.node == name]
        for sock in calls:
            sock.end()
        return True

    def end(self, *names: str) -> None:
        """End outages."""
        with self._wakes:
            self.down -= {*names}
            self._wakes.notify_all()

    def close(self) -> None:
        """End all outages; begin none any more."""
        self._is_closed = True
        self.end(*self.down)

    def _run(self, name: str, why: str) -> None:
        node = f"the node {name} of the store {self._url}"
        fails = f"{node} fails: its blocks count as misses until it answers"
        log = self._logs.setdefault(name, OutageLog(_log, fails, f"{node} answers"))
        pause_s = 0.0
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: name not in self.down, pause_s)
                if name not in self.down:
                    self._threads.remove(name)
                    return
            if name:  # Its owner logs outages of the whole store.
                log.begin(why)
            try:
                self._ask(name)
            except Exception:
                pause_s = min(max(2 * pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
            else:
                self.end(name)
                self._on_end()
                log.end()
