"""Copies blocks of prompts' KV between device and host, in a separate thread."""

from __future__ import annotations

import _thread
import collections
import functools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, SupportsIndex, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxkv import TransferEngine
from jaxkv.integrations.prefix_layout import PrefixLayout
from jaxkv.transfer.kernels import Mode
from jaxkv.transfer.tickets import TRANSFER_ERRORS

T = TypeVar("T")


class TaskThread:
    """One thread with two queues of tasks: urgent ones and others.

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
        """Queue a task for the thread.

        Args:
            task: The task.
            urgent: Whether it goes before all waiting tasks that are not urgent.

        Returns:
            Its result or exception.

        Raises:
            RuntimeError: The thread has been closed.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        # Only one thread pops from a queue, so it needs no lock.
        (self._urgent if urgent else self._others).append(run)
        self._executor.submit(self._run_next)
        return future

    def close(self) -> None:
        """Wait for all tasks, and end the thread; no calls after this."""
        self._executor.shutdown()

    def _run_next(self) -> None:
        # Called once per task, each time for the most urgent one.
        (self._urgent or self._others).popleft()()


def call_apart(task: Callable[[], T]) -> T:
    """Wait for `task()`, which ends whatever happens to the thread that waits for it.

    A signal handler runs in the main thread and may raise between any two steps of it,
    so nothing that has to be undone can be done there. So the task gets a thread of its
    own, and the caller's steps are calls of C functions, each of which happens or does
    not; `threading.Thread` starts one in several steps. If no thread can be started,
    the caller's does the task.

    Returns:
        What it returns; its errors are raised here.

    Example:
        >>> call_apart(lambda: 6 * 7)
        42
    """
    answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((task(), None))
        except BaseException as error:
            answers.put((None, error))

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        run()
    result, error = answers.get()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


class PrefixCopier:
    """Copies the blocks of one prompt at a time, loads before saves.

    A transfer engine needs one thread and, while a transfer is in flight, one pool.
    Here each prompt is a separate pool, so its transfer finishes before the next
    starts.
    """

    def __init__(
        self,
        layout: PrefixLayout,
        num_host_blocks: int | None,
        host_bytes: str | SupportsIndex | None,
        mode: Mode | None,
        extent_bytes: str | SupportsIndex | None,
    ):
        """Set up the host memory; arguments and errors as of `TransferEngine`."""
        self._layout = layout
        self._thread = TaskThread("jaxkv-prefix-copier")
        make = functools.partial(
            TransferEngine,
            layout.new_pool(),
            num_host_blocks,
            host_bytes=host_bytes,
            mode=mode,
            block_axis=layout.axes,
            extent_bytes=extent_bytes,
        )
        try:
            self.engine = self._thread.run(make).result()
        except BaseException:
            self._thread.close()
            raise

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Run something else with the engine, before any save that has not begun.

        Raises:
            RuntimeError: The thread has been ended.
        """
        return self._thread.run(task, urgent=True)

    def warm_up(self) -> None:
        """Compile the programs for saves and loads of full length."""
        pool = self._layout.new_pool()
        length = self._layout.max_tokens
        self._layout.cut(jax.tree.leaves(self._layout.join(pool, length)), length)
        self._thread.run(self.engine.warm_up, urgent=True).result()

    def save(
        self,
        leaves: list[jax.Array],
        length: int,
        block_ids: Sequence[int],
        host_block_ids: NDArray[np.int64],
        is_wanted: Callable[[], bool],
        end: Callable[[bool, BaseException | None], None],
    ) -> None:
        """Copy blocks of a prompt's KV to the host.

        Args:
            leaves: The KV. Only read, by a program that has been dispatched when this
                returns.
            length: Tokens that it has room for.
            block_ids: Its blocks to save.
            host_block_ids: Where each goes.
            is_wanted: Called before the save is issued; may wait.
            end: Called with whether the bytes arrived, and with the exception of a bug
                if one was the cause. Not called if this method raises.
        """
        # A copy, which is not donated.
        blocks = self._layout.cut(leaves, length)

        def save() -> None:
            ok, fault = False, None
            try:
                if is_wanted():
                    self.engine.save(blocks, block_ids, host_block_ids)
                    _, [done] = self.engine.drain(blocks)
                    ok = done.error is None
            except TRANSFER_ERRORS:
                pass  # The program that computes the KV, or the answer, has failed.
            except BaseException as error:
                fault = error
            end(ok, fault)

        self._thread.run(save)

    def load(
        self,
        host_block_ids: NDArray[np.int64],
        is_wanted: Callable[[], bool],
        end: Callable[[bool], None],
    ) -> Future[list[jax.Array] | None]:
        """Copy host blocks to the first blocks of a new pool.

        Args:
            host_block_ids: The blocks, in order.
            is_wanted: Called before the load is issued.
            end: Called with whether the bytes arrived.

        Returns:
            The pool; None if the bytes did not arrive.
        """

        def load() -> list[jax.Array] | None:
            found = None
            try:
                if is_wanted():
                    pool, _ = self.engine.load(
                        self._layout.new_pool(),
                        host_block_ids,
                        range(len(host_block_ids)),
                    )
                    pool, [done] = self.engine.drain(pool)
                    found = pool if done.error is None else None
            except TRANSFER_ERRORS:
                pass
            finally:
                end(found is not None)
            return found

        return self._thread.run(load, urgent=True)

    def close(self) -> None:
        """Wait for transfers in flight, and end the thread."""
        self._thread.close()
