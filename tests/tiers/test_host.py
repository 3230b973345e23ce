"""`OffloadingManager`: misuse, events, batch sizes."""

import itertools

import jax
import numpy as np
import pytest

from jaxkv import (
    OffloadingManager,
    Snapshot,
    make_arc,
    make_lru,
    register_policy,
)
from jaxkv.keys import PackedKeys, keys_to_words
from jaxkv.keys.packed import UnlistedKeys
from jaxkv.policies import registry


def keys(*numbers):
    return [b"%032d" % number for number in numbers]


def stored(manager, *numbers):
    output = manager.prepare_store(keys(*numbers))
    manager.complete_store(keys(*numbers))
    return output


def check(output, to_store, block_ids, evicted=()):
    assert output.block_hashes_to_store == keys(*to_store)
    assert output.store_spec.block_ids.tolist() == block_ids
    assert output.block_hashes_evicted == keys(*evicted)


def test_touch_makes_the_first_key_the_most_recent():
    for policy in ("lru", make_lru(4, 5)):  # A policy itself or its name
        manager = OffloadingManager(16, 4, policy)
        stored(manager, 1, 2, 3, 4)
        # A batch beyond the policy's limit is split.
        manager.touch([*keys(1, 2), *keys(*range(50, 67)), *keys(4)])
        assert stored(manager, 5, 6, 7).block_hashes_evicted == keys(3, 4, 2)
        assert manager.prepare_store(keys(*range(6))) is None  # more than fit


def test_specs_are_int64_and_name_their_medium():
    manager = OffloadingManager(16, num_blocks=4)
    store = manager.prepare_store(iter(keys(1))).store_spec  # Any iterable of keys
    manager.complete_store(iter(keys(1)))
    for spec in (store, manager.prepare_load(keys(1)), manager.prepare_load(iter([]))):
        assert isinstance(spec.block_ids, np.ndarray)
        assert spec.block_ids.dtype == np.int64
        assert spec.medium() == "CPU"


def test_misuse_names_the_key_and_changes_nothing():
    manager = OffloadingManager(16, num_blocks=4, enable_events=True)
    stored(manager, 1, 2)
    manager.prepare_store(keys(3))
    manager.prepare_load(keys(2))
    assert list(manager.take_events())
    before = state_of(manager)
    for method, numbers, match in (
        ("prepare_load", (1, 9), "0009' is not on the host"),
        ("prepare_load", (1, 3), "0003' is not ready"),
        ("complete_load", (9,), "0009' is not on the host"),
        ("complete_load", (1,), "0001' has fewer loads in progress"),
        ("complete_load", (2, 2), "0002' has fewer loads in progress"),
        ("complete_load", (3,), "0003' has fewer loads in progress"),
    ):
        with pytest.raises(ValueError, match=match):
            getattr(manager, method)(keys(*numbers))
        assert state_of(manager) == before
        assert list(manager.take_events()) == []
    with pytest.raises(TypeError, match="'a' must be of type bytes"):
        manager.lookup(["a"])


def test_half_drained_events_are_kept_and_none_where_nobody_asked_for_them():
    manager = OffloadingManager(16, num_blocks=4, enable_events=True)
    stored(manager, 1)
    stored(manager, 2)
    assert next(manager.take_events()).block_hashes == keys(1)
    assert len(list(manager.take_events())) == 2
    manager = OffloadingManager(16, num_blocks=1)
    stored(manager, 1)
    assert list(manager.take_events()) == []


def test_foreign_keys_come_back_as_they_were_given():
    manager = OffloadingManager(16, num_blocks=2, enable_events=True)
    foreign = [b"", b"x", b"y" * 33]
    assert manager.prepare_store(foreign[:2]).block_hashes_to_store == foreign[:2]
    manager.complete_store(foreign[:2])
    assert manager.lookup(foreign) == 2
    assert manager.prepare_store(foreign[2:]).block_hashes_evicted == [b""]
    assert [e.block_hashes for e in manager.take_events()] == [foreign[:2], [b""]]
    manager.complete_store(foreign[2:], success=False)
    assert list(manager._names.values()) == [b"x"]  # No other key is kept.


