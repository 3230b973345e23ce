"""Share KV between prompts in JetStream 0.3: a `PrefixCache` for its driver.

Copy `PrefixValue` and `PrefixCache`. With MaxText's engine::

    cache = PrefixCache(
        prefill_cache_like(engine), block_size=16, host_bytes="8GiB", extras=Extras()
    )
    Driver(..., prefix_cache_inst=cache)

JetStream is archived, and on no package registry, so this file has a small engine with
the same interface and random weights, and makes the calls of the driver.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import Extras, Namespace
from jaxkv.integrations.prefix_layout import describe, leaf_paths
from jaxkv.integrations.prefix_store import PrefixStore

MAXTEXT_AXES = {"*cache_prefill_segment_id": -1, "*cached_prefill_*": -4, "*": None}


@dataclasses.dataclass(frozen=True)
class PrefixValue:
    """A loaded prefix, with the attributes of JetStream's ``prefix_cache.Value``."""

    prefix: Any  # The engine's cache, in new arrays; zero after the tokens.
    tokens: tuple[int, ...]
    true_length: int
    padded_length: int  # Tokens that it has room for.
    prefix_size_bytes: int
    device: Any  # The placement of each leaf.


class PrefixCache:
    """Replaces JetStream's class of this name, and keeps each block of KV once.

    The driver passes only tokens: all prompts have the adapter and salt of `extras`, so
    a driver with an adapter store must have no prefix cache. It passes no epoch either:
    after ``store.clear()`` nothing is kept. Leaves without an axis of tokens must be
    zero, or nothing is kept: they may depend on the prompt. An exception would end the
    server, so errors are logged and counted, and are misses.
    """

    def __init__(
        self, cache_like, *, block_size, extras, sequence_axes=MAXTEXT_AXES, **store
    ):
        """Pass the engine's cache, and the axis of tokens by patterns of leaf paths."""
        self.extras, self.errors = extras, 0
        described = describe(cache_like)
        self.treedef = jax.tree.structure(described)
        self.leaves = dict(leaf_paths(described))
        axes = {
            path: next(
                axis
                for pattern, axis in sequence_axes.items()
                if fnmatch.fnmatchcase(path, pattern)
            )
            for path in self.leaves
        }
        self.axes = {path: axis for path, axis in axes.items() if axis is not None}
        self.store = PrefixStore(
            {path: self.leaves[path] for path in self.axes},
            namespace=Namespace("", "", "", "", block_size),
            sequence_axis=self.axes,
            **store,
        )
        self.store.warm_up()

    def contains(self, key):
        """Whether all full blocks of a prompt, at least one, are on the host."""
        return self._attempt(lambda: self.store.contains(key, self.extras)) or False

    def load(self, key, min_common_prefix_key_length=None):
        """Load the longest prefix of whole blocks, or None."""
        return self._attempt(lambda: self._load(key, min_common_prefix_key_length or 0))

    def save(self, key, value):
        """Save the full blocks of a prompt; whether all are held or in flight."""
        return self._attempt(lambda: self._save(key, value)) or False

    def _load(self, key, min_tokens):
        hit = self.store.load(key, self.extras, min_tokens=min_tokens)
        if hit is None:
            return None
        leaves = [
            hit.kv[path]
            if path in self.axes
            else jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            for path, leaf in self.leaves.items()
        ]
        places = [leaf.sharding for leaf in self.leaves.values()]
        return PrefixValue(
            prefix=jax.tree.unflatten(self.treedef, leaves),
            tokens=tuple(key[: hit.num_tokens]),
            true_length=hit.num_tokens,
            padded_length=self.store.max_tokens,
            prefix_size_bytes=sum(leaf.nbytes for leaf in leaves),
            device=jax.tree.unflatten(self.treedef, places),
        )

    def _save(self, key, value):
        if tuple(value.tokens[: len(key)]) != tuple(key):
            raise ValueError("the value's tokens do not begin with the key.")
        arrays, treedef = jax.tree.flatten(value.prefix)
        if treedef != self.treedef:
            raise ValueError(f"the prefix must be {self.treedef}, not {treedef}.")
        arrays = dict(zip(self.leaves, arrays, strict=True))
        flags = [is_zero(arrays[path]) for path in self.leaves.keys() - self.axes]
        num_tokens = min(len(key), value.true_length)
        num_held = self.store.save(
            key,
            {path: arrays[path] for path in self.axes},
            num_tokens,
            self.extras,
            only_if=lambda: all(map(bool, flags)),  # It may wait for the device.
        )
        return (
            0
            < num_held
            == num_tokens // self.store.block_size * (self.store.block_size)
        )

    def _attempt(self, call):
        try:
            return call()
        except Exception:
            self.errors += 1
            logging.exception("a call of the prefix cache failed")
            return None

    def close(self):
        """Wait for transfers in flight."""
        self.store.close()


@jax.jit
def is_zero(array):
    """Return bool[]: whether all bits are zero."""
    return ~jnp.any(jax.lax.bitcast_convert_type(array, jnp.uint8))


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
    with contextlib.closing(make_cache()) as cache:
        for prompt in prompts * 2:
            answered, num_chunks = answer(engine, params, prompt, cache)
            answers.append(answered)
            chunks.append(num_chunks)
            cache.store.flush()  # So that the next prompt finds it.
        held = cache.store.held_bytes
    alone = []
    for prompt in prompts:
        with contextlib.closing(make_cache()) as cache:
            alone.append(answer(engine, params, prompt, cache)[0])
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.init_cache()))
    print(f"chunks computed, prompt by prompt: {chunks}")
    print(f"held on the host: {held} bytes; six whole caches are {6 * whole}")
    print(f"the same answers: {answers == alone * 2}")


if __name__ == "__main__":
    main()
