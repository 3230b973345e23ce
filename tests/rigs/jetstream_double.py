"""The parts of JetStream's driver and engine that a prefix cache sees.

The example has the engine and the driver's calls of a prefix cache. This file adds a
thread for each engine.
"""

import concurrent.futures
import itertools
import threading
import types

import jax
import numpy as np

from examples.jetstream_prefix_cache import answer

NO_CACHE = types.SimpleNamespace(
    load=lambda *_, **__: None, contains=lambda _: True, save=None
)


def drive(engines, params, prompts, cache=NO_CACHE):
    """Answer prompts, with a thread for each engine.

    Returns the tokens, and the number of computed chunks.
    """
    thread, rest = threading.local(), iter(engines)

    def begin():
        thread.engine = next(rest)

    def serve(prompt):
        return answer(thread.engine, params, prompt, cache)

    with concurrent.futures.ThreadPoolExecutor(len(engines), "", begin) as threads:
        answered = list(threads.map(serve, prompts))
    return [tokens for tokens, _ in answered], sum(chunks for _, chunks in answered)


class Flushing:
    """A cache that flushes, so that each prompt finds all earlier saves."""

    def __init__(self, cache):
        self.load, self.contains, self._cache = cache.load, cache.contains, cache

    def save(self, key, value):
        saved = self._cache.save(key, value)
        self._cache.store.flush()
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
