"""Serve two rounds of prompts from a device pool that cannot hold them all.

The engine is a small but real one: a transformer with paged KV, chunked prefill and
continuous batching, driven by jaxkv's offload scheduler. Needs the extra "demo".
"""

from jaxkv.tools.demo.engine import Engine, EngineConfig
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.steps import make_steps

config = EngineConfig(
    block_size=32,
    device_blocks=40,  # two prompts' worth
    host_blocks=256,  # 0 turns offloading off
    concurrency=2,
    max_seq_tokens=640,
    weights_epoch="random from seed 0",
)
engine = Engine(make_steps(ModelConfig(num_layers=2), seed=0), config)
prompts = [[(7 * who + i * i) % 256 for i in range(600)] for who in range(6)]

for round_number in (1, 2):
    requests = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
    while engine.has_work:
        engine.step()
    for who, request in enumerate(requests):
        print(
            f"round {round_number}, prompt {who}: {request.generated}, "
            f"{request.host_hit_tokens} of {len(request.prompt)} tokens from the host"
        )
engine.drain()
