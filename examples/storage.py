"""Two engines that share a folder: the second finds what the first has computed.

They stand for two servers of one model, or for one that is started again. Needs the
extra "demo".
"""

import dataclasses
import tempfile

from jaxkv import OffloadConfig
from jaxkv.tools.demo.engine import Engine
from jaxkv.tools.demo.model import ModelConfig
from jaxkv.tools.demo.records import EngineConfig
from jaxkv.tools.demo.steps import make_steps

config = EngineConfig(
    block_size=32,
    device_blocks=40,
    concurrency=2,
    max_seq_tokens=640,
    weights_epoch="random from seed 0",
    # Write all that gets to the host, not only what is asked again.
    offload=OffloadConfig(num_host_blocks=256, storage_write="through"),
)
steps = make_steps(ModelConfig(num_layers=2), seed=0)
prompts = [[(7 * who + i * i) % 256 for i in range(600)] for who in range(3)]

with tempfile.TemporaryDirectory() as folder:
    for number in (1, 2):
        offload = dataclasses.replace(config.offload, storage=folder)
        engine = Engine(steps, dataclasses.replace(config, offload=offload))
        engine.list_storage()  # or serve at once: it goes on in the background
        requests = [engine.submit(prompt, max_new_tokens=4) for prompt in prompts]
        while engine.has_work:
            engine.step()
        for who, request in enumerate(requests):
            print(
                f"engine {number}, prompt {who}: {request.generated}, "
                f"{request.host_hit_tokens} of {len(request.prompt)} tokens by way of "
                "the host"
            )
        engine.close()
