"""`jaxkv status` over real HTTP, and on a terminal."""

import contextlib
import gzip
import json
import os
import pty
import random
import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jaxkv.observe.metrics import OffloadMetrics
from jaxkv.tools import main as cli
from jaxkv.tools.status import scrape
from jaxkv.tools.status.figures import measure, status_lines
from jaxkv.tools.status.scrape import parse
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
def listening(respond=None, repeat=b"", num=1):
    """Accept nothing, or send bytes, repeat others while they are read, and close."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = None
        if respond is not None:

            def serve():
                for _ in range(num):
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(4096)
                        connection.sendall(respond)
                        while repeat:
                            connection.sendall(repeat)
                            time.sleep(0.01 if len(repeat) < 100 else 0)

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
    last, now = status["last"], status["now"]
    num = (2 + 3) * BLOCK_SIZE + 2
    assert last["tokens"] == num
    assert last["on_device"] == last["from_host"] == 2 * BLOCK_SIZE / num
    assert last["computed"] == pytest.approx(1 - 4 * BLOCK_SIZE / num)
    assert status["since_start"]["tokens"] == num + 2 * BLOCK_SIZE + 1
    assert status["interval_s"] == 4
    assert (last["blocks_loaded"], last["blocks_stored"]) == (2, 1)
    assert (now["host_blocks_held"], now["host_blocks"]) == (3, NUM_BLOCKS)
    assert last["load_wait"]["num"] == 1
    assert last["lookup"]["num"] >= 2
    assert status["since_start"]["failed_loads"] == 0
    assert last["bytes_stored"] is None  # The worker's, which is not here.
    assert not status["has_restarted"]
    assert any(
        re.fullmatch(r"blocks loaded +0\.5/s +2", line) for line in status_lines(status)
    )
    idle = measure(after, after._replace(time_s=20.0))["last"]
    assert (idle["tokens"], idle["from_host"]) == (0.0, None)
    assert idle["lookup"]["mean_s"] is None
    # A counter falls only with a new process, whose counts began at 0.
    restarted = measure(after, before._replace(time_s=16.0))
    assert restarted["has_restarted"]
    assert restarted["last"]["tokens"] == 2 * BLOCK_SIZE + 1


def test_engines_of_one_page_are_added_up_and_failures_stand_out():
    rig = Rig()
    rig.store(1)
    rig.load(rig.request("one", 1), ok=False)
    texts = [text_of(*make_all(), engine="0"), text_of(rig.scheduler, engine="1")]
    page = parse("".join(texts), 2.0)
    status = measure(page._replace(time_s=0.0, samples={}), page)
    assert status["engines"] == ["0", "1"]
    assert status["now"]["host_blocks"] == 8 + NUM_BLOCKS
    assert status["last"]["failed_loads"] == 1
    lines = list(status_lines(status))
    assert re.fullmatch(r"! failures +failed loads 1 \(\+1\)", lines[-1])
    assert any(re.match("store +up, 0% full", line) for line in lines)


def test_metrics_without_a_value_or_a_source_are_shown_as_unknown():
    text = "jaxkv:kv_offload_host_blocks 8\nvllm:prefix_cache_queries_total "
    page = parse(f"{text}NaN\njaxkv:kv_offload_host_bytes +Inf\n", 2.0)
    status = measure(page._replace(time_s=0.0), page)
    assert status["now"]["host_blocks"] == 8
    assert status["now"]["host_bytes"] is None
    assert status["since_start"]["tokens"] is None
    assert list(status_lines(status))[-1].split() == ["failures", "none"]


@pytest.mark.parametrize("value", [0.0, 5_678.9, 1e18])
def test_figures_of_any_size_fit_a_terminal(value):
    page = parse(text_of(*make_all()), 1.0)
    large = {
        name: dict.fromkeys(samples, value) for name, samples in page.samples.items()
    }
    lines = list(
        status_lines(measure(page._replace(time_s=0.0), page._replace(samples=large)))
    )
    assert max(map(len, lines)) <= 80
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
    assert "since start" in out
    figures = json.loads(as_json)
    assert figures["engines"] == ["0"]
    assert figures["now"]["host_blocks"] == 8
    assert figures["now"]["store_is_up"] is True


def test_one_of_several_engines_that_is_down_is_named_beside_the_figures_of_the_rest(
    run_line,
):
    text = text_of(*make_all())
    with http_server(lambda: (200, text)) as port:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            down = closed.getsockname()[1]
        out, _, figures = run_line(f"status {port} {down} --every 0.1", code=1)
    assert [row.get("engines") for row in figures["rows"]] == [["0"], None]
    assert f"nothing listens at 127.0.0.1:{down}" in out
    assert out.count("jaxkv status  http://") == 2


LINE = "jaxkv:kv_offload_host_blocks 4\n"
DELAY = "jaxkv:kv_offload_load_delay_seconds"
TIMES = f"{DELAY}_count 5\n{DELAY}_sum 1\n{DELAY}_bucket"
PAGES = {
    "value_1e999": LINE + "vllm:prefix_cache_queries_total 1e999\n",
    "sum_of_1e308": "".join(
        f'{LINE}vllm:prefix_cache_queries_total{{engine="{n}"}} 1e308\n' for n in "01"
    ),
    "host_bytes_1e999": LINE + "jaxkv:kv_offload_host_bytes 1e999\n",
    "bucket_without_le": LINE + TIMES + " 5\n",
    "le_of_text": LINE + TIMES + '{le="x"} 5\n',
    "policy_info_without_policy": LINE + "jaxkv:kv_offload_policy_info 1\n",
    "negative_times": LINE + TIMES.replace("sum 1", "sum -1") + '{le="-1"} 5\n',
    "labels_of_300_000_letters": LINE + "x{" + "a" * 300_000 + "} 1\n",
    "labels_that_match_slowly": LINE + "jaxkv:x{" + 'a="}' * 2000 + " 1\n",
    "many_buckets": LINE
    + TIMES
    + " 5\n"
    + "".join(f'{DELAY}_bucket{{le="{n}"}} 5\n' for n in range(30_000)),
    "many_engines": "".join(
        f'jaxkv:kv_offload_host_blocks{{engine="{n}"}} 4\n' for n in range(30_000)
    ),
    "duplicate_families": LINE * 2,
    "escape_sequences": LINE
    + 'jaxkv:kv_offload_policy_info{policy="\x1b]0;owned\x07",engine="\x9b31m"} 1\n',
    "not_utf_8": LINE + 'jaxkv:kv_offload_policy_info{policy="\udcff"} 1\n',
}


@pytest.mark.parametrize("name", PAGES)
def test_a_hostile_page_ends_in_bounded_figures(name, run_line):
    body = PAGES[name].encode("utf-8", "surrogateescape")
    head = b"HTTP/1.0 200 OK\r\n\r\n"
    with listening(head + body, num=2) as port:
        out, err, _ = run_line(f"status {port} --every 0.1", has_figures=False)
    assert err == ""
    assert all(line.isprintable() and len(line) <= 80 for line in out.splitlines())
    assert len(out.splitlines()) <= 24
    assert re.search("host tier|blocks", out)
    page = parse(body.decode("utf-8", "replace"), 1.0)
    json.dumps(measure(page._replace(time_s=0.0), page), allow_nan=False)
    assert measure(page, page._replace(time_s=2.0))["now"]["host_blocks"] in (
        4,
        8,
        120_000,
    )


def test_no_random_page_ends_in_an_error():
    rng = random.Random(3)
    text = text_of(*make_all())
    names = sorted(set(re.findall(r"^[a-z]+:\w+", text, re.MULTILINE)))
    values = ("0", "1", "-1", "1e18", "1e308", "1e-320", "NaN", "+Inf", "0x10", "1_0")
    labels = ("", "{}", '{le="+Inf"}', '{le="0.1"}', '{le="nan",engine="\x1b[2J"}')
    for _ in range(300):
        lines = [
            f"{rng.choice(names)}{rng.choice(labels)} {rng.choice(values)}"
            for _ in range(rng.randrange(1, 60))
        ]
        pages = [
            parse("\n".join(rng.sample(lines, len(lines) // n)), n) for n in (2, 1)
        ]
        status = measure(pages[0], pages[1]._replace(time_s=3.0))
        json.dumps(status, allow_nan=False)
        assert all(len(line) <= 80 for line in status_lines(status))


ANSWER = b"HTTP/1.1 200 OK\r\n"
CHUNKED = ANSWER + b"Transfer-Encoding: chunked\r\n\r\n"
# What a server sends at once, and then for as long as anybody reads.
SERVERS = {
    "gzip_bomb": (
        ANSWER + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1 << 20)),
        b"",
        "answers in 'gzip', not plain text",
    ),
    "redirect_to_a_file": (
        b"HTTP/1.1 302 \x1b[2JFound\r\nLocation: file:///etc/passwd\r\n\r\n",
        b"",
        r"answers 302 '\x1b[2JFound': give the URL",
    ),
    "chunks_without_end": (
        CHUNKED,
        b"10000\r\n" + b"x" * 0xFFFF + b"\n\r\n",
        "answers with over 1 MiB: give the URL of one engine's metrics",
    ),
    "page_cut_by_its_length": (
        ANSWER + b"Content-Length: 1000\r\n\r\n" + LINE.encode(),
        b"",
        "closed the connection before the end of its page",
    ),
    "page_cut_in_a_chunk": (
        CHUNKED + b"100\r\n" + LINE.encode(),
        b"",
        "closed the connection before the end of its page",
    ),
    "page_cut_in_a_line": (
        ANSWER + b"\r\n" + LINE.encode() + b"jaxkv:kv_offload_load",
        b"",
        "answers with a page that ends within a line",
    ),
    "headers_without_end": (ANSWER, b"X: y\r\n" * 200, "cannot be read (HTTPExcept"),
    "status_lines_without_end": (b"", b"HTTP/1.1 100 \r\n\r\n", "not answered for 0.5"),
    "drip": (ANSWER + b"\r\n" + LINE.encode(), b"\n", "not answered for 0.5 s"),
    "drip_of_a_header": (ANSWER + b"X: ", b"y", "has not answered for 0.5 s"),
}


@pytest.mark.parametrize("name", SERVERS)
def test_a_hostile_server_ends_in_one_line(name, run_line, monkeypatch):
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(scrape, "MAX_BYTES", 1 << 20)
    start, rest, message = SERVERS[name]
    with listening(start, rest) as port:
        out, err, _ = run_line(f"status {port}", has_figures=False, code=1)
    assert out == ""
    assert message in err
    assert err[:-1].isprintable()


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
                "is not a jaxkv engine: none of the 1 lines",
            ),
            (
                http_server(lambda: (200, "up 1\n")),
                "is not a jaxkv engine: none of the 1 lines",
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
        terminal.wait_for("since start")
    terminal.wait_for("no answer for")
    assert f"nothing listens at 127.0.0.1:{port}" in terminal.frames[-1]
    assert "since start" in terminal.frames[-2], "the last figures stay"
    page["text"] = fresh
    with http_server(lambda: (200, page["text"]), port):
        terminal.wait_for("since restart")
        terminal.wait_for(" last ")
    assert terminal.end() == 130
    assert terminal.text.startswith("\x1b[?1049h")
    last = terminal.text.rpartition("\x1b[?1049l")[2]
    assert "since start" in last
    for frame in terminal.frames[:-1]:
        assert frame.count("\n") < 24
        assert "\x1b[2J" not in frame, "it would flicker"
