"""The parts of JetStream's driver and engine that a prefix cache sees.

The example has the engine and the driver's calls of a prefix cache. This file adds a
thread for each engine, and LoRA adapters that are merged into the weights while a
prompt is served.
"""

import asyncio
import concurrent.futures
import itertools
import threading
import types

import jax
import numpy as np

from examples.jetstream_prefix_cache import TinyEngine, answer

NO_CACHE = types.SimpleNamespace(
    load=lambda *_, **__: None, contains=lambda _: True, save=None
)


class Engine(TinyEngine):
    """The example's engine, which can merge adapters."""

    def apply_adapter(self, params, config, lora_params):
        params["q0"] = params["q0"] + lora_params
        params["k1"] = params["k1"] + lora_params

    def unapply_adapter(self, params, config, lora_params):
        # Not by subtraction: the weights must be the same to the last bit.
        params |= config["base"]


class AdapterStore:
    """Weights by name, with coroutines."""

    def __init__(self, params):
        self.base = {name: params[name] for name in ("q0", "k1")}
        self.weights = {}

    async def register_adapter(self, adapter_id, path, config):
        self.weights[adapter_id] = jax.random.normal(
            jax.random.key(path), self.base["q0"].shape
        )

    async def get_lora_config(self, adapter_id, load_if_not_loaded=False):
        return {"base": self.base}

    async def get_lora_weights(self, adapter_id, load_if_not_loaded=False):
        return self.weights[adapter_id]


def drive(engines, params, prompts, cache=NO_CACHE, stores=None, adapter_ids=None):
    """Answer prompts, with a thread for each engine, and perhaps its adapter store.

    Returns the tokens, and the number of computed chunks.
    """
    thread = threading.local()
    setups = iter(zip(engines, stores or [None] * len(engines), strict=True))

    def begin():
        thread.engine, thread.store = next(setups)
        thread.params = dict(params)

    def fetch(*args, **named):
        weights = asyncio.run(thread.store.get_lora_weights(*args, **named))
        return asyncio.run(thread.store.get_lora_config(*args, **named)), weights

    def serve(prompt, name):
        engine = thread.engine
        if name:
            fetched = fetch(adapter_id=name, load_if_not_loaded=True)
            engine.apply_adapter(thread.params, *fetched)
        answered = answer(engine, thread.params, prompt, cache)
        if name:
            engine.unapply_adapter(thread.params, *fetch(name))
        return answered

    adapter_ids = adapter_ids or [""] * len(prompts)
    with concurrent.futures.ThreadPoolExecutor(len(engines), "", begin) as threads:
        answered = list(threads.map(serve, prompts, adapter_ids))
    return [tokens for tokens, _ in answered], sum(chunks for _, chunks in answered)


class Flushing:
    """A cache that flushes, so that each prompt finds all earlier saves."""

    def __init__(self, cache):
        self.load, self.contains, self._cache = cache.load, cache.contains, cache

    def save(self, key, value):
        saved = self._cache.save(key, value)
        self._cache.flush()
        return saved


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def common_length(key, other_key):
    pairs = zip(key, other_key, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def shared_prompts(num_prompts, seed=0, vocab_size=97):
    """Prompts of 40 to 112 tokens: some system prompts, some documents, questions."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, vocab_size, 32) for _ in range(2)]
    documents = [rng.integers(0, vocab_size, 56) for _ in range(6)]
    prompts = []
    for _ in range(num_prompts):
        pieces = [systems[rng.integers(2)]]
        if rng.random() < 0.7:
            pieces.append(documents[rng.integers(6)])
        pieces.append(rng.integers(0, vocab_size, rng.integers(8, 25)))
        prompts.append(tuple(int(token) for token in np.concatenate(pieces)))
    return prompts
