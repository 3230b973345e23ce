"""A real Prometheus scrapes engines that run, and answers the dashboard's queries."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 240
DEMO = "import sys; from jaxkv.tools.main import main; sys.exit(main())"

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus on the path (Debian's package: apt-get install "
        "prometheus)",
    ),
]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


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
        while not (found := re.search(r"http://127.0.0.1:(\d+)/", log.read_text())):
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield child, log, int(found[1])


@contextlib.contextmanager
def prometheus(target, tmp_path):
    """Run a Prometheus that scrapes a port; give a function that asks it."""
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

    def ask(query):
        words = urllib.parse.urlencode({"query": query})
        url = f"http://127.0.0.1:{port}/api/v1/query?{words}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            told = json.load(answer)
        assert told["status"] == "success"
        return [float(series["value"][1]) for series in told["data"]["result"]]

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


def dashboard_queries():
    """The queries, as Grafana asks them with all engines chosen."""
    text = (ROOT / "examples" / "grafana.json").read_text(encoding="utf-8")
    for panel in json.loads(text)["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "20s")
            yield query.replace("$engine", ".*")


def wait_for_values(ask, queries):
    """Ask until each query has had a finite value."""
    deadline = time.monotonic() + WAIT_S
    missing, values = list(queries), {}
    while missing:
        assert time.monotonic() < deadline, f"no value of {missing}"
        time.sleep(2)
        for query in missing:
            answer = ask(query)
            if answer and all(map(math.isfinite, answer)):
                values[query] = answer
        missing = [query for query in missing if query not in values]
    return values


def test_the_example_that_keeps_running_gives_every_query_a_value(tmp_path):
    words = [str(ROOT / "examples" / "serve_metrics.py"), "0"]
    with source(words, tmp_path) as (child, log, port):
        queries = list(dashboard_queries())
        assert len(queries) > 20
        with prometheus(port, tmp_path) as ask:
            values = wait_for_values(ask, queries)
            assert values[queries[0]][0] > 0, "the host hit rate"
            assert child.poll() is None, "it runs until it is interrupted"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        assert log.read_text().splitlines()[-1].startswith("KV offload: stored ")


def test_the_demo_serves_metrics_until_its_seconds_are_over(tmp_path):
    words = ["-c", DEMO, "demo", "--serve-metrics", "0", "--seconds", "60"]
    words += ["--conversations", "6", "--turns", "2", "--document-tokens", "600"]
    words += ["--device-blocks", "60"]
    began_s = time.monotonic()
    with source(words, tmp_path) as (child, log, port):
        with prometheus(port, tmp_path) as ask:
            hits = "vllm:external_prefix_cache_hits_total"
            (first,) = wait_for_values(ask, [f"{hits} > 0"]).values()
            wait_for_values(ask, [f"{hits} > {first[0]}"])
        assert child.wait(WAIT_S) == 0, log.read_text()
        assert "generated tokens are identical" in log.read_text()
    assert time.monotonic() - began_s > 60
