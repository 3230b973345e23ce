"""Serve prompts and their metrics until interrupted, for Prometheus to scrape.

Needs the extras "demo" and "metrics". Several users at a time ask about a few
documents, which do not all fit on the device, and now and then about a new one. All
optional rules are on, so that every panel of the dashboard in grafana.json has data:

    python examples/serve_metrics.py [PORT]
    jaxkv status [PORT]  # in another terminal
"""

import argparse
import itertools
import signal
import threading

import numpy as np

from jaxkv import OffloadConfig
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.tools.demo.engine import Engine
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.steps import make_steps

BLOCK_SIZE, DOCUMENTS, USERS = 32, 6, 4

parser = argparse.ArgumentParser(
    description="Serve prompts and their metrics until interrupted."
)
parser.add_argument(
    "port",
    nargs="?",
    type=int,
    default=9400,
    metavar="PORT",
    help="port of the metrics, on this machine only; 0 for any (default: 9400)",
)
port = parser.parse_args().port

model = ModelConfig(num_layers=2)
config = EngineConfig(
    block_size=BLOCK_SIZE,
    device_blocks=80,  # three documents' worth
    concurrency=USERS,
    max_seq_tokens=704,
    weights_epoch="random from seed 0",
    offload=OffloadConfig(
        num_host_blocks=64,
        storage="memory://serve-metrics",
        storage_bytes=64 << 20,
        store_threshold=2,
        delay_shared_loads=True,
        max_blocks_in_flight=16,
        skip_slow_loads=True,
        shadow="lru*0.5,1,2;hazard*1;off",
    ),
)
engine = Engine(make_steps(model, seed=0), config)
metrics = OffloadMetrics(engine.offload, engine.worker, engine.blocks)
try:
    port = metrics.serve(port)
except (OSError, ValueError) as error:
    parser.error(str(error))
print(f"metrics at http://127.0.0.1:{port}/metrics until interrupted", flush=True)
print("compiling ...", flush=True)
engine.warm_up()
print("serving prompts", flush=True)

# A step that is interrupted midway may take the pool with it: stop between steps.
stop = threading.Event()
signal.signal(signal.SIGINT, lambda *_: stop.set())

rng = np.random.default_rng(0)
documents = rng.integers(256, size=(DOCUMENTS, 600)).tolist()
for number in itertools.count():
    which = rng.integers(DOCUMENTS)
    if number % 10 == 9:  # Now and then there is a new document.
        documents[which] = rng.integers(256, size=600).tolist()
    for _ in range(USERS):  # They ask about the same document at the same time.
        question = rng.integers(256, size=40).tolist()
        engine.submit(documents[which] + question, max_new_tokens=8)
    while engine.has_work:
        engine.step()
    if number % 100 == 99:
        print(engine.offload.outlook(), metrics.format_line(), sep="\n", flush=True)
    if stop.is_set():
        break
engine.drain()
print(metrics.format_line())
metrics.close()
