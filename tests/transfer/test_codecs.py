"""Compression: error bounds, sizes, and leaves that are not compressed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.transfer import Compression, TransferEngine
from jaxkv.transfer.codecs import codecs_of, compressed_bytes
from jaxkv.transfer.layout import PoolLayout
from tests.transfer.numbered import Moves
from tests.transfer.shadow import bits, random_array, to_device

# Blocks, tokens, heads, values.
SHAPE = (6, 8, 2, 16)

dtypes = pytest.mark.parametrize("dtype", ["int8", "int4"])
leaf_dtypes = pytest.mark.parametrize("leaf", ["float32", "bfloat16", "float16"])


def normal(leaf="float32", shape=SHAPE, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(np.float32).astype(jnp.dtype(leaf))


@pytest.fixture(scope="module")
def send():
    made = {}

    def send(arrays, dtype, mode=None, head_axis=-2):
        leaves, treedef = jax.tree.flatten(arrays)
        pool, ids = to_device(arrays), range(len(leaves[0]))
        look = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
        key = str((treedef, look, dtype, mode, head_axis))
        if key not in made:
            compression = Compression(dtype, head_axis)
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


def bound(values, dtype, axes=(1, 3)):
    """The bound that `Compression` states, for up to 16 tokens."""
    peak, span = peaks(values, axes), np.ptp(float32(values), axis=axes[0])
    span = np.expand_dims(span, axes[0])
    bound = peak / 126 if dtype == "int8" else span / 15 + peak / 240
    return bound + np.abs(float32(values)) * jnp.finfo(values.dtype).eps / 2


def hard_values(kind, shape, rng):
    """Draw values whose limits are hard to keep."""
    drawn = rng.standard_normal(shape)
    if kind == "ranges":
        drawn *= np.exp(3 * rng.standard_normal((*shape[:-1], 1)))
        drawn *= np.exp(3 * rng.standard_normal(shape[-1]))
    elif kind == "biased":
        drawn += 100 * rng.standard_normal(shape[-1])
    elif kind == "powers":
        drawn = np.sign(drawn) * 2.0 ** rng.integers(-12, 4, shape)
        drawn *= 1 + rng.integers(-1, 2, shape) / 256
    elif kind == "extremes":
        drawn *= 10.0 ** rng.integers(-44, 39, (shape[0], *[1] * (len(shape) - 1)))
    elif kind == "not finite":
        drawn *= np.exp(2 * rng.standard_normal(shape))
        kinds = rng.integers(0, 20, shape)
        for number, value in enumerate((np.inf, -np.inf, np.nan)):
            drawn[kinds == number] = value
        drawn[0] = np.inf
    return drawn


@dtypes
@leaf_dtypes
def test_errors_are_within_their_bound(send, dtype, leaf, mode):
    values = normal(leaf)
    loaded = send(values, dtype, mode)
    assert loaded.dtype == values.dtype
    error, limit = np.abs(float32(loaded) - float32(values)), bound(values, dtype)
    assert (error <= limit * np.float32(1 + 1e-5)).all()
    assert (error > limit / 3).any()
    assert (bits(send(values, dtype)) == bits(loaded)).all()  # In another mode.


@dtypes
@leaf_dtypes
@pytest.mark.parametrize(
    "shape", [(400, 16, 2, 64), (100, 32, 1, 2, 16), (400, 5, 2, 7), (400, 2, 64)]
)
def test_a_second_trip_changes_nothing(dtype, leaf, shape):
    rng = np.random.default_rng(len(shape))
    pool = jnp.zeros(shape, leaf)
    (codec,) = codecs_of(PoolLayout.of([pool]), Compression(dtype))
    encode, decode = jax.jit(codec.encode), jax.jit(codec.decode)
    for kind in ("normal", "ranges", "biased", "powers", "extremes", "not finite"):
        drawn = hard_values(kind, shape, rng)
        with np.errstate(over="ignore"):
            values = jnp.asarray(drawn.astype(np.float32).astype(jnp.dtype(leaf)))
        encoded = encode(values)
        assert [(a.shape, a.dtype) for a in encoded] == [*codec.parts]
        once = decode(encoded)
        twice = decode(encode(once))
        assert (bits(np.array(once)) == bits(np.array(twice))).all(), kind
        assert np.isfinite(float32(np.array(once))).all(), kind


@dtypes
def test_blocks_heads_and_runs_of_tokens_have_separate_limits(send, dtype):
    values = normal(shape=(6, 32, 2, 16))
    alone = send(values, dtype)
    factor = np.float32(2**20)
    for part in (np.s_[:, :, 1], np.s_[2], np.s_[:, 16:]):
        scaled = values.copy()
        scaled[part] *= factor
        expected = alone.copy()
        expected[part] *= factor
        assert (send(scaled, dtype) == expected).all()


@dtypes
def test_limits_do_not_depend_on_the_blocks_of_a_host_block(dtype):
    values, loaded = normal("bfloat16"), []
    for factor in (1, 3):
        moves = Moves(
            None,
            to_device(values),
            6 // factor,
            blocks_per_host_block=factor,
            compression=Compression(dtype),
        )
        ids = np.arange(6).reshape(-1, factor)
        ids = ids[:, 0] if factor == 1 else ids
        moves.save_now(ids, range(6 // factor))
        moves.pool = to_device(np.zeros_like(values))
        moves.load_now(range(6 // factor), ids)
        loaded.append(bits(np.array(moves.pool)))
    assert (loaded[0] == loaded[1]).all()


def test_a_small_token_or_channel_costs_little_next_to_a_large_one(send):
    values = normal(shape=(6, 16, 2, 64))
    values[:, 3] /= 50
    loaded = send(values, "int8")
    assert np.abs(loaded - values)[:, 3].max() < np.abs(values).max() / 126 / 20
    values = normal(shape=(6, 16, 2, 64), seed=1)
    values[..., 5] *= 8
    error = np.abs(send(values, "int8") - values)
    assert error[..., :5].max() < np.abs(values).max() / 126 / 5


def test_int4_puts_the_first_half_of_the_tokens_into_the_low_bits():
    pool = jnp.zeros((1, 4, 1, 2))
    (codec,) = codecs_of(PoolLayout.of([pool]), Compression("int4"))
    # The other channel sets the limits of the tokens.
    values = [[0.0, 15.0], [15.0, 15.0], [5.0, 15.0], [10.0, 15.0]]
    stored, *_ = codec.encode(jnp.array(values).reshape(pool.shape))
    assert stored[..., 0].ravel().tolist() == [0 | 5 << 4, 15 | 10 << 4]


@dtypes
def test_zeros_and_constants_come_back_exactly(send, dtype):
    values = np.zeros(SHAPE, np.float32)
    values[1] = 1.0
    values[2] = -0.125
    values[3] = 2.0**100
    values[4, :, 0] = 7.0
    loaded = send(values, dtype)
    assert (loaded == values).all()
    for peak in (1e-45, 1e-39, 1e-38, 5e-37, 1e-36):  # Tiny values beside zeros.
        values = np.zeros(SHAPE, np.float32)
        values[:, 0, 0, 0] = peak
        loaded = send(values, dtype)
        assert (loaded[:, 1:] == 0).all(), peak
        assert (np.abs(loaded - values) <= 1e-33).all(), peak


@dtypes
@leaf_dtypes
def test_values_that_are_not_finite_leave_the_others_intact(send, dtype, leaf):
    values = normal(leaf)
    values[0, :3, 0, :3] = 0
    expected = send(values, dtype)
    places = [0, 1, 2]
    values[0, places, 0, places] = [np.inf, -np.inf, np.nan]
    loaded = send(values, dtype)
    infinities = float32(loaded[0, [0, 1], 0, [0, 1]])
    peak = peaks(values[:, 3:])[0, 0, 0, 0]
    if dtype == "int8":
        assert (infinities * [1, -1] > 0).all()
    assert (np.abs(infinities) <= peak * 1.1).all()
    assert abs(float32(loaded[0, 2, 0, 2])) <= (0 if dtype == "int8" else peak / 7)
    loaded[0, places, 0, places] = expected[0, places, 0, places]
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
    loaded = send(pool, "int8", mode, head_axis)
    for name in ("ids", "quantised", "small", "scale"):
        assert (bits(loaded[name]) == bits(pool[name])).all(), name
    assert (bits(loaded["kv"][1]) != bits(pool["kv"][1])).any()


@dtypes
@pytest.mark.parametrize("leaf", ["bfloat16", "float32"])
def test_compression_shrinks_host_memory(leaf, dtype, mode):
    pool = jnp.zeros((8, 16, 4, 64), leaf)
    sized, filled = (
        [
            TransferEngine(pool, mode=mode, compression=compression, **size)
            for compression in (None, Compression(dtype))
        ]
        for size in (
            {"num_host_blocks": 64, "extent_bytes": 1},
            {"host_bytes": "4MB"},
        )
    )
    elements, itemsize = 16 * 4 * 64, jnp.dtype(leaf).itemsize
    # Elements, tokens, a quarter or two of each channel, and an exponent.
    small = 16 * 64 + 16 + 16 + 1 if dtype == "int8" else 8 * 64 + 16 + 2 * 64 + 1
    expected = 4 * small / (elements * itemsize)
    assert 4 * compressed_bytes(dtype, 16, 64) == 4 * small
    raw, small = sized
    assert small.block_bytes == raw.block_bytes
    assert small.host_bytes / raw.host_bytes == pytest.approx(expected)
    # The same bytes hold more blocks accordingly.
    raw, small = filled
    assert small.host_bytes <= 4_000_000
    gain = small.num_host_blocks / raw.num_host_blocks
    assert gain == pytest.approx(1 / expected, rel=0.15)


@dtypes
def test_the_head_axis_may_be_any_but_the_block_axis(send, dtype):
    values = normal()
    values[:, 3] *= 2.0**20  # One token far from the others.
    by_token = send(values, dtype, head_axis=1)
    assert (np.abs(by_token - values) <= bound(values, dtype, (2, 3)) * 1.001).all()
    tree = {"k": normal(), "v": normal(shape=(6, 2, 16))}
    tree["k"][:, 3, 1] *= 2.0**20
    loaded = send(tree, dtype, head_axis={"k": frozenset({1, -2}), "v": -2})
    for name, values in tree.items():
        peak = peaks(values, axes=-1)
        assert (np.abs(loaded[name] - values) <= peak / 120).all()


def test_a_choice_that_engines_share_cannot_be_changed():
    choice = Compression("int8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.dtype = "int4"
    assert hash(choice) == hash(Compression("int8"))
