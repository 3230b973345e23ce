"""One of several processes that serve one model; `processes.py` starts them.

python -m tests.campaign.process ADDRESS NUM_PROCESSES PROCESS SEED STEPS [LIAR [STORE]]

All choose the same by one generator; faults and pauses come of another one in each.
LIAR is a process that hides failures from its scheduler, if there is one;
STORE a folder that all of them share, if there is one.
"""

import collections
import json
import random
import sys
import time

import jax
import numpy as np

from tests.campaign import corruptions
from tests.campaign.paged import PagedEngine
from tests.campaign.setups import random_setup

NUM_DEVICES = 4


class SlowEngine(PagedEngine):
    """An engine that pauses now and then, other than its peers."""

    pauses = None

    def start(self, scheduled):
        time.sleep(self.pauses.choice((0, 0, 0, 0.002, 0.01)))
        super().start(scheduled)


def main(address, num_processes, process, seed, num_steps, liar="-1", store=None):
    num_processes, process = int(num_processes), int(process)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES // num_processes)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.distributed.initialize(address, num_processes, process)
    rng = random.Random(seed)
    setup = random_setup(
        rng,
        world_size=1,
        report_after_steps=rng.choice((1, 2, 2, 3)),
        check_plans=rng.random() < 0.5,
        deadline_s=50.0,
        agreement_timeout_s=80.0,
        # By the clock on the wall.
        **(
            {"storage": store, "storage_deadline_s": 20.0, "storage_await_s": 0.05}
            if store
            else {}
        ),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("heads",))
    counts, history = collections.Counter(), collections.deque(maxlen=60)
    process_rng = random.Random(f"{seed}/{process}")
    print(setup, flush=True)
    engine = SlowEngine(setup, rng, counts, history.append, mesh, process_rng)
    engine.pauses = process_rng
    if process == int(liar):
        corruptions.a_failed_load_is_reported_as_done(engine)
        corruptions.a_failed_save_is_reported_as_done(engine)
    try:
        engine.run(int(num_steps))
    except BaseException:
        print("\n".join(history), flush=True)
        raise
    digests = engine.digest.hex(), engine.workers[0].plan_digest.hex()
    print(json.dumps({"counts": counts, "digests": digests}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
