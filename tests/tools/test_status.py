"""`jaxkv status` over real HTTP, and on a terminal."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.tools import main as cli
from jaxkv.tools.status import scrape
from jaxkv.tools.status.figures import Tokens, measure
from jaxkv.tools.status.scrape import parse
from jaxkv.tools.status.screen import status_lines
from tests.rigs.command_line import LAUNCHER, ROOT
from tests.rigs.offload_rig import BLOCK_SIZE, NUM_BLOCKS, Rig
from tests.rigs.scraping import make_all
from tests.rigs.servers import http_server
from tests.rigs.waiting import wait_for

WAIT_S = 60


def text_of(*sources, engine="0"):
    registry = CollectorRegistry()
    metrics = OffloadMetrics(*sources, registry=registry, labels={"engine": engine})
    with contextlib.closing(metrics):
        return generate_latest(registry).decode()


@contextlib.contextmanager
def listening(respond=None):
    """Listen without HTTP: accept nothing, or send bytes and close."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = None
        if respond is not None:

            def serve():
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(respond)

            thread = threading.Thread(target=serve)
            thread.start()
        yield server.getsockname()[1]
        if thread is not None:
            thread.join()


def test_rates_and_shares_are_those_of_the_interval():
    rig = Rig(max_blocks_in_flight=8)
    rig.store(1, 2)
    before = parse(text_of(rig.scheduler), 10.0)
    rig.run(rig.request("one", 1, 2))  # From the host.
    rig.run(rig.request("two", 1, 2, 3))  # From the device.
    after = parse(text_of(rig.scheduler), 14.0)
    status = measure(before, after)
    num = (2 + 3) * BLOCK_SIZE + 2
    host, device = 2 * BLOCK_SIZE, 2 * BLOCK_SIZE
    rest = 1 - (host + device) / num
    assert status.tokens == Tokens(num, device / num, host / num, pytest.approx(rest))
    assert status.tokens_since_start.num == num + 2 * BLOCK_SIZE + 1
    assert status.interval_s == 4
    assert status.loads.blocks_per_s == 2 / 4
    assert status.stores.blocks_per_s == 1 / 4
    assert (status.host_blocks_held, status.host_blocks) == (3, NUM_BLOCKS)
    assert status.load_waits.num == 1
    assert status.lookups.num >= 2
    assert status.failures["loads"].since_start == 0
    assert status.stores.bytes_per_s is None  # The worker's, which is not here.
    assert not status.has_restarted
    idle = measure(after, after._replace(time_s=20.0))
    assert idle.tokens == Tokens(0.0, None, None, None)
    assert idle.lookups.mean_s is None
    # A counter falls only with a new process, whose counts began at 0.
    restarted = measure(after, before._replace(time_s=16.0))
    assert restarted.has_restarted
    assert restarted.tokens.num == 2 * BLOCK_SIZE + 1


def test_engines_of_one_page_are_added_up_and_failures_stand_out():
    rig = Rig()
    rig.store(1)
    rig.load(rig.request("one", 1), ok=False)
    texts = [text_of(*make_all(), engine="0"), text_of(rig.scheduler, engine="1")]
    page = parse("".join(texts), 2.0)
    status = measure(page._replace(time_s=0.0, samples={}), page)
    assert status.engines == ("0", "1")
    assert status.host_blocks == 8 + NUM_BLOCKS
    assert status.failures["loads"].new == 1
    lines = status_lines(status)
    assert lines[-1].text.endswith("loads 1 (+1)")
    assert lines[-1].style == "red"
    assert any(re.match("store +up, 0.0% full", line.text) for line in lines)


def test_metrics_without_a_value_or_a_source_are_shown_as_unknown():
    text = "jaxkv:kv_offload_host_blocks 8\nvllm:prefix_cache_queries_total "
    page = parse(f"{text}NaN\njaxkv:kv_offload_host_bytes +Inf\n", 2.0)
    status = measure(page._replace(time_s=0.0), page)
    assert (status.host_blocks, status.host_bytes) == (8, None)
    assert status.tokens_since_start == Tokens(0.0, None, None, None)
    assert status_lines(status)[-1].text.split() == ["failures", "-"]


@pytest.mark.parametrize("value", [0.0, 5_678.9])
def test_figures_of_any_size_fit_a_terminal(value):
    page = parse(text_of(*make_all()), 1.0)
    large = {
        name: [(labels, value) for labels, _ in samples]
        for name, samples in page.samples.items()
    }
    lines = status_lines(
        measure(page._replace(time_s=0.0), page._replace(samples=large))
    )
    assert max(len(line.text) for line in lines) <= 80
    assert len(lines) <= 21  # Below a head of three lines, on a terminal of 24.


