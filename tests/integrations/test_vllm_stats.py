"""Reports of the connector's halves to vLLM's metrics."""

import prometheus_client

from jaxkv import OffloadScheduler
from jaxkv.integrations.vllm.stats import (
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
                "gauges": {"held": {"": number}},
                "host_gauges": {"up": {"": {"0": number, str(number): 1}}},
                "samples": {"delay": [float(number)]},
            }
        )
        for number in (3, 5)
    )
    assert earlier.aggregate(later).to_dict() == {
        "counters": {"loads": {"a": 8, "only 3": 1, "only 5": 1}},
        "gauges": {"held": {"": 5}},
        "host_gauges": {"up": {"": {"0": 5, "3": 1, "5": 1}}},
        "samples": {"delay": [3.0, 5.0]},
    }


def test_gauges_of_hosts_are_added_up_and_a_store_is_up_only_on_all_hosts(monkeypatch):
    fake_vllm.install(monkeypatch, "0.32")
    num_bytes, is_up = "jaxkv:kv_offload_host_bytes", "jaxkv:kv_offload_storage_up"
    registry = prometheus_client.CollectorRegistry()
    metrics = prom_metrics(Engine().scheduler.connector, registry)
    for report, expected in (
        ({num_bytes: {"": {"0": 3, "1": 4}}, is_up: {"": {"0": 1, "1": 1}}}, (7, 1)),
        # A host reports a gauge only when it changes.
        ({is_up: {"": {"1": 0}}}, (7, 0)),
        ({num_bytes: {"": {"1": 6}}, is_up: {"": {"1": 1}}}, (9, 1)),
    ):
        metrics.observe({"host_gauges": report})
        values = (
            registry.get_sample_value(name, {"engine": "0"})
            for name in (num_bytes, is_up)
        )
        assert tuple(values) == expected


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
