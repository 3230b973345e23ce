"""A thread that carries out what other threads ask for, one task at a time."""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class TaskThread:
    """One thread, and two queues of tasks: of the urgent ones and of the others.

    For what has to be made and called by one thread, such as `TransferEngine`.

    Example:
        >>> thread = TaskThread("example")
        >>> thread.run(lambda: 6 * 7).result()
        42
        >>> thread.close()
    """

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(1, name)
        self._urgent: collections.deque[Callable[[], None]] = collections.deque()
        self._others: collections.deque[Callable[[], None]] = collections.deque()

    def run(self, task: Callable[[], T], *, urgent: bool = False) -> Future[T]:
        """Have the thread run a task.

        Args:
            task: What to do.
            urgent: Whether it goes before all others that have not begun.

        Returns:
            Its result, or what it raises.

        Raises:
            RuntimeError: The thread has been closed.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        queue = self._urgent if urgent else self._others
        queue.append(run)  # One thread takes, so that a queue needs no lock.
        try:
            self._executor.submit(self._run_next)
        except RuntimeError:
            queue.remove(run)
            raise
        return future

    def close(self) -> None:
        """Wait for all tasks, and end the thread."""
        self._executor.shutdown()

    def _run_next(self) -> None:
        # As often as there are tasks, each time for the most urgent of them.
        (self._urgent or self._others).popleft()()
