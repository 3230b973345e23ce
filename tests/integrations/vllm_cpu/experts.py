"""A mixture of experts in jnp, for tpu-inference's Pallas kernels."""

import jax
import jax.numpy as jnp


def fused_moe(
    hidden_states,  # float[T, dim]
    w1,  # float[experts, padded dim, 2 * padded width]: gates, then values
    w2,  # float[experts, padded width, padded dim]
    gating_output,  # float[T, experts]
    topk,
    renormalize,
    activation,
    scoring_fn,
    expert_score_correction_bias=None,  # float[experts], which the choice alone heeds
    **options,
):
    """Add up the outputs of the `topk` experts of each token, float[T, dim].

    All experts compute all tokens. Neither quantized weights nor biases are served.
    """
    assert activation == "silu"
    scales_and_biases = [options[name] for name in options if name[:2] in ("w1", "w2")]
    assert scales_and_biases == 4 * [None]
    score = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[scoring_fn]
    scores = ranked = score(gating_output)
    if expert_score_correction_bias is not None:
        ranked = scores + expert_score_correction_bias
    _, chosen = jax.lax.top_k(ranked, topk)
    scores = jnp.take_along_axis(scores, chosen, -1)
    if renormalize:
        scores /= scores.sum(-1, keepdims=True)
    shares = jax.nn.one_hot(chosen, len(w1)) * scores[..., None]
    dim = hidden_states.shape[1]
    hidden = jnp.pad(hidden_states, ((0, 0), (0, w1.shape[1] - dim)))
    gates, values = jnp.split(jnp.einsum("td,edf->etf", hidden, w1), 2, -1)
    inner = (jax.nn.silu(gates) * values)[..., : w2.shape[1]]
    output = jnp.einsum("etf,efd,te->td", inner, w2, shares.sum(1))
    return output[:, :dim].astype(hidden_states.dtype)
