"""`auto` serves with the policy whose shadow is ahead for long enough."""

import logging
from functools import partial

import pytest

from jaxkv import OffloadConfig, OffloadingManager
from jaxkv.scheduling import scheduler as scheduler_module
from jaxkv.scheduling.whatif import auto, shadows
from jaxkv.scheduling.whatif.auto import CANDIDATES, PolicyChoice
from jaxkv.scheduling.whatif.key_sample import NUM_GROUPS, KeySample
from tests.rigs.offload_rig import BLOCK_SIZE, HYBRID, Rig, modes
from tests.rigs.traffic import Traffic, auto_at_once, change_in_turn


@pytest.fixture
def hasty(monkeypatch):
    """Change at whatever lead, so that few requests are enough."""
    for name, value in auto_at_once().items():
        monkeypatch.setattr(auto, name, value)


class FakeShadows:
    """Made-up hit counts of shadows."""

    def __init__(self, bits=None, num_host_blocks=1000):
        self.num_host_blocks = num_host_blocks
        self.sample = None if bits is None else KeySample(bits, 1000)
        self.num_requests = 0
        self.lookups = [0] * NUM_GROUPS
        self.hits = {name: [0] * NUM_GROUPS for name in CANDIDATES}

    @property
    def num_asked_of_sample(self):
        return list(self.lookups)

    def num_found_of_sample(self, policy):
        return list(self.hits[policy])

    def serve(self, choice, num_looks, **num_hits):
        """Serve requests of 16 blocks with these mean hits; return policy changes."""
        changes = []
        for number in range(num_looks * auto.CHECK_EVERY):
            self.num_requests += 1
            self.lookups[number % NUM_GROUPS] += 16
            for name, num in num_hits.items():
                num = num[number % NUM_GROUPS] if isinstance(num, list) else num
                self.hits[name][number % NUM_GROUPS] += num
            if (policy := choice.choose()) is not None:
                changes.append((self.num_requests, policy))
        return changes


def test_a_policy_that_is_ahead_for_long_enough_takes_over(caplog):
    caplog.set_level(logging.INFO, "jaxkv")
    fake = FakeShadows()
    choice = PolicyChoice(fake)
    assert choice.policy == CANDIDATES[0] == "hazard"
    assert not fake.serve(choice, 30, hazard=8, lru=8, slru=7)
    assert not fake.serve(choice, auto.PATIENCE - 1, hazard=6, lru=8, slru=7)
    start = fake.num_requests
    assert fake.serve(choice, 1, hazard=6, lru=8, slru=7) == [
        (start + auto.CHECK_EVERY, "lru")
    ]
    assert (choice.policy, choice.num_changes) == ("lru", 1)
    assert caplog.messages == [
        "lru replaces hazard: of the blocks that the last 512 requests looked up on "
        "the host, it would have found 12.5% more"
    ]
    # It is as long before another one does.
    start = fake.num_requests
    ((changed, policy),) = fake.serve(choice, 60, hazard=6, lru=8, slru=11)
    assert policy == "slru"
    assert changed == start + auto.PATIENCE * auto.CHECK_EVERY
    ((_, policy),) = fake.serve(choice, 100, hazard=9, lru=8, slru=7)
    assert (policy, choice.num_changes) == ("hazard", 3)


def test_a_short_lead_changes_no_policy():
    fake = FakeShadows()
    choice = PolicyChoice(fake)
    for _ in range(20):
        assert not fake.serve(choice, auto.PATIENCE - 1, hazard=7, lru=8, slru=0)
        assert not fake.serve(choice, auto.PATIENCE, hazard=14, lru=7, slru=0)
    # A lead of less than one in 200, however long.
    assert not fake.serve(choice, 200, hazard=[8] * 16, lru=[9] + [8] * 15)


def test_a_larger_host_needs_a_lead_over_more_blocks():
    fake = FakeShadows(num_host_blocks=1 << 17)
    choice = PolicyChoice(fake)
    needed = auto.SHARE_OF_HOST * fake.num_host_blocks
    ((changed, _),) = fake.serve(choice, 150, hazard=7, lru=8, slru=7)
    assert needed < changed <= needed + auto.CHECK_EVERY


