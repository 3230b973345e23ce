"""Costs of layouts in memory: padding on the host, and blocks that lie apart."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from jaxkv.transfer import (
    CostlyLayoutWarning,
    PoolLayout,
    TransferEngine,
    dma,
    layout,
    memory,
)
from jaxkv.transfer.host_memory import HostSize
from jaxkv.transfer.tiling import (
    blocks_lie_apart,
    costly_leaves,
    padded_bytes,
    pads_rows,
    warn_of_costly_layouts,
)
from tests.rigs.device_cases import only_on_cpu
from tests.transfer.numbered import DEVICE, Moves
from tests.transfer.shadow import Shadow, exercise, random_array

HERE = jax.sharding.SingleDeviceSharding(DEVICE)
MIB = 1 << 20


# What libtpu 0.0.52 says of arrays in host memory, on each of four generations.
@pytest.mark.parametrize(
    ("shape", "dtype", "order", "tiling", "factor"),
    [
        ((4, 8, 16, 8, 2, 128), "bfloat16", (0, 1, 2, 3, 4, 5), (2, 128), 1),
        ((4, 8, 16, 8, 2, 64), "bfloat16", (0, 1, 2, 3, 4, 5), (2, 128), 2),
        ((4, 8, 16, 576), "bfloat16", (0, 1, 2, 3), (8, 128), 640 / 576),
        ((4, 8, 16, 8, 96), "bfloat16", (0, 1, 2, 3, 4), (8, 128), 4 / 3),
        ((4, 8, 16, 8, 1, 128), "bfloat16", (0, 1, 2, 4, 3, 5), (8, 128), 1),
        ((1, 8, 5, 128), "int8", (0, 2, 1, 3), (8, 128), 1),
        ((8, 8), "float32", (0, 1), (8, 128), 16),
        ((1, 8, 16, 2, 32), "float32", (0, 1, 2, 3, 4), (2, 128), 4),
        ((2048, 16, 8, 2, 64), "bfloat16", (1, 2, 3, 4, 0), (8, 128), 1),
        ((5,), "float32", (0,), (1, 128), 128 / 5),
    ],
)
def test_padding_is_what_tiles_add(shape, dtype, order, tiling, factor):
    dtype = jnp.dtype(dtype)
    dense = int(np.prod(shape)) * dtype.itemsize
    layout = Layout(order, (tiling, (2, 1)))
    assert padded_bytes(shape, dtype, layout) == round(factor * dense)
    assert padded_bytes(shape, dtype, Layout(order)) == dense


def pool_of(order, shape=(64, 32, 4, 64), dtype="float32", seed=0):
    """A pool of one leaf that lies in memory in an order of its axes, and its bytes."""
    array = random_array(np.random.default_rng(seed), shape, dtype)
    placed = jax.device_put(jnp.array(array), Format(Layout(order), HERE))
    return jax.jit(lambda x: x, out_shardings=placed.format)(placed), array


@pytest.mark.parametrize(
    ("order", "block_axis", "apart"),
    [
        ((0, 1, 2, 3), 0, False),
        ((1, 2, 3, 0), 0, True),
        ((1, 0, 2, 3), 0, False),
        ((0, 1, 2, 3), 3, True),
    ],
)
def test_blocks_lie_apart_if_their_axis_is_the_minor_one(order, block_axis, apart):
    pool, _ = pool_of(order)
    layout = PoolLayout.of(pool, block_axis)
    assert layout.leaves[0].order == order
    assert blocks_lie_apart(layout.leaves[0]) == apart
    # In the order of its axes a leaf lies as the caller expects.
    assert bool(costly_leaves(layout)) == (apart and block_axis == 0)


@only_on_cpu
def test_a_small_leaf_may_lie_as_it_likes():
    pool, _ = pool_of((1, 0), (64, 32))
    layout = PoolLayout.of(pool)
    assert blocks_lie_apart(layout.leaves[0])
    assert costly_leaves(layout) == []


def test_a_costly_layout_is_warned_of_with_the_cure_and_the_cost():
    pool, _ = pool_of((1, 2, 3, 0))
    with pytest.warns(CostlyLayoutWarning) as caught:
        engine = TransferEngine([pool, jnp.zeros((64, 4))], 16, extent_bytes="128KiB")
    rows = engine._copier.extents.rows
    [text] = [str(warning.message) for warning in caught]
    assert text.startswith("pool[0] has its blocks along the minor axis in memory")
    assert f"a copy of {rows} blocks moves all 64: about {128 // rows} times" in text
    assert "Make the last dimension, 64, a multiple of 128" in text
    assert "Extents take 1.00 times their bytes on the host" in text


def described_for_tpu(monkeypatch, leaves, order_of=None, block_axis=0):
    """A pool on a TPU that is not there; `order_of` says how a shape lies in memory."""

    def lies(shape, *_):
        return Layout(order_of or tuple(range(len(shape))), ((8, 128),))

    monkeypatch.setattr(layout, "default_layout", lies)
    specs = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=HERE)
        for shape, dtype in leaves
    ]
    return PoolLayout.of(specs, block_axis, compiled_for="tpu")


def warnings_of(described):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_costly_layouts(described, 16, 1.0)
    assert {warning.category for warning in caught} <= {CostlyLayoutWarning}
    return [str(warning.message) for warning in caught]


SECOND_MINOR = "blocks along the second-minor axis", "as [blocks, 2, 128]"
BIG = ((2048, 16, 8, 2, 128), "int8")
SCALES = ((2048, 8), "float32")
# Leaves, their block axis, their order in memory, and what a warning of them has.
COSTLY = [
    # By compilers for v6e: a load of 132, 186, 9.5 and 1.0 times its bytes.
    ([((16, 65536, 1, 128), "bfloat16")], 1, (0, 2, 1, 3), SECOND_MINOR),
    ([((65536, 1, 128), "bfloat16")], 0, (1, 0, 2), SECOND_MINOR),
    ([((2048, 16384), "bfloat16")], 0, None, SECOND_MINOR),
    ([((65536, 1, 2, 128), "bfloat16")], 0, None, ()),
    ([((512, 8), "bfloat16")], 0, None, ()),  # A few scales.
    # Scales of 32 layers cost 3.3 and 7.4 times the bytes.
    (
        [BIG] * 32 + [SCALES] * 32,
        *(0, None),
        ("pool[32] and 31 more are small leaves", "as [blocks, 2, 128]"),
    ),
    ([BIG] * 32 + [SCALES] * 4, 0, None, ()),
    ([BIG] * 32 + [((2048, 2, 128), "float32")], 0, None, ()),  # All layers' in one.
    *(
        (
            [((2048, 16, 8, 128), dtype), ((2048, 2, 1, 8), "float16")],
            *(0, None),
            (f"pool[0] has the dtype {dtype}",) if is_refused else (),
        )
        for dtype, is_refused in [
            *(("float16", True), ("bool", True)),
            *(("bfloat16", False), ("uint16", False)),
        ]
    ),
]


def test_leaves_that_cost_much_on_tpu_are_warned_of_and_no_others(monkeypatch):
    for leaves, block_axis, order, expected in COSTLY:
        described = described_for_tpu(monkeypatch, leaves, order, block_axis)
        texts = warnings_of(described)
        assert len(texts) == bool(expected), leaves
        for text in texts:
            assert all(part in text for part in expected)
        first, _ = leaves[0]
        if len(leaves) <= 2 and first != (512, 8):
            # Where the kernels take a large leaf, nothing is said, and vice versa.
            assert dma.accepts(described.leaves[0]) != bool(texts)
        if len(leaves) == 1:
            spec = jax.ShapeDtypeStruct(first, jnp.bfloat16, sharding=HERE)
            assert costly_leaves(PoolLayout.of(spec, block_axis)) == []


def test_padded_rows_are_counted_in_device_rows(monkeypatch):
    row_major = Format(Layout((0, 1, 2)), HERE)
    for size, pads in ((64, True), (128, False)):
        spec = jax.ShapeDtypeStruct((4096, 2, size), jnp.bfloat16, sharding=row_major)
        monkeypatch.setattr(layout, "_is_dense", lambda _: False)
        described = PoolLayout.of(spec, compiled_for="tpu")
        assert pads_rows(described) == pads
        assert not pads_rows(PoolLayout.of(spec))
    # Sixteen device blocks a host block: 64 rows of four.
    assert HostSize.of(512, None, 1 << 30, 1 << 10, 1).extent_blocks == 64
    few = HostSize.of(512, None, 1 << 30, 1 << 10, 1, max_blocks=64 // 16)
    assert few.extent_blocks == 4


@only_on_cpu
@pytest.mark.parametrize(
    ("mode", "kernel", "order"),
    [
        ("fused", None, (1, 0, 2, 3)),
        ("fused", None, (0, 2, 1, 3)),
        ("staged", None, (1, 0, 2, 3)),
        ("staged", "dma", (0, 2, 1, 3)),
    ],
)
def test_a_pool_keeps_its_own_layout_and_every_bit(mode, kernel, order):
    pool, array = pool_of(order, (12, 2, 4, 8), "bfloat16")
    shadow, rng = Shadow(array, 0), np.random.default_rng(0)
    options = {"kernel": kernel, "staging_bytes": 4 * 128}  # One extent at a time.
    moves = Moves(mode, pool, **options)
    where, layout = pool.unsafe_buffer_pointer(), pool.format
    exercise(moves, shadow, rng, rounds=2)
    assert moves.pool.format == layout
    assert moves.pool.unsafe_buffer_pointer() == where, "the pool has moved"


@only_on_cpu
def test_leaves_of_different_layouts_are_not_stacked():
    pool, arrays = zip(
        *(pool_of((n, 1 - n, 2, 3), (12, 2, 4, 8), seed=n) for n in range(2)),
        strict=True,
    )
    moves = Moves("staged", list(pool), staging_bytes=4 * 2 * 256)
    assert len(moves.engine._copier.extents.bundles) == 2
    exercise(moves, Shadow(list(arrays)), np.random.default_rng(0), rounds=2)


def test_a_pool_in_another_layout_is_refused_and_nothing_happens():
    pool, _ = pool_of((1, 0, 2, 3), (12, 2, 4, 8))
    engine = TransferEngine(pool, 15)
    row_major = jax.device_put(pool, Format(Layout((0, 1, 2, 3)), HERE))
    with pytest.raises(ValueError, match="pool must lie in memory as Layout"):
        engine.save(row_major, [1], [2])
    assert engine.num_in_flight == 0


def test_host_bytes_count_what_tiles_pad(monkeypatch):
    pool = jnp.zeros((64, 16, 4, 64), jnp.bfloat16)
    dense = TransferEngine(pool, 16)

    def tiled(shape, dtype, sharding):
        return Layout(tuple(range(len(shape))), ((4, 128), (2, 1)))

    monkeypatch.setattr(memory, "default_layout", tiled)
    padded = TransferEngine(pool, 16)
    assert padded.host_bytes == 2 * dense.host_bytes
    assert TransferEngine(pool, host_bytes=4 * MIB).num_host_blocks * 2 == (
        4 * MIB // padded.block_bytes * 7 // 8
    )
