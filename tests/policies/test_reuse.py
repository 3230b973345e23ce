"""The table of reuses: native functions leave, to the bit, what pure ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.compiling import Bound
from jaxkv.policies import reuse
from jaxkv.policies.reuse import NUM_BINS, ReuseTable

NUM_CLASSES = 6
# As one program: by itself, each step would be one.
REBUILD, VALUE_OF = jax.jit(reuse.rebuild), jax.jit(reuse.value_of)


def make_tables(seed, max_count):
    rng = np.random.default_rng(seed)
    touches = rng.integers(0, max_count, NUM_CLASSES, np.int32)
    reuses = rng.integers(0, max_count, (NUM_CLASSES, NUM_BINS), np.int32)
    touches[::2], reuses[::2] = 0, 0
    reuses[2, 3] = max_count // 2
    index = rng.integers(0, 1 << 30, (NUM_CLASSES, NUM_BINS + 1), np.int32)
    arrays = touches, reuses, index
    return ReuseTable(*map(jnp.asarray, arrays)), ReuseTable(*arrays)


@pytest.mark.parametrize("high", [3, 5000, reuse.MAX_COUNT // 50, reuse.MAX_COUNT // 8])
def test_a_rebuild_leaves_the_same_table(high):
    pure, native = make_tables(high, high)
    reuse.native_rebuild(Bound(native))
    pure = REBUILD(pure)
    for name, array in vars(native).items():
        np.testing.assert_array_equal(array, getattr(pure, name), err_msg=name)


def test_blocks_of_every_age_are_worth_the_same():
    pure, native = make_tables(1, 5000)
    edges = [1 << bit for bit in range(32)]
    ages = {age + step for age in edges for step in (-1, 0, 1, age // 3)}
    ages = np.array(sorted(ages), np.uint32)
    for of_class in range(NUM_CLASSES):
        classes = jnp.full(len(ages), of_class)
        worth = VALUE_OF(pure, classes, jnp.asarray(ages)).tolist()
        value_of = reuse.native_value_of.py_func
        assert worth == [int(value_of(native, of_class, int(age))) for age in ages]