def test_refuses_bad_arguments(monkeypatch):
    monkeypatch.setattr(registry, "_makers", dict(registry._makers))
    register_policy("broken", lambda num_blocks, max_batch: None)
    for arguments, match in (
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"num_blocks": -1}, "num_blocks=-1 must be at least 1"),
        ({"num_blocks": 4.0}, "num_blocks=4.0 must be a whole number from 1 on"),
        ({"cache_policy": "mru"}, r"Unknown cache policy: 'mru'. Supported: \['lru', "),
        ({"cache_policy": "broken"}, "cache_policy='broken' must be a jaxkv.Policy or"),
        *[
            ({"cache_policy": wrong}, r"must be a jaxkv\.Policy or")
            for wrong in (None, make_lru, 7)
        ],
        (
            {"cache_policy": make_lru(5, 64)},
            "num_blocks=5 and policy.max_batch=64 must be 4 and at least 4, be",
        ),
        (
            {"num_blocks": 40, "cache_policy": make_lru(40, 39)},
            "policy.max_batch=39 must be 40 and at least 40, because",
        ),
        ({"store_threshold": -1}, "store_threshold=-1 must be at least 0"),
        ({"store_threshold": 1.5}, "store_threshold=1.5 must be a whole number from 0"),
        ({"store_threshold": None}, "store_threshold=None must be a whole number"),
        ({"max_unseen_blocks": "2"}, "max_unseen_blocks='2' must be a whole number"),
        ({"max_tracker_size": 0}, "max_tracker_size=0 must be at least 1"),
        ({"executor": "numba"}, "executor='numba' must be 'native' or 'xla'"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            OffloadingManager(**{"block_size": 16, "num_blocks": 4} | arguments)


def test_a_snapshot_is_a_copy():
    manager = OffloadingManager(16, num_blocks=5)
    stored(manager, 1, 2)
    shown = manager.snapshot()
    before = Snapshot(
        policy={"order": keys(1, 2)},
        ref_cnt=dict.fromkeys(keys(1, 2), 0),
        block_ids=dict(zip(keys(1, 2), (0, 1), strict=True)),
        free_ids=[2, 3, 4],
    )
    assert shown == before
    manager.touch(keys(1, 2))
    stored(manager, 3)
    assert shown == before


def test_only_keys_looked_up_often_enough_are_stored():
    manager = OffloadingManager(16, num_blocks=4, store_threshold=2)
    foreign = b"foreign"
    check(manager.prepare_store([*keys(1, 2), foreign]), (), [])
    manager.lookup([*keys(1, 2), foreign])
    with pytest.raises(TypeError, match="'a' must be of type bytes"):
        manager.lookup([*keys(2), "a"])  # Refused lookups count nothing.
    manager.lookup([*keys(3, 1), foreign])  # Keys after the first miss count.
    output = manager.prepare_store([*keys(1, 2, 3), foreign])
    assert output.block_hashes_to_store == [*keys(1), foreign]
    manager.complete_store(output.block_hashes_to_store)
    assert list(manager.snapshot().block_ids) == [*keys(1), foreign]
    # A step counts as a look-up.
    step = manager.request_step(keys(3))
    assert plain(step) == (0, [], (keys(3), [2], []))
    for store_threshold in (0, 1):
        manager = OffloadingManager(16, 4, store_threshold=store_threshold)
        check(manager.prepare_store(keys(1, 2)), (1, 2), [0, 1])


def test_the_tail_of_a_prompt_that_nobody_knows_is_stored_the_next_time():
    manager = OffloadingManager(16, num_blocks=9, max_unseen_blocks=2)
    step = manager.request_step(keys(1, 2, 3, 4))
    assert step.store.block_hashes_to_store == keys(1, 2)
    manager.complete_step(step)
    assert manager.num_skipped == 2
    step = manager.request_step(keys(1, 2, 3, 4, 5))
    assert (step.num_hits, step.store.block_hashes_to_store) == (2, keys(3, 4, 5))


def test_the_tracker_forgets_keys_beyond_its_size():
    manager = OffloadingManager(16, 4, store_threshold=2, max_tracker_size=2)
    for _ in range(2):
        manager.lookup(keys(1, 2, 3))
    check(manager.prepare_store(keys(1, 2, 3)), (), [])
    manager.lookup(keys(3))
    check(manager.prepare_store(keys(1, 2, 3)), (3,), [0])


def test_batches_beyond_the_largest_are_served():
    manager = OffloadingManager(16, num_blocks=2)
    many = keys(*range(manager.policy.max_batch + 1))
    assert manager.prepare_store(many) is None
    assert manager.num_held_blocks == 0
    repeated = keys(2, 1) * manager.policy.max_batch
    check(manager.prepare_store(repeated), (2, 1), [0, 1])
    manager.complete_store(keys(1, 2))
    manager.touch([*keys(2), *many, *keys(2)])  # Key 2 is touched last.
    assert manager.prepare_store(keys(5)).block_hashes_evicted == keys(1)


def test_a_touch_beyond_the_largest_batch_counts_as_a_use_in_each_part():
    manager = OffloadingManager(16, 6, make_arc(6, 6))
    manager.complete_step(manager.request_step(keys(*range(6))))
    manager.touch(keys(*range(12)))
    assert manager.executor.state.policy.sizes.tolist() == [
        0,
        0,
        0,
        6,
    ]  # All in T2: used twice


def plain(output):
    store = output.store
    return (
        output.num_hits,
        output.load_spec.block_ids.tolist(),
        store
        and (
            store.block_hashes_to_store,
            store.store_spec.block_ids.tolist(),
            store.block_hashes_evicted,
        ),
    )


def state_of(manager):
    return [leaf.tolist() for leaf in jax.tree.leaves(manager.executor.state)]


def assert_refused(manager, step, match):
    before = state_of(manager)
    with pytest.raises(ValueError, match=match):
        manager.complete_step(step)
    assert state_of(manager) == before


def test_a_step_is_completed_once_and_by_the_manager_that_made_it():
    manager = OffloadingManager(16, 4)
    step = manager.request_step(keys(1, 2))
    foreign = OffloadingManager(16, 4).request_step(keys(1))
    assert_refused(manager, foreign, r"output of request_step\(\) of this")
    manager.complete_step(step)
    assert_refused(manager, step, "be completed only once")
    assert manager.lookup(keys(1, 2)) == 2
    step = manager.request_step(keys(1))
    manager.clear()
    assert_refused(manager, step, r"output of request_step\(\) of this")


@pytest.mark.parametrize("executor", ["native", "xla"])
def test_a_step_of_which_a_part_has_ended_is_not_completed(executor):
    manager = OffloadingManager(16, 4, executor=executor)
    manager.complete_step(manager.request_step(keys(1)))
    first, second = (manager.request_step(keys(1)) for _ in range(2))
    manager.complete_load(keys(1))
    manager.complete_step(first)
    assert_refused(manager, second, "was ended before")
    assert manager.snapshot().ref_cnt == {keys(1)[0]: 0}
    # After a failed store, each part is completed by itself.
    step = manager.request_step(keys(1, 2))
    manager.complete_store(keys(2), success=False)
    assert_refused(manager, step, "was ended before")
    manager.complete_load(keys(1))
    assert manager.snapshot().ref_cnt == {keys(1)[0]: 0}


def test_a_step_longer_than_the_policy_takes_is_served_in_parts():
    manager = OffloadingManager(16, 3, make_lru(3, 3))
    manager.complete_step(manager.request_step(keys(1, 2)))
    assert plain(manager.request_step(keys(1, 2, 3, 4, 5))) == (2, [0, 1], None)
    manager.complete_load(keys(1, 2))
    step = manager.request_step(keys(3, 3, 3, 3))
    assert plain(step) == (0, [], (keys(3), [2], []))


def test_a_request_step_is_one_call_of_the_executor(monkeypatch):
    manager = OffloadingManager(16, 4)
    for name in ("lookup", "touch", "prepare_load", "prepare_store"):
        monkeypatch.setattr(manager.executor, name, None)
    step = manager.request_step(keys(1, 2))
    assert step.store.block_hashes_to_store == keys(1, 2)


def test_rows_say_which_of_the_keys_given_are_stored():
    for store_threshold, num_given in itertools.product((0, 2), (6, 5000)):
        manager = OffloadingManager(16, 8, store_threshold=store_threshold)
        stored, wanted, new = ([b"%c%d" % (c, i) for i in range(2)] for c in b"kwo")
        for keys_of_two in (stored, wanted):
            for _ in range(2):
                manager.lookup(keys_of_two)
        manager.complete_store(manager.prepare_store(stored).block_hashes_to_store)
        offered = [wanted[0], stored[0], new[0], wanted[0], stored[1], wanted[1]]
        offered = (offered * num_given)[:num_given]
        answer = manager.prepare_store(offered)
        expected = wanted if store_threshold else [wanted[0], new[0], wanted[1]]
        assert answer.block_hashes_to_store == expected
        assert answer.rows.tolist() == [offered.index(key) for key in expected]


def test_unlisted_and_packed_keys_are_placed_as_listed_ones_are():
    for threshold in (0, 2):
        rng = np.random.default_rng(threshold)
        managers = [
            OffloadingManager(16, 12, store_threshold=threshold) for _ in range(3)
        ]
        num_evicted = 0
        for _ in range(60):
            some = keys(*rng.integers(0, 30, rng.integers(0, 9)))
            words = keys_to_words(some)
            placements = []
            for manager, manager_keys in zip(
                managers,
                (some, UnlistedKeys(words), PackedKeys(some, words)),
                strict=True,
            ):
                manager.lookup(manager_keys)
                placements.append(manager.place(manager_keys))
                manager.complete_store(some)
            answers = [
                (
                    list(keys),
                    list(range(len(some))) if rows is None else rows.tolist(),
                    block_ids.tolist(),
                    list(evicted),
                )
                for keys, rows, block_ids, evicted in placements
            ]
            assert answers[0] == answers[1] == answers[2]
            num_evicted += len(answers[0][3])
        assert num_evicted > 20
        shown = [manager.snapshot() for manager in managers]
        assert shown[0] == shown[1] == shown[2]
