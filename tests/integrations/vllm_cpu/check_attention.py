"""Compares the attention of the plugin with tpu-inference's own reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .attention import mla_ragged_paged_attention, ragged_paged_attention

SEQUENCES, PAGES_OF_EACH, PAGE, KV_HEADS, Q_HEADS, DIM = 4, 4, 16, 2, 4, 128
LATENT, ROPE = 512, 64
NUM_PAGES, NUM_TOKENS = 40, 64


def random_batch(rng, dtype):
    """Some sequences with some tokens each, in pages of a cache that holds anything."""
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import (
        get_kv_cache_shape,
    )

    cache = get_kv_cache_shape(NUM_PAGES, PAGE, KV_HEADS, DIM, dtype)
    shapes = [(NUM_TOKENS, Q_HEADS, DIM), *[(NUM_TOKENS, KV_HEADS, DIM)] * 2, cache]
    return _with_tables(rng, dtype, shapes)


def random_latents(rng, dtype):
    """The same of latents, with their queries token by token."""
    from tpu_inference.kernels.mla.v1.kernel import get_kv_cache_shape

    shapes = [(NUM_TOKENS, Q_HEADS, LATENT), (NUM_TOKENS, Q_HEADS, ROPE)]
    shapes += [(NUM_TOKENS, LATENT), (NUM_TOKENS, ROPE)]
    shapes.append(get_kv_cache_shape(NUM_PAGES, PAGE, LATENT + 128, dtype))
    return _with_tables(rng, dtype, shapes)


def _with_tables(rng, dtype, shapes):
    num = rng.integers(1, SEQUENCES + 1)
    new = rng.integers(1, 12, num)
    lengths = np.zeros(SEQUENCES, np.int32)
    lengths[:num] = np.minimum(new + rng.integers(0, 40, num), PAGES_OF_EACH * PAGE)
    ends = np.full(SEQUENCES + 1, new.sum(), np.int32)
    ends[: num + 1] = [0, *np.cumsum(new)]
    pages = rng.permutation(NUM_PAGES)[: SEQUENCES * PAGES_OF_EACH].astype(np.int32)
    arrays = (
        *(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes),
        *map(jnp.asarray, (lengths, pages, ends)),
        jnp.array([0, 0, num], jnp.int32),
    )
    return arrays, int(new.sum())


def compare(own, wanted, num_tokens, tolerance):
    """Compare what attention gives for the tokens, and the caches bit by bit."""
    (found, cache), (expected, other) = own, wanted
    np.testing.assert_allclose(
        np.asarray(found[:num_tokens], np.float32),
        np.asarray(expected[:num_tokens], np.float32),
        atol=tolerance,
    )
    np.testing.assert_array_equal(
        np.asarray(cache).view(np.uint8), np.asarray(other).view(np.uint8)
    )


def latents(ql_nope, *given, **options):
    """The plugin's attention to latents, with queries token by token."""
    output, cache = mla_ragged_paged_attention(
        ql_nope.transpose(1, 0, 2), *given, **options
    )
    return output.transpose(1, 0, 2), cache


def main():
    """Compare random batches; raise where they differ."""
    from tpu_inference.kernels.mla.v1 import kernel as mla
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

    rng = np.random.default_rng(0)
    num_alike = 0
    for trial in range(3):
        for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.03)):
            arrays, num_tokens = random_batch(rng, dtype)
            options = {"sm_scale": DIM**-0.5}
            if trial % 2:
                options["sliding_window"] = 10
            wanted = kernel.ref_ragged_paged_attention(*arrays, **options)
            own = jax.jit(functools.partial(ragged_paged_attention, **options))
            compare(own(*arrays), wanted, num_tokens, tolerance)
            num_alike += 1
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.03)):
        arrays, num_tokens = random_latents(rng, dtype)
        options = {"sm_scale": (LATENT + ROPE) ** -0.5}
        found = jax.jit(functools.partial(latents, **options))(*arrays)
        # It donates the cache.
        wanted = mla.ref_mla_ragged_paged_attention(*arrays, **options)
        compare(found, wanted, num_tokens, tolerance)
        num_alike += 1
    print(f"{num_alike} batches alike")
