"""Metric names match vLLM, the docs and the dashboard."""

import json
import re
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from jaxkv.observe.families import ALL
from jaxkv.observe.metrics import OffloadMetrics
from tests.rigs.scraping import get, make_all

ROOT = Path(__file__).resolve().parent.parent.parent
BOARD = json.loads((ROOT / "examples" / "grafana.json").read_text(encoding="utf-8"))
SIZES = "1e6 5e6 10e6 20e6 40e6 60e6 80e6 100e6 150e6 200e6"
LOOKUPS = "1e-5 5e-5 1e-4 5e-4 1e-3 5e-3 0.01 0.05 0.1 0.5 1"
DELAYS = "1e-4 5e-4 1e-3 5e-3 0.01 0.05 0.1 0.5 1 5 10"
# From vLLM 0.27: names, kinds, and bounds of buckets.
OF_VLLM = {
    name: (kind, bounds)
    for kind, bounds, names in (
        ("counter", "", "store_bytes load_bytes store_time load_time"),
        ("counter", "", "allocation_failure stores_skipped"),
        ("histogram", SIZES, "store_size load_size"),
        ("histogram", LOOKUPS, "lookup_sync_delay_seconds"),
        ("histogram", DELAYS, "lookup_async_delay_seconds"),
        ("gauge", "", "cpu_cache_usage_perc cpu_cache_write_usage_perc"),
        ("gauge", "", "cpu_cache_read_usage_perc"),
        ("gauge", "", "config_info"),  # Of a later version.
    )
    for name in (f"vllm:kv_offload_{word}" for word in names.split())
}
for word in ("external_prefix_cache", "prefix_cache"):
    OF_VLLM[f"vllm:{word}_queries"] = OF_VLLM[f"vllm:{word}_hits"] = ("counter", "")
OF_VLLM["vllm:kv_cache_usage_perc"] = ("gauge", "")


@pytest.fixture(scope="module")
def all_families():
    metrics = OffloadMetrics(*make_all(), CollectorRegistry())
    with closing(metrics):
        text = get(metrics.serve(0))
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_names_kinds_and_buckets_are_those_of_vllm(all_families):
    assert {name for name in all_families if name.startswith("vllm:")} == set(OF_VLLM)
    for name, (kind, bounds) in OF_VLLM.items():
        family = all_families[name]
        assert family.type == kind
        les = [s.labels["le"] for s in family.samples if s.name.endswith("_bucket")]
        assert [float(le) for le in les[:-1]] == [float(b) for b in bounds.split()]


def test_the_docs_list_every_metric_with_its_kind_and_labels(all_families):
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| `([a-z]+:\w+)` (?:\((.*)\) )?\| (\w+), ([^|]+) \| ", re.M)
    listed = {name: rest for name, *rest in row.findall(text)}
    assert listed.keys() == {family.name for family in ALL} == all_families.keys()
    for name, (words, kind, unit) in listed.items():
        assert kind == all_families[name].type
        labels = {key for s in all_families[name].samples for key in s.labels}
        assert labels - {"engine", "le"} == set(re.findall(r"\w+", words))
        assert not name.endswith("_seconds") or unit == "seconds"
        assert all_families[name].documentation


PROMQL_WORDS = {"sum", "max", "min", "by", "rate", "histogram_quantile", "label_values"}


def selected(query):
    """The metrics of a PromQL query, with the labels that it uses of each."""
    grouped = re.findall(r"\bby \(([\w, ]+)\)", query)
    query = re.sub(r"\bby \([\w, ]+\)|\[[^]]*\]", " ", query)
    metrics = []
    for name, matchers in re.findall(r"([a-zA-Z_:][\w:]*)(\{[^}]*\})?", query):
        if name not in PROMQL_WORDS:
            labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
            metrics.append((name, labels))
    return metrics, {label.strip() for names in grouped for label in names.split(",")}


def test_every_dashboard_query_names_existing_metrics_and_labels(all_families):
    samples = {}
    for family in all_families.values():
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    targets = {"job", "instance"}  # Prometheus' own labels of a server.
    for variable in BOARD["templating"]["list"][1:]:
        pattern = r"label_values\(([\w:]+)(\{.*\})?, (\w+)\)"
        name, _, label = re.fullmatch(pattern, variable["query"]).groups()
        assert label == variable["name"]
        assert label in samples[name] | targets
    queries = [t["expr"] for p in BOARD["panels"] for t in p.get("targets", ())]
    assert len(queries) > 20
    for query in queries:
        metrics, grouped = selected(query)
        assert metrics
        for name, labels in metrics:
            assert labels == {"job", "instance", "engine"}, query
            assert labels | grouped <= samples[name] | targets, query
    legends = [t["legendFormat"] for p in BOARD["panels"] for t in p.get("targets", ())]
    for query, legend in zip(queries, legends, strict=True):
        assert set(re.findall(r"{{(\w+)}}", legend)) <= selected(query)[1]


def test_the_dashboard_is_well_formed(all_families):
    assert BOARD["title"]
    assert BOARD["uid"]
    assert BOARD["schemaVersion"] >= 36
    source, *variables = BOARD["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    assert [v["name"] for v in variables] == ["job", "instance", "engine"]
    assert {v["type"] for v in variables} == {"query"}
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = Counter()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            cells.update((x, y) for y in range(at["y"], at["y"] + at["h"]))
        if panel["type"] == "row":
            continue
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert set(cells.values()) == {1}, "panels overlap"


def test_the_docs_name_rows_and_panels_of_the_dashboard():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (.*\?) \| (.*?) \| .* \|$", text, re.M)
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert [row for row, _ in listed] == rows
    panels = {panel["title"] for panel in BOARD["panels"]}
    for _, named in listed:
        assert set(named.split("; ")) <= panels
