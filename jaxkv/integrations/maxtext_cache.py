"""The layout of MaxText's cache: the KV of a prompt, and of its generated tokens.

The cache is a tree of dicts. For each layer, or once for all layers with their axes in
front (`scan_layers`), it holds, for prompts of at most `S` tokens, `R` rows of
generated tokens, `B` slots, `H` heads of `D` numbers:

    cached_prefill_key, cached_prefill_value    [..., S, H, B, D]
    cache_prefill_segment_id                    i32[..., B, S], 1 where a token is
    cached_ar_key, cached_ar_value              [..., R, H, B, D]
    cache_ar_segment_id                         i32[..., B, R]
    cache_ar_index                              i32[..., 1], the next row to write
    cached_ar_lengths                           i32[..., B]

The rows of generated tokens are one ring for all slots: a step writes the same row of
each slot. So a slot has the tokens of the n steps since its prompt was inserted in the
n rows before the index, around the ring. The decode state's `generated_tokens` has n;
`cached_ar_lengths` is wrong for scanned layers, where inserting sets a layer to zero
instead of a slot.

Observed in MaxText 0.2.4 and 0.2.5. Nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.integrations.prefix_layout import leaf_paths
from jaxkv.types import PyTree

KV: TypeAlias = dict[str, Any]
"""The keys and values of one prompt: path in the cache -> ``[..., S, H, 1, D]``."""

SEQUENCE_AXIS = -4
SLOT_AXIS = -2
PREFILL = ("cached_prefill_key", "cached_prefill_value")
RING = ("cached_ar_key", "cached_ar_value")
SEGMENTS = "cache_prefill_segment_id"
INDEX = "cache_ar_index"
NAMES = {
    *(*PREFILL, *RING, SEGMENTS, INDEX),
    *("cache_ar_segment_id", "cached_ar_lengths"),
}


def prompt_kv(cache: PyTree) -> KV:
    """Return the keys and values in `prefix["cache"]` of a prefill, or their shapes.

    They are not copies: `insert` donates them with the prefix. ValueError for the cache
    of a decode state, or one that cannot be cut by tokens.
    """
    layers = find_layers(cache)
    for path, layer in layers.items():
        if (slots := layer[SEGMENTS].shape[-2]) != 1:
            raise ValueError(
                f"{path!r} has {slots} slots; the cache must be a prefill's, with one."
            )
    return {
        f"{path}/{name}": layer[name]
        for path, layer in layers.items()
        for name in PREFILL
    }


@jax.jit
def slot_kv(
    decode_state: Mapping[str, Any], slot: int, num_tokens: int
) -> tuple[KV, jax.Array]:
    """Gather the keys and values of a slot's first `num_tokens` tokens, at most S.

    It is compiled once per engine and does not wait. Returns copies of the arrays, as
    from a prefill of all these tokens, undefined beyond the slot's tokens; and bool[]:
    whether the slot has all these tokens, none of them overwritten in the ring.
    """
    kv: KV = {}
    has_all = []
    num_generated = decode_state["generated_tokens"][slot, 0]
    for path, layer in find_layers(decode_state["cache"]).items():
        num_slots, length = layer[SEGMENTS].shape[-2:]
        # All layers of a stack have the same, so the first is enough.
        is_used = layer[SEGMENTS].reshape(-1, num_slots, length)[0, slot] != 0
        num_prompt = is_used.sum(dtype=jnp.int32)
        row = jnp.arange(length, dtype=jnp.int32)
        in_prompt = row < num_prompt
        ring_length = layer[RING[0]].shape[SEQUENCE_AXIS]
        oldest = layer[INDEX].reshape(-1)[0] - num_generated
        ring_row = (oldest + row - num_prompt) % ring_length
        for name, ring_name in zip(PREFILL, RING, strict=True):
            prompt = _one_slot(layer[name], slot)
            generated = jnp.take(
                _one_slot(layer[ring_name], slot), ring_row, SEQUENCE_AXIS
            )
            is_prompt = jax.lax.broadcast_in_dim(
                in_prompt, prompt.shape, [prompt.ndim + SEQUENCE_AXIS]
            )
            kv[f"{path}/{name}"] = jnp.where(is_prompt, prompt, generated)
        has_all.append(
            jnp.array_equal(is_used, in_prompt)
            & (num_generated <= ring_length)
            & (num_tokens <= num_prompt + num_generated)
        )
    return kv, jnp.stack(has_all).all()


def resume_cache(cache_like: PyTree, kv: KV, num_tokens: int) -> Any:
    """Build the cache to resume a prefill from, with the layout of `cache_like`.

    It has the first `num_tokens` tokens of `kv`, which becomes part of it, and an empty
    ring. Layers share equal arrays, so it must not be donated.
    """
    made: dict[Any, jax.Array] = {}

    def fill(path: str, leaf: Any) -> Any:
        """Make segment ids of `num_tokens` tokens, or a leaf of zeros."""
        if path in kv:
            return kv[path]
        num_ones = num_tokens if path.endswith(SEGMENTS) else 0
        kind = num_ones, leaf.shape, leaf.dtype, leaf.sharding
        if kind not in made:
            row = (np.arange(leaf.shape[-1]) < num_ones).astype(leaf.dtype)
            filled = jnp.broadcast_to(row, leaf.shape)
            made[kind] = jax.device_put(filled, leaf.sharding)
        return made[kind]

    leaves = [fill(*pair) for pair in leaf_paths(cache_like)]
    return jax.tree.unflatten(jax.tree.structure(cache_like), leaves)


def find_layers(cache: PyTree) -> dict[str, dict[str, Any]]:
    """Group the leaves of a cache by the path of a layer, or stack of layers, and name.

    ValueError if it is not MaxText's cache, or cannot be cut by tokens.
    """
    layers: dict[str, dict[str, Any]] = {}
    for leaf_path, leaf in leaf_paths(cache):
        path, _, name = leaf_path.rpartition("/")
        layers.setdefault(path, {})[name] = leaf
    for path, layer in layers.items():
        if fault := _fault(path, layer):
            raise ValueError(f"{path!r} {fault}.")
    if not layers:
        raise ValueError("the cache has no leaves; it must be a MaxText prefix's.")
    return layers


def _one_slot(array: jax.Array, slot: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, slot, 1, array.ndim + SLOT_AXIS)


def _fault(path: str, layer: Mapping[str, Any]) -> str | None:
    """Return why a layer cannot be served, or None."""
    names = sorted(layer)
    if any(name.startswith(("key_pages", "value_pages")) for name in names):
        return "holds pages, which MaxText cannot resume from: set attention otherwise"
    if (PREFILL[0] in layer and SEGMENTS not in layer) or "conv_state" in layer:
        return (
            "holds the state of a linear-attention layer, which has no axis of tokens "
            "and cannot be cut into blocks"
        )
    if layer.keys() != NAMES:
        odd = sorted(layer.keys() ^ NAMES)
        return f"has {names}, of which jaxkv does not know {odd}"
    key, value = (layer[name].shape for name in PREFILL)
    if key != value or "Mla" in path:
        return (
            "holds the latents of multi-head latent attention (MLA), whose prefill in "
            "MaxText ignores an existing prefix"
        )
    num_slots, length = layer[SEGMENTS].shape[-2:]
    if (key[-4::2] if len(key) >= 4 else key) != (length, num_slots):
        return (
            f"has keys {list(key)} for {num_slots} slots of {length} tokens: their "
            'axes must lie as prefill_cache_axis_order="1,2,0,3" has them'
        )
    ring = layer[RING[0]].shape
    if ring[:-4] + ring[-3:] != key[:-4] + key[-3:] or ring != layer[RING[1]].shape:
        return (
            f"has a ring of {list(ring)} for prompts of {list(key)}: its axes must lie "
            'as ar_cache_axis_order="1,2,0,3" has them'
        )
    return None
