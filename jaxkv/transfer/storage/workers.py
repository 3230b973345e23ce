"""Threads that do what blocks, so that callers never wait."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxkv.transfer.storage.store import StoreError, error_of

_T = TypeVar("_T")
_numbers = itertools.count()


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


class Workers:
    """A few daemon threads, started as they are needed.

    Args:
        name: The start of the threads' names.
        num_threads: How many there are at most.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._max_threads = num_threads
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_open = 0  # Tasks that are queued or running.
        self._is_closed = False

    def submit(self, call: Callable[..., _T], *args: Any) -> Future[_T]:
        """Have `call(*args)` run; its errors become those of a store.

        If there is no thread and none can be started, the future has failed already.
        """
        future: Future[_T] = Future()

        def run() -> None:
            try:
                result = call(*args)
            except Exception as error:
                future.set_exception(error_of(error))
            else:
                future.set_result(result)

        try:
            with self._lock:
                self._start_thread()
                self._num_open += 1
                self._tasks.put(run)
        except StoreError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Let the threads end once they have done what was asked of them."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._num_threads):
                    self._tasks.put(None)

    def _start_thread(self) -> None:
        """Start a thread for one more task; raise if there would be none for it."""
        if self._is_closed:
            raise StoreError("other", f"{self._name} is closed")
        if self._num_threads < min(self._max_threads, self._num_open + 1):
            try:
                start_thread(f"{self._name} {next(_numbers)}", self._work)
            except StoreError:
                if not self._num_threads:
                    raise
            else:
                self._num_threads += 1

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # Let go of its bytes while there is nothing else to do.
            del task
            with self._lock:
                self._num_open -= 1
