"""Memory is reused, but never while a view of it exists."""

import random
import threading

import numpy as np

from jaxkv.transfer.storage.buffers import Buffers


def test_memory_comes_back_only_when_its_last_view_is_gone():
    buffers = Buffers(1 << 20)
    view = buffers.take(1000)
    part, array = view[10:20], np.frombuffer(view, np.uint8)
    address = array.ctypes.data
    for last in ("view", "part"):
        assert buffers.take(1000).obj.ctypes.data != address, last
        del view
        view = part
    del view, part
    views = [buffers.take(1000) for _ in range(3)]
    assert address not in [view.obj.ctypes.data for view in views]
    del array
    assert buffers.take(1000).obj.ctypes.data == address


def test_no_more_is_kept_than_was_asked_for_and_nothing_of_another_size():
    buffers = Buffers(2500)
    views = [buffers.take(1000) for _ in range(5)]
    del views
    assert len(buffers._kept) == 2
    assert len(buffers.take(400)) == 400
    assert len(buffers._lent) == 0


def test_threads_never_share_memory():
    buffers, wrong = Buffers(1 << 20), []

    def work(number):
        rng, held = random.Random(number), []
        for _ in range(2000):
            view, mark = buffers.take(64), rng.randrange(256)
            view[:] = bytes([mark]) * 64
            held.append((view, mark))
            if len(held) > rng.randrange(8):
                view, mark = held.pop(rng.randrange(len(held)))
                if bytes(view) != bytes([mark]) * 64:
                    wrong.append(number)
                del view

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
