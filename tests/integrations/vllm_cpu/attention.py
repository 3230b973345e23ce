"""Paged attention over a ragged batch in jnp, for tpu-inference's Pallas kernels."""

import jax
import jax.numpy as jnp


def ragged_paged_attention(
    queries,  # float[T, q_heads, dim]: all sequences, one after the other
    keys,  # float[T, kv_heads, dim], like the values
    values,
    kv_cache,  # float[pages, page, 2 * kv_heads / packing, packing, padded dim]
    kv_lens,  # i32[S], the new tokens included
    page_indices,  # i32[S * pages of a sequence]
    cu_q_lens,  # i32[S + 1]: where the tokens of each sequence begin
    distribution,  # i32[3]: the last is the number of sequences
    *,
    sm_scale=1.0,
    sliding_window=None,  # tokens that a query sees, itself included
    soft_cap=None,
    use_causal_mask=True,
    update_kv_cache=True,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    **block_sizes,  # of the Pallas kernel
):
    """Write the new keys and values to their pages, then attend to all of a sequence.

    Returns float[T, q_heads, dim] and the new cache. Quantized inputs are not served.
    """
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import merge_kv

    assert q_scale is k_scale is v_scale is None
    num_tokens, num_q_heads, dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_pages, page_size, *_, padded_dim = kv_cache.shape
    tables = page_indices.reshape(kv_lens.shape[0], -1)
    num_rows = tables.shape[1] * page_size
    is_token, sequence, place, page = _places(
        num_tokens, kv_lens, tables, cu_q_lens, distribution, num_pages, page_size
    )
    if update_kv_cache:
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
    # An unwritten row may hold anything, even NaN.
    seen = jnp.where(is_seen[:, :, None, None], value[sequence].astype(jnp.float32), 0)
    output = jnp.einsum("tkgl,tlkd->tkgd", weights, seen)
    output = output.reshape(num_tokens, num_q_heads, dim)
    return jnp.where(is_token[:, None, None], output, 0).astype(queries.dtype), kv_cache


def mla_ragged_paged_attention(
    ql_nope,  # float[q_heads, T, latent]: queries, projected to latents
    q_pe,  # float[T, q_heads, rope]
    new_kv_c,  # float[T, latent]
    new_k_pe,  # float[T, rope]
    cache_kv,  # float[pages, page / packing, packing, padded latent + padded rope]
    kv_lens,
    page_indices,
    cu_q_lens,
    distribution,
    *,
    sm_scale=1.0,
    transpose_kv_cache=False,
    q_scale=1.0,
    k_scale=1.0,
    v_scale=1.0,
    **block_sizes,
):
    """Attend to latents, which all heads share.

    Returns float[q_heads, T, latent] and the new cache.
    """
    assert not transpose_kv_cache
    _, num_tokens, latent_dim = ql_nope.shape
    num_pages, num_rows, packing, dim = cache_kv.shape
    page_size = num_rows * packing
    tables = page_indices.reshape(kv_lens.shape[0], -1)
    is_token, sequence, place, page = _places(
        num_tokens, kv_lens, tables, cu_q_lens, distribution, num_pages, page_size
    )

    def padded(part):
        width = -part.shape[-1] % 128
        return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, width)])

    new = jnp.concatenate([padded(new_kv_c), padded(new_k_pe)], -1)
    pages = cache_kv.reshape(num_pages, page_size, dim)
    pages = pages.at[page, place % page_size].set(
        new.astype(cache_kv.dtype), mode="drop"
    )
    rows = pages[tables].reshape(len(tables), -1, dim)[sequence].astype(jnp.float32)

    query = jnp.concatenate([padded(ql_nope.transpose(1, 0, 2)), padded(q_pe)], -1)
    sm_scale = sm_scale * q_scale * k_scale
    scores = sm_scale * jnp.einsum("tnd,tld->tnl", query.astype(jnp.float32), rows)
    is_seen = jnp.arange(rows.shape[1])[None] <= place[:, None]
    weights = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -1e30), axis=-1)
    seen = jnp.where(is_seen[:, :, None], rows[..., :latent_dim], 0)
    output = v_scale * jnp.einsum("tnl,tld->ntd", weights, seen)
    output = jnp.where(is_token[None, :, None], output, 0).astype(ql_nope.dtype)
    return output, pages.reshape(cache_kv.shape)


def _places(num_tokens, kv_lens, tables, cu_q_lens, distribution, num_pages, page_size):
    """Return for each row whether it is a token, its sequence, place and page."""
    token = jnp.arange(num_tokens)
    is_token = token < cu_q_lens[distribution[2]]
    sequence = jnp.searchsorted(cu_q_lens[1:], token, side="right")
    sequence = jnp.minimum(sequence, kv_lens.shape[0] - 1)
    num_new = cu_q_lens[sequence + 1] - cu_q_lens[sequence]
    place = kv_lens[sequence] - num_new + token - cu_q_lens[sequence]
    page = tables[sequence, jnp.clip(place // page_size, 0, tables.shape[1] - 1)]
    # Padding is written nowhere.
    return is_token, sequence, place, jnp.where(is_token, page, num_pages)
