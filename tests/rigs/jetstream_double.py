"""The parts of JetStream's driver, engine and prefix cache that a prefix cache sees.

Written from JetStream's documented calls: a driver whose threads prefill in chunks,
query the prefix cache before and save to it afterwards, with the cache's methods and
the attributes of its values; LoRA adapters that are merged into the weights while a
prompt is prefilled.
"""

import asyncio
import dataclasses
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np

from examples.jetstream_prefix_cache import ExistingPrefix, TinyEngine
from jaxkv.integrations.jetstream import PrefixValue


class Engine(TinyEngine):
    """The example's engine, which counts chunks and can merge adapters."""

    def __init__(self):
        self.num_chunks = 0
        self._lock = threading.Lock()

    def prefill(self, **arguments):
        with self._lock:
            self.num_chunks += 1
        return super().prefill(**arguments)

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


@dataclasses.dataclass
class Request:
    tokens: list
    num_tokens: int
    adapter_id: str = ""
    answer: list = dataclasses.field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)


class Driver:
    """A thread for each engine, which prefills and then generates."""

    def __init__(
        self,
        prefill_engines,
        prefill_params,
        prefill_adapterstore=None,
        prefix_cache_inst=None,
    ):
        self._cache = prefix_cache_inst
        self._backlog = queue.Queue()
        stores = prefill_adapterstore or [None] * len(prefill_engines)
        self._threads = [
            threading.Thread(target=self._serve, args=args)
            for args in zip(prefill_engines, prefill_params, stores, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tokens, num_tokens=6, adapter_id=""):
        request = Request(list(tokens), num_tokens, adapter_id)
        self._backlog.put(request)
        return request

    def answer(self, prompts, **options):
        requests = [self.submit(prompt, **options) for prompt in prompts]
        for request in requests:
            assert request.done.wait(120)
            if request.error:
                raise request.error
        return [request.answer for request in requests]

    def stop(self):
        for _ in self._threads:
            self._backlog.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def _serve(self, engine, params, store):
        while (request := self._backlog.get()) is not None:
            try:
                self._serve_one(engine, params, store, request)
            except BaseException as error:
                request.error = error
            request.done.set()

    def _serve_one(self, engine, params, store, request):
        lora = request.adapter_id and store is not None
        if lora:
            weights = asyncio.run(
                store.get_lora_weights(
                    adapter_id=request.adapter_id, load_if_not_loaded=True
                )
            )
            config = asyncio.run(
                store.get_lora_config(
                    adapter_id=request.adapter_id, load_if_not_loaded=True
                )
            )
            engine.apply_adapter(params, config, weights)
        tokens = np.array(request.tokens)
        if self._cache is not None and len(tokens) >= engine.prefill_chunk_size:
            prefix, token = self._prefill_with_cache(engine, params, tokens)
        else:
            prefix, token = self._prefill(engine, params, tokens, None)
        if lora:
            weights = asyncio.run(store.get_lora_weights(request.adapter_id))
            config = asyncio.run(store.get_lora_config(request.adapter_id))
            engine.unapply_adapter(params, config, weights)
        state = engine.insert(prefix, None, 0)  # Donates the prefix.
        request.answer = [int(token)]
        while len(request.answer) < request.num_tokens:
            state, token = engine.generate(params, state, token)
            request.answer.append(int(token))

    def _prefill(self, engine, params, tokens, existing):
        size = engine.prefill_chunk_size
        cached = existing.common_prefix_tokens if existing else tokens[:0]
        for at in range(0, len(tokens), size):
            chunk = tokens[at : at + size]
            prefix, token = engine.prefill(
                params=params,
                existing_prefix=existing,
                padded_tokens=jnp.pad(jnp.array(chunk), (0, size - len(chunk))),
                true_length=len(chunk),
            )
            done = np.concatenate([cached, tokens[: at + size]])
            existing = ExistingPrefix(prefix["cache"], done)
        return prefix, token

    def _prefill_with_cache(self, engine, params, tokens):
        size, key = engine.prefill_chunk_size, tuple(tokens.tolist())
        existing, num_known = self._find(key, size)
        prefix, token = self._prefill(engine, params, tokens[num_known:], existing)
        key = key[: len(key) - len(key) % size]
        if not self._cache.contains(key):
            # The driver saves a copy, so that it can donate its own cache.
            copied = jax.tree.map(jnp.copy, prefix["cache"])
            self._cache.save(
                key,
                PrefixValue(
                    prefix=copied,
                    tokens=key,
                    true_length=len(key),
                    padded_length=engine.max_prefill_length,
                    prefix_size_bytes=num_bytes(copied),
                    device=jax.tree.map(lambda leaf: leaf.device, copied),
                ),
            )
        return prefix, token

    def _find(self, key, size):
        """Find a cached prefix of whole chunks that leaves a token to compute."""
        value = self._cache.load(key, min_common_prefix_key_length=size)
        if value is None:
            return None, 0
        num_common = common_length(key, value.tokens)
        num_common -= num_common % size
        if num_common == len(key):
            num_common -= size
        if num_common <= 0:
            return None, 0
        return ExistingPrefix(value.prefix, np.array(key[:num_common])), num_common


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
    return next(
        (n for n, (a, b) in enumerate(zip(key, other_key, strict=False)) if a != b),
        min(len(key), len(other_key)),
    )


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