def test_a_lead_within_its_error_changes_nothing():
    # 4 groups are far ahead and the others behind: it may be chance.
    uneven = [16] * 4 + [6] * 12
    for bits, expected in ((None, ["lru"]), (5, [])):
        fake = FakeShadows(bits)
        choice = PolicyChoice(fake)
        changes = fake.serve(choice, 40, hazard=8, lru=uneven)
        assert [policy for _, policy in changes] == expected
    # As much everywhere is not.
    fake = FakeShadows(5)
    assert fake.serve(PolicyChoice(fake), 40, hazard=16, lru=17)


@modes
@pytest.mark.parametrize("full_blocks", [10, 2048])
def test_hits_are_right_through_all_policy_changes(mode, full_blocks, monkeypatch):
    monkeypatch.setattr(shadows, "FULL_BLOCKS", full_blocks)
    monkeypatch.setattr(PolicyChoice, "choose", change_in_turn)
    traffic = Traffic(
        3,
        mode=mode,
        policy="auto",
        device_blocks=28,
        host_blocks=20,
        max_num_batched_tokens=16,
    )
    traffic.rig.scheduler.warm_up()
    scheduler = traffic.run(1500)
    assert scheduler.num_policy_changes > 70
    outlook = scheduler.outlook()
    assert outlook.policy == scheduler.serving_policy
    text = f"with {outlook.policy} (auto, {outlook.num_changes} change"
    assert text in outlook.sentence
    assert {shadow.policy for shadow in outlook.shadows} == set(CANDIDATES)
    assert scheduler.stats.num_host_hit_tokens > 50
    traffic.rig.settle()
    traffic.rig.end()


def test_equal_request_times_give_equal_policy_changes(hasty):
    def history(executor_clock):
        traffic = Traffic(3, policy="auto", device_blocks=28, host_blocks=20)
        traffic.rig.scheduler.delays.clock = executor_clock
        changes = []
        for _ in range(2500):
            traffic.act()
            scheduler = traffic.rig.scheduler
            changes.append((scheduler.serving_policy, scheduler.stats.num_evicted))
        return changes

    first = history(lambda: 0.0)
    assert first == history(lambda: 7.0)
    assert len({policy for policy, _ in first}) > 1


def test_a_candidate_named_as_a_shadow_is_shadowed_once():
    rig = Rig(policy="auto", shadow="lru*1,2;arc*1")
    named = [(s.policy, s.num_blocks) for s in rig.scheduler.shadow_counts]
    added = ("hazard", 16), ("slru", 16)
    assert named == [("lru", 16), ("lru", 32), ("arc", 16), *added]


def test_stores_pause_while_no_shadow_finds_anything_and_go_on_when_one_does(
    monkeypatch,
):
    # `hazard`, with which auto begins, stores next to nothing here.
    for module in (auto, scheduler_module):
        monkeypatch.setattr(module, "CANDIDATES", ("lru", "slru", "hazard"))
    rig = Rig(policy="auto", host_blocks=8, device_blocks=12)
    scheduler = rig.scheduler
    for n in range(20):
        rig.run(rig.request(f"{n}", n, n + 100))
    assert scheduler.is_storing_paused
    # One that was not stored, as its shadow was: no request has found it.
    rig.run(rig.request("again", 19, 119))
    assert scheduler.stats.num_host_hit_tokens == 0
    rig.forget_device()
    rig.run(rig.request("once more", 19, 119))
    rig.run(rig.request("new", 50, 51))
    assert not scheduler.is_storing_paused


def test_what_auto_cannot_serve_is_refused():
    on_evict = {"storage_write": "on_evict"}
    config, manager = OffloadConfig, partial(OffloadingManager, BLOCK_SIZE, 8)
    for make, options, match in (
        (Rig, {"retention": True}, "cache_policy='auto' and retention=True exclude"),
        (config, {"retention": True}, "cache_policy='auto' and retention=True exclude"),
        (Rig, {"blocks_per_host_block": 2}, "and blocks_per_host_block=2 exclude"),
        (config, {"blocks_per_host_block": 2}, "and blocks_per_host_block=2 exclude"),
        (Rig, {"num_storage_blocks": 8} | on_evict, "needs cache_policy='lru'"),
        (config, {"storage": "kv"} | on_evict, "needs cache_policy='lru'"),
        # Shadows do not see all of such a model; a tier has no requests.
        (Rig, {"groups": HYBRID}, "'auto' needs a model with a single gr"),
        (manager, {}, "'auto' needs an OffloadScheduler"),
    ):
        name = "policy" if make is Rig else "cache_policy"
        with pytest.raises(ValueError, match=match):
            make(**{name: "auto"}, **options)
