"""A thread that does what blocks, on a machine that may refuse to start one."""

import queue

import pytest

from jaxkv.transfer.storage import StoreError
from jaxkv.transfer.storage.workers import DaemonThread
from tests.rigs.refused_threads import refused_threads


def test_a_task_without_a_thread_or_after_close_is_refused_and_others_run_in_turn():
    thread, done = DaemonThread("test"), queue.SimpleQueue()
    with refused_threads(), pytest.raises(StoreError, match="can't start new thread"):
        thread.submit(lambda: done.put("refused"))
    for number in range(3):
        thread.submit(lambda number=number: done.put(number))
    assert [done.get(timeout=60) for _ in range(3)] == [0, 1, 2]
    thread.close()
    with pytest.raises(StoreError, match="test is closed"):
        thread.submit(print)
    assert done.empty()
