"""Engines with a store behind the host: one after another, two at once, with faults.

They are the engines of `paged`, which check every byte that they read. All share one
store, so that each finds what those before it have written; and the store goes wrong in
every way that it may.
"""

import pathlib
import tempfile
import time
from unittest import mock

from jaxkv.scheduling import storage_worker
from jaxkv.transfer.storage import LocalStore, MemoryStore
from tests.campaign.paged import PagedEngine
from tests.campaign.setups import random_setup
from tests.rigs.faulty_store import Faults, FaultyDirectStore, FaultyStore

NUM_LIVES = 3
MOST_LOOKS = 200  # Until an engine begins, whether the store is listed or not.

FAULTS = (
    Faults(),
    Faults(error=0.2, raising=0.02),
    Faults(late=0.3, late_s=0.05, error=0.05),
    Faults(hang=0.05),
    Faults(cut=0.1, flip=0.1, longer=0.1, junk=0.1),
    Faults(swap=0.2),
    Faults(lose=0.1, tear=0.1),
)


def run_storage(rng, counts, note, steps):
    """Run engines that share a store, one after another, or two in turns."""
    seed = rng.random()
    with tempfile.TemporaryDirectory(prefix="jaxkv-campaign-") as folder:
        # The same model in all of them: other groups have other keys.
        setup = random_setup(rng, storage=folder)
        faults = rng.choice(FAULTS)
        note(f"{setup} {faults}")
        is_in_memory = rng.random() < 0.5
        shared = MemoryStore() if is_in_memory else LocalStore(folder)
        stores, stories = [], []

        def new_engine():
            kind = rng.choice((FaultyStore, FaultyDirectStore))
            store = kind(shared, f"{seed}/{len(stores)}", faults)
            stores.append(store)
            # In place of the plain folder.
            with mock.patch.object(storage_worker, "open_store", return_value=store):
                engine = PagedEngine(setup, rng, counts, note)
            # Users come back, with what they asked before.
            engine.stories = list(stories)
            for _ in range(MOST_LOOKS):
                if engine.storage.is_listed:
                    break
                engine.hear()
                time.sleep(0.001)
            return engine

        for _ in range(NUM_LIVES):
            engines = [new_engine() for _ in range(rng.choice((1, 1, 2)))]
            for number in range(steps // NUM_LIVES // len(engines)):
                for engine in engines:
                    engine.step()
                    if number % 16 == 15:
                        engine.check()
                if rng.random() < 0.002:
                    empty(shared, folder, is_in_memory)
                    counts["stores emptied"] += 1
            if rng.random() < 0.3:
                counts["engines that died"] += len(engines)
            else:
                for engine in engines:
                    engine.settle()
            for engine in engines:
                engine.check()
                stories = engine.stories
                engine.storage.close()
            for store in stores:
                store.let_go()
        for store in stores:
            for name, num in store.num_faults.items():
                counts[f"store: {name}"] += num


def empty(store, folder, is_in_memory):
    """Delete all objects, as somebody may at any time."""
    if is_in_memory:
        store._blobs.clear()
        return
    for path in pathlib.Path(folder).rglob("*.0"):
        path.unlink(missing_ok=True)
