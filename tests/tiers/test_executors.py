"""The choice of an executor; `test_host_differential` shows that all agree."""

import jax
import numpy as np
import pytest

from jaxkv.keys import key_from_int
from jaxkv.keys.packed import PackedKeys, keys_to_words
from jaxkv.policies import get_policy_maker
from jaxkv.tiers import executors
from jaxkv.tiers.device import DeviceBlockPool
from jaxkv.tiers.executors import NativeExecutor, XlaExecutor, make_executor
from jaxkv.tiers.host import OffloadingManager
from jaxkv.types import NO_BLOCK


def as_lists(answer):
    return [np.asarray(part).tolist() for part in jax.tree.leaves(answer)]


@pytest.mark.parametrize("executor", ["native", "xla"])
def test_the_arrays_given_to_an_executor_stay_as_they_are(executor):
    policy = get_policy_maker("lru")(4, 16)
    kind = {"native": NativeExecutor, "xla": XlaExecutor}[executor]
    made = make_executor(policy, executor)
    assert type(made) is kind
    state = made.state
    before = as_lists(state)
    key = np.ones((1, 8), np.uint32)
    assert kind(policy, state).prepare_store(key, True).block_ids.tolist() == [0]
    assert as_lists(state) == before


def test_a_policy_with_pure_functions_alone_is_served():
    policy = get_policy_maker("lru")(2, 16)._replace(native=None)
    manager = OffloadingManager(16, 2, policy)
    assert isinstance(manager.executor, XlaExecutor)
    manager.complete_step(manager.request_step([b"a", b"b"]))
    assert manager.prepare_store([b"c"]).block_hashes_evicted == [b"a"]
    assert manager.lookup([b"b"]) == 1


def test_a_pure_policy_may_decline_what_needs_an_eviction():
    """A policy that never stores a key that begins with an odd word."""

    def admit(state, keys, wanted, num_free, ref_cnt):
        return wanted & (keys[:, 0] % 2 == 0)

    lru = get_policy_maker("lru")(2, 16)
    executor = make_executor(lru._replace(native=None, admit=admit))
    keys = np.arange(4, dtype=np.uint32)[:, None] + np.zeros(8, np.uint32)
    store = executor.prepare_store(keys[[0, 2]], True)
    executor.complete_step(store.block_ids, 0)
    store = executor.prepare_store(keys[[1, 3]], True)
    assert (store.num_stored, store.num_declined) == (0, 2)
    assert store.block_ids.tolist() == [NO_BLOCK] * 2
    assert executor.lookup(keys[[0, 2]]) == 2


def test_xla_programs_are_traced_once_for_each_padded_size():
    policy = get_policy_maker("lru")(40, 64)
    executor = XlaExecutor(policy, make_executor(policy).state)
    rng = np.random.default_rng(0)

    def serve_all(num):
        keys = rng.integers(0, 1 << 32, (num, 8), np.uint32)
        store = executor.prepare_store(keys, True)
        executor.complete_store(keys[: store.num_stored], True)
        executor.touch(keys, True)
        executor.prepare_load(keys[: executor.lookup(keys)])
        executor.complete_load(keys)

    serve_all(3)
    traced = executors._compiled._cache_size()
    for num in (1, 2, 15, 16):
        serve_all(num)
    assert executors._compiled._cache_size() == traced


@pytest.mark.parametrize("mark", [-1, 15, 16, 255, 10**6, 2**31 - 1, -(2**31)])
def test_a_wrong_mark_counts_for_some_class(mark):
    """It was written past the end of the arrays."""
    keys = [key_from_int(number) for number in range(3)]
    manager = OffloadingManager(16, 4, "hazard")
    manager.complete_step(manager.request_step(keys))
    manager.finish_request(keys, mark, 1000, 5000, "end_turn")
    assert manager.executor.state.policy.reuse.touches.sum() == len(keys)


@pytest.mark.parametrize(
    ("name", "options"),
    [("hazard", {"cache_policy": "hazard"}), ("retained", {"retention": True})],
)
def test_xla_refuses_what_has_no_pure_functions_by_its_name(name, options):
    with pytest.raises(ValueError, match=f"not '{name}': use executor='native'"):
        OffloadingManager(16, 4, executor="xla", **options)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_combined_call_does_what_its_parts_do(policy):
    rng = np.random.default_rng(3)
    names = [key_from_int(n) for n in range(40)]
    hosts = [
        OffloadingManager(16, 12, policy, executor=kind)
        for kind in ("native", "native", "xla")
    ]
    pools = [DeviceBlockPool(25) for _ in hosts]
    num_placed = 0
    for _ in range(60):
        keys = rng.permutation(names)[:6].tolist()
        packed = PackedKeys(keys, keys_to_words(keys))
        blocks = [pool.allocate(6) for pool in pools].pop()
        cached = rng.integers(7)
        is_head = bool(rng.integers(2))
        for pool in pools:
            pool.cache(blocks[:cached], keys[:cached])
        num = int(rng.integers(1, 7))
        ours = hosts[0].place_from(pools[0], packed[:num], blocks[:num], is_head)
        for host, pool in zip(hosts[1:], pools[1:], strict=True):
            assert (
                host is hosts[1] or host.place_from(pool, packed, blocks, True) is None
            )
            theirs = None
            if pool.holds(blocks[:num], keys[:num]).all():
                theirs = host.place(keys[:num])
            assert (ours is None) == (theirs is None)
            if theirs is None:
                continue
            num_placed += len(theirs.keys)
            rows = np.arange(num) if theirs.rows is None else theirs.rows
            assert list(ours.keys) == list(theirs.keys)
            assert ours.block_ids.tolist() == theirs.block_ids.tolist()
            assert list(ours.evicted_keys) == list(theirs.evicted_keys)
            pool.pin(np.array(blocks)[rows])
            if is_head:
                host.reorder(keys[:num])
        for host, pool in zip(hosts, pools, strict=True):
            pool.free(blocks)
            if ours is not None:
                rows = np.arange(num) if ours.rows is None else ours.rows
                host.complete_store(list(ours.keys))
                pool.unpin(np.array(blocks)[rows])
        for pool in pools:
            pool.forget_copies()
        seen = [
            host.next_device_victims(pool, 20)
            for host, pool in zip(hosts, pools, strict=True)
        ]
        for outputs in seen:
            assert [list(part) for part in outputs] == [list(part) for part in seen[0]]
        host_rows = hosts[0].find_held(pools[0].next_victims(20).keys)
        assert (host_rows == NO_BLOCK).all()
        for twin in pools[1:]:
            assert as_lists(twin.state) == as_lists(pools[0].state)
        for twin in hosts[1:]:
            assert twin.snapshot() == hosts[0].snapshot()
    assert num_placed > 20
