"""An engine that talks for ever and writes to a store; `test_storage.py` kills it.

python -m tests.tools.demo.storage_child FOLDER SEED
"""

import itertools
import sys

from jaxkv.tools.demo.engine import Engine
from jaxkv.tools.demo.steps import make_steps
from tests.tools.demo import test_storage


def main(folder, seed):
    steps = make_steps(test_storage.FULL, seed=0)
    alone = Engine(steps, test_storage.plain(host_blocks=0))
    config = test_storage.plain(storage=folder, storage_write="through", host_blocks=20)
    for number in itertools.count():
        engine = Engine(steps, config)
        engine.list_storage()
        expected = test_storage.converse(alone, int(seed) + number)
        if test_storage.converse(engine, int(seed) + number) != expected:
            print("WRONG", flush=True)
        engine.drain()
        print(f"stored {engine.offload.stats.num_storage_stored}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
