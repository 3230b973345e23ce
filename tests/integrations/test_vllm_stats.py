"""What a half of the connector reports to vLLM's metrics, and when."""

from jaxkv import OffloadScheduler
from jaxkv.integrations.vllm.stats import (
    REPORT_EVERY_S,
    OffloadConnectorStats,
    StatsReader,
)
from jaxkv.scheduling.stats import MAX_SAMPLES


def test_two_reports_add_up_to_the_sums_the_last_gauges_and_all_samples():
    earlier, later = (
        OffloadConnectorStats(
            {
                "counters": {"loads": {"a": number, f"only {number}": 1}},
                "gauges": {"held": {"": number}},
                "samples": {"delay": [float(number)]},
            }
        )
        for number in (3, 5)
    )
    assert earlier.aggregate(later).to_dict() == {
        "counters": {"loads": {"a": 8, "only 3": 1, "only 5": 1}},
        "gauges": {"held": {"": 5}},
        "samples": {"delay": [3.0, 5.0]},
    }


def test_samples_that_nobody_takes_are_not_kept_without_end():
    scheduler = OffloadScheduler(4, 8)
    reader = StatsReader(scheduler)
    for number in range(MAX_SAMPLES + 100):
        scheduler.delays.lookups.add(float(number))
    name = "vllm:kv_offload_lookup_sync_delay_seconds"
    samples = reader.take(is_last=True).data["samples"][name]
    assert samples == [float(number) for number in range(100, MAX_SAMPLES + 100)]
    assert sum(scheduler.delays.lookups.counts) == MAX_SAMPLES + 100
    scheduler.delays.lookups.add(7.0)
    assert reader.take(is_last=True).data["samples"] == {name: [7.0]}
    assert reader.take(is_last=True) is None


def test_a_half_reports_now_and_then_while_the_model_runs_and_at_once_when_it_ends():
    scheduler, now_s = OffloadScheduler(4, 8), 100.0
    reader = StatsReader(scheduler, clock=lambda: now_s)
    assert reader.take() is not None
    scheduler.delays.lookups.add(1.0)
    scheduler._stats.num_stored += 2
    now_s += REPORT_EVERY_S / 2
    assert reader.take() is None
    now_s += REPORT_EVERY_S / 2
    found = reader.take().data
    assert found["counters"] == {"jaxkv:kv_offload_blocks_stored": {"": 2}}
    assert found["samples"] == {"vllm:kv_offload_lookup_sync_delay_seconds": [1.0]}
    scheduler._stats.num_stored += 3
    assert reader.take() is None
    found = reader.take(is_last=True).data
    assert found["counters"] == {"jaxkv:kv_offload_blocks_stored": {"": 3}}
    assert reader.take(is_last=True) is None
