"""Notifying a cache policy of requests, and when no notification is sent."""

from collections import Counter

import jax
import numpy as np
import pytest

from jaxkv.policies.hazard import REQUEST_SHIFT
from jaxkv.policies.reuse import touches_of
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.scheduler import OffloadScheduler
from jaxkv.search.groups import FullAttention, SlidingWindow
from jaxkv.tiers.index import BlockIndex
from jaxkv.tiers.retention import Retention
from tests.rigs.offload_rig import BLOCK_SIZE, Rig, make_request

SHARE_ALL_NEW = 3  # The share class of a first turn with new blocks only.


def classes_of(rig):
    """The stop, output, turn and share of requests, and how many blocks they used."""
    touches = rig.host_tier.snapshot().policy["touches"]
    found = Counter()
    for code, count in touches.items():
        found[np.unravel_index((code >> REQUEST_SHIFT) - 1, (3, 5, 4, 4))] += count
    return found


def test_a_policy_is_notified_of_time_output_and_stop_reason():
    rig = Rig(policy="hazard", clock=lambda: 12.5)
    request = make_request("one", 1, 2, 3)
    request.num_prompt_tokens = request.num_tokens - 2
    request.stop = "tool_use"
    rig.run(request)
    assert classes_of(rig) == {(1, 1, 0, SHARE_ALL_NEW): 3}
    assert rig.host_tier.snapshot().policy["now_ms"] == 12_500


def test_a_policy_and_its_shadow_are_notified_of_the_kind():
    rig = Rig(policy="hazard", clock=lambda: 0.0, shadow="hazard*1")
    for name, kind in (("one", None), ("two", 0), ("three", 255)):
        request = make_request(name, name)
        request.kind = kind
        rig.run(request)
    (shadow,) = rig.scheduler._whatif.shadows._tiers
    for executor in (rig.host_tier.executor, shadow.executor):
        touches = touches_of(executor.state.policy.reuse)
        assert Counter(code & 511 for code in touches) == {0: 1, 1: 1, 256: 1}


def test_a_request_that_comes_back_is_a_second_turn():
    rig = Rig(policy="hazard", clock=lambda: 0.0)
    rig.run(make_request("one", 1, 2, 3))
    before = classes_of(rig)
    rig.forget_device()
    rig.run(make_request("two", 1, 2, 3, 4, 5, 6))
    (second,) = classes_of(rig).keys() - before.keys()
    assert second[2:] == (1, 2)  # the second turn; half of it is new


def test_groups_are_notified_as_separate_prefixes():
    groups = (FullAttention(BLOCK_SIZE), SlidingWindow(BLOCK_SIZE, 8))
    rig = Rig(groups=groups, policy="hazard", clock=lambda: 0.0)
    rig.run(rig.request("one", 1, 2, 3))
    assert sum(classes_of(rig).values()) == 2 * 3
    state = rig.host_tier.executor.state.policy
    assert max(state.depths.tolist()) == 2


def test_an_unknown_stop_reason_is_refused_and_changes_nothing():
    rig = Rig(policy="hazard", clock=lambda: 0.0)
    request = make_request("one", 1, 2, 3)
    rig.admit(request)
    request.stop = "eos"
    with pytest.raises(ValueError, match="stop='eos' of request 'one' must be one of"):
        rig.scheduler.request_finished(request)
    assert classes_of(rig) == {}
    request.stop = "end_turn"
    rig.scheduler.request_finished(request)
    assert sum(classes_of(rig).values()) == 3


def test_a_policy_that_does_not_listen_reads_no_clock():
    def clock():
        raise AssertionError("nobody wants to know")

    scheduler = OffloadScheduler(BLOCK_SIZE, 8, policy_clock=clock)
    rig = Rig()
    rig.scheduler = scheduler
    scheduler.bind_device_block_pool(rig.pool)
    rig.run(make_request("one", 1, 2, 3))


def test_positions_must_be_one_for_each_key():
    manager = BlockIndex(16, 4, "hazard")
    with pytest.raises(ValueError, match="3 positions must be 2, one for each key"):
        manager.begin_request([b"a", b"b"], 32, 0, [0, 1, 2])
    with pytest.raises(ValueError, match="stop='eos' must be one of"):
        manager.finish_request([b"a", b"b"], 0, 0, 7, "eos")


def test_a_request_says_how_long_its_blocks_are_kept_and_how_many():
    now_s = [0.0]
    clock = lambda: now_s[0]  # noqa: E731
    two_blocks = 2 * BLOCK_SIZE + 1
    for retains, retention, num_kept in (
        (True, Retention(priority=80, ttl_s=60), 3),
        (True, Retention(ttl_s=60, num_tokens=two_blocks), 2),
        (False, Retention(ttl_s=60), 0),  # Without the rule it is ignored.
    ):
        now_s[0] = 0.0
        rig = Rig(host_blocks=8, retention=retains, clock=clock)
        request = make_request("one", 1, 2, 3)
        request.retention = retention
        rig.run(request)
        rig.fill_host(20)
        assert rig.hit(1, 2, 3) == num_kept, retention
        now_s[0] = 61.0
        rig.fill_host(20)
        assert rig.hit(1, 2, 3) == 0


def test_a_wrong_retention_is_refused_and_changes_nothing():
    rig = Rig(retention=True)
    request = make_request("one", 1, 2, 3)
    rig.admit(request)
    request.retention = {"priority": 80}
    for call in (
        lambda: rig.scheduler.update_state_after_alloc(request, [5, 6, 7], 0),
        lambda: rig.scheduler.request_finished(request),
    ):
        with pytest.raises(ValueError, match="of request 'one' must be a jaxkv"):
            call()
    request.retention = None
    rig.scheduler.request_finished(request)


def test_several_processes_need_a_clock_that_they_agree_on(monkeypatch):
    """Each process has a clock of its own, and would evict other blocks by it."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for policy, retains, what in (
        ("hazard", False, "'hazard' evicts by time"),
        ("lru", True, "retention=True evicts by time"),
    ):
        rules = OffloadRules(retention=retains)
        with pytest.raises(ValueError, match=what):
            OffloadScheduler(BLOCK_SIZE, 8, policy, rules=rules)
        OffloadScheduler(BLOCK_SIZE, 8, policy, rules=rules, policy_clock=lambda: 1.0)
    OffloadScheduler(BLOCK_SIZE, 8, "lru")


def test_the_policy_and_the_delays_have_separate_clocks():
    rig = Rig(policy="hazard", clock=lambda: 99.0)
    rig.scheduler = OffloadScheduler(
        BLOCK_SIZE, 8, "hazard", clock=lambda: 99.0, policy_clock=lambda: 2.0
    )
    rig.scheduler.bind_device_block_pool(rig.pool)
    rig.run(make_request("one", 1, 2))
    assert rig.host_tier.snapshot().policy["now_ms"] == 2_000
