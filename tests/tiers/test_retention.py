"""Retention of blocks: the values, and the manager that takes them."""

import math

import pytest

from jaxkv import OffloadingManager, Retention

MINUTE_MS = 60_000
RETAINED = Retention(priority=80, ttl_s=60)


def full(*names, **choices):
    manager = OffloadingManager(16, 3, retention=True, **choices)
    manager.complete_step(manager.request_step(list(names)))
    return manager


def test_values_that_are_none_are_refused_in_one_line():
    wrong = "must be a whole number"
    for values, match in (
        ({"priority": -1, "ttl_s": 1}, f"priority=-1 {wrong} from 0 to"),
        ({"priority": 100, "ttl_s": 1}, f"priority=100 {wrong} from 0"),
        ({"priority": 1.5, "ttl_s": 1}, f"priority=1.5 {wrong}"),
        ({"priority": True, "ttl_s": 1}, f"priority=True {wrong}"),
        ({"half_life_s": math.nan}, "half_life_s=nan must be a number of seconds from"),
        ({"half_life_s": -1}, "half_life_s=-1 must be a number of seconds from 0.001"),
        ({"ttl_s": 0}, "ttl_s=0 must be a number of seconds from 0.001 to 2000000"),
        ({"ttl_s": math.inf}, "ttl_s=inf must be a number of seconds"),
        ({"ttl_s": "60"}, "ttl_s='60' must be a number of seconds"),
        ({"priority": 9}, "half_life_s=None and ttl_s=None: one must be a number"),
        ({"ttl_s": 1, "num_tokens": -1}, f"num_tokens=-1 {wrong} from 0"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            Retention(**values)
        assert "\n" not in str(caught.value)
    for values, match in (
        ({"prio": 9, "ttl_s": 1}, "'prio' must be one of .*did you mean priority"),
        ([80], r"\[80\] must be a mapping, of"),
    ):
        with pytest.raises(ValueError, match=match):
            Retention.of(values)


def test_long_halvings_end_where_no_time_to_live_does():
    for values, ttl_ms in (
        ({"ttl_s": 1}, 1000),
        ({"half_life_s": 60}, 0),
        ({"half_life_s": 2e6}, 2_000_000_000),
        ({"half_life_s": 2e6, "ttl_s": 1}, 1000),
    ):
        assert Retention(**values).ttl_ms == ttl_ms, values


def test_a_key_stored_after_its_time_is_ordinary():
    manager = OffloadingManager(16, 3, retention=True)
    manager.retain([b"a"], RETAINED, now_ms=0)
    manager.begin_request([b"z"], 16, MINUTE_MS)
    manager.complete_step(manager.request_step([b"a", b"b", b"c"]))
    assert manager.snapshot().policy["num_retained"] == 0
    assert len(manager._notes) == 0


DAY_MS = 24 * 60 * MINUTE_MS


@pytest.mark.parametrize("half_life_s", [300_000, 700_000, 2_000_000])
def test_even_the_longest_half_life_ends_and_does_not_begin_again(half_life_s):
    """Times have 32 bits: after 49 days of evictions it was as on the first."""
    manager = full(b"a", b"b", b"c")
    keep = Retention(priority=99, half_life_s=half_life_s)
    manager.retain([b"a"], keep, now_ms=0)
    lasting = []
    for day in range(1, 160):
        manager.begin_request([b"a"], 16, day * DAY_MS)
        new = [b"%d" % day]
        assert manager.prepare_store(new).block_hashes_evicted != [b"a"] or day > 23
        manager.complete_store(new)
        lasting.append(manager.snapshot().policy["num_retained"])
    num_days = min(7 * half_life_s, 2_000_000) // 86_400
    assert lasting == [1] * num_days + [0] * (159 - num_days)


@pytest.mark.parametrize("days", [20, 26, 48, 51, 76, 1000])
def test_an_unused_tier_keeps_time_over_weeks(days):
    """From 24.9 days on the time stood still, until as much again had passed."""
    manager = full(b"a", b"b", b"c", cache_policy="hazard")
    retention = Retention(priority=9, half_life_s=1_000_000)
    manager.retain([b"a", b"d"], retention, now_ms=5)
    mark = manager.begin_request([b"d"], 16, days * DAY_MS)
    manager.complete_step(manager.request_step([b"d"]))
    state = manager.executor.state.policy
    for policy_state in (state, state.inner):
        assert int(policy_state.now_ms) == days * DAY_MS % (1 << 32)
    # What the key was given before has decayed, and does not turn the clock back.
    if days < 49:
        assert manager.snapshot().policy["num_retained"] == 2 * (days == 20)
    # A clock that goes back is not followed.
    manager.finish_request([b"d"], mark, days * DAY_MS - 5)
    assert int(manager.executor.state.policy.now_ms) == days * DAY_MS % (1 << 32)


def test_only_the_keys_given_last_are_remembered():
    manager = OffloadingManager(16, 3, retention=True, max_tracker_size=1)
    manager.retain([b"a", b"b"], RETAINED, now_ms=0)
    manager.complete_step(manager.request_step([b"a", b"b", b"c"]))
    assert manager.prepare_store([b"d", b"e"]).block_hashes_evicted == [b"a", b"c"]


def test_foreign_keys_and_more_than_a_batch_are_retained():
    manager = OffloadingManager(16, 5000, retention=True)
    names = [b"%d" % number for number in range(5000)]
    manager.complete_step(manager.request_step(names))
    manager._notes.clear()
    max_batch = manager.policy.max_batch
    manager.retain(names + names, RETAINED, now_ms=0)
    assert len(names) * 2 > max_batch / 2
    assert manager.snapshot().policy["num_retained"] == 5000


def test_clear_forgets_what_keys_were_given():
    manager = full(b"a", b"b", b"c")
    manager.retain([b"a"], RETAINED, now_ms=0)
    manager.clear()
    manager.complete_step(manager.request_step([b"a", b"b", b"c"]))
    assert manager.snapshot().policy["num_retained"] == 0


def test_without_retention_it_is_refused_and_changes_nothing():
    manager = OffloadingManager(16, 3)
    manager.complete_step(manager.request_step([b"a", b"b", b"c"]))
    before = manager.snapshot()
    with pytest.raises(ValueError, match="make the manager with retention=True"):
        manager.retain([b"a"], RETAINED, now_ms=0)
    assert manager.snapshot() == before
