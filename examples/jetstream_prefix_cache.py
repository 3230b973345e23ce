"""Share KV between prompts in JetStream: a drop-in for its prefix cache.

With JetStream 0.3 and MaxText this is all::

    cache = PrefixCache(
        prefill_cache_like(engine), block_size=16, host_bytes="8GiB", extras=Extras()
    )
    Driver(..., prefix_cache_inst=cache)

JetStream 0.3 is on no package registry, so this file has a small engine with the same
interface and random weights, and makes the calls of the driver.
"""

import functools

import jax
import jax.numpy as jnp

from jaxkv import Extras
from jaxkv.integrations.jetstream import PrefixCache, PrefixValue

AXES = {"layers/*": 0, "generated": None}  # The axis of tokens, by leaf.
VOCAB, WIDTH, HEADS, LAYERS = 97, 64, 4, 2


class TinyEngine:
    """A transformer with chunked prefill, and the interface of JetStream's `Engine`."""

    use_chunked_prefill, prefill_chunk_size, max_prefill_length = True, 16, 128

    def init_params(self, seed=0):
        """Make random weights."""
        shapes = {"embed": (VOCAB, WIDTH), "position": (self.max_prefill_length, WIDTH)}
        shapes |= {
            f"{name}{n}": (WIDTH, WIDTH) for n in range(LAYERS) for name in "qkvo"
        }
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return {
            name: jax.random.normal(key, shape) * (1 if len(name) > 2 else 0.3)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def init_cache(self):
        """Make the cache of a prompt: room for its KV, and other buffers."""
        kv = (self.max_prefill_length, HEADS, WIDTH // HEADS)
        layers = [{"key": jnp.zeros(kv), "value": jnp.zeros(kv)} for _ in range(LAYERS)]
        return {"layers": layers, "generated": jnp.zeros((8, *kv[1:]))}

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length):
        """Compute a chunk after `existing_prefix`."""
        cache, start = self.init_cache(), 0
        if existing_prefix is not None:
            cache = existing_prefix.cache
            start = len(existing_prefix.common_prefix_tokens)
        cache, token = forward(params, cache, padded_tokens, start, true_length)
        return {"cache": cache, "length": start + true_length}, token

    def insert(self, prefix, decode_state, slot):
        """Start to generate after a prompt, whose arrays are donated."""
        return donate(prefix["cache"]), prefix["length"]

    def generate(self, params, decode_state, token):
        """Compute one more token."""
        cache, length = decode_state
        cache, token = forward(params, cache, token[None], length, 1)
        return (cache, length + 1), token


@functools.partial(jax.jit, donate_argnums=0)
def donate(cache):
    """Copy the cache, so that its old arrays are gone."""
    return jax.tree.map(lambda leaf: leaf + 0, cache)


@jax.jit
def forward(params, cache, tokens, start, true_length):
    """Extend the cache by some tokens, and return the next one."""
    place = start + jnp.arange(len(tokens))
    x = params["embed"][tokens] + params["position"][place]
    layers = []
    for n, layer in enumerate(cache["layers"]):
        norm = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        q, k, v = (
            (norm @ params[f"{name}{n}"]).reshape(len(tokens), HEADS, -1)
            for name in "qkv"
        )
        key = jax.lax.dynamic_update_slice_in_dim(layer["key"], k, start, 0)
        value = jax.lax.dynamic_update_slice_in_dim(layer["value"], v, start, 0)
        scores = jnp.einsum("thd,shd->hts", q, key) / 4
        seen = jnp.arange(len(key))[None, :] <= place[:, None]
        weights = jax.nn.softmax(jnp.where(seen[None], scores, -1e9), axis=-1)
        out = jnp.einsum("hts,shd->thd", weights, value).reshape(x.shape)
        x = x + out @ params[f"o{n}"]
        layers.append({"key": key, "value": value})
    logits = params["embed"] @ x[true_length - 1]
    return cache | {"layers": layers}, jnp.argmax(logits)


class ExistingPrefix:
    """JetStream's class of this name."""

    def __init__(self, cache, common_prefix_tokens):
        self.cache, self.common_prefix_tokens = cache, common_prefix_tokens


def answer(engine, params, prompt, cache, num_tokens=6):
    """Answer a prompt as the driver does; count the computed chunks."""
    size, prefix, num_chunks = engine.prefill_chunk_size, None, 0
    cached = cache.load(prompt, min_common_prefix_key_length=size)
    start = 0 if cached is None else min(len(cached.tokens), len(prompt) - 1)
    start -= start % size
    if start:
        prefix = {"cache": cached.prefix}
    for at in range(start, len(prompt), size):
        chunk = jnp.array(prompt[at : at + size])
        prefix, token = engine.prefill(
            params=params,
            existing_prefix=prefix and ExistingPrefix(prefix["cache"], prompt[:at]),
            padded_tokens=jnp.pad(chunk, (0, size - len(chunk))),
            true_length=len(chunk),
        )
        num_chunks += 1
    key = prompt[: len(prompt) // size * size]
    if key and not cache.contains(key):
        room = engine.max_prefill_length
        cache.save(key, PrefixValue(prefix["cache"], key, len(key), room, 0, None))
    state, answered = engine.insert(prefix, None, 0), [int(token)]
    while len(answered) < num_tokens:
        state, token = engine.generate(params, state, token)
        answered.append(int(token))
    return answered, num_chunks


def main():
    """Answer prompts with a common prefix, twice, with and without the cache."""
    engine = TinyEngine()
    params = engine.init_params()
    system = tuple((7 * n * n + 3) % VOCAB for n in range(48))
    prompts = [
        (*system, *((n * who) % VOCAB for n in range(23))) for who in range(1, 7)
    ]

    def make_cache():
        like = engine.init_cache()
        sizes = {"block_size": 8, "num_host_blocks": 64}
        return PrefixCache(like, extras=Extras(), sequence_axes=AXES, **sizes)

    answers, chunks = [], []
    with make_cache() as cache:
        for prompt in prompts * 2:
            answered, num_chunks = answer(engine, params, prompt, cache)
            answers.append(answered)
            chunks.append(num_chunks)
            cache.store.flush()  # So that the next prompt finds it.
        held = cache.store.held_bytes
    alone = []
    for prompt in prompts:
        with make_cache() as cache:
            alone.append(answer(engine, params, prompt, cache)[0])
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.init_cache()))
    print(f"chunks computed, prompt by prompt: {chunks}")
    print(f"held on the host: {held} bytes; six whole caches are {6 * whole}")
    print(f"the same answers: {answers == alone * 2}")


if __name__ == "__main__":
    main()
