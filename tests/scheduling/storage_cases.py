"""One of two processes that share a store; `test_storage_processes.py` starts them.

python -m tests.scheduling.storage_cases ADDRESS NUM_PROCESSES PROCESS SEED STEPS \
    FOLDER NUM_LIVES

It prints a line of JSON: for each of two or three engines, one after the other, what it
decided, and what has come from the store; every byte that is read is compared. The
second has the store listed, the third asks it.
"""

import collections
import dataclasses
import json
import random
import sys

import jax
import numpy as np

from tests.campaign.paged import PagedEngine
from tests.campaign.setups import random_setup


def main(address, num_processes, process, seed, num_steps, folder, num_lives):
    num_processes, process = int(num_processes), int(process)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // num_processes)
    jax.distributed.initialize(address, num_processes, process)
    rng = random.Random(seed)
    setup = random_setup(
        rng,
        storage=folder,
        report_after_steps=2,
        check_plans=True,
        deadline_s=50.0,
        agreement_timeout_s=80.0,
        skip_slow_loads=False,
        # So that the second engine finds most blocks of the first in the store.
        store_threshold=0,
        max_unseen_blocks=None,
        storage_write="through",
        storage_bytes="16MiB",
        max_storage_blocks=128,
        storage_probe_s=0.0,
        storage_await_s=0.05,  # Of the clock on the wall: steps do not wait for it.
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("heads",))
    counts, history = collections.Counter(), collections.deque(maxlen=40)
    process_rng = random.Random(f"{seed}/{process}")
    print(setup, flush=True)
    lives, last = [], None
    for life in range(int(num_lives)):  # The others find what the first has written.
        if life == 2:
            asks = {"storage_list_s": 0.0, "storage_probe_s": 5.0}
            config = dataclasses.replace(setup.config, **asks)
            setup = dataclasses.replace(setup, config=config)
        engine = PagedEngine(setup, rng, counts, history.append, mesh, process_rng)
        try:
            if last is not None:
                is_listed = engine.scheduler.wait_for_storage(engine.workers[0], 60.0)
                assert is_listed == (life == 1)
                # The same weights, and users who send their requests again.
                engine.weights, engine.epoch = last.weights, last.epoch
                engine.stories = last.stories
                for tokens, extras in last.stories:
                    engine.submit(list(tokens[: setup.max_tokens - 1]), extras)
            num_held = engine.scheduler.num_storage_blocks_held
            engine.run(int(num_steps) // (1 + (life == 2)))
            engine.count_storage()
        except BaseException:
            print("\n".join(history), flush=True)
            raise
        lives.append(
            {
                "digests": [engine.digest.hex(), engine.workers[0].plan_digest.hex()],
                "held": num_held,
                "found": engine.scheduler.stats.num_storage_found,
                "fetched": engine.scheduler.stats.num_storage_loaded,
                "read here": engine.storage.storage_io.stats.num_read,
            }
        )
        engine.storage.close()
        last = engine
    print(json.dumps({"counts": counts, "lives": lives}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
