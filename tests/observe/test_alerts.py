"""The alert rules are right, by Prometheus' own tool, and name what there is."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jaxkv.observe.families import ALL

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "examples" / "alerts.yml"
KV, VLLM = "jaxkv:kv_offload", "vllm:kv_offload"
STORE, PREFIX = f"{KV}_storage", "vllm:external_prefix_cache"
# By alert: its severity, then by metric and further labels the values of a server in
# trouble and of a healthy one.
CASES = {
    "JaxkvStoreDown": ("warning", {f"{STORE}_up": ("0x240", "1x240")}),
    "JaxkvStoreErrors": (
        "warning",
        {f'{STORE}_errors_total,operation="read",reason="late"': ("0+60x240", "0x240")},
    ),
    "JaxkvStoreDropsWrites": (
        "warning",
        {
            f'{STORE}_blocks_dropped_total,reason="slow"': ("0+3000x240", "0x240"),
            f"{STORE}_blocks_written_total": ("0x240", "0+6000x240"),
        },
    ),
    "JaxkvStoreSlow": (
        "warning",
        {
            f'{STORE}_read_seconds_bucket,le="1.0"': ("0x240", "0+9000x240"),
            f'{STORE}_read_seconds_bucket,le="5.0"': ("0+9x240", "0+9000x240"),
            f'{STORE}_read_seconds_bucket,le="+Inf"': ("0+9x240", "0+9000x240"),
        },
    ),
    "JaxkvLoadsFail": (
        "critical",
        {f"{KV}_load_failures_total": ("0+1x240", "0x240")},
    ),
    "JaxkvNothingComesBack": (
        "info",
        {
            f"{PREFIX}_hits_total": ("0x240", "0+600x240"),
            f"{PREFIX}_queries_total": ("0+1000x240", "0+1000x240"),
            f"{VLLM}_store_bytes_total": ("0+1000x240", "0+1000x240"),
        },
    ),
    "JaxkvHostHeldByTransfers": (
        "warning",
        {f"{VLLM}_cpu_cache_usage_perc": ("0.99x240", "0.5x240")},
    ),
}


def test_each_rule_names_metrics_that_exist_and_a_page_that_exists():
    text = RULES.read_text(encoding="utf-8")
    suffix = re.compile("_(total|bucket|sum|count)$")
    names_of_metrics = {family.name for family in ALL}
    names = re.findall(r"\b(?:vllm|jaxkv):\w+", text)
    assert {suffix.sub("", name) for name in names} <= names_of_metrics
    assert "jaxkv:kv_offload_storage_up" in names
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^## (.*)", page, re.M)
    }
    runbooks = re.findall(r"runbook: docs/troubleshooting.md#(\S+)", text)
    assert len(runbooks) == text.count("- alert: ")
    assert set(runbooks) <= anchors


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="there is no promtool (Debian's package: apt-get install prometheus)",
)
def test_in_a_fleet_each_alert_names_the_server_in_trouble_and_no_other(tmp_path):
    """Every server calls its engine "0"; they differ in the job or the instance."""
    servers = [("kv", "a"), ("kv", "b"), ("canary", "a")]
    tests = []
    for name, (severity, metrics) in CASES.items():
        series = []
        for number, (job, instance) in enumerate(servers):
            labels = f'job="{job}",instance="{instance}",engine="0"'
            for metric, values in metrics.items():
                metric, _, further = metric.partition(",")
                text = f"{metric}{{{','.join(filter(None, (labels, further)))}}}"
                series.append({"series": text, "values": values[number != 1]})
        further = ',operation="read",reason="late"' * (name == "JaxkvStoreErrors")
        firing = (
            f'ALERTS{{alertname="{name}",alertstate="firing",severity="{severity}",'
            f'job="kv",instance="b",engine="0"{further}}}'
        )
        checks = [
            {
                "expr": 'ALERTS{alertstate="firing"}',
                "eval_time": time,
                "exp_samples": [{"labels": text, "value": 1} for text in texts],
            }
            for time, texts in (("1m", []), ("200m", [firing]))
        ]
        case = {"name": name, "interval": "1m", "input_series": series}
        tests.append(case | {"promql_expr_test": checks})
    assert set(CASES) == set(re.findall(r"- alert: (\w+)", RULES.read_text("utf-8")))
    file = tmp_path / "test.json"  # Which is YAML, too.
    rules = {"rule_files": [str(RULES)], "evaluation_interval": "1m"}
    file.write_text(json.dumps(rules | {"tests": tests}))
    for words in (("check", "rules", RULES), ("test", "rules", file)):
        command = ["promtool", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
