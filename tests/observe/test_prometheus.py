"""A real Prometheus scrapes engines that run, and answers the dashboard's queries."""

import math
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.observe.dashboard import (
    EXAMPLES,
    WAIT_S,
    dashboard_panels,
    prometheus,
    source,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="no prometheus on the path (Debian's package: apt-get install "
        "prometheus)",
    ),
]


def wait_for_values(ask, queries):
    """Query until every query has had a finite value."""
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


def test_the_example_explains_its_port_before_it_runs():
    command = [sys.executable, EXAMPLES / "serve_metrics.py"]
    done = subprocess.run([*command, "--help"], capture_output=True, check=True)
    assert b"port of the metrics" in done.stdout
    done = subprocess.run([*command, "many"], capture_output=True, check=False)
    assert done.returncode == 2
    assert b"invalid int value: 'many'" in done.stderr


def test_the_example_that_keeps_running_gives_every_query_a_value(tmp_path):
    words = [str(EXAMPLES / "serve_metrics.py"), "0"]
    with source(words, tmp_path) as (child, log, port):
        panels = dashboard_panels()
        queries = [
            target["expr"] for panel in panels for target in panel.get("targets", ())
        ]
        assert len(queries) > 20
        with prometheus(port, tmp_path) as ask:
            # The last one is the host hit rate, which the first requests leave at 0.
            wait_for_values(ask, [*queries, f"({queries[0]}) > 0"])
            assert child.poll() is None, "it runs until it is interrupted"
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
        lines = log.read_text().splitlines()
        assert lines[1:3] == ["compiling ...", "serving prompts"]
        assert lines[-1].startswith("KV offload: stored ")
