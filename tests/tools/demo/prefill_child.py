"""An engine that computes prompts for others and writes them to a store.

python -m tests.tools.demo.prefill_child FOLDER

Each line of its standard input is a JSON list of prompts.
"""

import json
import sys

from jaxkv.tools.demo.engine import Engine
from jaxkv.tools.demo.steps import make_steps
from tests.tools.demo import test_storage


def main(folder):
    config = test_storage.plain(
        storage=folder, storage_write="through", host_blocks=400
    )
    engine = Engine(make_steps(test_storage.FULL, seed=0), config)
    engine.warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        for prompt in json.loads(line):
            engine.submit(prompt, 1)
        while engine.has_work or engine.offload.has_pending_stores():
            engine.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
