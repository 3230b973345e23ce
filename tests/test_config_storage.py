from types import SimpleNamespace

import jax
import pytest

from jaxkv import config
from jaxkv.config import OffloadConfig


def test_the_store_gets_its_own_settings_and_no_others(monkeypatch):
    passed = {}

    def open_storage(engine, url, **named):
        passed.update(named, url=url)
        return SimpleNamespace()

    monkeypatch.setattr(config, "open_storage", open_storage)
    settings = OffloadConfig(
        storage="kv",
        storage_owner=True,
        deadline_s=1.0,
        storage_deadline_s=2.0,
        storage_await_s=3.0,
        storage_list_s=4.0,
        max_storage_blocks=5,
    )
    storage = settings.open_storage(None, namespace=b"model", num_blocks=6)
    assert storage.bound == (6, True)
    passed.pop("clock")
    assert passed == {
        "url": "kv",
        "namespace": b"model",
        "secret": None,
        "shard": 0,
        "num_shards": 1,
        "deadline_s": 2.0,
        "await_s": 3.0,
        "list_every_s": 4.0,
        "max_blocks": 5,
    }


def test_of_several_processes_the_first_records(monkeypatch, tmp_path):
    settings = OffloadConfig(record=str(tmp_path / "trace.jsonl"))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for process, records in ((1, False), (0, True)):
        monkeypatch.setattr(jax, "process_index", lambda number=process: number)
        recorder = settings.make_recorder()
        assert (recorder is not None) == records
        if recorder is not None:
            recorder.close()


def test_a_store_is_closed_where_its_worker_is_refused(monkeypatch):
    closed = []

    def refuse(*_, **__):
        raise ValueError("refused")

    monkeypatch.setattr(config, "OffloadWorker", refuse)
    storage = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(ValueError, match="refused"):
        OffloadConfig().make_worker(None, storage=storage)
    assert closed
