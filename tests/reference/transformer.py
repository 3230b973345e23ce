"""The demo's model on one sequence, without paging."""

import jax.numpy as jnp

from jaxkv.tools.demo.model import attention, visible_positions


def reference_forward(model, tokens):
    """Score the token after every prefix: i32[S] -> f32[S, V]."""
    positions = jnp.arange(tokens.size)
    windows = model.config.windows
    masks = [
        visible_positions(positions[None], positions, window) for window in windows
    ]

    def attend(layer, q, k, v):
        return attention(q, k, v, masks[layer % len(windows)])

    return model.logits(model.hidden(tokens[None], positions[None], attend)[0])
