"""Threads for blocking calls, so that callers never wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxkv.transfer.storage.store import StoreError


def start_thread(name: str, run: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread; StoreError if none can start, as at a container's limit.

    Threads of `concurrent.futures` are joined at the interpreter's end: a thread that
    hangs in a call to a file server would keep the process alive indefinitely.
    """
    try:
        thread = threading.Thread(target=run, args=args, name=name, daemon=True)
        thread.start()
    except Exception as error:
        raise StoreError("other", f"no thread can be started: {error}") from error
    return thread


class Crew:
    """Daemon threads that run one function, which returns when its owner is closed."""

    def __init__(self, name: str, num_threads: int, run: Callable[[], object]) -> None:
        self.num_missing = num_threads  # Threads that have not been started
        self.has_thread = False  # Whether any has been started
        self._name = name
        self._run = run

    def start(self) -> None:
        """Start missing threads; after a StoreError, the next call tries again."""
        while self.num_missing:
            start_thread(f"{self._name} {self.num_missing - 1}", self._run)
            self.num_missing -= 1
            self.has_thread = True


class DaemonThread:
    """A daemon thread that runs tasks in turn; the first task starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._has_thread = self._is_closed = False

    def submit(self, task: Callable[[], object]) -> None:
        """Run a task, which handles its own errors, in the thread.

        StoreError: the thread cannot start, or has been closed.
        """
        with self._lock:
            if self._is_closed:
                raise StoreError("other", f"{self._name} is closed")
            if not self._has_thread:
                start_thread(self._name, self._run)
                self._has_thread = True
            self._tasks.put(task)

    def close(self) -> None:
        """End the thread after the submitted tasks."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # Release its bytes before waiting for the next.
            del task
