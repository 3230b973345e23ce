"""Compression: error bounds, sizes, and leaves that are not compressed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, TransferEngine
from tests.transfer.numbered import Moves
from tests.transfer.shadow import bits, random_array, to_device

# Blocks, tokens, heads, values.
SHAPE = (6, 8, 2, 16)

leaf_dtypes = pytest.mark.parametrize("leaf", ["float32", "bfloat16", "float16"])


def normal(leaf="float32", shape=SHAPE, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.float32).astype(jnp.dtype(leaf))


@pytest.fixture(scope="module")
def send():
    made = {}

    def send(arrays, mode=None, head_axis=-2):
        leaves, treedef = jax.tree.flatten(arrays)
        pool, ids = to_device(arrays), range(len(leaves[0]))
        look = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        key = str((treedef, look, mode, head_axis))
        if key not in made:
            compression = Compression("int8", head_axis)
            made[key] = Moves(mode, pool, len(ids), compression=compression)
        moves = made[key]
        moves.pool = pool
        moves.save_now(ids, ids[::-1])
        moves.pool = to_device(jax.tree.map(np.zeros_like, arrays))
        moves.load_now(ids[::-1], ids)
        return jax.tree.map(np.array, moves.pool)

    return send


def float32(array):
    return array.astype(np.float32)


def peaks(values, axes=(1, 3)):
    return np.abs(float32(values)).max(axis=axes, keepdims=True)


@leaf_dtypes
def test_errors_are_within_their_bound_and_do_not_grow(send, leaf, mode):
    values = normal(leaf)
    loaded = send(values, mode)
    assert loaded.dtype == values.dtype
    peak, error = peaks(values), np.abs(float32(loaded) - float32(values))
    rounding = jnp.finfo(values.dtype).eps / 2
    assert (error <= peak * np.float32(1 / 254 + 2e-5 + rounding)).all()
    assert (error > peak / 300).any()
    again = loaded
    for _ in range(3):  # After the first round trip values no longer change.
        again = send(again, mode)
        assert (bits(again) == bits(loaded)).all()
    assert (bits(send(values)) == bits(loaded)).all()  # In another mode.


def test_heads_and_blocks_have_separate_scales(send):
    values = normal()
    alone = send(values)
    factor = np.float32(2**20)
    values[:, :, 1] *= factor
    together = send(values)
    assert (together[:, :, 0] == alone[:, :, 0]).all()
    assert (together[:, :, 1] == alone[:, :, 1] * factor).all()
    values[2] *= factor
    loaded = send(values)
    assert (loaded[[0, 1, 3]] == together[[0, 1, 3]]).all()


def test_zeros_and_constants_come_back_exactly(send):
    values = np.zeros(SHAPE, np.float32)
    values[1] = 1.0
    values[2] = -0.1
    values[3] = 1e30
    values[4, :, 0] = 7.0
    loaded = send(values)
    assert (loaded[values == 0] == 0).all()
    assert np.allclose(loaded, values, rtol=1e-5, atol=0)
    for peak in (1e-45, 1e-39, 1e-38, 5e-37, 1e-36):  # Tiny values beside zeros.
        values = np.zeros(SHAPE, np.float32)
        values[:, 0, 0, 0] = peak
        loaded = send(values)
        assert (loaded[:, 1:] == 0).all(), peak
        assert (np.abs(loaded - values) <= max(peak / 16, 2e-38)).all(), peak


@leaf_dtypes
def test_values_that_are_not_finite_leave_the_others_intact(send, leaf):
    values = normal(leaf)
    peak = peaks(values)[0, 0, 0, 0]
    # The peak itself is unchanged.
    small = np.argwhere(np.abs(float32(values[0, :, 0])) < peak / 2)[:3]
    values[0, small[:, 0], 0, small[:, 1]] = 0
    expected = send(values)
    values[0, small[:, 0], 0, small[:, 1]] = [np.inf, -np.inf, np.nan]
    loaded = send(values)
    infinities = float32(loaded[0, small[:2, 0], 0, small[:2, 1]])
    assert np.allclose(infinities, [peak, -peak], rtol=1e-5)
    last = loaded[0, small[2, 0], 0, small[2, 1]]
    assert last == 0
    loaded[0, small[:, 0], 0, small[:, 1]] = 0
    assert (bits(loaded) == bits(expected)).all()


def test_other_leaves_than_wide_floats_come_back_bit_for_bit(send, mode):
    rng = np.random.default_rng(0)
    pool = {
        "ids": random_array(rng, (6, 5), "int32"),
        "kv": [normal("bfloat16", seed=n) for n in range(2)],
        "quantised": random_array(rng, SHAPE, "int8"),
        "small": random_array(rng, SHAPE, "float8_e4m3fn"),
        "scale": random_array(rng, (6, 8, 2), "float32"),
    }
    head_axis = {"ids": None, "kv": -2, "quantised": -2, "small": -2, "scale": None}
    loaded = send(pool, mode, head_axis)
    for name in ("ids", "quantised", "small", "scale"):
        assert (bits(loaded[name]) == bits(pool[name])).all(), name
    assert (bits(loaded["kv"][1]) != bits(pool["kv"][1])).any()


@pytest.mark.parametrize("leaf", ["bfloat16", "float32"])
def test_compression_shrinks_host_memory(leaf, mode):
    pool = jnp.zeros((8, 16, 4, 64), leaf)
    sized, filled = (
        [
            TransferEngine(pool, mode=mode, compression=compression, **size)
            for compression in (None, Compression("int8"))
        ]
        for size in (
            {"num_host_blocks": 64, "extent_bytes": 1},
            {"host_bytes": "4MB"},
        )
    )
    # A byte per element, and four for the scale of each head.
    elements, itemsize = 16 * 4 * 64, jnp.dtype(leaf).itemsize
    expected = (elements + 4 * 4) / (elements * itemsize)
    raw, small = sized
    assert small.block_bytes == raw.block_bytes
    assert small.host_bytes / raw.host_bytes == pytest.approx(expected)
    # The same bytes hold more blocks accordingly.
    raw, small = filled
    assert small.host_bytes <= 4_000_000
    gain = small.num_host_blocks / raw.num_host_blocks
    assert gain == pytest.approx(1 / expected, rel=0.15)


def test_the_head_axis_may_be_any_but_the_block_axis(send):
    values = normal()
    values[:, 3] *= 2.0**20  # One token far from the others.
    by_token = send(values, head_axis=1)
    assert (np.abs(by_token - values) <= peaks(values, axes=(2, 3)) / 253).all()
    tree = {"k": normal(), "v": normal(shape=(6, 2, 16))}
    tree["k"][:, 3, 1] *= 2.0**20
    loaded = send(tree, head_axis={"k": frozenset({1, -2}), "v": -2})
    assert (np.abs(loaded["v"] - tree["v"]) <= peaks(tree["v"], axes=2) / 253).all()
    assert (np.abs(loaded["k"] - tree["k"]) <= peaks(tree["k"], axes=3) / 253).all()


def test_a_choice_that_engines_share_cannot_be_changed():
    choice = Compression("int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.dtype = "int4"
    assert hash(choice) == hash(Compression("int8"))
