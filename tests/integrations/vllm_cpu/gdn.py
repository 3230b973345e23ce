"""Gated delta nets over a ragged batch in jnp, for tpu-inference's Pallas kernel."""

import jax
import jax.numpy as jnp


def conv1d_gdn(
    qkv,  # float[T, dim]: all sequences, one after the other
    b,  # float[T, n_v]: how much of a value is written, before the sigmoid
    a,  # float[T, n_v]: how much of the state is kept, before the softplus
    conv_state,  # float[slots, kernel_size - 1, dim]: the last inputs
    recurrent_state,  # float[slots, n_v, d_k, d_v]
    conv_weight,  # float[dim, 1, kernel_size]
    conv_bias,  # float[dim] or None
    a_log,  # float[n_v]
    dt_bias,  # float[n_v]
    query_start_loc,  # i32[S + 1]: where the tokens of each sequence begin
    state_indices,  # i32[S]: the slot that each sequence writes
    distribution,  # i32[3]: the last is the number of sequences
    seq_lens,  # i32[S], the new tokens included
    read_state_indices,  # i32[S]: the slot that each sequence continues from
    *,
    n_kq,
    n_v,
    d_k,
    d_v,
    kernel_size,
):
    """Convolve the new tokens, apply the gated delta rule, and write the states.

    Token by token, so that no bit depends on how steps cut a sequence. Returns the pair
    of new states, and float[T, n_v * d_v].
    """
    num_tokens, num_sequences = len(qkv), len(seq_lens)
    is_sequence = jnp.arange(num_sequences) < distribution[2]
    num_new = jnp.diff(query_start_loc)
    # The slot of a new sequence is unwritten.
    goes_on = is_sequence & (seq_lens > num_new)

    def before(states):
        kept = states[read_state_indices].astype(jnp.float32)
        return jnp.where(goes_on.reshape(-1, *[1] * (kept.ndim - 1)), kept, 0)

    ends = jnp.where(is_sequence, query_start_loc[1:], num_tokens)
    token = jnp.arange(num_tokens)
    sequence = jnp.searchsorted(ends, token, side="right")
    is_token = token < query_start_loc[distribution[2]]
    sequence = jnp.where(is_token, sequence, num_sequences)  # Written nowhere.

    decay = jnp.exp(-jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias))
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    weight = conv_weight[:, 0].T.astype(jnp.float32)

    def step(states, new):
        convs, recurrents = states
        sequence, inputs, decay, beta = new
        window = jnp.concatenate([convs[sequence], inputs[None]])
        convolved = (window * weight).sum(0)
        if conv_bias is not None:
            convolved += conv_bias
        query, key, value = jnp.split(
            jax.nn.silu(convolved), [n_kq * d_k, 2 * n_kq * d_k]
        )
        query, key = (
            jnp.repeat(_unit(part.reshape(n_kq, d_k)), n_v // n_kq, axis=0)
            for part in (query, key)
        )
        kept = recurrents[sequence] * decay[:, None, None]
        lack = value.reshape(n_v, d_v) - jnp.einsum("hk,hkv->hv", key, kept)
        kept += key[:, :, None] * (beta[:, None] * lack)[:, None]
        output = jnp.einsum("hk,hkv->hv", query * d_k**-0.5, kept)
        states = (
            convs.at[sequence].set(window[1:], mode="drop"),
            recurrents.at[sequence].set(kept, mode="drop"),
        )
        return states, output.ravel()

    states = before(conv_state), before(recurrent_state)
    tokens = sequence, qkv.astype(jnp.float32), decay, beta
    states, output = jax.lax.scan(step, states, tokens)
    has_new = is_sequence & (num_new > 0)
    written = jnp.where(has_new, state_indices, len(conv_state))
    convs, recurrents = (
        pool.at[written].set(new.astype(pool.dtype), mode="drop")
        for pool, new in zip((conv_state, recurrent_state), states, strict=True)
    )
    output = jnp.where(is_token[:, None], output, 0)
    return (convs, recurrents), output.astype(qkv.dtype)


def _unit(vectors):
    return vectors / jnp.sqrt((vectors * vectors).sum(-1, keepdims=True) + 1e-6)
