"""The listing of a store that already has blocks when an engine starts."""

import contextlib
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxkv import OffloadConfig, TransferEngine
from jaxkv.scheduling.worker import storage_worker
from jaxkv.transfer.storage import LocalStore, MemoryStore, ObjectFormat, StorageIO
from tests.rigs.faulty_store import Faults, FaultyStore
from tests.rigs.offload_rig import (
    BLOCK_SIZE,
    StoredEngine,
    make_keys,
    make_request,
)
from tests.rigs.refused_threads import refused_threads
from tests.rigs.waiting import wait_for


@contextlib.contextmanager
def engine(folder, **options):
    """The scheduler and the worker of an engine whose store is a folder."""
    with StoredEngine(folder, storage_deadline_s=60.0, **options) as stored:
        yield stored.scheduler, stored.worker


def fill(folder, worker, num_blocks):
    """Create block files; a listing does not read their contents."""
    for key in make_keys(*range(num_blocks)):
        path = folder / worker.storage.storage_io.objects.name(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_200_blocks_are_known_within_two_steps_of_the_end_of_a_listing(tmp_path):
    with engine(tmp_path) as (scheduler, worker):
        fill(tmp_path, worker, 200)  # Nearly each in a subfolder of its own.
        # A store that another test has hang may still be listed.
        before = {*threading.enumerate()}
        worker.storage.advance()
        for thread in {*threading.enumerate()} - before:
            if thread.name == "jaxkv storage list":
                thread.join()
        for _ in range(2):
            scheduler.update_connector_output(worker.poll())
        assert scheduler.num_storage_blocks_held == 200
        assert scheduler.is_storage_listed


def test_an_engine_may_wait_until_its_store_is_listed(tmp_path):
    with engine(tmp_path) as (scheduler, worker):
        fill(tmp_path, worker, 200)
        request = make_request("a", 0, 1)
        explained = scheduler.explain(request)
        assert not explained.is_store_listed
        assert "The store is not listed yet: it may have more." in str(explained)
        assert scheduler.wait_for_storage(worker)
        assert scheduler.num_storage_blocks_held == 200
        explained = scheduler.explain(request)
        assert explained.is_store_listed
        assert "listed" not in str(explained)
        assert [block.verdict for block in explained.blocks] == ["storage"] * 2
        # A reset forgets the index: the store is listed again.
        assert scheduler.reset()
        assert not scheduler.explain(request).is_store_listed


def test_an_engine_waits_no_longer_for_a_listing_than_it_said(tmp_path):
    store, answers = LocalStore(tmp_path), threading.Event()
    pages = store.list
    store.list = lambda folder: pages(folder) if answers.wait(60) else iter(())
    with engine(tmp_path, store=store) as (scheduler, worker):
        fill(tmp_path, worker, 3)
        assert not scheduler.wait_for_storage(worker, 0.05)
        assert not scheduler.is_storage_listed
        answers.set()
        assert scheduler.wait_for_storage(worker)
        assert scheduler.num_storage_blocks_held == 3


@pytest.mark.parametrize("list_every_s", [None, 60.0])
def test_a_store_that_cannot_be_listed_keeps_no_engine_waiting(tmp_path, list_every_s):
    store = FaultyStore(LocalStore(tmp_path), 0, Faults(error=1.0))
    with engine(tmp_path, store=store, storage_list_s=list_every_s) as halves:
        scheduler, worker = halves
        fill(tmp_path, worker, 3)
        assert not scheduler.wait_for_storage(worker)
        assert not scheduler.wait_for_storage(worker, 0.0)  # It is listed again later.


def test_a_store_that_is_listed_once_is_listed_again_if_that_has_failed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(storage_worker, "_RELIST_S", 0.0)
    store = FaultyStore(LocalStore(tmp_path), 0, Faults(error=1.0))
    with engine(tmp_path, store=store, storage_list_s=None) as (scheduler, worker):
        fill(tmp_path, worker, 3)
        assert not scheduler.wait_for_storage(worker)
        store.faults.error = 0.0
        assert scheduler.wait_for_storage(worker)
        assert scheduler.num_storage_blocks_held == 3
        assert not worker.storage.is_listing_due


def test_a_store_is_listed_again_once_one_of_its_nodes_is_back(tmp_path):
    """Failed reads have removed its blocks from the index."""
    store, states = LocalStore(tmp_path), {"a": True, "b": True}
    store.nodes = SimpleNamespace(states=lambda: states)
    with engine(tmp_path, store=store, storage_list_s=None) as (scheduler, worker):
        assert scheduler.wait_for_storage(worker)
        fill(tmp_path, worker, 3)

        def num_held():
            scheduler.update_connector_output(worker.poll())
            return scheduler.num_storage_blocks_held

        states["b"] = False
        assert num_held() == 0
        assert not worker.storage.is_listing_due
        states["b"] = True
        wait_for(lambda: num_held() == 3)
        assert not worker.storage.is_listing_due


def test_a_store_is_listed_once_a_thread_can_be_started(tmp_path):
    with (
        refused_threads(),
        engine(tmp_path, storage_list_s=0.0001) as (scheduler, worker),
    ):
        fill(tmp_path, worker, 3)
        assert not scheduler.wait_for_storage(worker)
        assert "list other" in worker.storage.storage_io.stats.failed
    with engine(tmp_path, storage_list_s=0.0001) as (scheduler, worker):
        with refused_threads():
            assert not scheduler.wait_for_storage(worker)
        wait_for(scheduler.wait_for_storage, worker)
        assert scheduler.num_storage_blocks_held == 3


def test_where_there_is_no_store_there_is_nothing_to_wait_for():
    pool = [jnp.zeros((8, BLOCK_SIZE, 1, 2))]
    _, scheduler, worker = OffloadConfig(num_host_blocks=16).connect(pool, BLOCK_SIZE)
    assert scheduler.wait_for_storage(worker)
    with pytest.raises(RuntimeError, match="no storage"):
        worker.poll_storage()


def test_a_block_that_lacks_the_part_of_a_process_is_not_found():
    engine = TransferEngine(jnp.zeros((8, BLOCK_SIZE)), 8)
    payload = engine.host_bytes_description, engine.host_payload_bytes
    objects = ObjectFormat(b"model", *payload, shard=0, num_shards=2)
    whole, first_only, second_only = make_keys(1, 2, 3)
    store = MemoryStore()
    names = [
        *objects.all_names(whole),
        objects.name_of(first_only, 0),
        objects.name_of(second_only, 1),
    ]
    store.put([(name, [b""]) for name in names])
    worker = storage_worker.StorageWorker(engine, StorageIO(store, objects))
    with contextlib.closing(worker):
        listed, is_listed = [], False
        while not is_listed:
            worker.advance()
            for report in worker.take_reports():
                listed += report.found
                is_listed = report.listed is not None
    assert listed == [whole]
