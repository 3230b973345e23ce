"""The recency log against a list."""

import dataclasses

import jax
import numpy as np

from jaxkv.compiling import copy_to_numpy
from jaxkv.policies import recency

append = jax.jit(recency.append)
pop_oldest = jax.jit(
    lambda log, num, ref_cnt, width: recency.pop_oldest(
        log, num, lambda entries: ref_cnt[entries] == 0, width
    ),
    static_argnums=3,
)


@jax.jit
def put_anew(log, entries, of_list, ranks, count):
    log = recency.remove(recency.make_room(log, count), entries)
    return recency.put(log, entries, of_list, ranks, count)


WIDTH = 8


def padded(entries, num_entries):
    out = np.full(WIDTH, num_entries, np.int32)
    out[: len(entries)] = entries
    return out


def test_scan_skips_many_pinned_entries():
    num_entries = 1000
    log = recency.init(num_entries, max_batch=num_entries)
    ids = np.arange(num_entries, dtype=np.int32)
    log = append(log, ids, ids, np.int32(num_entries))
    ref_cnt = np.ones(num_entries, np.int32)
    ref_cnt[[3, 997, 998]] = 0
    log, popped, ok = pop_oldest(log, np.int32(2), ref_cnt, WIDTH)
    assert ok
    assert popped[:2].tolist() == [3, 997]
    assert int(log.heads[0]) == 0  # entry 0, pinned, is still there
    _, popped, ok = pop_oldest(log, np.int32(2), ref_cnt * 0, WIDTH)
    assert popped[:2].tolist() == [0, 1]


def test_the_native_log_is_the_pure_one_through_compactions():
    rng, num_entries, compactions = np.random.default_rng(0), 9, 0
    pure = recency.init(num_entries, max_batch=WIDTH, num_lists=2)
    native = copy_to_numpy(pure)
    for turn in range(200):
        if turn % 7 == 0:  # As if the oldest had been taken.
            heads = rng.integers(0, int(pure.tail) + 1, 2).astype(np.int32)
            pure = dataclasses.replace(pure, heads=heads)
            native.heads[:] = heads
        batch = rng.permutation(num_entries)[: rng.integers(0, WIDTH + 1)]
        of_list, count = int(rng.integers(0, 2)), np.int32(len(batch))
        tail = int(pure.tail)
        entries = padded(batch, num_entries)
        pure = put_anew(pure, entries, of_list, np.arange(WIDTH), count)
        recency.native_make_room.py_func(native, count)
        for rank, entry in enumerate(batch):
            recency.native_remove.py_func(native, entry)
            recency.native_put.py_func(native, entry, of_list, rank)
        recency.advance.py_func(native, count)
        for name, array in vars(native).items():
            np.testing.assert_array_equal(array, getattr(pure, name), err_msg=name)
        compactions += int(pure.tail) < tail + count
    assert compactions > 10
