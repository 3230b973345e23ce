"""`HostTier`: many requests in one call are as many calls, one after the other."""

import os
import random
from itertools import chain

import jax
import numpy as np
import pytest

from jaxkv import OffloadingManager, make_lru, programs
from jaxkv.ragged import in_order

SEED = int(os.environ.get("JAXKV_TEST_SEED", "20261121"))


def keys(*numbers):
    return [b"%032d" % number for number in numbers]


def copy_of(state):
    return jax.tree.map(np.array, state)


def assert_same_state(one, other):
    jax.tree.map(np.testing.assert_array_equal, copy_of(one), copy_of(other))


def plain(output):
    """Turn an output into what `==` compares."""
    match output:
        case None | int():
            return output
        case _ if hasattr(output, "num_hits"):
            return output.num_hits, plain(output.load_spec), plain(output.store)
        case _ if hasattr(output, "store_spec"):
            return (
                output.block_hashes_to_store,
                plain(output.store_spec),
                output.block_hashes_evicted,
            )
        case _:
            return output.block_ids.tolist()


@pytest.fixture(params=["lru", "arc", "arc_fixed"])
def pair(request):
    """Two managers alike: one is asked in batches, the other one by one."""
    return [
        OffloadingManager(16, 12, request.param, enable_events=True) for _ in range(2)
    ]


def test_many_requests_are_served_as_one_after_the_other(pair):
    print(f"seed {SEED}; JAXKV_TEST_SEED sets another")
    rng = random.Random(SEED)
    batched, single = pair
    universe = [
        number.to_bytes(32, "big") if number % 4 else b"foreign-%d" % number
        for number in range(36)
    ]
    refused = 0
    for _ in range(120):
        requests = []
        for _ in range(rng.randrange(5)):
            start, length = rng.randrange(len(universe)), rng.choice((0, 1, 5, 14))
            requests.append((universe[start:] + universe[:start])[:length])
        assert batched.many.lookup(requests) == [single.lookup(r) for r in requests]
        batched.many.touch(requests[:2])
        for own in requests[:2]:
            single.touch(own)

        if rng.random() < 0.5:
            outputs = batched.many.prepare_store(requests)
            expected = [single.prepare_store(own) for own in requests]
            assert list(map(plain, outputs)) == list(map(plain, expected))
            refused += outputs.count(None)
            to_store = [out.block_hashes_to_store if out else [] for out in outputs]
            success = [rng.random() < 0.7 for _ in to_store]
            batched.many.complete_store(to_store, success)
            for own, arrived in zip(to_store, success, strict=True):
                single.complete_store(own, arrived)
        else:
            steps = batched.many.request_step(requests)
            expected = [single.request_step(own) for own in requests]
            assert list(map(plain, steps)) == list(map(plain, expected))
            batched.many.complete_step(steps)
            for step in expected:
                single.complete_step(step)

        held = [
            own[:hits]
            for own, hits in zip(requests, batched.many.lookup(requests), strict=True)
        ]
        specs = batched.many.prepare_load(held)
        assert list(map(plain, specs)) == [plain(single.prepare_load(h)) for h in held]
        batched.many.complete_load(held)
        for own in held:
            single.complete_load(own)
        assert_same_state(batched.many.state, single.many.state)
        assert batched.num_held_blocks == single.num_held_blocks
        assert batched.snapshot() == single.snapshot()
        assert [e.block_hashes for e in batched.take_events()] == [
            e.block_hashes for e in single.take_events()
        ]
    assert refused


@pytest.mark.parametrize("requests", [[], [[]], [[], []]])
def test_nothing_asked_is_nothing_done(requests):
    many = OffloadingManager(16, 4).many
    before = copy_of(many.state)
    assert many.lookup(requests) == [0] * len(requests)
    assert [plain(spec) for spec in many.prepare_load(requests)] == [[]] * len(requests)
    assert list(map(plain, many.prepare_store(requests))) == (
        [([], [], [])] * len(requests)
    )
    steps = many.request_step(requests)
    assert [step.num_hits for step in steps] == [0] * len(requests)
    many.touch(requests)
    many.complete_step(steps)
    many.complete_load(requests)
    many.complete_store(requests)
    assert_same_state(many.state, before)


