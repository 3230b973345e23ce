"""A real Prometheus, and the dashboard's panels with their queries."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from tests.rigs.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240
EXAMPLES = ROOT / "examples"


@contextlib.contextmanager
def running(command, log, **options):
    """Run a process until the end of the block; what it says is in a file."""
    with log.open("w") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, **options
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait()


@contextlib.contextmanager
def source(words, tmp_path):
    """Run what serves metrics; give its process, log and port once it serves."""
    log = tmp_path / "source.log"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with running([sys.executable, *words], log, cwd=tmp_path, env=environ) as child:
        deadline = time.monotonic() + WAIT_S
        while not (match := re.search(r"http://127.0.0.1:(\d+)/", log.read_text())):
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield child, log, int(match[1])


@contextlib.contextmanager
def prometheus(target, tmp_path):
    """Run a Prometheus that scrapes a port; give a function that asks it.

    The function gives the values of a query; with start, end and step, its series.
    """
    port = free_port()
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {
                "job_name": "jaxkv",
                "static_configs": [{"targets": [f"127.0.0.1:{target}"]}],
            }
        ],
    }
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps(config))  # Which is YAML, too.
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]

    def ask(query, **span):
        words = urllib.parse.urlencode({"query": query} | span)
        path = "query_range" if span else "query"
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{words}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            reply = json.load(answer)
        assert reply["status"] == "success"
        result = reply["data"]["result"]
        return result if span else [float(series["value"][1]) for series in result]

    log = tmp_path / "prometheus.log"
    with running(command, log, cwd=tmp_path) as child:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if ask("up") == [1.0]:
                    break
            time.sleep(0.5)
        yield ask


def dashboard_panels():
    """The panels, with the queries that Grafana asks with all servers chosen."""
    text = (EXAMPLES / "grafana.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    for panel in panels:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "20s")
            target["expr"] = re.sub(r"\$(job|instance|engine)\b", ".*", query)
    return panels
