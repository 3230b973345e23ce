"""Compression: error bounds, sizes, and leaves that are not compressed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, TransferEngine
from tests.transfer.shadow import bits, random_array, to_device

MODES = ("fused", "staged")
DTYPES = ("int8", "fp8")
# Blocks, tokens, heads, values.
SHAPE = (6, 8, 2, 16)

modes = pytest.mark.parametrize("mode", MODES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
leaf_dtypes = pytest.mark.parametrize("leaf", ["float32", "bfloat16", "float16"])


def normal(leaf="float32", shape=SHAPE, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.float32).astype(jnp.dtype(leaf))


@pytest.fixture(scope="module")
def send():
    """Save and load blocks, with one engine for each kind of pool."""
    engines = {}

    def send(arrays, dtype, mode="fused", head_axis=-2):
        leaves, treedef = jax.tree.flatten(arrays)
        pool, ids = to_device(arrays), range(len(leaves[0]))
        look = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        key = str((treedef, look, dtype, mode, head_axis))
        if key not in engines:
            compression = Compression(dtype, head_axis) if dtype else None
            engines[key] = TransferEngine(
                pool, len(ids), mode=mode, compression=compression
            )
        engine = engines[key]
        engine.save(pool, ids, ids[::-1])
        engine.drain(pool)
        empty = to_device(jax.tree.map(np.zeros_like, arrays))
        pool, _ = engine.load(empty, ids[::-1], ids)
        pool, [done] = engine.drain(pool)
        assert done.error is None
        return jax.tree.map(np.array, pool)

    return send


def float32(array):
    return array.astype(np.float32)


def peaks(values, axes=(1, 3)):
    return np.abs(float32(values)).max(axis=axes, keepdims=True)


def rounding(values):
    """The largest relative error of rounding to a dtype."""
    return np.float32(jnp.finfo(values.dtype).eps) / 2


@modes
@leaf_dtypes
def test_int8_error_is_within_its_bound(send, leaf, mode):
    values = normal(leaf)
    found = send(values, "int8", mode)
    assert found.dtype == values.dtype
    peak = peaks(values)
    error = np.abs(float32(found) - float32(values))
    assert (error <= peak * (1 / 254 + 2e-5 + rounding(values))).all()
    assert (error > peak / 300).any()


@modes
@leaf_dtypes
def test_fp8_error_is_within_its_bound(send, leaf, mode):
    values = normal(leaf)
    found = send(values, "fp8", mode)
    assert found.dtype == values.dtype
    magnitude = np.abs(float32(values))
    error = np.abs(float32(found) - float32(values))
    # float8_e4m3fn has 3 bits after the point, and its smallest step is 2**-9.
    bound = magnitude * (2**-4 + 2e-5 + rounding(values)) + peaks(values) / 448 / 2**10
    assert (error <= bound).all()
    assert (error > magnitude / 20).any()


@dtypes
def test_heads_have_separate_scales(send, dtype):
    values = normal()
    alone = send(values, dtype)
    factor = np.float32(2**20)
    values[:, :, 1] *= factor
    together = send(values, dtype)
    assert (together[:, :, 0] == alone[:, :, 0]).all()
    assert (together[:, :, 1] == alone[:, :, 1] * factor).all()
    # So have blocks.
    values[2] *= factor
    found = send(values, dtype)
    assert (found[[0, 1, 3]] == together[[0, 1, 3]]).all()


@dtypes
def test_zeros_and_constants_come_back_exactly(send, dtype):
    values = np.zeros(SHAPE, np.float32)
    values[1] = 1.0
    values[2] = -0.1
    values[3] = 1e30
    values[4, :, 0] = 7.0
    found = send(values, dtype)
    assert (found[0] == 0).all()
    assert (found[5] == 0).all()
    assert (found[4, :, 1] == 0).all()
    assert np.allclose(found, values, rtol=1e-5, atol=0)


@dtypes
@pytest.mark.parametrize("peak", [1e-45, 1e-39, 1e-38, 5e-37, 1e-36])
def test_zeros_beside_tiny_values_stay_zeros(send, dtype, peak):
    values = np.zeros(SHAPE, np.float32)
    values[:, 0, 0, 0] = peak
    found = send(values, dtype)
    assert (found[:, 1:] == 0).all()
    assert (np.abs(found - values) <= max(peak / 16, 2e-38)).all()


@dtypes
@leaf_dtypes
def test_values_that_are_not_finite_leave_the_others_intact(send, dtype, leaf):
    values = normal(leaf)
    peak = peaks(values)[0, 0, 0, 0]
    # The peak itself is unchanged.
    small = np.argwhere(np.abs(float32(values[0, :, 0])) < peak / 2)[:3]
    values[0, small[:, 0], 0, small[:, 1]] = 0
    expected = send(values, dtype)
    values[0, small[:, 0], 0, small[:, 1]] = [np.inf, -np.inf, np.nan]
    found = send(values, dtype)
    infinities = float32(found[0, small[:2, 0], 0, small[:2, 1]])
    assert np.allclose(infinities, [peak, -peak], rtol=1e-5)
    last = found[0, small[2, 0], 0, small[2, 1]]
    assert last == 0 if dtype == "int8" else np.isnan(last)
    found[0, small[:, 0], 0, small[:, 1]] = 0
    assert (bits(found) == bits(expected)).all()


@dtypes
@leaf_dtypes
def test_repeated_saves_and_loads_do_not_drift(send, dtype, leaf):
    """After the first round trip values no longer change."""
    values = normal(leaf)
    first = send(values, dtype)
    assert (bits(first) != bits(values)).any()
    again = first
    for _ in range(10):
        again = send(again, dtype)
        assert (bits(again) == bits(first)).all()


@dtypes
def test_both_modes_compress_to_the_same_values(send, dtype):
    values = normal("bfloat16")
    fused, staged = (send(values, dtype, mode) for mode in MODES)
    assert (bits(fused) == bits(staged)).all()


def mixed_pool(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "ids": random_array(rng, (6, 5), "int32"),
        "kv": [normal("bfloat16", seed=seed + n) for n in range(2)],
        "quantised": random_array(rng, (6, 8, 2, 16), "int8"),
    }


@modes
@dtypes
def test_integers_come_back_bit_for_bit(send, dtype, mode):
    pool = mixed_pool()
    found = send(pool, dtype, mode)
    for name in ("ids", "quantised"):
        assert (bits(found[name]) == bits(pool[name])).all()
    assert (bits(found["kv"][1]) != bits(pool["kv"][1])).any()


@modes
def test_every_bit_is_kept_by_default(send, mode):
    pool = {"kv": random_array(np.random.default_rng(1), (6, 8, 16), "bfloat16")}
    found = send(pool, None, mode)
    assert (bits(found["kv"]) == bits(pool["kv"])).all()


@modes
@dtypes
@pytest.mark.parametrize("leaf", ["bfloat16", "float32"])
def test_compression_shrinks_host_memory(leaf, dtype, mode):
    pool = jnp.zeros((8, 16, 4, 64), leaf)
    raw = TransferEngine(pool, 64, mode=mode, extent_bytes=1)
    small = TransferEngine(
        pool, 64, mode=mode, extent_bytes=1, compression=Compression(dtype)
    )
    assert small.block_bytes == raw.block_bytes
    # A byte per element, and four for the scale of each head.
    elements, itemsize = 16 * 4 * 64, jnp.dtype(leaf).itemsize
    expected = (elements + 4 * 4) / (elements * itemsize)
    assert small.host_bytes / raw.host_bytes == pytest.approx(expected)
    # The same bytes hold more blocks accordingly.
    raw = TransferEngine(pool, host_bytes="4MB", mode=mode)
    small = TransferEngine(
        pool, host_bytes="4MB", mode=mode, compression=Compression(dtype)
    )
    assert small.host_bytes <= 4_000_000
    more = small.num_host_blocks / raw.num_host_blocks
    assert more == pytest.approx(1 / expected, rel=0.15)


@dtypes
def test_the_head_axis_may_be_any_but_the_block_axis(send, dtype):
    values = normal()
    values[:, 3] *= 2.0**20  # One token far from the others.
    by_token = send(values, dtype, head_axis=1)
    error = np.abs(by_token - values)
    assert (error <= peaks(values, axes=(2, 3)) / 15.9).all()
    tree = {"k": normal(), "v": normal(shape=(6, 2, 16))}
    tree["k"][:, 3, 1] *= 2.0**20
    found = send(tree, dtype, head_axis={"k": frozenset({1, -2}), "v": -2})
    assert (np.abs(found["v"] - tree["v"]) <= peaks(tree["v"], axes=2) / 15.9).all()
    assert (np.abs(found["k"] - tree["k"]) <= peaks(tree["k"], axes=3) / 15.9).all()


def test_invalid_compression_is_refused():
    with pytest.raises(ValueError, match=r"compression dtype='int4' must be one of"):
        Compression("int4")
    pool = {"k": jnp.zeros((6, 8, 2, 16)), "ids": jnp.zeros((6, 5), jnp.int32)}
    for axis in (0, -4, frozenset(), frozenset({0, 2})):
        with pytest.raises(ValueError, match=r"other than the block axis 0"):
            TransferEngine(pool, 8, compression=Compression(head_axis=axis))
    for axis in (4, -5, frozenset({2, 4})):
        with pytest.raises(ValueError, match=r"of pool\['k'\] must be an axis of"):
            TransferEngine(pool, 8, compression=Compression(head_axis=axis))
    with pytest.raises(ValueError, match=r"head_axis=.* must be an int, a froz"):
        TransferEngine(pool, 8, compression=Compression(head_axis=[1, 2]))
    with pytest.raises(ValueError, match=r"head_axis 1.5 of pool\['k'\] must be an"):
        TransferEngine(pool, 8, compression=Compression(head_axis=1.5))


def test_leaves_of_one_byte_elements_are_not_compressed():
    rng = np.random.default_rng(11)
    pool = {
        "kv": jnp.array(rng.normal(size=(8, 4, 2, 16)), jnp.float8_e4m3fn),
        "scale": jnp.array(rng.normal(size=(8, 4, 2)), jnp.float32),
    }
    compression = Compression("int8", head_axis={"kv": -2, "scale": None})
    engine = TransferEngine(pool, 8, compression=compression)
    assert engine.host_bytes == TransferEngine(pool, 8).host_bytes
    engine.save(pool, range(8), range(8))
    pool, _ = engine.drain(pool)
    empty = jax.tree.map(jnp.zeros_like, pool)
    loaded, _ = engine.load(empty, range(8), range(8))
    loaded, _ = engine.drain(loaded)
    for name, leaf in pool.items():
        assert np.array(loaded[name]).tobytes() == np.array(leaf).tobytes()


def test_a_choice_that_engines_share_cannot_be_changed():
    choice = Compression("int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.dtype = "fp8"
    assert hash(choice) == hash(Compression("int8"))