def test_a_refused_load_pins_nothing_for_any_request():
    many = OffloadingManager(16, 8).many
    many.complete_step(many.request_step([keys(1, 2, 3)]))
    before = copy_of(many.state)
    with pytest.raises(ValueError, match="0009' is not on the host"):
        many.prepare_load([keys(1, 2), keys(2, 9), keys(3)])
    assert_same_state(many.state, before)
    many.prepare_load([keys(1)])
    before = copy_of(many.state)
    with pytest.raises(ValueError, match="0001' has fewer loads in progress"):
        many.complete_load([keys(1), keys(1)])
    assert_same_state(many.state, before)


def test_a_key_that_two_requests_store_gets_one_block():
    many = OffloadingManager(16, 8).many
    first, second = many.prepare_store([keys(1, 2), keys(1, 3)])
    assert plain(first) == (keys(1, 2), [0, 1], [])
    assert plain(second) == (keys(3), [2], [])


def test_a_later_request_may_evict_what_an_earlier_one_left():
    many = OffloadingManager(16, 3, enable_events=True).many
    many.complete_step(many.request_step([keys(1, 2, 3)]))
    outputs = many.prepare_store([keys(4), keys(5, 6, 7), keys(8, 9)])
    assert list(map(plain, outputs)) == [
        (keys(4), [0], keys(1)),
        None,
        (keys(8, 9), [2, 1], keys(2, 3)),
    ]
    assert [(e.block_hashes, e.removed) for e in many.events] == [
        (keys(1, 2, 3), False),
        (keys(1), True),
        (keys(2, 3), True),
    ]


def test_a_step_is_completed_once():
    manager = OffloadingManager(16, 4)
    step = manager.request_step(keys(1, 2))
    other = OffloadingManager(16, 4).request_step(keys(1))
    for steps in ([step, step], [other], [step, other]):
        before = copy_of(manager.many.state)
        with pytest.raises(ValueError, match=r"output of request_step\(\) of this"):
            manager.many.complete_step(steps)
        assert_same_state(manager.many.state, before)
    manager.complete_step(step)
    with pytest.raises(ValueError, match="be completed once"):
        manager.complete_step(step)
    assert manager.lookup(keys(1, 2)) == 2


def test_steps_that_share_a_block_do_not_end_it_more_often_than_they_pinned_it():
    manager = OffloadingManager(16, 4)
    manager.complete_step(manager.request_step(keys(1)))
    steps = manager.many.request_step([keys(1), keys(1)])
    manager.complete_load(keys(1))
    before = copy_of(manager.many.state)
    with pytest.raises(ValueError, match="was ended before"):
        manager.many.complete_step(steps)
    assert_same_state(manager.many.state, before)
    manager.complete_step(steps[0])
    assert manager.snapshot().ref_cnt == {keys(1)[0]: 0}


def test_a_step_that_is_ended_by_its_parts_is_not_kept():
    manager = OffloadingManager(16, 4)
    step = manager.request_step(keys(1))
    manager.complete_store(keys(1))
    assert len(manager.many._unfinished) == 1
    del step
    assert len(manager.many._unfinished) == 0


def test_success_is_told_for_all_requests_or_each():
    many = OffloadingManager(16, 4).many
    many.prepare_store([keys(1), keys(2)])
    for success in ([True], [True] * 3, []):
        with pytest.raises(ValueError, match="one for each of the 2 requests"):
            many.complete_store([keys(1), keys(2)], success)
    many.complete_store([keys(1), keys(2)], [True, False])
    assert many.lookup([keys(1), keys(2)]) == [1, 0]


def test_a_step_whose_store_failed_is_ended_by_its_parts():
    manager = OffloadingManager(16, 4)
    manager.complete_step(manager.request_step(keys(1)))
    step = manager.request_step(keys(1, 2))
    manager.complete_store(keys(2), success=False)
    before = copy_of(manager.many.state)
    with pytest.raises(ValueError, match="was ended before"):
        manager.complete_step(step)
    assert_same_state(manager.many.state, before)
    manager.complete_load(keys(1))
    assert manager.snapshot().ref_cnt == {keys(1)[0]: 0}


