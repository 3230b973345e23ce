"""A random vLLM around the connector: its scheduler and runner, as they call it.

The stand-ins of `tests/rigs` compare everything that a model reads with its computed
values; this module chooses their requests.
"""

import pathlib
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

from tests.rigs import fake_engine, fake_vllm
from tests.rigs.fake_engine import Engine, reference
from tests.rigs.fake_vllm import Request

WAYS = (
    {"generation": "0.19"},
    {"generation": "0.32"},
    {"generation": "0.32", "is_async": True},
    {"generation": "0.32", "windows": (None, 6)},
    {"generation": "0.32", "windows": (None, 6), "is_async": True},
)
EXTRA = (
    {},
    {"eviction_policy": "arc"},
    {"num_cpu_blocks": 12},
    {"delay_shared_loads": True},
    {"eviction_policy": "hazard"},
    {"retention": True},
    {"store_threshold": 2},
    {"max_unseen_blocks": 2},
    {"offload_prompt_only": True},
)
MAX_REQUESTS = 12
# Weight changes. Only the last two notify the scheduler's half, and in its process.
ROUTES = (
    fake_engine.replace_arrays,
    fake_engine.write_arrays,
    fake_engine.update_in_place,
    fake_engine.drop_by_runner,
    lambda engine: engine.scheduler.connector.reset_cache(),
    lambda engine: engine.scheduler.pool.reset_prefix_cache(),
)
PARAMS = (None, None, {"retention": {"priority": 80, "half_life_s": 0.1}})


def run_connector(rng, counts, note, steps):
    """Serve random requests, and compare the tokens of each."""
    options = dict(rng.choice(WAYS), extra=rng.choice(EXTRA))
    options["num_blocks"] = rng.choice((14, 16, 24)) * len(options.get("windows", "1"))
    note(str(options))
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch, options["generation"])
        if rng.random() < 0.3:  # The halves are in two processes.
            for name in ("LOST_POOLS", "WORKERS"):
                patch.setattr(f"jaxkv.integrations.vllm.scheduler.{name}", {})
        engine = Engine(**options)
        engine.make_unreliable(np.random.default_rng(rng.randrange(1 << 32)))
        with tempfile.TemporaryDirectory() as folder:
            serve(engine, Adapter(folder), rng, counts, note, steps)


class Adapter:
    """An adapter that is trained: written again and loaded in place."""

    def __init__(self, folder):
        self.path = pathlib.Path(folder)
        self.weights = 0
        self.lora = SimpleNamespace(
            adapter_id=1,
            lora_int_id=1,
            name="policy",
            lora_name="policy",
            lora_path=folder,
            load_inplace=True,
        )
        (self.path / "adapter_config.json").write_text("{}")
        self.write()

    def write(self):
        self.weights += 1
        (self.path / "adapter_model.safetensors").write_bytes(b"%9d" % self.weights)


def change_weights(engine, rng, note):
    """Change the model's weights; only requests whose loads are under way stay."""
    scheduler = engine.scheduler
    while engine.in_flight:
        engine.take_output()
    scheduler.reset_running()
    for request in holders(scheduler):
        scheduler.abort(request.request_id)
    route = rng.randrange(len(ROUTES))
    note(f"new weights, by route {route}")
    ROUTES[route](engine)
    engine.runner.weights += 1
    forget_device(scheduler.pool)


def train(engine, adapter, note):
    scheduler = engine.scheduler
    while engine.in_flight:
        engine.take_output()
    for request in list(scheduler.requests.values()):
        if request.lora_request is not None and request.status != "ABORTED":
            scheduler.abort(request.request_id)
    adapter.write()
    engine.runner.lora_manager.add_adapter(adapter.lora)
    note(f"weights {adapter.weights} of the adapter")
    # vLLM's own prefix cache takes the weights of before for these.
    forget_device(scheduler.pool)


def holders(scheduler):
    """Requests that wait with KV in their blocks."""
    return [
        request
        for request in scheduler.requests.values()
        if request.request_id in scheduler.tables
        and request.status != "ABORTED"
        and (
            request.status != "WAITING_FOR_REMOTE_KVS"
            or request.request_id in scheduler.finished_recving
            or request.num_hits
        )
    ]


def forget_device(pool):
    for block in pool.blocks:
        pool.forget(block)


def serve(engine, adapter, rng, counts, note, num_steps):
    """Submit, abort and preempt at random; then serve the rest."""
    scheduler = engine.scheduler
    stories = [[rng.randrange(50) for _ in range(30)] for _ in range(4)]
    served = []
    for _ in range(num_steps):
        counts["steps"] += 1
        if rng.random() < 0.2 and len(scheduler.requests) < MAX_REQUESTS:
            prompt = rng.choice(stories)[: rng.randint(1, 30)]
            prompt += [rng.randrange(50) for _ in range(rng.randint(0, 4))]
            num_output, updates = rng.randint(1, 12), []
            if rng.random() < 0.2:
                prompt, num_output = prompt[:12], rng.randint(2, 6)
                updates = [
                    ([rng.randrange(50) for _ in range(rng.randint(1, 6))], 4)
                    for _ in range(rng.randint(1, 2))
                ]
                # Others ask about all of a turn, its last token included, too.
                said = reference(prompt, num_output, [])
                stories[rng.randrange(len(stories))] = said + stories[0][len(said) :]
            lora = adapter.lora if rng.random() < 0.3 else None
            request = Request(f"r{len(served)}", prompt, num_output, lora)
            if lora is not None:
                engine.runner.adapters[request.request_id] = adapter.weights
            request.kv_transfer_params = rng.choice(PARAMS)
            request.inputs.extend(updates)
            served.append((request, (prompt, num_output, updates)))
            scheduler.add(request)
            note(f"{request.request_id}: {prompt}, then {num_output}, {updates}")
        if rng.random() < 0.01:
            scheduler.reset_running()
            counts["preemptions"] += 1
            note("all that run are preempted")
        if rng.random() < 0.01:
            change_weights(engine, rng, note)
            counts["weights changed"] += 1
        if rng.random() < 0.01:
            train(engine, adapter, note)
            counts["adapters changed"] += 1
        alive = [r for r in scheduler.requests.values() if r.status != "ABORTED"]
        if alive and rng.random() < 0.02:
            victim = rng.choice(alive)
            scheduler.abort(victim.request_id)
            counts["aborts"] += 1
            note(f"{victim.request_id}: aborted")
        engine.step()
    engine.run(max_steps=20_000)
    engine.check_nothing_leaked()
    for request, turns in served:
        if request.status != "ABORTED":
            counts["requests served"] += 1
            wanted = reference(*turns)
            assert request.tokens == wanted, f"{request.request_id}: other tokens"
    counts["block reads compared"] += engine.runner.num_reads
    counts["tokens that vLLM took from the host"] += scheduler.num_external_tokens
