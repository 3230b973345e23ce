"""Metrics beside others in a registry, and the HTTP server."""

import math
import re
import socket
import threading
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from jaxkv import OffloadConfig, OffloadScheduler
from jaxkv.observe.metrics import OffloadMetrics
from tests.rigs.scraping import get, make_all, read

# What Prometheus 2 and 3 accept.
ACCEPTED = (
    "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2",
)


def test_engines_share_a_registry_by_their_labels():
    registry = CollectorRegistry()
    first = OffloadMetrics(OffloadScheduler(4, 8), registry=registry)
    with pytest.raises(ValueError, match=r"must differ .* \{\"engine\": \"1\"\}"):
        OffloadMetrics(OffloadScheduler(4, 9), registry=registry)
    labels = {"model_name": "small", "engine": "1"}
    second = OffloadMetrics(OffloadScheduler(4, 9), registry=registry, labels=labels)
    name = "jaxkv:kv_offload_host_blocks"
    port = second.serve(0)
    for accept in ACCEPTED:  # Colons stay colons in any format.
        text = get(port, {"Accept": accept})
        assert text.count(f"# TYPE {name} gauge") == 1
        assert f'\n{name}{{engine="0"}} 8.0\n' in text
    assert registry.get_sample_value(name, {"engine": "0"}) == 8
    assert registry.get_sample_value(name, labels) == 9
    first.close()
    first.close()
    assert registry.get_sample_value(name, {"engine": "0"}) is None
    assert registry.get_sample_value(name, labels) == 9
    second.close()
    assert not list(registry.collect())
    OffloadMetrics(OffloadScheduler(4, 8), registry=registry).close()


def test_a_registry_with_taken_names_is_refused():
    registry = CollectorRegistry()
    gauge = Gauge("vllm:kv_cache_usage_perc", "Somebody's.", registry=registry)
    with pytest.raises(ValueError, match="give another registry"):
        OffloadMetrics(OffloadScheduler(4, 8), registry=registry)
    assert [family.documentation for family in registry.collect()] == ["Somebody's."]
    registry.unregister(gauge)
    OffloadMetrics(OffloadScheduler(4, 8), registry=registry).close()


def test_labels_that_would_fail_every_scrape_are_refused():
    registry = CollectorRegistry()
    foreign = Gauge("foreign", "Somebody's.", registry=registry)
    names = ("le", "reason", "direction", "a-b", "__a", "1", "", 5)
    refused = [({name: "0"}, re.escape(f"label {name!r} must be")) for name in names]
    for value in (0, None, b"0", "\ud800"):
        message = r"label engine=.* must be a text .* \"0\""
        refused.append(({"engine": value}, message))
    for labels, message in refused:
        with pytest.raises(ValueError, match=message):
            OffloadMetrics(OffloadScheduler(4, 8), registry=registry, labels=labels)
    foreign.set(7)
    assert b"foreign 7.0" in generate_latest(registry)
    with pytest.raises(ValueError, match="nothing to measure"):
        OffloadMetrics(registry=CollectorRegistry())


def test_metrics_in_files_of_several_processes_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/somewhere")
    scheduler = OffloadScheduler(4, 8)
    with pytest.raises(ValueError, match="PROMETHEUS_MULTIPROC_DIR is set"):
        OffloadMetrics(scheduler)
    with closing(OffloadConfig(metrics_port=0).serve_metrics(scheduler)) as metrics:
        assert metrics is not None
        port = metrics._server.server_port
        assert 'jaxkv:kv_offload_host_blocks{engine="0"} 8.0' in get(port)


def test_nothing_listens_before_serve(monkeypatch):
    listening, listen = [], socket.socket.listen

    def watched(self, *args):
        listening.append(self.getsockname())
        return listen(self, *args)

    monkeypatch.setattr(socket.socket, "listen", watched)
    sources, threads = make_all(), set(threading.enumerate())
    metrics = OffloadMetrics(*sources, CollectorRegistry())
    assert list(metrics.collect())
    assert metrics.format_line()
    assert listening == []
    assert set(threading.enumerate()) <= threads
    port = metrics.serve(0)
    assert listening == [("127.0.0.1", port)]
    with pytest.raises(RuntimeError, match=f"already serving at port {port}"):
        metrics.serve(0)
    metrics.close()
    with pytest.raises(RuntimeError, match="metrics are closed"):
        metrics.serve(0)
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ConnectionRefusedError):
        get(port)


def test_an_unusable_port_is_named_in_the_error():
    metrics = OffloadMetrics(OffloadScheduler(4, 8), registry=CollectorRegistry())
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot serve metrics at 127.0.0.1:{port}"):
            metrics.serve(port)
    with pytest.raises(OSError, match=r"cannot serve metrics at 192.0.2.1:0 \("):
        metrics.serve(0, "192.0.2.1")  # An address reserved for documentation.
    for port in (-1, 65536):
        with pytest.raises(ValueError, match=r"must be in \[0, 65536\)"):
            metrics.serve(port)
    assert get(metrics.serve(0))
    metrics.close()


def test_format_line_has_the_numbers_of_what_is_given():
    scheduler, worker, _ = make_all()
    line = OffloadMetrics(scheduler, registry=CollectorRegistry()).format_line()
    assert line == (
        "KV offload: device hits 0 of 0 tokens, host hits 0 of 0 tokens, "
        "host blocks 0 of 8, evicted 0, dropped 0"
    )
    line = OffloadMetrics(worker=worker, registry=CollectorRegistry()).format_line()
    assert line == "KV offload: stored 0.0 MiB, loaded 0.0 MiB"
    assert not math.isnan(read(worker=worker)["vllm:kv_offload_load_size_sum"])
