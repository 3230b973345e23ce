"""Threads that do what blocks, so that callers never wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxkv.transfer.storage.store import StoreError


def start_thread(name: str, run: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread.

    Threads of `concurrent.futures` are joined when the interpreter ends: one that hangs
    in a call to a file server would keep the process alive indefinitely.

    Raises:
        StoreError: No thread can be started now, such as at the limit of a container.
    """
    try:
        thread = threading.Thread(target=run, args=args, name=name, daemon=True)
        thread.start()
    except Exception as error:
        raise StoreError("other", f"no thread can be started: {error}") from error
    return thread


class Crew:
    """Daemon threads that share one function, which ends when its owner is closed.

    Args:
        name: The start of the threads' names.
        num_threads: How many there are.
        run: The function.

    Attributes:
        num_missing: Threads that have not been started.
        has_thread: Whether any has been started.
    """

    def __init__(self, name: str, num_threads: int, run: Callable[[], object]) -> None:
        self.num_missing = num_threads
        self.has_thread = False
        self._name = name
        self._run = run

    def start(self) -> None:
        """Start the threads that are missing.

        Raises:
            StoreError: One cannot be started; the next call tries again.
        """
        while self.num_missing:
            start_thread(f"{self._name} {self.num_missing - 1}", self._run)
            self.num_missing -= 1
            self.has_thread = True


class DaemonThread:
    """A daemon thread that runs tasks in turn, started with the first of them.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._has_thread = self._is_closed = False

    def submit(self, task: Callable[[], object]) -> None:
        """Have the thread run a task, which handles its own errors.

        Raises:
            StoreError: No thread can be started, or it has been closed.
        """
        with self._lock:
            if self._is_closed:
                raise StoreError("other", f"{self._name} is closed")
            if not self._has_thread:
                start_thread(self._name, self._run)
                self._has_thread = True
            self._tasks.put(task)

    def close(self) -> None:
        """Let the thread end once it has done what was asked of it."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # Let go of its bytes while there is nothing else to do.
            del task
