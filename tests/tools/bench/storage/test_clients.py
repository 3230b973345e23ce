from types import SimpleNamespace

import numpy as np
import pytest

from jaxkv.tools.bench.storage import clients


def test_redis_is_asked_for_one_value_in_each_call(monkeypatch):
    redis = pytest.importorskip("redis")
    held, asked = {}, []
    server = SimpleNamespace(set=held.__setitem__, get=asked.append, close=held.clear)
    monkeypatch.setattr(redis.Redis, "from_url", lambda url: server)
    client = clients._redis("redis://127.0.0.1:1")
    blocks = [np.full(4, number, np.uint8) for number in range(3)]
    client.write(["a", "b", "c"], blocks)
    client.read(["c", "a"])
    assert [bytes(value) for value in held.values()] == [bytes(b) for b in blocks]
    assert (list(held), asked) == (["a", "b", "c"], ["c", "a"])
    client.close()
    assert not held
