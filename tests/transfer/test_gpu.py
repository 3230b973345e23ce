"""Behaviour of a GPU alone; `JAXKV_TEST_PLATFORM=cuda pytest -m gpu` runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.rigs.device_cases import spread
from tests.transfer.numbered import Moves


@pytest.fixture(autouse=True)
def needs_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU (JAXKV_TEST_PLATFORM=cuda runs the tests on one)")


def random_bits():
    """u16[leaves, blocks, ...]: blocks of 128 KiB a leaf, NaNs of bfloat16 included."""
    return np.random.default_rng(1).integers(0, 1 << 16, (4, 512, 64, 1024), np.uint16)


def as_pool(raw, dtype=jnp.bfloat16):
    return [jnp.array(bits.view(dtype)) for bits in raw]


def round_trip(pool, raw):
    num_blocks = raw.shape[1]
    moves = Moves("staged", pool, num_blocks)
    order = np.random.default_rng(2)
    source, host, target = (order.permutation(num_blocks) for _ in range(3))
    moves.save_now(source, host)
    moves.pool = jax.tree.map(jnp.zeros_like, pool)
    moves.load_now(host, target)
    for leaf, bits in zip(moves.pool, raw, strict=True):
        assert np.array_equal(np.asarray(leaf).view(bits.dtype)[target], bits[source])


def test_large_blocks_survive_a_round_trip():
    raw = random_bits()
    round_trip(as_pool(raw), raw)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2"]
)
def test_every_bit_pattern_survives(dtype):
    raw = np.arange(1 << 16, dtype=np.uint16).reshape(1, 64, -1)
    round_trip(as_pool(raw, jnp.dtype(dtype)), raw)


def test_a_pool_over_all_gpus_round_trips():
    raw = random_bits()
    num_devices = max(2, len(jax.devices()))
    round_trip(spread(as_pool(raw), num_devices, None, None, "x"), raw)
