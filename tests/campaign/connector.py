"""A random vLLM around the connector: its scheduler and runner, as they call it.

The stand-ins of `tests/rigs` compare all that a model reads with what it computed; here
is chosen what is asked of them.
"""

import numpy as np
import pytest

from tests.rigs import fake_vllm
from tests.rigs.fake_engine import Engine, next_token
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
MOST_ALIVE = 12
PARAMS = (None, None, {"retention": {"priority": 80, "half_life_s": 0.1}})


def reference(prompt, num_output, updates):
    """The tokens that a request gets without a host tier, its last turn's."""
    tokens = list(prompt)
    for more, num in ([], num_output), *updates:
        if more:  # The last token of a turn has no KV: it is dropped.
            tokens = [*tokens[:-1], *more]
        for _ in range(num):
            tokens.append(next_token(tokens))
    return tokens


def run_connector(rng, counts, note, steps):
    """Serve random requests, and compare the tokens of each."""
    options = dict(rng.choice(WAYS), extra=rng.choice(EXTRA))
    options["num_blocks"] = rng.choice((14, 16, 24)) * len(options.get("windows", "1"))
    note(str(options))
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch, options["generation"])
        engine = Engine(**options)
        engine.make_unreliable(np.random.default_rng(rng.randrange(1 << 32)))
        serve(engine, rng, counts, note, steps)


def serve(engine, rng, counts, note, num_steps):
    """Submit, abort and preempt at random; then let all be served."""
    scheduler = engine.scheduler
    stories = [[rng.randrange(50) for _ in range(30)] for _ in range(4)]
    served = []
    for _ in range(num_steps):
        counts["steps"] += 1
        if rng.random() < 0.2 and len(scheduler.requests) < MOST_ALIVE:
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
            request = Request(f"r{len(served)}", prompt, num_output)
            request.kv_transfer_params = rng.choice(PARAMS)
            request.inputs.extend(updates)
            served.append((request, (prompt, num_output, updates)))
            scheduler.add(request)
            note(f"{request.request_id}: {prompt}, then {num_output}, {updates}")
        if rng.random() < 0.01:
            scheduler.reset_running()
            counts["preemptions"] += 1
            note("all that run are preempted")
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
