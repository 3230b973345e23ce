"""An engine that writes to a store; `test_storage.py` kills it.

python -m tests.tools.demo.storage_child write FOLDER SEED
python -m tests.tools.demo.storage_child prefill FOLDER

The first command converses until it is killed. The second one computes prompts for
other engines: each line of its standard input is a JSON list of prompts.
"""

import itertools
import json
import sys

from jaxkv.tools.demo.engine import Engine
from tests.tools.demo import test_storage
from tests.tools.demo.small_engine import steps_of


def write(steps, folder, seed):
    alone = Engine(steps, test_storage.plain(num_host_blocks=0))
    config = test_storage.plain(
        storage=folder, storage_write="through", num_host_blocks=20
    )
    for number in itertools.count():
        engine = Engine(steps, config)
        engine.list_storage()
        expected = test_storage.converse(alone, int(seed) + number)
        if test_storage.converse(engine, int(seed) + number) != expected:
            print("WRONG", flush=True)
        engine.drain()
        print(f"stored {engine.offload.stats.num_storage_stored}", flush=True)


def prefill(steps, folder):
    many = {"storage_write": "through", "num_host_blocks": 400}
    engine = Engine(steps, test_storage.plain(storage=folder, **many))
    engine.warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        for prompt in json.loads(line):
            engine.submit(prompt, 1)
        while engine.has_work or engine.offload.has_pending_stores():
            engine.step()


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    run = {"write": write, "prefill": prefill}[kind]
    run(steps_of("full"), *words)
