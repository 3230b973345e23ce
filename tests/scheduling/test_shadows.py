"""Shadow counts: the serving tier's shadow equals its hits; others follow the rules."""

import jax
import numpy as np
import pytest

from jaxkv import ConfigError
from jaxkv.scheduling.rules import OffloadRules
from jaxkv.scheduling.whatif import shadows as shadows_lib
from tests.rigs.offload_rig import BLOCK_SIZE, HYBRID, Rig, modes
from tests.rigs.traffic import Traffic


def check_same(scheduler):
    """The first shadow, of the policy and size that serve, is in the same state."""
    same, larger = scheduler.shadow_counts
    stats = scheduler.stats
    counts = same.num_found_tokens, same.num_evicted, same.error_tokens
    assert counts == (stats.num_host_hit_tokens, stats.num_evicted, 0)
    assert same.num_stored >= same.num_evicted > 100
    assert same.num_asked_tokens > counts[0]
    assert larger.num_found_tokens > counts[0] > 0
    states = scheduler._manager.executor, scheduler._whatif.shadows._tiers[0].executor
    jax.tree.map(np.testing.assert_array_equal, *[e.state for e in states])


@modes
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("lru", {}),
        ("hazard", {}),
        ("arc", {"host_blocks": 7}),
        ("arc", {"max_blocks_in_flight": 3}),
        ("lru", {"store_threshold": 2, "delay_shared_loads": True}),
    ],
)
def test_the_shadow_of_what_serves_is_in_step_with_it(mode, policy, options):
    options = {"device_blocks": 28, "host_blocks": 20} | options
    if mode == "lazy":
        options |= {"max_num_batched_tokens": 16}
    traffic = Traffic(1, mode=mode, policy=policy, shadow=f"{policy}*1,2", **options)
    check_same(traffic.run(3000))


@modes
def test_sampled_shadows_release_every_hold(mode, monkeypatch):
    monkeypatch.setattr(shadows_lib, "FULL_BLOCKS", 10)
    traffic = Traffic(
        1,
        mode=mode,
        device_blocks=28,
        host_blocks=20,
        max_num_batched_tokens=16,
        shadow="lru*1,4;hazard*2",
    )
    scheduler = traffic.run(1000)
    for count in scheduler.shadow_counts:
        assert 0 < count.num_found_tokens <= count.num_asked_tokens
        assert count.error_tokens > 0
    traffic.rig.settle()
    traffic.rig.end()
    assert not scheduler._whatif.shadows._held
    for tier in scheduler._whatif.shadows._tiers:
        assert not np.asarray(tier.executor.state.ref_cnt).any()


def test_wrong_shadow_texts_are_refused_with_the_right_form():
    for text, shown in (
        *[(text, "lru") for text in ("lru", "lru*", "lru*0", "lru*1;lru*1")],
        *(("lru*1;nosuch*1", "nosuch"), ("off*1", "off"), ("", "''"), (7, "7")),
    ):
        with pytest.raises(ConfigError, match=f"shadow=.*{shown}.* must be policies"):
            OffloadRules(shadow=text)
    for options, match in (
        ({"retention": True}, "retention=True exclude"),
        ({"blocks_per_host_block": 2}, "blocks_per_host_block=2 exclude"),
        ({"groups": HYBRID}, "single group of full-attention"),
    ):
        with pytest.raises(ValueError, match=match):
            Rig(shadow="lru*2", **options)


@modes
def test_shadows_that_were_warmed_up_have_seen_nothing(mode):
    rig = Rig(mode=mode, shadow="lru*1;hazard*2;off")
    before = jax.tree.map(np.copy, rig.pool.state)
    rig.scheduler.warm_up()
    jax.tree.map(np.testing.assert_array_equal, before, rig.pool.state)
    for count in rig.scheduler.shadow_counts:
        assert not any(count[2:])


def test_a_shadow_without_a_tier_finds_nothing():
    rig = Rig(shadow="off;lru*1")
    rig.run(rig.request("one", 1, 2))
    rig.forget_device()
    rig.run(rig.request("two", 1, 2))
    off, same = rig.scheduler.shadow_counts
    assert (off.policy, off.num_blocks, off.num_found_tokens) == ("off", 0, 0)
    assert (same.num_found_tokens, same.num_loads) == (2 * BLOCK_SIZE, 1)
