"""Metrics as Prometheus gets them: scraped over HTTP."""

import http.client
import types
import weakref
from contextlib import closing

import jax.numpy as jnp
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxkv import OffloadRules, OffloadScheduler, OffloadWorker, TransferEngine
from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.scheduling.record.record import RecordStats
from jaxkv.scheduling.worker.storage_worker import open_storage
from jaxkv.tiers.device import DeviceBlockPool


def get(port, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with closing(connection):
        connection.request("GET", "/metrics", headers=headers or {})
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read().decode()


def scrape(port):
    """Every sample of a server, see `samples_of`."""
    return samples_of(get(port))


def samples_of(page):
    """Every sample by its name, or by its name and labels other than the engine's."""
    samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("engine") == "0"
            key = (sample.name, *labels.values()) if labels else sample.name
            assert key not in samples
            samples[key] = sample.value
    return samples


def read(scheduler=None, worker=None, pool=None):
    """Read metrics that are made only for this call; a server takes half a second."""
    registry = CollectorRegistry()
    with closing(OffloadMetrics(scheduler, worker, pool, registry)):
        return samples_of(generate_latest(registry).decode())


def make_all():
    rules = OffloadRules(
        store_threshold=2,
        max_blocks_in_flight=4,
        pause_unused_stores=True,
        skip_slow_loads=True,
        block_bytes=1,
        shadow="lru*2;off",
    )
    engine = TransferEngine({"kv": jnp.zeros((4, 2))}, 3)
    storage = open_storage(engine, "memory://metrics")
    worker = OffloadWorker(engine, storage=storage)
    weakref.finalize(worker, storage.close, 0)  # Its threads would outlive the test.
    scheduler = OffloadScheduler(4, 8, rules=rules, num_storage_blocks=4)
    scheduler.recorder = types.SimpleNamespace(stats=RecordStats(7, 2))
    return scheduler, worker, DeviceBlockPool(4)
