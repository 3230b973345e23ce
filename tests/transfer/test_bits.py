"""Loaded blocks equal saved blocks, bit for bit.

This also holds where XLA optimizes little, which is this suite's default
(`conftest.py`): there, signalling NaNs came back quietened.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import PoolLayout, dma
from tests.transfer.numbered import Moves
from tests.transfer.shadow import bits

CPU = jax.devices("cpu")[0]
# The mode, and the kernel of its programs. Asynchronous copies are interpreted.
FUSED, STAGED, DMA = ("fused", None), ("staged", None), ("staged", "dma")
WAYS = (FUSED, STAGED, DMA)
LONG = pytest.mark.long
FLOAT8 = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)


def to_device(raw, dtype):
    """u8[blocks, bytes] -> dtype[blocks, 1, elements]."""
    values = raw.view(jnp.dtype(dtype)).reshape(len(raw), 1, -1)
    return jax.device_put(jnp.array(values), CPU)


def every_pattern():
    """u8[64, bytes]: every bit pattern of types of one and of two bytes."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(64, -1)


def float32_patterns():
    """u8[64, bytes]: random bits, every eighth a NaN with a random payload."""
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 1 << 32, (64, 64), np.uint32)
    raw[:, ::8] |= np.uint32(0x7F800001)
    raw[:, ::16] &= ~np.uint32(1 << 22)  # signalling
    raw = raw.view(np.uint8)
    assert np.isnan(raw.view(np.float32)).mean() > 0.1
    return raw


PATTERNS = dict.fromkeys(
    ("bfloat16", "float16", "int8", "uint8", "int16", *FLOAT8), every_pattern()
) | {"float32": float32_patterns()}
# Of a width and a kind each: it takes seconds to compile what interprets the copies.
DMA_DTYPES = ("bfloat16", "int8", "float8_e4m3fn", "float32")


def check_patterns(dtypes, mode, kernel):
    """Save every block, load each into another block of a pool of zeros."""
    num_blocks = 64
    rng = np.random.default_rng(num_blocks)
    patterns = {dtype: PATTERNS[dtype] for dtype in dtypes}
    pool = {dtype: to_device(raw, dtype) for dtype, raw in patterns.items()}
    zeros = {dtype: jnp.zeros_like(leaf) for dtype, leaf in pool.items()}
    moves = Moves(mode, pool, num_blocks + 3, kernel=kernel)
    assert moves.engine.kernel == (kernel or "xla")
    source, target = rng.permutation(num_blocks), rng.permutation(num_blocks)
    host = rng.permutation(num_blocks + 3)[:num_blocks]
    moves.save_now(source, host)
    moves.pool = zeros
    moves.load_now(host, target)
    for dtype, raw in patterns.items():
        assert moves.pool[dtype].dtype == jnp.dtype(dtype)
        assert np.array_equal(bits(pool[dtype])[:, 0], raw), dtype
        back = bits(moves.pool[dtype])[target, 0][np.argsort(source)]
        assert np.array_equal(back, raw), dtype


@pytest.mark.parametrize(("mode", "kernel"), WAYS)
def test_every_bit_pattern_survives(mode, kernel):
    check_patterns(DMA_DTYPES if kernel else PATTERNS, mode, kernel)


@LONG
def test_every_bit_pattern_survives_asynchronous_copies():
    pool = {dtype: to_device(raw, dtype) for dtype, raw in PATTERNS.items()}
    leaves = zip(sorted(pool), PoolLayout.of(pool).leaves, strict=True)
    for dtype in [dtype for dtype, leaf in leaves if dma.accepts(leaf)]:
        check_patterns((dtype,), *DMA)
