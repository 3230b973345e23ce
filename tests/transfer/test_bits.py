"""Loaded blocks equal saved blocks, bit for bit.

Where XLA optimizes little as well, as it does in this suite unless it is told otherwise
(`conftest.py`): signalling NaNs came back quietened.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import PoolLayout, TransferEngine, dma, memory

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


def bits(array):
    """dtype[blocks, ...] -> u8[blocks, bytes]; a copy, since a view stops donation."""
    return np.array(array).reshape(array.shape[0], -1).view(np.uint8)


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
    assert [each.error for each in done] == [None]
    loaded, _ = engine.load(zeros, host, target)
    loaded, done = engine.drain(loaded)
    assert [each.error for each in done] == [None]
    for dtype, raw in patterns.items():
        assert loaded[dtype].dtype == jnp.dtype(dtype)
        assert np.array_equal(bits(pool[dtype]), raw), dtype
        back = bits(loaded[dtype])[target][np.argsort(source)]
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


def mixed_pool(num_blocks, rng, kernel):
    def leaf(spec):
        dtype, shape = spec
        num_bytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (num_blocks, num_bytes))
        array = raw.astype(np.uint8).view(jnp.dtype(dtype))
        return jax.device_put(jnp.array(array.reshape(num_blocks, *shape)), CPU)

    specs = MIXED_DMA if kernel else MIXED
    return jax.tree.map(leaf, specs, is_leaf=is_leaf)


def pool_bits(pool):
    """u8[blocks, bytes]: all leaves side by side."""
    return np.concatenate([bits(leaf) for leaf in jax.tree.leaves(pool)], axis=1)


@pytest.mark.parametrize(("mode", "kernel"), WAYS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=LONG)])
def test_host_blocks_of_several_device_blocks_keep_every_bit(seed, mode, kernel):
    rng = np.random.default_rng(seed)
    pool = mixed_pool(30, rng, kernel)
    device = pool_bits(pool)
    options = {"mode": mode, "kernel": kernel}
    engine = TransferEngine(pool, 16, blocks_per_host_block=3, **options)
    assert engine.block_bytes == 3 * device.shape[1]
    saved = rng.permutation(30)[:24].reshape(8, 3)
    saved[rng.permutation(8)[:4], rng.integers(0, 3, 4)] = -1
    host_ids = rng.permutation(16)[:8]
    engine.save(pool, saved, host_ids)
    pool, [done] = engine.drain(pool)
    assert (done.num_blocks, done.error) == (8, None)
    # Into other blocks, some left out; blocks that were not saved may hold anything.
    loaded = rng.permutation(30)[:24].reshape(8, 3)
    loaded[saved == -1] = -1
    loaded[rng.permutation(8)[:4], 0] = -1
    wanted = loaded != -1
    wanted_rows = wanted.any(axis=1)
    pool, _ = engine.load(pool, host_ids[wanted_rows], loaded[wanted_rows])
    pool, [done] = engine.drain(pool)
    assert done.error is None
    expected = device.copy()
    expected[loaded[wanted]] = device[saved[wanted]]
    assert np.array_equal(pool_bits(pool), expected)
    for ids, message in [([[1, 2]], "rows of 3 ints"), ([[-1] * 3], "only -1")]:
        with pytest.raises(ValueError, match=message):
            engine.save(pool, ids, [0])


# A seed's engine has 1 + seed % 3 groups of layers. The other tests have one group.
QUICK_SEEDS = {FUSED: (1, 2), STAGED: (1,), DMA: (0,)}


@pytest.mark.parametrize(
    ("seed", "mode", "kernel"),
    [
        pytest.param(seed, *way, marks=() if seed in QUICK_SEEDS[way] else LONG)
        for way in WAYS
        for seed in range(6)
    ],
)
def test_random_transfers_agree_with_a_shadow(seed, mode, kernel):
    num_blocks, num_host_blocks = 24, 40
    rng = np.random.default_rng(seed)
    pool = mixed_pool(num_blocks, rng, kernel)
    structure = jax.tree.structure(pool)
    device = pool_bits(pool)
    host = np.zeros((num_host_blocks, device.shape[1]), np.uint8)
    readable, pending = set(), {}
    # With odd seeds the budget is one extent, and the rest waits.
    engine = TransferEngine(
        pool,
        num_host_blocks,
        mode=mode,
        kernel=kernel,
        layer_groups=1 + seed % 3,
        **({"staging_bytes": "1500B"} if seed % 2 else {}),
    )
    assert engine.block_bytes == device.shape[1]
    touched = {}  # Device blocks of the transfers that were not reported, by ticket.

    def step(pool, values, ids):  # Like a model: write into donated blocks.
        return jax.tree.map(lambda leaf, new: leaf.at[ids].set(new), pool, values)

    step = jax.jit(
        step, donate_argnums=0, compiler_options=memory.compiler_options("cpu")
    )

    for _ in range(60):
        num = int(rng.integers(0, num_blocks))
        device_ids = rng.permutation(num_blocks)[:num]
        match rng.integers(4):
            case 0:
                host_ids = rng.permutation(num_host_blocks)[:num]
                ticket = engine.save(pool, device_ids, host_ids)
                touched[ticket] = device_ids
                host[host_ids] = device[device_ids]
                readable -= set(host_ids.tolist())
                pending[ticket] = host_ids
            case 1 if readable:
                host_ids = rng.choice(sorted(readable), num)
                pool, ticket = engine.load(pool, host_ids, device_ids)
                touched[ticket] = device_ids
                device[device_ids] = host[host_ids]
            case 2:
                busy = [
                    ids
                    for ticket, ids in touched.items()
                    if ticket.direction == "load" or engine.is_waiting(ticket)
                ]
                idle = np.setdiff1d(np.arange(num_blocks), np.concatenate([[], *busy]))
                if len(idle) < 5:
                    continue
                ids = rng.permutation(idle)[:5]
                values = mixed_pool(5, rng, kernel)
                device[ids] = pool_bits(values)
                pool = step(pool, values, ids)
            case _:
                if rng.integers(2):
                    pool, completions = engine.drain(pool)
                else:
                    pool = engine.advance(pool)
                    completions = engine.poll()
                for done in completions:
                    assert done.error is None
                    del touched[done.ticket]
                    written = pending.pop(done.ticket, np.zeros(0, int))
                    later = [set(ids.tolist()) for ids in pending.values()]
                    readable |= set(written.tolist()).difference(*later)
    pool, _ = engine.drain(pool)
    assert jax.tree.structure(pool) == structure
    assert np.array_equal(pool_bits(pool), device)
    assert readable
    for start in range(0, len(readable), num_blocks):
        ids = np.array(sorted(readable))[start : start + num_blocks]
        pool, _ = engine.load(pool, ids, np.arange(len(ids)))
        pool, _ = engine.drain(pool)
        assert np.array_equal(pool_bits(pool)[: len(ids)], host[ids])
