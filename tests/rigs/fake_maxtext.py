"""MaxEngine's changes of its caches in NumPy, with KV that identifies its token."""

import jax
import jax.numpy as jnp
import numpy as np

LENGTH, RING, SLOTS, HEADS, DIM = 12, 7, 3, 2, 4
LAYOUTS = {
    "scanned": {("decoder", "layers"): (5,)},
    "unscanned": {("decoder", f"layers_{n}"): () for n in range(2)},
    "mixed": {("decoder", "layers"): (2, 3), ("decoder", "layers_remainder"): (1,)},
}


def make_cache(layout, slots):
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
    """The leaves of each layer, with an offset for its values."""
    for number, layer in enumerate(cache["decoder"].values()):
        yield number, layer["self_attention"]["KVCache_0"]


def kv_of(token, number, which, stack):
    shape = (*stack, HEADS, DIM)
    base = ((token * 4 + number) * 2 + which) * 64
    return (base + np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


class Engine:
    """Changes caches as MaxEngine does, one step at a time."""

    def __init__(self, layout):
        self.layout = layout
        self.cache = make_cache(layout, SLOTS)
        for _, leaves in leaf_groups(self.cache):
            for name in ("cached_prefill_key", "cached_prefill_value"):
                leaves[name][...] = -1  # From earlier requests; must never be read.
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
            tokens += self.new_tokens(1)  # Empty slots too: they take part.
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
        # A copy: jax may use NumPy's memory, which changes later.
        state = {"cache": self.cache, "generated_tokens": self.generated}
        return jax.tree.map(lambda array: jnp.array(array.copy()), state)
