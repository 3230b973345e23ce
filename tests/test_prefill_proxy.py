"""The example of a proxy, between a client and two engines that note what they get."""

import contextlib
import http.server
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "prefill_proxy.py"
ANSWER = {"do_remote_prefill": True, "do_remote_decode": False}
BODY = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 8, "stream": True}


@contextlib.contextmanager
def engine(status, answer):
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            got.append((self.path, json.loads(self.rfile.read(length))))
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def proxy(prefill, decode):
    """Run the example; yield a function that posts to it."""
    words = ["--prefill", prefill, "--decode", f"{decode}/", "--port", "0"]
    child = subprocess.Popen(
        [sys.executable, "-W", "error", EXAMPLE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with child:
        url = child.stdout.readline().split()[0]

        def post(data, path="/v1/completions"):
            request = urllib.request.Request(url + path, data)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.headers["Content-Type"], answer.read()

        yield post
        child.terminate()


def test_a_prompt_goes_to_the_one_and_then_with_its_answer_to_the_other():
    first = json.dumps({"kv_transfer_params": ANSWER}).encode()
    with (
        engine(200, first) as (prefill, computed),
        engine(200, b"data: 1\n\ndata: 2\n\n") as (decode, decoded),
        proxy(prefill, decode) as post,
    ):
        data = json.dumps(BODY | {"stream_options": {"include_usage": True}}).encode()
        assert post(data) == ("text/event-stream", b"data: 1\n\ndata: 2\n\n")
        post(json.dumps({"max_completion_tokens": 9}).encode(), "/v1/chat/completions")
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    added = {"max_tokens": 1, "stream": False, "kv_transfer_params": transfer}
    assert computed[0] == ("/v1/completions", BODY | added)
    assert computed[1] == ("/v1/chat/completions", added | {"max_completion_tokens": 1})
    expected = BODY | {"stream_options": {"include_usage": True}}
    assert decoded[0] == ("/v1/completions", expected | {"kv_transfer_params": ANSWER})


def test_a_prefill_that_fails_costs_computing():
    for status, answer in ((None, b""), (500, b""), (200, b"not JSON")):
        with (
            engine(status or 200, answer) as (prefill, _),
            engine(200, b"answer") as (decode, decoded),
            proxy(prefill if status else "http://127.0.0.1:1", decode) as post,
        ):
            assert post(json.dumps(BODY).encode())[1] == b"answer"
        assert decoded == [("/v1/completions", BODY)]


def test_what_decode_refuses_is_what_the_client_is_told():
    with engine(200, b"{}") as (prefill, _), engine(404, b"no such model") as (url, _):
        with proxy(prefill, url) as post:
            with pytest.raises(urllib.error.HTTPError, match="404") as caught:
                post(json.dumps(BODY).encode())
            assert caught.value.read() == b"no such model"
            with pytest.raises(urllib.error.HTTPError, match="400"):
                post(b"not JSON")
        with (
            proxy(prefill, "http://127.0.0.1:1") as post,
            pytest.raises(urllib.error.HTTPError, match="502"),
        ):
            post(json.dumps(BODY).encode())
