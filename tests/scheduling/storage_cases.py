"""One of two processes that share a store; `test_storage_processes.py` starts them.

python -m tests.scheduling.storage_cases ADDRESS NUM_PROCESSES PROCESS SEED STEPS FOLDER

It prints a line of JSON: what it decided, and what has moved.
"""

import collections
import json
import random
import sys

import jax
import numpy as np

from tests.campaign.paged import PagedEngine
from tests.campaign.setups import random_setup


def main(address, num_processes, process, seed, num_steps, folder):
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
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("heads",))
    counts, history = collections.Counter(), collections.deque(maxlen=40)
    own = random.Random(f"{seed}/{process}")
    print(setup, flush=True)
    digests, stories = [], []
    for _ in range(2):  # The second finds what the first has written.
        engine = PagedEngine(setup, rng, counts, history.append, mesh, own)
        engine.stories = stories
        try:
            engine.run(int(num_steps))
        except BaseException:
            print("\n".join(history), flush=True)
            raise
        stories = engine.stories
        digests.append([engine.digest.hex(), engine.workers[0].plan_digest.hex()])
        engine.storage.close()
    print(json.dumps({"counts": counts, "digests": digests}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
