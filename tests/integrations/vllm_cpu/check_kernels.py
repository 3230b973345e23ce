"""Compares the kernels of the plugin with tpu-inference's own references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .attention import mla_ragged_paged_attention, ragged_paged_attention
from .experts import fused_moe
from .gdn import conv1d_gdn

SEQUENCES, PAGES_OF_EACH, PAGE, KV_HEADS, Q_HEADS, DIM = 4, 4, 16, 2, 4, 128
LATENT, ROPE = 512, 64
NUM_PAGES, NUM_TOKENS = 40, 64
EXPERTS, CHOSEN = 4, 2
# Of gated delta nets.
DELTAS = {"n_kq": 2, "n_v": 4, "d_k": 32, "d_v": 16}
KERNEL_SIZE, NUM_SLOTS = 4, 12


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


def compare(actual, expected, num_tokens, tolerance):
    """Compare the outputs of attention for the tokens, and the caches bit by bit."""
    outputs, caches = zip(actual, expected, strict=True)
    np.testing.assert_allclose(
        *(np.asarray(output[:num_tokens], np.float32) for output in outputs),
        atol=tolerance,
    )
    np.testing.assert_array_equal(
        *(np.asarray(cache).view(np.uint8) for cache in caches)
    )


def latents(ql_nope, *arrays, **options):
    """The plugin's attention to latents, with queries token by token."""
    output, cache = mla_ragged_paged_attention(
        ql_nope.transpose(1, 0, 2), *arrays, **options
    )
    return output.transpose(1, 0, 2), cache


def random_deltas(rng):
    """Some sequences that begin or go on, from slots other than those they write."""
    width = 2 * DELTAS["n_kq"] * DELTAS["d_k"] + DELTAS["n_v"] * DELTAS["d_v"]
    num_heads = DELTAS["n_v"]
    shapes = [(NUM_TOKENS, width), *[(NUM_TOKENS, num_heads)] * 2]
    shapes += [(NUM_SLOTS, KERNEL_SIZE - 1, width)]
    shapes += [(NUM_SLOTS, num_heads, DELTAS["d_k"], DELTAS["d_v"])]
    shapes += [(width, 1, KERNEL_SIZE), (width,), (num_heads,), (num_heads,)]
    num = rng.integers(1, SEQUENCES + 1)
    new = rng.integers(1, 12, num)
    before, ends = np.zeros(SEQUENCES, np.int32), np.zeros(SEQUENCES + 1, np.int32)
    before[:num] = rng.integers(0, 2, num) * rng.integers(1, 40, num)
    ends[: num + 1] = [0, *np.cumsum(new)]
    ends[num + 1 :] = new.sum()
    slots = 1 + rng.permutation(NUM_SLOTS - 1)[: 2 * SEQUENCES].astype(np.int32)
    arrays = (
        *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes),
        *map(jnp.asarray, (ends, slots[:SEQUENCES])),
        jnp.array([0, num, num], jnp.int32),
        *map(jnp.asarray, (before + np.diff(ends), slots[SEQUENCES:])),
    )
    return arrays, int(new.sum())


def reference_deltas(*arrays):
    """Chain two references, which write to the slots that they read."""
    from tpu_inference.kernels.gdn.reference import ragged_gated_delta_rule_ref as ref
    from tpu_inference.layers.common import ragged_conv1d_jax as conv1d

    qkv, b, a, conv, recurrent, weight, bias, a_log, dt_bias, *rest = arrays
    ends, slots, distribution, lengths, read_slots = rest
    goes_on = lengths > jnp.diff(ends)
    conv, recurrent = (
        pool.at[slots].set(pool[read_slots]) for pool in (conv, recurrent)
    )
    ragged = ends, slots, distribution, goes_on
    mixed, conv = conv1d.ragged_conv1d_mixed_prefill(
        qkv, conv, weight, bias, *ragged, kernel_size=KERNEL_SIZE
    )
    recurrent, output = ref.ragged_gated_delta_rule(
        mixed, b, a, recurrent, a_log, dt_bias, *ragged, **DELTAS
    )
    return output, (conv, recurrent)


def random_experts(rng):
    """Tokens, the weights of gates, values and outputs, and choices."""
    shapes = [(NUM_TOKENS, 32), *[(EXPERTS, 32, 48)] * 2, (EXPERTS, 48, 32)]
    shapes.append((NUM_TOKENS, EXPERTS))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def main():
    """Compare random batches; raise where they differ."""
    from tpu_inference.kernels.fused_moe.v1.kernel import ref_moe
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
            expected = kernel.ref_ragged_paged_attention(*arrays, **options)
            attend = jax.jit(functools.partial(ragged_paged_attention, **options))
            compare(attend(*arrays), expected, num_tokens, tolerance)
            num_alike += 1
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.03)):
        arrays, num_tokens = random_latents(rng, dtype)
        options = {"sm_scale": (LATENT + ROPE) ** -0.5}
        actual = jax.jit(functools.partial(latents, **options))(*arrays)
        # The reference donates the cache.
        expected = mla.ref_mla_ragged_paged_attention(*arrays, **options)
        compare(actual, expected, num_tokens, tolerance)
        num_alike += 1
    for _ in range(3):
        arrays, num_tokens = random_deltas(rng)
        run = jax.jit(functools.partial(conv1d_gdn, kernel_size=KERNEL_SIZE, **DELTAS))
        states, output = run(*arrays)
        expected_output, expected_states = reference_deltas(*arrays)
        num = int(arrays[11][2])
        slots = arrays[10][:num]
        np.testing.assert_allclose(
            output[:num_tokens], expected_output[:num_tokens], atol=1e-5
        )
        for pool, expected in zip(states, expected_states, strict=True):
            np.testing.assert_allclose(pool[slots], expected[slots], atol=1e-5)
        for pool, before in zip(states, arrays[3:5], strict=True):
            unused = np.setdiff1d(np.arange(NUM_SLOTS), slots)
            np.testing.assert_array_equal(pool[unused], before[unused])
        num_alike += 1
    for renormalize in (False, True):
        tokens, gates, values, w2, choices = random_experts(rng)
        options = {"renormalize_topk_logits": renormalize}
        both = jnp.stack([gates, values], 1)
        expected = ref_moe(tokens, both, w2, choices, CHOSEN, **options)
        both = jnp.concatenate([gates, values], 2)
        names = [f"{w}_{kind}" for w in ("w1", "w2") for kind in ("scale", "bias")]
        actual = fused_moe(
            *(tokens, both, w2),
            gating_output=choices,
            topk=CHOSEN,
            renormalize=renormalize,
            activation="silu",
            scoring_fn="softmax",
            **dict.fromkeys(names),
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
        num_alike += 1
    print(f"{num_alike} batches alike")
