"""Where MaxText's cache has the KV of a prompt, and of the tokens generated since.

The cache is a tree of dicts. For each layer, or once for all of them with their axes in
front (`scan_layers`), it holds, for prompts of at most `S` tokens, `R` rows for
generated ones, `B` slots, `H` heads of `D` numbers:

    cached_prefill_key, cached_prefill_value    [..., S, H, B, D]
    cache_prefill_segment_id                    i32[..., B, S], 1 where a token is
    cached_ar_key, cached_ar_value              [..., R, H, B, D]
    cache_ar_segment_id                         i32[..., B, R]
    cache_ar_index                              i32[..., 1], the row written next
    cached_ar_lengths                           i32[..., B]

The rows of generated tokens are one ring for all slots: a step writes the same row of
each. So a slot that has seen n steps since its prompt was inserted has its tokens in
the n rows before the index, around the ring. How many it has seen is in the decode
state's `generated_tokens`; `cached_ar_lengths` is wrong for scanned layers, where
inserting sets a layer to zero and not a slot.

Observed in MaxText 0.2.4 and 0.2.5. Nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

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
    """Pick the keys and values out of the cache of a prefill.

    Args:
        cache: `prefix["cache"]`, or the shapes of one.

    Returns:
        Its own arrays. Nothing is copied, so they go when `insert` donates the prefix.

    Raises:
        ValueError: The cache is not of prefills, or of a kind that cannot be cut by
            tokens; the message says which.
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
    """Gather the keys and values of a slot: of its prompt, then of what it generated.

    Compiled once for an engine; waits for nothing.

    Args:
        decode_state: As `generate` gave it.
        slot: The request's slot.
        num_tokens: How many tokens are wanted, from the first on, at most S.

    Returns:
        The arrays, a copy, as of a prefill of all these tokens; beyond the tokens that
        the slot has they are rubbish. And bool[], whether it has as many as wanted,
        none of them overwritten on the ring.

    Raises:
        ValueError: As for `prompt_kv`.
    """
    kv: KV = {}
    has_all = []
    num_generated = decode_state["generated_tokens"][slot, 0]
    for path, layer in find_layers(decode_state["cache"]).items():
        num_slots, length = layer[SEGMENTS].shape[-2:]
        # Alike in all layers of a stack, so those of the first do.
        taken = layer[SEGMENTS].reshape(-1, num_slots, length)[0, slot] != 0
        num_prompt = taken.sum(dtype=jnp.int32)
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
            jnp.array_equal(taken, in_prompt)
            & (num_generated <= ring_length)
            & (num_tokens <= num_prompt + num_generated)
        )
    return kv, jnp.stack(has_all).all()


def resume_cache(cache_like: PyTree, kv: KV, num_tokens: int) -> Any:
    """Build the cache to resume a prefill from.

    Args:
        cache_like: The cache of some prefill, or the shapes of one, with shardings if
            its arrays are to have them.
        kv: What is known of the prompt, as `prompt_kv` gives it; becomes part of it.
        num_tokens: How many tokens, from the first on, are to count.

    Returns:
        A cache with these tokens and an empty ring, of the structure of `cache_like`.
        Layers share the arrays that are alike: it is to be read, not donated.

    Raises:
        ValueError: `kv` is not of such a cache, or has no room for `num_tokens`.
    """
    wanted = prompt_kv(cache_like)
    if wanted.keys() != kv.keys():
        raise ValueError(
            f"kv has {sorted(kv)}, the cache {sorted(wanted)}; they must be the same."
        )
    for path, leaf in wanted.items():
        if (kv[path].shape, kv[path].dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(
                f"kv has {kv[path].dtype}{list(kv[path].shape)} at {path!r}, the cache "
                f"{leaf.dtype}{list(leaf.shape)}; they must be the same."
            )
        if not 0 <= num_tokens <= leaf.shape[SEQUENCE_AXIS]:
            raise ValueError(
                f"{num_tokens=} must be in [0, {leaf.shape[SEQUENCE_AXIS]}], the "
                "longest prompt of the cache."
            )

    made: dict[Any, jax.Array] = {}

    def fill(path: Any, leaf: Any) -> Any:
        name = _name(path)
        if name in kv:
            return kv[name]
        what = name.endswith(SEGMENTS), leaf.shape, leaf.dtype, leaf.sharding
        if what not in made:
            made[what] = _fill(*what, num_tokens)
        return made[what]

    return jax.tree.map_with_path(fill, cache_like)


def find_layers(cache: PyTree) -> dict[str, dict[str, Any]]:
    """Group the leaves of a cache by the layer, or stack of layers, that they are of.

    Args:
        cache: The cache of a prefill or of a decode state, or the shapes of one.

    Returns:
        The path of the layer -> the names of its leaves -> the leaves.

    Raises:
        ValueError: It is no cache of MaxText's, or of a kind that cannot be cut by
            tokens; the message says which.
    """
    layers: dict[str, dict[str, Any]] = {}
    for key_path, leaf in jax.tree.leaves_with_path(cache):
        path, _, name = _name(key_path).rpartition("/")
        layers.setdefault(path, {})[name] = leaf
    for path, layer in layers.items():
        if fault := _fault(path, layer):
            raise ValueError(f"{path!r} {fault}.")
    if not layers:
        raise ValueError("the cache has no leaves; it must be a MaxText prefix's.")
    return layers


def _fill(
    is_segments: bool,
    shape: tuple[int, ...],
    dtype: Any,
    sharding: jax.sharding.Sharding | None,
    num_tokens: int,
) -> jax.Array:
    """Make a leaf that says that there are so many tokens, or one of zeros."""
    if is_segments:
        counts = (jnp.arange(shape[-1], dtype=jnp.int32) < num_tokens).astype(dtype)
        filled = jax.lax.broadcast_in_dim(counts, shape, [len(shape) - 1])
    else:
        filled = jnp.zeros(shape, dtype)
    return filled if sharding is None else jax.device_put(filled, sharding)


def _one_slot(array: jax.Array, slot: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, slot, 1, array.ndim + SLOT_AXIS)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _fault(path: str, layer: Mapping[str, Any]) -> str | None:
    """Say why a layer cannot be served."""
    names = sorted(layer)
    if any(name.endswith("_scale") for name in names):
        return (
            "holds quantised KV, which MaxText cannot resume from: set "
            "quantize_kvcache=False"
        )
    if any(name.startswith(("key_pages", "value_pages")) for name in names):
        return "holds pages, which MaxText cannot resume from: set attention otherwise"
    if (PREFILL[0] in layer and SEGMENTS not in layer) or "conv_state" in layer:
        return (
            "holds the state of a linear-attention layer, which has no axis of tokens "
            "and cannot be cut into blocks"
        )
    if layer.keys() != NAMES:
        odd = sorted(layer.keys() ^ NAMES)
        return f"has {names}, of which jaxkv does not know what to make: {odd}"
    key, value = (layer[name].shape for name in PREFILL)
    if key != value or "Mla" in path:
        return (
            "holds the latents of multi-head latent attention (MLA), whose prefill in "
            "MaxText pays no heed to an existing prefix"
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
