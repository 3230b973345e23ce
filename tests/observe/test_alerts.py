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
LABELS = '{engine="0"}'


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
def test_a_store_that_is_down_and_one_that_drops_writes_alert(tmp_path):
    kv = "jaxkv:kv_offload_storage"
    values = {
        f"{kv}_up{LABELS}": "1x4 0x60",
        f"{kv}_blocks_written_total{LABELS}": "0+60x64",
        f'{kv}_blocks_dropped_total{{engine="0",reason="slow"}}': "0+600x64",
        f'{kv}_read_seconds_bucket{{engine="0",le="5.0"}}': "0+9x64",
        f'{kv}_read_seconds_bucket{{engine="0",le="+Inf"}}': "0+9x64",
    }
    firing = {
        "4m": (),
        "20m": ("JaxkvStoreDown", "JaxkvStoreDropsWrites", "JaxkvStoreSlow"),
        "40m": ("JaxkvStoreDown", "JaxkvStoreDropsWrites", "JaxkvStoreSlow"),
    }
    labels = 'alertstate="firing",engine="0",severity="warning"'
    case = {
        "interval": "1m",
        "input_series": [{"series": n, "values": v} for n, v in values.items()],
        "promql_expr_test": [
            {
                "expr": 'ALERTS{alertstate="firing"}',
                "eval_time": time,
                "exp_samples": [
                    {"labels": f'ALERTS{{alertname="{name}",{labels}}}', "value": 1}
                    for name in names
                ],
            }
            for time, names in firing.items()
        ],
    }
    file = tmp_path / "test.json"  # Which is YAML, too.
    rules = {"rule_files": [str(RULES)], "evaluation_interval": "1m"}
    file.write_text(json.dumps(rules | {"tests": [case]}))
    for words in (("check", "rules", RULES), ("test", "rules", file)):
        command = ["promtool", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout
