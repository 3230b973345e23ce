"""Reports of the connector's halves to vLLM's metrics."""

import prometheus_client

from jaxkv import OffloadScheduler
from jaxkv.integrations.vllm.stats import (
    FAMILIES,
    REPORT_EVERY_S,
    OffloadConnectorStats,
    StatsReader,
)
from jaxkv.scheduling.stats import MAX_SAMPLES
from tests.integrations.test_vllm import prom_metrics
from tests.rigs import fake_vllm
from tests.rigs.fake_engine import Engine


def test_two_reports_add_up_to_the_sums_the_last_gauges_and_all_samples():
    earlier, later = (
        OffloadConnectorStats(
            {
                "counters": {"loads": {"a": number, f"only {number}": 1}},
                "gauges": {"up": {"": {"0": number, str(number): 1}}},
                "samples": {"delay": [float(number)]},
            }
        )
        for number in (3, 5)
    )
    assert earlier.aggregate(later).to_dict() == {
        "counters": {"loads": {"a": 8, "only 3": 1, "only 5": 1}},
        "gauges": {"up": {"": {"0": 5, "3": 1, "5": 1}}},
        "samples": {"delay": [3.0, 5.0]},
    }


def test_the_log_line_has_mib_counts_and_the_latest_gauges():
    report = OffloadConnectorStats()
    report.data["counters"] = {
        "vllm:kv_offload_load_bytes": {"": 3 << 19},
        "jaxkv:kv_offload_blocks_dropped": {"full": 2, "failed": 3},
    }
    report.data["gauges"] = {"jaxkv:kv_offload_host_blocks": {"": {"0": 8, "1": 9}}}
    line = report.reduce()
    unchanged = "stored MiB", "blocks stored", "blocks loaded", "host blocks evicted"
    expected = {"loaded MiB": 1.5, "blocks dropped": 5, "host blocks": 17}
    assert line == dict.fromkeys((*unchanged, "failed loads"), 0) | expected


# The values that hosts or ranks report, a gauge only when it changes, and joined ones.
JOINED = {
    "jaxkv:kv_offload_host_bytes": [({"0": 3, "1": 4}, 7), ({}, 7), ({"1": 6}, 9)],
    "jaxkv:kv_offload_storage_up": [({"0": 1, "1": 1}, 1), ({"1": 0}, 0)],
    "jaxkv:kv_offload_stores_paused": [({"0": 0}, 0), ({"1": 1}, 1), ({"0": 1}, 1)],
    "jaxkv:kv_offload_policy_info": [({"0": 1, "1": 1}, 1)],
    "vllm:kv_offload_cpu_cache_usage_perc": [({"0": 0.5, "1": 0.25}, 0.375)],
    "jaxkv:kv_offload_blocks_in_flight": [({"0": 2, "1": 3}, 5)],
}


def test_gauges_of_hosts_and_ranks_are_joined(monkeypatch):
    fake_vllm.install(monkeypatch, "0.32")
    registry = prometheus_client.CollectorRegistry()
    metrics = prom_metrics(Engine().scheduler.connector, registry)
    for name, reports in JOINED.items():
        label = FAMILIES[name].label
        labels = {"engine": "0"} | ({label: "one"} if label else {})
        for changed, joined in reports:
            report = OffloadConnectorStats()
            report.data["gauges"][name] = {label and "one": changed}
            metrics.observe(report.to_dict())
            assert registry.get_sample_value(name, labels) == joined, name


def test_samples_that_are_never_taken_are_bounded():
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
    data = reader.take().data
    assert data["counters"] == {"jaxkv:kv_offload_blocks_stored": {"": 2}}
    assert data["samples"] == {"vllm:kv_offload_lookup_sync_delay_seconds": [1.0]}
    scheduler._stats.num_stored += 3
    assert reader.take() is None
    data = reader.take(is_last=True).data
    assert data["counters"] == {"jaxkv:kv_offload_blocks_stored": {"": 3}}
    assert reader.take(is_last=True) is None
