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


def run_uninterrupted(task: Callable[[], T]) -> T:
    """Return `task()`, which ends whatever happens to the thread that waits for it.

    A signal handler runs in the main thread and may raise between any two bytecodes, so
    work that must be undone cannot run there. The task runs in a separate thread. The
    caller only calls C functions, which happen or do not; `threading.Thread` starts a
    thread in several steps. If no thread can be started, the caller runs the task.

    >>> run_uninterrupted(lambda: 6 * 7)
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
        # Joined when the interpreter ends: no transfer may be in flight then.
        self._executor = ThreadPoolExecutor(1, "jaxkv-prefix-copier")
        # Only the thread pops from a queue, so it needs no lock.
        self._urgent: collections.deque[Callable[[], None]] = collections.deque()
        self._saves: collections.deque[Callable[[], None]] = collections.deque()
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
            self.engine = self.run(make).result()
        except BaseException:
            self.close()
            raise

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Run a task with the engine, before any save that has not begun.

        RuntimeError if the thread has been ended.
        """
        return self._submit(self._urgent, task)

    def warm_up(self) -> None:
        """Compile the programs for saves and loads of full length."""
        pool = self._layout.new_pool()
        length = self._layout.max_tokens
        self._layout.cut(jax.tree.leaves(self._layout.join(pool, length)), length)
        self.run(self.engine.warm_up).result()

    def save(
        self,
        leaves: list[jax.Array],
        length: int,
        block_ids: Sequence[int],
        host_block_ids: NDArray[np.int64],
        is_wanted: Callable[[], bool],
        end: Callable[[bool, BaseException | None], None],
    ) -> None:
        """Copy blocks `block_ids` of a prompt's KV to the host.

        The KV, with room for `length` tokens, is only read, by a program that has been
        dispatched when this returns. The thread calls `is_wanted` before it issues the
        save, which may wait; and `end` with whether the bytes arrived, and with the
        exception of a bug. If this method raises, `end` is not called.
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

        self._submit(self._saves, save)

    def load(
        self,
        host_block_ids: NDArray[np.int64],
        is_wanted: Callable[[], bool],
        end: Callable[[bool], None],
    ) -> Future[list[jax.Array] | None]:
        """Copy host blocks, in order, to the first blocks of a new pool.

        The thread calls `is_wanted` before it issues the load, and `end` with whether
        the bytes arrived. Returns the pool; None if they did not.
        """

        def load() -> list[jax.Array] | None:
            loaded = None
            try:
                if is_wanted():
                    pool, _ = self.engine.load(
                        self._layout.new_pool(),
                        host_block_ids,
                        range(len(host_block_ids)),
                    )
                    pool, [done] = self.engine.drain(pool)
                    loaded = pool if done.error is None else None
            except TRANSFER_ERRORS:
                pass
            finally:
                end(loaded is not None)
            return loaded

        return self.run(load)

    def close(self) -> None:
        """Wait for all tasks, and end the thread."""
        self._executor.shutdown()

    def _submit(
        self, tasks: collections.deque[Callable[[], None]], task: Callable[[], T]
    ) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)

        tasks.append(run)
        self._executor.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        # Called once per task, each time for the most urgent one.
        (self._urgent or self._saves).popleft()()