def test_one_interval_is_printed_where_there_is_no_terminal(run_line):
    text = text_of(*make_all())
    with http_server(lambda: (200, text)) as port:
        out, err, _ = run_line(f"status {port} --every 0.1", has_figures=False)
        as_json, *_ = run_line(
            f"status {port} --every 0.1 --format json", has_figures=False
        )
    assert err == ""
    assert "\x1b" not in out
    assert f"http://127.0.0.1:{port}/metrics" in out
    assert "tokens of new requests" in out
    figures = json.loads(as_json)
    assert figures["engines"] == ["0"]
    assert figures["host_blocks"] == 8
    assert figures["store"]["is_up"] is True


def test_what_does_not_answer_as_an_engine_is_named_in_a_line(capsys, monkeypatch):
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.2)
    with contextlib.ExitStack() as stack:
        cases = (
            (listening(), "accepts connections but has not answered for 0.2 s"),
            (listening(b""), "closed the connection: the engine has ended or was kill"),
            (listening(b"+PONG\r\n"), "does not answer in HTTP: it is not a jaxkv"),
            (
                http_server(lambda: (404, "")),
                "/metrics answers 404 Not Found: give the URL",
            ),
            (
                http_server(lambda: (200, "<html>")),
                "is not a jaxkv engine: of the 0 metric",
            ),
            (
                http_server(lambda: (200, "up 1\n")),
                "is not a jaxkv engine: of the 1 metric",
            ),
        )
        places = [(stack.enter_context(server), text) for server, text in cases]
        with socket.create_server(("127.0.0.1", 0)) as closed:
            places.append((closed.getsockname()[1], "nothing listens at 127.0.0.1:"))
        for port, message in places:
            assert cli.main(["status", str(port)]) == 1
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith("jaxkv status: error: "), err
            assert message in err
            assert err.count("\n") == 1


class Terminal:
    """A command on a terminal of 24 lines, and what it writes."""

    def __init__(self, *words):
        master, slave = pty.openpty()
        environ = {**os.environ, "LINES": "24", "COLUMNS": "80"}
        environ |= {"PYTHONIOENCODING": "utf-8", "TERM": "xterm"}
        self.child = subprocess.Popen(
            [*LAUNCHER, *words],
            cwd=ROOT,
            env=environ,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""
        self._thread = threading.Thread(target=self._read, args=(master,))
        self._thread.start()

    def _read(self, master):
        with open(master, "rb", buffering=0) as file, contextlib.suppress(OSError):
            while data := file.read(1 << 16):
                self.text += data.decode("utf-8", "replace")

    @property
    def frames(self):
        return self.text.split("\x1b[H")[1:]

    def wait_for(self, text):
        """Wait until a new frame has a text."""
        num = len(self.frames)
        wait_for(lambda: any(text in frame for frame in self.frames[num:]))

    def end(self):
        self.child.send_signal(signal.SIGINT)
        code = self.child.wait(WAIT_S)
        self._thread.join(WAIT_S)
        return code


def test_a_terminal_is_redrawn_in_place_while_the_engine_runs_and_after_its_end():
    scheduler, worker, pool = make_all()
    fresh = text_of(scheduler, worker, pool)
    used = re.sub(r"(hits_total\S+|blocks_offered_total\S+) 0\.0", r"\1 8.0", fresh)
    page = {"text": used}
    with http_server(lambda: (200, page["text"])) as port:
        terminal = Terminal("status", str(port), "--every", "0.1")
        terminal.wait_for("tokens of new requests")
    terminal.wait_for("no answer for")
    assert f"nothing listens at 127.0.0.1:{port}" in terminal.frames[-1]
    assert "tokens of new requests" in terminal.frames[-2], "the last figures stay"
    page["text"] = fresh
    with http_server(lambda: (200, page["text"]), port):
        terminal.wait_for("since restart")
        terminal.wait_for(" last ")
    assert terminal.end() == 130
    assert terminal.text.startswith("\x1b[?1049h")
    last = terminal.text.rpartition("\x1b[?1049l")[2]
    assert "tokens of new requests" in last
    for frame in terminal.frames[:-1]:
        assert frame.count("\n") < 24
        assert "\x1b[2J" not in frame, "it would flicker"
