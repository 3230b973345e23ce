"""Paged attention over a ragged batch in jnp, for tpu-inference's Pallas kernel."""

import jax
import jax.numpy as jnp


def ragged_paged_attention(
    queries,
    keys,
    values,
    kv_cache,
    kv_lens,
    page_indices,
    cu_q_lens,
    distribution,
    *,
    sm_scale=1.0,
    sliding_window=None,
    soft_cap=None,
    use_causal_mask=True,
    update_kv_cache=True,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    **block_sizes,
):
    """Write the new keys and values to their pages, then attend to all of a sequence.

    Args:
        queries: float[T, q_heads, dim]. Tokens of all sequences, one after the other.
        keys: float[T, kv_heads, dim].
        values: float[T, kv_heads, dim].
        kv_cache: float[pages, page, 2 * kv_heads / packing, packing, padded dim].
        kv_lens: i32[S]. Tokens of each sequence, the new ones included.
        page_indices: i32[S * pages of a sequence].
        cu_q_lens: i32[S + 1]. Where the tokens of each sequence begin.
        distribution: i32[3]. The last is the number of sequences.
        sm_scale: Factor of the scores.
        sliding_window: How many tokens back a query sees, itself included.
        soft_cap: Bound of the scores.
        use_causal_mask: Whether a query sees only what is before it.
        update_kv_cache: Whether the new keys and values are written.
        q_scale: Of quantised inputs, which are not served.
        k_scale: Likewise.
        v_scale: Likewise.
        block_sizes: Of the Pallas kernel; ignored.

    Returns:
        float[T, q_heads, dim] and the new cache.
    """
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv

    assert q_scale is k_scale is v_scale is None
    num_tokens, num_q_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_pages, page_size, *_, padded_dim = kv_cache.shape
    tables = page_indices.reshape(kv_lens.shape[0], -1)
    num_rows = tables.shape[1] * page_size

    # The sequence of each token, and its place there.
    token = jnp.arange(num_tokens)
    is_token = token < cu_q_lens[distribution[2]]
    sequence = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)
    num_new = cu_q_lens[sequence + 1] - cu_q_lens[sequence]
    place = kv_lens[sequence] - num_new + token - cu_q_lens[sequence]

    if update_kv_cache:
        page = tables[sequence, jnp.clip(place // page_size, 0, tables.shape[1] - 1)]
        page = jnp.where(is_token, page, num_pages)  # Padding is written nowhere.
        new = merge_kv(keys, values).astype(kv_cache.dtype)
        kv_cache = kv_cache.at[page, place % page_size].set(new, mode="drop")

    rows = kv_cache[tables].reshape(len(tables), num_rows, -1, padded_dim)
    rows = rows[:, :, : 2 * num_kv_heads, :].reshape(
        len(tables), num_rows, num_kv_heads, 2, padded_dim
    )
    # merge_kv lays a key and its value side by side before it pads both together.
    key, value = rows[..., 0, :dim], rows[..., 1, :dim]

    grouped = queries.reshape(num_tokens, num_kv_heads, -1, dim).astype(jnp.float32)
    scores = sm_scale * jnp.einsum(
        "tkgd,tlkd->tkgl", grouped, key[sequence].astype(jnp.float32)
    )
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    row = jnp.arange(num_rows)[None]
    is_seen = row < kv_lens[sequence][:, None]
    if use_causal_mask:
        is_seen &= row <= place[:, None]
    if sliding_window is not None:
        is_seen &= row > place[:, None] - sliding_window
    weights = jax.nn.softmax(jnp.where(is_seen[:, None, None], scores, -1e30), axis=-1)
    # A row that nobody wrote may hold anything, NaN too.
    seen = jnp.where(is_seen[:, :, None, None], value[sequence].astype(jnp.float32), 0)
    output = jnp.einsum("tkgl,tlkd->tkgd", weights, seen)
    output = output.reshape(num_tokens, num_q_heads, dim)
    return jnp.where(is_token[:, None, None], output, 0).astype(queries.dtype), kv_cache
