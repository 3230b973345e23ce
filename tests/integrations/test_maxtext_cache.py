"""The KV of tokens in MaxText's caches, compared with lists of tokens."""

import random

import jax
import numpy as np
import pytest

from jaxkv.integrations.maxtext_cache import (
    find_layers,
    prompt_kv,
    resume_cache,
    slot_kv,
)
from tests.rigs.fake_maxtext import (
    DIM,
    HEADS,
    LAYOUTS,
    LENGTH,
    RING,
    SLOTS,
    Engine,
    kv_of,
    leaf_groups,
    make_cache,
)

# Layers one by one, and in stacks of one axis and of two.
layouts = pytest.mark.parametrize("layout", ["unscanned", "mixed"])


def check_rows(engine, kv, tokens):
    """The first rows of each leaf are the KV of these tokens, bit for bit."""
    for number, (path, layer) in enumerate(find_layers(engine.cache).items()):
        stack = layer["cache_ar_index"].shape[:-1]
        for which, name in enumerate(("key", "value")):
            rows = np.asarray(kv[f"{path}/cached_prefill_{name}"])
            assert rows.shape == (*stack, LENGTH, HEADS, 1, DIM)
            for row, token in enumerate(tokens):
                wanted = kv_of(token, number, which, stack)
                np.testing.assert_array_equal(rows[..., row, :, 0, :], wanted)


@layouts
def test_a_slot_gives_its_own_tokens_around_the_ring(layout):
    rng = random.Random(0)
    engine = Engine(layout)
    wrapped = overwritten = 0
    for _ in range(120):
        if rng.random() < 0.25:
            engine.insert(rng.randrange(SLOTS), rng.randint(1, LENGTH))
        else:
            engine.step()
        slot = rng.randrange(SLOTS)
        tokens, generated = engine.lists[slot], engine.generated[slot, 0]
        num_tokens = rng.randint(0, LENGTH)
        kv, has_all = slot_kv(engine.state(), slot, num_tokens)
        assert bool(has_all) == (generated <= RING and num_tokens <= len(tokens))
        if has_all:
            check_rows(engine, kv, tokens[:num_tokens])
            index = next(leaf_groups(engine.cache))[1]["cache_ar_index"].flat[0]
            wrapped += index < generated and num_tokens > len(tokens) - generated
        overwritten += generated > RING
    assert min(wrapped, overwritten) > 0  # The important cases have occurred.


def test_a_slot_with_padding_inside_its_prompt_is_refused():
    engine = Engine("scanned")
    engine.insert(1, 6)
    assert bool(slot_kv(engine.state(), 1, 3)[1])
    for _, leaves in leaf_groups(engine.cache):
        leaves["cache_prefill_segment_id"][..., 1, 4] = 0
    assert not bool(slot_kv(engine.state(), 1, 3)[1])


def test_slot_kv_compiles_once():
    engine = Engine("scanned")
    engine.insert(0, 3)
    slot_kv.clear_cache()
    for slot, num_tokens in ((0, 1), (2, 5), (1, LENGTH)):
        slot_kv(engine.state(), slot, num_tokens)
    assert slot_kv._cache_size() == 1


@layouts
def test_a_cache_to_resume_from_holds_the_prompt_and_an_empty_ring(layout):
    cache = make_cache(layout, 1)
    for number, leaves in leaf_groups(cache):
        for name in leaves:
            leaves[name][...] = 7 + number
    kv = prompt_kv(cache)
    assert len(kv) == 2 * len(LAYOUTS[layout])
    shapes = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), cache
    )
    for num_tokens in (0, 5, LENGTH):
        resumed = resume_cache(shapes, kv, num_tokens)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), resumed) == jax.tree.map(
            lambda a: (a.shape, a.dtype), cache
        )
        for path, leaf in prompt_kv(resumed).items():
            assert leaf is kv[path]
        for leaves in find_layers(resumed).values():
            segments = leaves["cache_prefill_segment_id"]
            wanted = np.broadcast_to(np.arange(LENGTH) < num_tokens, segments.shape)
            np.testing.assert_array_equal(segments, wanted)
            for name in leaves:
                if "_ar_" in name:
                    assert not leaves[name].any()


def change(cache, **leaves):
    """Replace leaves in each layer; None removes one."""
    for _, layer in leaf_groups(cache):
        for name, leaf in leaves.items():
            if leaf is None:
                del layer[name]
            else:
                layer[name] = np.zeros(leaf, np.float32)
    return cache


CHANGES = [
    ({"key_scale": (2, LENGTH, HEADS, 1, 1)}, r"jaxkv does not know \['key_scale'\]"),
    (
        {"cache_prefill_segment_id": None, "cached_prefill_key": (1, HEADS, 4, 4)},
        "holds the state of a linear-attention layer",
    ),
    ({"conv_state": (1, 3, 4)}, "holds the state of a linear-attention layer"),
    ({"cached_prefill_value": (5, LENGTH, HEADS, 1, 3)}, "latent attention"),
    ({"key_pages": (2, 4, 8, 4)}, "holds pages"),
    (
        {
            "cached_prefill_key": (5, 1, LENGTH, HEADS, DIM),
            "cached_prefill_value": (5, 1, LENGTH, HEADS, DIM),
        },
        'prefill_cache_axis_order="1,2,0,3"',
    ),
    ({"cached_ar_key": (5, 1, RING, HEADS, DIM)}, 'ar_cache_axis_order="1,2,0,3"'),
]


def test_a_cache_that_cannot_be_cut_is_refused_with_the_reason():
    for leaves, message in CHANGES:
        cache = change(make_cache("scanned", 1), **leaves)
        where = "^'decoder/layers/self_attention/KVCache_0' .*"
        with pytest.raises(ValueError, match=where + message):
            prompt_kv(cache)
    attention = make_cache("scanned", 1)["decoder"]["layers"]["self_attention"]
    latents = {"decoder": {"MlaKVCache_0": attention.pop("KVCache_0")}}
    for cache, message in [
        (latents, r"latent attention \(MLA\)"),
        ({}, "the cache has no leaves"),
        (make_cache("unscanned", SLOTS), r"has 3 slots; .* must be a prefill's"),
    ]:
        with pytest.raises(ValueError, match=message):
            prompt_kv(cache)


def test_a_cache_to_resume_from_has_the_shardings_it_was_asked_for():
    leaves, treedef = jax.tree.flatten(make_cache("unscanned", 1))
    devices = [jax.devices()[1 + n % 3] for n in range(len(leaves))]
    cache = jax.tree.unflatten(treedef, map(jax.device_put, leaves, devices))
    resumed = resume_cache(cache, prompt_kv(cache), 5)
    assert [leaf.device for leaf in jax.tree.leaves(resumed)] == devices
