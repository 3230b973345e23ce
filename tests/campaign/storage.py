"""Engines with a store behind the host: one after another, two at once, with faults.

They are the engines of `paged`, which check every byte that they read. All share one
store, so that each finds what those before it have written; and the store goes wrong in
every way that it may.
"""

import dataclasses
import tempfile
import time
from unittest import mock

from jaxkv.scheduling.worker import storage_worker
from jaxkv.transfer.storage import MemoryStore, open_store
from tests.campaign import store_faults
from tests.campaign.paged import PagedEngine
from tests.campaign.setups import GROUPS, random_setup
from tests.campaign.store_faults import StoreFault
from tests.rigs.faulty_store import Faults, FaultyStore

NUM_LIVES = 3
MAX_POLLS = 200  # Until an engine begins, whether the store is listed or not.

MIXED = (
    Faults(),
    Faults(error=0.2, raising=0.02),
    Faults(late=0.3, late_s=0.05, error=0.05),
    Faults(hang=0.05),
    Faults(cut=0.1, flip=0.1, longer=0.1, junk=0.1),
    Faults(swap=0.2),
    Faults(lose=0.1, tear=0.1),
)


def run_storage(rng, counts, note, steps, fault=None):
    """Run engines that share a store, one after another, or two in turns."""
    with tempfile.TemporaryDirectory(prefix="jaxkv-campaign-") as folder:
        if fault is None:
            # The same model in all of them: other groups have other keys.
            setup = random_setup(rng, storage=folder)
            chosen = StoreFault(
                rng.choice(MIXED),
                num_engines=rng.choice((1, 1, 2)),
                share=0.002,
                happens=store_faults.empty,
            )
            memory = MemoryStore() if rng.random() < 0.5 else None
        else:
            chosen, memory = store_faults.FAULTS[fault], None
        with store_faults.place_of(chosen, rng, folder) as (url, happens):
            if fault is not None:
                setup = busy_setup(rng, url, chosen.storage_blocks)
            note(f"{setup} {chosen}")
            place = memory, url, lambda: happens(rng, folder)
            lives = _Lives(setup, chosen, rng, counts, note, *place)
            for _ in range(NUM_LIVES):
                lives.live(steps // NUM_LIVES)


def await_listing(engine):
    """Wait until an engine's store is listed, if it can be."""
    for _ in range(MAX_POLLS):
        if engine.storage.is_listed:
            break
        engine.hear()
        time.sleep(0.001)


def busy_setup(rng, url, storage_blocks, write=None):
    """Choose an engine that often needs what only its store has."""
    if url.startswith("mooncake:"):  # It has no list.
        how_it_hears = {"storage_list_s": 0.0, "storage_probe_s": 4.0}
    else:
        how_it_hears = {"storage_list_s": 10.0}
    groups = rng.choice(list(GROUPS))
    setup = random_setup(
        rng,
        groups=groups,
        storage=url,
        num_host_blocks=rng.choice((12, 20)) * len(GROUPS[groups]),
        storage_bytes=storage_blocks * 1024,
        storage_write=write or rng.choice(("through", "through", "on_reuse")),
        store_threshold=0,
        max_unseen_blocks=None,
        skip_slow_loads=False,
        **how_it_hears,
    )
    return dataclasses.replace(setup, stuck=0.0)


class _Lives:
    """Engines of one model and one store, and what happens to it."""

    def __init__(self, setup, fault, rng, counts, note, memory, url, happens):
        self.setup, self.fault, self.rng = setup, fault, rng
        self.counts, self.note = counts, note
        self.memory, self.url, self.happens = memory, url, happens
        self.seed = rng.random()
        self.num_stores = 0
        self.last = None

    def live(self, steps):
        rng, counts = self.rng, self.counts
        stores, engines = [], []
        for _ in range(self.fault.num_engines):
            store, engine = self.new_engine()
            stores.append(store)
            engines.append(engine)
        try:
            for number in range(steps // len(engines)):
                for engine in engines:
                    engine.step()
                    if number % 16 == 15:
                        engine.check()
                self.apply_fault(stores)
            if rng.random() < 0.3:
                counts["engines that died"] += len(engines)
            else:
                for engine in engines:
                    engine.settle()
            for engine in engines:
                engine.check()
                engine.count_storage()
                stats = engine.storage.storage_io.stats
                for reason, num in (stats.refused | stats.failed).items():
                    counts[f"store: {reason}"] += num
        finally:
            for engine in engines:
                engine.storage.close()
            for store in stores:
                store.let_go()
                injected = {name: n for name, n in store.num_faults.items() if n}
                for name, num in injected.items():
                    counts[f"store: {name}, injected"] += num
        self.last = engines[-1]

    def new_engine(self):
        shared = self.memory or open_store(self.url)
        store = FaultyStore(shared, f"{self.seed}/{self.num_stores}", self.fault.faults)
        self.num_stores += 1
        # In place of the plain folder.
        with mock.patch.object(storage_worker, "open_store", return_value=store):
            engine = PagedEngine(self.setup, self.rng, self.counts, self.note)
        if self.last is not None:
            engine.follow(self.last)
        await_listing(engine)
        return store, engine

    def apply_fault(self, stores):
        """Sometimes apply the chosen fault to the store."""
        if self.rng.random() < 0.02:
            num = sum(store.let_go() for store in stores)
            if num:  # Calls that were already abandoned.
                self.counts["store: answers after a hang"] += num
        if self.rng.random() >= self.fault.share:
            return
        if self.memory is not None:
            self.memory._blobs.clear()
            self.counts["store: mishaps"] += 1
        else:
            self.counts["store: mishaps"] += self.happens()
