"""Serve prompts, and their metrics over HTTP; read these as Prometheus would.

Needs the extras "demo" and "metrics". grafana.json beside this is a dashboard;
docs/metrics.md explains each metric.
"""

import urllib.request

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jaxkv import OffloadConfig
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.tools.demo.engine import Engine
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.steps import make_steps

config = EngineConfig(
    block_size=32,
    device_blocks=24,  # one prompt's worth
    concurrency=2,
    max_seq_tokens=640,
    weights_epoch="random from seed 0",
    offload=OffloadConfig(num_host_blocks=128),
)
engine = Engine(make_steps(ModelConfig(num_layers=2), seed=0), config)

# In a server: OffloadMetrics(scheduler, worker, pool).serve(9400)
registry = CollectorRegistry()
metrics = OffloadMetrics(engine.offload, engine.worker, engine.blocks, registry)
port = metrics.serve(port=0)  # any port that is free, on this machine only

prompts = [[(7 * who + i * i) % 256 for i in range(600)] for who in range(3)]
for _ in range(2):
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=4)
    while engine.has_work:
        engine.step()
engine.drain()

page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
for family in text_string_to_metric_families(page):
    for sample in family.samples:
        if sample.name.endswith("_total") and sample.value:
            print(sample.name, sample.labels, sample.value)
print(metrics.format_line())
metrics.close()
