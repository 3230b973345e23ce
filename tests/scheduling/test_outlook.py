"""The outlook from shadow counts: a table, a sentence and log lines."""

import dataclasses
import gc
import logging

import pytest

from jaxkv.scheduling.whatif.outlook import Outlook, OutlookLog
from jaxkv.scheduling.whatif.shadows import ShadowCount
from jaxkv.scheduling.whatif.speeds import Speeds
from tests.rigs.offload_rig import Rig

GIB = 1 << 30
# 1 GiB in 1 s, and 1000 tokens.
SPEEDS = Speeds(GIB, GIB, prefill_tokens_per_s=1000.0)


def count(policy, num_blocks, num_found, *, num_asked=80_000, loads=100, error=0.0):
    counts = num_asked, num_found, loads
    return ShadowCount(policy, num_blocks, *counts, error_tokens=error)


def make(*shadows, **changes):
    """100 requests of 1000 tokens; a block has 16 of them and a MiB."""
    fields = {
        "policy": "lru",
        "num_blocks": 1024,
        "block_bytes": 1 << 20,
        "num_requests": 100,
        "num_tokens": 100_000,
        "num_device_tokens": 15_000,
        "num_host_tokens": 20_000,
        "num_asked_tokens": 80_000,
        "speeds": SPEEDS,
        "block_size": 16,
    }
    return Outlook(shadows=shadows, **fields | changes)


SERVED = "of 100,000 tokens of 100 requests the device had 15.0% and the host, 1 GiB "
SERVED += "with lru, 20.0%; "


def test_more_memory_and_another_policy_are_suggested_with_their_gain():
    outlook = make(
        count("lru", 512, 12_000),
        count("lru", 1024, 20_000),
        count("lru", 2048, 26_000),
        count("lru", 4096, 26_100),
        count("hazard", 1024, 24_000),
        count("arc", 1024, 19_000),
        ShadowCount("off", 0),
    )
    # 200 tokens take 0.2 s to compute and 12.5 MiB to load.
    assert outlook.saved_s(outlook.serving) == pytest.approx(0.2 - 12.5 / 1024)
    assert outlook.sentence == (
        f"{SERVED}1 GiB more would find 6.0 percentage points more, saving 56.3 ms of "
        "prefill per request; hazard instead of lru would find 4.0 percentage points "
        "more, saving 37.6 ms of prefill per request"
    )
    rows = str(outlook).splitlines()
    assert " ".join(rows[0].split()) == "policy host found error saved per request"
    assert rows[1].split() == ["lru", "512", "MiB", "12.0%", "0.0", "113", "ms"]
    assert rows[7].split() == ["off", "none", "0.0%", "0.0", "0", "s"]
    assert rows[-1] == f"O{outlook.sentence[1:]}."


def test_a_gain_within_the_error_is_not_suggested():
    doubted = count("lru", 2048, 26_000, error=4000)
    nothing = f"{SERVED}no other shadow would find more"
    assert make(doubted).sentence == nothing
    believed = count("lru", 2048, 26_000, error=2000)
    assert make(believed, speeds=None).sentence == (
        f"{SERVED}1 GiB more would find 6.0 ± 2.0 percentage points more"
    )


def test_unused_memory_is_named_if_more_would_not_help():
    outlook = make(count("lru", 256, 19_500), count("lru", 4096, 20_000))
    assert (
        outlook.sentence
        == f"{SERVED}768 MiB less would find 0.5 percentage points less"
    )


def test_hits_from_a_store_are_separate():
    outlook = make(
        count("lru", 1024, 18_000), count("lru", 2048, 26_000), is_alone=False
    )
    assert outlook.sentence.startswith(
        f"{SERVED[:-2]} with the tiers below it. Without those, 1 GiB more would find "
        "8.0 percentage points more"
    )


def test_a_sample_is_scaled_to_all_requests():
    outlook = make(count("lru", 2048, 26_000, num_asked=40_000, error=400))
    (shadow,) = outlook.shadows
    assert outlook.points(shadow) == pytest.approx(52.0)
    assert outlook.error_points(shadow) == pytest.approx(0.8)


def test_an_outlook_since_an_earlier_one_subtracts_it():
    earlier = make(count("lru", 2048, 26_000, error=300))
    now = dataclasses.replace(
        earlier,
        num_requests=150,
        num_tokens=150_000,
        num_host_tokens=20_000,
        num_asked_tokens=130_000,
        shadows=(count("lru", 2048, 66_000, num_asked=130_000, loads=150, error=500),),
    )
    since = now.since(earlier)
    assert (since.num_requests, since.num_host_tokens) == (50, 0)
    (shadow,) = since.shadows
    assert (shadow.num_found_tokens, shadow.num_loads) == (40_000, 50)
    assert shadow.error_tokens == pytest.approx(400)
    assert since.points(shadow) == pytest.approx(80.0)


def test_the_log_has_an_outlook_of_each_hour_and_of_all(caplog):
    caplog.set_level(logging.INFO, "jaxkv")
    looks = [make(), make(num_requests=150), make(num_requests=150)]
    log = OutlookLog(iter(looks).__next__)
    for now_ms in (5, 3_600_004, 3_600_005, 7_200_004, 7_200_005):
        log.note(now_ms)
    log.close()
    hours = [record.message.partition(",")[0] for record in caplog.records]
    assert hours == ["in the last hour", "in the last hour", "since the start"]


def test_a_scheduler_logs_its_outlook_when_it_is_collected(caplog):
    caplog.set_level(logging.INFO, "jaxkv")
    rig = Rig(shadow="lru*1,2", host_blocks=4, block_bytes=1 << 20)
    for path in ((1, 2), (3, 4), (5, 6), (1, 2)):
        rig.run(rig.request(f"{path}", *path))
        rig.forget_device()
    outlook = rig.scheduler.outlook()
    assert (outlook.num_requests, outlook.num_host_tokens) == (4, 0)
    assert "4 MiB more would find 22.2 percentage points more" in outlook.sentence
    assert outlook.saved_s(outlook.shadows[1]) is None
    rig.scheduler.set_rates(1 << 30, 100.0)
    outlook = rig.scheduler.outlook()
    # 8 tokens take 80 ms, their blocks 2 ms.
    assert outlook.saved_s(outlook.shadows[1]) == pytest.approx((0.08 - 2 / 1024) / 4)
    assert not caplog.records
    del rig
    gc.collect()
    (record,) = caplog.records
    assert record.message == f"since the start, {outlook.sentence}"


def test_without_shadows_there_is_no_outlook():
    with pytest.raises(ValueError, match="there are no shadows"):
        Rig().scheduler.outlook()
