"""Several hosts of one engine, without vLLM: what each reports, and what it moves."""

import dataclasses
import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxkv import ConnectorOutput, OffloadWorker, TransferEngine
from jaxkv.integrations.vllm.config import ConnectorConfig
from jaxkv.integrations.vllm.hosts import num_hosts
from jaxkv.integrations.vllm.worker import WorkerReport
from jaxkv.scheduling.protocol import NO_MOVES, TierReport
from jaxkv.scheduling.worker.worker import PlanMismatchError
from tests.rigs.fake_vllm import make_configs
from tests.transfer.test_processes import run


def report(**fields):
    return WorkerReport(**{"output": ConnectorOutput()} | fields)


# For each field: of the first host, of another one, and of both.
JOINED = [
    (
        "output",
        ConnectorOutput(("a",), ("b",), (1,), (2,), (TierReport(((0, (True,)),)),)),
        ConnectorOutput(("a", "b"), (), (), (1, 2), (TierReport(((0, (False,)),)),)),
        ConnectorOutput(
            *(("a", "a", "b"), ("b",), (1,), (2, 1, 2)),
            (TierReport(((0, (True,)),)), TierReport(((0, (False,)),))),
        ),
    ),
    # All hosts lose their pools by the same calls, one perhaps a step earlier.
    ("num_lost_pools", 1, 2, 2),
    ("num_lost_pools", 2, 1, 2),
    ("adapters", None, None, None),
    ("adapters", {1: b"a"}, None, {1: b"a"}),
    ("adapters", None, {1: b"b"}, {1: b"b"}),
    # Copies on two hosts have other times; b"" is of unknown weights.
    ("adapters", {1: b"a", 2: b"c"}, {1: b"b", 2: b""}, {1: b"a", 2: b""}),
    ("adapters", {1: b""}, {1: b"b"}, {1: b""}),
    # Only the first host lists, but not each step has a report of it.
    ("is_listed", True, False, True),
    ("is_listed", False, False, False),
    ("load_bytes_per_s", 3.0, 2.0, 2.0),
    ("storage_bytes_per_s", 0.0, 2.0, 0.0),
]


@pytest.mark.parametrize(("field", "first", "second", "both"), JOINED)
def test_reports_of_two_hosts_are_joined(field, first, second, both):
    joined = report(**{field: first}).aggregate(report(**{field: second}))
    assert joined == report(**{field: both})


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"eviction_policy": "arc"}, "cache_policy"),
        ({"num_cpu_blocks": 8}, "num_host_blocks"),
        ({"store_threshold": 2}, "store_threshold"),
        ({"compression": "int8"}, "compression"),
        ({"staging_bytes": "1GiB"}, "staging_bytes"),
        ({"storage": "file:///another"}, "storage url"),
        ({"storage_namespace": "other weights"}, "namespace"),
        ({"storage_secret": "another secret, as long"}, "secret's digest"),
    ],
)
def test_a_host_whose_worker_has_other_settings_is_refused(monkeypatch, extra, name):
    """Such as by another environment; a secret is in no message."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    common = {
        "num_cpu_blocks": 16,
        "storage": "file:///store",
        "storage_bytes": 1 << 20,
        "storage_namespace": "weights",
        "storage_secret": "a secret of some length",
    }
    ours, theirs = (
        ConnectorConfig.of(*make_configs(extra=common | more)).settings
        for more in ({}, extra)
    )
    assert {key for key in ours if ours[key] != theirs[key]} == {name}
    pool = jnp.zeros((4, 4))
    worker = OffloadWorker(TransferEngine(pool, int(ours["num_host_blocks"])))
    worker.settings |= ours
    meta = dataclasses.replace(NO_MOVES, settings=theirs)
    text = f"{name} is {ours[name]} in this worker, and {theirs[name]} in its scheduler"
    with pytest.raises(PlanMismatchError, match=re.escape(text)):
        worker.start(meta, pool)
    assert "secret of" not in str(ours) + str(theirs)


def placed(*bundles):
    return {"placement_group": SimpleNamespace(bundle_specs=bundles)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, 1),
        ({"distributed_executor_backend": "uni"}, 1),
        (placed({"TPU": 4.0, "node:10.0.0.1": 0.001}), 1),
        (placed({"TPU": 4.0}, {"TPU": 4.0}), 2),
        # Ray Serve's group may have a bundle for the driver alone.
        (placed({"CPU": 1}, {"TPU": 4.0}, {"TPU": 4.0}), 2),
    ],
)
def test_hosts_are_the_bundles_with_chips(config, expected):
    assert num_hosts(SimpleNamespace(**config)) == expected


def test_a_load_is_over_when_all_hosts_have_reported_it():
    group = SimpleNamespace(bundle_specs=[{"TPU": 4.0}] * 3)
    configs = make_configs(parallel_config__placement_group=group)
    assert ConnectorConfig.of(*configs).make_rules().world_size == 3


def test_each_host_moves_its_shards_and_waits_for_no_other(tmp_path):
    for text in run(tmp_path, 2, "tests.integrations.host_cases", tmp_path):
        assert "as it should be" in text
