"""Threads that do what blocks, so that callers never wait."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxkv.transfer.storage.store import error_of

_T = TypeVar("_T")
_numbers = itertools.count()


class Workers:
    """A few daemon threads, started as they are needed.

    Those of `concurrent.futures` are joined when the interpreter ends: one that hangs
    in a call to a file server would keep the process alive for ever.

    Args:
        name: What they are called.
        num_threads: How many there are at most.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._most = num_threads
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_open = 0  # Tasks that are queued or running.
        self._is_closed = False

    def submit(self, call: Callable[..., _T], *args: Any) -> Future[_T]:
        """Have `call(*args)` run; its errors become those of a store."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                result = call(*args)
            except Exception as error:
                future.set_exception(error_of(error))
            else:
                future.set_result(result)

        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed.")
            self._num_open += 1
            starts = self._num_threads < min(self._most, self._num_open)
            self._num_threads += starts
            self._tasks.put(run)
        if starts:
            threading.Thread(
                target=self._work,
                name=f"{self._name} {next(_numbers)}",
                daemon=True,
            ).start()
        return future

    def close(self) -> None:
        """Let the threads end once they have done what was asked of them."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in range(self._num_threads):
                    self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # Let go of its bytes while there is nothing else to do.
            del task
            with self._lock:
                self._num_open -= 1
