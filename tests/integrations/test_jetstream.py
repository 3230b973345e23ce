"""JetStream's driver gives the same tokens with the example's prefix cache."""

import contextlib

import jax.numpy as jnp
import pytest

from examples.jetstream_prefix_cache import AXES, PrefixCache, PrefixValue
from examples.jetstream_prefix_cache import TinyEngine as Engine
from jaxkv import Extras
from tests.rigs.jetstream_double import NO_CACHE, Flushing, drive, shared_prompts

PARAMS = Engine().init_params()


@pytest.fixture
def make():
    """Make caches of the tiny engine that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(**arguments):
            sizes = {"block_size": 8, "num_host_blocks": 512, "extras": Extras()}
            like, named = Engine().init_cache(), {"sequence_axes": AXES} | sizes
            cache = PrefixCache(like, **named | arguments)
            return stack.enter_context(contextlib.closing(cache))

        yield make


def serve(prompts, cache=NO_CACHE, num_threads=1):
    """Answer prompts; return the tokens and the number of computed chunks."""
    return drive([Engine() for _ in range(num_threads)], PARAMS, prompts, cache)


def test_fifty_prompts_get_the_same_tokens_from_one_copy_of_each_block(make):
    prompts = shared_prompts(50)
    expected, chunks_without = serve(prompts)
    assert len({tuple(answer) for answer in expected}) > 25, "all answers are alike"
    cache = make()
    answers, num_chunks = serve(prompts, Flushing(cache))
    assert answers == expected
    # Whole chunks are saved; new chunks, and the last token, are computed.
    chunk, saved, num_needed = Engine.prefill_chunk_size, {()}, 0
    for prompt in prompts:
        num_saved = max(n for n in range(0, len(prompt), chunk) if prompt[:n] in saved)
        num_needed += -(-(len(prompt) - num_saved) // chunk)
        full = len(prompt) // chunk * chunk
        saved |= {prompt[:end] for end in range(8, full + 1, 8)}
    assert num_chunks == num_needed < 0.6 * chunks_without
    assert cache.store.held_bytes == (len(saved) - 1) * cache.store.block_bytes


def test_four_prefill_threads_get_the_same_tokens_from_a_small_store(make):
    prompts = shared_prompts(24, seed=1)
    expected, _ = serve(prompts)
    cache = make(num_host_blocks=24, cache_policy="arc", max_pending_saves=2)
    for _ in range(2):
        answers, _ = serve(prompts, cache, num_threads=4)
        assert answers == expected
    cache.store.flush()
    stats = cache.store.stats
    assert cache.store.held_bytes <= 24 * cache.store.block_bytes
    assert stats.num_evicted > 0
    assert stats.num_host_hit_tokens > 0
    assert (stats.num_dropped_failed, stats.num_loads_failed) == (0, 0)


def test_a_state_of_a_prompt_is_never_served_to_another(make, caplog):
    """A leaf without a sequence axis may be the state after the whole prompt."""
    cache, key = make(), tuple(range(16))
    prefix = Engine().init_cache()
    for generated, num_found in ((-0.0, 0), (jnp.nan, 0), (0.0, 16)):
        filled = prefix | {"generated": jnp.full_like(prefix["generated"], generated)}
        assert cache.save(key, PrefixValue(filled, key, 16, 128, 0, None))
        cache.store.flush()
        hit = cache.load((*key, 1))
        assert (hit.true_length if hit else 0) == num_found
    assert not cache.save(key, None)
    assert cache.errors == 1
    assert "a call of the prefix cache failed" in caplog.text