def test_a_step_that_finds_no_room_still_loads():
    manager = OffloadingManager(16, 2)
    manager.complete_step(manager.request_step(keys(1)))
    step = manager.request_step(keys(1, 2, 3))
    assert plain(step) == (1, [0], None)
    manager.complete_step(step)
    assert manager.snapshot().ref_cnt == {keys(1)[0]: 0}


def test_a_step_stores_only_what_was_looked_up_often_enough():
    manager = OffloadingManager(16, 4, store_threshold=2)
    assert plain(manager.request_step(keys(1, 2))) == (0, [], ([], [], []))
    step = manager.request_step(keys(1, 3))
    assert plain(step) == (0, [], (keys(1), [0], []))
    manager.complete_step(step)
    assert manager.lookup(keys(1)) == 1


def test_requests_longer_than_the_policy_takes_are_served_among_others():
    managers = [OffloadingManager(16, 3, make_lru(3, 3)) for _ in range(2)]
    requests = [keys(1, 2), keys(*range(1, 6)), keys(3, 3, 3, 3), keys(2)]
    outputs = managers[0].many.request_step(requests)
    expected = [managers[1].request_step(own) for own in requests]
    assert list(map(plain, outputs)) == list(map(plain, expected))
    assert [out.store is None for out in outputs] == [False, True, False, False]
    stores = [manager.many.prepare_store(requests) for manager in managers]
    assert list(map(plain, stores[0])) == list(map(plain, stores[1]))
    for manager in managers:
        manager.many.touch(requests)
    assert_same_state(managers[0].many.state, managers[1].many.state)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5], [(0, 1)]),
        ([5, 6, 16], [(0, 3)]),
        ([64] * 32, [(0, 32)]),
        ([16] * 4 + [64], [(0, 5)]),  # 192 rows of padding
        ([16] * 4 + [4096] + [16], [(0, 4), (4, 5), (5, 6)]),
        ([4096] * 20, [(0, 15), (15, 20)]),  # 65,536 rows at most
        ([0, 0], [(0, 2)]),
    ],
)
def test_requests_go_together_unless_padding_would_cost_more(lengths, expected):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    assert list(programs._runs(offsets)) == expected


def test_runs_of_requests_come_back_in_order(monkeypatch):
    monkeypatch.setattr(programs, "_ROWS_PER_CALL", 8)
    managers = [OffloadingManager(16, 60) for _ in range(2)]
    requests = [keys(1, 2), keys(*range(20)), keys(3), keys(4), keys(*range(10, 40))]
    answers = [
        [manager.many.request_step(part) for part in parts]
        for manager, parts in zip(
            managers, ([requests], [[r] for r in requests]), strict=True
        )
    ]
    together, apart = (list(chain.from_iterable(parts)) for parts in answers)
    assert list(map(plain, together)) == list(map(plain, apart))


def test_each_program_is_traced_once_per_size():
    manager = OffloadingManager(16, 50)
    manager.warm_up(max_keys=10, max_total_keys=40)
    traced = programs._compiled._cache_size()
    for requests in ([keys(1)] * 3, [keys(*range(9)), keys(2), keys(3)]):
        many = manager.many
        many.complete_step(many.request_step(requests))
        many.lookup(requests)
        many.touch(requests)
        many.prepare_load(requests)
        many.complete_load(requests)
        many.complete_store(
            [out.block_hashes_to_store for out in many.prepare_store(requests)]
        )
    assert programs._compiled._cache_size() == traced


def test_in_order_is_a_loop_in_jit_with_arguments_for_each_request():
    def add(state, own, count, factor):
        sums = np.arange(3) < count
        return state + factor * count, (own[:, 0] * sums, state)

    with jax.numpy_dtype_promotion("standard"):
        serve = jax.jit(in_order(add, width=3))
        rows = np.zeros((9, 8), np.uint32)
        rows[:, 0] = range(1, 10)
        offsets = np.array([0, 2, 2, 5, 9, 9], np.int32)
        factors = np.array([10, 20, 30, 40, 50], np.int32)
        state, (firsts, before) = serve(
            np.int32(0), rows, offsets, np.int32(3), factors
        )
    assert state == 10 * 2 + 20 * 0 + 30 * 3
    assert before[:3].tolist() == [0, 20, 20]
    assert firsts[:5].tolist() == [1, 2, 3, 4, 5]
