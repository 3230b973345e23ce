"""The key directory against a dict."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.policies import directory as directory_lib

find = jax.jit(directory_lib.find)
insert = jax.jit(directory_lib.insert)
remove = jax.jit(directory_lib.remove)
first_occurrence = jax.jit(directory_lib.first_occurrence)


def random_keys(rng, num):
    return rng.integers(0, 2**32, (num, 8), dtype=np.uint32)


def all_valid(keys):
    return np.ones(len(keys), bool)


@pytest.mark.parametrize("num_entries", [1, 15, 16, 200, 1000])
def test_follows_a_dict_through_inserts_and_removals(num_entries):
    rng = np.random.default_rng(num_entries)
    directory = directory_lib.init(num_entries)
    universe = random_keys(rng, 3 * num_entries)
    width = 32
    expected = {}  # row of the universe -> entry
    unused = list(range(num_entries))
    for _ in range(60):
        if rng.random() < 0.6:
            absent = [row for row in range(len(universe)) if row not in expected]
            rows = rng.permutation(absent)[: min(width, len(unused))]
            entries = np.full(width, num_entries, np.int32)
            entries[: len(rows)] = [unused.pop() for _ in rows]
            keys = np.zeros((width, 8), np.uint32)
            keys[: len(rows)] = universe[rows]
            directory, added = insert(directory, keys, entries)
            assert added[: len(rows)].all()
            assert not added[len(rows) :].any()
            expected |= dict(zip(rows.tolist(), entries.tolist(), strict=False))
        elif expected:
            rows = rng.permutation(sorted(expected))[:width]
            entries = np.full(width, num_entries, np.int32)
            entries[: len(rows)] = [expected.pop(row) for row in rows.tolist()]
            directory = remove(directory, entries)
            unused += entries[: len(rows)].tolist()
        lookup = find(directory, universe, all_valid(universe))
        want = [expected.get(row, num_entries) for row in range(len(universe))]
        assert lookup.tolist() == want


def test_deletions_leave_no_trace():
    rng = np.random.default_rng(0)
    empty = directory_lib.init(64)
    directory = empty
    for _ in range(20):
        entries = rng.permutation(64).astype(np.int32)
        directory, _ = insert(directory, random_keys(rng, 64), entries)
        directory = remove(directory, entries)
    # Only the stale keys of unused entries differ, which nothing reads.
    for name in ("tags", "entries"):
        chex.assert_trees_all_equal(getattr(directory, name), getattr(empty, name))


def test_a_hit_is_confirmed_over_all_bits():
    rng = np.random.default_rng(1)
    keys = random_keys(rng, 8)
    directory, _ = insert(directory_lib.init(8), keys, np.arange(8, dtype=np.int32))
    for bit in range(256):
        near = keys.copy()
        near[:, bit // 32] ^= np.uint32(1 << (bit % 32))
        assert (find(directory, near, all_valid(near)) == 8).all()


@pytest.mark.parametrize("num_entries", [2, 4])
def test_equal_tags_are_told_apart(num_entries):
    """The rare branch: two keys whose 32-bit tags agree, in one bucket or in two."""
    num_buckets = directory_lib.init(num_entries).tags.shape[0]
    keys = random_keys(np.random.default_rng(2), 100)
    _, buckets = directory_lib._address(jnp.asarray(keys), num_buckets)
    # With two buckets, take keys that may be in either; with one there is no choice.
    keys = keys[(buckets[:, 0] != buckets[:, 1]) | (num_buckets == 1)][:2]
    entries = np.array([0, 1], np.int32)
    directory, _ = insert(directory_lib.init(num_entries), keys, entries)
    slots = directory.slots[:2]
    for wanted in (0, 1):
        flat = directory.tags.reshape(-1)
        tags = flat.at[slots].set(flat[slots[wanted]]).reshape(directory.tags.shape)
        clash = dataclasses.replace(directory, tags=tags)
        assert find(clash, keys[wanted][None], np.ones(1, bool)).tolist() == [wanted]


def test_keys_that_differ_in_one_byte_spread_over_the_buckets():
    """Regression: counters as keys fell into one bucket, which overflowed."""
    num = 2048
    keys = np.zeros((num, 8), np.uint32)
    for lane in range(8):
        for shift in (0, 8, 16):
            keys[:] = 0
            keys[:, lane] = np.arange(num, dtype=np.uint32) << shift
            directory, added = insert(
                directory_lib.init(num), keys, np.arange(num, dtype=np.int32)
            )
            assert added.all(), (lane, shift)
            fullest = jnp.max(jnp.sum(directory.tags != 0, axis=1))
            assert fullest <= 7, (lane, shift)


def test_a_key_without_room_is_reported_and_leaves_no_trace():
    directory = directory_lib.init(2)  # one bucket of 8 slots
    rng = np.random.default_rng(3)
    keys = random_keys(rng, 20)
    wide = dataclasses.replace(
        directory,
        keys=jnp.zeros((20, 8), jnp.uint32),
        slots=jnp.full((20,), 8, jnp.int32),
    )
    directory, added = insert(wide, keys, np.arange(20, dtype=np.int32))
    assert added.sum() == 8
    entries = find(directory, keys, all_valid(keys))
    assert (entries == np.where(added, np.arange(20), 20)).all()


def test_padding_is_never_found_nor_inserted():
    keys = np.zeros((4, 8), np.uint32)
    directory = directory_lib.init(4)
    same, added = insert(directory, keys, np.full(4, 4, np.int32))
    assert not added.any()
    chex.assert_trees_all_equal(same, directory)
    directory, _ = insert(directory, keys, np.array([2, 4, 4, 4], np.int32))
    valid = np.array([True, False, True, False])
    assert find(directory, keys, valid).tolist() == [2, 4, 2, 4]


@pytest.mark.parametrize("num", [1, 16, 700])
def test_first_occurrence(num):
    rng = np.random.default_rng(num)
    for distinct in (1, 2, num // 2 + 1, 4 * num):
        keys = random_keys(rng, distinct)[rng.integers(0, distinct, num)]
        valid = rng.random(num) < 0.8
        seen, want = set(), []
        for key, ok in zip(map(bytes, keys), valid.tolist(), strict=True):
            want.append(ok and key not in seen)
            seen |= {key} if ok else set()
        assert first_occurrence(keys, valid).tolist() == want


def test_a_repetition_is_seen_after_its_first_row_was_passed_by_another():
    """Among many losers, a row took the place of a key whose repetition came later.

    The repetition then met the row in place of its own key, and counted as a first.
    """
    num = 4096
    rng = np.random.default_rng(0)
    for distinct in (num // 2, 4 * num) * 10:
        keys = random_keys(rng, distinct)
        picks = rng.integers(0, distinct, num)
        want = np.zeros(num, bool)
        want[np.unique(picks, return_index=True)[1]] = True
        valid = np.ones(num, bool)
        assert (first_occurrence(keys[picks], valid) == want).all()
