"""Copies from block to block within a pool; `shadow.exercise` has those of layouts."""

import numpy as np
import pytest

from tests.rigs.device_cases import only_on_cpu, spread
from tests.transfer.numbered import NUM_BLOCKS
from tests.transfer.shadow import Shadow, random_array, to_device


@only_on_cpu
@pytest.mark.parametrize("mode", ["staged"])
def test_asynchronous_copies_copy_any_layout_bit_for_bit(make, mode):
    axes = {"half": 1, "bytes": 0, "pair": 2, "float": 0, "flags": 1}
    shapes = {
        "half": ((2, 16, 4), "bfloat16"),
        "bytes": ((16, 3), "int8"),
        "pair": ((2, 3, 16), "float32"),
        "float": ((16, 2, 2), "float8_e4m3fn"),
        "flags": ((1, 16, 2), "uint16"),
    }
    rng = np.random.default_rng(0)
    arrays = {n: random_array(rng, shape, kind) for n, (shape, kind) in shapes.items()}
    shadow = Shadow(arrays, axes)
    moves = make(to_device(arrays), kernel="dma", block_axis=axes)
    moves.pool = moves.engine.copy(moves.pool, [3, 7, 3], [0, 15, 1])
    shadow.copy([3, 7, 3], [0, 15, 1])
    shadow.check(moves.pool)


@only_on_cpu
@pytest.mark.parametrize(
    ("mode", "kernel"), [("fused", None), ("staged", None), ("staged", "dma")]
)
def test_sharded_heads_are_copied_where_they_are(make, kernel):
    array = np.arange(NUM_BLOCKS * 8, dtype=np.int32).reshape(NUM_BLOCKS, 4, 2)
    moves = make(spread(array, 2, None, "x"), kernel=kernel)
    place = moves.pool.sharding
    moves.pool = moves.engine.copy(moves.pool, [1, 2], [3, 0])
    assert moves.pool.sharding == place
    array[[3, 0]] = array[[1, 2]]
    np.testing.assert_array_equal(moves.pool, array)


def test_a_pool_is_copied_in_place_and_each_size_compiled_once(make):
    moves = make()
    engine, expected = moves.engine, moves.numbers
    assert engine.copy(moves.pool, [], [])["k"] is moves.pool["k"]
    where = moves.pool["k"].unsafe_buffer_pointer()
    for num in (1, 2, 7, 8, 3):
        before = moves.pool["k"]
        moves.pool = engine.copy(moves.pool, range(num), range(8, 8 + num))
        expected[8 : 8 + num] = expected[:num]
        assert before.is_deleted()
        assert moves.numbers == expected
        assert moves.pool["k"].unsafe_buffer_pointer() == where
    assert engine._copier.copy_program.cache_info().currsize == 1


def test_a_save_before_a_copy_saves_the_old_bytes(make):
    moves = make()
    moves.save([5], [0])
    moves.pool = moves.engine.copy(moves.pool, [6], [5])
    moves.drain()
    moves.load_now([0], [6])
    assert moves.numbers[5:7] == [6, 5]
