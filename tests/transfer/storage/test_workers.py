"""Threads that do what blocks, on a machine that may refuse to start one."""

import threading

import pytest

from jaxkv.transfer.storage.workers import Workers
from tests.rigs.refused_threads import refused_threads


@pytest.fixture
def workers():
    workers = Workers("test", 3)
    yield workers
    workers.close()


@pytest.mark.parametrize("first", [1, 2])
def test_a_thread_that_cannot_be_started_leaves_its_task_to_others(workers, first):
    met = threading.Barrier(first)
    with refused_threads(first=first) as refused:
        futures = [workers.submit(met.wait, 60) for _ in range(2 * first)]
        assert [each.exception(60) for each in futures] == [None] * 2 * first
    assert refused
    # As many at once as there are now: all three have been started.
    met = threading.Barrier(3)
    futures = [workers.submit(met.wait, 60) for _ in range(3)]
    assert [each.exception(60) for each in futures] == [None] * 3


def test_a_task_after_close_has_failed(workers):
    workers.close()
    assert "test is closed" in str(workers.submit(print).exception(0))
