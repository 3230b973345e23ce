"""Loaded blocks equal saved blocks, bit for bit.

This also holds where XLA optimizes little, which is this suite's default
(`conftest.py`): there, signalling NaNs came back quietened.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import PoolLayout, TransferEngine, dma
from tests.transfer.numbered import Moves
from tests.transfer.shadow import Shadow, bits, exercise, random_array

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
    engine = TransferEngine(pool, num_blocks + 3, mode=mode, kernel=kernel)
    assert engine.kernel == (kernel or "xla")
    source, target = rng.permutation(num_blocks), rng.permutation(num_blocks)
    host = rng.permutation(num_blocks + 3)[:num_blocks]
    engine.save(pool, source, host)
    pool, done = engine.drain(pool)
    assert [completion.error for completion in done] == [None]
    loaded, _ = engine.load(zeros, host, target)
    loaded, done = engine.drain(loaded)
    assert [completion.error for completion in done] == [None]
    for dtype, raw in patterns.items():
        assert loaded[dtype].dtype == jnp.dtype(dtype)
        assert np.array_equal(bits(pool[dtype])[:, 0], raw), dtype
        back = bits(loaded[dtype])[target, 0][np.argsort(source)]
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


# Leaves of one group apart from each other, scales beside what they scale, a block
# that is a scalar, and a tuple and a dict of lists around it all.
MIXED = (
    {
        "k": [("bfloat16", (3, 4)), ("bfloat16", (3, 4))],
        "q": [("int8", (5,)), ("float8_e5m2", (3, 4))],
    },
    ("float32", ()),
    {"v": [("bfloat16", (3, 4)), ("bool", (2, 2)), ("float32", (1, 1, 6))]},
)
# To trace the interpreter of asynchronous copies takes a second per leaf.
MIXED_DMA = ({"k": MIXED[0]["k"]}, ("float32", ()), {"v": [("bool", (2, 2))]})


def is_leaf(node):
    return isinstance(node, tuple) and isinstance(node[0], str)


@pytest.mark.parametrize(("mode", "kernel"), WAYS)
@pytest.mark.parametrize("m", [1, 3])
def test_mixed_leaves_keep_every_bit(mode, kernel, m):
    rng = np.random.default_rng(m)
    arrays = jax.tree.map(
        lambda spec: random_array(rng, (24, *spec[1]), spec[0]),
        MIXED_DMA if kernel else MIXED,
        is_leaf=is_leaf,
    )
    options = {"kernel": kernel, "blocks_per_host_block": m, "layer_groups": m}
    pool = jax.tree.map(lambda array: jax.device_put(jnp.array(array), CPU), arrays)
    # Less than an extent of all blocks is in flight at once.
    moves = Moves(mode, pool, 40 // m, staging_bytes="2KiB", **options)
    exercise(moves, Shadow(arrays), rng)
