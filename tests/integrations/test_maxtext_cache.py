"""Where each token's KV lies in MaxText's caches, against lists of tokens."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.integrations.maxtext_cache import (
    find_layers,
    prompt_kv,
    resume_cache,
    slot_kv,
)

LENGTH, RING, SLOTS, HEADS, DIM = 12, 7, 3, 2, 4
LAYOUTS = {
    "scanned": {("decoder", "layers"): (5,)},
    "unscanned": {("decoder", f"layers_{n}"): () for n in range(2)},
    "mixed": {("decoder", "layers"): (2, 3), ("decoder", "layers_remainder"): (1,)},
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def make_cache(layout, slots):
    """Zeros, as MaxText shapes them; NumPy."""
    cache = {}
    for (top, layer), stack in LAYOUTS[layout].items():
        shapes = {
            "cached_prefill_key": (*stack, LENGTH, HEADS, slots, DIM),
            "cached_prefill_value": (*stack, LENGTH, HEADS, slots, DIM),
            "cache_prefill_segment_id": (*stack, slots, LENGTH),
            "cached_ar_key": (*stack, RING, HEADS, slots, DIM),
            "cached_ar_value": (*stack, RING, HEADS, slots, DIM),
            "cache_ar_segment_id": (*stack, slots, RING),
            "cache_ar_index": (*stack, 1),
            "cached_ar_lengths": (*stack, slots),
        }
        leaves = {
            name: np.zeros(shape, np.float32 if name[-1] in "ye" else np.int32)
            for name, shape in shapes.items()
        }
        cache.setdefault(top, {})[layer] = {"self_attention": {"KVCache_0": leaves}}
    return cache


def leaf_groups(cache):
    """Each layer's leaves, with what makes its values differ from other layers'."""
    for number, layer in enumerate(cache["decoder"].values()):
        yield number, layer["self_attention"]["KVCache_0"]


def kv_of(token, number, which, stack):
    """The KV of a token in a stack of layers: numbers that occur nowhere else."""
    shape = (*stack, HEADS, DIM)
    base = ((token * 4 + number) * 2 + which) * 64
    return (base + np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


class Engine:
    """What MaxEngine does to its caches, one step at a time."""

    def __init__(self, layout):
        self.layout = layout
        self.cache = make_cache(layout, SLOTS)
        for _, leaves in leaf_groups(self.cache):
            for name in ("cached_prefill_key", "cached_prefill_value"):
                leaves[name][...] = -1  # Of requests before; never to be seen.
        self.generated = np.zeros((SLOTS, 1), np.int32)
        self.lists = [[] for _ in range(SLOTS)]  # The oracle.
        self.next_token = 1

    def new_tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def insert(self, slot, num_prompt):
        self.lists[slot] = self.new_tokens(num_prompt)
        self.generated[slot] = 0
        for number, leaves in leaf_groups(self.cache):
            stack = leaves["cache_ar_index"].shape[:-1]
            segments = leaves["cache_prefill_segment_id"]
            segments[..., slot, :] = np.arange(LENGTH) < num_prompt
            for which, name in enumerate(("key", "value")):
                prefill = leaves[f"cached_prefill_{name}"]
                prefill[..., slot, :] = -2  # The padding of a prompt.
                for row, token in enumerate(self.lists[slot]):
                    kv = kv_of(token, number, which, stack)
                    prefill[..., row, :, slot, :] = kv

    def step(self):
        for slot, tokens in enumerate(self.lists):
            tokens += self.new_tokens(1)  # Of empty slots too: they take part.
            for number, leaves in leaf_groups(self.cache):
                index = leaves["cache_ar_index"]
                row = index.flat[0]
                for which, name in enumerate(("key", "value")):
                    leaves[f"cached_ar_{name}"][..., row, :, slot, :] = kv_of(
                        tokens[-1], number, which, index.shape[:-1]
                    )
        for _, leaves in leaf_groups(self.cache):
            leaves["cache_ar_index"][...] = (leaves["cache_ar_index"] + 1) % RING
        self.generated += 1

    def state(self):
        # A copy: jax may take NumPy's memory as it is, which then changes.
        state = {"cache": self.cache, "generated_tokens": self.generated}
        return jax.tree.map(lambda array: jnp.array(array.copy()), state)


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


@pytest.mark.parametrize("seed", range(3))
@layouts
def test_a_slot_gives_its_own_tokens_around_the_ring(layout, seed):
    rng = random.Random(seed)
    engine = Engine(layout)
    wrapped = overwritten = 0
    for _ in range(60):
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
    assert min(wrapped, overwritten) > 0  # The cases that matter have come up.


def test_a_prompt_with_padding_inside_is_not_taken():
    engine = Engine("scanned")
    engine.insert(1, 6)
    assert bool(slot_kv(engine.state(), 1, 3)[1])
    for _, leaves in leaf_groups(engine.cache):
        leaves["cache_prefill_segment_id"][..., 1, 4] = 0
    assert not bool(slot_kv(engine.state(), 1, 3)[1])


def test_a_slot_compiles_once():
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
    """Replace leaves in each layer; None takes one out."""
    for _, layer in leaf_groups(cache):
        for name, leaf in leaves.items():
            if leaf is None:
                del layer[name]
            else:
                layer[name] = np.zeros(leaf, np.float32)
    return cache


CHANGES = [
    ({"cached_prefill_key_scale": (2, LENGTH, HEADS, 1, 1)}, "holds quantised KV"),
    (
        {"cache_prefill_segment_id": None, "cached_prefill_key": (1, HEADS, 4, 4)},
        "holds the state of a linear-attention layer",
    ),
    ({"conv_state": (1, 3, 4)}, "holds the state of a linear-attention layer"),
    ({"cached_prefill_value": (5, LENGTH, HEADS, 1, 3)}, "latent attention"),
    ({"key_pages": (2, 4, 8, 4)}, "holds pages"),
    ({"entry_count": (1, 1)}, r"jaxkv does not know what to make: \['entry_count'\]"),
    (
        {
            "cached_prefill_key": (5, 1, LENGTH, HEADS, DIM),
            "cached_prefill_value": (5, 1, LENGTH, HEADS, DIM),
        },
        'prefill_cache_axis_order="1,2,0,3"',
    ),
    ({"cached_ar_key": (5, 1, RING, HEADS, DIM)}, 'ar_cache_axis_order="1,2,0,3"'),
]


@pytest.mark.parametrize(("leaves", "message"), CHANGES)
def test_a_cache_that_cannot_be_cut_is_refused_with_the_reason(leaves, message):
    cache = change(make_cache("scanned", 1), **leaves)
    with pytest.raises(
        ValueError, match=f"^'decoder/layers/self_attention/KVCache_0' .*{message}"
    ):
        prompt_kv(cache)


def test_the_latents_of_mla_are_refused_by_name_too():
    cache = make_cache("scanned", 1)
    attention = cache["decoder"]["layers"]["self_attention"]
    attention["MlaKVCache_0"] = attention.pop("KVCache_0")
    with pytest.raises(ValueError, match=r"latent attention \(MLA\)"):
        prompt_kv(cache)


def test_what_is_no_prefill_cache_is_refused():
    with pytest.raises(ValueError, match="the cache has no leaves"):
        prompt_kv({})
    with pytest.raises(ValueError, match=r"has 3 slots; .* must be a prefill's"):
        prompt_kv(make_cache("unscanned", SLOTS))


def test_kv_of_another_cache_is_refused():
    cache = make_cache("unscanned", 1)
    kv = prompt_kv(cache)
    with pytest.raises(ValueError, match=r"num_tokens=13 must be in \[0, 12\]"):
        resume_cache(cache, kv, 13)
    with pytest.raises(ValueError, match="they must be the same"):
        resume_cache(make_cache("scanned", 1), kv, 4)
    path, leaf = kv.popitem()
    with pytest.raises(ValueError, match=r"float32\[6, 2, 1, 4\] at .*\[12, 2, 1, 4\]"):
        resume_cache(cache, {**kv, path: leaf[:6]}, 4)
