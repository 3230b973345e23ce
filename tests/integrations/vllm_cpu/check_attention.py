"""Compares the attention of the plugin with tpu-inference's own reference."""

import jax
import jax.numpy as jnp
import numpy as np

from .attention import ragged_paged_attention

SEQUENCES, PAGES_OF_EACH, PAGE, KV_HEADS, Q_HEADS, DIM = 4, 4, 16, 2, 4, 128
NUM_PAGES, NUM_TOKENS = 40, 64


def random_batch(rng, dtype):
    """Some sequences with some tokens each, in pages of a cache that holds anything."""
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import (
        get_kv_cache_shape,
    )

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    num = rng.integers(1, SEQUENCES + 1)
    new = rng.integers(1, 12, num)
    lengths = np.zeros(SEQUENCES, np.int32)
    lengths[:num] = np.minimum(new + rng.integers(0, 40, num), PAGES_OF_EACH * PAGE)
    ends = np.full(SEQUENCES + 1, new.sum(), np.int32)
    ends[: num + 1] = [0, *np.cumsum(new)]
    pages = rng.permutation(NUM_PAGES)[: SEQUENCES * PAGES_OF_EACH].astype(np.int32)
    arrays = (
        normal(NUM_TOKENS, Q_HEADS, DIM),
        normal(NUM_TOKENS, KV_HEADS, DIM),
        normal(NUM_TOKENS, KV_HEADS, DIM),
        normal(*get_kv_cache_shape(NUM_PAGES, PAGE, KV_HEADS, DIM, dtype)),
        *map(jnp.asarray, (lengths, pages, ends)),
        jnp.array([0, 0, num], jnp.int32),
    )
    return arrays, int(new.sum())


def main():
    """Compare random batches; raise where they differ."""
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

    rng = np.random.default_rng(0)
    num_alike = 0
    for trial in range(3):
        for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.03)):
            arrays, num_tokens = random_batch(rng, dtype)
            options = {"sm_scale": DIM**-0.5}
            if trial % 2:
                options["sliding_window"] = 10
            wanted, cache = kernel.ref_ragged_paged_attention(*arrays, **options)
            found, own = jax.jit(
                lambda *given, options=options: ragged_paged_attention(
                    *given, **options
                )
            )(*arrays)
            np.testing.assert_allclose(
                np.asarray(found[:num_tokens], np.float32),
                np.asarray(wanted[:num_tokens], np.float32),
                atol=tolerance,
            )
            np.testing.assert_array_equal(
                np.asarray(own).view(np.uint8), np.asarray(cache).view(np.uint8)
            )
            num_alike += 1
    print(f"{num_alike} batches alike")
