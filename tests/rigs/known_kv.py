"""Fake KV: the bytes of a token depend on all tokens before it."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.keys.hashing import NO_EXTRAS
from tests.transfer.shadow import bits

SEQUENCE_AXIS = {"key": 0, "layers": [1, 2]}


def known_kv(tokens, length, extras=NO_EXTRAS, rubbish=True):
    """NumPy arrays with room for `length` tokens; rubbish or zeros after `tokens`."""
    chain = hashlib.sha256(repr(extras).encode())
    rows = []
    for token in tokens:
        chain.update(int(token).to_bytes(4, "little"))
        rows.append(hashlib.shake_128(chain.digest()).digest(32 + 12 + 16))
    filler = b"\xa5" if rubbish else b"\0"
    rows += [filler * 60] * (length - len(rows))
    raw = np.frombuffer(b"".join(rows), np.uint8).reshape(length, 60)
    key = raw[:, :32].copy().view(jnp.bfloat16).reshape(length, 2, 8)
    first = raw[:, 32:44].reshape(length, 3, 4).transpose(1, 0, 2).copy()
    second = raw[:, 44:].copy().view(np.float32).reshape(length, 2, 2)
    return {"key": key, "layers": [first, second.transpose(1, 2, 0).copy()]}


def to_device(kv):
    return jax.tree.map(lambda array: jnp.array(array), kv)


def check_hit(hit, tokens, extras=NO_EXTRAS, length=None):
    length = hit.kv["key"].shape[0] if length is None else length
    wanted = known_kv(tokens[: hit.num_tokens], length, extras, rubbish=False)
    check_equal(hit.kv, wanted)


def check_equal(kv, wanted):
    assert jax.tree.structure(kv) == jax.tree.structure(wanted)
    for mine, its in zip(jax.tree.leaves(kv), jax.tree.leaves(wanted), strict=True):
        assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
        assert np.array_equal(bits(mine), bits(its))
